// Find, claim, evict and erase in a ring of buckets: the table's algorithm, written once over Lanes
// (lanes.h).
//
// A key's path is its home bucket, followed by the next buckets of its ring in cyclic order. On the
// host, a ring is a segment, given by its first bucket. In device memory, it is the whole index
// (flat_index.h). A ring is a type with three functions: OnPath, PathLength, ProbeIn.
//
// Concurrency:
//
// - Find may run concurrently with anything that only stamps.
// - Claim and Evict must be called for keys that are not in the table.
// - With Lanes::kShared, several teams may work on the same bucket, for distinct keys. The
//   compare-and-swap on a slot's row id (Claim) or last access (Evict) decides which team gets the
//   slot.
// - Without kShared, one thread owns the segment, and the swaps are plain stores.
#ifndef DYNEMB_TABLE_BUCKET_OPS_H_
#define DYNEMB_TABLE_BUCKET_OPS_H_

#include "cc/table/bucket.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb {

struct SlotRef {
  Bucket* bucket = nullptr;  // nullptr: not found
  uint32_t slot = 0;
  RowId row = kNoRow;
};

// The ring functions of a segment: the bucket that is `step` buckets after the home bucket, the
// number of buckets, and the home bucket and digest of a hash.
DYNEMB_HD inline Bucket* OnPath(Bucket* segment, uint32_t home, uint32_t step) {
  return segment + ((home + step) & (kBucketsPerSegment - 1));
}
DYNEMB_HD constexpr uint32_t PathLength(const Bucket*) { return kBucketsPerSegment; }
DYNEMB_HD inline Probe ProbeIn(const Bucket*, uint64_t hash) { return MakeProbe(hash); }

namespace internal {

DYNEMB_HD inline uint32_t LowestBit(uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(mask)) - 1;
#else
  return static_cast<uint32_t>(__builtin_ctz(mask));
#endif
}

DYNEMB_HD inline uint32_t CountBits(uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(mask));
#else
  return static_cast<uint32_t>(__builtin_popcount(mask));
#endif
}

// Removes a key with this home bucket and a slot in `bucket` from the overflow counts of its path.
template <class Lanes, class Ring>
DYNEMB_HD void UncountPath(Lanes& lanes, Ring ring, uint32_t home, const Bucket* bucket) {
  if (lanes.rank() != 0) return;
  for (uint32_t i = 0; OnPath(ring, home, i) != bucket; ++i) {
    lanes.DecrementUnlessSticky(&OnPath(ring, home, i)->overflow);
  }
}

}  // namespace internal

// The slot of `key`, whose home bucket and digest are in `probe`. `view` is a TableView, or has its
// KeyAt.
template <class Lanes, class View, class Ring, class Probe, class K>
DYNEMB_HD SlotRef Find(Lanes& lanes, const View& view, Ring ring, Probe probe, K key) {
  for (uint32_t i = 0; i < PathLength(ring); ++i) {
    Bucket* bucket = OnPath(ring, probe.home, i);
    uint32_t mask = lanes.Match(bucket->digest, probe.digest);
    while (mask != 0) {
      const uint32_t slot = internal::LowestBit(mask);
      mask &= mask - 1;
      const RowId row = lanes.FromLeader(lanes.Load(&bucket->row[slot]));
      if (row != kNoRow && view.KeyAt(row) == key) return {bucket, slot, row};
    }
    if (lanes.FromLeader(lanes.Load(&bucket->overflow)) == 0) break;
  }
  return {};
}

// Gives the key an empty slot on its path, and stores `row` there with last access `now`. The
// caller must write the key into the row before any thread looks for it.
//
// Returns no bucket if the ring is full. The overflow counts then include the key, which costs
// later probes a step; a rebuild of the ring, as by a split, corrects them.
template <class Lanes, class Ring, class Probe>
DYNEMB_HD SlotRef Claim(Lanes& lanes, Ring ring, Probe probe, RowId row, Stamp now) {
  for (uint32_t i = 0; i < PathLength(ring); ++i) {
    Bucket* bucket = OnPath(ring, probe.home, i);
    for (;;) {
      const uint32_t empty = lanes.Empty(*bucket);
      if (empty == 0) break;
      const uint32_t slot = internal::LowestBit(empty);
      uint32_t was = 0;
      if (lanes.rank() == 0) was = lanes.CompareExchange(&bucket->row[slot], kNoRow, row);
      if (lanes.FromLeader(was) != kNoRow) continue;  // lost the slot to another team; retry
      if (lanes.rank() == 0) {
        lanes.Store(&bucket->access[slot], now);
        lanes.Store(&bucket->digest[slot], probe.digest);
      }
      return {bucket, slot, row};
    }
    if (lanes.rank() == 0) lanes.IncrementSaturating(&bucket->overflow);
  }
  return {};
}

