#include "cc/lookup/tasks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <vector>

#include "tests/cc/execs.h"

namespace dynemb {
namespace {

TEST(TasksTest, RangesCoverEachTaskOnceInItsGrain) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<size_t> sizes(random() % 20), grains(sizes.size());
    for (size_t t = 0; t < sizes.size(); ++t) {
      sizes[t] = random() % 3 == 0 ? 0 : random() % 1000;
      grains[t] = 1 + random() % 300;
    }
    ForEachExec([&](Exec& exec) {
      std::mutex mutex;
      std::vector<std::vector<int>> seen(sizes.size());
      for (size_t t = 0; t < sizes.size(); ++t) seen[t].resize(sizes[t]);
      ParallelForTasks(exec, sizes, grains, [&](size_t t, size_t begin, size_t end) {
        std::lock_guard<std::mutex> lock(mutex);
        EXPECT_EQ(begin % grains[t], 0u);
        EXPECT_EQ(end, std::min(begin + grains[t], sizes[t]));
        EXPECT_LT(begin, end);
        for (size_t i = begin; i < end; ++i) ++seen[t][i];
      });
      for (size_t t = 0; t < sizes.size(); ++t) {
        ASSERT_EQ(seen[t], std::vector<int>(sizes[t], 1)) << "task " << t;
      }
    });
  }
}

TEST(TasksTest, EachTaskRunsOnce) {
  std::mt19937_64 random(2);
  for (size_t tasks : {0, 1, 2, 5, 100}) {
    for (bool empty : {true, false}) {
      std::vector<size_t> sizes(tasks);
      for (size_t& size : sizes) size = empty ? 0 : random() % 1000;
      ForEachExec([&](Exec& exec) {
        std::mutex mutex;
        std::vector<int> seen(tasks);
        ForEachTask(exec, sizes, [&](Exec&, size_t t) {
          std::lock_guard<std::mutex> lock(mutex);
          ++seen[t];
        });
        ASSERT_EQ(seen, std::vector<int>(tasks, 1));
      });
    }
  }
}

// A small table's arrays then stay in one core's cache, and a large table does not wait for one
// core.
TEST(TasksTest, LargeTasksUseAllThreadsAndSmallOnesUseOne) {
  ThreadsExec exec(4);
  std::vector<size_t> sizes(100, 10);
  sizes[7] = sizes[50] = 100000;
  std::vector<size_t> threads(sizes.size());
  ForEachTask(exec, sizes, [&](Exec& e, size_t t) { threads[t] = e.parallelism(); });
  for (size_t t = 0; t < sizes.size(); ++t) EXPECT_EQ(threads[t], sizes[t] == 10 ? 1u : 4u) << t;
  // A single task is never small.
  ForEachTask(exec, {3}, [&](Exec& e, size_t) { threads[0] = e.parallelism(); });
  EXPECT_EQ(threads[0], 4u);
}

}  // namespace
}  // namespace dynemb
