// Device: where a table lives that is not in the host's memory, and how work gets done there. A
// concept, not a class: kernels are templates, compiled once for each device.
//
//   CudaDevice        a GPU (cuda_device.cuh)
//   SimulatedDevice   host memory and host threads in its place (simulated_device.h), so that
//                     everything but the GPU itself is tested, and sanitised, where there is none
//
// A Device is shared by all tables on it and has
//
//   Device::Stream                      a place in line: work given to one stream is done in order
//   static Stream StreamOf(Exec&)       the stream that an operator's Exec stands for
//   Device::Range                       memory that grows in place, as an Arena: Reserve (what it
//                                       gets may be less, see reserved), Commit, Clear, data,
//                                       committed, reserved; of the device. Clear leaves it
//                                       committed. A range ends, or is cleared, only when all work
//                                       that uses it has been given; it waits for it.
//   Device::HostRange                   the same in host memory that kernels reach
//   Device::Session                     what follows
//
// A Session is the only way to give a device work. It holds the workspace of its stream, so that
// work of two tables does not mix, and its calls return at once unless they say otherwise:
//
//   Session(Device&, Stream)            of a stream there is one at a time; others wait for its end
//   void After(Stream other)            what follows waits until `other` has done what sessions
//                                       have given it. A stream that is no more may be named, if
//                                       the device has been told of its end.
//   void ForEach(n, body)               body(i) for i in [0, n): one thread each
//   void ForKeys(n, body)               body(lanes, i): a team of Session::KeyLanes, that works on
//                                       buckets (bucket_ops.h)
//   void ForRows(n, quads, body)        body(lanes, i): a team of RowWidth(quads) threads, that
//                                       deals out a row by quads: four columns, or 16 bytes. No row
//                                       should have more than `quads` of them: what bodies do is
//                                       the same for any number, but takes longer.
//   static uint32_t RowWidth(quads)     how many threads such a team has
//   T* Take<T>(n)                       an array in device memory, until the session ends; null if
//                                       there is no memory, status() then says so
//   Scratch                             while one lives, what Take gives; its end takes it back
//   T* Pinned<T>(n)                     as Take, in host memory, for small copies to and from it;
//                                       until the session ends, whatever Scratch there is
//   void Copy(to, from, bytes)          between any two memories, in line with the rest. Ordinary
//                                       host memory makes it wait, perhaps for all work before it,
//                                       and is free for other use when it returns. With any other
//                                       it returns at once, and `from` must stay as it is until
//                                       the work is done: Pinned does until the session ends.
//   void Fill(p, byte, bytes)           p is in a range, or Taken
//   void ExclusiveSum(values, n)        values[i] = the sum of values[0..i), for u32
//   void SortPairs(keys, values, n, bits = 64)
//                                       by the low `bits` bits of the key (u64), ascending, in
//                                       place; values are u32. Equal ones stay in order. The fewer
//                                       bits, the quicker.
//   Status Synchronize()                waits for all work of the stream; its errors, and status()
//   Status status()                     what has failed so far in giving out the work: the first
//                                       failure, after which nothing more is given out
//
// A body is a trivially copyable struct with `DYNEMB_HD operator() const` that holds values and
// addresses of device memory. Bodies of one launch run in any order and beside each other; where
// they meet on an address they use the functions below, or those of Lanes. The launch after it sees
// everything. No body may wait for another.
#ifndef DYNEMB_DEVICE_DEVICE_H_
#define DYNEMB_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb::device {

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
// CUDA's atomics know unsigned long long, which is another type of the same size as uint64_t.
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

// Returns what *p was.
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

DYNEMB_HD inline void AtomicMax(uint32_t* p, uint32_t value) {
#if defined(__CUDA_ARCH__)
  atomicMax(p, value);
#else
  uint32_t was = __atomic_load_n(p, __ATOMIC_RELAXED);
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

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_DEVICE_H_
