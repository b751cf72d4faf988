// The bucket: seven slots in one cache line.
//
//   byte 0      7 8            36            64
//       ┌───────┬─┬─────────────┬─────────────┐
//       │digests│o│   scores    │   row ids   │
//       │ 7×u8  │ │    7×u32    │    7×u32    │
//       └───────┴─┴─────────────┴─────────────┘
//        head
//
// o is the overflow: the number of keys that passed over this bucket from their home bucket to a
// slot of a later one. It saturates at 255 and is then sticky, until the ring is rebuilt: a segment
// by a split, the index of a device when it grows.
//
// Invariants:
//
// - For every slot, digest == 0 iff row == kNoRow. The slot is then empty, and its score is
//   meaningless.
// - A key with home h and a slot in bucket b is counted once in the overflow of every bucket from h
//   up to b (exclusive, cyclic).
//
// A thread that owns a bucket accesses the head by bytes. Threads that share it access whole words
// of 32 bits, atomically: CUDA has no atomics for bytes, and its memory model does not define
// accesses of different sizes to one address. They change a digest by exclusive or. The changes of
// a slot's digest that an erasure and the next claim make then have the same result in any order.
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
  static constexpr uint32_t kHeadWords = 2;
  static constexpr uint32_t kOverflowByte = 7;

  uint32_t head[kHeadWords];
  Score score[kSlotsPerBucket];  // score.h
  RowId row[kSlotsPerBucket];

  // The bytes of the head, for a thread that owns the bucket.
  uint8_t* digests() { return reinterpret_cast<uint8_t*>(head); }
  const uint8_t* digests() const { return reinterpret_cast<const uint8_t*>(head); }
  uint8_t& overflow() { return digests()[kOverflowByte]; }
  uint8_t overflow() const { return digests()[kOverflowByte]; }
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

DYNEMB_HD inline void ClearBucket(Bucket* b) {
  for (uint32_t& word : b->head) word = 0;
  for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
    b->score[s] = 0;
    b->row[s] = kNoRow;
  }
}

// Lanes::Seen of lanes that read a field when they need it.
template <class Lanes>
struct SeenInPlace {
  const Bucket& bucket;

  DYNEMB_HD Score score(uint32_t slot) const { return Lanes::Load(&bucket.score[slot]); }
  DYNEMB_HD RowId row(uint32_t slot) const { return Lanes::Load(&bucket.row[slot]); }
  DYNEMB_HD uint32_t Empty(Lanes& lanes) const { return lanes.Empty(bucket); }
};

// The base of Lanes (lanes.h) that share buckets: their accesses to heads, by Load, CompareExchange
// and Xor of the lanes.
template <class Lanes>
class SharedHead {
 public:
  DYNEMB_HD static SeenInPlace<Lanes> Seen(const Bucket& bucket) { return {bucket}; }
  DYNEMB_HD static uint8_t Overflow(const Bucket& bucket) {
    return ByteOf(Lanes::Load(&bucket.head[1]), Bucket::kOverflowByte);
  }
  DYNEMB_HD static void ChangeDigest(Bucket* bucket, uint32_t slot, uint8_t was, uint8_t is) {
    Lanes::Xor(&bucket->head[slot / 4], uint32_t{static_cast<uint8_t>(was ^ is)} << slot % 4 * 8);
  }
  DYNEMB_HD static void IncrementSaturating(Bucket* bucket) { ChangeOverflow(bucket, 1); }
  DYNEMB_HD static void DecrementUnlessSticky(Bucket* bucket) { ChangeOverflow(bucket, ~0u); }

 protected:
  DYNEMB_HD static uint8_t ByteOf(uint32_t word, uint32_t byte) {
    return static_cast<uint8_t>(word >> byte % 4 * 8);
  }
  DYNEMB_HD static uint8_t Digest(const Bucket& bucket, uint32_t slot) {
    return ByteOf(Lanes::Load(&bucket.head[slot / 4]), slot);
  }

 private:
  // Adds 1 or -1 to the overflow, unless it is sticky.
  DYNEMB_HD static void ChangeOverflow(Bucket* bucket, uint32_t by) {
    static_assert(Lanes::kShared, "a bucket that is not shared has cheaper accesses");
    constexpr uint32_t kShift = Bucket::kOverflowByte % 4 * 8;
    static_assert(kShift == 24, "a carry leaves the word");
    uint32_t was = Lanes::Load(&bucket->head[1]);
    while (was >> kShift != kOverflowSticky) {
      const uint32_t now = Lanes::CompareExchange(&bucket->head[1], was, was + (by << kShift));
      if (now == was) return;
      was = now;
    }
  }
};

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
  // The rows of a RowStore begin at multiples of 8 bytes, those of other views at multiples of 4.
  DYNEMB_HD K KeyAt(RowId row) const { return LoadUnaligned<K>(RowAt(row)); }
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BUCKET_H_
