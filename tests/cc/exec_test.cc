// The contract of ParallelFor, for every Exec.
#include "cc/table/exec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace dynemb {
namespace {

using Closures = std::vector<std::function<void()>>;

// Runs each closure on a new thread, after `delay`; joins them at the end.
class SlowThreads {
 public:
  explicit SlowThreads(std::chrono::microseconds delay) : delay_(delay) {}
  ~SlowThreads() {
    for (std::thread& t : threads_) t.join();
  }
  PoolExec::Schedule schedule() {
    return [this](std::function<void()> closure) {
      threads_.emplace_back([delay = delay_, closure = std::move(closure)] {
        std::this_thread::sleep_for(delay);
        closure();
      });
    };
  }

 private:
  std::chrono::microseconds delay_;
  std::vector<std::thread> threads_;
};

struct ExecCase {
  std::string name;
  size_t parallelism;
  std::function<std::unique_ptr<Exec>()> make;
};

class ExecTest : public testing::TestWithParam<ExecCase> {
 protected:
  std::unique_ptr<Exec> exec_ = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(
    All, ExecTest,
    testing::Values(ExecCase{"Serial", 1, [] { return std::make_unique<SerialExec>(); }},
                    ExecCase{"Threads0", 1, [] { return std::make_unique<ThreadsExec>(0); }},
                    ExecCase{"Threads1", 1, [] { return std::make_unique<ThreadsExec>(1); }},
                    ExecCase{"Threads2", 2, [] { return std::make_unique<ThreadsExec>(2); }},
                    ExecCase{"Threads4", 4, [] { return std::make_unique<ThreadsExec>(4); }},
                    ExecCase{
                        "PoolThatNeverRuns", 4,
                        [] { return std::make_unique<PoolExec>([](std::function<void()>) {}, 3); }},
                    // Like Eigen's pool when its queue is full.
                    ExecCase{"PoolThatRunsAtOnce", 4,
                             [] {
                               return std::make_unique<PoolExec>(
                                   [](std::function<void()> f) { f(); }, 3);
                             }}),
    [](const auto& info) { return info.param.name; });

TEST_P(ExecTest, Parallelism) { EXPECT_EQ(exec_->parallelism(), GetParam().parallelism); }

TEST_P(ExecTest, RangesCoverAllItemsOnce) {
  for (size_t n : {0, 1, 2, 7, 64, 1000, 4097}) {
    for (size_t grain : {0, 1, 3, 64, 4097, 100000}) {
      // Not atomic, so that the thread sanitizer detects ranges that overlap.
      std::vector<int> visits(n);
      std::atomic<size_t> calls{0};
      exec_->ParallelFor(n, grain, [&](size_t begin, size_t end) {
        const size_t size = grain == 0 ? 1 : grain;
        EXPECT_LT(begin, end);
        EXPECT_EQ(begin % size, 0u);
        EXPECT_EQ(end, std::min(n, begin + size));
        for (size_t i = begin; i < end; ++i) ++visits[i];
        ++calls;
      });
      EXPECT_EQ(visits, std::vector<int>(n, 1)) << n << " by " << grain;
      if (n == 0) {
        EXPECT_EQ(calls, 0u);
      }
    }
  }
}

TEST_P(ExecTest, HugeGrainIsOneRange) {
  size_t calls = 0;
  exec_->ParallelFor(10, ~size_t{0}, [&](size_t begin, size_t end) {
    EXPECT_EQ(begin, 0u);
    EXPECT_EQ(end, 10u);
    ++calls;
  });
  EXPECT_EQ(calls, 1u);
}

TEST_P(ExecTest, OneRangeRunsOnTheCaller) {
  std::thread::id ran;
  exec_->ParallelFor(5, 5, [&](size_t, size_t) { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST_P(ExecTest, Nested) {
  std::vector<std::vector<int>> visits(20, std::vector<int>(50));
  exec_->ParallelFor(20, 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      exec_->ParallelFor(50, 3, [&, i](size_t b, size_t e) {
        for (size_t j = b; j < e; ++j) ++visits[i][j];
      });
    }
  });
  for (const auto& v : visits) EXPECT_EQ(v, std::vector<int>(50, 1));
}

TEST_P(ExecTest, CallsFromSeveralThreads) {
  if (GetParam().name == "Serial") return;
  std::vector<std::thread> callers;
  std::vector<size_t> sums(4);
  for (size_t t = 0; t < sums.size(); ++t) {
    callers.emplace_back([&, t] {
      for (int repeat = 0; repeat < 200; ++repeat) {
        std::vector<size_t> items(100);
        exec_->ParallelFor(items.size(), 7, [&](size_t begin, size_t end) {
          for (size_t i = begin; i < end; ++i) items[i] += i;
        });
        sums[t] += std::accumulate(items.begin(), items.end(), size_t{0});
      }
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(sums, std::vector<size_t>(4, 200 * 4950));
}

// Pool threads wait for a lock that the caller holds.
TEST_P(ExecTest, CallerHoldsALockThatHelpersWaitFor) {
  std::mutex mutex;
  std::vector<std::thread> waiters;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (int i = 0; i < 4; ++i) {
      waiters.emplace_back([&] {
        exec_->ParallelFor(4, 1, [&](size_t, size_t) { std::lock_guard<std::mutex> inner(mutex); });
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    size_t sum = 0;
    std::mutex sum_mutex;
    exec_->ParallelFor(1000, 10, [&](size_t begin, size_t end) {
      std::lock_guard<std::mutex> inner(sum_mutex);
      sum += end - begin;
    });
    EXPECT_EQ(sum, 1000u);
  }
  for (std::thread& t : waiters) t.join();
}

// Each call in turn throws. The exception reaches the caller after all started calls have returned.
TEST_P(ExecTest, ExceptionsReachTheCaller) {
  for (size_t thrower = 0; thrower < 20; ++thrower) {
    std::atomic<int> running{0};
    const auto fn = [&](size_t begin, size_t) {
      ++running;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      const bool throws = begin == thrower;
      --running;
      if (throws) throw std::runtime_error("range " + std::to_string(begin));
    };
    try {
      exec_->ParallelFor(20, 1, fn);
      ADD_FAILURE() << "no exception";
    } catch (const std::runtime_error& e) {
      EXPECT_EQ(e.what(), "range " + std::to_string(thrower));
    }
    EXPECT_EQ(running, 0);
  }
  size_t sum = 0;  // the Exec is still usable
  std::mutex mutex;
  exec_->ParallelFor(100, 1, [&](size_t begin, size_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    sum += end - begin;
  });
  EXPECT_EQ(sum, 100u);
}

TEST_P(ExecTest, OneOfManyExceptionsReachesTheCaller) {
  EXPECT_THROW(exec_->ParallelFor(100, 1, [](size_t, size_t) { throw std::bad_alloc(); }),
               std::bad_alloc);
}

TEST(PoolExecTest, CallerWorksAloneIfAllocationFails) {
  for (size_t scheduled = 0; scheduled < 3; ++scheduled) {
    Closures helpers;
    PoolExec exec(
        [&](std::function<void()> f) {
          if (helpers.size() == scheduled) throw std::bad_alloc();
          helpers.push_back(std::move(f));
        },
        3);
    size_t sum = 0;
    exec.ParallelFor(100, 1, [&](size_t begin, size_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 100u);
    for (auto& help : helpers) help();
  }
}

TEST(PoolExecTest, LateHelperDoesNothing) {
  Closures late;
  size_t calls = 0;
  {
    PoolExec exec([&](std::function<void()> f) { late.push_back(std::move(f)); }, 3);
    // On the heap, so that the address sanitizer detects a use after the return.
    auto counter = std::make_unique<size_t*>(&calls);
    const auto count = [&counter = *counter](size_t begin, size_t end) { *counter += end - begin; };
    const auto fn = std::make_unique<decltype(count)>(count);
    exec.ParallelFor(100, 1, *fn);
  }
  EXPECT_EQ(late.size(), 3u);
  EXPECT_EQ(calls, 100u);
  for (auto& f : late) f();
  EXPECT_EQ(calls, 100u);
}

TEST(PoolExecTest, HelpersStartAsTheLoopEnds) {
  for (int delay = 0; delay < 100; delay += 5) {
    SlowThreads threads{std::chrono::microseconds(delay)};
    PoolExec exec(threads.schedule(), 3);
    for (int repeat = 0; repeat < 5; ++repeat) {
      std::vector<int> visits(64);
      exec.ParallelFor(visits.size(), 1, [&](size_t begin, size_t) { ++visits[begin]; });
      EXPECT_EQ(visits, std::vector<int>(64, 1));
    }
  }
}

TEST(PoolExecTest, NoMoreHelpersThanRanges) {
  size_t scheduled = 0;
  PoolExec exec([&](std::function<void()>) { ++scheduled; }, 8);
  exec.ParallelFor(30, 10, [](size_t, size_t) {});
  EXPECT_EQ(scheduled, 2u);
}

// The caller must block (not only spin) until the helper has finished, and be woken.
TEST(ThreadsExecTest, WaitsForAHelperInsideFn) {
  ThreadsExec exec(2);
  const std::thread::id caller = std::this_thread::get_id();
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::atomic<int> arrived{0};
    bool helper_finished = false;
    exec.ParallelFor(2, 1, [&](size_t, size_t) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();  // one range each
      if (std::this_thread::get_id() != caller) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        helper_finished = true;
      }
    });
    EXPECT_TRUE(helper_finished);
  }
}

}  // namespace
}  // namespace dynemb
