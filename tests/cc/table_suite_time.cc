// Ticks: last access, last update, incremental export, and the limits of 32-bit stamps.
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

// An export since the tick before a call has exactly the rows that the call updates. An export
// since the tick of the call has none.
TABLE_TEST(TableTime, ExportHasExactlyTheUpdatedRows) {
  Subject t = f.Create(f.Options(1));
  const RowOptimizer sgd(OptimizerKind::kSgd, {}, Hyper(), 1);
  const auto updated = [&](const Keys& want, const char* call) {
    EXPECT_EQ(t.ExportedKeys(t.tick() - 1), want) << call;
    EXPECT_EQ(t.ExportedKeys(t.tick()), Keys{}) << call;
    for (const Exported& row : t.Export(t.tick() - 1)) {
      EXPECT_EQ(static_cast<Tick>(row.update), t.tick()) << call;
    }
  };
  t.FindOrInsert({1, 2, 3});  // tick 1
  updated({1, 2, 3}, "FindOrInsert");
  t.FindOrInsert({3, 4});
  updated({4}, "FindOrInsert: found keys are only accessed");
  t.LookupOrInsert({4, 5});
  updated({5}, "LookupOrInsert");
  const RowIds rows = t.Find({1, 2});
  updated({}, "Find");
  t.Lookup({1, 2, 9});
  updated({}, "Lookup");
  t.Upsert({1, 6}, {1, 2});
  updated({1, 6}, "Upsert");
  EXPECT_TRUE(t.TryAccumulate({2, 7}, {1, 2}).ok());
  updated({2, 7}, "Accumulate");
  EXPECT_TRUE(t.TryWriteRows({3, 8}, {1, 2}, {}, false).ok());
  updated({3}, "WriteRows");
  EXPECT_TRUE(t.TryWriteRows({3, 8}, {1, 2}, {}, true).ok());
  updated({3, 8}, "WriteRows, insert");
  t.Apply(sgd, {1, 2}, rows, {0, 0});
  updated({1, 2}, "ApplyRange");
  EXPECT_EQ(t.ExportedKeys(1), (Keys{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(t.ExportedKeys(0), (Keys{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(t.ExportedKeys(t.tick() + 1000), Keys{});
  t.Erase({1, 5});
  EXPECT_EQ(t.ExportedKeys(0), (Keys{2, 3, 4, 6, 7, 8}));
  t.Check();
}

TABLE_TEST(TableTime, ExportWithALimitIsComplete) {
  Subject t = f.Create(f.Options(1));
  const Keys keys = Scattered(1, f.Scaled(2000, 40));
  t.FindOrInsert(keys);
  const Tick middle = t.tick();
  t.Erase(Keys(keys.begin(), keys.begin() + 20));
  t.FindOrInsert(Scattered(100000, f.Scaled(500, 20)));
  for (const Tick since : {Tick{0}, middle}) {
    const std::vector<Exported> whole = t.Export(since);
    EXPECT_EQ(whole.size(), since == 0 ? t.size() : f.Scaled(500, 20));
    for (const uint64_t limit : {1ull, 2ull, 7ull, 64ull, 100000ull}) {
      EXPECT_TRUE(t.Export(since, limit) == whole) << limit;
    }
  }
  // A cursor past the end.
  EXPECT_EQ(t->PlanExport(t.exec(), 1u << 30, 10, 0).next_cursor, -1);
  EXPECT_TRUE(t->PlanExport(t.exec(), 1u << 30, 10, 0).rows.empty());
  // Null outputs are skipped.
  t->Export(t.exec(), t->PlanExport(t.exec(), 0, 10, 0), TickColumns());
}

// Ticks pass 2^32 in jumps. Each sweep must keep the order of times.
TABLE_TEST(TableTime, SweepsKeepTheOrderOfTimes) {
  constexpr Tick k32 = Tick{1} << 32;
  for (const Tick start : {k32 - 70000, Tick{0}, k32 - 3, 3 * k32 + 17}) {
    if (f.slowness() > 1 && start != k32 - 70000) continue;
    TableOptions options = f.Options(1);
    options.max_capacity = 21;  // small enough that eviction is exactly LRU
    Subject t = f.Create(options);
    t.set_tick(start);
    const Keys a = Scattered(1, 7), b = Scattered(100, 7), c = Scattered(200, 7);
    t.FindOrInsert(a);
    for (const Tick jump : {Tick{1}, Tick{60000}, Tick{70000}, k32 / 2 - 5, k32 / 2 + 5}) {
      const Tick first = t.tick();
      t.set_tick(t.tick() + jump);
      t.FindOrInsert(b);
      t.set_tick(t.tick() + 1);
      t.Upsert(c, Floats(7, 1.0f));
      t.Check();
      const auto sorted = [](Keys keys, const Keys& more) {
        keys.insert(keys.end(), more.begin(), more.end());
        std::sort(keys.begin(), keys.end());
        return keys;
      };
      const auto narrow = [&](Keys keys) {
        for (uint64_t& key : keys) key = t.Narrow(key);
        return keys;
      };
      EXPECT_EQ(t.ExportedKeys(t.tick() - 1), sorted(narrow(c), {})) << start << " +" << jump;
      EXPECT_EQ(t.ExportedKeys(t.tick()), Keys{});
      const Keys expected = sorted(narrow(b), narrow(c));
      const Keys got = t.ExportedKeys(first);
      if (jump < k32 / 2) {
        EXPECT_EQ(got, expected) << start << " +" << jump;
      } else {  // `first` is not exact: there may be more rows, but none is missing
        EXPECT_TRUE(std::includes(got.begin(), got.end(), expected.begin(), expected.end()));
      }
      EXPECT_EQ(t.size(), 21u);
      for (const Exported& row : t.Export(first)) {
        EXPECT_GT(static_cast<Tick>(row.update), first);
        EXPECT_LE(static_cast<Tick>(row.update), t.tick());
      }
      // The keys of `a` are the oldest, and are evicted.
      t.FindOrInsert(Scattered(300, 7));
      t.Check();
      EXPECT_EQ(t.CountContained(a), 0u) << start << " +" << jump;
      EXPECT_EQ(t.CountContained(b), 7u);
      EXPECT_EQ(t.CountContained(c), 7u);
      t.FindOrInsert(a);  // evicts b; these are the old keys of the next round
      EXPECT_EQ(t.CountContained(b), 0u) << start << " +" << jump;
      t.Erase(c);
      t.Erase(Scattered(300, 7));
    }
  }
}

// A segment splits while a sweep has come to its middle. Check compares the times of slots with the
// sweep's position.
TABLE_TEST(TableTime, ASegmentSplitsDuringASweep) {
  if (f.cold()) GTEST_SKIP() << "memory does not hold the rows of a segment";
  constexpr Tick kBegin = Tick{3} << 30, kTicks = Tick{1} << 29;  // of the first sweep (stamps.h)
  for (uint64_t round = 0; round < f.Scaled(60, 1); ++round) {
    SCOPED_TRACE(round);
    Subject t = f.Create(f.Options(1));
    // A segment of 448 slots splits at a load of 0.88.
    t.FindOrInsert(Scattered(1000 * round, 385));
    t.set_tick(kBegin + kTicks / 16 * (1 + round % 15));
    t.FindOrInsert(Scattered(1000 * round + 385, 15));
    t.Check();
    EXPECT_EQ(t.CountContained(Scattered(1000 * round, 400)), 400u);
  }
}

// The tick jumps by more than a window. All earlier rows are then equally old, but no row is lost
// or counts as new.
TABLE_TEST(TableTime, FarJump) {
  TableOptions options = f.Options(1);
  options.max_capacity = 20;
  Subject t = f.Create(options);
  const Keys a = Scattered(1, 10), b = Scattered(100, 10);
  t.FindOrInsert(a);
  t.set_tick(Tick{1} << 40);
  const Tick before = t.tick();
  t.FindOrInsert(b);
  t.Check();
  EXPECT_EQ(t.Export(before).size(), 10u);
  EXPECT_EQ(t.Export(0).size(), 20u);
  EXPECT_EQ(t.Export(1).size(), 20u);  // rows whose time is unknown are exported, not missed
  t.FindOrInsert(Scattered(200, 10));
  EXPECT_EQ(t.CountContained(a), 0u);
  EXPECT_EQ(t.CountContained(b), 10u);
  t.set_tick(Tick{1} << 62);
  t.FindOrInsert(Scattered(300, 20));
  t.Check();
  EXPECT_EQ(t.size(), 20u);
}

// Reads do not sweep. They may run when ticks have already left the window.
TABLE_TEST(TableTime, ReadsPastTheWindow) {
  TableOptions options = f.Options(1);
  options.max_capacity = 20;
  Subject t = f.Create(options);
  const Keys a = Scattered(1, 10), b = Scattered(100, 10);
  t.FindOrInsert(a);
  t.FindOrInsert(b);
  t.set_tick((Tick{1} << 32) + 10);
  t.Find(a);
  t.Lookup(a);
  EXPECT_EQ(t.Export(t.tick() - 1).size(), 0u);
  t.FindOrInsert(Scattered(200, 10));
  t.Check();
  EXPECT_EQ(t.CountContained(a), 10u);
  EXPECT_EQ(t.CountContained(b), 0u);
  EXPECT_EQ(t.Export(t.tick() - 1).size(), 10u);
}

// A sweep clamps the times of every row that was ever allocated, but a freed row stays free.
TABLE_TEST(TableTime, FreedRowsStayFree) {
  Subject t = f.Create(f.Options(1));
  const Keys keys = Scattered(1, 10);
  t.FindOrInsert(keys);
  t.Erase(Keys(keys.begin(), keys.begin() + 6));
  t.set_tick((Tick{1} << 32) + 10);
  t.FindOrInsert({keys[9]});
  t.Check();
  EXPECT_EQ(t.Export(0).size(), 4u);
  EXPECT_EQ(t.CountContained(keys), 4u);
}

// Random calls with random jumps of the tick, compared with 64-bit ticks. An export since a tick
// has every row that was updated after it, and no other row if the tick is among the last 2^31.
TABLE_TEST(TableTime, ExportsAreExactAtAnyTick) {
  Subject t = f.Create(f.Options(1));
  Random random(17);
  std::unordered_map<uint64_t, Tick> updated;
  const size_t rounds = f.Scaled(300, 60);
  for (size_t round = 0; round < rounds; ++round) {
    t.set_tick(t.tick() + random.Below(uint64_t{1} << random.Below(32)));
    Keys keys;
    for (uint64_t key = random.Below(50); key < 1000; key += 1 + random.Below(200)) {
      keys.push_back(t.Narrow(Scattered(key, 1)[0]));
    }
    switch (random.Below(4)) {
      case 0:
        t.Erase(keys);
        for (const uint64_t key : keys) updated.erase(key);
        break;
      case 1:
        t.FindOrInsert(keys);
        for (const uint64_t key : keys) updated.emplace(key, t.tick());
        break;
      case 2:
        t.Find(keys);
        break;
      default:
        t.Upsert(keys, Floats(keys.size(), 1.0f));
        for (const uint64_t key : keys) updated[key] = t.tick();
    }
    t.Check();
    for (const Tick ago :
         {Tick{1}, random.Below(uint64_t{1} << 31), random.Below(uint64_t{1} << 36)}) {
      if (ago > t.tick()) continue;
      const Tick since = t.tick() - ago;
      Keys want;
      for (const auto& [key, tick] : updated) {
        if (tick > since) want.push_back(key);
      }
      std::sort(want.begin(), want.end());
      const Keys got = t.ExportedKeys(since);
      if (ago < Tick{1} << 31) {
        EXPECT_EQ(got, want) << ago << " ticks ago";
      } else {
        EXPECT_TRUE(std::includes(got.begin(), got.end(), want.begin(), want.end()));
      }
    }
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
