// HashTable, pass 2: making rows for keys that have none, and erasing. Included by hash_table.h
// only.
#ifndef DYNEMB_TABLE_HASH_TABLE_INSERT_H_
#define DYNEMB_TABLE_HASH_TABLE_INSERT_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/insert_plan.h"
#include "cc/table/phase.h"
#include "cc/table/workers.h"

namespace dynemb {

namespace internal {

template <class K>
class KeysOfRows final : public Index::RowHashes {
 public:
  explicit KeysOfRows(const TableView<K>& view) : view_(view) {}
  void Read(const RowId* rows, size_t n, uint64_t* hashes) const override {
    for (size_t i = 0; i < n; ++i) hashes[i] = MixKey(view_.KeyAt(rows[i]));
  }
  void Prefetch(const RowId* rows, size_t n) const override {
    for (size_t i = 0; i < n; ++i) __builtin_prefetch(view_.RowAt(rows[i]));
  }

 private:
  const TableView<K> view_;
};

}  // namespace internal

template <class K, class Lanes>
Status HashTable<K, Lanes>::Refuse(uint64_t keys, const std::string& why) {
  counters_.refused.fetch_add(keys, std::memory_order_relaxed);
  return Full(keys, size(), capacity(), why);
}

template <class K, class Lanes>
bool HashTable<K, Lanes>::Evictable(uint64_t needed, Stamp now) const {
  // At most stamps_.batch_keys() rows carry this batch's stamp, which usually answers without a
  // look.
  if (size() >= stamps_.batch_keys() && size() - stamps_.batch_keys() >= needed) return true;
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
    BeforeWrite(row_id, *layout().update(row));
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
void HashTable<K, Lanes>::ForSegmentOwners(Exec& exec, const InsertPlan& plan, size_t begin,
                                           size_t end, const Fn& fn) const {
  if constexpr (Lanes::kShared) {
    Lanes::Launch(exec, end - begin, 64, [&](Lanes& lanes, size_t first, size_t last) {
      for (size_t j = first; j < last; ++j) fn(lanes, begin + j);
    });
  } else {
    const TableView<K> view = View();
    OneLane lane;
    plan.ForOwners(
        exec, begin, end,
        [&](size_t j) {
          const Bucket* segment = view.SegmentBuckets(plan.segment_of[j]);
          __builtin_prefetch(segment + MakeProbe(plan.hashes[j]).home, 1);
        },
        [&](size_t j) { fn(lane, j); });
  }
}

template <class K, class Lanes>
template <class Fill>
void HashTable<K, Lanes>::PlaceFresh(Exec& exec, const K* keys, const InsertPlan& plan,
                                     size_t fresh, Stamp now, RowId* rows, const Fill& fill) {
  const TableView<K> view = View();
  {
    Phase phase("fill rows");
    Lanes::Launch(exec, fresh, kKeyGrain, [&](Lanes& lanes, size_t begin, size_t end) {
      constexpr size_t kAhead = 8;
      for (size_t j = begin; j < end; ++j) {
        if (j + kAhead < end) __builtin_prefetch(view.RowAt(plan.rows[j + kAhead]), 1);
        const size_t i = plan.positions[j];
        if (lanes.rank() == 0) rows[i] = plan.rows[j];
        FillRow(lanes, i, keys[i], plan.rows[j], now, fill);
      }
    });
  }
  Phase phase("claim slots");
  ForSegmentOwners(exec, plan, 0, fresh, [&](Lanes& lanes, size_t j) {
    Claim(lanes, view.SegmentBuckets(plan.segment_of[j]), MakeProbe(plan.hashes[j]), plan.rows[j],
          now);
  });
}

template <class K, class Lanes>
template <class Fill>
void HashTable<K, Lanes>::PlaceByEviction(Exec& exec, const K* keys, const InsertPlan& plan,
                                          size_t fresh, Stamp now, RowId* rows, const Fill& fill) {
  if (fresh == plan.size()) return;
  Phase phase("evict");
  const TableView<K> view = View();
  ForSegmentOwners(exec, plan, fresh, plan.size(), [&](Lanes& lanes, size_t j) {
    const size_t i = plan.positions[j];
    const SlotRef at =
        Evict(lanes, view, view.SegmentBuckets(plan.segment_of[j]), MakeProbe(plan.hashes[j]), now);
    if (lanes.rank() == 0) {
      rows[i] = at.row;
      if (at.bucket != nullptr) BeforeEviction(view.KeyAt(at.row), at.row, now);
    }
    if (at.bucket != nullptr) FillRow(lanes, i, keys[i], at.row, now, fill);
  });
}

template <class K, class Lanes>
template <class Fill>
Status HashTable<K, Lanes>::Insert(Exec& exec, const K* keys, size_t n, Stamp now, RowId* rows,
                                   const Fill& fill, InsertPlan* plan) {
  Phase phase("insert");
  plan->Build(exec, keys, rows, n, index_);
  const size_t m = plan->size();
  if (m == 0) return Status();
  const size_t fresh = std::min<uint64_t>(m, capacity() - size());
  if (fresh < m) {
    if (options_.evict_strategy == EvictStrategy::kNone) {
      return Refuse(m - fresh, "evict_strategy is none");
    }
    if (!Evictable(m - fresh, now)) {
      return Refuse(m - fresh, "every row that could be evicted is in use by this batch");
    }
  }

  Status status = rows_.Allocate(fresh, plan->rows.get());
  if (!status.ok()) return Refuse(m, status.message());
  changes_.Extend(rows_.high_water());
  {
    Phase faults("fault in memory");
    rows_.Populate(exec);
  }
  status = index_.Grow(exec, plan->prefixes.get(), fresh, internal::KeysOfRows<K>(View()),
                       plan->segment_of.get());
  if (!status.ok()) {
    for (size_t j = fresh; j-- > 0;) rows_.Free(plan->rows[j]);
    return Refuse(m, status.message());
  }
  for (size_t j = fresh; j < m; ++j) plan->segment_of[j] = index_.SegmentOf(plan->prefixes[j]);

  // First every claim, then evictions: where lanes share buckets, a victim must not be a slot that
  // is just being claimed.
  PlaceFresh(exec, keys, *plan, fresh, now, rows, fill);
  PlaceByEviction(exec, keys, *plan, fresh, now, rows, fill);

  uint64_t unplaced = 0;
  for (size_t j = fresh; j < m; ++j) {
    if (rows[plan->positions[j]] != kNoRow) continue;
    // Its own segment holds nothing older than this batch; take any row of the table.
    InsertPlan one;
    one.BuildOne(plan->positions[j], plan->hashes[j], index_);
    if (!EvictAnywhere(one.segment_of[0], now) || !rows_.Allocate(1, one.rows.get()).ok()) {
      ++unplaced;
      continue;
    }
    if (!index_
             .Grow(exec, one.prefixes.get(), 1, internal::KeysOfRows<K>(View()),
                   one.segment_of.get())
             .ok()) {
      rows_.Free(one.rows[0]);
      ++unplaced;
      continue;
    }
    PlaceFresh(exec, keys, one, 1, now, rows, fill);
  }
  for (const InsertPlan::Repeat& r : plan->repeats()) rows[r.position] = rows[r.first];
  if (fresh < m) changes_.TrimDeletions(size());
  counters_.inserts.fetch_add(m - unplaced, std::memory_order_relaxed);
  counters_.evictions.fetch_add(m - fresh - unplaced, std::memory_order_relaxed);
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
        const K key = View().KeyAt(row);
        dynemb::Erase(lane, buckets, MakeProbe(MixKey(key)), SlotRef{&buckets[b], s, row});
        index_.Uncount(segment);
        BeforeEviction(key, row, now);
        FreeRow(row);
        return true;
      }
    }
  }
  return false;
}

