// FindPass: looks up a range of keys, software-pipelined, and hands each result to a visitor.
//
// A key goes through three stages, each some keys behind the one before: hash it and prefetch its
// home bucket; look in the bucket and prefetch the row it points to; compare the row's key and
// visit. So about kBucketAhead bucket lines and kRowAhead rows are under way at once, and a row's
// bytes are in the cache when the visitor touches them.
#ifndef DYNEMB_TABLE_FIND_PASS_H_
#define DYNEMB_TABLE_FIND_PASS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/table/bucket_ops.h"
#include "cc/table/lanes.h"

namespace dynemb {

// Asks for the cache lines of [p, p + bytes), bytes > 0. The last may be asked for twice: how many
// lines there are depends on where p is, which no branch could predict.
inline void PrefetchBytes(const char* p, size_t bytes) {
  for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b);
  __builtin_prefetch(p + bytes - 1);
}

// Long rows are prefetched up to this point; beyond it the hardware's streams take over.
constexpr size_t kPrefetchMost = 512;

// For every i of [begin, end), in order: visit.Hit(i, row, row_pointer) or visit.Miss(i, key),
// where key = key_at(i). Hits are stamped with `now` unless it is 0. `row_bytes` is how much of a
// row the visitor touches. Nothing may change the structure of the table meanwhile; stamping beside
// other finds is fine.
template <class K, class KeyAt, class Visitor>
void FindPass(const TableView<K>& view, size_t row_bytes, const KeyAt& key_at, size_t begin,
              size_t end, Stamp now, Visitor& visit) {
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
  row_bytes = std::min(row_bytes, kPrefetchMost);

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
      const uint32_t mask = OneLane::Match(bucket->digest, f.probe.digest);
      if (mask != 0) {
        const uint32_t slot = internal::LowestBit(mask);
        f.candidate = {bucket, slot, bucket->row[slot]};
        f.row_at = view.RowAt(f.candidate.row);
        PrefetchBytes(f.row_at, row_bytes);
        return;
      }
      if (bucket->overflow == 0) return;
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
    if (now != 0) {
      // Relaxed and only where it changes: other batches may stamp the same slot, and a store
      // dirties the line.
      Stamp* access = &at.bucket->access[at.slot];
      if (__atomic_load_n(access, __ATOMIC_RELAXED) != now) {
        __atomic_store_n(access, now, __ATOMIC_RELAXED);
      }
    }
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
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_FIND_PASS_H_
