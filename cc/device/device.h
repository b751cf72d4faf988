// Device: memory other than the host's that tables can be in, and the execution of work on it. A
// Device is a concept, not a class: kernels are templates, compiled once per device. CudaDevice is
// a GPU (cuda_device.cuh). Tests have a device of host memory and threads (tests/simulated), with
// which they and the sanitizers cover everything except the GPU itself.
//
// All tables on a device share one Device. It has
//
//   Device::Stream                      a queue: work given to one stream is done in order
//   static Stream StreamOf(Exec&)       the stream that an operator's Exec represents
//   Device::Range                       device memory that grows in place, like an Arena: Reserve
//                                       (may reserve less than requested, see reserved), Commit,
//                                       Clear (memory stays committed), data, committed, reserved.
//                                       Clear and the destructor must be called after all work that
//                                       uses the range has been given; they wait for that work.
//   Device::HostRange                   the same, in host memory that kernels can access
//   Device::Session                     see below
//
// A Session is the only way to give work to a device. It holds the workspace of its stream, so that
// the work of two tables does not mix. Its calls return at once unless stated otherwise:
//
//   Session(Device&, Stream)            A stream has one session at a time; the constructor waits
//                                       until the stream's current session has ended.
//   void Publish()                      After, in other sessions, includes all work given so far.
//                                       The destructor publishes the rest.
//   void After(Stream other)            Later work waits until `other` has finished the work that
//                                       sessions have given it and published. `other` may have been
//                                       destroyed since then.
//   void ForEach(n, body)               body(i) for i in [0, n), one thread each
//   void ForKeys(n, body)               body(lanes, i) by a team of Session::KeyLanes, which works
//                                       on buckets (bucket_ops.h)
//   void ForRows(n, quads, body)        body(lanes, i) by a team of RowWidth(quads) threads, which
//                                       divides a row into quads: four columns, or 16 bytes. Rows
//                                       should have at most `quads` quads; wider rows give the same
//                                       result, but take longer.
//   static uint32_t RowWidth(quads)     the number of threads in such a team
//   size_t Teams(quads)                 about the number of such teams that run at the same time
//   T* Take<T>(n)                       an array in device memory, valid until the session ends;
//                                       null if memory runs out, which status() then reports
//   Scratch                             a scope: the arrays taken during its life are freed at its
//                                       end
//   T* Pinned<T>(n)                     like Take, but in host memory, for small copies to and from
//                                       the device. Valid until the session ends, regardless of any
//                                       Scratch.
//   void Copy(to, from, bytes)          copies between any two memories, in order with other work.
//                                       If either is ordinary host memory, the call waits, perhaps
//                                       for all work before it; the memory may be reused when the
//                                       call returns. Otherwise the call returns at once, and
//                                       `from` must stay unchanged until the work is done; Pinned
//                                       memory is valid that long.
//   void Fill(p, byte, bytes)           p is in a range, or from Take
//   void ExclusiveSum(values, n)        values[i] = the sum of values[0..i), for u32
//   void SortPairs(keys, values, n, bits = all)
//                                       sorts in place and stably by the low `bits` bits of the
//                                       keys (u64 or u32), ascending; values are u32. Fewer bits
//                                       and smaller keys take less time.
//   Status Synchronize()                waits for all work of the stream, and returns status(),
//                                       which then includes the errors of that work
//   Status status()                     the first failure so far. After a failure, no more work is
//                                       given to the stream.
//   void Retire(Range)                  gives back the memory of a range, without a wait, when the
//                                       work given so far is done. That work, and what it comes
//                                       after, must include all work that uses the range.
//
// A body is a trivially copyable struct with `DYNEMB_HD operator() const`. It holds values and
// addresses of device memory. The bodies of one launch run in any order and concurrently. Where
// several of them access the same address, they use the functions below, or functions of Lanes. The
// next launch sees all their writes. No body may wait for another. If only the device knows how
// many of the n items there are, the body has `DYNEMB_HD size_t Items() const`; the later items are
// left out.
#ifndef DYNEMB_DEVICE_DEVICE_H_
#define DYNEMB_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cc/table/portability.h"