template <class K, class Lanes>
size_t HashTable<K, Lanes>::Erase(Exec& exec, const void* keys, size_t n, Tick tick, bool wipe) {
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
      std::vector<uint32_t> owned(n);
      const size_t count = OwnedBy(
          worker, workers, n, [&](size_t i) { return segment_of[i]; }, owned.data());
      for (size_t o = 0; o < count; ++o) erase(lane, owned[o], segment_of[owned[o]]);
    });
  }
  size_t erased = 0;
  for (RowId row : gone) {
    if (row == kNoRow) continue;
    if (changes_.tracking()) changes_.Deleted(tick, KeyBits(row));
    FreeRow(row);
    if (wipe) memset(rows_.At(row), 0, layout().stride);
    ++erased;
  }
  changes_.TrimDeletions(size());
  counters_.erased.fetch_add(erased, std::memory_order_relaxed);
  return erased;
}

template <class K, class Lanes>
template <class Fn>
void HashTable<K, Lanes>::ForSlots(Exec& exec, const RowId* rows, size_t n, const Fn& fn) const {
  const TableView<K> view = View();
  exec.ParallelFor(n, kKeyGrain, [&](size_t begin, size_t end) {
    constexpr size_t kAhead = 16;
    Bucket* segments[kAhead];
    uint32_t homes[kAhead];
    for (size_t j = begin; j < end + kAhead; ++j) {
      if (j >= begin + kAhead) {
        const size_t i = j - kAhead;
        // By row id: no need to compare keys.
        for (uint32_t step = 0; step < kBucketsPerSegment; ++step) {
          Bucket* bucket = OnPath(segments[i % kAhead], homes[i % kAhead], step);
          const RowId* at = std::find(bucket->row, bucket->row + kSlotsPerBucket, rows[i]);
          if (at == bucket->row + kSlotsPerBucket) continue;
          fn(i, &bucket->access[at - bucket->row]);
          break;
        }
      }
      if (j >= end) continue;
      const Probe probe = MakeProbe(MixKey(view.KeyAt(rows[j])));
      segments[j % kAhead] = view.SegmentBuckets(view.SegmentOf(probe.prefix));
      homes[j % kAhead] = probe.home;
      __builtin_prefetch(segments[j % kAhead] + probe.home);
    }
  });
}

