#include "cc/table/clock.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace dynemb {
namespace {

// Ticks with the true time at which each was issued.
struct Issued {
  explicit Issued(std::vector<int64_t> at_)
      : at(std::move(at_)), clock([this] { return at[next]; }) {
    for (; next < at.size(); ++next) EXPECT_EQ(clock.Next(), next + 1);
    next = at.size() - 1;
  }
  std::vector<int64_t> at;
  size_t next = 0;
  Clock clock;

  // "Rows updated since t" are the rows of ticks after TickBefore(t). Every tick issued at t or
  // later must be among these.
  void ExpectNothingMissed(int64_t t) const {
    const Tick before = clock.TickBefore(t);
    for (size_t i = 0; i < at.size(); ++i) {
      if (at[i] >= t) {
        ASSERT_GT(static_cast<Tick>(i + 1), before) << "issued at " << at[i] << ", asked " << t;
      }
    }
  }
};

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
  const Issued issued({10, 20, 20, 30, 50});
  EXPECT_EQ(issued.clock.TickBefore(10), 0u);
  EXPECT_EQ(issued.clock.TickBefore(11), 1u);
  EXPECT_EQ(issued.clock.TickBefore(20), 1u);
  EXPECT_EQ(issued.clock.TickBefore(21), 3u);
  EXPECT_EQ(issued.clock.TickBefore(50), 4u);
  EXPECT_EQ(issued.clock.TickBefore(51), 5u);
  for (int64_t t = 0; t < 60; ++t) issued.ExpectNothingMissed(t);
}

// The system's time may jump back, even far, and forward again.
TEST(Clock, SystemTimeIsSetBack) {
  const Issued issued({100, 200, 50, 60, 210, 5, 5, 300, 299, 301});
  for (int64_t t = 0; t < 310; ++t) issued.ExpectNothingMissed(t);
}

TEST(Clock, ThinnedRecordsMissNoTick) {
  std::vector<int64_t> at;
  for (int64_t i = 0; i < 300000; ++i) at.push_back(i * 7 + (i % 1000 == 0 ? -3000 : 0));
  const Issued issued(at);
  Tick last = 0;
  for (int64_t t = 0; t < 300000 * 7; t += 9973) {
    const Tick before = issued.clock.TickBefore(t);
    EXPECT_GE(before, last);
    last = before;
    // Ticks are 7 ns apart. The ticks that are reported in excess were issued shortly before t,
    // especially near the end.
    const auto exact = static_cast<Tick>(t / 7);
    EXPECT_LE(before, exact + 1);
    if (t > 200000 * 7) {
      EXPECT_GE(before + 1500, exact) << t;
    }
  }
  for (int64_t t = 0; t < 300000 * 7; t += 399989) issued.ExpectNothingMissed(t);
}

TEST(Clock, NextReturnsTheTimeOfTheTick) {
  int64_t now = 100;
  Clock clock([&now] { return now; });
  int64_t at = 0;
  EXPECT_EQ(clock.Next(&at), 1u);
  EXPECT_EQ(at, 100);
  now = 90;  // the time is set back; recorded times do not decrease
  EXPECT_EQ(clock.Next(&at), 2u);
  EXPECT_EQ(at, 100);
  now = 130;
  EXPECT_EQ(clock.Next(&at), 3u);
  EXPECT_EQ(at, 130);
  EXPECT_EQ(clock.Next(nullptr), 4u);
}

// Ticks of another process precede all later ticks, and "since t" misses no tick of either process.
TEST(Clock, Advance) {
  int64_t now = 100;
  Clock clock([&now] { return now; });
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

TEST(Clock, RandomAdvances) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    int64_t now = 1000;
    Clock clock([&now] { return now; });
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