namespace dynemb::device {

// Whether a body has Items(), for devices.
template <class Body, class = void>
inline constexpr bool kHasItems = false;
template <class Body>
inline constexpr bool kHasItems<Body, std::void_t<decltype(std::declval<const Body&>().Items())>> =
    true;

// Relaxed atomics on device memory, for bodies.

template <class T>
DYNEMB_HD inline T AtomicLoad(const T* p) {
#if defined(__CUDA_ARCH__)
  return *const_cast<const volatile T*>(p);
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

template <class T>
DYNEMB_HD inline void AtomicStore(T* p, T value) {
#if defined(__CUDA_ARCH__)
  *const_cast<volatile T*>(p) = value;
#else
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
#endif
}

#if defined(__CUDA_ARCH__)
// CUDA's atomics take unsigned long long, which is a different type of the same size as uint64_t.
static_assert(sizeof(unsigned long long) == sizeof(uint64_t), "64 bits");
#endif

DYNEMB_HD inline uint32_t AtomicAdd(uint32_t* p, uint32_t by) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(p, by);
#else
  return __atomic_fetch_add(p, by, __ATOMIC_RELAXED);
#endif
}

DYNEMB_HD inline uint64_t AtomicAdd(uint64_t* p, uint64_t by) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(reinterpret_cast<unsigned long long*>(p), by);
#else
  return __atomic_fetch_add(p, by, __ATOMIC_RELAXED);
#endif
}

DYNEMB_HD inline uint32_t AtomicExchange(uint32_t* p, uint32_t value) {
#if defined(__CUDA_ARCH__)
  return atomicExch(p, value);
#else
  return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);
#endif
}

// Returns the previous value of *p.
DYNEMB_HD inline uint32_t AtomicCompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
#if defined(__CUDA_ARCH__)
  return atomicCAS(p, expected, desired);
#else
  __atomic_compare_exchange_n(p, &expected, desired, /*weak=*/false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  return expected;
#endif
}

DYNEMB_HD inline void AtomicMin(uint32_t* p, uint32_t value) {
#if defined(__CUDA_ARCH__)
  atomicMin(p, value);
#else
  uint32_t was = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (value < was && !__atomic_compare_exchange_n(p, &was, value, /*weak=*/true,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

template <class T>  // uint32_t or uint64_t
DYNEMB_HD void AtomicMax(T* p, T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == sizeof(uint32_t)) {
    atomicMax(p, value);
  } else {
    atomicMax(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(value));
  }
#else
  T was = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (value > was && !__atomic_compare_exchange_n(p, &was, value, /*weak=*/true,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

DYNEMB_HD inline uint32_t AtomicAnd(uint32_t* p, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return atomicAnd(p, bits);
#else
  return __atomic_fetch_and(p, bits, __ATOMIC_RELAXED);
#endif
}

DYNEMB_HD inline uint32_t AtomicOr(uint32_t* p, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return atomicOr(p, bits);
#else
  return __atomic_fetch_or(p, bits, __ATOMIC_RELAXED);
#endif
}

DYNEMB_HD inline void AtomicXor(uint32_t* p, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  atomicXor(p, bits);
#else
  __atomic_fetch_xor(p, bits, __ATOMIC_RELAXED);
#endif
}

// Begins to bring the memory at p into the GPU's second cache.
DYNEMB_HD inline void Prefetch([[maybe_unused]] const void* p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" : : "l"(p));
#endif
}

// Two words at an address that is a multiple of 8, by one instruction on a GPU, as two loads.
struct Words {
  uint32_t first, second;
};
DYNEMB_HD inline Words AtomicLoadPair(const uint32_t* p) {
#if defined(__CUDA_ARCH__)
  Words words;
  asm volatile("ld.relaxed.gpu.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.first), "=r"(words.second)
               : "l"(p)
               : "memory");
  return words;
#else
  return {AtomicLoad(p), AtomicLoad(p + 1)};
#endif
}

// The same, of four words at an address that is a multiple of 16.
struct FourWords {
  uint32_t at[4];
};
DYNEMB_HD inline FourWords AtomicLoadFour(const uint32_t* p) {
#if defined(__CUDA_ARCH__)
  FourWords words;
  asm volatile("ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
               : "l"(p)
               : "memory");
  return words;
#else
  return {{AtomicLoad(p), AtomicLoad(p + 1), AtomicLoad(p + 2), AtomicLoad(p + 3)}};
#endif
}

// Adds `by` to *p; the sum of the additions of 32 threads must be below 2^32. On a GPU, the threads
// of a warp that call it together for one address add once: a counter to which all threads of a
// launch add would otherwise be what the launch waits for.
DYNEMB_HD inline void AtomicAddTogether(uint64_t* p, uint32_t by) {
#if defined(__CUDA_ARCH__)
  const unsigned int active = __activemask();
  int is_same = 0;
  __match_all_sync(active, reinterpret_cast<unsigned long long>(p), &is_same);
  if (is_same != 0) {
    by = __reduce_add_sync(active, by);
    if (threadIdx.x % 32 != static_cast<unsigned int>(__ffs(static_cast<int>(active)) - 1)) return;
  }
#endif
  if (by != 0) AtomicAdd(p, uint64_t{by});
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_DEVICE_H_
