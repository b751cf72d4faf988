// Pass 2 of a host table's calls (hash_table.h), and Erase. InsertInitial is pass 2 of a lookup.
//
// Insert first does everything that may fail, in this order:
//
//   RemoveExpiredRows   if a pass has found expired rows: removes the expired rows of the batch
//   BringIn             moves the cold rows of the batch to memory
//   Build, Admit        lists the distinct new keys, without the keys that admission refuses
//   MakeRoom            if there is no room for them: removes expired rows of other keys
//   CanEvict            checks that enough rows may be evicted, if too few row ids are free
//   PrepareRows         reserves row ids and slots
//
// Then PlaceFresh gives free rows to new keys; PlaceByEviction and PlaceElsewhere give the rows of
// evicted keys to the others. Erase removes a bounded number of keys at a time.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/lanes.h"
#include "cc/table/phase.h"
#include "cc/table/staged.h"
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
    for (size_t i = 0; i < n; ++i) PrefetchLine(view_.RowAt(rows[i]));
  }

 private:
  const TableView<K> view_;
};

// A OneLane whose words other workers may change too: the bits of pinned rows. Its buckets belong
// to the worker.
struct WorkerLane : OneLane {
  template <class T>
  static T Load(const T* p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
  }
  static uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    __atomic_compare_exchange_n(p, &expected, desired, /*weak=*/false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
  }
};

// Pins rows, and unpins them when it is destroyed.
class Pins {
 public:
  explicit Pins(PinnedRows* set) : set_(set) {}
  ~Pins() {
    for (const auto& [rows, n] : used_) {
      for (size_t i = 0; i < n; ++i) {
        if (IsRow(rows[i])) set_->Unpin(rows[i]);
      }
    }
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  // Pins the rows of these arrays. Until the destruction, only rows that are pinned then may be
  // added to the arrays. `capacity`: row ids are below it.
  template <class FoundRows>
  uint32_t* Pin(uint64_t capacity, const std::vector<FoundRows>& used) {
    OneLane lane;
    uint32_t* const pins = set_->Reserve(capacity);
    used_.reserve(used.size());
    for (const auto& [rows, n] : used) {
      used_.push_back({rows, n});
      for (size_t i = 0; i < n; ++i) {
        if (IsRow(rows[i])) size_ += Evictable::Pin(lane, pins, rows[i]);
      }
    }
    return pins;
  }
  uint64_t size() const { return size_; }

 private:
  PinnedRows* const set_;
  std::vector<std::pair<const RowId*, size_t>> used_;
  uint64_t size_ = 0;
};

}  // namespace

template <class K>
Status HashTable<K>::InsertInitialAt(Exec& exec, const Batch& batch, BatchScratch* scratch) {
  const auto fill = [this](size_t, K key, char* row) { InitialVector(key, layout().vector(row)); };
  Batch counted = batch;
  counted.counted = true;
  return Insert(exec, counted, fill, scratch);
}

template <class K>
Status HashTable<K>::InsertInitial(Exec& exec, const K* keys, size_t n, Tick tick, RowId* rows,
                                   const std::vector<FoundRows>& others,
                                   const std::vector<uint32_t>* missing) {
  const ScratchLease scratch;
  const Stamp now = stamps_.Encode(tick);
  const bool admits = admission_.enabled() && evicted_ == nullptr;
  Batch batch{keys, n, rows, now, tick, scoring_.Lookup(now, true), others, admits};
  batch.missing = missing;
  DYNEMB_RETURN_IF_ERROR(InsertInitialAt(exec, batch, scratch.get()));
  if (admits) std::replace(rows, rows + n, kNoRow, AbsentRow());
  return Status();
}

template <class K>
Status HashTable<K>::Refuse(uint64_t keys, const std::string& why) {
  counters_.refused.fetch_add(keys, std::memory_order_relaxed);
  return Full(keys, rows_.live(), capacity(), why);
}

