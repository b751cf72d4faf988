#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/lanes.h"
#include "cc/table/phase.h"
#include "cc/table/workers.h"

namespace dynemb {
namespace {

template <class K>
class KeysOfRows final : public Index::RowHashes {
 public:
  explicit KeysOfRows(const TableView<K>& view) : view_(view) {}
  void Read(const RowId* rows, size_t n, uint64_t* hashes) const override {
    for (size_t i = 0; i < n; ++i) hashes[i] = view_.HashOf(view_.KeyAt(rows[i]));
  }
  void Prefetch(const RowId* rows, size_t n) const override {
    for (size_t i = 0; i < n; ++i) __builtin_prefetch(view_.RowAt(rows[i]));
  }

 private:
  const TableView<K> view_;
};

}  // namespace

template <class K>
Status HashTable<K>::Refuse(uint64_t keys, const std::string& why) {
  counters_.refused.fetch_add(keys, std::memory_order_relaxed);
  return Full(keys, size(), capacity(), why);
}

template <class K>
bool HashTable<K>::Evictable(uint64_t needed, Stamp now) const {
  // At most stamps_.batch_keys() rows have this batch's stamp. This bound is usually enough,
  // without a scan of the index.
  if (size() >= stamps_.batch_keys() && size() - stamps_.batch_keys() >= needed) return true;
  uint64_t older = 0;
  for (uint32_t s = 0; s < index_.segments(); ++s) older += OlderRows(s, now);
  return older >= needed;
}

template <class K>
void HashTable<K>::FillRow(size_t i, K key, RowId row_id, Stamp now, const Fill& fill) {
  char* row = rows_.At(row_id);
  BeforeWrite(row_id, *layout().update(row));
  StoreUnaligned<K>(row, key);
  *layout().update(row) = now;
  if (!initial_state_.empty()) {
    memcpy(layout().state(row), initial_state_.data(), layout().state_bytes());
  }
  fill(i, key, row);
}

template <class K>
template <class Fn>
void HashTable<K>::ForSegmentWorkers(Exec& exec, const InsertPlan& plan, size_t begin, size_t end,
                                     const Fn& fn) const {
  const TableView<K> view = View();
  plan.ForWorkers(
      exec, begin, end,
      [&](size_t j) {
        const Bucket* segment = view.SegmentBuckets(plan.segment_of[j]);
        __builtin_prefetch(segment + MakeProbe(plan.hashes[j]).home, 1);
      },
      fn);
}

template <class K>
void HashTable<K>::PlaceFresh(Exec& exec, const K* keys, const InsertPlan& plan, size_t fresh,
                              Stamp now, RowId* rows, const Fill& fill) {
  const TableView<K> view = View();
  {
    Phase phase("fill rows");
    exec.ParallelFor(fresh, kKeyGrain, [&](size_t begin, size_t end) {
      constexpr size_t kAhead = 8;
      for (size_t j = begin; j < end; ++j) {
        if (j + kAhead < end) __builtin_prefetch(view.RowAt(plan.rows[j + kAhead]), 1);
        const size_t i = plan.positions[j];
        rows[i] = plan.rows[j];
        FillRow(i, keys[i], plan.rows[j], now, fill);
      }
    });
  }
  Phase phase("claim slots");
  ForSegmentWorkers(exec, plan, 0, fresh, [&](size_t j) {
    OneLane lane;
    Claim(lane, view.SegmentBuckets(plan.segment_of[j]), MakeProbe(plan.hashes[j]), plan.rows[j],
          now);
  });
}

template <class K>
void HashTable<K>::PlaceByEviction(Exec& exec, const K* keys, const InsertPlan& plan, size_t fresh,
                                   Stamp now, RowId* rows, const Fill& fill) {
  if (fresh == plan.size()) return;
  Phase phase("evict");
  const TableView<K> view = View();
  ForSegmentWorkers(exec, plan, fresh, plan.size(), [&](size_t j) {
    OneLane lane;
    const size_t i = plan.positions[j];
    const SlotRef at =
        Evict(lane, view, view.SegmentBuckets(plan.segment_of[j]), MakeProbe(plan.hashes[j]), now);
    rows[i] = at.row;
    if (at.bucket == nullptr) return;  // PlaceElsewhere
    BeforeEviction(view.KeyAt(at.row), at.row, now);
    FillRow(i, keys[i], at.row, now, fill);
  });
}

template <class K>
void HashTable<K>::PlaceElsewhere(const K* keys, const InsertPlan& plan, size_t fresh, Stamp now,
                                  RowId* rows, const Fill& fill) {
  OneLane lane;
  uint32_t victims = 0;  // the segment to search for the next victim
  for (size_t j = fresh; j < plan.size(); ++j) {
    const size_t i = plan.positions[j];
    if (rows[i] != kNoRow) continue;
    EvictAnywhere(&victims, now);
    // Allocates the id that was just freed, and claims a slot that PrepareRows has made free.
    RowId row = kNoRow;
    if (!rows_.Allocate(1, &row).ok()) std::abort();
    FillRow(i, keys[i], row, now, fill);
    const uint32_t segment = index_.SegmentOf(plan.hashes[j]);
    Claim(lane, index_.SegmentBuckets(segment), MakeProbe(plan.hashes[j]), row, now);
    index_.Count(segment);
    rows[i] = row;
  }
}

template <class K>
Status HashTable<K>::PrepareRows(Exec& exec, size_t fresh, Stamp now, InsertPlan* plan) {
  const size_t m = plan->size();
  changes_.Extend(std::min<uint64_t>(rows_.high_water() + fresh, capacity()));
  if (fresh < m) {
    if (evicted_ != nullptr) evicted_->Reserve(m - fresh);
    rows_.ReserveFree(1);
    // If a segment has too few older rows, its other new keys get rows of other segments, and need
    // free slots in this one. Keys with fresh rows may need such slots, too.
    const auto leaving = [&](uint32_t s) { return fresh == 0 ? OlderRows(s, now) : 0; };
    DYNEMB_RETURN_IF_ERROR(index_.MakeSlots(exec, plan->hashes.get(), m, KeysOfRows<K>(View()),
                                            leaving, plan->segment_of.get()));
  }
  DYNEMB_RETURN_IF_ERROR(rows_.Allocate(fresh, plan->rows.get()));
  struct Allocated {
    RowStore& rows;
    const RowId* ids;
    size_t n;
    ~Allocated() {
      if (n != 0) rows.Unallocate(n, ids);
    }
  } allocated{rows_, plan->rows.get(), fresh};
  {
    Phase faults("fault in memory");
    rows_.Prefault(exec);
  }
  DYNEMB_RETURN_IF_ERROR(
      index_.Grow(exec, plan->hashes.get(), fresh, KeysOfRows<K>(View()), plan->segment_of.get()));
  allocated.n = 0;
  for (size_t j = fresh; j < m; ++j) plan->segment_of[j] = index_.SegmentOf(plan->hashes[j]);
  return Status();
}

template <class K>
Status HashTable<K>::Insert(Exec& exec, const K* keys, size_t n, Stamp now, RowId* rows,
                            const Fill& fill, InsertPlan* plan) {
  Phase phase("insert");
  plan->Build(exec, keys, rows, n, index_);
  const size_t m = plan->size();
  if (m == 0) return Status();
  const size_t fresh = std::min<uint64_t>(m, capacity() - size());
  if (fresh < m) {
    if (options_.max_capacity == 0) return Refuse(m - fresh, "row ids have 32 bits");
    if (options_.evict_strategy == EvictStrategy::kNone) {
      return Refuse(m - fresh, "evict_strategy is none");
    }
    if (!Evictable(m - fresh, now)) {
      return Refuse(m - fresh, "every row that could be evicted is in use by this batch");
    }
  }
  const Status status = PrepareRows(exec, fresh, now, plan);
  if (!status.ok()) return Refuse(m, status.message());

  // From here on nothing fails.
  PlaceFresh(exec, keys, *plan, fresh, now, rows, fill);
  PlaceByEviction(exec, keys, *plan, fresh, now, rows, fill);
  PlaceElsewhere(keys, *plan, fresh, now, rows, fill);
  for (const InsertPlan::Repeat& r : plan->repeats()) rows[r.position] = rows[r.first];
  if (fresh < m) changes_.TrimDeletions(size());
  counters_.inserts.fetch_add(m, std::memory_order_relaxed);
  counters_.evictions.fetch_add(m - fresh, std::memory_order_relaxed);
  return Status();
}

template <class K>
uint32_t HashTable<K>::OlderRows(uint32_t segment, Stamp now) const {
  uint32_t older = 0;
  const StampOrder order = stamps_.order();
  const Stamp rank_now = order.Rank(now);
  const Bucket* const buckets = index_.SegmentBuckets(segment);
  for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      older += buckets[b].row[s] != kNoRow && order.Rank(buckets[b].access[s]) < rank_now;
    }
  }
  return older;
}

