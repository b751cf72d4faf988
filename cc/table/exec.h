// Exec: runs a function over a range of n items, on one thread or on several.
//
// Contract. ParallelFor(n, grain, fn) calls fn(begin, end) on disjoint ranges that cover [0, n),
// from any thread and in any order, and returns when all calls have returned.
//
// - Every range begins at a multiple of `grain` and has `grain` items, except the last, which may
//   have fewer. If n is 0, fn is not called. Callers may derive a range's number from its begin.
// - A grain of 0 counts as 1. A range should take a few microseconds: taking a range costs an
//   atomic increment and, the first time, a cache miss. Very long ranges leave threads idle at the
//   end.
// - The caller's thread takes part and needs no progress of other threads to finish: helpers only
//   take ranges that no thread has started. ParallelFor may therefore be called while the caller
//   holds a lock that other threads of the pool wait for.
//
// Exceptions. If fn throws, on any thread, ranges that no thread has started are skipped;
// ParallelFor waits for the others and then throws the first exception to the caller. It adds no
// exceptions: if there is no memory for helpers, it runs on the caller's thread.
#ifndef DYNEMB_TABLE_EXEC_H_
#define DYNEMB_TABLE_EXEC_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "cc/table/function_ref.h"

namespace dynemb {

using RangeFn = FunctionRef<void(size_t begin, size_t end)>;

class Exec {
 public:
  virtual ~Exec() = default;
  // The number of threads that can work at the same time; at least 1.
  virtual size_t parallelism() const = 0;
  virtual void ParallelFor(size_t n, size_t grain, const RangeFn& fn) = 0;
};

// Runs all ranges on the caller's thread.
class SerialExec final : public Exec {
 public:
  size_t parallelism() const override { return 1; }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override;
};

// Runs on the caller's thread and in up to `helpers` closures that it passes to `schedule`, which
// must run each of them once, eventually, on another thread (the Schedule of a thread pool).
class PoolExec final : public Exec {
 public:
  using Schedule = std::function<void(std::function<void()>)>;
  PoolExec(Schedule schedule, size_t helpers) : schedule_(std::move(schedule)), helpers_(helpers) {}
  size_t parallelism() const override { return helpers_ + 1; }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override;

 private:
  Schedule schedule_;
  size_t helpers_;
};

// Owns `threads - 1` threads. For programs without TensorFlow.
class ThreadsExec final : public Exec {
 public:
  explicit ThreadsExec(size_t threads);
  ~ThreadsExec() override;
  size_t parallelism() const override;
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override;

 private:
  class Pool;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<PoolExec> exec_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_EXEC_H_
