// A table with few rows in memory, on the host or on a device, equals one in host memory that gets
// the same random calls.
#include "tests/cc/file_table_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/bags.h"
#include "cc/lookup/lookups.h"
#include "cc/table/clock.h"
#include "cc/table/cold_table.h"
#include "cc/table/snapshot.h"
#include "tests/cc/file_table_cases.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {

void FileTableModelTest::Reopen() {
  const std::string folder = folder_ / ("flush-" + std::to_string(flushes_++));
  ASSERT_EQ(FileSystem::Posix().MakeDirectory(folder), 0);
  tick_ += static_cast<Tick>(jump());
  const Tick tick = tick_++;  // no other call has it
  const Status flushed = tables_[1]->Flush(exec_, folder, tick, 17);
  ASSERT_TRUE(flushed.ok()) << flushed.message();
  // The table continues, too; a snapshot has its address.
  if (tables_[1]->cut() != nullptr || random_.Below(3) == 0) return;
  const StateSpec spec = tables_[1]->state_spec();
  // The flushed table may still be there, or not. A flush is the same wherever the table is.
  std::unique_ptr<Table> made[2];
  Make(on_device() && random_.Below(4) != 0, &made);
  if (random_.Below(2) == 0) tables_[1].reset();
  std::swap(tables_[1], made[1]);
  FlushInfo info;
  const Status restored = tables_[1]->Restore(exec_, folder, &info);
  ASSERT_TRUE(restored.ok()) << restored.message();
  ASSERT_TRUE(info.state_spec == spec);
  ASSERT_EQ(info.tick, tick);
  ASSERT_EQ(info.utc_ns, 17);
  testing_files::RemoveAll(folder);
}

void FileTableModelTest::ApplyStep() {
  const Batch keys = Keys(100, true);
  const std::vector<float> gradients = Values(keys.n * kDim);
  const bool by_row = random_.Below(2) == 0;
  std::vector<RowId> rows[2];
  if (by_row) {
    for (std::vector<RowId>& found : rows) found.resize(keys.n);
    for (int t = 0; t < 2; ++t) tables_[t]->Find(exec_, keys.span, tick_, rows[t].data());
    // Other lookups of the step may move the rows to files.
    for (int i = 0; i < 3; ++i) {
      const Batch others = Keys(200, true);
      Both("other lookups", [&](Table& table, int) {
        std::vector<RowId> other(others.n);
        table.Find(exec_, others.span, tick_, other.data());
        return Status();
      });
    }
    if (random_.Below(2) == 0) tick_ += static_cast<Tick>(jump());  // a step is no access
  }
  const OptimizerStep step = AdamStep(of(), ++iteration_);
  const StateSpec spec = AdamState(step, kDim);
  Both("Apply", [&](Table& table, int t) {
    Status status = table.AttachState(exec_, spec);
    if (!status.ok()) return status;
    ApplyTask task;
    task.table = &table;
    task.keys = keys.span.data();
    task.rows = by_row ? rows[t].data() : nullptr;
    task.gradients = gradients.data();
    task.n = keys.n;
    task.distinct = true;
    return LookupsOf(table).Apply(exec_, {task}, step, tick_);
  });
}

// Two tasks on a table, of which each moves rows.
void FileTableModelTest::PoolStep() {
  const bool insert = random_.Below(2) == 0;
  const Batch keys[2] = {Keys(140, false), Keys(140, false)};
  std::string pooled[2][2];
  std::vector<RowId> rows[2];
  Both(insert ? "Pool, insert" : "Pool", [&](Table& table, int t) {
    std::vector<PoolTask> tasks(2);
    Bags bags[2];
    for (int f = 0; f < 2; ++f) {
      const auto n = static_cast<int64_t>(keys[f].n);
      DYNEMB_RETURN_IF_ERROR(bags[f].InitUniform(1, n, n));
      pooled[t][f].resize(keys[f].n * table.layout().vector_bytes());
      rows[f].resize(keys[f].n);
      tasks[f].table = &table;
      tasks[f].keys = keys[f].span.data();
      tasks[f].bags = &bags[f];
      tasks[f].pooled = pooled[t][f].data();
      tasks[f].rows = rows[f].data();
    }
    return LookupsOf(table).Pool(exec_, tasks, tick_, insert);
  });
  for (int f = 0; f < 2; ++f) ASSERT_TRUE(pooled[0][f] == pooled[1][f]) << f;
}

