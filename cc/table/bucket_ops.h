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
//   compare-and-swap on a slot's row id (Claim), or on its score or a pin (Evict), decides which
//   team gets the slot.
// - Without kShared, one thread owns the segment, and the swaps are plain stores.
#ifndef DYNEMB_TABLE_BUCKET_OPS_H_
#define DYNEMB_TABLE_BUCKET_OPS_H_

#include "cc/table/bits.h"
#include "cc/table/bucket.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/stamps.h"
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

// Removes a key with this home bucket and a slot in `bucket` from the overflow counts of its path.
template <class Lanes, class Ring>
DYNEMB_HD void UncountPath(Lanes& lanes, Ring ring, uint32_t home, const Bucket* bucket) {
  if (lanes.rank() != 0) return;
  for (uint32_t i = 0; OnPath(ring, home, i) != bucket; ++i) {
    lanes.DecrementUnlessSticky(OnPath(ring, home, i));
  }
}

// Stores `row` in an empty slot of the bucket, for a key with this digest. Returns false if there
// is none. `score_first`: the score is stored before the row, as other teams compare the scores of
// this bucket's rows now, and all that claim slots have the same score.
template <class Lanes>
DYNEMB_HD bool ClaimIn(Lanes& lanes, Bucket* bucket, uint8_t digest, RowId row, Score score,
                       bool score_first, uint32_t* slot) {
  for (;;) {
    const uint32_t empty = lanes.Empty(*bucket);
    if (empty == 0) return false;
    *slot = LowestBit(empty);
    RowId was = kNoRow;
    if (lanes.rank() == 0) {
      if (score_first) {
        // Not a store, which others might see after the row. The row's swap depends on the result.
        const Score stale = lanes.Load(&bucket->score[*slot]);
        const Score seen = lanes.CompareExchange(&bucket->score[*slot], stale, score);
        if (seen != stale) was = row;  // another team is changing the slot
      }
      if (was == kNoRow) was = lanes.CompareExchange(&bucket->row[*slot], kNoRow, row);
    }
    if (lanes.FromLeader(was) != kNoRow) continue;  // lost the slot to another team; retry
    if (lanes.rank() == 0) {
      if (!score_first) lanes.Store(&bucket->score[*slot], score);
      lanes.ChangeDigest(bucket, *slot, 0, digest);
    }
    return true;
  }
}

}  // namespace internal

// The slot of `key`, whose home bucket and digest are in `probe`. `view` is a TableView, or has its
// KeyAt.
template <class Lanes, class View, class Ring, class Probe, class K>
DYNEMB_HD SlotRef Find(Lanes& lanes, const View& view, Ring ring, Probe probe, K key) {
  for (uint32_t i = 0; i < PathLength(ring); ++i) {
    Bucket* bucket = OnPath(ring, probe.home, i);
    uint32_t mask = lanes.Match(*bucket, probe.digest);
    while (mask != 0) {
      const uint32_t slot = LowestBit(mask);
      mask &= mask - 1;
      const RowId row = lanes.FromLeader(lanes.Load(&bucket->row[slot]));
      if (row != kNoRow && view.KeyAt(row) == key) return {bucket, slot, row};
    }
    if (lanes.FromLeader(lanes.Overflow(*bucket)) == 0) break;
  }
  return {};
}

// Gives the key an empty slot on its path, and stores `row` there with this score. The caller must
// write the key into the row before any thread looks for it.
//
// Returns no bucket if the ring is full. The overflow counts then include the key, which costs
// later probes a step; a rebuild of the ring, as by a split, corrects them.
template <class Lanes, class Ring, class Probe>
DYNEMB_HD SlotRef Claim(Lanes& lanes, Ring ring, Probe probe, RowId row, Score score) {
  for (uint32_t i = 0; i < PathLength(ring); ++i) {
    Bucket* bucket = OnPath(ring, probe.home, i);
    uint32_t slot = 0;
    if (internal::ClaimIn(lanes, bucket, probe.digest, row, score, /*score_first=*/false, &slot)) {
      return {bucket, slot, row};
    }
    if (lanes.rank() == 0) lanes.IncrementSaturating(bucket);
  }
  return {};
}

// The number of rows on the new key's path that are compared to choose a victim. Eviction from a
// table of up to this many rows is exact. In a larger table the victim is on average among the
// lowest 9% of the scores (docs/design.md, "Two passes").
constexpr uint32_t kEvictRows = 28;

// The rows that a batch may evict: all except those that it uses itself.
//
// If scores are stamps, the rows that it uses have its own stamp, the latest one. Otherwise they
// are *pinned*: their bits are set before the first eviction.
struct Evictable {
  StampOrder order;          // of the scores
  Score rank_now = 0;        // the rank of the batch's stamp, if scores are stamps
  uint32_t* pins = nullptr;  // otherwise: a bit for each row id

