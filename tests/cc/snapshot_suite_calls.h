// The calls of Snapshot, one by one.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_SUITE_CALLS_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_SUITE_CALLS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/snapshot_model.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {
namespace {

class SnapshotTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
  Subject Make(Kind kind = kPlain) {
    Subject t = MakeSubject(kind, &exec_);
    EXPECT_TRUE(t->AttachState(exec_, SpecOf(kind.state)).ok());
    return t;
  }
  // A batch with the clock's next tick.
  Tick Fill(Subject* t, const Keys& keys, float value) {
    t->set_tick(clock_.Next() - 1);
    t->Upsert(keys, Floats(keys.size() * kDim, value));
    return t->tick();
  }
  size_t Erase(Subject* t, const Keys& keys) {
    t->set_tick(clock_.Next() - 1);
    return t->Erase(keys);
  }
  Status Begin(const std::vector<Table*>& tables, const std::vector<Tick>& since, CutOf of,
               std::unique_ptr<Snapshot>* snapshot) {
    return Snapshot::Begin(exec_, tables, since, of, &clock_, snapshot);
  }
  // Begins and ends a snapshot without reading it; returns its watermark.
  Tick Cut(Subject* t) {
    std::unique_ptr<Snapshot> snapshot;
    EXPECT_TRUE(Begin({&t->table()}, {0}, CutOf::kRows, &snapshot).ok());
    return snapshot == nullptr ? 0 : snapshot->watermark();
  }
  SerialExec exec_;
  Clock clock_;
};

TEST_F(SnapshotTest, EmptyTableAndNoTable) {
  Subject t = Make();
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kDelta, &snapshot).ok());
  EXPECT_EQ(snapshot->most_rows(0), 0u);
  EXPECT_TRUE(snapshot->deleted(0).empty());
  EXPECT_EQ(Next(snapshot.get(), 10).n, 0u);
  EXPECT_EQ(Next(snapshot.get(), 10).n, 0u);
  snapshot.reset();
  ASSERT_TRUE(Begin({}, {}, CutOf::kDelta, &snapshot).ok());
  EXPECT_EQ(Next(snapshot.get(), 10).n, 0u);
}

TEST_F(SnapshotTest, LaterRowsAreNotInTheCut) {
  Subject t = Make();
  Fill(&t, Progression(0, 10), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
  Erase(&t, Progression(0, 5));
  Fill(&t, Progression(100, 500), 2);  // some reuse the erased rows
  Erase(&t, Progression(100, 500));
  const Delivery got = ReadAll(snapshot.get(), exec_, 1)[0];
  EXPECT_EQ(got.size(), 10u);
  for (uint64_t key = 0; key < 10; ++key) {
    ASSERT_EQ(got.count(key), 1u);
    EXPECT_EQ(got.at(key).held.vector.substr(0, 4), std::string("\0\0\x80\x3f", 4));
  }
}

// Blocks of saved rows are no larger than other blocks.
TEST_F(SnapshotTest, BlocksAreAtMostTheLimit) {
  Subject t = Make();
  Fill(&t, Progression(0, 1000), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
  size_t rows = 0, largest = 0;
  for (size_t i = 0;; ++i) {
    if (i == 3) Fill(&t, Progression(0, 1000), 2);
    Snapshot::Block block = Next(snapshot.get(), 7);
    if (block.n == 0) break;
    largest = std::max(largest, block.n);
    rows += block.n;
    ASSERT_TRUE(snapshot->Read(exec_, &block, CutColumns()).ok());
  }
  EXPECT_EQ(rows, 1000u);
  EXPECT_LE(largest, 7u);
}

TEST_F(SnapshotTest, NullSkipsAColumn) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  for (int which = 0; which < 5; ++which) {
    for (bool saved : {false, true}) {
      std::unique_ptr<Snapshot> snapshot;
      ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
      if (saved) Fill(&t, Progression(0, 100), 1);
      size_t rows = 0;
      for (;;) {
        Snapshot::Block block = Next(snapshot.get(), 1000);
        if (block.n == 0) break;
        Keys keys(block.n);
        Floats vectors(block.n * kDim), state(block.n * kDim);
        std::vector<CutTime> updates(block.n), accesses(block.n);
        ASSERT_TRUE(
            snapshot
                ->Read(exec_, &block,
                       {which == 0 ? keys.data() : nullptr, which == 1 ? vectors.data() : nullptr,
                        which == 2 ? state.data() : nullptr, which == 3 ? updates.data() : nullptr,
                        which == 4 ? accesses.data() : nullptr})
                .ok());
        for (size_t i = 0; i < block.n; ++i) {
          if (which == 0) {
            EXPECT_LT(keys[i], 100u);
          }
          EXPECT_EQ(vectors[i * kDim], which == 1 ? 1.0f : 0.0f);
          EXPECT_EQ(state[i * kDim], which == 2 ? 0.5f : 0.0f);
          EXPECT_EQ(updates[i] != 0, which == 3);
          EXPECT_EQ(accesses[i] != 0, which == 4);
        }
        rows += block.n;
      }
      EXPECT_EQ(rows, 100u);
    }
  }
}

// A block that is destroyed unread unlocks the table, and its rows are returned again.
TEST_F(SnapshotTest, BlockDroppedUnread) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kRows, &snapshot).ok());
  {
    const Snapshot::Block block = Next(snapshot.get(), 30);
    EXPECT_EQ(block.n, 30u);
    EXPECT_FALSE(t->mutex().try_lock());
  }
  ASSERT_TRUE(t->mutex().try_lock());
  t->mutex().unlock();
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 1)[0].size(), 100u);
}

