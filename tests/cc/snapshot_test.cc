// Snapshots of tables in the host's memory.
#include "tests/cc/snapshot_suite.h"

namespace dynemb {
namespace testing_table {

Status MakeTable(const TableOptions& options, std::unique_ptr<Table>* table) {
  return Table::Create(options, table);
}

std::string MissingTable() { return ""; }

namespace {

// Where few of many rows belong to a cut, the lock is given back between stretches of them.
TEST_F(SnapshotTest, ACallLooksAtFewRows) {
  Subject t = Make();
  Fill(&t, Progression(0, 5000), 1);
  const Tick since = clock_.last();
  Fill(&t, Progression(4990, 2), 2);
  for (int i = 0; i < 3; ++i) Cut(&t);  // the sets of updated rows do not reach back so far
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {since}, false, &snapshot).ok());
  EXPECT_EQ(snapshot->most_rows(0), 5000u);
  int calls = 0;
  for (; t.table().PlanCut(10).empty(); ++calls) ASSERT_FALSE(t.table().CutIsRead());
  EXPECT_GT(calls, 4990 / 100);
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 10)[0].size(), 2u);
  EXPECT_TRUE(t.table().CutIsRead());
}

TEST_F(SnapshotTest, WipedRowsAreZeros) {
  Subject t = Make();
  Fill(&t, Progression(1, 10), 3);
  const RowIds rows = t.Find({4, 5});
  t->Erase(exec_, t.Pack({4}).data(), 1, clock_.Next(), true);
  const auto& table = static_cast<HashTable<uint64_t, OneLane>&>(t.table());
  const size_t stride = t->layout().stride;
  EXPECT_EQ(std::string(table.RowAt(rows[0]), stride), std::string(stride, '\0'));
  EXPECT_NE(std::string(table.RowAt(rows[1]), stride), std::string(stride, '\0'));
  EXPECT_EQ(t.size(), 9u);
  t.Check();
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
