// HashTable, pass 2: making rows for keys that have none, and erasing. Included by hash_table.h
// only.
#ifndef DYNEMB_TABLE_HASH_TABLE_INSERT_H_
#define DYNEMB_TABLE_HASH_TABLE_INSERT_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/hash_table.h"

namespace dynemb {

template <class K, class Lanes>
Index::HashRows HashTable<K, Lanes>::RowHasher() const {
  return [view = View()](const RowId* rows, size_t n, uint64_t* hashes) {
    for (size_t i = 0; i < n; ++i) __builtin_prefetch(view.RowAt(rows[i]));
    for (size_t i = 0; i < n; ++i) hashes[i] = MixKey(view.KeyAt(rows[i]));
  };
}

// Parts `positions` (of keys) into those that name a key first, which stay, and the others:
// repeats[r] names the same key as the position first_of[r] before it.
template <class K>
void PartRepeats(const K* keys, std::vector<size_t>* positions, std::vector<size_t>* repeats,
                 std::vector<size_t>* first_of) {
  constexpr uint32_t kFree = 0xFFFFFFFFu;
  size_t slots = 16;
  while (slots < 2 * positions->size()) slots *= 2;
  std::vector<uint32_t> seen(slots, kFree);  // indices into the positions that stay
  size_t kept = 0;
  for (size_t i : *positions) {
    size_t at = MixKey(keys[i]) & (slots - 1);
    while (seen[at] != kFree && keys[(*positions)[seen[at]]] != keys[i])
      at = (at + 1) & (slots - 1);
    if (seen[at] == kFree) {
      seen[at] = static_cast<uint32_t>(kept);
      (*positions)[kept++] = i;
    } else {
      repeats->push_back(i);
      first_of->push_back((*positions)[seen[at]]);
    }
  }
  positions->resize(kept);
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
void HashTable<K, Lanes>::Place(Lanes& lanes, size_t i, K key, uint32_t segment, RowId fresh,
                                Stamp now, RowId* rows, const Fill& fill) {
  const TableView<K> view = View();
  const Probe probe = MakeProbe(MixKey(key));
  Bucket* buckets = view.SegmentBuckets(segment);
  const SlotRef at = fresh != kNoRow ? Claim(lanes, buckets, probe, fresh, now)
                                     : Evict(lanes, view, buckets, probe, now);
  if (lanes.rank() == 0) rows[i] = at.row;
  if (at.bucket == nullptr) return;
  char* row = view.RowAt(at.row);
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
template <class Fill>
void HashTable<K, Lanes>::PlaceAll(Exec& exec, const K* keys, const Placement& p, size_t first,
                                   size_t last, Stamp now, RowId* rows, const Fill& fill) {
  const size_t fresh = p.fresh_rows.size();
  const auto place = [&](Lanes& lanes, size_t j) {
    const size_t i = p.positions[j];
    Place(lanes, i, keys[i], p.segment_of[j], j < fresh ? p.fresh_rows[j] : kNoRow, now, rows,
          fill);
  };
  if constexpr (Lanes::kShared) {
    Lanes::Launch(exec, last - first, 64, [&](Lanes& lanes, size_t begin, size_t end) {
      for (size_t j = begin; j < end; ++j) place(lanes, first + j);
    });
  } else {
    const TableView<K> view = View();
    const size_t workers = last - first < kKeyGrain ? 1 : exec.parallelism();
    exec.ParallelFor(workers, 1, [&](size_t first_worker, size_t last_worker) {
      constexpr size_t kAhead = 16;
      OneLane lane;
      for (size_t worker = first_worker; worker < last_worker; ++worker) {
        std::vector<uint32_t> owned;
        owned.reserve((last - first) / workers * 5 / 4 + 16);
        for (size_t j = first; j < last; ++j) {
          if (Owns(worker, workers, p.segment_of[j])) owned.push_back(static_cast<uint32_t>(j));
        }
        for (size_t o = 0; o < owned.size() + kAhead; ++o) {
          if (o < owned.size()) {
            const uint32_t j = owned[o];
            const Probe probe = MakeProbe(MixKey(keys[p.positions[j]]));
            __builtin_prefetch(view.SegmentBuckets(p.segment_of[j]) + probe.home, 1);
            if (j < fresh) __builtin_prefetch(view.RowAt(p.fresh_rows[j]), 1);
          }
          if (o >= kAhead) place(lane, owned[o - kAhead]);
        }
      }
    });
  }
}

template <class K, class Lanes>
template <class Fill>
Status HashTable<K, Lanes>::Insert(Exec& exec, const K* keys, std::vector<size_t> positions,
                                   Stamp now, RowId* rows, const Fill& fill, bool* repeated) {
  if (positions.empty()) return Status();
  std::vector<size_t> repeats;
  std::vector<size_t> first_of;
  PartRepeats(keys, &positions, &repeats, &first_of);
  if (repeated != nullptr) *repeated = !repeats.empty();
  Placement p;
  p.positions = std::move(positions);
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
  std::vector<uint32_t> prefixes(m);
  for (size_t j = 0; j < m; ++j) prefixes[j] = MakeProbe(MixKey(keys[p.positions[j]])).prefix;
  status = index_.Grow(exec, prefixes.data(), fresh, RowHasher(), p.segment_of.data());
  if (!status.ok()) {
    for (size_t j = fresh; j-- > 0;) rows_.Free(p.fresh_rows[j]);
    return Refuse(m, status.message());
  }
  for (size_t j = fresh; j < m; ++j) p.segment_of[j] = index_.SegmentOf(prefixes[j]);

  // First every claim, then evictions: where lanes share buckets, a victim must not be a slot that
  // is just being claimed.
  PlaceAll(exec, keys, p, 0, fresh, now, rows, fill);
  PlaceAll(exec, keys, p, fresh, m, now, rows, fill);

  uint64_t unplaced = 0;
  for (size_t j = fresh; j < m; ++j) {
    const size_t i = p.positions[j];
    if (rows[i] != kNoRow) continue;
    // Its own segment holds nothing older than this batch; take any row of the table.
    RowId row = kNoRow;
    if (!EvictAnywhere(p.segment_of[j], now) || !rows_.Allocate(1, &row).ok()) {
      ++unplaced;
      continue;
    }
    if (!index_.Grow(exec, &prefixes[j], 1, RowHasher(), &p.segment_of[j]).ok()) {
      rows_.Free(row);
      ++unplaced;
      continue;
    }
    Lanes::Launch(exec, 1, 1, [&](Lanes& lanes, size_t, size_t) {
      Place(lanes, i, keys[i], p.segment_of[j], row, now, rows, fill);
    });
  }
  for (size_t r = 0; r < repeats.size(); ++r) rows[repeats[r]] = rows[first_of[r]];
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
    const size_t workers = n < kKeyGrain ? 1 : exec.parallelism();
    exec.ParallelFor(workers, 1, [&](size_t first, size_t last) {
      OneLane lane;
      for (size_t worker = first; worker < last; ++worker) {
        for (size_t i = 0; i < n; ++i) {
          if (Owns(worker, workers, segment_of[i])) erase(lane, i, segment_of[i]);
        }
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
