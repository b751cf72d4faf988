#include "cc/table/monotonic.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <mutex>
#include <thread>

#include "cc/table/shared_mutex.h"

namespace {

std::atomic<int> system_time_reads{0};

}  // namespace

// Takes the place of the C library's.
extern "C" int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  if (clock == CLOCK_REALTIME) ++system_time_reads;
  return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
}

namespace dynemb {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// A wait that computes its end from the system's time lasts as long as that time is set back.
TEST(MonotonicCondition, WaitsDoNotReadTheSystemsTime) {
  const int before = system_time_reads;
  std::chrono::system_clock::now();
  ASSERT_EQ(system_time_reads, before + 1);  // reads are seen

  std::mutex mutex;
  MonotonicCondition condition;
  std::unique_lock<std::mutex> lock(mutex);
  const auto begin = steady_clock::now();
  EXPECT_FALSE(condition.wait_for(lock, milliseconds(30), [] { return false; }));
  EXPECT_GE(steady_clock::now() - begin, milliseconds(30));
  EXPECT_TRUE(lock.owns_lock());
  SharedMutex shared;
  shared.lock();
  std::thread([&] { EXPECT_FALSE(shared.try_lock_shared_for(milliseconds(30))); }).join();
  EXPECT_EQ(system_time_reads, before + 1);
}

TEST(MonotonicCondition, ANotifiedThreadDoesNotWaitOn) {
  std::mutex mutex;
  MonotonicCondition condition;
  int turn = 0;  // guarded by mutex
  std::thread other([&] {
    std::unique_lock<std::mutex> lock(mutex);
    for (int i = 0; i < 1000; ++i) {
      condition.wait(lock, [&] { return turn % 2 == 1; });
      ++turn;
      condition.notify_all();
    }
  });
  std::unique_lock<std::mutex> lock(mutex);
  bool all = true;
  for (int i = 0; i < 1000; ++i) {
    ++turn;
    condition.notify_one();
    all &= condition.wait_for(lock, std::chrono::minutes(10), [&] { return turn % 2 == 0; });
  }
  lock.unlock();
  other.join();
  EXPECT_TRUE(all);
  EXPECT_EQ(turn, 2000);
}

// No arithmetic overflows, and a time that has passed is no error.
TEST(MonotonicCondition, AnyTimeIsLegal) {
  std::mutex mutex;
  MonotonicCondition condition;
  std::unique_lock<std::mutex> lock(mutex);
  const auto never = [] { return false; };
  EXPECT_FALSE(condition.wait_for(lock, std::chrono::nanoseconds::min(), never));
  EXPECT_FALSE(condition.wait_for(lock, milliseconds(0), never));
  EXPECT_FALSE(condition.wait_for(lock, std::chrono::duration<double>(1e-4), never));
  EXPECT_TRUE(condition.wait_for(lock, milliseconds(0), [] { return true; }));
  for (const bool seconds : {false, true}) {
    bool done = false;  // guarded by mutex
    std::thread other([&] {
      std::lock_guard<std::mutex> own(mutex);
      done = true;
      condition.notify_one();
    });
    const auto is_done = [&] { return done; };
    if (seconds) {
      EXPECT_TRUE(condition.wait_for(lock, std::chrono::duration<double>(1e300), is_done));
    } else {
      EXPECT_TRUE(condition.wait_for(lock, std::chrono::hours::max(), is_done));
    }
    lock.unlock();
    other.join();
    lock.lock();
  }
}

}  // namespace
}  // namespace dynemb
