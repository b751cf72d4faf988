#include "cc/table/shared_mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace dynemb {
namespace {

TEST(SharedMutex, ReadersShareAndWritersExclude) {
  SharedMutex mutex;
  int64_t value = 0;  // guarded by mutex; ThreadSanitizer checks it
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) {
        if ((i + t) % 4 == 0) {
          std::lock_guard<SharedMutex> lock(mutex);
          value += 1;
          value += 1;
        } else {
          std::shared_lock<SharedMutex> lock(mutex);
          wrong += value % 2;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(value, 2 * 1000);
  EXPECT_EQ(wrong, 0);

  bool entered = false;
  std::shared_lock<SharedMutex> one(mutex);
  std::thread([&] {
    std::shared_lock<SharedMutex> two(mutex);  // does not wait for the first
    entered = true;
  }).join();
  EXPECT_TRUE(entered);
}

// The readers hold the lock most of the time, and are never all without it for long.
TEST(SharedMutex, ReadersDoNotStarveAWriter) {
  SharedMutex mutex;
  std::atomic<bool> waiting{false}, written{false};
  std::atomic<int> reads{0}, reads_while_waiting{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 4; ++t) {
    readers.emplace_back([&] {
      while (!written) {
        std::shared_lock<SharedMutex> lock(mutex);
        ++reads;
        reads_while_waiting += waiting && !written;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (reads_while_waiting > 2000) break;  // starved; let the test end
      }
    });
  }
  while (reads < 20) std::this_thread::yield();
  waiting = true;
  {
    std::lock_guard<SharedMutex> lock(mutex);
    written = true;
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_LE(reads_while_waiting, 2000);
}

// One of the writers always waits for the other.
TEST(SharedMutex, WritersDoNotStarveReaders) {
  SharedMutex mutex;
  std::atomic<bool> done{false};
  std::atomic<int> writes{0}, starved{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!done && writes < 3000) {
        std::lock_guard<SharedMutex> lock(mutex);
        ++writes;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 30 && starved == 0; ++i) {
        const int before = writes;
        std::shared_lock<SharedMutex> lock(mutex);
        // The running writer, and those that it overtook before it waited.
        if (writes - before > 50) ++starved;
      }
      done = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(starved, 0);
}

// Waits for a writer, but no longer than the given time.
TEST(SharedMutex, TryLockSharedFor) {
  using std::chrono::milliseconds;
  using std::chrono::steady_clock;
  SharedMutex mutex;
  ASSERT_TRUE(mutex.try_lock_shared_for(milliseconds(0)));
  EXPECT_FALSE(mutex.try_lock());
  std::thread([&] {
    EXPECT_TRUE(mutex.try_lock_shared_for(milliseconds(1)));  // beside another reader
    mutex.unlock_shared();
  }).join();
  mutex.unlock_shared();

  mutex.lock();
  std::thread([&] {
    for (int64_t ms : {0, 5, 20}) {
      const auto begin = steady_clock::now();
      EXPECT_FALSE(mutex.try_lock_shared_for(milliseconds(ms)));
      EXPECT_GE(steady_clock::now() - begin, milliseconds(ms) - milliseconds(2));
    }
  }).join();
  mutex.unlock();
  EXPECT_TRUE(mutex.try_lock());  // the readers that gave up left nothing behind

  std::atomic<bool> got{false};
  std::thread waiting([&] {
    got = mutex.try_lock_shared_for(std::chrono::seconds(60));
    if (got) mutex.unlock_shared();
  });
  std::this_thread::sleep_for(milliseconds(5));
  mutex.unlock();
  waiting.join();
  EXPECT_TRUE(got);
}

}  // namespace
}  // namespace dynemb
