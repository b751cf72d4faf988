// The bucket: seven slots in one cache line.
//
//   byte 0      7 8            36            64
//       ┌───────┬─┬─────────────┬─────────────┐
//       │digests│o│   scores    │   row ids   │
//       │ 7×u8  │ │    7×u32    │    7×u32    │
//       └───────┴─┴─────────────┴─────────────┘
//
// o is `overflow`: the number of keys that passed over this bucket from their home bucket to a slot
// of a later one. It saturates at 255 and is then sticky, until the ring is rebuilt: a segment by a
// split, the index of a device when it grows.
//
// Invariants:
//
// - For every slot, digest == 0 iff row == kNoRow. The slot is then empty, and its score is
//   meaningless.
// - A key with home h and a slot in bucket b is counted once in the overflow of every bucket from h
//   up to b (exclusive, cyclic).
#ifndef DYNEMB_TABLE_BUCKET_H_
#define DYNEMB_TABLE_BUCKET_H_

#include <cstdint>

#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"
#include "cc/table/unaligned.h"

namespace dynemb {

constexpr uint32_t kSlotsPerBucket = 7;
constexpr uint32_t kSlotsPerSegment = kSlotsPerBucket * kBucketsPerSegment;
constexpr uint8_t kOverflowSticky = 255;

struct alignas(64) Bucket {
  uint8_t digest[kSlotsPerBucket];
  uint8_t overflow;
  Score score[kSlotsPerBucket];  // score.h
  RowId row[kSlotsPerBucket];
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

DYNEMB_HD inline void ClearBucket(Bucket* b) {
  for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
    b->digest[s] = 0;
    b->score[s] = 0;
    b->row[s] = kNoRow;
  }
  b->overflow = 0;
}

// Adds 1 or -1 to an overflow count that other threads may change concurrently, unless it is
// sticky.
DYNEMB_HD inline void ChangeOverflow(uint8_t* count, int by) {
#if defined(__CUDA_ARCH__)
  // CUDA has no atomics for bytes, so this is a compare-and-swap of the aligned word that contains
  // the byte. If another thread stores a digest in the same word at that time, the compare-and-swap
  // either fails or sees the digest, because both are single accesses to one address in L2.
  const auto address = reinterpret_cast<uintptr_t>(count);
  auto* word = reinterpret_cast<uint32_t*>(address & ~uintptr_t{3});
  const uint32_t shift = static_cast<uint32_t>(address & 3) * 8;
  uint32_t was = *const_cast<const volatile uint32_t*>(word);
  for (;;) {
    const uint32_t there = (was >> shift) & 0xFF;
    if (there == kOverflowSticky) return;
    const uint32_t desired =
        (was & ~(0xFFu << shift)) | (((there + static_cast<uint32_t>(by)) & 0xFF) << shift);
    const uint32_t now = atomicCAS(word, was, desired);
    if (now == was) return;
    was = now;
  }
#else
  uint8_t was = __atomic_load_n(count, __ATOMIC_RELAXED);
  while (was != kOverflowSticky &&
         !__atomic_compare_exchange_n(count, &was, static_cast<uint8_t>(was + by), /*weak=*/true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// An array of 2^depth entries, indexed by the top bits of a prefix. An entry is the number of a
// segment or, if its top bit (kInner) is set, of an inner directory of the next level (index.h).
struct Directory {
  const uint32_t* entries;
  uint32_t depth;  // 0..32
  uint32_t level;

  static constexpr uint32_t kInner = 1u << 31;
  DYNEMB_HD uint32_t Entry(uint32_t prefix) const {
    return entries[static_cast<uint64_t>(prefix) >> (32 - depth)];
  }
};

// The segment of a hash, where `entry` is the entry of its outer directory.
DYNEMB_HD inline uint32_t InnerSegmentOf(const Directory* inner, uint32_t entry, uint64_t hash) {
  while (entry >= Directory::kInner) {
    const Directory& d = inner[entry - Directory::kInner];
    entry = d.Entry(PrefixOf(hash, d.level));
  }
  return entry;
}

// The part of a table that the bucket algorithm needs. Trivially copyable; passed by value to
// kernels.
template <class K>
struct TableView {
  Bucket* buckets;         // segment s starts at buckets[s * kBucketsPerSegment]
  Directory directory;     // of level 0
  const Directory* inner;  // the inner directories, by number
  uint64_t salt;
  char* rows;  // row r starts at rows + r * stride, with its key
  uint64_t stride;

  DYNEMB_HD uint64_t HashOf(K key) const { return HashKey(key, salt); }
  DYNEMB_HD uint32_t SegmentOf(uint64_t hash) const {
    const uint32_t entry = directory.Entry(PrefixOf(hash));
    return entry < Directory::kInner ? entry : InnerSegmentOf(inner, entry, hash);
  }
  DYNEMB_HD Bucket* SegmentBuckets(uint32_t segment) const {
    return buckets + static_cast<uint64_t>(segment) * kBucketsPerSegment;
  }
  DYNEMB_HD char* RowAt(RowId row) const { return rows + row * stride; }
  // Rows are only 4-byte aligned, so a 64-bit key must not be read as one aligned word.
  DYNEMB_HD K KeyAt(RowId row) const { return LoadUnaligned<K>(RowAt(row)); }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BUCKET_H_
