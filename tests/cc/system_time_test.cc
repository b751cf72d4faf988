#include "cc/table/system_time.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <thread>
#include <vector>

#include "tests/cc/fake_clocks.h"

namespace {

// For how long the machine is suspended after the next reading of its clocks, in seconds.
std::atomic<int> suspended_next{0}, suspended{0};

}  // namespace

// Takes the place of the C library's.
extern "C" int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && clock != CLOCK_MONOTONIC) {
    time->tv_sec += suspended;
    suspended += suspended_next.exchange(0);
  }
  return result;
}

namespace dynemb {
namespace {

constexpr int64_t kSecond = FakeClocks::kSecond, kHour = FakeClocks::kHour, kDay = FakeClocks::kDay,
                  kYear = FakeClocks::kYear;

TEST(SystemTime, IsWhatTheClockShows) {
  FakeClocks clocks;
  for (int i = 0; i < 100; ++i) {
    const SystemTime::Moment now = clocks.time.Now();
    EXPECT_EQ(now.utc_ns, clocks.utc_ns);
    EXPECT_EQ(now.shown_ns, clocks.utc_ns);
    EXPECT_EQ(now.boot_ns, clocks.boot_ns);
    // Also after long pauses: the boot clock runs while the machine is suspended.
    clocks.Pass(i % 10 == 0 ? kYear / 10 : kSecond);
  }
  EXPECT_EQ(clocks.time.jumps().count, 0u);
}

TEST(SystemTime, SmallStepsAreBelievedAndNeverDecrease) {
  FakeClocks clocks;
  int64_t last = 0;
  for (int i = 0; i < 1000; ++i) {
    clocks.Pass(kSecond);
    clocks.Set(i % 3 == 0 ? -5 * kSecond : 3 * kSecond);
    const int64_t utc = clocks.time.Now().utc_ns;
    EXPECT_GE(utc, clocks.utc_ns);
    EXPECT_LE(utc, clocks.utc_ns + 5 * kSecond);
    EXPECT_GE(utc, last);
    last = utc;
  }
  EXPECT_EQ(clocks.time.jumps().count, 0u);
}

TEST(SystemTime, AJumpIsSeenAndNotBelieved) {
  for (const int64_t ahead : {kYear, -kYear, 61 * kSecond, -61 * kSecond}) {
    FakeClocks clocks;
    for (int i = 0; i < 20; ++i) {
      clocks.time.Now();
      clocks.Pass(kHour);
    }
    for (uint64_t jump = 0; jump < 5; ++jump) {
      clocks.Set(ahead);
      for (int i = 0; i < 3; ++i) {
        const SystemTime::Moment now = clocks.time.Now();
        EXPECT_EQ(now.utc_ns, clocks.utc_ns - ahead);
        EXPECT_EQ(now.shown_ns, clocks.utc_ns);
        EXPECT_EQ(clocks.time.UtcOf(now.boot_ns, now.shown_ns), now.utc_ns);
        clocks.Pass(kHour);
      }
      EXPECT_EQ(clocks.time.jumps().count, 2 * jump + 1);
      EXPECT_EQ(clocks.time.jumps().last_ns, ahead);
      clocks.Set(-ahead);
      EXPECT_EQ(clocks.time.Now().utc_ns, clocks.utc_ns);
      EXPECT_EQ(clocks.time.jumps().count, 2 * jump + 2);
      clocks.Pass(4 * kHour);
    }
  }
}

// The process began while the clock was wrong.
TEST(SystemTime, TheOffsetThatWasSeenForLongestIsBelieved) {
  for (const int64_t wrong : {kYear, -kYear}) {
    FakeClocks clocks;
    const int64_t first = clocks.time.Now().boot_ns, shown = clocks.utc_ns;
    for (int i = 0; i < 3; ++i) {
      clocks.Pass(kHour);
      clocks.time.Now();
    }
    clocks.Set(-wrong);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(clocks.time.Now().utc_ns, clocks.utc_ns + wrong) << i;
      clocks.Pass(kHour);
    }
    clocks.Pass(kHour);
    EXPECT_EQ(clocks.time.Now().utc_ns, clocks.utc_ns);
    // The right clock gives the times that were recorded before.
    EXPECT_EQ(clocks.time.UtcOf(first, shown), shown - wrong);
    // And so it stays.
    clocks.Pass(kDay);
    EXPECT_EQ(clocks.time.Now().utc_ns, clocks.utc_ns);
    EXPECT_EQ(clocks.time.jumps().count, 1u);
  }
}

// However long the clock was right before, and the time in which it was set counts for neither.
TEST(SystemTime, AClockThatWasSetForGoodIsBelievedAfterADay) {
  FakeClocks clocks;
  for (int i = 0; i < 1000; ++i) {
    clocks.Pass(kHour);
    clocks.time.Now();
  }
  clocks.Pass(3 * kDay);
  clocks.Set(kYear);
  int hours = 0;
  for (; hours < 100 && clocks.time.Now().utc_ns != clocks.utc_ns; ++hours) clocks.Pass(kHour);
  EXPECT_EQ(hours, 25);
}

TEST(SystemTime, AFileFromTheFutureIsAJump) {
  FakeClocks clocks;
  clocks.time.SawInFile(clocks.utc_ns - kYear);
  clocks.time.SawInFile(clocks.utc_ns);
  clocks.time.SawInFile(clocks.utc_ns + 30 * kSecond);  // another machine's clock
  clocks.time.SawInFile(INT64_MIN);
  EXPECT_EQ(clocks.time.jumps().count, 0u);
  clocks.time.SawInFile(clocks.utc_ns + kYear);
  EXPECT_EQ(clocks.time.jumps().count, 1u);
  EXPECT_EQ(clocks.time.jumps().last_ns, -kYear);
  clocks.time.SawInFile(INT64_MAX);
  EXPECT_EQ(clocks.time.jumps().count, 2u);
  EXPECT_EQ(clocks.time.Now().utc_ns, clocks.utc_ns);
}

TEST(SystemTime, OfTheMachine) {
  SystemTime& time = SystemTime::OfProcess();
  EXPECT_EQ(&time, &SystemTime::OfProcess());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&time] {
      SystemTime::Moment last = time.Now();
      for (int i = 0; i < 1000; ++i) {
        const SystemTime::Moment now = time.Now();
        EXPECT_GE(now.boot_ns, last.boot_ns);
        EXPECT_GE(now.utc_ns, last.utc_ns);
        last = now;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const SystemTime::Moment now = time.Now();
  EXPECT_GT(now.boot_ns, 0);
  EXPECT_GT(now.utc_ns, 1600000000 * kSecond);
}

// The worst moment is between the readings of the two clocks.
TEST(SystemTime, SuspendedWhileItReadsTheClocks) {
  SystemTime time;
  const SystemTime::Moment first = time.Now();
  const int hours = 8 * 3600;
  suspended_next = hours;
  const SystemTime::Moment now = time.Now();
  EXPECT_EQ(suspended, hours);
  EXPECT_EQ(time.jumps().count, 0u);
  EXPECT_GE(now.boot_ns - first.boot_ns, hours * kSecond);
  EXPECT_GE(now.utc_ns - first.utc_ns, hours * kSecond);
  time.Now();
  EXPECT_EQ(time.jumps().count, 0u);
}

}  // namespace
}  // namespace dynemb
