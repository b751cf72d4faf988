#include "cc/table/expiry.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tests/cc/fake_clocks.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using testing_table::Random;

TableOptions Options(int64_t ttl, TtlClock clock) {
  TableOptions options;
  options.ttl = ttl;
  options.ttl_clock = clock;
  return options;
}
uint64_t NoRows() { return 0; }

// The time of each tick, by brute force.
struct Times {
  std::map<Tick, int64_t> of;

  // The last tick whose rows, and the rows of all ticks before it, are at least this old.
  Tick Horizon(int64_t now, int64_t age) const {
    Tick horizon = 0;
    for (const auto& [tick, time] : of) {
      if (now - time < age) break;
      horizon = tick;
    }
    return horizon;
  }
};

TEST(Expiry, StepsAreExact) {
  for (const int64_t ttl : {int64_t{1}, int64_t{7}, Expiry::kMarks, 2 * Expiry::kMarks - 1}) {
    SCOPED_TRACE(ttl);
    Expiry expiry;
    expiry.Configure(Options(ttl, TtlClock::kSteps));
    Times times;
    Random random(1);
    Tick tick = 0;
    int64_t step = 0;
    for (int batch = 0; batch < 400 + 3 * static_cast<int>(ttl) / 2; ++batch) {
      tick += 1 + random.Below(3);
      if (random.Below(4) != 0) {
        expiry.Step(tick);
        expiry.Step(tick);  // of another table of the same call
        ++step;
      }
      times.of[tick] = step;
      const Tick horizon = expiry.At(tick, NoRows);
      if (batch % 64 == 0 || batch > static_cast<int>(ttl)) {
        ASSERT_EQ(horizon, times.Horizon(step, ttl)) << batch;
      }
      EXPECT_EQ(expiry.At(tick, NoRows), horizon);
    }
    EXPECT_GT(expiry.At(tick, NoRows), 0u);
  }
}

TEST(Expiry, TimesAreNeverEarlyAndAtMostAMarkLate) {
  constexpr int64_t kTtl = 40000 * Expiry::kMarks;
  const int64_t late = kTtl / Expiry::kMarks;
  for (const TtlClock clock : {TtlClock::kWall, TtlClock::kData}) {
    int64_t now = 1000;
    SystemTime time([&now] { return ClockReading{now + 5, now}; });
    Expiry expiry;
    expiry.Configure(Options(kTtl, clock), &time);
    if (clock == TtlClock::kData) expiry.SetTime(now, 1);
    Times times;
    Random random(2);
    for (Tick tick = 2; tick < 3000; ++tick) {
      now += static_cast<int64_t>(random.Below(1 + random.Below(2) * 3 * kTtl / 1000));
      if (clock == TtlClock::kData) expiry.SetTime(now, tick++);
      times.of[tick] = now;
      const Tick horizon = expiry.At(tick, NoRows);
      EXPECT_LE(horizon, times.Horizon(now, kTtl));
      EXPECT_GE(horizon, times.Horizon(now, kTtl + late));
    }
    EXPECT_GT(expiry.At(3001, NoRows), 2u);
  }
}

TEST(Expiry, IdleTablesExpire) {
  int64_t now = 5;
  SystemTime time([&now] { return ClockReading{now + 5, now}; });
  Expiry expiry;
  expiry.Configure(Options(1000, TtlClock::kWall), &time);
  EXPECT_EQ(expiry.At(1, NoRows), 0u);
  now = 1004;
  EXPECT_EQ(expiry.At(0, NoRows), 0u);
  now = 1005;
  EXPECT_EQ(expiry.At(0, NoRows), 1u);  // not a use of the table
  now = 1e6;
  EXPECT_EQ(expiry.At(2, NoRows), 1u);
}

TEST(Expiry, TheFirstTimeIsThatOfAllRowsBeforeIt) {
  Expiry expiry;
  expiry.Configure(Options(10, TtlClock::kData));
  for (Tick tick = 1; tick < 5; ++tick) EXPECT_EQ(expiry.At(tick, NoRows), 0u);
  EXPECT_TRUE(expiry.Save(5).empty());
  expiry.SetTime(1000000, 5);
  EXPECT_EQ(expiry.At(6, NoRows), 0u);
  expiry.SetTime(999, 7);  // earlier, so it is ignored
  expiry.SetTime(1000009, 8);
  EXPECT_EQ(expiry.At(9, NoRows), 0u);
  expiry.SetTime(1000010, 10);
  EXPECT_EQ(expiry.At(11, NoRows), 7u);
}