template <class K>
void HashTable<K>::EvictAnywhere(uint32_t* segment, Stamp now) {
  OneLane lane;
  const TableView<K> view = View();
  const Stamp rank_now = view.order.Rank(now);
  for (;; ++*segment) {
    if (*segment == index_.segments()) std::abort();  // Evictable has counted them
    Bucket* buckets = index_.SegmentBuckets(*segment);
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        const RowId row = buckets[b].row[s];
        if (row == kNoRow || view.order.Rank(buckets[b].access[s]) >= rank_now) continue;
        const K key = view.KeyAt(row);
        dynemb::Erase(lane, buckets, MakeProbe(view.HashOf(key)), SlotRef{&buckets[b], s, row});
        index_.Uncount(*segment);
        BeforeEviction(key, row, now);
        FreeRow(row);
        return;
      }
    }
  }
}

template <class K>
size_t HashTable<K>::Erase(Exec& exec, KeySpan keys, Tick tick, bool wipe) {
  // Erases a bounded number of keys at a time, to bound the working memory. All of this memory is
  // allocated before the first row is erased.
  constexpr size_t kRange = size_t{1} << 18;
  const size_t n = keys.size();
  const ScratchLease scratch;
  InsertPlan& plan = scratch->plan;
  RowId* const found = scratch->rows.Resize(std::min(n, kRange));
  plan.Reserve(exec, std::min(n, kRange));
  rows_.ReserveFree(std::min<uint64_t>(n, size()));
  const TableView<K> view = View();
  size_t erased = 0;
  for (size_t begin = 0; begin < n; begin += kRange) {
    const K* const k = keys.As<K>() + begin;
    const size_t size = std::min(n - begin, kRange);
    FindRows(exec, k, size, 0, Counts::kNothing, found);
    plan.BuildHeld(exec, k, found, size, index_);
    ForSegmentWorkers(exec, plan, 0, plan.size(), [&](size_t j) {
      OneLane lane;
      const Probe probe = MakeProbe(plan.hashes[j]);
      Bucket* buckets = view.SegmentBuckets(plan.segment_of[j]);
      const SlotRef at = dynemb::Find(lane, view, buckets, probe, k[plan.positions[j]]);
      if (dynemb::Erase(lane, buckets, probe, at)) index_.Uncount(plan.segment_of[j]);
    });
    for (size_t j = 0; j < plan.size(); ++j) {
      const RowId row = plan.rows[j];
      if (changes_.tracking()) changes_.Deleted(tick, KeyBits(row));
      FreeRow(row);
      if (wipe) memset(rows_.At(row), 0, layout().stride);
    }
    erased += plan.size();
  }
  changes_.TrimDeletions(this->size());
  counters_.erased.fetch_add(erased, std::memory_order_relaxed);
  return erased;
}

// hash_table.cc instantiates the class without the members that only this file defines.
#define DYNEMB_INSTANTIATE(K)                                                               \
  template Status HashTable<K>::Insert(Exec&, const K*, size_t, Stamp, RowId*, const Fill&, \
                                       InsertPlan*);                                        \
  template size_t HashTable<K>::Erase(Exec&, KeySpan, Tick, bool)
DYNEMB_INSTANTIATE(uint64_t);
DYNEMB_INSTANTIATE(uint32_t);
#undef DYNEMB_INSTANTIATE

}  // namespace dynemb
