#include "cc/table/clock.h"

#include <gtest/gtest.h>

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

  // "Rows updated since t" are those of ticks above TickBefore(t): no tick issued at t or later may
  // be missed.
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

TEST(Clock, TickBeforeIsExactWhileRecordsAreFew) {
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
TEST(Clock, SetBack) {
  const Issued issued({100, 200, 50, 60, 210, 5, 5, 300, 299, 301});
  for (int64_t t = 0; t < 310; ++t) issued.ExpectNothingMissed(t);
}

TEST(Clock, ThinnedRecordsMissNothing) {
  std::vector<int64_t> at;
  for (int64_t i = 0; i < 300000; ++i) at.push_back(i * 7 + (i % 1000 == 0 ? -3000 : 0));
  const Issued issued(at);
  Tick last = 0;
  for (int64_t t = 0; t < 300000 * 7; t += 9973) {
    const Tick before = issued.clock.TickBefore(t);
    EXPECT_GE(before, last);
    last = before;
    // Ticks are 7 ns apart: what is reported too much must be "shortly before", most of all near
    // the end.
    const auto exact = static_cast<Tick>(t / 7);
    EXPECT_LE(before, exact + 1);
    if (t > 200000 * 7) {
      EXPECT_GE(before + 1500, exact) << t;
    }
  }
  for (int64_t t = 0; t < 300000 * 7; t += 399989) issued.ExpectNothingMissed(t);
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
