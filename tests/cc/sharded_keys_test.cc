// Ids that an upstream system has sharded by a hash are as good as any others, in every call.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/clock.h"
#include "cc/table/snapshot.h"
#include "cc/table/table.h"
#include "tests/cc/chosen_keys.h"

namespace dynemb {
namespace {

using testing_keys::IdsOfShard;
using testing_keys::kShardings;
using testing_keys::Sharding;

class ShardedKeys : public ::testing::TestWithParam<std::tuple<Sharding, int>> {};

// Checks that a dump of the table has every key once.
void ExpectDumped(Table* table, Clock* clock, std::vector<uint64_t> keys) {
  SerialExec exec;
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Snapshot::Begin(exec, {table}, {0}, CutOf::kRows, clock, &snapshot).ok());
  std::vector<uint64_t> dumped;
  for (;;) {
    Snapshot::Block block;
    ASSERT_TRUE(snapshot->Next(10000, &block).ok());
    if (block.n == 0) break;
    std::vector<uint64_t> read(block.n);
    ASSERT_TRUE(snapshot->Read(exec, &block, CutColumns::Keys(read.data())).ok());
    dumped.insert(dumped.end(), read.begin(), read.end());
  }
  std::sort(dumped.begin(), dumped.end());
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(dumped, keys);
}

void CheckCalls(const TableOptions& options, const std::vector<uint64_t>& keys) {
  ThreadsExec exec(2);
  Clock clock;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(options, &table).ok());
  std::vector<RowId> rows(keys.size()), found(keys.size());
  constexpr size_t kBatch = 4096;
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const size_t n = std::min(kBatch, keys.size() - begin);
    const Status status =
        table->FindOrInsert(exec, {&keys[begin], n}, clock.Next(), rows.data() + begin);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  table->CheckInvariants();
  EXPECT_EQ(table->size(), keys.size());
  table->Find(exec, {keys.data(), keys.size()}, clock.Next(), found.data());
  EXPECT_EQ(found, rows);
  // The number of slots per row is as for random keys, within the range of chance.
  const TableStats stats = table->stats();
  EXPECT_GT(static_cast<double>(stats.size), 0.4 * static_cast<double>(stats.slots));
  EXPECT_LT(static_cast<double>(stats.index_bytes), 32.0 * static_cast<double>(stats.size));
  ExpectDumped(table.get(), &clock, keys);
  EXPECT_EQ(table->Erase(exec, {keys.data(), keys.size() / 2}, clock.Next()), keys.size() / 2);
  table->CheckInvariants();
  ExpectDumped(table.get(), &clock,
               {keys.begin() + static_cast<int64_t>(keys.size() / 2), keys.end()});
}

TEST_P(ShardedKeys, InsertFindDumpErase) {
  const auto [sharding, bits] = GetParam();
  TableOptions options;
  options.name = "t";
  options.dim = 1;
  CheckCalls(options, IdsOfShard(sharding, bits, bits <= 10 ? 40000 : bits <= 13 ? 4000 : 1000));
}

INSTANTIATE_TEST_SUITE_P(All, ShardedKeys,
                         ::testing::Combine(::testing::ValuesIn(kShardings),
                                            ::testing::Range(1, 17)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_bits";
                         });

// The worst case: keys of one prefix, chosen with knowledge of the table's salt.
TEST(OnePrefix, InsertFindDumpErase) {
  TableOptions options;
  options.name = "t";
  options.dim = 1;
  CheckCalls(options, testing_keys::SamePrefix(Table::SaltOf(options), 0xDEADBEEF, 300000, false));
}

}  // namespace
}  // namespace dynemb