  template <class Lanes>
  DYNEMB_HD bool Allows(Lanes& lanes, Score rank, RowId row) const {
    if (pins == nullptr) return rank < rank_now;
    return (lanes.Load(&pins[row / 32]) >> row % 32 & 1) == 0;
  }
  // The order of rows with equal scores, below 2^24. Stamps need none. Counts are often equal, so
  // that the order has to differ from new key to new key: otherwise the victim would always be the
  // row in the first slot, which is the one that came last.
  DYNEMB_HD uint64_t Tie(RowId row, uint8_t digest) const {
    if (pins == nullptr) return 0;
    return (row ^ (digest * 0x85EBCA6Bu)) * 0x9E3779B97F4A7C15ull >> 40;
  }
  // Takes a row that Allows, whose score was `seen`, for the key that gets it, with the score
  // `next`. Returns false if another team has taken it. By one lane.
  template <class Lanes>
  DYNEMB_HD bool Take(Lanes& lanes, Bucket* bucket, uint32_t slot, RowId row, Score seen,
                      Score next) const {
    if (pins != nullptr) return Pin(lanes, pins, row);
    // With this score, no other team can take the row again in this batch.
    return lanes.CompareExchange(&bucket->score[slot], seen, next) == seen;
  }
  // Pins a row; returns false if it is pinned already.
  template <class Lanes>
  DYNEMB_HD static bool Pin(Lanes& lanes, uint32_t* pins, RowId row) {
    const uint32_t bit = 1u << row % 32;
    uint32_t was = lanes.Load(&pins[row / 32]);
    for (;;) {
      if ((was & bit) != 0) return false;
      const uint32_t now = lanes.CompareExchange(&pins[row / 32], was, was | bit);
      if (now == was) return true;
      was = now;
    }
  }
};

// The slot of a new key that has the row of an evicted key.
struct EvictedSlot : SlotRef {
  Score score = 0;  // of the evicted key
};

// Evicts a key that `evictable` allows, and gives its row to the new key, with the score `next`.
// The victim has the lowest score of about the first kEvictRows keys on the new key's path. If the
// batch uses all of these, the search continues along the path until a bucket has another key.
//
// The new key gets an empty slot in a bucket before the victim's, if there is one, and otherwise
// the victim's slot. A key therefore passes over full buckets only, as with Claim. (If it always
// got the victim's slot, half of the keys of a full table would have passed over their home bucket.
// Searches end at a bucket over which no key has passed, and there would be nearly none.)
//
// The returned row still has the evicted key and its vector; the caller overwrites them. Returns no
// bucket if the ring has no key that may be evicted.
template <class Lanes, class View, class Ring, class Probe>
DYNEMB_HD EvictedSlot Evict(Lanes& lanes, const View& view, Ring ring, Probe probe,
                            const Evictable& evictable, Score next) {
  constexpr uint64_t kNone = ~0ull;
  for (;;) {
    uint64_t lowest = kNone;
    Bucket* bucket = nullptr;
    uint32_t compared = 0;
    for (uint32_t i = 0; i < PathLength(ring); ++i) {
      if (compared >= kEvictRows && lowest != kNone) break;
      Bucket* b = OnPath(ring, probe.home, i);
      const auto seen = lanes.Seen(*b);
      const uint32_t held = ~seen.Empty(lanes) & ((1u << kSlotsPerBucket) - 1);
      const uint64_t least = lanes.Min([&](uint32_t s) {
        if (((held >> s) & 1) == 0) return kNone;
        const Score rank = evictable.order.Rank(seen.score(s));
        const RowId row = seen.row(s);
        if (row == kNoRow) return kNone;  // another team has evicted the key
        const uint64_t ordered =
            static_cast<uint64_t>(rank) << 32 | evictable.Tie(row, probe.digest) << 8 | s;
        // Pins are read only for a row that would be the victim.
        return ordered < lowest && evictable.Allows(lanes, rank, row) ? ordered : kNone;
      });
      compared += CountBits(held);
      if (least < lowest) {
        lowest = least;
        bucket = b;
      }
    }
    if (lowest == kNone) return {};
    const auto slot = static_cast<uint32_t>(lowest & 0xFF);
    const Score score = evictable.order.Ranked(static_cast<Score>(lowest >> 32));
    const RowId row = lanes.FromLeader(lanes.Load(&bucket->row[slot]));
    if (row == kNoRow) continue;  // another team has evicted the key
    uint32_t taken = 0;
    if (lanes.rank() == 0) taken = evictable.Take(lanes, bucket, slot, row, score, next);
    if (lanes.FromLeader(taken) == 0) continue;  // lost the row to another team; retry

    Probe evicted{};
    if (lanes.rank() == 0) {  // before this caller overwrites the evicted key
      evicted = ProbeIn(ring, view.HashOf(view.KeyAt(row)));
      internal::UncountPath(lanes, ring, evicted.home, bucket);
    }
    const bool score_first = evictable.pins == nullptr;
    for (uint32_t i = 0;; ++i) {
      Bucket* const b = OnPath(ring, probe.home, i);
      if (b == bucket) break;
      uint32_t empty = 0;
      if (internal::ClaimIn(lanes, b, probe.digest, row, next, score_first, &empty)) {
        if (lanes.rank() == 0) {
          lanes.ChangeDigest(bucket, slot, evicted.digest, 0);
          lanes.Store(&bucket->row[slot], kNoRow);
        }
        return {{b, empty, row}, score};
      }
      if (lanes.rank() == 0) lanes.IncrementSaturating(b);
    }
    if (lanes.rank() == 0) {
      if (!score_first) lanes.Store(&bucket->score[slot], next);
      lanes.ChangeDigest(bucket, slot, evicted.digest, probe.digest);
    }
    return {{bucket, slot, row}, score};
  }
}

// Empties the slot. Returns false if another team has emptied it already.
template <class Lanes, class Ring, class Probe>
DYNEMB_HD bool Erase(Lanes& lanes, Ring ring, Probe probe, const SlotRef& at) {
  uint32_t was = 0;
  if (lanes.rank() == 0) was = lanes.CompareExchange(&at.bucket->row[at.slot], at.row, kNoRow);
  if (lanes.FromLeader(was) != at.row) return false;
  if (lanes.rank() == 0) lanes.ChangeDigest(at.bucket, at.slot, probe.digest, 0);
  internal::UncountPath(lanes, ring, probe.home, at.bucket);
  return true;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BUCKET_OPS_H_
