// CudaTile: W neighboring threads of a warp, which work together on a bucket or on a row. In tiles
// of eight or more threads, each thread examines at most one slot of a bucket; in smaller tiles,
// threads stride over the slots.
//
// Collectives are warp votes and reductions of cooperative groups; swaps are 32-bit atomics.
#ifndef DYNEMB_TABLE_LANES_CUDA_CUH_
#define DYNEMB_TABLE_LANES_CUDA_CUH_

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <cstdint>

#include "cc/table/bucket.h"

namespace dynemb {

// W is a power of two up to 32.
template <uint32_t W>
class CudaTile : public SharedHead<CudaTile<W>> {
 public:
  static_assert(W > 0 && W <= 32 && (W & (W - 1)) == 0, "a part of a warp");
  static constexpr bool kShared = true;
  static constexpr uint32_t kWidth = W;
  using Head = SharedHead<CudaTile<W>>;
  using Group = cooperative_groups::thread_block_tile<kWidth>;

  __device__ explicit CudaTile(const Group& group) : group_(group) {}

  __device__ uint32_t rank() const { return group_.thread_rank(); }
  static constexpr __host__ __device__ uint32_t width() { return kWidth; }

  __device__ uint32_t Match(const Bucket& bucket, uint8_t digest) {
    return Mask([&](uint32_t s) { return Head::Digest(bucket, s) == digest; });
  }
  // Tests the row id, which a claim swaps first; it stores the digest later.
  __device__ uint32_t Empty(const Bucket& bucket) {
    return Mask([&](uint32_t s) { return Load(&bucket.row[s]) == kNoRow; });
  }
  template <class Pred>
  __device__ uint32_t Mask(Pred pred) {
    if constexpr (W >= kSlotsPerBucket) {
      const bool mine = rank() < kSlotsPerBucket && pred(rank());
      return group_.ballot(mine);
    } else {
      uint32_t mine = 0;
      for (uint32_t s = rank(); s < kSlotsPerBucket; s += W) mine |= (pred(s) ? 1u : 0u) << s;
      return cooperative_groups::reduce(group_, mine, cooperative_groups::bit_or<uint32_t>());
    }
  }
  template <class Value>
  __device__ uint64_t Min(Value value) {
    uint64_t mine = ~uint64_t{0};
    for (uint32_t s = rank(); s < kSlotsPerBucket; s += W) {
      const uint64_t v = value(s);
      mine = v < mine ? v : mine;
    }
    return cooperative_groups::reduce(group_, mine, cooperative_groups::less<uint64_t>());
  }
  // T has at most 32 bytes.
  template <class T>
  __device__ T FromLeader(T value) {
    return group_.shfl(value, 0);
  }
  template <class T>
  __device__ T FromRank(T value, uint32_t rank) {
    return group_.shfl(value, rank);
  }
  __device__ uint32_t Max(uint32_t value) {
    return cooperative_groups::reduce(group_, value, cooperative_groups::greater<uint32_t>());
  }

  template <class T>
  static __device__ T Load(const T* p) {
    return *const_cast<const volatile T*>(p);
  }
  template <class T>
  static __device__ void Store(T* p, T value) {
    *const_cast<volatile T*>(p) = value;
  }
  static __device__ uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    return atomicCAS(p, expected, desired);
  }
  static __device__ void Xor(uint32_t* p, uint32_t bits) { atomicXor(p, bits); }

 private:
  Group group_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_LANES_CUDA_CUH_