// The number of rows on the new key's path that are compared to choose a victim. Eviction from a
// table of up to this many rows is exactly LRU. In a larger table the victim is on average among
// the oldest 9% of the rows (docs/design.md, "Two passes").
constexpr uint32_t kEvictRows = 28;

// Evicts a key that was last accessed before `now`, and gives its slot and row to the new key. The
// victim is the least recently used of about the first kEvictRows keys on the new key's path. If
// all of these were accessed at `now`, the search continues along the path until a bucket has an
// older key.
//
// The returned row still has the evicted key and its vector; the caller overwrites them. Returns no
// bucket if the ring has no key older than `now`.
template <class Lanes, class View, class Ring, class Probe>
DYNEMB_HD SlotRef Evict(Lanes& lanes, const View& view, Ring ring, Probe probe, Stamp now) {
  constexpr uint64_t kNone = ~0ull;
  const Stamp rank_now = view.order.Rank(now);
  for (;;) {
    uint64_t oldest = kNone;
    Bucket* bucket = nullptr;
    uint32_t compared = 0;
    for (uint32_t i = 0; i < PathLength(ring); ++i) {
      if (compared >= kEvictRows && oldest != kNone) break;
      Bucket* b = OnPath(ring, probe.home, i);
      const uint32_t held = ~lanes.Empty(*b) & ((1u << kSlotsPerBucket) - 1);
      const uint64_t least = lanes.Min([&](uint32_t s) {
        const Stamp rank = view.order.Rank(lanes.Load(&b->access[s]));
        return ((held >> s) & 1) != 0 && rank < rank_now ? (static_cast<uint64_t>(rank) << 8) | s
                                                         : kNone;
      });
      compared += internal::CountBits(held);
      if (least < oldest) {
        oldest = least;
        bucket = b;
      }
    }
    if (oldest == kNone) return {};
    const auto slot = static_cast<uint32_t>(oldest & 0xFF);
    const Stamp access = view.order.Ranked(static_cast<Stamp>(oldest >> 8));
    uint32_t was = 0;
    // The team that wins this swap has stamped the slot with `now`, so no other team can choose it
    // again in this batch.
    if (lanes.rank() == 0) was = lanes.CompareExchange(&bucket->access[slot], access, now);
    if (lanes.FromLeader(was) != access) continue;  // lost the slot to another team; retry

    const RowId row = bucket->row[slot];
    if (lanes.rank() == 0) {  // before this caller overwrites the evicted key
      const uint32_t old_home = ProbeIn(ring, view.HashOf(view.KeyAt(row))).home;
      internal::UncountPath(lanes, ring, old_home, bucket);
      for (uint32_t i = 0; OnPath(ring, probe.home, i) != bucket; ++i) {
        lanes.IncrementSaturating(&OnPath(ring, probe.home, i)->overflow);
      }
      lanes.Store(&bucket->digest[slot], probe.digest);
    }
    return {bucket, slot, row};
  }
}

// Empties the slot. Returns false if another team has emptied it already.
template <class Lanes, class Ring, class Probe>
DYNEMB_HD bool Erase(Lanes& lanes, Ring ring, Probe probe, const SlotRef& at) {
  uint32_t was = 0;
  if (lanes.rank() == 0) was = lanes.CompareExchange(&at.bucket->row[at.slot], at.row, kNoRow);
  if (lanes.FromLeader(was) != at.row) return false;
  if (lanes.rank() == 0) lanes.Store(&at.bucket->digest[at.slot], uint8_t{0});
  internal::UncountPath(lanes, ring, probe.home, at.bucket);
  return true;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BUCKET_OPS_H_