template <class K>
bool HashTable<K>::CanEvict(uint64_t needed, const Evictable& evictable,
                            uint64_t num_pinned) const {
  const uint64_t held = rows_.live();
  if (evictable.pins != nullptr) return held - num_pinned >= needed;
  // At most stamps_.batch_keys() rows have this batch's stamp. This bound is usually enough,
  // without a scan of the index.
  if (held >= stamps_.batch_keys() && held - stamps_.batch_keys() >= needed) return true;
  uint64_t rows = 0;
  for (uint32_t s = 0; s < index_.segments(); ++s) rows += EvictableRows(s, evictable);
  return rows >= needed;
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
        PrefetchLine(segment + MakeProbe(plan.hashes[j]).home);
      },
      fn);
}

template <class K>
void HashTable<K>::PlaceFresh(Exec& exec, const Batch& batch, const InsertPlan& plan, size_t fresh,
                              const Evictable& evictable, const Fill& fill) {
  const TableView<K> view = View();
  {
    Phase phase("fill rows");
    exec.ParallelFor(fresh, kKeyGrain, [&](size_t begin, size_t end) {
      const auto fetch = [&](size_t j) { PrefetchLine(view.RowAt(plan.rows[begin + j])); };
      const auto fill_row = [&](size_t j) {
        const size_t i = plan.positions[begin + j];
        batch.rows[i] = plan.rows[begin + j];
        FillRow(i, batch.keys[i], batch.rows[i], batch.now, fill);
      };
      RunStaged(end - begin, StagedBlock(1), fetch, fill_row);
    });
  }
  Phase phase("claim slots");
  // Index::Grow has counted these keys.
  const Score score = scoring_.New(batch.now);
  ForSegmentWorkers(exec, plan, 0, fresh, [&](size_t j) {
    WorkerLane lane;
    if (evictable.pins != nullptr) Evictable::Pin(lane, evictable.pins, plan.rows[j]);
    Claim(lane, view.SegmentBuckets(plan.segment_of[j]), MakeProbe(plan.hashes[j]), plan.rows[j],
          score);
  });
}

template <class K>
void HashTable<K>::PlaceByEviction(Exec& exec, const Batch& batch, const InsertPlan& plan,
                                   size_t fresh, const Evictable& evictable, const Fill& fill) {
  if (fresh == plan.size()) return;
  Phase phase("evict");
  const TableView<K> view = View();
  const Score score = scoring_.New(batch.now);
  ForSegmentWorkers(exec, plan, fresh, plan.size(), [&](size_t j) {
    WorkerLane lane;
    const size_t i = plan.positions[j];
    const EvictedSlot at = Evict(lane, view, view.SegmentBuckets(plan.segment_of[j]),
                                 MakeProbe(plan.hashes[j]), evictable, score);
    batch.rows[i] = at.row;
    if (at.bucket == nullptr) return;  // PlaceElsewhere
    BeforeEviction(view.KeyAt(at.row), at.row, at.score, batch.now);
    FillRow(i, batch.keys[i], at.row, batch.now, fill);
  });
}

template <class K>
void HashTable<K>::PlaceElsewhere(const Batch& batch, const InsertPlan& plan, size_t fresh,
                                  const Evictable& evictable, const Fill& fill) {
  OneLane lane;
  uint32_t victims = 0;  // the segment to search for the next victim
  for (size_t j = fresh; j < plan.size(); ++j) {
    const size_t i = plan.positions[j];
    if (batch.rows[i] != kNoRow) continue;
    EvictAnywhere(&victims, batch.now, evictable);
    // Allocates the id that was just freed, and claims a slot that PrepareRows has made free.
    RowId row = kNoRow;
    if (!rows_.Allocate(1, &row).ok()) std::abort();
    if (evictable.pins != nullptr) Evictable::Pin(lane, evictable.pins, row);
    FillRow(i, batch.keys[i], row, batch.now, fill);
    const uint32_t segment = index_.SegmentOf(plan.hashes[j]);
    Claim(lane, index_.SegmentBuckets(segment), MakeProbe(plan.hashes[j]), row,
          scoring_.New(batch.now));
    index_.Count(segment);
    batch.rows[i] = row;
  }
}

