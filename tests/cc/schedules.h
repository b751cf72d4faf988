// Schedules: runs a few threads under every schedule with a few deviations, one after the other.
//
// A thread is a function that calls Schedules::Access before each access to shared memory, as
// ExploredLane (below) does. One thread runs at a time. Without a deviation, a thread runs to its
// end, and then any other one. A deviation is
//
//   - a change to another thread before an access, or
//   - a delay of a write until the end of its thread: CUDA's relaxed atomics on different addresses
//     may take effect in any order. An access of the same thread to the same address ends the
//     delay.
//
// The search is stateless: each run starts from the beginning, and repeats the choices of the run
// before it up to the last one that has an alternative (Godefroid, "Model Checking for Programming
// Languages using VeriSoft", POPL 1997; the bound is from Musuvathi and Qadeer, "Iterative Context
// Bounding for Systematic Testing of Multithreaded Programs", PLDI 2007).
//
// Threads are contexts on separate stacks (ucontext.h), which the sanitizers do not follow.
#ifndef DYNEMB_TESTS_CC_SCHEDULES_H_
#define DYNEMB_TESTS_CC_SCHEDULES_H_

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/bucket.h"
#include "cc/table/lanes.h"

namespace dynemb {
namespace testing_schedules {

class Schedules {
 public:
  using Thread = std::function<void()>;

  // begin() resets the shared memory and returns the threads; check() returns what is wrong after a
  // run, or nothing.
  Schedules(std::function<std::vector<Thread>()> begin, std::function<std::string()> check,
            size_t deviations)
      : begin_(std::move(begin)), check_(std::move(check)), most_deviations_(deviations) {}

  // Runs every schedule, until one is wrong. Returns what is wrong.
  std::string Explore();
  size_t runs() const { return runs_; }

  // For threads. A thread is about to access a word; a write goes through Write, and takes effect
  // now or later.
  static void Access(const void* word) { running->BeforeAccess(word); }
  static void Write(uint32_t* word, const std::function<void()>& write) {
    running->BeforeWrite(word, write);
  }

 private:
  struct Choice {
    size_t taken, options;
  };
  struct Delayed {
    size_t thread;
    const void* word;
    std::function<void()> write;
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool ended = false;
  };
  static constexpr size_t kStackBytes = size_t{64} << 10;
  static constexpr size_t kMostAccesses = 100000;

  static void RunThread();
  void RunOnce();
  void BeforeAccess(const void* word);
  void BeforeWrite(uint32_t* word, const std::function<void()>& write);
  void Commit(size_t thread, const void* word);
  // One of `options` alternatives, of which 0 is no deviation.
  size_t Choose(size_t options, bool is_deviation);
  std::vector<size_t> OtherThreads() const;

  static Schedules* running;

  const std::function<std::vector<Thread>()> begin_;
  const std::function<std::string()> check_;
  const size_t most_deviations_;
  size_t runs_ = 0;

  // The state of a run:
  std::vector<Choice> choices_;
  size_t next_choice_ = 0, deviations_ = 0, accesses_ = 0;
  std::vector<Thread> threads_;
  std::vector<Fiber> fibers_;
  std::vector<Delayed> delayed_;
  size_t current_ = 0;
  ucontext_t scheduler_;
};

// A lane that is alone in its team, and accesses shared words through Schedules.
class ExploredLane : public SharedHead<ExploredLane> {
 public:
  static constexpr bool kShared = true;
  static constexpr uint32_t rank() { return 0; }
  static constexpr uint32_t width() { return 1; }

  static uint32_t Match(const Bucket& bucket, uint8_t digest) {
    const uint32_t words[] = {Load(&bucket.head[0]), Load(&bucket.head[1])};
    return OneLane::Mask([&](uint32_t s) { return ByteOf(words[s / 4], s) == digest; });
  }
  static uint32_t Empty(const Bucket& bucket) {
    return OneLane::Mask([&](uint32_t s) { return Load(&bucket.row[s]) == kNoRow; });
  }
  template <class Value>
  static uint64_t Min(Value value) {
    return OneLane::Min(value);
  }
  template <class T>
  static T FromLeader(T value) {
    return value;
  }
  static uint32_t Load(const uint32_t* p) {
    Schedules::Access(p);
    return *p;
  }
  static void Store(uint32_t* p, uint32_t value) {
    Schedules::Write(p, [p, value] { *p = value; });
  }
  static void Xor(uint32_t* p, uint32_t bits) {
    Schedules::Write(p, [p, bits] { *p ^= bits; });
  }
  static uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    Schedules::Access(p);
    return OneLane::CompareExchange(p, expected, desired);
  }
};

}  // namespace testing_schedules
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SCHEDULES_H_