TEST_F(SnapshotTest, TableIsInOneSnapshotAtATime) {
  Subject a = Make(), b = Make(), c = Make();
  for (Subject* t : {&a, &b, &c}) Fill(t, Progression(0, 10), 1);
  std::unique_ptr<Snapshot> first, second;
  ASSERT_TRUE(Begin({&a.table(), &b.table()}, {0, 0}, CutOf::kRows, &first).ok());
  const Status status = Begin({&c.table(), &b.table()}, {0, 0}, CutOf::kRows, &second);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("plain"), std::string::npos) << status.message();
  EXPECT_EQ(second, nullptr);
  EXPECT_EQ(c->cut(), nullptr);
  EXPECT_NE(b->cut(), nullptr);
  for (Subject* t : {&a, &b, &c}) {
    ASSERT_TRUE(t->table().mutex().try_lock());
    t->table().mutex().unlock();
  }
  // The first snapshot is not affected.
  Fill(&b, Progression(0, 20), 2);
  const std::vector<Delivery> got = ReadAll(first.get(), exec_, 2);
  EXPECT_EQ(got[0].size(), 10u);
  EXPECT_EQ(got[1].size(), 10u);
  first.reset();
  EXPECT_EQ(a->cut(), nullptr);
  EXPECT_EQ(b->cut(), nullptr);
  ASSERT_TRUE(Begin({&c.table(), &b.table()}, {0, 0}, CutOf::kRows, &second).ok());
  EXPECT_EQ(ReadAll(second.get(), exec_, 2)[1].size(), 20u);
  second.reset();
  // The same table twice.
  EXPECT_EQ(Begin({&a.table(), &a.table()}, {0, 0}, CutOf::kRows, &second).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(a->cut(), nullptr);
}

TEST_F(SnapshotTest, ForgottenDeletions) {
  Subject a = Make(), b = Make();
  Fill(&a, Progression(0, 10), 1);
  Fill(&b, Progression(0, 10), 1);
  EXPECT_EQ(Erase(&b, {3}), 1u);  // before changes were tracked
  const Tick erased = clock_.last();
  std::unique_ptr<Snapshot> snapshot;
  const Status status = Begin({&a.table(), &b.table()}, {0, erased - 1}, CutOf::kDelta, &snapshot);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(snapshot, nullptr);
  EXPECT_EQ(a->cut(), nullptr);
  EXPECT_EQ(b->cut(), nullptr);
  // It succeeds without deleted keys, and with the deleted keys since a tick after which they are
  // known.
  ASSERT_TRUE(Begin({&a.table(), &b.table()}, {0, 0}, CutOf::kRows, &snapshot).ok());
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 2)[1].size(), 9u);
  const Tick watermark = snapshot->watermark();
  snapshot.reset();
  Erase(&b, {4, 4, 77});
  Erase(&a, {5});
  Fill(&a, {5}, 3);
  ASSERT_TRUE(Begin({&b.table(), &a.table()}, {watermark, 0}, CutOf::kDelta, &snapshot).ok());
  EXPECT_EQ(snapshot->deleted(0), (std::vector<uint64_t>{4}));
  EXPECT_TRUE(snapshot->deleted(1).empty());
}