template <class K>
Status HashTable<K>::PrepareRows(Exec& exec, size_t fresh, const Evictable& evictable,
                                 InsertPlan* plan) {
  const size_t m = plan->size();
  changes_.Extend(std::min<uint64_t>(rows_.high_water() + fresh, capacity()));
  if (fresh < m) {
    if (evicted_ != nullptr && cold_ == nullptr) evicted_->Reserve(m - fresh);
    rows_.ReserveFree(1);
    // If a segment has too few rows that may be evicted, its other new keys get rows of other
    // segments, and need free slots in this one. Keys with fresh rows may need such slots, too.
    const auto leaving = [&](uint32_t s) { return fresh == 0 ? EvictableRows(s, evictable) : 0; };
    DYNEMB_RETURN_IF_ERROR(index_.MakeSlots(exec, plan->hashes.get(), m, KeysOfRows<K>(View()),
                                            plan->owned(), leaving, plan->segment_of.get()));
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
  DYNEMB_RETURN_IF_ERROR(index_.Grow(exec, plan->hashes.get(), fresh, KeysOfRows<K>(View()),
                                     plan->owned(), plan->segment_of.get()));
  allocated.n = 0;
  for (size_t j = fresh; j < m; ++j) plan->segment_of[j] = index_.SegmentOf(plan->hashes[j]);
  return Status();
}

template <class K>
void HashTable<K>::RemoveExpiredRows(Exec& exec, const Batch& batch) {
  std::vector<K> missing;
  for (size_t i = 0; i < batch.n; ++i) {
    if (batch.rows[i] == kNoRow) missing.push_back(batch.keys[i]);
  }
  const size_t n = missing.size();
  // Another part of the batch may have given some of these keys new rows by now (cc/lookup).
  std::vector<RowId> any(n), unexpired(n);
  FindRows(exec, missing.data(), n, Touch{}, Expired(), Counts::kNothing, any.data());
  FindRows(exec, missing.data(), n, Touch{}, ExpiredAt(batch.tick), Counts::kNothing,
           unexpired.data());
  size_t expired = 0;
  for (size_t i = 0; i < n; ++i) {
    if (any[i] != kNoRow && unexpired[i] == kNoRow) missing[expired++] = missing[i];
  }
  Erase(exec, {missing.data(), expired}, batch.tick, Removal::kExpire);
  found_expired_.store(false, std::memory_order_relaxed);
}

template <class K>
Status HashTable<K>::ExpireToInsert(Exec& exec, size_t n, Tick tick) {
  // All rows, if that costs little beside the insertion.
  constexpr uint64_t kRowsPerKey = 64;
  // Otherwise examine kExamined rows per new key, and remove at most kRemoved per new key. By the
  // time a table has replaced all of its rows, it has examined each of them 16 times.
  constexpr uint64_t kExamined = 16, kRemoved = 4;
  const bool is_cheap = rows_.high_water() <= kRowsPerKey * n;
  if (!is_cheap && options_.evict_strategy != EvictStrategy::kNone) {
    Reclaim(exec, tick, {kExamined * n, kRemoved * n, /*least=*/1});
    return Status();
  }
  uint64_t expired;
  return Expire(exec, tick, &expired);
}

template <class K>
Status HashTable<K>::Insert(Exec& exec, const Batch& batch, const Fill& fill,
                            BatchScratch* scratch) {
  Phase phase("insert");
  // Expired rows first: BringIn could move them to files, while their keys get new rows here.
  if (!batch.is_move && found_expired_.exchange(false, std::memory_order_relaxed)) {
    RemoveExpiredRows(exec, batch);
  }
  if (cold_ != nullptr && !batch.is_move) DYNEMB_RETURN_IF_ERROR(BringIn(exec, batch));
  InsertPlan* const plan = &scratch->plan;
  plan->Build(exec, batch.keys, batch.rows, batch.n, index_, batch.missing);
  if (batch.admits) Admit(batch, exec, scratch);
  const size_t m = plan->size();
  if (m == 0) return Status();
  if (!batch.is_move) DYNEMB_RETURN_IF_ERROR(MakeRoom(exec, m, batch.tick));
  const size_t fresh = std::min<uint64_t>(m, capacity() - rows_.live());
  Evictable evictable{scoring_.Order(stamps_), stamps_.order().Rank(batch.now), nullptr};
  Pins pins(&scratch->pinned);
  if (fresh < m) {
    if (cold_ == nullptr && options_.max_capacity == 0) {
      return Refuse(m - fresh, "row ids have 32 bits. Use several tables, or more ranks");
    }
    if (cold_ == nullptr && options_.evict_strategy == EvictStrategy::kNone) {
      return Refuse(m - fresh, kEvictsNothing);
    }
    // Rows that other calls at this tick have used can become cold: only the rows of this call are
    // pinned.
    if (!scoring_.by_time() || cold_ != nullptr) {
      std::vector<FoundRows> used = batch.others;
      used.push_back({batch.rows, batch.n});
      evictable.pins = pins.Pin(capacity(), used);
    }
    if (!CanEvict(m - fresh, evictable, pins.size())) {
      return Refuse(m - fresh, cold_ == nullptr
                                   ? kAllInUse
                                   : "max_dram_for_vectors has no room for all rows of this batch; "
                                     "the rows of a step must be in memory together. Raise it, or "
                                     "pass fewer different ids at a time");
    }
  }
  struct ColdBatch {
    ColdRows* rows = nullptr;
    void End() {
      if (rows != nullptr) rows->Settle();
      rows = nullptr;
    }
    ~ColdBatch() { End(); }
  } cold_batch;
  if (cold_ != nullptr && fresh < m) {
    DYNEMB_RETURN_IF_ERROR(cold_->Reserve(m - fresh));
    cold_batch.rows = cold_.get();
  }
  const Status status = PrepareRows(exec, fresh, evictable, plan);
  if (!status.ok()) return Refuse(m, status.message() + kOutOfMemory);

  // From here on nothing fails.
  PlaceFresh(exec, batch, *plan, fresh, evictable, fill);
  PlaceByEviction(exec, batch, *plan, fresh, evictable, fill);
  PlaceElsewhere(batch, *plan, fresh, evictable, fill);
  const std::vector<InsertPlan::Repeat>& repeats = plan->repeats();
  for (const InsertPlan::Repeat& r : repeats) batch.rows[r.position] = batch.rows[r.first];
  if (batch.touch.kind == Touch::Kind::kCount && !repeats.empty()) {
    Phase count("count repeated keys");
    exec.ParallelFor(repeats.size(), kKeyGrain, [&](size_t begin, size_t end) {
      struct Ignore {
        void Hit(size_t, RowId, const char*) {}
        void Miss(size_t, K) {}
      } visit;
      FindPass(
          View(), layout().key_size, [&](size_t r) { return batch.keys[repeats[r].position]; },
          begin, end, batch.touch, Expired(), visit);
    });
  }
  if (batch.is_move) return Status();
  counters_.inserts.fetch_add(m, std::memory_order_relaxed);
  if (cold_ != nullptr) {
    cold_batch.End();
    KeepError(TrimCold(batch.tick, rows_.live()));
    if (fresh < m) CompactSoon();
    return Status();
  }
  if (fresh < m) changes_.TrimDeletions(size());
  counters_.evictions.fetch_add(m - fresh, std::memory_order_relaxed);
  return Status();
}

template <class K>
Status HashTable<K>::MakeRoom(Exec& exec, size_t n, Tick tick) {
  const auto most = cold_ == nullptr ? capacity() : static_cast<uint64_t>(options_.max_capacity);
  if (most == 0 || most - std::min(most, size()) >= n) return Status();
  DYNEMB_RETURN_IF_ERROR(ExpireToInsert(exec, n, tick));
  if (cold_ == nullptr || options_.evict_strategy != EvictStrategy::kNone) return Status();
  if (most - std::min(most, size()) >= n) return Status();
  counters_.refused.fetch_add(n, std::memory_order_relaxed);
  return Full(n, size(), most, kEvictsNothing);
}

template <class K>
uint32_t HashTable<K>::EvictableRows(uint32_t segment, const Evictable& evictable) const {
  uint32_t rows = 0;
  OneLane lane;
  const Bucket* const buckets = index_.SegmentBuckets(segment);
  for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      const RowId row = buckets[b].row[s];
      rows +=
          row != kNoRow && evictable.Allows(lane, evictable.order.Rank(buckets[b].score[s]), row);
    }
  }
  return rows;
}

