// Replaces operator new in a test's binary, so that allocations can fail. Only one source file of a
// binary may include this header.
#ifndef DYNEMB_TESTS_CC_FAILING_ALLOCATIONS_H_
#define DYNEMB_TESTS_CC_FAILING_ALLOCATIONS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "tests/cc/replaced_new.h"

namespace dynemb {
namespace failing {

constexpr size_t kNever = ~size_t{0};

// The number of allocations of this thread that still succeed; later ones fail.
inline thread_local size_t left = kNever;
// At 1 the next allocation of any thread fails; each allocation counts it down. At 0 or below,
// none fails.
inline std::atomic<int64_t> until{0};

inline void* Allocate(size_t bytes, size_t alignment) {
  if (left == 0) throw std::bad_alloc();
  if (left != kNever) --left;
  if (until.load(std::memory_order_relaxed) > 0 && until.fetch_sub(1) == 1) throw std::bad_alloc();
  if (alignment <= alignof(std::max_align_t)) {
    if (void* p = std::malloc(bytes)) return p;
  } else if (void* p =
                 std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)) {
    return p;
  }
  throw std::bad_alloc();
}

// Calls fn. The calling thread's allocations fail after the first n.
template <class Fn>
void WithAllocations(size_t n, const Fn& fn) {
  struct Restore {
    ~Restore() { left = kNever; }
  } restore;
  left = n;
  fn();
}

// Calls fn. The k-th allocation of any thread fails, k >= 1. *failed: whether there was a k-th
// allocation; also set if fn throws.
template <class Fn>
void WithFailure(int64_t k, bool* failed, const Fn& fn) {
  struct Restore {
    bool* failed;
    ~Restore() { *failed = until.exchange(0) <= 0; }
  } restore{failed};
  until = k;
  fn();
}

// While it exists, allocations neither fail nor count for WithFailure. For a test's own work inside
// the call under test.
class Suspended {
 public:
  Suspended() : until_(until.exchange(0)) {}
  ~Suspended() { until = until_; }
  Suspended(const Suspended&) = delete;
  Suspended& operator=(const Suspended&) = delete;

 private:
  const int64_t until_;
};

}  // namespace failing
}  // namespace dynemb

static void* AllocateForTest(size_t bytes, size_t alignment) {
  return dynemb::failing::Allocate(bytes, alignment);
}

#endif  // DYNEMB_TESTS_CC_FAILING_ALLOCATIONS_H_