template <class K, class Lanes>
void HashTable<K, Lanes>::LastAccesses(Exec& exec, const RowId* rows, size_t n,
                                       Stamp* accesses) const {
  // Finds may stamp meanwhile.
  ForSlots(exec, rows, n, [accesses](size_t i, const Stamp* access) {
    accesses[i] = __atomic_load_n(access, __ATOMIC_RELAXED);
  });
}

template <class K, class Lanes>
Status HashTable<K, Lanes>::LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) {
  const size_t n = loaded.n;
  const K* k = static_cast<const K*>(loaded.keys);
  const auto* vectors = static_cast<const char*>(loaded.vectors);
  const size_t bytes = layout().vector_bytes();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  const Stamp now = BeginBatch(exec, tick, n);
  const auto write = [&](size_t i, char* row) {
    CopyVector(layout().vector(row), vectors + i * bytes, bytes);
    if (layout().state_width != 0) {
      memcpy(layout().state(row),
             loaded.state != nullptr ? loaded.state + i * static_cast<size_t>(layout().state_width)
                                     : initial_state_.data(),
             layout().state_bytes());
    }
    *layout().update(row) = stamps_.Of(loaded.base + loaded.updates[i]);
  };
  struct Visitor {
    HashTable* table;
    const decltype(write)& write_row;
    RowId* rows;
    bool leader;
    uint64_t hits = 0, misses = 0;
    void Hit(size_t i, RowId row, char* at) {
      if (!leader) return;
      rows[i] = row;
      table->BeforeWrite(row, *table->layout().update(at));
      write_row(i, at);
    }
    void Miss(size_t i, K) {
      ++misses;
      if (leader) rows[i] = kNoRow;
    }
  };
  DYNEMB_RETURN_IF_ERROR(MakeRoomFirst(exec, k, n, now));
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  // Rows that are there are stamped, so that they cannot be evicted for the others.
  const auto make = [&](Lanes& lanes) { return Visitor{this, write, rows, lanes.rank() == 0}; };
  if (FindBatch(exec, k, n, now, layout().stride, Counts::kNothing, make) != 0) {
    const auto fill = [&](Lanes& lanes, size_t i, K, char* row) {
      if (lanes.rank() == 0) write(i, row);
    };
    DYNEMB_RETURN_IF_ERROR(Insert(exec, k, n, now, rows, fill, &scratch->plan));
  }
  ForSlots(exec, rows, n, [&](size_t i, Stamp* access) {
    *access = stamps_.Of(loaded.base + loaded.accesses[i]);
  });
  return Status();
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HASH_TABLE_INSERT_H_
