#include "cc/table/exec.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace dynemb {
namespace {

// The wake-up of a helper and the rest of a range take microseconds, whereas blocking and being
// woken takes tens of microseconds. A thread therefore spins for about 5 us (a pause is 40 to 140
// cycles) before it blocks.
constexpr int kSpins = 128;

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

size_t NumRanges(size_t n, size_t grain) { return n / grain + (n % grain != 0); }

// One call of ParallelFor. The caller and its helpers share ownership, because a helper may start
// after ParallelFor has returned. It then finds no range left, and does not access `fn`, which no
// longer exists.
class Loop {
 public:
  Loop(size_t n, size_t grain, const RangeFn* fn)
      : n_(n), grain_(grain), num_ranges_(NumRanges(n, grain)), fn_(fn) {}

  // Runs ranges until none is left. Returns true if one of them was the last of all ranges to
  // finish.
  bool Work() {
    size_t worked = 0;
    for (;; ++worked) {
      // Relaxed is enough to assign each range once. The inputs of fn were published when the
      // helper was scheduled, and its results are published by done_.
      const size_t range = next_.fetch_add(1, std::memory_order_relaxed);
      if (range >= num_ranges_) break;
      // Relaxed: another range may or may not run, but all ranges are counted.
      if (failed_.load(std::memory_order_relaxed)) continue;
      const size_t begin = range * grain_;
      try {
        (*fn_)(begin, std::min(n_ - begin, grain_) + begin);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error_ == nullptr) error_ = std::current_exception();
        failed_.store(true, std::memory_order_relaxed);
      }
    }
    // One release for all ranges of this thread, which does not use fn_ after it. It is also an
    // acquire, so that the thread that completes the count sees the work of all others.
    return worked > 0 && done_.fetch_add(worked, std::memory_order_acq_rel) + worked == num_ranges_;
  }

  // For helpers: Work, and then wake the caller if it was waiting for this.
  void Help() {
    if (!Work()) return;
    // The lock orders this after the caller's check of done_, so that the wake-up is not lost.
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.notify_one();
  }

  // For the caller, after Work: waits until the ranges of helpers have finished.
  void Wait() {
    for (int i = 0; i < kSpins; ++i) {
      if (Done()) return;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return Done(); });
  }

  // For the caller, at the end. Exceptions of other threads were published by done_.
  void RethrowError() {
    // Moved out of the loop, because a late helper may be its last owner.
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  bool Done() const { return done_.load(std::memory_order_acquire) == num_ranges_; }

  const size_t n_;
  const size_t grain_;
  const size_t num_ranges_;
  const RangeFn* const fn_;
  // On separate cache lines, away from the constants above.
  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<size_t> done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // the first exception of fn; protected by mutex_
  std::mutex mutex_;
  std::condition_variable finished_;
};

void RunSerially(size_t n, size_t grain, const RangeFn& fn) {
  for (size_t begin = 0; begin < n;) {
    const size_t end = std::min(n - begin, grain) + begin;
    fn(begin, end);
    begin = end;
  }
}

}  // namespace

void SerialExec::ParallelFor(size_t n, size_t grain, const RangeFn& fn) {
  RunSerially(n, std::max<size_t>(grain, 1), fn);
}

void PoolExec::ParallelFor(size_t n, size_t grain, const RangeFn& fn) {
  grain = std::max<size_t>(grain, 1);
  if (helpers_ == 0 || n <= grain) return RunSerially(n, grain, fn);
  std::shared_ptr<Loop> loop;
  try {
    loop = std::make_shared<Loop>(n, grain, &fn);
    const size_t helpers = std::min(helpers_, NumRanges(n, grain) - 1);
    for (size_t i = 0; i < helpers; ++i) schedule_([loop] { loop->Help(); });
  } catch (const std::bad_alloc&) {
    // The helpers that were scheduled still take part.
    if (loop == nullptr) return RunSerially(n, grain, fn);
  }
  if (!loop->Work()) loop->Wait();
  loop->RethrowError();
}

class ThreadsExec::Pool {
 public:
  explicit Pool(size_t threads) {
    for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }

  // Runs the queued closures, then stops.
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      pending_.fetch_add(1, std::memory_order_relaxed);
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void Schedule(std::function<void()> closure) {
    bool asleep;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(closure));
      pending_.fetch_add(1, std::memory_order_relaxed);
      asleep = sleepers_ > 0;
    }
    if (asleep) wake_.notify_one();
  }

 private:
  // Loops come in bursts, so a thread without work spins for about 50 us before it sleeps.
  static constexpr int kIdleSpins = 1024;

  void Run() {
    for (;;) {
      for (int i = 0; i < kIdleSpins && pending_.load(std::memory_order_relaxed) == 0; ++i) Pause();
      std::function<void()> closure;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ++sleepers_;
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        --sleepers_;
        if (queue_.empty()) return;
        closure = std::move(queue_.front());
        queue_.pop_front();
        pending_.fetch_sub(1, std::memory_order_relaxed);
      }
      closure();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t sleepers_ = 0;
  bool stop_ = false;
  // The size of the queue (plus one after stop_), to be read without the lock. Only a hint, so
  // relaxed.
  std::atomic<size_t> pending_{0};
  std::vector<std::thread> threads_;
};

ThreadsExec::ThreadsExec(size_t threads) {
  const size_t helpers = std::max<size_t>(threads, 1) - 1;
  pool_ = std::make_unique<Pool>(helpers);
  exec_ = std::make_unique<PoolExec>(
      [pool = pool_.get()](std::function<void()> closure) { pool->Schedule(std::move(closure)); },
      helpers);
}

ThreadsExec::~ThreadsExec() = default;

size_t ThreadsExec::parallelism() const { return exec_->parallelism(); }

void ThreadsExec::ParallelFor(size_t n, size_t grain, const RangeFn& fn) {
  exec_->ParallelFor(n, grain, fn);
}

}  // namespace dynemb
