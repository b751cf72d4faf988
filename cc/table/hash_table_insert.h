// HashTable, pass 2: making rows for keys that have none, and erasing. Included by hash_table.h
// only.
#ifndef DYNEMB_TABLE_HASH_TABLE_INSERT_H_
#define DYNEMB_TABLE_HASH_TABLE_INSERT_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/owners.h"

namespace dynemb {

template <class K, class Lanes>
Index::HashRows HashTable<K, Lanes>::RowHasher() const {
  return [view = View()](const RowId* rows, size_t n, uint64_t* hashes) {
    for (size_t i = 0; i < n; ++i) __builtin_prefetch(view.RowAt(rows[i]));
    for (size_t i = 0; i < n; ++i) hashes[i] = MixKey(view.KeyAt(rows[i]));
  };
}

// first[j] = the first of all positions with the hash of j. Returns whether any repeats. Each
// worker looks after a share of the hashes.
inline bool FindRepeats(Exec& exec, const std::vector<uint64_t>& hashes,
                        std::vector<uint32_t>* first) {
  constexpr uint32_t kFree = 0xFFFFFFFFu;
  std::atomic<bool> any{false};
  first->resize(hashes.size());
  ForWorkers(exec, hashes.size(), [&](size_t worker, size_t workers) {
    const std::vector<uint32_t> own =
        OwnedBy(worker, workers, 0, hashes.size(),
                [&hashes](size_t j) { return static_cast<uint32_t>(hashes[j] >> 32); });
    size_t slots = 16;
    while (slots < 2 * own.size()) slots *= 2;
    std::vector<uint32_t> seen(slots, kFree);
    bool repeated = false;
    for (uint32_t j : own) {
      size_t at = hashes[j] & (slots - 1);
      while (seen[at] != kFree && hashes[seen[at]] != hashes[j]) at = (at + 1) & (slots - 1);
      if (seen[at] == kFree) {
        seen[at] = j;
      } else {
        repeated = true;
      }
      (*first)[j] = seen[at];
    }
    if (repeated) any.store(true, std::memory_order_relaxed);
  });
  return any.load();
}

template <class K, class Lanes>
typename HashTable<K, Lanes>::Placement HashTable<K, Lanes>::PlanPlacement(
    Exec& exec, const K* keys, std::vector<size_t> positions) const {
  Placement p;
  p.positions = std::move(positions);
  p.hashes.resize(p.positions.size());
  exec.ParallelFor(p.positions.size(), kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) p.hashes[j] = MixKey(keys[p.positions[j]]);
  });
  std::vector<uint32_t> first;
  if (!FindRepeats(exec, p.hashes, &first)) return p;
  size_t kept = 0;
  for (size_t j = 0; j < first.size(); ++j) {
    if (first[j] == j) {
      first[j] = static_cast<uint32_t>(kept);  // where it moves to
      p.positions[kept] = p.positions[j];
      p.hashes[kept++] = p.hashes[j];
    } else {
      p.repeats.push_back({p.positions[j], p.positions[first[first[j]]]});
    }
  }
  p.positions.resize(kept);
  p.hashes.resize(kept);
  return p;
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::Refuse(uint64_t keys, const std::string& why) {
  counters_.refused.fetch_add(keys, std::memory_order_relaxed);
  return ResourceExhausted("table '" + options_.name + "' cannot take " + std::to_string(keys) +
                           " new keys: it holds " + std::to_string(size()) + " rows of at most " +
                           std::to_string(capacity()) + "; " + why);
}

template <class K, class Lanes>
bool HashTable<K, Lanes>::Evictable(uint64_t needed, Stamp now) const {
  // At most batch_keys_ rows carry this batch's stamp, which usually answers without a look.
  if (size() >= batch_keys_ && size() - batch_keys_ >= needed) return true;
  uint64_t older = 0;
  const Bucket* buckets = index_.buckets();
  for (uint64_t b = 0; b < uint64_t{index_.segments()} * kBucketsPerSegment; ++b) {
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      older += buckets[b].row[s] != kNoRow && buckets[b].access[s] < now;
    }
  }
  return older >= needed;
}

template <class K, class Lanes>
template <class Fill>
void HashTable<K, Lanes>::FillRow(Lanes& lanes, size_t i, K key, RowId row_id, Stamp now,
                                  const Fill& fill) {
  char* row = rows_.At(row_id);
  if (lanes.rank() == 0) {
    StoreUnaligned<K>(row, key);
    *layout().update(row) = now;
    if (!initial_state_.empty()) {
      memcpy(layout().state(row), initial_state_.data(), layout().state_bytes());
    }
  }
  fill(lanes, i, key, row);
}

