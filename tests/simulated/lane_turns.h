// LaneTurns: runs the lanes of an emulated team to their ends, for LockstepLanes.
//
// Each lane is a context with its own stack, and all lanes of a team take turns in the calling
// thread: a lane runs until it calls Yield. A turn costs some nanoseconds, which is a hundredth of
// the cost of a thread that yields to another one. Lanes are threads under the thread sanitizer,
// which is to look for races between them, and on processors other than x86-64, on which contexts
// were not tried.
#ifndef DYNEMB_TESTS_LANE_TURNS_H_
#define DYNEMB_TESTS_LANE_TURNS_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define DYNEMB_LANES_ARE_CONTEXTS 1
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace dynemb {

#ifdef DYNEMB_LANES_ARE_CONTEXTS

class LaneTurns {
 public:
  static constexpr bool kThreads = false;

  // Calls run(rank) for each rank below `lanes`, and returns when all calls have returned.
  void Run(uint32_t lanes, const std::function<void(uint32_t)>& run) {
    run_ = &run;
    left_ = lanes;
    current_ = 0;
    caller_ = {};
    stacks_.reset(new char[lanes * kStackBytes]);
    lanes_.assign(lanes, {});
    for (uint32_t r = 0; r < lanes; ++r) {
      lanes_[r].stack = &stacks_[r * kStackBytes];
      std::memcpy(&stacks_[r * kStackBytes], &kUnused, sizeof kUnused);
      lanes_[r].bytes = kStackBytes;
    }
    Switch(&caller_, &lanes_[0]);
    for (uint32_t r = 0; r < lanes; ++r) {
      if (std::memcmp(&stacks_[r * kStackBytes], &kUnused, sizeof kUnused) == 0) continue;
      std::fprintf(stderr, "a lane needs a stack of more than %zu bytes\n", kStackBytes);
      std::abort();
    }
  }

  // Lets other lanes run. For a lane that waits for them.
  void Yield() {
    Lane* const from = &lanes_[current_];
    Lane* const to = Next();
    if (to != from) Switch(from, to);
  }

 private:
  static constexpr size_t kStackBytes = size_t{64} << 10;
  // At the end of each stack.
  static constexpr uint64_t kUnused = 0x5374616b65205f21;

  struct Lane {
    void* resume[5];  // of __builtin_setjmp
    const void* stack = nullptr;
    size_t bytes = 0;
    void* fake_stack = nullptr;  // the address sanitizer's
    bool started = false, ended = false;
  };

  // The lane after the current one that has not ended. It becomes the current one.
  Lane* Next() {
    do {
      current_ = current_ + 1 == lanes_.size() ? 0 : current_ + 1;
    } while (lanes_[current_].ended);
    return &lanes_[current_];
  }

  // Returns when somebody enters `from` again. This and Enter are two functions because
  // __builtin_longjmp must not be called by the function that calls __builtin_setjmp.
  __attribute__((noinline, no_sanitize_address)) void Switch(Lane* from, Lane* to) {
    LeaveStack(&from->fake_stack, *to);
    if (__builtin_setjmp(from->resume) == 0) Enter(to);
    HaveEntered(from->fake_stack, nullptr);
  }

  __attribute__((noinline, noreturn, no_sanitize_address)) void Enter(Lane* lane) {
    if (lane == &caller_ || lane->started) __builtin_longjmp(lane->resume, 1);
    lane->started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = const_cast<void*>(lane->stack);
    context.uc_stack.ss_size = lane->bytes;
    context.uc_link = nullptr;
    const auto self = reinterpret_cast<uint64_t>(this);
    makecontext(&context, reinterpret_cast<void (*)()>(&LaneTurns::RunLane), 2,
                static_cast<uint32_t>(self >> 32), static_cast<uint32_t>(self));
    setcontext(&context);
    __builtin_unreachable();
  }

  // The first function on a lane's stack. The arguments of makecontext are of 32 bits.
  __attribute__((no_sanitize_address)) static void RunLane(uint32_t high, uint32_t low) {
    auto* const self = reinterpret_cast<LaneTurns*>(uint64_t{high} << 32 | low);
    const uint32_t rank = self->current_;
    self->HaveEntered(nullptr, rank == 0 ? &self->caller_ : nullptr);
    (*self->run_)(rank);
    self->lanes_[rank].ended = true;
    Lane* const to = --self->left_ == 0 ? &self->caller_ : self->Next();
    LeaveStack(nullptr, *to);
    self->Enter(to);
  }

  // Tell the address sanitizer. `left`: learns its stack.
  static void LeaveStack([[maybe_unused]] void** fake_stack, [[maybe_unused]] const Lane& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, to.stack, to.bytes);
#endif
  }
  static void HaveEntered([[maybe_unused]] void* fake_stack, [[maybe_unused]] Lane* left) {
#if defined(__SANITIZE_ADDRESS__)
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &stack, &bytes);
    if (left != nullptr) left->stack = stack, left->bytes = bytes;
#endif
  }

  const std::function<void(uint32_t)>* run_ = nullptr;
  Lane caller_;
  std::vector<Lane> lanes_;
  std::unique_ptr<char[]> stacks_;
  uint32_t current_ = 0, left_ = 0;
};

#else

class LaneTurns {
 public:
  static constexpr bool kThreads = true;

  void Run(uint32_t lanes, const std::function<void(uint32_t)>& run) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < lanes; ++rank) threads.emplace_back(run, rank);
    for (std::thread& thread : threads) thread.join();
  }

  void Yield() { std::this_thread::yield(); }
};

#endif

}  // namespace dynemb

#endif  // DYNEMB_TESTS_LANE_TURNS_H_