TEST(Expiry, ATimeThatLeapsWaitsForTheNextOne) {
  constexpr int64_t kTtl = 10;
  const auto at = [](Expiry& expiry, int64_t time) {
    static Tick tick = 1;
    const std::optional<int64_t> ignored = expiry.SetTime(time, ++tick);
    const std::vector<int64_t> saved = expiry.Save(tick);
    return std::make_pair(ignored, saved.back());
  };
  using Result = std::pair<std::optional<int64_t>, int64_t>;
  const std::optional<int64_t> none;
  Expiry expiry;
  expiry.Configure(Options(kTtl, TtlClock::kData));
  EXPECT_EQ(at(expiry, 100), Result(none, 100));
  EXPECT_EQ(at(expiry, 139), Result(none, 139));
  // A mistake, and then events as before: also one that is earlier, and ignored as such.
  EXPECT_EQ(at(expiry, 5000), Result(none, 139));
  EXPECT_EQ(at(expiry, 140), Result(5000, 140));
  EXPECT_EQ(at(expiry, 9000), Result(none, 140));
  EXPECT_EQ(at(expiry, 120), Result(9000, 140));
  // Two mistakes after each other that do not agree.
  EXPECT_EQ(at(expiry, 9000), Result(none, 140));
  EXPECT_EQ(at(expiry, 5000), Result(9000, 140));
  EXPECT_EQ(at(expiry, 141), Result(5000, 141));
  // Events after a pause, in any order. What is believed is what two of them say.
  EXPECT_EQ(at(expiry, 1000), Result(none, 141));
  EXPECT_EQ(at(expiry, 995), Result(none, 995));
  EXPECT_EQ(at(expiry, 1001), Result(none, 1001));
  // Each is a leap later than the one before.
  EXPECT_EQ(at(expiry, 2000), Result(none, 1001));
  EXPECT_EQ(at(expiry, 3000), Result(none, 2000));
  EXPECT_EQ(at(expiry, 4000), Result(none, 3000));
  EXPECT_EQ(at(expiry, 4001), Result(none, 4001));
  // A load forgets what waits.
  EXPECT_EQ(at(expiry, 9000), Result(none, 4001));
  ASSERT_TRUE(expiry.Restore({1, 5, 50}));
  EXPECT_EQ(at(expiry, 60), Result(none, 60));
}

TEST(Expiry, ExtremeTimesLeap) {
  Expiry expiry;
  expiry.Configure(Options(int64_t{1} << 62, TtlClock::kData));
  EXPECT_FALSE(expiry.SetTime(std::numeric_limits<int64_t>::min(), 1).has_value());
  EXPECT_FALSE(expiry.SetTime(std::numeric_limits<int64_t>::max(), 2).has_value());
  EXPECT_EQ(expiry.Save(3).back(), std::numeric_limits<int64_t>::max());
}

// Calls that share the table's lock may record their ticks in another order.
TEST(Expiry, MarksAreInOrderWhateverTheOrderOfTicks) {
  int64_t now = 100;
  SystemTime time([&now] { return ClockReading{now + 5, now}; });
  Expiry expiry;
  expiry.Configure(Options(10, TtlClock::kWall), &time);
  for (const Tick tick : {6, 5, 9, 8, 7}) {
    expiry.At(tick, NoRows);
    now += 3;
  }
  now += 7;
  const Tick horizon = expiry.At(0, NoRows);
  EXPECT_GE(horizon, 9u);
  expiry.At(horizon - 2, NoRows);
  Expiry again;
  again.Configure(Options(10, TtlClock::kWall), &time);
  EXPECT_TRUE(again.Restore(expiry.Save(3)));
}

