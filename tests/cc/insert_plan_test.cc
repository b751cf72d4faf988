// InsertPlan, compared with a model: a std::map over the batch.
#include "cc/table/insert_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cc/table/bucket_ops.h"
#include "cc/table/lanes.h"
#include "cc/table/table.h"
#include "tests/cc/rows_are_keys.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

// An index of several segments, holding keys 0..n-1.
void Fill(Index* index, uint32_t n) {
  SerialExec exec;
  ASSERT_TRUE(index->Init(1, 0.85, /*salt=*/0).ok());
  std::vector<uint64_t> hashes(n);
  std::vector<uint32_t> segment_of(n);
  for (uint32_t i = 0; i < n; ++i) {
    hashes[i] = MixKey(i);
    segment_of[i] = index->SegmentOf(hashes[i]);
  }
  const OwnedItems owned = OwnersOf(exec, *index, segment_of.data(), n);
  ASSERT_TRUE(index->Grow(exec, hashes.data(), n, RowsAreKeys(), owned, segment_of.data()).ok());
  OneLane lane;
  for (uint32_t i = 0; i < n; ++i) {
    Claim(lane, index->SegmentBuckets(segment_of[i]), MakeProbe(hashes[i]), i, 1);
  }
}

struct Batch {
  std::vector<uint64_t> keys;
  std::vector<RowId> rows;  // kNoRow: needs one
};

Batch RandomBatch(size_t n, uint64_t distinct, double missing, uint64_t seed) {
  std::mt19937_64 random(seed);
  Batch batch;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = 1'000'000 + random() % distinct;
    batch.keys.push_back(key);
    // Whether a key has a row is the same at all its positions.
    const bool none = static_cast<double>(MixKey(key * 31) % 1000) < missing * 1000;
    batch.rows.push_back(none ? kNoRow : static_cast<RowId>(i));
  }
  return batch;
}

void Check(const InsertPlan& plan, const Batch& batch, const Index& index) {
  std::map<uint64_t, uint32_t> first;  // by key
  std::vector<uint32_t> order;
  std::vector<std::pair<uint32_t, uint32_t>> repeats;
  for (uint32_t i = 0; i < batch.keys.size(); ++i) {
    if (batch.rows[i] != kNoRow) continue;
    const auto [at, fresh] = first.emplace(batch.keys[i], i);
    if (fresh) {
      order.push_back(i);
    } else {
      repeats.emplace_back(i, at->second);
    }
  }
  ASSERT_EQ(plan.size(), order.size());
  for (size_t j = 0; j < order.size(); ++j) {
    EXPECT_EQ(plan.positions[j], order[j]);
    EXPECT_EQ(plan.hashes[j], MixKey(batch.keys[order[j]]));
    EXPECT_EQ(plan.segment_of[j], index.SegmentOf(plan.hashes[j]));
  }
  ASSERT_EQ(plan.repeats().size(), repeats.size());
  for (size_t r = 0; r < repeats.size(); ++r) {
    EXPECT_EQ(plan.repeats()[r].position, repeats[r].first);
    EXPECT_EQ(plan.repeats()[r].first, repeats[r].second);
  }
}

// Every key of [begin, end) is passed once. The keys of a segment are passed in order, by one
// thread.
void CheckOwners(Exec& exec, const InsertPlan& plan, size_t begin, size_t end) {
  std::mutex mutex;
  std::map<uint32_t, std::vector<size_t>> by_segment;
  std::map<uint32_t, std::set<std::thread::id>> threads;
  std::set<size_t> announced;
  plan.ForWorkers(
      exec, begin, end,
      [&](size_t j) {
        std::lock_guard<std::mutex> lock(mutex);
        announced.insert(j);
      },
      [&](size_t j) {
        std::lock_guard<std::mutex> lock(mutex);
        by_segment[plan.segment_of[j]].push_back(j);
        threads[plan.segment_of[j]].insert(std::this_thread::get_id());
      });
  std::set<size_t> seen;
  for (const auto& [segment, keys] : by_segment) {
    EXPECT_TRUE(std::is_sorted(keys.begin(), keys.end())) << "segment " << segment;
    EXPECT_EQ(threads[segment].size(), 1u);
    seen.insert(keys.begin(), keys.end());
  }
  EXPECT_EQ(seen.size(), end - begin);
  if (begin < end) {
    EXPECT_EQ(*seen.begin(), begin);
    EXPECT_EQ(*seen.rbegin(), end - 1);
  }
  for (size_t j : announced) EXPECT_LT(j, plan.size());
}

