// The contract suites of Table, for tables of which most rows are in files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cc/table/evicted_rows.h"
#include "tests/cc/file_table_kind.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kFileTables[] = {FileTable(KeyType::kInt64, DType::kFloat32, 2000),
                                 FileTable(KeyType::kInt32, DType::kBfloat16, 2000)};
INSTANTIATE_TABLE_SUITES(File, kFileTables);

// Topics whose batches fit a small memory, which most rows have left.
const TableKind kSmallFileTables[] = {FileTable(KeyType::kInt64, DType::kFloat32, 200),
                                      FileTable(KeyType::kInt32, DType::kBfloat16, 200)};
INSTANTIATE_TABLE_SUITE(SmallFile, TableExpiry, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableGradient, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableRandom, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableSelect, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableTime, kSmallFileTables);

// Row ids, evictions and losses are the same in whatever order reads end.
TEST(FileTableTest, TheOrderOfReadsChangesNothing) {
  struct Result {
    std::vector<RowId> rows;
    std::vector<uint64_t> keys, evicted;
    bool operator==(const Result& other) const {
      return rows == other.rows && keys == other.keys && evicted == other.evicted;
    }
  };
  const auto run = [](BlockReader::Options::Kind kind, bool from_last, int64_t max_capacity) {
    TableOptions options;
    options.name = "t";
    options.dim = 4;
    options.max_capacity = max_capacity;
    options.ttl = 40;
    FileOptions files = TestFiles();
    files.reader.kind = kind;
    files.reader.from_last = from_last;
    files.reader.depth = 8;
    std::unique_ptr<Table> table;
    EXPECT_TRUE(MakeFileTable(options, files, 400, &table).ok());
    table->Track(1);
    SerialExec exec;
    Random random(1);
    Result result;
    EvictedRows evicted(table->layout());
    for (Tick tick = 1; tick <= 200; ++tick) {
      std::vector<uint64_t> keys(150);
      for (uint64_t& key : keys) key = random.Below(3000);
      const KeySpan span(keys.data(), keys.size());
      std::vector<RowId> rows(keys.size());
      if (tick % 9 == 0) {
        EXPECT_TRUE(table->InsertAndEvict(exec, span, tick, rows.data(), &evicted).ok());
      } else if (tick % 5 == 0) {
        table->Find(exec, span, tick, rows.data());
      } else {
        EXPECT_TRUE(table->FindOrInsert(exec, span, tick, rows.data()).ok());
      }
      result.rows.insert(result.rows.end(), rows.begin(), rows.end());
    }
    for (int64_t cursor = 0; cursor >= 0;) {
      const ExportPlan plan =
          table->SelectRows(exec, static_cast<uint64_t>(cursor), 500, RowPredicate());
      std::vector<uint64_t> keys(plan.rows.size());
      table->Export(exec, plan, TickColumns::Keys(keys.data()));
      result.keys.insert(result.keys.end(), keys.begin(), keys.end());
      cursor = plan.next_cursor;
    }
    std::sort(result.keys.begin(), result.keys.end());
    const auto* const lost = static_cast<const uint64_t*>(evicted.Finish().keys);
    result.evicted.assign(lost, lost + evicted.size());
    EXPECT_GT(table->stats().cold.hits, 1000u);
    return result;
  };
  using Kind = BlockReader::Options::Kind;
  for (const int64_t max_capacity : {0, 1500}) {
    const Result expected = run(Kind::kThreads, false, max_capacity);
    EXPECT_TRUE(run(Kind::kThreads, true, max_capacity) == expected) << max_capacity;
    EXPECT_TRUE(run(Kind::kAuto, false, max_capacity) == expected) << max_capacity;
    EXPECT_EQ(expected.evicted.empty(), max_capacity == 0);
  }
}

TEST(FileTableTest, LookupsOfRowsInFilesAreHits) {
  TableOptions options;
  options.name = "t";
  options.dim = 4;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(MakeFileTable(options, TestFiles(), 100, &table).ok());
  SerialExec exec;
  uint64_t lookups = 0;
  for (Tick tick = 1; tick <= 60; ++tick) {
    std::vector<uint64_t> keys;
    for (uint64_t i = 0; i < 50; ++i) keys.push_back((tick * 50 + i) % 1000);
    keys.push_back(keys.front());  // each occurrence counts
    std::vector<RowId> rows(keys.size());
    const KeySpan span(KeyType::kInt64, keys.data(), keys.size());
    ASSERT_TRUE(table->FindOrInsert(exec, span, tick, rows.data()).ok());
    lookups += keys.size();
  }
  const TableStats stats = table->stats();
  EXPECT_GT(stats.cold.hits, 1000u);
  // A new key is a miss, at both of its occurrences.
  EXPECT_EQ(stats.misses, 1000u + 20u);
  EXPECT_EQ(stats.hits, lookups - stats.misses);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
