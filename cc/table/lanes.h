// Lanes: the threads of a team, which cooperate on one key, and their operations on a bucket.
//
// The bucket algorithm (bucket_ops.h) is written once over this concept:
//
//   static constexpr bool kShared      other teams may change the same bucket at the same time
//   uint32_t rank(), width()           this thread's number in its team, and the team's size
//   uint32_t Match(bucket, digest)     collective: bit s is set where slot s has the digest
//   uint32_t Empty(bucket)             collective: bit s is set where slot s is empty
//   Seen(bucket)                       the bucket's score(slot), row(slot) and Empty(lanes), read
//                                      at once, or each when it is needed
//   uint32_t Mask(pred)                collective: bit s is set where pred(s), s < kSlotsPerBucket
//   uint64_t Min(value)                collective: the least value(s), s < kSlotsPerBucket
//   T FromLeader(value)                collective: the value of rank 0
//   T FromRank(value, rank)            collective: the value of this rank; only for rows
//   uint32_t Max(value)                collective: the greatest of the lanes' values
//   T Load(const T*), Store(T*, T)     relaxed atomics where kShared, plain otherwise
//   uint32_t CompareExchange(p, expected, desired)     returns the previous value of *p
//   void Xor(p, bits)                  changes *p to *p ^ bits; only where kShared
//   uint8_t Overflow(bucket)           the overflow of a bucket
//   ChangeDigest(bucket, slot, was, is)                changes the digest of a slot
//   IncrementSaturating(bucket), DecrementUnlessSticky(bucket)    change the overflow
//   static Launch(exec, n, grain, body)
//                                      runs body(lanes, begin, end) over disjoint ranges of [0, n)
//
// All lanes of a team run the same code with the same control flow. Code that writes to memory
// checks rank() == 0, or strides by width().
//
// This header has OneLane, for a host thread that owns the buckets that it changes.
// lanes_cuda.cuh is the CUDA tile; tests emulate a warp with host threads (tests/simulated).
#ifndef DYNEMB_TABLE_LANES_H_
#define DYNEMB_TABLE_LANES_H_

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cc/table/bucket.h"
#include "cc/table/exec.h"

namespace dynemb {

class OneLane {
 public:
  static constexpr bool kShared = false;
  static constexpr uint32_t rank() { return 0; }
  static constexpr uint32_t width() { return 1; }

  static uint32_t Match(const Bucket& bucket, uint8_t digest) {
    constexpr uint32_t kSlots = (1u << kSlotsPerBucket) - 1;
#if defined(__SSE2__)
    const __m128i have = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bucket.head));
    const __m128i want = _mm_set1_epi8(static_cast<char>(digest));
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(have, want))) & kSlots;
#else
    // A byte of x is zero if the digests are equal. The subtraction may also flag a byte above a
    // true match, so the candidates are checked byte by byte. The common result, no match, needs no
    // loop.
    uint64_t x;
    memcpy(&x, bucket.head, sizeof(x));
    x ^= 0x0101010101010101ull * digest;
    if (((x - 0x0101010101010101ull) & ~x & 0x8080808080808080ull) == 0) return 0;
    return Mask([&](uint32_t s) { return bucket.digests()[s] == digest; }) & kSlots;
#endif
  }
  static uint32_t Empty(const Bucket& bucket) { return Match(bucket, 0); }
  static SeenInPlace<OneLane> Seen(const Bucket& bucket) { return {bucket}; }
  template <class Pred>
  static uint32_t Mask(Pred pred) {
    uint32_t mask = 0;
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) mask |= (pred(s) ? 1u : 0u) << s;
    return mask;
  }
  template <class Value>
  static uint64_t Min(Value value) {
    uint64_t least = value(0);
    for (uint32_t s = 1; s < kSlotsPerBucket; ++s) {
      const uint64_t v = value(s);
      least = v < least ? v : least;
    }
    return least;
  }
  template <class T>
  static T FromLeader(T value) {
    return value;
  }
  static uint32_t Max(uint32_t value) { return value; }

  template <class T>
  static T Load(const T* p) {
    return *p;
  }
  template <class T>
  static void Store(T* p, T value) {
    *p = value;
  }
  static uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    const uint32_t was = *p;
    if (was == expected) *p = desired;
    return was;
  }
  static uint8_t Overflow(const Bucket& bucket) { return bucket.overflow(); }
  static void ChangeDigest(Bucket* bucket, uint32_t slot, uint8_t /*was*/, uint8_t is) {
    bucket->digests()[slot] = is;
  }
  static void IncrementSaturating(Bucket* bucket) {
    bucket->overflow() += bucket->overflow() != kOverflowSticky;
  }
  static void DecrementUnlessSticky(Bucket* bucket) {
    bucket->overflow() -= bucket->overflow() != kOverflowSticky;
  }

  template <class Body>
  static void Launch(Exec& exec, size_t n, size_t grain, const Body& body) {
    exec.ParallelFor(n, grain, [&body](size_t begin, size_t end) {
      OneLane lane;
      body(lane, begin, end);
    });
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_LANES_H_
