// FindPass: looks up a range of keys, software-pipelined, and hands each result to a visitor.
//
// A key passes through three stages. Each stage is several keys behind the previous one:
//
// 1. Hash the key, and prefetch its home bucket.
// 2. Search the bucket, and prefetch the row that a matching slot names.
// 3. Compare the row's key, and call the visitor.
//
// At any time, about kBucketAhead - kRowAhead buckets and kRowAhead rows are therefore being
// fetched, and a row's bytes are in the cache when the visitor reads them.
#ifndef DYNEMB_TABLE_FIND_PASS_H_
#define DYNEMB_TABLE_FIND_PASS_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/bucket_ops.h"
#include "cc/table/expired.h"
#include "cc/table/lanes.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/score.h"

namespace dynemb {

// Counts n finds of a slot. Other threads may do the same at the same time.
inline void CountSlot(const Touch& touch, uint32_t n, Score* score) {
  Score was = __atomic_load_n(score, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(score, &was, touch.Counted(was, n), /*weak=*/true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Changes the score of a slot that is found. Other threads may do the same at the same time.
inline void TouchSlot(const Touch& touch, Score* score) {
  if (touch.kind == Touch::Kind::kSet) {
    // Only where it changes: a store dirties the line.
    if (__atomic_load_n(score, __ATOMIC_RELAXED) != touch.value) {
      __atomic_store_n(score, touch.value, __ATOMIC_RELAXED);
    }
  } else if (touch.kind == Touch::Kind::kCount) {
    CountSlot(touch, 1, score);
  }
}

// Whether the row of a slot has expired. Other threads may be touching the slot.
template <class K>
bool HasExpired(const Expired& expired, const char* row, const Score* score) {
  return expired(expired.by_access ? __atomic_load_n(score, __ATOMIC_RELAXED)
                                   : LoadUnaligned<Stamp>(row + sizeof(K)));
}

// Calls visit.Hit(i, row, address of the row) or visit.Miss(i, key) for every i in [begin, end), in
// order, where key = key_at(i). Touches the slots of hits. A row that has expired is a miss;
// returns the number of these misses. `row_bytes` is the number of bytes of a row that the visitor
// accesses. No other thread may change the structure of the table during the call, but other finds
// may touch slots at the same time.
template <class K, class KeyAt, class Visitor>
size_t FindPass(const TableView<K>& view, size_t row_bytes, const KeyAt& key_at, size_t begin,
                size_t end, const Touch& touch, const Expired& expired, Visitor& visit) {
  constexpr size_t kBucketAhead = 24;
  constexpr size_t kRowAhead = 12;
  constexpr size_t kRing = 32;
  static_assert(kRowAhead < kBucketAhead && kBucketAhead < kRing, "stages overlap in the ring");
  struct Flight {
    K key;
    Bucket* segment;
    Probe probe;
    SlotRef candidate;
    char* row_at;  // of the candidate
  };
  Flight ring[kRing];
  const RowPrefetch prefetch(view.rows, view.stride, row_bytes);
  size_t num_expired = 0;

  const auto start = [&](size_t i) {
    Flight& f = ring[i % kRing];
    f.key = key_at(i);
    const uint64_t hash = view.HashOf(f.key);
    f.probe = MakeProbe(hash);
    f.segment = view.SegmentBuckets(view.SegmentOf(hash));
    __builtin_prefetch(f.segment + f.probe.home);
  };
  const auto probe = [&](size_t i) {
    Flight& f = ring[i % kRing];
    f.candidate = {};
    for (uint32_t step = 0; step < kBucketsPerSegment; ++step) {
      Bucket* bucket = OnPath(f.segment, f.probe.home, step);
      const uint32_t mask = OneLane::Match(*bucket, f.probe.digest);
      if (mask != 0) {
        const uint32_t slot = LowestBit(mask);
        f.candidate = {bucket, slot, bucket->row[slot]};
        f.row_at = view.RowAt(f.candidate.row);
        prefetch(f.row_at);
        return;
      }
      if (bucket->overflow() == 0) return;
    }
  };
  const auto finish = [&](size_t i) {
    Flight& f = ring[i % kRing];
    if (f.candidate.bucket != nullptr && LoadUnaligned<K>(f.row_at) != f.key) {
      OneLane lane;
      f.candidate = Find(lane, view, f.segment, f.probe, f.key);  // a digest shared by chance
      if (f.candidate.bucket != nullptr) f.row_at = view.RowAt(f.candidate.row);
    }
    const SlotRef& at = f.candidate;
    if (at.bucket == nullptr) {
      visit.Miss(i, f.key);
      return;
    }
    Score* const score = &at.bucket->score[at.slot];
    if (expired.any() && HasExpired<K>(expired, f.row_at, score)) {
      ++num_expired;
      visit.Miss(i, f.key);
      return;
    }
    TouchSlot(touch, score);
    visit.Hit(i, at.row, f.row_at);
  };

  const size_t n = end - begin;
  for (size_t j = 0; j < n + kBucketAhead; ++j) {
    if (j < n) start(begin + j);
    if (j >= kBucketAhead - kRowAhead && j - (kBucketAhead - kRowAhead) < n) {
      probe(begin + j - (kBucketAhead - kRowAhead));
    }
    if (j >= kBucketAhead) finish(begin + j - kBucketAhead);
  }
  return num_expired;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_FIND_PASS_H_