void FileTableModelTest::Step() {
  const Batch keys = Keys(150, false);
  const Batch distinct = Keys(150, true);
  tick_ += random_.Below(2) == 0 ? static_cast<Tick>(jump()) : 0;
  if (jump() > 1) ++tick_;
  if (jump() > 1 && on_device()) {
    // The tables sweep in different ways. Without a batch that writes, calls that only read could
    // come to the end of one window, and not of the other.
    for (const auto& table : tables_) table->BeginBatch(exec_, tick_, 0);
  }
  if (random_.Below(2) == 0) tables_[1]->ReadAhead(exec_, keys.span);
  switch (random_.Below(23)) {
    case 0:
    case 1:
    case 2:
      Both("FindOrInsert", [&](Table& table, int) {
        std::vector<RowId> rows(keys.n);
        return table.FindOrInsert(exec_, keys.span, tick_, rows.data());
      });
      break;
    case 3:
    case 4:
    case 5: {
      std::string vectors[2];
      Both("LookupOrInsert", [&](Table& table, int t) {
        std::vector<RowId> rows(keys.n);
        vectors[t].resize(keys.n * table.layout().vector_bytes());
        return table.LookupOrInsert(exec_, keys.span, tick_, vectors[t].data(), rows.data());
      });
      ASSERT_TRUE(vectors[0] == vectors[1]);
      break;
    }
    case 6: {
      std::string vectors[2];
      Both("Lookup", [&](Table& table, int t) {
        std::vector<RowId> rows(keys.n);
        vectors[t].resize(keys.n * table.layout().vector_bytes());
        table.Lookup(exec_, keys.span, tick_, nullptr, vectors[t].data(), rows.data());
        return Status();
      });
      ASSERT_TRUE(vectors[0] == vectors[1]);
      break;
    }
    case 7: {
      std::string vectors(keys.n * tables_[0]->layout().vector_bytes(), '\0');
      for (char& byte : vectors) byte = static_cast<char>(random_.Below(60));
      Both("Upsert", [&](Table& table, int) {
        return table.Upsert(exec_, keys.span, vectors.data(), tick_);
      });
      break;
    }
    case 8: {
      const std::vector<float> deltas = Values(distinct.n * kDim);
      Both("Accumulate", [&](Table& table, int) {
        return table.Accumulate(exec_, distinct.span, deltas.data(), tick_);
      });
      break;
    }
    case 9: {
      const std::vector<float> vectors = Values(distinct.n * kDim);
      std::vector<float> state(distinct.n * static_cast<size_t>(width()) + 1, 0.25f);
      const bool insert = random_.Below(2) == 0;
      Both("WriteRows", [&](Table& table, int) {
        return table.WriteRows(exec_, distinct.span, vectors.data(), state.data(), insert, tick_,
                               tick_);
      });
      break;
    }
    case 10:
    case 11:
      ApplyStep();
      break;
    case 12: {
      const Removal how = random_.Below(2) == 0 ? Removal::kWipe : Removal::kErase;
      size_t erased[2];
      Both("Erase", [&](Table& table, int t) {
        erased[t] = table.Erase(exec_, keys.span, tick_, how);
        return Status();
      });
      // Rows that have expired count, and the tables remove them in different orders.
      ASSERT_TRUE(of().ttl != 0 || erased[0] == erased[1]);
      break;
    }
    case 13: {
      std::vector<Score> scores(keys.n);
      for (Score& score : scores) score = static_cast<Score>(random_.Below(500));
      Both("SetScores",
           [&](Table& table, int) { return table.SetScores(exec_, keys.span, scores.data()); });
      break;
    }
    case 14: {
      std::vector<uint32_t> counts(keys.n);
      for (uint32_t& count : counts) count = static_cast<uint32_t>(random_.Below(5));
      Both("AddCounts",
           [&](Table& table, int) { return table.AddCounts(exec_, keys.span, counts.data()); });
      break;
    }
    case 15:
      Both("AdvanceEpoch", [&](Table& table, int) { return table.AdvanceEpoch(exec_); });
      break;
    case 16: {
      uint64_t expired[2];
      Both("Expire", [&](Table& table, int t) { return table.Expire(exec_, tick_, &expired[t]); });
      ASSERT_EQ(tables_[0]->size(), tables_[1]->size());
      break;
    }
    case 17:
      if (random_.Below(10) == 0) {
        Both("Clear", [&](Table& table, int) { return table.Clear(exec_, tick_); });
      } else if (random_.Below(5) == 0) {
        const StateSpec spec{"other", {static_cast<int64_t>(random_.Below(2 * kDim)) + 1}, {0.25f}};
        Both("AttachState", [&](Table& table, int) { return table.AttachState(exec_, spec); });
      } else if (random_.Below(4) == 0) {
        std::unique_ptr<Table> others[2];
        Make(&LookupsOf(*tables_[1]) == &device_lookups_, &others);
        for (int t = 0; t < 2; ++t) tables_[t]->SwapRows(others[t].get(), tick_);
        for (int t = 0; t < 2; ++t) others[t]->CheckInvariants();
        if (random_.Below(3) != 0) {
          for (int t = 0; t < 2; ++t) tables_[t]->SwapRows(others[t].get(), tick_);
        }
      }
      break;
    case 18:
      Both("CompactFiles", [&](Table& table, int t) {
        return t == 0 ? Status() : static_cast<ColdTable&>(table).CompactFiles();
      });
      break;
    case 19:
    case 20:
      PoolStep();
      break;
    case 21:
      Reopen();
      break;
    default:
      if (random_.Below(4) == 0) {
        Both("ResetState", [&](Table& t, int) { return t.ResetState(exec_, t.state_spec()); });
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FileTableModelTest,
                         ::testing::Combine(::testing::ValuesIn(kCases), ::testing::Bool()),
                         [](const auto& test) {
                           return std::get<0>(test.param).name +
                                  (std::get<1>(test.param) ? "OnDevice" : "");
                         });

TEST_P(FileTableModelTest, EqualsATableInMemory) {
  const size_t steps = Longer(kSanitized ? 60 : 150);
  uint64_t most_cold = 0;
  for (size_t step = 0; step < steps; ++step) {
    SCOPED_TRACE(step);
    ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_NO_FATAL_FAILURE(ExpectEqual());
    ASSERT_FALSE(HasFailure());
    most_cold = std::max(most_cold, tables_[1]->stats().cold.rows);
  }
  EXPECT_GT(most_cold, 0u);
}

// A snapshot has the rows of its watermark, whatever calls come while it is read.
TEST_P(FileTableModelTest, SnapshotsAmongRandomCalls) {
  for (size_t round = 0; round < Longer(kSanitized ? 2 : 6); ++round) {
    SCOPED_TRACE(round);
    for (int i = 0; i < 15; ++i) ASSERT_NO_FATAL_FAILURE(Step());
    Clock clock;
    clock.Advance(tick_, 0);
    Table& table = *tables_[1];
    uint64_t expired;  // as BeginCut does:
    ASSERT_TRUE(table.Expire(exec_, tick_ + 1, &expired).ok());
    const auto expected = Contents(table, RowPredicate());
    std::map<uint64_t, std::pair<std::string, std::string>> got;
    std::unique_ptr<Snapshot> snapshot;
    const Status begun = Snapshot::Begin(exec_, {&table}, {0}, CutOf::kRows, &clock, &snapshot);
    ASSERT_TRUE(begun.ok()) << begun.message();
    tick_ = snapshot->watermark() + 1;
    const RowLayout l = snapshot->layout(0);
    for (int step = 0;; ++step) {
      if (step < 20) {
        ASSERT_NO_FATAL_FAILURE(Step());
      }
      Snapshot::Block block;
      const Status next = snapshot->Next(random_.Below(150) + 1, &block);
      ASSERT_TRUE(next.ok()) << next.message();
      const size_t n = block.n;
      if (n == 0 && step >= 20) break;
      if (n == 0) continue;
      std::vector<uint64_t> wide(n);
      std::vector<uint32_t> narrow(n);
      std::string vectors(n * l.vector_bytes(), '\0'), state(n * l.state_bytes() + 1, '\0');
      const bool is_wide = l.key_size == 8;
      void* const keys = is_wide ? static_cast<void*>(wide.data()) : narrow.data();
      const Status read = snapshot->Read(
          exec_, &block,
          {keys, vectors.data(), reinterpret_cast<float*>(state.data()), nullptr, nullptr});
      ASSERT_TRUE(read.ok()) << read.message();
      for (size_t i = 0; i < n; ++i) {
        const uint64_t key = is_wide ? wide[i] : narrow[i];
        const bool is_new = got.insert({key,
                                        {vectors.substr(i * l.vector_bytes(), l.vector_bytes()),
                                         state.substr(i * l.state_bytes(), l.state_bytes())}})
                                .second;
        ASSERT_TRUE(is_new) << key << " twice";
      }
    }
    ASSERT_EQ(got.size(), expected.size());
    for (const auto& [key, row] : expected) {
      ASSERT_EQ(got.count(key), 1u) << key;
      ASSERT_TRUE(got[key].first == std::get<0>(row)) << key;
      ASSERT_TRUE(got[key].second == std::get<1>(row)) << key;
    }
  }
}

}  // namespace testing_table
}  // namespace dynemb