template <class K, class Lanes>
template <class Fn>
void HashTable<K, Lanes>::ForSegmentOwners(Exec& exec, const Placement& p, size_t first,
                                           size_t last, const Fn& fn) const {
  if constexpr (Lanes::kShared) {
    Lanes::Launch(exec, last - first, 64, [&](Lanes& lanes, size_t begin, size_t end) {
      for (size_t j = begin; j < end; ++j) fn(lanes, first + j);
    });
  } else {
    const TableView<K> view = View();
    ForWorkers(exec, last - first, [&](size_t worker, size_t workers) {
      constexpr size_t kAhead = 16;
      OneLane lane;
      const std::vector<uint32_t> owned =
          OwnedBy(worker, workers, first, last, [&p](size_t j) { return p.segment_of[j]; });
      for (size_t o = 0; o < owned.size(); ++o) {
        if (o + kAhead < owned.size()) {
          const uint32_t j = owned[o + kAhead];
          __builtin_prefetch(view.SegmentBuckets(p.segment_of[j]) + MakeProbe(p.hashes[j]).home, 1);
        }
        fn(lane, owned[o]);
      }
    });
  }
}

template <class K, class Lanes>
template <class Fill>
void HashTable<K, Lanes>::PlaceFresh(Exec& exec, const K* keys, const Placement& p, Stamp now,
                                     RowId* rows, const Fill& fill) {
  const TableView<K> view = View();
  const size_t fresh = p.fresh_rows.size();
  Lanes::Launch(exec, fresh, kKeyGrain, [&](Lanes& lanes, size_t begin, size_t end) {
    constexpr size_t kAhead = 8;
    for (size_t j = begin; j < end; ++j) {
      if (j + kAhead < end) __builtin_prefetch(view.RowAt(p.fresh_rows[j + kAhead]), 1);
      const size_t i = p.positions[j];
      if (lanes.rank() == 0) rows[i] = p.fresh_rows[j];
      FillRow(lanes, i, keys[i], p.fresh_rows[j], now, fill);
    }
  });
  ForSegmentOwners(exec, p, 0, fresh, [&](Lanes& lanes, size_t j) {
    Claim(lanes, view.SegmentBuckets(p.segment_of[j]), MakeProbe(p.hashes[j]), p.fresh_rows[j],
          now);
  });
}

template <class K, class Lanes>
template <class Fill>
void HashTable<K, Lanes>::PlaceByEviction(Exec& exec, const K* keys, const Placement& p, Stamp now,
                                          RowId* rows, const Fill& fill) {
  const TableView<K> view = View();
  const size_t m = p.positions.size();
  ForSegmentOwners(exec, p, p.fresh_rows.size(), m, [&](Lanes& lanes, size_t j) {
    const size_t i = p.positions[j];
    const SlotRef at =
        Evict(lanes, view, view.SegmentBuckets(p.segment_of[j]), MakeProbe(p.hashes[j]), now);
    if (lanes.rank() == 0) rows[i] = at.row;
    if (at.bucket != nullptr) FillRow(lanes, i, keys[i], at.row, now, fill);
  });
}