TEST(InsertPlanTest, AgreesWithTheModel) {
  Index index;
  Fill(&index, 20000);
  ASSERT_GT(index.segments(), 20u);
  InsertPlan plan;  // reused: a batch must not affect the next one
  uint64_t seed = 0;
  for (size_t threads : {1, 2, 3, 5}) {
    ThreadsExec exec(threads);
    for (size_t n : {0, 1, 2, 100, 2047, 5000, 30000}) {
      for (uint64_t distinct : {uint64_t{1}, uint64_t{n / 3 + 1}, uint64_t{1} << 60}) {
        for (double missing : {0.0, 0.3, 1.0}) {
          SCOPED_TRACE(testing::Message() << threads << " threads, " << n << " keys of " << distinct
                                          << ", missing " << missing);
          const Batch batch = RandomBatch(n, distinct, missing, ++seed);
          // The keys without rows are listed, with others, or not.
          std::vector<uint32_t> listed;
          for (uint32_t i = 0; i < n; ++i) {
            if (batch.rows[i] == kNoRow || i % 5 == 0) listed.push_back(i);
          }
          plan.Build(exec, batch.keys.data(), batch.rows.data(), n, index, &listed);
          Check(plan, batch, index);
          plan.Build(exec, batch.keys.data(), batch.rows.data(), n, index);
          Check(plan, batch, index);
          CheckOwners(exec, plan, 0, plan.size());
          CheckOwners(exec, plan, plan.size() / 3, plan.size() - plan.size() / 4);
        }
      }
    }
  }
}

// Hashes that agree in their low bits, which determine the first slot in the set of a worker.
TEST(InsertPlanTest, RepeatsAmongHashesThatAgreeInLowBits) {
  Index index;
  Fill(&index, 3000);
  ThreadsExec exec(2);
  Batch batch;
  for (uint64_t i = 0; i < 200000; ++i) {
    const uint64_t hash = (i % 150000) << 20 | 0xABCDE;
    batch.keys.push_back(testing_table::UnmixKey(hash));
    batch.rows.push_back(kNoRow);
  }
  InsertPlan plan;
  plan.Build(exec, batch.keys.data(), batch.rows.data(), batch.keys.size(), index);
  EXPECT_EQ(plan.size(), 150000u);
  Check(plan, batch, index);
}

TEST(InsertPlanTest, BuildHeldPlansForTheOtherKeys) {
  Index index;
  Fill(&index, 3000);
  ThreadsExec exec(2);
  const Batch batch = RandomBatch(9000, 4000, 0.4, 7);
  InsertPlan plan;
  plan.Reserve(exec, batch.keys.size());
  plan.BuildHeld(exec, batch.keys.data(), batch.rows.data(), batch.keys.size(), index);
  Batch other = batch;
  for (RowId& row : other.rows) row = row == kNoRow ? 0 : kNoRow;
  Check(plan, other, index);
  for (size_t j = 0; j < plan.size(); ++j) {
    ASSERT_EQ(plan.rows[j], batch.rows[plan.positions[j]]);
  }
}

TEST(InsertPlanTest, ShrinkFreesLargeArrays) {
  SKIP_UNDER_TSAN("a test of memory: other tests run the same code");
  Index index;
  Fill(&index, 3000);
  ThreadsExec exec(2);
  InsertPlan plan;
  const Batch batch = RandomBatch(9000, 4000, 1.0, 7);
  plan.Build(exec, batch.keys.data(), batch.rows.data(), batch.keys.size(), index);
  const Batch huge = RandomBatch((16u << 20) / 8 + 1, uint64_t{1} << 60, 1.0, 8);
  plan.Build(exec, huge.keys.data(), huge.rows.data(), huge.keys.size(), index);
  plan.Shrink();
  EXPECT_EQ(plan.hashes.get(), nullptr);
  EXPECT_NE(plan.segment_of.get(), nullptr);  // half as large
  plan.Build(exec, batch.keys.data(), batch.rows.data(), batch.keys.size(), index);
  Check(plan, batch, index);
}

TEST(InsertPlanTest, BatchesOfTooManyKeysAreRefused) {
  constexpr size_t kTooMany = InsertPlan::kMaxKeys + 1;
  TableOptions options;
  options.dim = 4;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(options, &table).ok());
  SerialExec exec;
  const KeySpan keys(KeyType::kInt64, nullptr, kTooMany);
  for (const Status& status :
       {table->FindOrInsert(exec, keys, 1, nullptr),
        table->LookupOrInsert(exec, keys, 1, nullptr, nullptr),
        table->Upsert(exec, keys, nullptr, 1), table->Accumulate(exec, keys, nullptr, 1),
        table->WriteRows(exec, keys, nullptr, nullptr, true, 1, 1)}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(table->size(), 0u);
}

}  // namespace
}  // namespace dynemb