template <class K>
void HashTable<K>::EvictAnywhere(uint32_t* segment, Stamp now, const Evictable& evictable) {
  OneLane lane;
  const TableView<K> view = View();
  for (;; ++*segment) {
    if (*segment == index_.segments()) std::abort();  // CanEvict has counted them
    Bucket* buckets = index_.SegmentBuckets(*segment);
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        const RowId row = buckets[b].row[s];
        const Score score = buckets[b].score[s];
        if (row == kNoRow || !evictable.Allows(lane, evictable.order.Rank(score), row)) continue;
        const K key = view.KeyAt(row);
        dynemb::Erase(lane, buckets, MakeProbe(view.HashOf(key)), SlotRef{&buckets[b], s, row});
        index_.Uncount(*segment);
        BeforeEviction(key, row, score, now);
        FreeRow(row);
        return;
      }
    }
  }
}

template <class K>
size_t HashTable<K>::Erase(Exec& exec, KeySpan keys, Tick tick, Removal how) {
  // Erases a bounded number of keys at a time, to bound the working memory. All of this memory is
  // allocated before the first row is erased.
  constexpr size_t kRange = size_t{1} << 18;
  const size_t n = keys.size();
  const ScratchLease scratch;
  InsertPlan& plan = scratch->plan;
  RowId* const found = scratch->rows.Resize(std::min(n, kRange));
  plan.Reserve(exec, std::min(n, kRange));
  rows_.ReserveFree(std::min<uint64_t>(n, rows_.live()));
  const TableView<K> view = View();
  auto& counter = how == Removal::kEvict    ? counters_.evictions
                  : how == Removal::kExpire ? counters_.expired
                                            : counters_.erased;
  size_t erased = 0, hot = 0;
  for (size_t begin = 0; begin < n; begin += kRange) {
    const K* const k = keys.As<K>() + begin;
    const size_t size = std::min(n - begin, kRange);
    // Cold rows first: this needs memory, and may fail.
    const Status cold = EraseCold({options_.key_type, k, size}, tick, how, &erased);
    if (!cold.ok()) {
      KeepError(cold);
      counter.fetch_add(hot, std::memory_order_relaxed);
      return erased;
    }
    // Expired rows, too.
    FindRows(exec, k, size, Touch{}, Expired(), Counts::kNothing, found);
    plan.BuildHeld(exec, k, found, size, index_);
    ForSegmentWorkers(exec, plan, 0, plan.size(), [&](size_t j) {
      OneLane lane;
      const Probe probe = MakeProbe(plan.hashes[j]);
      Bucket* buckets = view.SegmentBuckets(plan.segment_of[j]);
      const SlotRef at = dynemb::Find(lane, view, buckets, probe, k[plan.positions[j]]);
      BeforeLoss(at.row, at.bucket->score[at.slot]);
      if (dynemb::Erase(lane, buckets, probe, at)) index_.Uncount(plan.segment_of[j]);
    });
    for (size_t j = 0; j < plan.size(); ++j) {
      const RowId row = plan.rows[j];
      if (changes_.tracking()) changes_.Deleted(tick, KeyBits(row), how);
      FreeRow(row);
      if (how == Removal::kWipe) memset(rows_.At(row), 0, layout().stride);
    }
    erased += plan.size();
    hot += plan.size();
  }
  if (how == Removal::kWipe) ForgetCounts(keys);
  changes_.TrimDeletions(this->size());
  counter.fetch_add(hot, std::memory_order_relaxed);
  return erased;
}

// hash_table.cc instantiates the class without the members that only this file defines.
#define DYNEMB_INSTANTIATE(K)                                                            \
  template Status HashTable<K>::Insert(Exec&, const Batch&, const Fill&, BatchScratch*); \
  template Status HashTable<K>::InsertInitial(Exec&, const K*, size_t, Tick, RowId*,     \
                                              const std::vector<FoundRows>&,             \
                                              const std::vector<uint32_t>*);             \
  template Status HashTable<K>::InsertInitialAt(Exec&, const Batch&, BatchScratch*);     \
  template size_t HashTable<K>::Erase(Exec&, KeySpan, Tick, Removal)
DYNEMB_INSTANTIATE(uint64_t);
DYNEMB_INSTANTIATE(uint32_t);
#undef DYNEMB_INSTANTIATE

}  // namespace dynemb
