#include "cc/table/clock.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/fake_clocks.h"

namespace dynemb {
namespace {

constexpr int64_t kSecond = FakeClocks::kSecond, kHour = FakeClocks::kHour,
                  kYear = FakeClocks::kYear;

TEST(Clock, CountsFromOne) {
  Clock clock;
  EXPECT_EQ(clock.last(), 0u);
  EXPECT_EQ(clock.TickBefore(INT64_MAX), 0u);
  EXPECT_EQ(clock.Next(), 1u);
  EXPECT_EQ(clock.Next(), 2u);
  EXPECT_EQ(clock.last(), 2u);
  EXPECT_EQ(clock.TickBefore(INT64_MAX), 2u);
  EXPECT_EQ(clock.TickBefore(0), 0u);
  EXPECT_EQ(clock.TickBefore(INT64_MIN), 0u);
}

TEST(Clock, TickBeforeIsExactForFewRecords) {
  int64_t now = 0;
  SystemTime time([&now] { return ClockReading{now, now}; });
  Clock clock(&time);
  const std::vector<int64_t> at = {10, 20, 20, 30, 50};
  for (const int64_t time_of : at) {
    now = time_of;
    clock.Next();
  }
  EXPECT_EQ(clock.TickBefore(10), 0u);
  EXPECT_EQ(clock.TickBefore(11), 1u);
  EXPECT_EQ(clock.TickBefore(20), 1u);
  EXPECT_EQ(clock.TickBefore(21), 3u);
  EXPECT_EQ(clock.TickBefore(50), 4u);
  EXPECT_EQ(clock.TickBefore(51), 5u);
}

// Batches, and moments between them at which a user looked at the system's clock. "Rows updated
// since then" are the rows of ticks after TickBefore(shown).
struct Issued {
  Issued() { clock.Next(); }
  struct Look {
    Tick before;  // the last tick before it
    int64_t shown, boot;
  };
  // Passes time, looks at the clock and sets it, all in a random order; a tick is last.
  void Batch(int64_t passes, int64_t ahead) {
    for (int part = 0; part < 2; ++part) {
      looks.push_back({clock.last(), clocks.utc_ns, clocks.boot_ns});
      clocks.Pass(passes / 2);
      looks.push_back({clock.last(), clocks.utc_ns, clocks.boot_ns});
      if (part == 0) clocks.Set(ahead);
    }
    looks.push_back({clock.last(), clocks.utc_ns + 1, clocks.boot_ns + 1});
    clocks.Pass(1);
    clock.Next();
  }
  void ExpectNothingMissed() const {
    for (const Look& look : looks) {
      ASSERT_LE(clock.TickBefore(look.shown), look.before) << look.shown - looks[0].shown;
    }
  }
  // A user computes a time from what the clock shows now.
  void ExpectAgesAreKept() const {
    const int64_t offset = clocks.utc_ns - clocks.boot_ns;
    for (const Look& look : looks) {
      ASSERT_LE(clock.TickBefore(look.boot + offset), look.before);
    }
  }
  FakeClocks clocks;
  Clock clock{&clocks.time};
  std::vector<Look> looks;
};

// However the clock was set, and for how long.
TEST(Clock, NoTickIsMissedIfTheTimeIsSet) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto below = [&random](int64_t most) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    };
    const std::vector<int64_t> sizes = {kYear, kHour, 90 * kSecond, 10 * kSecond, kSecond / 100};
    Issued issued;
    int64_t ahead = 0;
    for (int batch = 0; batch < 200; ++batch) {
      int64_t set = 0;
      if (below(10) == 0) {
        set = ahead != 0 && below(2) == 0 ? -ahead : (1 - 2 * below(2)) * sizes[below(5)];
        ahead += set;
      }
      issued.Batch(below(2) == 0 ? kSecond : below(kHour), set);
    }
    issued.ExpectNothingMissed();
    issued.ExpectAgesAreKept();
    issued.clocks.Set(sizes[seed % 5]);  // no batch has seen it
    issued.ExpectAgesAreKept();
  }
}