// A million deletions are remembered. If there are more, the oldest are forgotten, and a cut that
// needs them is refused.
TEST_F(SnapshotTest, MoreDeletionsThanAreRemembered) {
  SKIP_UNDER_TSAN("which deletions are remembered does not depend on threads");
  Kind kind = kPlain;
  kind.key_type = KeyType::kInt32;
  kind.dtype = DType::kFloat16;
  kind.state = 0;
  Subject t = Make(kind);
  const Tick base = Cut(&t);
  constexpr size_t kBatch = 100000;
  std::vector<Tick> ticks;
  for (size_t i = 0; i < 12; ++i) {
    t.set_tick(clock_.Next() - 1);
    t.FindOrInsert(Progression(i * kBatch, kBatch));
    t.set_tick(clock_.Next() - 1);
    EXPECT_EQ(t.Erase(Progression(i * kBatch, kBatch)), kBatch);
    ticks.push_back(t.tick());
  }
  std::unique_ptr<Snapshot> snapshot;
  EXPECT_EQ(Begin({&t.table()}, {base}, CutOf::kDelta, &snapshot).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(t->cut(), nullptr);
  ASSERT_TRUE(Begin({&t.table()}, {ticks[2]}, CutOf::kDelta, &snapshot).ok());
  EXPECT_EQ(snapshot->deleted(0).size(), 9 * kBatch);
  EXPECT_EQ(snapshot->deleted(0).front(), 3 * kBatch);
  EXPECT_EQ(Next(snapshot.get(), 1).n, 0u);
}

// Rows that were only looked up. Scores that are not times do not say which ones were.
TEST_F(SnapshotTest, UsedRows) {
  for (EvictStrategy strategy :
       {EvictStrategy::kLru, EvictStrategy::kEpochLru, EvictStrategy::kNone, EvictStrategy::kLfu,
        EvictStrategy::kEpochLfu, EvictStrategy::kScore}) {
    SCOPED_TRACE(static_cast<int>(strategy));
    Kind kind = kPlain;
    kind.max_capacity = 2000;
    kind.evict = strategy;
    Subject t = Make(kind);
    Fill(&t, Progression(0, 1000), 1);
    const Tick before = Cut(&t);
    Fill(&t, {7}, 2);
    Erase(&t, {8});
    const Tick watermark = Cut(&t);
    t.set_tick(clock_.Next() - 1);
    t.Find(Progression(100, 20));
    t.set_tick(clock_.Next() - 1);
    t.FindOrInsert({5, 2000});
    const auto keys_since = [&](Tick since, CutOf of) {
      std::unique_ptr<Snapshot> snapshot;
      EXPECT_TRUE(Begin({&t.table()}, {since}, of, &snapshot).ok());
      const Delivery got = ReadAll(snapshot.get(), exec_, 7)[0];
      std::set<uint64_t> keys;
      for (const auto& row : got) keys.insert(row.first);
      EXPECT_LE(keys.size(), snapshot->most_rows(0));
      EXPECT_EQ(snapshot->deleted(0),
                since == before ? std::vector<uint64_t>{8} : std::vector<uint64_t>());
      return keys;
    };
    const bool by_time = Scoring(strategy, 0).by_time();
    const auto all = keys_since(0, CutOf::kRows);
    EXPECT_EQ(all.size(), 1000u);
    std::set<uint64_t> used{5, 2000};
    for (uint64_t key : Progression(100, 20)) used.insert(key);
    EXPECT_EQ(keys_since(watermark, CutOf::kDelta), (std::set<uint64_t>{2000}));
    EXPECT_EQ(keys_since(watermark, CutOf::kDeltaAndUsed), by_time ? used : all);
    used.insert(7);
    EXPECT_EQ(keys_since(before, CutOf::kDeltaAndUsed), by_time ? used : all);
  }
}

// A table that was cleared, and then freed the memory of its rows, has no rows to read.
TEST_F(SnapshotTest, ClearedThenOtherState) {
  Subject t = Make();
  Fill(&t, Progression(0, 100000), 1);
  const Tick watermark = Cut(&t);
  t.set_tick(clock_.Next() - 1);
  ASSERT_TRUE(t.Clear().ok());
  ASSERT_TRUE(t->AttachState(exec_, SpecOf(2)).ok());
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {watermark}, CutOf::kDelta, &snapshot).ok());
  EXPECT_EQ(snapshot->deleted(0).size(), 100000u);
  EXPECT_EQ(Next(snapshot.get(), 1000).n, 0u);
}

// The same, if rows of another table are swapped in while the cut runs.
TEST_F(SnapshotTest, ClearedThenSwapped) {
  Subject t = Make(), other = Make();
  Fill(&t, Progression(0, 1000), 1);
  const Tick watermark = Cut(&t);
  t.set_tick(clock_.Next() - 1);
  ASSERT_TRUE(t.Clear().ok());
  Fill(&other, Progression(5000, 1000), 2);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {watermark}, CutOf::kDelta, &snapshot).ok());
  t->SwapRows(&other.table(), clock_.Next());
  EXPECT_EQ(Next(snapshot.get(), 1000).n, 0u);
}

