// Rows with a time to live (cc/table/expiry.h).
#include <algorithm>
#include <map>
#include <set>

#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

TableOptions Expiring(const TableFixture& f, int64_t ttl, bool since_access,
                      TtlClock clock = TtlClock::kSteps) {
  TableOptions options = f.Options(2);
  options.ttl = ttl;
  options.ttl_clock = clock;
  options.ttl_since_access = since_access;
  options.stochastic_rounding = false;
  return options;
}

// A model of a table with a time to live, and random calls on both.
class ExpiryModel {
 public:
  ExpiryModel(TableFixture& f, const TableOptions& options, uint64_t seed)
      : t_(f.Create(options)), options_(options), random_(seed) {
    EXPECT_TRUE(t_->AttachState(t_.exec(), StateSpec{"one", {1}, {0.5f}}).ok());
  }

  void Run(size_t calls, size_t most_keys) {
    for (size_t c = 0; c < calls; ++c) {
      SCOPED_TRACE(c);
      Call(1 + random_.Below(most_keys));
      if (::testing::Test::HasFailure()) return;
      if (c % 16 == 15) Compare();
    }
    Compare();
  }
  const Subject& table() const { return t_; }

 private:
  struct Row {
    Floats vector;
    float state;
    int64_t updated, accessed;
  };

