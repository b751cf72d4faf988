// Snapshots of tables in the host's memory.
#include "tests/cc/failing_allocations.h"
#include "tests/cc/snapshot_suite.h"

namespace dynemb {
namespace testing_table {

Status MakeTable(const TableOptions& options, std::unique_ptr<Table>* table) {
  return Table::Create(options, table);
}

std::string MissingTable() { return ""; }

namespace {

// If only a few of many rows belong to a cut, a call examines only a range of them, so that the
// lock is not held for long.
TEST_F(SnapshotTest, PlanCutExaminesFewRows) {
  Subject t = Make();
  Fill(&t, Progression(0, 5000), 1);
  const Tick since = clock_.last();
  Fill(&t, Progression(4990, 2), 2);
  for (int i = 0; i < 3; ++i) Cut(&t);  // the sets of updated rows do not reach back that far
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {since}, CutOf::kRows, &snapshot).ok());
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
  t->Erase(exec_, t.Pack({4}), clock_.Next(), Removal::kWipe);
  const auto& table = static_cast<HashTable<uint64_t>&>(t.table());
  const size_t stride = t->layout().stride;
  EXPECT_EQ(std::string(table.RowAt(rows[0]), stride), std::string(stride, '\0'));
  EXPECT_NE(std::string(table.RowAt(rows[1]), stride), std::string(stride, '\0'));
  EXPECT_EQ(t.size(), 9u);
  t.Check();
}

// Whether or not memory to save overwritten rows runs out, the rows that are read without an error
// are the whole cut.
TEST_F(SnapshotTest, CutThatLostRowsIsNeverComplete) {
  size_t refused = 0;
  bool failed = true;
  for (int64_t k = 1; failed; ++k) {
    SCOPED_TRACE(k);
    Subject t = Make();
    Fill(&t, Progression(0, 1000), 1);
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
    const Snapshot::Block first = Next(snapshot.get(), 10);
    EXPECT_EQ(first.n, 10u);
    const_cast<Snapshot::Block&>(first).lock.unlock();
    const Keys keys = Progression(0, 1000);
    const Floats vectors(1000 * kDim, 2.0f);
    const Tick tick = clock_.Next();
    try {
      failing::WithFailure(k, &failed, [&] {
        EXPECT_TRUE(t->Upsert(exec_, {keys.data(), keys.size()}, vectors.data(), tick).ok());
      });
    } catch (const std::bad_alloc&) {
    }
    size_t rows = 0;
    for (;;) {
      Snapshot::Block block;
      const Status status = snapshot->Next(300, &block);
      if (!status.ok()) {
        EXPECT_EQ(status.code(), Code::kResourceExhausted);
        EXPECT_FALSE(snapshot->Next(300, &block).ok()) << "a later call";
        EXPECT_EQ(block.n, 0u);
        ++refused;
        break;
      }
      if (block.n == 0) {
        EXPECT_EQ(rows, 1000u) << "incomplete";
        break;
      }
      rows += block.n;
      Floats read(block.n * kDim);
      ASSERT_TRUE(
          snapshot->Read(exec_, &block, {nullptr, read.data(), nullptr, nullptr, nullptr}).ok());
      ASSERT_EQ(read, Floats(read.size(), 1.0f));
    }
    snapshot.reset();
    ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
    EXPECT_EQ(ReadAll(snapshot.get(), exec_, 1)[0].size(), 1000u);
  }
  EXPECT_GE(refused, 2u);
}

// A snapshot that fails to begin leaves no cut, and does not end the cut of another snapshot.
TEST_F(SnapshotTest, FailedBeginLeavesNoCut) {
  // Table b notes its cuts (catch_up.h), which takes memory.
  Subject a = Make(), b = MakeSubject(kPlain, &exec_), c = Make();
  ASSERT_TRUE(b->AttachState(exec_, {"adagrad catch_up", {kDim, 1}, {0.1f, 0.0f}}).ok());
  for (Subject* t : {&a, &b, &c}) Fill(t, Progression(0, 100), 1);
  std::unique_ptr<Snapshot> snapshot, other;
  int64_t failures = 0;
  for (bool failed = true; failed;) {
    const std::vector<Table*> tables = {&a.table(), &b.table(), &c.table()};
    Status status;
    try {
      failing::WithFailure(++failures, &failed, [&] {
        status = Begin(tables, {0, 0, 0}, CutOf::kDelta, &snapshot);
      });
    } catch (const std::bad_alloc&) {
    }
    if (!failed) break;
    if (snapshot != nullptr) snapshot.reset();  // it began despite the failure
    for (Table* table : tables) {
      ASSERT_EQ(table->cut(), nullptr) << failures;
      ASSERT_TRUE(table->mutex().try_lock());
      table->mutex().unlock();
    }
  }
  EXPECT_GT(failures, 10);
  ASSERT_NE(snapshot, nullptr);
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 3)[2].size(), 100u);
  snapshot.reset();
  ASSERT_TRUE(Begin({&c.table()}, {0}, CutOf::kRows, &other).ok());
  EXPECT_FALSE(
      Begin({&a.table(), &b.table(), &c.table()}, {0, 0, 0}, CutOf::kDelta, &snapshot).ok());
  EXPECT_EQ(a->cut(), nullptr);
  EXPECT_NE(c->cut(), nullptr);
  EXPECT_EQ(ReadAll(other.get(), exec_, 1)[0].size(), 100u);
}

// As BlockDroppedUnread, for blocks of saved rows.
TEST_F(SnapshotTest, BlockOfSavedRowsDroppedUnread) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
  Fill(&t, Progression(0, 100), 2);
  EXPECT_EQ(Next(snapshot.get(), 30).n, 30u);
  EXPECT_EQ(Next(snapshot.get(), 40).n, 40u);
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 1)[0].size(), 100u);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
