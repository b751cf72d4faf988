// Exec: runs a function over a range of n items, by one thread or by several.
//
// Contract. ParallelFor(n, grain, fn) calls fn(begin, end) on disjoint ranges that cover [0, n),
// each of about `grain` items (the last may be shorter), from any thread, in any order, and returns
// when all calls have returned. The caller's thread takes part and needs no other thread's progress
// to finish: helpers only take ranges nobody has started. So ParallelFor may be called while
// holding a lock that the pool's other threads wait for.
//
// Exceptions. If fn throws, on whichever thread, ranges that nobody has started are left out;
// ParallelFor waits for the others and then throws the first exception to the caller. ParallelFor
// itself never throws: without memory for helpers it runs on the caller's thread.
#ifndef DYNEMB_TABLE_EXEC_H_
#define DYNEMB_TABLE_EXEC_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>

namespace dynemb {

// A reference to a function object void(size_t begin, size_t end), which must outlive it. Unlike
// std::function it allocates nothing.
class RangeFn {
 public:
  template <class Fn, class = std::enable_if_t<!std::is_same_v<std::decay_t<Fn>, RangeFn>>>
  RangeFn(const Fn& fn)  // NOLINT(runtime/explicit): lambdas are passed as they are
      : object_(&fn), call_([](const void* object, size_t begin, size_t end) {
          (*static_cast<const Fn*>(object))(begin, end);
        }) {}
  void operator()(size_t begin, size_t end) const { call_(object_, begin, end); }

 private:
  const void* object_;
  void (*call_)(const void* object, size_t begin, size_t end);
};

class Exec {
 public:
  virtual ~Exec() = default;
  // How many threads can work at once; at least 1.
  virtual size_t parallelism() const = 0;
  virtual void ParallelFor(size_t n, size_t grain, const RangeFn& fn) = 0;
};

// Runs everything on the caller's thread.
class SerialExec final : public Exec {
 public:
  size_t parallelism() const override { return 1; }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override;
};

// Runs on the caller's thread and up to `helpers` closures given to `schedule`, which must run each
// of them once, eventually, on some other thread (a thread pool's Schedule).
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

// Owns `threads - 1` threads; for tests and benchmarks without TensorFlow.
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
