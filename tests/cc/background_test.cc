// Background: when tasks are worked on, and how many threads do that.
#include "cc/table/background.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace dynemb {
namespace {

using std::chrono::milliseconds;
constexpr Background::Clock::duration kNone{-1};

class CountingTask : public Background::Task {
 public:
  explicit CountingTask(std::function<Background::Clock::duration(int call)> work)
      : work_(std::move(work)) {}
  ~CountingTask() override { Background::Remove(this); }

  void WaitForCalls(int n) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return calls_ >= n; });
  }
  int calls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

 private:
  Background::Clock::duration Work() noexcept override {
    EXPECT_FALSE(running_.exchange(true));  // one thread at a time
    const auto pause = work_(calls());
    running_ = false;
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    changed_.notify_all();
    return pause;
  }

  const std::function<Background::Clock::duration(int call)> work_;
  std::atomic<bool> running_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  int calls_ = 0;
};

TEST(Background, WorksUntilATaskHasNoMoreToDo) {
  CountingTask task([](int call) { return call < 3 ? milliseconds(call) : kNone; });
  Background::Wake(&task, milliseconds(0));
  task.WaitForCalls(4);
  Background::Remove(&task);
  EXPECT_EQ(task.calls(), 4);
  Background::Wake(&task, milliseconds(1));
  task.WaitForCalls(5);
}

TEST(Background, AWakeDuringTheWorkIsNotLost) {
  CountingTask* self = nullptr;
  CountingTask task([&](int call) {
    if (call == 0) Background::Wake(self, milliseconds(0));
    return kNone;
  });
  self = &task;
  Background::Wake(&task, milliseconds(0));
  task.WaitForCalls(2);
  Background::Remove(&task);
  EXPECT_EQ(task.calls(), 2);
}

TEST(Background, RemoveWaitsForTheWorkAndEndsIt) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<bool> runs{false}, removed{false};
    auto task = std::make_unique<CountingTask>([&](int) {
      runs = true;
      std::this_thread::sleep_for(milliseconds(round % 3));
      EXPECT_FALSE(removed);
      runs = false;
      return milliseconds(0);
    });
    Background::Wake(task.get(), milliseconds(0));
    if (round % 2 == 0) task->WaitForCalls(1);
    Background::Remove(task.get());
    removed = true;
    EXPECT_FALSE(runs);
    task.reset();
  }
}

TEST(Background, ATaskThatWaitsDoesNotHoldUpOthers) {
  CountingTask late([](int) { return kNone; });
  CountingTask soon([](int) { return kNone; });
  Background::Wake(&late, std::chrono::hours(1));
  Background::Wake(&soon, milliseconds(0));
  soon.WaitForCalls(1);
  EXPECT_EQ(late.calls(), 0);
}

TEST(Background, ManyTasksShareFewThreads) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::vector<std::unique_ptr<CountingTask>> tasks;
  for (int i = 0; i < 500; ++i) {
    tasks.push_back(std::make_unique<CountingTask>([&](int call) {
      std::lock_guard<std::mutex> lock(mutex);
      threads.insert(std::this_thread::get_id());
      return call < 2 ? milliseconds(0) : kNone;
    }));
    Background::Wake(tasks.back().get(), milliseconds(i % 5));
  }
  for (const auto& task : tasks) task->WaitForCalls(3);
  tasks.clear();
  EXPECT_LE(threads.size(), Background::kMostThreads);
}

// A child ends its copies of tasks at once, whatever they were doing, and has its own tasks.
TEST(Background, Fork) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the sanitizer permits no threads in a child of fork";
#endif
  std::atomic<bool> ends{false};
  CountingTask running([&](int) {
    while (!ends) std::this_thread::sleep_for(milliseconds(1));
    return kNone;
  });
  CountingTask waiting([](int) { return kNone; });
  Background::Wake(&running, milliseconds(0));
  Background::Wake(&waiting, std::chrono::hours(1));
  for (int round = 0; round < 10; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      Background::Remove(&running);
      Background::Remove(&waiting);
      CountingTask own([](int call) { return call < 1 ? milliseconds(1) : kNone; });
      Background::Wake(&own, milliseconds(0));
      own.WaitForCalls(2);
      Background::Wake(&waiting, milliseconds(0));
      waiting.WaitForCalls(1);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  ends = true;
  running.WaitForCalls(1);
}

}  // namespace
}  // namespace dynemb