TEST(Expiry, SavedMarksContinue) {
  for (const size_t before : {0, 3, 50}) {
    Expiry a, b;
    a.Configure(Options(8, TtlClock::kSteps));
    b.Configure(Options(8, TtlClock::kSteps));
    Tick tick = 0;
    for (size_t step = 0; step < before; ++step) {
      a.Step(++tick);
      a.At(tick, NoRows);
    }
    const std::vector<int64_t> saved = a.Save(++tick);
    ASSERT_TRUE(b.Restore(saved));
    EXPECT_EQ(b.Save(tick), saved);
    for (int step = 0; step < 30; ++step) {
      ++tick;
      a.Step(tick);
      b.Step(tick);
      EXPECT_EQ(a.At(tick, NoRows), b.At(tick, NoRows));
    }
    Expiry c;
    c.Configure(Options(8, TtlClock::kSteps));
    const Tick horizon = a.At(tick, NoRows);
    a.Swap(&c);
    EXPECT_EQ(c.At(tick, NoRows), horizon);
    EXPECT_EQ(a.At(tick, NoRows), 0u);
  }
  Expiry bad;
  bad.Configure(Options(8, TtlClock::kSteps));
  for (const std::vector<int64_t>& marks :
       std::vector<std::vector<int64_t>>{{}, {-1}, {3, 2, 1}, {0, 5, 1, 4, 2}, {0, 5, 2, 6, 1}}) {
    EXPECT_FALSE(bad.Restore(marks));
  }
}

TEST(Expiry, FewRowsAreSpared) {
  TableOptions options = Options(2, TtlClock::kSteps);
  options.ttl_min_rows = 10;
  Expiry expiry;
  expiry.Configure(options);
  uint64_t rows = 10;
  const auto count = [&rows] { return rows; };
  for (Tick tick = 1; tick < 6; ++tick) {
    expiry.Step(tick);
    EXPECT_EQ(expiry.At(tick, count), 0u);
  }
  rows = 11;
  EXPECT_EQ(expiry.At(5, count), 0u);  // the same batch
  EXPECT_EQ(expiry.At(6, count), 3u);
  rows = 10;
  EXPECT_EQ(expiry.At(6, count), 3u);
  EXPECT_EQ(expiry.At(7, count), 0u);
}

// --- A system's clock that is set

constexpr int64_t kHour = FakeClocks::kHour, kDay = FakeClocks::kDay, kYear = FakeClocks::kYear;

// A table that is used every hour; the last tick that has expired is known from the true time.
struct Used {
  explicit Used(FakeClocks* clocks_) : clocks(*clocks_) {
    expiry.Configure(Options(kDay, TtlClock::kWall), &clocks.time);
  }
  void Hours(int hours) {
    for (int hour = 0; hour < hours; ++hour) {
      clocks.Pass(kHour);
      Use();
    }
  }
  void Use() {
    times.of[++tick] = clocks.boot_ns;
    const Tick horizon = expiry.At(tick, NoRows);
    ASSERT_LE(horizon, times.Horizon(clocks.boot_ns, kDay));
    ASSERT_GE(horizon, times.Horizon(clocks.boot_ns, kDay + kDay / Expiry::kMarks));
  }
  FakeClocks& clocks;
  Expiry expiry;
  Times times;
  Tick tick = 0;
};

TEST(ExpiryByTime, AgesDoNotDependOnTheSystemsClock) {
  for (const int64_t ahead : {kYear, -kYear, kHour, -kHour, int64_t{0}}) {
    SCOPED_TRACE(ahead);
    FakeClocks clocks;
    Used used(&clocks);
    used.Hours(40);
    for (int jump = 0; jump < 5; ++jump) {
      clocks.Set(ahead);
      used.Use();
      used.Hours(jump);
      clocks.Set(-ahead);
      used.Use();
      used.Hours(30);
    }
    clocks.Set(ahead);  // for good
    used.Hours(100);
    clocks.Pass(30 * kDay);  // the machine was suspended
    EXPECT_EQ(used.expiry.At(0, NoRows), used.tick);
    EXPECT_EQ(clocks.time.jumps().count, ahead == 0 ? 0u : 11u);
  }
}