TEST_F(SnapshotTest, LoadedWithoutStateStartsWithTheInitialState) {
  Subject t = Make();
  t.set_tick(clock_.Next() - 1);
  ASSERT_TRUE(t.TryWriteRows({1}, Floats(kDim, 2.0f), Floats(kDim, 9.0f), true).ok());
  const Keys keys{1, 2};
  const Floats vectors(2 * kDim, 4.0f);
  const std::vector<CutTime> times{1, 1};
  Table::LoadedRows rows;
  rows.keys = {keys.data(), keys.size()};
  rows.vectors = vectors.data();
  rows.updates = rows.scores = times.data();
  ASSERT_TRUE(t->LoadRows(exec_, rows, clock_.Next()).ok());
  Floats state;
  EXPECT_EQ(t.Read(keys, &state), vectors);
  EXPECT_EQ(state, Floats(2 * kDim, 0.5f));
}

// A batch with many keys of one segment evicts rows of the whole table.
TEST_F(SnapshotTest, EvictedFromOtherSegments) {
  Kind kind = kPlain;
  kind.max_capacity = 4000;
  Subject t = Make(kind);
  const Keys old = Scattered(1, 4000);
  Fill(&t, old, 1);
  std::unique_ptr<Snapshot> first, second;
  ASSERT_TRUE(Begin({&t.table()}, {0}, CutOf::kDelta, &first).ok());
  Fill(&t, SamePrefix(Table::SaltOf(t->options()), 0x12345678, 370, false), 2);
  t.Check();
  std::set<uint64_t> gone;
  const std::vector<char> found = t.Contains(old);
  for (size_t i = 0; i < old.size(); ++i) {
    if (!found[i]) gone.insert(old[i]);
  }
  EXPECT_EQ(gone.size(), 370u);
  const Delivery got = ReadAll(first.get(), exec_, 1)[0];
  EXPECT_EQ(got.size(), 4000u);
  for (uint64_t key : old) {
    ASSERT_EQ(got.count(key), 1u);
    EXPECT_EQ(got.at(key).held.vector.substr(0, 4), std::string("\0\0\x80\x3f", 4));
  }
  const Tick watermark = first->watermark();
  first.reset();
  ASSERT_TRUE(Begin({&t.table()}, {watermark}, CutOf::kDelta, &second).ok());
  const std::vector<uint64_t>& deleted = second->deleted(0);
  EXPECT_EQ(std::set<uint64_t>(deleted.begin(), deleted.end()), gone);
  EXPECT_EQ(ReadAll(second.get(), exec_, 1)[0].size(), 370u);
}

// Ticks that are billions of batches apart: the base of stamps moves, between cuts and during a
// cut.
TEST_F(SnapshotTest, TicksThatDoNotFitAStamp) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  Tick since = Cut(&t);
  for (int i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    clock_.Advance(clock_.last() + 0xB0000000u + static_cast<Tick>(i) * 0x10000000u, 0);
    const Tick changed = Fill(&t, Progression(0, 10), 2);
    Erase(&t, {static_cast<uint64_t>(50 + i)});
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(Begin({&t.table()}, {since}, CutOf::kDelta, &snapshot).ok());
    EXPECT_EQ(snapshot->deleted(0), (std::vector<uint64_t>{static_cast<uint64_t>(50 + i)}));
    const Image image = Rows(t);
    // In every second round, the base moves while the cut is read; times may then be later.
    if (i % 2 != 0) {
      clock_.Advance(clock_.last() + 0xC0000000u, 0);
      Fill(&t, Progression(5, 10), 7);
    }
    const Tick watermark = snapshot->watermark();
    const Delivery got = ReadAll(snapshot.get(), exec_, 1)[0];
    for (uint64_t key = 0; key < 10; ++key) ASSERT_EQ(got.count(key), 1u) << key;
    for (const auto& row : got) {
      const Held& want = image.at(row.first);
      EXPECT_EQ(row.second.held.vector, want.vector);
      EXPECT_EQ(row.second.held.state, want.state);
      EXPECT_GE(row.second.held.update, want.update);
      EXPECT_LE(row.second.held.update, watermark);
      EXPECT_LE(row.second.access, watermark);
      if (row.first < 5 && i % 2 == 0) {
        EXPECT_EQ(row.second.held.update, changed);
      }
    }
    since = watermark;
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_SUITE_CALLS_H_
