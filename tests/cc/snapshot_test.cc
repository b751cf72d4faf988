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
  const auto& table = static_cast<HashTable<uint64_t>&>(t.table());
  const size_t stride = t->layout().stride;
  EXPECT_EQ(std::string(table.RowAt(rows[0]), stride), std::string(stride, '\0'));
  EXPECT_NE(std::string(table.RowAt(rows[1]), stride), std::string(stride, '\0'));
  EXPECT_EQ(t.size(), 9u);
  t.Check();
}

// Whether or not there was memory to save what a batch overwrites: what is read without an error
// is the whole cut.
TEST_F(SnapshotTest, ACutThatLostRowsIsNeverComplete) {
  size_t refused = 0;
  bool failed = true;
  for (int64_t k = 1; failed; ++k) {
    SCOPED_TRACE(k);
    Subject t = Make();
    Fill(&t, Progression(0, 1000), 1);
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
    const Snapshot::Piece first = Next(snapshot.get(), 10);
    EXPECT_EQ(first.n, 10u);
    const_cast<Snapshot::Piece&>(first).lock.unlock();
    const Keys keys = Progression(0, 1000);
    const Floats vectors(1000 * kDim, 2.0f);
    const Tick tick = clock_.Next();
    try {
      failing::WithFailure(k, &failed, [&] {
        EXPECT_TRUE(t->Upsert(exec_, keys.data(), keys.size(), vectors.data(), tick).ok());
      });
    } catch (const std::bad_alloc&) {
    }
    size_t rows = 0;
    for (;;) {
      Snapshot::Piece piece;
      const Status status = snapshot->Next(300, &piece);
      if (!status.ok()) {
        EXPECT_EQ(status.code(), Code::kResourceExhausted);
        EXPECT_FALSE(snapshot->Next(300, &piece).ok()) << "and so for ever";
        EXPECT_EQ(piece.n, 0u);
        ++refused;
        break;
      }
      if (piece.n == 0) {
        EXPECT_EQ(rows, 1000u) << "incomplete";
        break;
      }
      rows += piece.n;
      Floats read(piece.n * kDim);
      ASSERT_TRUE(
          snapshot->Read(exec_, &piece, nullptr, read.data(), nullptr, nullptr, nullptr).ok());
      ASSERT_EQ(read, Floats(read.size(), 1.0f));
    }
    snapshot.reset();
    ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
    EXPECT_EQ(ReadAll(snapshot.get(), exec_, 1)[0].size(), 1000u);
  }
  EXPECT_GE(refused, 2u);
}

// No cut is left of a snapshot that did not begin, and no other's is ended.
TEST_F(SnapshotTest, WithoutMemoryNoCutIsLeft) {
  Subject a = Make(), b = Make(), c = Make();
  for (Subject* t : {&a, &b, &c}) Fill(t, Progression(0, 100), 1);
  std::unique_ptr<Snapshot> snapshot, other;
  int64_t failures = 0;
  for (bool failed = true; failed;) {
    const std::vector<Table*> tables = {&a.table(), &b.table(), &c.table()};
    Status status;
    try {
      failing::WithFailure(++failures, &failed, [&] {
        status = Begin(tables, {0, 0, 0}, true, &snapshot);
      });
    } catch (const std::bad_alloc&) {
    }
    if (!failed) break;
    if (snapshot != nullptr) snapshot.reset();  // it began all the same
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
  ASSERT_TRUE(Begin({&c.table()}, {0}, false, &other).ok());
  EXPECT_FALSE(Begin({&a.table(), &b.table(), &c.table()}, {0, 0, 0}, true, &snapshot).ok());
  EXPECT_EQ(a->cut(), nullptr);
  EXPECT_NE(c->cut(), nullptr);
  EXPECT_EQ(ReadAll(other.get(), exec_, 1)[0].size(), 100u);
}

// Also of a piece of saved rows.
TEST_F(SnapshotTest, APieceOfSavedRowsComesAgainUnlessItIsRead) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
  Fill(&t, Progression(0, 100), 2);
  EXPECT_EQ(Next(snapshot.get(), 30).n, 30u);
  EXPECT_EQ(Next(snapshot.get(), 40).n, 40u);
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 1)[0].size(), 100u);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