// Files have the time of day, also those that are written while the clock is wrong.
TEST(ExpiryByTime, AFileHasTheRightTimes) {
  for (const int64_t ahead : {kYear, -kYear}) {
    SCOPED_TRACE(ahead);
    FakeClocks clocks;
    Used used(&clocks);
    used.Hours(40);
    clocks.Set(ahead);
    used.Use();
    const std::vector<int64_t> saved = used.expiry.Save(++used.tick);
    clocks.Set(-ahead);
    EXPECT_EQ(saved.back(), clocks.utc_ns);

    FakeClocks after(clocks.utc_ns);  // of another process, after a start of the machine
    after.boot_ns = 3;
    after.Pass(6 * kHour);
    Expiry loaded;
    loaded.Configure(Options(kDay, TtlClock::kWall), &after.time);
    ASSERT_TRUE(loaded.Restore(saved));
    EXPECT_EQ(loaded.At(0, NoRows), used.times.Horizon(clocks.boot_ns + 6 * kHour, kDay));
    EXPECT_EQ(loaded.Save(0), loaded.Save(0));
    after.Pass(kDay - 6 * kHour - 1);
    EXPECT_LT(loaded.At(0, NoRows), used.tick);
    after.Pass(1);
    EXPECT_EQ(loaded.At(0, NoRows), used.tick);
    EXPECT_EQ(after.time.jumps().count, 0u);
  }
}

// A file is as old as it is: there is no other clock for the time between two processes.
TEST(ExpiryByTime, AFileIsLoadedMonthsLater) {
  FakeClocks clocks;
  Used used(&clocks);
  used.Hours(40);
  const std::vector<int64_t> saved = used.expiry.Save(++used.tick);
  FakeClocks after(clocks.utc_ns + 60 * kDay);
  Expiry loaded;
  loaded.Configure(Options(kDay, TtlClock::kWall), &after.time);
  ASSERT_TRUE(loaded.Restore(saved));
  EXPECT_EQ(loaded.At(0, NoRows), used.tick);
}

// Such files were written by a machine whose clock was wrong.
TEST(ExpiryByTime, MarksOfTheFutureAreOfNow) {
  FakeClocks clocks;
  const int64_t now = clocks.utc_ns;
  Expiry expiry;
  expiry.Configure(Options(kDay, TtlClock::kWall), &clocks.time);
  ASSERT_TRUE(expiry.Restore({2, 5, now - kDay + 10, 9, now - 5, 12, now + kYear, 15, INT64_MAX}));
  EXPECT_EQ(expiry.Save(0),
            (std::vector<int64_t>{2, 5, now - kDay + 10, 9, now - 5, 12, now, 15, now}));
  EXPECT_EQ(expiry.At(0, NoRows), 2u);
  clocks.Pass(10);
  EXPECT_EQ(expiry.At(16, NoRows), 5u);
  clocks.Pass(kDay - 15);
  EXPECT_EQ(expiry.At(0, NoRows), 9u);
  clocks.Pass(5);
  EXPECT_EQ(expiry.At(0, NoRows), 12u);
  clocks.Pass(10);  // 15 and 16 have one mark
  EXPECT_EQ(expiry.At(0, NoRows), 16u);
}

// A machine without a time server may believe that it is 1970, and rows are older than that.
TEST(ExpiryByTime, NoTimesBefore1970) {
  FakeClocks clocks;
  Expiry expiry;
  expiry.Configure(Options(kDay, TtlClock::kWall), &clocks.time);
  expiry.At(1, NoRows);
  clocks.Pass(10 * kHour);
  clocks.Set(kHour - clocks.utc_ns);
  expiry.At(2, NoRows);
  clocks.Pass(2 * kHour);
  expiry.At(3, NoRows);
  const std::vector<int64_t> saved = expiry.Save(4);
  EXPECT_EQ(saved, (std::vector<int64_t>{0, 1, 0, 2, kHour, 4, 3 * kHour}));
  EXPECT_TRUE(expiry.Restore(saved));
  EXPECT_TRUE(expiry.Restore({0, 5, INT64_MIN, 6, -3}));
  EXPECT_EQ(expiry.Save(0), (std::vector<int64_t>{0, 5, 0, 6, 0}));
}

}  // namespace
}  // namespace dynemb