  Keys Choose(size_t n, bool distinct) {
    Keys keys;
    std::set<uint64_t> seen;
    while (keys.size() < n) {
      const uint64_t key = 1 + random_.Below(4 * n + 3) * (1 + random_.Below(3));
      if (!distinct || seen.insert(key).second) keys.push_back(key);
    }
    return keys;
  }
  Floats Vectors(size_t n) {
    Floats vectors(2 * n);
    for (float& x : vectors) x = random_.Value();
    return vectors;
  }
  static Floats At(const Floats& vectors, size_t i) { return {vectors[2 * i], vectors[2 * i + 1]}; }
  int64_t Used(const Row& row) const {
    return options_.ttl_since_access ? row.accessed : row.updated;
  }
  void DropExpired() {
    for (auto at = rows_.begin(); at != rows_.end();) {
      at = now_ - Used(at->second) >= options_.ttl ? rows_.erase(at) : std::next(at);
    }
  }
  // A batch that may insert begins.
  void Step() {
    if (options_.ttl_clock == TtlClock::kSteps) ++now_;
    DropExpired();
  }
  Row& Insert(uint64_t key) {
    const auto [at, is_new] = rows_.insert({key, {}});
    if (is_new) at->second = {TableFixture::InitialVectors(t_, {key}), 0.5f, now_, now_};
    at->second.accessed = now_;
    return at->second;
  }
  Floats Expected(const Keys& keys) {
    Floats all;
    for (const uint64_t key : keys) {
      const auto at = rows_.find(key);
      const Floats one =
          at == rows_.end() ? TableFixture::InitialVectors(t_, {key}) : at->second.vector;
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  void Call(size_t n) {
    switch (random_.Below(10)) {
      case 0:
      case 1: {
        const Keys keys = Choose(n, false);
        Step();
        for (const uint64_t key : keys) Insert(key);
        EXPECT_EQ(t_.LookupOrInsert(keys), Expected(keys));
        break;
      }
      case 2: {
        const Keys keys = Choose(n, false);
        for (const uint64_t key : keys) {
          const auto at = rows_.find(key);
          if (at != rows_.end()) at->second.accessed = now_;
        }
        EXPECT_EQ(t_.Lookup(keys), Expected(keys));
        break;
      }
      case 3: {
        const Keys keys = Choose(n, false);
        const Floats vectors = t_.Rounded(Vectors(n));
        Step();
        for (size_t i = 0; i < n; ++i) {
          Row& row = Insert(keys[i]);
          row.vector = At(vectors, i);
          row.updated = now_;
        }
        t_.Upsert(keys, vectors);
        break;
      }
      case 4: {
        const Keys keys = Choose(n, true);
        const Floats vectors = t_.Rounded(Vectors(n));
        const bool insert = random_.Below(2) == 0;
        if (insert) Step();
        for (size_t i = 0; i < n; ++i) {
          if (!insert && rows_.count(keys[i]) == 0) continue;
          Row& row = Insert(keys[i]);
          row = {At(vectors, i), static_cast<float>(i), now_, now_};
        }
        Floats state(n);
        for (size_t i = 0; i < n; ++i) state[i] = static_cast<float>(i);
        const Status status = t_.TryWriteRows(keys, vectors, state, insert);
        EXPECT_TRUE(status.ok()) << status.message();
        break;
      }
      case 5: {
        const Keys keys = Choose(n / 4 + 1, false);
        for (const uint64_t key : keys) rows_.erase(key);
        t_.Erase(keys);  // of expired rows, it removes the memory too
        break;
      }
      case 6: {
        t_.set_tick(t_.tick() + 1);
        uint64_t expired = 0;
        const uint64_t held = t_.size();
        ASSERT_TRUE(t_->Expire(t_.exec(), t_.tick(), &expired).ok());
        EXPECT_EQ(expired, held - rows_.size());
        EXPECT_EQ(t_.size(), rows_.size());
        break;
      }
      case 7: {
        if (options_.ttl_clock != TtlClock::kData) break;
        // Sometimes an earlier time, which changes nothing.
        const auto time = now_ + static_cast<int64_t>(random_.Below(5)) - 1;
        t_.set_tick(t_.tick() + 1);
        ASSERT_TRUE(t_->SetDataTime(time, t_.tick()).ok());
        if (!has_time_) {
          // Everything until now is as old as the first time.
          for (auto& [key, row] : rows_) row.updated = row.accessed = time;
          now_ = time;
        }
        has_time_ = true;
        now_ = std::max(now_, time);
        DropExpired();
        break;
      }
      case 8: {
        // A step of training, without a new step of the table between its lookup and its update.
        const Keys keys = Choose(n, true);
        Step();
        for (const uint64_t key : keys) Insert(key);
        const RowIds found = t_.FindOrInsert(keys);
        for (size_t i = 0; i < n; ++i) {
          Row& row = rows_[keys[i]];
          row.updated = now_;
          for (float& x : row.vector) x -= 1;
          row.vector = t_.Rounded(row.vector);
        }
        t_.Apply(Sgd(1, 2), keys, found, Floats(2 * n, 1.0f));
        break;
      }
      case 9: {
        const Keys keys = Choose(n, true);
        const std::vector<char> found = t_.Contains(keys);
        for (size_t i = 0; i < n; ++i) EXPECT_EQ(found[i] != 0, rows_.count(keys[i]) != 0);
        break;
      }
    }
  }
  void Compare() {
    t_.Check();
    std::map<uint64_t, Row> exported;
    for (const Exported& row : t_.Export()) {
      exported[row.key] = {row.vector, row.state[0], row.update, 0};
    }
    ASSERT_EQ(exported.size(), rows_.size());
    Keys keys;
    for (const auto& [key, row] : rows_) {
      keys.push_back(key);
      ASSERT_EQ(exported.count(key), 1u);
      EXPECT_EQ(exported[key].vector, row.vector);
      EXPECT_EQ(exported[key].state, row.state);
    }
    Floats state;
    const Floats vectors = t_.Read(keys, &state);
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(At(vectors, i), rows_[keys[i]].vector);
      EXPECT_EQ(state[i], rows_[keys[i]].state);
    }
    const TableStats s = t_.stats();
    EXPECT_EQ(s.size, s.inserts - s.erased - s.expired);
    EXPECT_GE(s.size, rows_.size());
    const std::vector<int64_t> scores = t_.Scores({keys.empty() ? 1 : keys[0], 1u << 30});
    EXPECT_EQ(scores[0] >= 0, !keys.empty() || rows_.count(1) != 0);
    EXPECT_EQ(scores[1], -1);
  }

  Subject t_;
  const TableOptions options_;
  Random random_;
  std::map<uint64_t, Row> rows_;
  int64_t now_ = 0;
  bool has_time_ = false;
};

TABLE_TEST(TableExpiry, RandomCallsMatchTheModel) {
  if (f.slowness() > 100) SKIP_UNDER_TSAN("too slow for an emulated warp");
  const size_t calls = Longer(f.Scaled(kSanitized ? 150 : 600, 24));
  const size_t most_keys = f.slowness() > 100 ? 12 : 60;
  for (const bool since_access : {false, true}) {
    for (const TtlClock clock : {TtlClock::kSteps, TtlClock::kData}) {
      SCOPED_TRACE(since_access);
      SCOPED_TRACE(static_cast<int>(clock));
      for (const int64_t ttl : {1, 3, 20}) {
        ExpiryModel model(f, Expiring(f, ttl, since_access, clock), 100 + ttl);
        model.Run(calls, most_keys);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// Batches remove expired rows, so that a stream of new keys does not fill the memory.
TABLE_TEST(TableExpiry, BatchesReclaimMemory) {
  if (f.slowness() > 100) GTEST_SKIP() << "too slow for an emulated warp";
  for (const bool since_access : {false, true}) {
    const size_t fresh = f.Scaled(256, 64);
    const size_t live = 40 * fresh;
    Subject t = f.Create(Expiring(f, 40, since_access));
    uint64_t most = 0;
    for (size_t step = 0; step < 400; ++step) {
      t.FindOrInsert(Scattered(1 + step * fresh, fresh));
      most = std::max(most, t.size());
    }
    EXPECT_GT(t.stats().expired, 300 * fresh);
    EXPECT_LT(most, live + live / 2 + 8192);
    EXPECT_EQ(t.Export().size(), live);
    t.Check();
  }
}

// A cut has the rows that have not expired, and the others are deletions.
TABLE_TEST(TableExpiry, CutsLeaveOutExpiredRows) {
  for (const bool since_access : {false, true}) {
    Subject t = f.Create(Expiring(f, 3, since_access));
    SavedRows saved(size_t{1} << 20);
    t.FindOrInsert({1, 2, 3});
    const Tick first = t.tick() + 1;
    t.set_tick(first);
    ASSERT_TRUE(t->BeginCut(t.exec(), first, 0, CutOf::kDelta, &saved, 0).ok());
    EXPECT_EQ(t->cut()->most_rows, 3u);
    t->EndCut();
    t.FindOrInsert({4});
    t.Upsert({2}, {1, 1});
    t.FindOrInsert({5});  // 1 and 3 expire
    EXPECT_EQ(t.CountContained({1, 3}), 0u);
    t.set_tick(t.tick() + 1);
    ASSERT_TRUE(t->BeginCut(t.exec(), t.tick(), first, CutOf::kDelta, &saved, 0).ok());
    EXPECT_EQ(t->cut()->deleted, (Keys{1, 3}));
    t->EndCut();
    EXPECT_EQ(t.size(), 3u);
    EXPECT_EQ(t.stats().expired, 2u);
    std::vector<Table::KeyState> states(2);
    t->Explain(t.exec(), t.Pack({1, 2}), states.data());
    EXPECT_EQ(states[0].lost_by, Removal::kExpire);
    EXPECT_TRUE(states[1].has_row);
    // A key that comes back is no deletion.
    const Tick second = t.tick();
    t.FindOrInsert({1});
    for (int step = 0; step < 3; ++step) t.FindOrInsert({});
    t.FindOrInsert({1, 2});
    t.set_tick(t.tick() + 1);
    ASSERT_TRUE(t->BeginCut(t.exec(), t.tick(), second, CutOf::kDelta, &saved, 0).ok());
    EXPECT_EQ(t->cut()->deleted, (Keys{4, 5}));
    t->EndCut();
  }
}

// Nothing expires in a table of at most ttl_min_rows rows.
TABLE_TEST(TableExpiry, SomeRowsStay) {
  for (const bool since_access : {false, true}) {
    TableOptions options = Expiring(f, 2, since_access);
    options.ttl_min_rows = 5;
    Subject t = f.Create(options);
    t.FindOrInsert({1, 2, 3, 4, 5});
    for (int step = 0; step < 4; ++step) t.FindOrInsert({});
    EXPECT_EQ(t.CountContained({1, 2, 3, 4, 5}), 5u);
    uint64_t expired = 77;
    t.set_tick(t.tick() + 1);
    ASSERT_TRUE(t->Expire(t.exec(), t.tick(), &expired).ok());
    EXPECT_EQ(expired, 0u);
    t.FindOrInsert({6, 7});  // 1 to 5 have expired
    t.set_tick(t.tick() + 1);
    ASSERT_TRUE(t->Expire(t.exec(), t.tick(), &expired).ok());
    EXPECT_EQ(expired, 2u);
    EXPECT_EQ(t.size(), 5u);
    EXPECT_EQ(t.CountContained({6, 7}), 2u);
    EXPECT_EQ(t.CountContained({1, 2, 3, 4, 5}), 3u);
  }
}

// A full table and a table that is shrunk first lose what has expired.
TABLE_TEST(TableExpiry, EvictToRemovesExpiredRowsFirst) {
  TableOptions options = Expiring(f, 2, false);
  options.evict_strategy = EvictStrategy::kScore;
  options.max_capacity = 8;
  Subject t = f.Create(options);
  t.FindOrInsert({1, 2, 3, 4});
  ASSERT_TRUE(t.SetScores({1, 2, 3, 4}, {9, 9, 9, 9}).ok());
  t.FindOrInsert({5, 6});
  t.FindOrInsert({7});
  uint64_t evicted = 77;
  t.set_tick(t.tick() + 1);
  ASSERT_TRUE(t->EvictTo(t.exec(), 3, t.tick(), &evicted).ok());
  EXPECT_EQ(evicted, 0u);
  EXPECT_EQ(t.stats().expired, 4u);
  EXPECT_EQ(t.CountContained({5, 6, 7}), 3u);
}

// Rows that expire are not among those that a batch evicts.
TABLE_TEST(TableExpiry, InsertAndEvictReturnsEvictedRowsOnly) {
  TableOptions options = Expiring(f, 2, false);
  options.max_capacity = 3;
  Subject t = f.Create(options);
  t.FindOrInsert({1});
  t.FindOrInsert({2});
  t.FindOrInsert({3});
  // 1 and 2 expire. 2 is not in the batch; a table may evict it before it is reclaimed.
  EvictedRows evicted(t->layout());
  RowIds rows(3);
  t.set_tick(t.tick() + 1);
  ASSERT_TRUE(t->InsertAndEvict(t.exec(), t.Pack({1, 5, 6}), t.tick(), rows.data(), &evicted).ok());
  t.Check();
  const TableStats s = t.stats();
  EXPECT_EQ(evicted.size(), s.evictions);
  EXPECT_GE(s.evictions, 1u);
  EXPECT_GE(s.expired, 1u);
  EXPECT_EQ(s.evictions + s.expired, 3u);
  EXPECT_EQ(t.CountContained({1, 5, 6}), 3u);
}

// Rows that expire all at once are removed over many batches, however many rows were inserted
// before.
TABLE_TEST(TableExpiry, RemovalIsSpreadOverBatches) {
  if (f.flat()) GTEST_SKIP() << "a device examines many rows at a time";
  if (f.cold()) GTEST_SKIP() << "memory does not hold the rows of a batch";
  constexpr size_t kExpiring = 40000, kBatch = 16384;
  Subject t = f.Create(Expiring(f, 10, false, TtlClock::kData));
  ASSERT_TRUE(t->SetDataTime(0, t.tick() + 1).ok());
  for (size_t i = 0; i < 4; ++i) t.FindOrInsert(Progression(1 + i * kExpiring / 4, kExpiring / 4));
  const Keys others = Progression(1 + kExpiring, kBatch);
  ASSERT_TRUE(t->SetDataTime(5, t.tick() + 1).ok());
  for (size_t i = 0; i < 2; ++i) t.FindOrInsert(others);
  ASSERT_TRUE(t->SetDataTime(10, t.tick() + 1).ok());
  uint64_t removed = 0;
  for (size_t batches = 0; removed < kExpiring; ++batches) {
    t.FindOrInsert(others);
    EXPECT_LE(t.stats().expired - removed, kBatch / 8);
    removed = t.stats().expired;
    ASSERT_LT(batches, 200u);
  }
  t.Check();
}

// A full table with many rows per new key does not examine all of them in a batch. It examines
// enough of them to evict none while many have expired.
TABLE_TEST(TableExpiry, ALargeFullTableReplacesExpiredRows) {
  if (f.flat()) GTEST_SKIP() << "a device examines rows less often";
  if (f.cold()) GTEST_SKIP() << "memory does not hold the rows of a batch";
  constexpr size_t kRows = 8192, kNew = 64;
  TableOptions options = Expiring(f, 10, false, TtlClock::kData);
  options.evict_strategy = EvictStrategy::kScore;
  options.max_capacity = kRows;
  Subject t = f.Create(options);
  ASSERT_TRUE(t->SetDataTime(0, t.tick() + 1).ok());
  const Keys all = Progression(1, kRows);
  t.FindOrInsert(all);
  // Half of the rows, scattered over the table, are updated. The others have the higher scores.
  Keys updated, others;
  for (const uint64_t key : all) (key % 2 == 0 ? updated : others).push_back(key);
  ASSERT_TRUE(t->SetDataTime(5, t.tick() + 1).ok());
  t.Upsert(updated, Floats(2 * updated.size(), 1.0f));
  ASSERT_TRUE(t.SetScores(others, std::vector<Score>(others.size(), 9)).ok());
  ASSERT_TRUE(t->SetDataTime(10, t.tick() + 1).ok());
  ASSERT_EQ(t.CountContained(others), 0u);
  ASSERT_EQ(t.size(), kRows);  // no memory was reclaimed
  Keys added = Progression(kRows + 1, others.size());
  for (size_t begin = 0; begin < added.size(); begin += kNew) {
    t.FindOrInsert(Keys(added.begin() + begin, added.begin() + begin + kNew));
  }
  EXPECT_EQ(t.stats().evictions, 0u);
  EXPECT_EQ(t.CountContained(updated), updated.size());
  EXPECT_EQ(t.CountContained(added), added.size());
  t.Check();
}

// Rows that a table loads with the marks of another are as old as they were there.
TABLE_TEST(TableExpiry, MarksTakeAgesToAnotherTable) {
  for (const bool since_access : {false, true}) {
    Subject t = f.Create(Expiring(f, 4, since_access));
    t.FindOrInsert({1});
    t.FindOrInsert({2});
    t.FindOrInsert({3});
    const std::vector<int64_t> marks = t->ExpiryMarks(t.tick());
    Subject other = f.Create(Expiring(f, 4, since_access));
    const std::vector<CutTime> times = {1, 2, 3};
    const PackedKeys packed = other.Pack({1, 2, 3});
    const std::vector<char> vectors = other.Encode(Floats(6, 1.0f));
    Table::LoadedRows rows;
    rows.keys = packed;
    rows.vectors = vectors.data();
    rows.updates = times.data();
    rows.scores = times.data();
    ASSERT_TRUE(other->LoadRows(other.exec(), rows, t.tick() + 1).ok());
    ASSERT_TRUE(other->SetExpiryMarks(marks).ok());
    Subject target = f.Create(Expiring(f, 4, since_access));
    target->SwapRows(&other.table(), t.tick());
    target.set_tick(t.tick() + 1);
    EXPECT_EQ(target.CountContained({1, 2, 3}), 3u);
    target.FindOrInsert({});
    EXPECT_EQ(target.CountContained({1, 2, 3}), 3u);
    for (size_t left = 3; left-- > 0;) {
      target.FindOrInsert({});
      EXPECT_EQ(target.CountContained({1, 2, 3}), left);
    }
    EXPECT_EQ(target->SetExpiryMarks({5, 4, 1}).code(), Code::kInvalidArgument);
    EXPECT_EQ(target->SetExpiryMarks({5, 6}).code(), Code::kInvalidArgument);
  }
}

TABLE_TEST(TableExpiry, BadOptions) {
  const auto refused = [&](auto field, auto value) {
    TableOptions options = Expiring(f, 4, false);
    options.*field = value;
    std::unique_ptr<Table> table;
    return f.Make(options, &table).code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused(&TableOptions::ttl, int64_t{-1}));
  EXPECT_TRUE(refused(&TableOptions::ttl, INT64_MAX));
  EXPECT_TRUE(refused(&TableOptions::ttl_min_rows, int64_t{-1}));
  TableOptions scores = Expiring(f, 4, true);
  scores.evict_strategy = EvictStrategy::kLfu;
  std::unique_ptr<Table> table;
  EXPECT_EQ(f.Make(scores, &table).code(), Code::kInvalidArgument);
  Subject t = f.Create(Expiring(f, 4, false));
  EXPECT_EQ(t->SetDataTime(5, 1).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
