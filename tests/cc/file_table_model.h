// FileTableModelTest: a table with few rows in memory, on the host or on a device, and one in host
// memory that gets the same random calls. For file_table_model_test.cc.
#ifndef DYNEMB_TESTS_CC_FILE_TABLE_MODEL_H_
#define DYNEMB_TESTS_CC_FILE_TABLE_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cc/device/device_lookups.h"
#include "cc/file/file_rows.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/lookups.h"
#include "cc/table/clock.h"
#include "cc/table/cold_table.h"
#include "cc/table/optimizer.h"
#include "cc/table/snapshot.h"
#include "tests/cc/device_file_kind.h"
#include "tests/cc/file_table_cases.h"
#include "tests/cc/file_table_kind.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace testing_table {

constexpr int64_t kDim = 5;
constexpr uint64_t kHot = 300, kKeys = 3000;

// Vector, state, tick of the last update, score.
using Row = std::tuple<std::string, std::string, int64_t, int64_t>;

// The case, and whether the table is on a device.
class FileTableModelTest : public ::testing::TestWithParam<std::tuple<Case, bool>> {
 protected:
  const Case& of() const { return std::get<0>(GetParam()); }
  bool on_device() const { return std::get<1>(GetParam()); }

  void SetUp() override {
    const Case& c = of();
    options_.name = "t";
    options_.key_type = c.key_type;
    options_.dtype = c.dtype;
    options_.dim = kDim;
    options_.evict_strategy = c.strategy;
    options_.ttl = c.ttl;
    options_.ttl_since_access = c.since_access;
    options_.epoch_steps = c.epoch_steps;
    if (c.admits_second) {
      options_.admission.rule = Admit::kFrequency;
      options_.admission.times = 2;
      options_.admission.lines = options_.admission.num_lines = 512;
    }
    options_.initializer = {ColumnInit{InitKind::kUniform, -1.0f, 1.0f}};
    files_.folder = folder_ / "files";
    files_.segment_bytes = 4 * kBlockBytes;
    files_.compact_in_background = false;
    Make(on_device(), &tables_);
  }

  void Make(bool with_device, std::unique_ptr<Table> (*tables)[2]) {
    ASSERT_TRUE(Table::Create(options_, &(*tables)[0]).ok());
    // Memory for kHot rows with state.
    constexpr int64_t kWidth = 2 * kDim + 1;
    const RowLayout layout(SizeOf(options_.key_type), options_.dtype, kDim, kWidth);
    const Status made =
        with_device ? MakeDeviceFileTable(options_, files_, kHot / 3, kHot - kHot / 3, kWidth,
                                          &device_, &(*tables)[1])
                    : CreateFileTable(options_, files_, kHot * layout.stride, &(*tables)[1]);
    ASSERT_TRUE(made.ok()) << made.message();
  }
  Lookups& LookupsOf(Table& table) {
    const bool is_there = dynamic_cast<DeviceTable<ThreadsDevice>*>(&table) != nullptr;
    return is_there ? device_lookups_ : HostLookups();
  }

  // Keys of the table's type. Few of them are frequent.
  struct Batch {
    std::vector<uint64_t> wide;
    std::vector<uint32_t> narrow;
    KeySpan span;
    size_t n = 0;
  };
  Batch Keys(size_t most, bool distinct) {
    Batch batch;
    std::map<uint64_t, bool> seen;
    const size_t n = random_.Below(most) + 1;
    while (batch.wide.size() < n) {
      const uint64_t below = random_.Below(3) == 0 ? kKeys : 250;
      const uint64_t key = MixKey(random_.Below(below)) >> 33;
      if (distinct && !seen.insert({key, true}).second) continue;
      batch.wide.push_back(key);
      batch.narrow.push_back(static_cast<uint32_t>(key));
    }
    batch.n = n;
    batch.span = options_.key_type == KeyType::kInt64 ? KeySpan(batch.wide.data(), n)
                                                      : KeySpan(batch.narrow.data(), n);
    return batch;
  }
  std::vector<float> Values(size_t n) {
    std::vector<float> values(n);
    for (float& value : values) {
      value = static_cast<float>(random_.Below(1000)) / 512.0f - 1.0f;
    }
    return values;
  }
  int64_t width() const { return tables_[0]->layout().state_width; }

