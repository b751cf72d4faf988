// FindPass: looks up a range of keys in three stages (staged.h), and hands each result to a
// visitor.
//
// 1. Hash the key, and prefetch its home bucket.
// 2. Search the bucket, and prefetch the row that a matching slot names.
// 3. Compare the row's key, and call the visitor.
#ifndef DYNEMB_TABLE_FIND_PASS_H_
#define DYNEMB_TABLE_FIND_PASS_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/bucket_ops.h"
#include "cc/table/expired.h"
#include "cc/table/lanes.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/score.h"
#include "cc/table/staged.h"

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
  struct Flight {
    K key;
    Bucket* bucket;  // at first the home bucket, then that of the slot; null: the key has none
    char* row_at;
    RowId row;
    uint8_t slot;
    uint8_t digest;

    void Take(Bucket* of_slot, uint32_t number, RowId row_id, const TableView<K>& table) {
      bucket = of_slot;
      slot = static_cast<uint8_t>(number);
      row = row_id;
      row_at = table.RowAt(row_id);
    }
  };
  StagedRing<Flight, 3> ring;
  const RowPrefetch prefetch(view.rows, view.stride, row_bytes);
  size_t num_expired = 0;

  const auto start = [&](size_t i) {
    Flight& f = ring[i];
    f.key = key_at(begin + i);
    const uint64_t hash = view.HashOf(f.key);
    const Probe probe = MakeProbe(hash);
    f.digest = probe.digest;
    f.bucket = view.SegmentBuckets(view.SegmentOf(hash)) + probe.home;
    PrefetchLine(f.bucket);
  };
  // The first slot of the key's path with its digest. The key's hash is computed again, which saves
  // the other keys the memory for it.
  const auto search = [&](Flight& f) {
    const uint64_t hash = view.HashOf(f.key);
    Bucket* const segment = view.SegmentBuckets(view.SegmentOf(hash));
    const uint32_t home = MakeProbe(hash).home;
    for (uint32_t step = 1; step < kBucketsPerSegment && f.bucket->overflow() != 0; ++step) {
      f.bucket = OnPath(segment, home, step);
      const uint32_t mask = OneLane::Match(*f.bucket, f.digest);
      if (mask != 0) return mask;
    }
    return uint32_t{0};
  };
  const auto probe = [&](size_t i) {
    Flight& f = ring[i];
    uint32_t mask = OneLane::Match(*f.bucket, f.digest);
    if (mask == 0) mask = search(f);
    if (mask == 0) {
      f.bucket = nullptr;
      return;
    }
    const uint32_t slot = LowestBit(mask);
    f.Take(f.bucket, slot, f.bucket->row[slot], view);
    prefetch(f.row_at);
  };
  // Of a key whose digest another key shares by chance.
  const auto find = [&](Flight& f) {
    OneLane lane;
    const uint64_t hash = view.HashOf(f.key);
    Bucket* const segment = view.SegmentBuckets(view.SegmentOf(hash));
    const SlotRef at = Find(lane, view, segment, MakeProbe(hash), f.key);
    f.bucket = nullptr;
    if (at.bucket != nullptr) f.Take(at.bucket, at.slot, at.row, view);
  };
  const auto finish = [&](size_t i) {
    Flight& f = ring[i];
    if (f.bucket != nullptr && LoadUnaligned<K>(f.row_at) != f.key) find(f);
    if (f.bucket == nullptr) {
      visit.Miss(begin + i, f.key);
      return;
    }
    Score* const score = &f.bucket->score[f.slot];
    if (expired.any() && HasExpired<K>(expired, f.row_at, score)) {
      ++num_expired;
      visit.Miss(begin + i, f.key);
      return;
    }
    TouchSlot(touch, score);
    visit.Hit(begin + i, f.row, f.row_at);
  };
  RunStaged(end - begin, StagedBlock(prefetch.lines()), start, probe, finish);
  return num_expired;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_FIND_PASS_H_