// The clock is ahead for one batch. Moments before and after it are told apart as without that.
TEST(Clock, AJumpDoesNotLast) {
  for (const int64_t ahead : {kYear, -kYear}) {
    SCOPED_TRACE(ahead);
    FakeClocks clocks;
    Clock clock(&clocks.time);
    const int64_t begin = clocks.utc_ns;
    const auto batches = [&](int count) {
      for (int i = 0; i < count; ++i) {
        clock.Next();
        clocks.Pass(kHour);
      }
    };
    batches(10);
    clocks.Set(ahead);
    int64_t utc = 0;
    clock.Next(&utc);
    EXPECT_EQ(utc, begin + 10 * kHour);
    clocks.Pass(kHour);
    clocks.Set(-ahead);
    batches(20);
    for (Tick tick = 1; tick <= 31; ++tick) {
      const int64_t at = begin + static_cast<int64_t>(tick - 1) * kHour;
      EXPECT_EQ(clock.TimeOf(tick), at);
      // The batch that saw the wrong time was an hour before or after any tick.
      EXPECT_LE(clock.TickBefore(at), tick - 1);
      EXPECT_GE(clock.TickBefore(at) + 2, tick);
    }
    EXPECT_EQ(clock.TickBefore(begin + 31 * kHour), 31u);
  }
}

// The clock is ahead for the first batch, and was right when the process began.
TEST(Clock, AJumpBeforeTheFirstBatch) {
  for (const int64_t ahead : {kYear, -kYear}) {
    SCOPED_TRACE(ahead);
    FakeClocks clocks;
    Clock clock(&clocks.time);
    clocks.Pass(kSecond);
    clocks.Set(ahead);
    clock.Next();
    clocks.Pass(kSecond);
    clocks.Set(-ahead);
    const int64_t begin = clocks.utc_ns;
    for (int i = 0; i < 48; ++i) {
      clock.Next();  // 2 to 49
      clocks.Pass(kHour);
    }
    for (Tick tick = 3; tick <= 49; ++tick) {
      const int64_t at = begin + static_cast<int64_t>(tick - 2) * kHour;
      ASSERT_EQ(clock.TickBefore(at - kHour / 2), tick - 1);
      ASSERT_EQ(clock.TimeOf(tick), at);
    }
    // Moments before the first batch are still before it.
    EXPECT_EQ(clock.TickBefore(begin - kHour), 0u);
    EXPECT_EQ(clock.TickBefore(begin - kYear), 0u);
  }
}

TEST(Clock, ThinnedRecordsMissNoTick) {
  Issued issued;
  std::mt19937_64 random(5);
  std::vector<Issued::Look> looks;
  int64_t ahead = 0;
  for (int i = 0; i < 300000; ++i) {
    // The clock is wrong for a few batches, or for one.
    int64_t set = 0;
    if (ahead == 0 && random() % 1000 == 0) set = random() % 2 == 0 ? kYear : -3 * kSecond;
    if (ahead != 0 && random() % 2 == 0) set = -ahead;
    ahead += set;
    issued.Batch(6 * kSecond, set);
    if (set != 0 || i % 997 == 0) {
      looks.insert(looks.end(), issued.looks.begin(), issued.looks.end());
    }
    issued.looks.clear();
  }
  issued.looks.swap(looks);
  ASSERT_GT(issued.looks.size(), 3000u);
  issued.ExpectNothingMissed();
  issued.ExpectAgesAreKept();
  // Few rows are reported in excess, especially near the end.
  const int64_t offset = issued.clocks.utc_ns - issued.clocks.boot_ns - ahead;
  for (const Issued::Look& look : issued.looks) {
    if (look.before > 200000) {
      ASSERT_GE(issued.clock.TickBefore(look.boot + offset) + 1500, look.before);
    }
  }
}

// All records are beside a moment at which the clock was set.
TEST(Clock, MemoryIsBounded) {
  Issued issued;
  for (int i = 0; i < 150000; ++i) {
    issued.Batch(6 * kSecond, i % 2 == 0 ? -2 * kSecond : 2 * kSecond);
    if (i < 149900) issued.looks.clear();
  }
  issued.ExpectNothingMissed();
  EXPECT_EQ(issued.clock.TimeOf(5), 0);  // forgotten
  EXPECT_NE(issued.clock.TimeOf(149000), 0);
  EXPECT_EQ(issued.clock.TickBefore(issued.clock.TimeOf(149000) - 70000 * 6 * kSecond), 0u);
}

TEST(Clock, NextReturnsTheTimeOfTheTick) {
  FakeClocks clocks;
  const int64_t begin = clocks.utc_ns;
  Clock clock(&clocks.time);
  int64_t at = 0;
  EXPECT_EQ(clock.Next(&at), 1u);
  EXPECT_EQ(at, begin);
  clocks.Set(-10);  // the time is set back; the times of ticks do not decrease
  EXPECT_EQ(clock.Next(&at), 2u);
  EXPECT_EQ(at, begin);
  clocks.Pass(40);
  EXPECT_EQ(clock.Next(&at), 3u);
  EXPECT_EQ(at, begin + 30);
  EXPECT_EQ(clock.Next(nullptr), 4u);
}