  std::map<uint64_t, Row> Contents(const Table& table, const RowPredicate& where) {
    std::map<uint64_t, Row> rows;
    const RowLayout& l = table.layout();
    for (int64_t cursor = 0; cursor >= 0;) {
      const ExportPlan plan =
          table.SelectRows(exec_, static_cast<uint64_t>(cursor), random_.Below(200) + 1, where);
      const size_t n = plan.rows.size();
      std::vector<uint64_t> wide(n);
      std::vector<uint32_t> narrow(n);
      std::string vectors(n * l.vector_bytes(), '\0');
      std::vector<float> state(n * static_cast<size_t>(l.state_width) + 1);
      std::vector<int64_t> updates(n), scores(n);
      const bool is_wide = l.key_size == 8;
      void* const keys = is_wide ? static_cast<void*>(wide.data()) : narrow.data();
      table.Export(exec_, plan,
                   {keys, vectors.data(), state.data(), updates.data(), scores.data()});
      for (size_t i = 0; i < n; ++i) {
        const uint64_t key = is_wide ? wide[i] : narrow[i];
        const auto* of_row = reinterpret_cast<const char*>(state.data()) + i * l.state_bytes();
        const Row row{vectors.substr(i * l.vector_bytes(), l.vector_bytes()),
                      std::string(of_row, l.state_bytes()), Known(updates[i]), Known(scores[i])};
        EXPECT_TRUE(rows.insert({key, row}).second) << key << " twice";
      }
      cursor = plan.next_cursor;
    }
    return rows;
  }

  void ExpectEqual() {
    RowPredicate where;
    if (random_.Below(4) == 0 && jump() == 1) {
      where.updated_after = tick_ - std::min<Tick>(tick_ - 1, random_.Below(10) * jump());
    }
    where.has_norms = random_.Below(4) == 0;
    where.norm_from = 1.0;
    const auto expected = Contents(*tables_[0], where), got = Contents(*tables_[1], where);
    ASSERT_EQ(expected.size(), got.size());
    auto at = got.begin();
    for (const auto& [key, row] : expected) {
      ASSERT_EQ(at->first, key);
      ASSERT_EQ(std::get<2>(at->second), std::get<2>(row)) << "update of " << key;
      ASSERT_EQ(std::get<3>(at->second), std::get<3>(row)) << "score of " << key;
      ASSERT_TRUE(std::get<0>(at->second) == std::get<0>(row)) << "vector of " << key;
      ASSERT_TRUE(std::get<1>(at->second) == std::get<1>(row)) << "state of " << key;
      ++at;
    }
    for (const auto& table : tables_) table->CheckInvariants();
    ASSERT_TRUE(tables_[1]->Error().ok());
    const Batch keys = Keys(100, false);
    std::vector<int64_t> scores[2];
    std::vector<float> vectors[2], state[2];
    std::string found[2];
    for (int t = 0; t < 2; ++t) {
      scores[t].resize(keys.n);
      vectors[t].resize(keys.n * kDim);
      state[t].resize(keys.n * static_cast<size_t>(width()) + 1);
      found[t].resize(2 * keys.n);
      auto* const flags = reinterpret_cast<bool*>(found[t].data());
      tables_[t]->Scores(exec_, keys.span, scores[t].data());
      tables_[t]->Contains(exec_, keys.span, flags);
      tables_[t]->ReadRows(exec_, keys.span, vectors[t].data(), state[t].data(), flags + keys.n);
    }
    for (size_t i = 0; i < keys.n; ++i) ASSERT_EQ(Known(scores[0][i]), Known(scores[1][i]));
    ASSERT_EQ(memcmp(vectors[0].data(), vectors[1].data(), vectors[0].size() * sizeof(float)), 0);
    ASSERT_EQ(memcmp(state[0].data(), state[1].data(), state[0].size() * sizeof(float)), 0);
    ASSERT_TRUE(found[0] == found[1]);
  }

  // Sweeps replace old times by a later one, in different orders.
  int64_t Known(int64_t time) const {
    const auto tick = static_cast<int64_t>(tick_);
    return jump() == 1 ? time : std::max(time, tick - (int64_t{1} << 31));
  }
  int64_t jump() const { return of().tick_jump; }

  // fn(table, t) on both.
  template <class Fn>
  void Both(const char* call, const Fn& fn) {
    SCOPED_TRACE(call);
    const Status status[2] = {fn(*tables_[0], 0), fn(*tables_[1], 1)};
    ASSERT_EQ(status[0].ok(), status[1].ok()) << status[0].message() << status[1].message();
    const Status error = tables_[1]->Error();
    ASSERT_TRUE(error.ok()) << error.message();
  }

  // Flushes the table with files, and continues with another one that is restored from the flush.
  void Reopen();
  void Step();
  void ApplyStep();
  void PoolStep();

  testing_files::Folder folder_;
  TableOptions options_;
  FileOptions files_;
  ThreadsDevice device_;
  DeviceLookups<ThreadsDevice> device_lookups_{&device_};
  std::unique_ptr<Table> tables_[2];
  SerialExec exec_;
  Random random_{20};
  Tick tick_ = 1;
  uint64_t iteration_ = 0;
  int flushes_ = 0;
};

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FILE_TABLE_MODEL_H_