template <class K, class Lanes>
template <class Fill>
Status HashTable<K, Lanes>::Insert(Exec& exec, const K* keys, std::vector<size_t> positions,
                                   Stamp now, RowId* rows, const Fill& fill,
                                   std::vector<size_t>* repeats) {
  if (positions.empty()) return Status();
  Placement p = PlanPlacement(exec, keys, std::move(positions));
  const size_t m = p.positions.size();
  const size_t fresh = std::min<uint64_t>(m, capacity() - size());
  if (fresh < m) {
    if (options_.evict_strategy == EvictStrategy::kNone) {
      return Refuse(m - fresh, "evict_strategy is none");
    }
    if (!Evictable(m - fresh, now)) {
      return Refuse(m - fresh, "every row that could be evicted is in use by this batch");
    }
  }

  p.fresh_rows.resize(fresh);
  p.segment_of.resize(m);
  Status status = rows_.Allocate(fresh, p.fresh_rows.data());
  if (!status.ok()) return Refuse(m, status.message());
  rows_.Populate(exec);
  std::vector<uint32_t> prefixes(m);
  exec.ParallelFor(m, kKeyGrain, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j) prefixes[j] = MakeProbe(p.hashes[j]).prefix;
  });
  status = index_.Grow(exec, prefixes.data(), fresh, RowHasher(), p.segment_of.data());
  if (!status.ok()) {
    for (size_t j = fresh; j-- > 0;) rows_.Free(p.fresh_rows[j]);
    return Refuse(m, status.message());
  }
  for (size_t j = fresh; j < m; ++j) p.segment_of[j] = index_.SegmentOf(prefixes[j]);

  // First every claim, then evictions: where lanes share buckets, a victim must not be a slot that
  // is just being claimed.
  PlaceFresh(exec, keys, p, now, rows, fill);
  PlaceByEviction(exec, keys, p, now, rows, fill);

  uint64_t unplaced = 0;
  for (size_t j = fresh; j < m; ++j) {
    const size_t i = p.positions[j];
    if (rows[i] != kNoRow) continue;
    // Its own segment holds nothing older than this batch; take any row of the table.
    Placement one;
    one.positions = {i};
    one.hashes = {p.hashes[j]};
    one.segment_of.resize(1);
    one.fresh_rows.resize(1);
    if (!EvictAnywhere(p.segment_of[j], now) || !rows_.Allocate(1, one.fresh_rows.data()).ok()) {
      ++unplaced;
      continue;
    }
    if (!index_.Grow(exec, &prefixes[j], 1, RowHasher(), one.segment_of.data()).ok()) {
      rows_.Free(one.fresh_rows[0]);
      ++unplaced;
      continue;
    }
    PlaceFresh(exec, keys, one, now, rows, fill);
  }
  for (const Repeat& r : p.repeats) rows[r.position] = rows[r.first];
  if (repeats != nullptr) {
    for (const Repeat& r : p.repeats) repeats->push_back(r.position);
  }
  counters_.inserts.fetch_add(m - unplaced, std::memory_order_relaxed);
  counters_.evictions.fetch_add(m - fresh, std::memory_order_relaxed);
  if (unplaced != 0) return Refuse(unplaced, "no row could be evicted for them");
  return Status();
}

template <class K, class Lanes>
bool HashTable<K, Lanes>::EvictAnywhere(uint32_t from_segment, Stamp now) {
  OneLane lane;
  for (uint32_t d = 1; d <= index_.segments(); ++d) {
    const uint32_t segment = (from_segment + d) % index_.segments();
    Bucket* buckets = index_.SegmentBuckets(segment);
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        const RowId row = buckets[b].row[s];
        if (row == kNoRow || buckets[b].access[s] >= now) continue;
        const Probe probe = MakeProbe(MixKey(View().KeyAt(row)));
        dynemb::Erase(lane, buckets, probe, SlotRef{&buckets[b], s, row});
        index_.Uncount(segment);
        *layout().update(rows_.At(row)) = 0;
        rows_.Free(row);
        return true;
      }
    }
  }
  return false;
}

template <class K, class Lanes>
size_t HashTable<K, Lanes>::Erase(Exec& exec, const void* keys, size_t n) {
  const K* k = static_cast<const K*>(keys);
  const TableView<K> view = View();
  std::vector<RowId> gone(n, kNoRow);
  const auto erase = [&](Lanes& lanes, size_t i, uint32_t segment) {
    const Probe probe = MakeProbe(MixKey(k[i]));
    Bucket* buckets = view.SegmentBuckets(segment);
    const SlotRef at = dynemb::Find(lanes, view, buckets, probe, k[i]);
    if (at.bucket == nullptr || !dynemb::Erase(lanes, buckets, probe, at)) return;
    if (lanes.rank() != 0) return;
    index_.Uncount(segment);
    gone[i] = at.row;
  };
  if constexpr (Lanes::kShared) {
    Lanes::Launch(exec, n, 64, [&](Lanes& lanes, size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        erase(lanes, i, view.SegmentOf(MakeProbe(MixKey(k[i])).prefix));
      }
    });
  } else {
    std::vector<uint32_t> segment_of(n);
    exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        segment_of[i] = view.SegmentOf(MakeProbe(MixKey(k[i])).prefix);
      }
    });
    ForWorkers(exec, n, [&](size_t worker, size_t workers) {
      OneLane lane;
      for (uint32_t i : OwnedBy(worker, workers, 0, n, [&](size_t i) { return segment_of[i]; })) {
        erase(lane, i, segment_of[i]);
      }
    });
  }
  size_t erased = 0;
  for (RowId row : gone) {
    if (row == kNoRow) continue;
    *layout().update(rows_.At(row)) = 0;
    rows_.Free(row);
    ++erased;
  }
  counters_.erased.fetch_add(erased, std::memory_order_relaxed);
  return erased;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HASH_TABLE_INSERT_H_
