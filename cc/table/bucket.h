// The bucket: seven slots in one cache line.
//
//   byte 0      7 8            36            64
//       ┌───────┬─┬─────────────┬─────────────┐
//       │digests│o│ last access │   row ids   │
//       │ 7×u8  │ │    7×u32    │    7×u32    │
//       └───────┴─┴─────────────┴─────────────┘
//
// o is `overflow`: how many keys that hold a slot elsewhere passed over this bucket on their way
// from their home bucket; saturates at 255 and is then sticky until the segment is rebuilt by a
// split.
//
// Invariants, for every slot: digest == 0 iff row == kNoRow (the slot is empty; access is then
// meaningless). A key with home h in a slot of bucket b has counted once in overflow of every
// bucket from h up to b (exclusive, cyclic).
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
  Stamp access[kSlotsPerBucket];
  RowId row[kSlotsPerBucket];
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

DYNEMB_HD inline void ClearBucket(Bucket* b) {
  for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
    b->digest[s] = 0;
    b->access[s] = 0;
    b->row[s] = kNoRow;
  }
  b->overflow = 0;
}

// What the bucket algorithm needs of a table; trivially copyable, passed by value to kernels.
template <class K>
struct TableView {
  Bucket* buckets;            // segment s starts at buckets[s * kBucketsPerSegment]
  const uint32_t* directory;  // 2^depth segment numbers
  uint32_t depth;             // 0..32
  char* rows;                 // row r starts at rows + r * stride, with its key
  uint64_t stride;

  DYNEMB_HD uint32_t SegmentOf(uint32_t prefix) const {
    return directory[static_cast<uint64_t>(prefix) >> (32 - depth)];
  }
  DYNEMB_HD Bucket* SegmentBuckets(uint32_t segment) const {
    return buckets + static_cast<uint64_t>(segment) * kBucketsPerSegment;
  }
  DYNEMB_HD char* RowAt(RowId row) const { return rows + row * stride; }
  // Rows are only 4-byte aligned, so a 64-bit key may not be read as one aligned word.
  DYNEMB_HD K KeyAt(RowId row) const { return LoadUnaligned<K>(RowAt(row)); }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BUCKET_H_