// Ticks of another process precede all later ticks, and "since t" misses no tick of either process.
TEST(Clock, Advance) {
  int64_t now = 100;
  SystemTime time([&now] { return ClockReading{now, now}; });
  Clock clock(&time);
  clock.Advance(1000, 40);
  EXPECT_EQ(clock.last(), 1000u);
  EXPECT_EQ(clock.TickBefore(40), 0u);
  EXPECT_EQ(clock.TickBefore(41), 1000u);
  EXPECT_EQ(clock.Next(), 1001u);
  EXPECT_EQ(clock.TickBefore(100), 1000u);
  EXPECT_EQ(clock.TickBefore(101), 1001u);

  clock.Advance(1001, 100);  // not greater than the last tick: no effect
  clock.Advance(3, 100);
  clock.Advance(0, 0);
  EXPECT_EQ(clock.last(), 1001u);
  EXPECT_EQ(clock.Next(), 1002u);

  // The time is before the last recorded time: ticks issued since then are not missed.
  now = 200;
  EXPECT_EQ(clock.Next(), 1003u);
  clock.Advance(2000, 150);
  EXPECT_EQ(clock.TickBefore(200), 1002u);
  EXPECT_EQ(clock.TickBefore(150), 1002u);
  EXPECT_EQ(clock.TickBefore(201), 2000u);

  // A time in the future (another machine's clock) is recorded as now, so that later ticks keep
  // their own times.
  now = 300;
  clock.Advance(3000, 1000000);
  EXPECT_EQ(clock.TickBefore(300), 2000u);
  EXPECT_EQ(clock.TickBefore(301), 3000u);
  now = 400;
  int64_t at = 0;
  EXPECT_EQ(clock.Next(&at), 3001u);
  EXPECT_EQ(at, 400);
  EXPECT_EQ(clock.TickBefore(350), 3000u);
}

TEST(Clock, ATimeOfTheFutureIsAJump) {
  FakeClocks clocks;
  Clock clock(&clocks.time);
  clock.Advance(5, clocks.utc_ns + kYear);
  EXPECT_EQ(clock.TimeOf(5), clocks.utc_ns);
  EXPECT_EQ(clocks.time.jumps().count, 1u);
  clock.Advance(6, clocks.utc_ns - kYear);
  clocks.Pass(kHour);
  clock.Advance(7, Clock::kNow);
  EXPECT_EQ(clock.TimeOf(7), clocks.utc_ns);
  EXPECT_EQ(clocks.time.jumps().count, 1u);
}

TEST(Clock, RandomAdvances) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    int64_t now = 1000;
    SystemTime time([&now] { return ClockReading{now, now}; });
    Clock clock(&time);
    std::vector<std::pair<Tick, int64_t>> issued;  // and the true time
    for (int step = 0; step < 100; ++step) {
      now += static_cast<int64_t>(random() % 20);
      if (random() % 5 == 0) {
        const Tick tick = clock.last() + 1 + random() % 10;
        const int64_t at = now - static_cast<int64_t>(random() % 100);
        clock.Advance(tick, at);
        ASSERT_EQ(clock.last(), tick);
        issued.emplace_back(tick, at);
      } else {
        const Tick last = clock.last();
        issued.emplace_back(clock.Next(), now);
        ASSERT_EQ(issued.back().first, last + 1);
      }
      const int64_t since = now - static_cast<int64_t>(random() % 400);
      const Tick before = clock.TickBefore(since);
      for (const auto& i : issued) {
        if (i.second >= since) {
          ASSERT_GT(i.first, before) << "issued at " << i.second << ", asked " << since;
        }
      }
    }
  }
}

TEST(Clock, TicksAreUniqueAcrossThreads) {
  Clock clock;
  std::vector<std::vector<Tick>> ticks(4);
  std::vector<std::thread> threads;
  for (auto& mine : ticks) {
    threads.emplace_back([&clock, &mine] {
      for (int i = 0; i < 5000; ++i) {
        mine.push_back(clock.Next());
        if (i % 100 == 0) clock.TickBefore(INT64_MAX);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<Tick> all;
  for (const auto& mine : ticks) {
    for (size_t i = 1; i < mine.size(); ++i) ASSERT_GT(mine[i], mine[i - 1]);
    all.insert(mine.begin(), mine.end());
  }
  EXPECT_EQ(all.size(), 20000u);
  EXPECT_EQ(clock.last(), 20000u);
}

}  // namespace
}  // namespace dynemb
