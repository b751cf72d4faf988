// HashTable's part of cold rows (cold_rows.h). Warm, BringIn and HoldRows move the cold rows of
// keys to memory, ListMissing lists the keys that may have one, and MoveAllOut moves all rows from
// memory to ColdRows. Eviction (hash_table_insert.cc) moves single rows there. ColdTable erases
// cold rows.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "cc/table/hash_table.h"
#include "cc/table/lanes.h"
#include "cc/table/phase.h"

namespace dynemb {
namespace {

void SortDistinct(std::vector<uint64_t>* keys) {
  std::sort(keys->begin(), keys->end());
  keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
}

}  // namespace

template <class K>
Status HashTable<K>::MoveIn(Exec& exec, const Moved& moved, Stamp now, Tick tick,
                            const std::vector<FoundRows>& others, bool brings) {
  const size_t n = moved.keys.size();
  if (n == 0) return Status();
  const size_t content_bytes = layout().content_bytes();
  // Everything that needs memory comes before the rows are in two places.
  const std::vector<K> keys(moved.keys.begin(), moved.keys.end());
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(n);
  std::fill_n(rows, n, kNoRow);
  // A sweep may have passed the row's new place, and not have come to its old one.
  brings = catch_up_.active() && (brings || IsBringing());
  if (brings && layout().dtype != DType::kFloat32) {
    buffers_.Prepare(exec.parallelism(), layout().dim);
  }
  const auto fill = [&](size_t i, K key, char* row) {
    char* const content = row + layout().vector_offset;
    memcpy(content, moved.ContentOf(i, layout()), content_bytes);
    *layout().update(row) = Clamped(moved.times[i]).updated;
    if (!brings || !catch_up_.IsBehind(layout().state(row))) return;
    VectorBuffers::Lease unpacked(&buffers_);
    BringContent(key, content, unpacked.get());
  };
  Batch batch{keys.data(), n, rows, now, tick, Touch{}, others};
  batch.is_move = true;
  DYNEMB_RETURN_IF_ERROR(Insert(exec, batch, fill, scratch.get()));
  WriteScores(exec, rows, n, [&](size_t i) { return Clamped(moved.times[i]).score; });
  RemoveMoved(moved);
  return Status();
}

template <class K>
Status HashTable<K>::BringIn(Exec& exec, const Batch& batch) {
  if (cold_->size() == 0) return Status();
  Phase phase("read cold rows");
  Moved moved;
  {
    const ScratchLease scratch;
    InsertPlan& plan = scratch->plan;
    plan.Build(exec, batch.keys, batch.rows, batch.n, index_);
    std::vector<uint64_t> keys(plan.size());
    for (size_t j = 0; j < plan.size(); ++j) keys[j] = batch.keys[plan.positions[j]];
    DYNEMB_RETURN_IF_ERROR(TakeCold(keys, batch.tick, &moved));
  }
  if (moved.keys.empty()) return Status();
  std::vector<FoundRows> others = batch.others;
  others.push_back({batch.rows, batch.n});
  std::vector<uint32_t> own;
  std::vector<uint32_t>* const missing = batch.moved != nullptr ? batch.moved : &own;
  for (size_t i = 0; i < batch.n; ++i) {
    if (batch.rows[i] == kNoRow) missing->push_back(static_cast<uint32_t>(i));
  }
  const Status status = MoveIn(exec, moved, batch.now, batch.tick, others, batch.brings);
  if (!status.ok()) {
    missing->clear();
    return status;
  }
  // Now each occurrence of these keys counts as if pass 1 had found it.
  std::vector<RowId> found(missing->size(), kNoRow);
  struct Again {
    RowId* rows;
    void Hit(size_t m, RowId row, const char*) { rows[m] = row; }
    void Miss(size_t, K) {}
  };
  exec.ParallelFor(missing->size(), kKeyGrain, [&](size_t begin, size_t end) {
    Again visit{found.data()};
    FindPass(
        View(), layout().key_size, [&](size_t m) { return batch.keys[(*missing)[m]]; }, begin, end,
        batch.touch, ExpiredAt(batch.tick), visit);
  });
  size_t hits = 0;
  for (size_t m = 0; m < missing->size(); ++m) {
    if (found[m] == kNoRow) continue;
    batch.rows[(*missing)[m]] = found[m];
    (*missing)[hits++] = (*missing)[m];
  }
  missing->resize(hits);
  if (batch.counted) {
    counters_.hits.fetch_add(hits, std::memory_order_relaxed);
    counters_.misses.fetch_sub(hits, std::memory_order_relaxed);
  }
  return Status();
}

template <class K>
Status HashTable<K>::WarmRows(Exec& exec, KeySpan keys) {
  if (cold_ == nullptr || cold_->size() == 0) return Status();
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(keys.size());
  FindQuietly(exec, keys, Expired(), rows);
  Batch batch{keys.As<K>(), keys.size(), rows, stamps_.batch(), 0, Touch{}};
  batch.brings = false;
  return BringIn(exec, batch);
}

template <class K>
void HashTable<K>::Warm(Exec& exec, KeySpan keys) {
  KeepError(WarmRows(exec, keys));
}

template <class K>
Status HashTable<K>::ListMissing(Exec& exec, KeySpan keys, std::vector<uint64_t>* missing) const {
  const ScratchLease scratch;
  RowId* const rows = scratch->rows.Resize(keys.size());
  FindQuietly(exec, keys, Expired(), rows);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (rows[i] == kNoRow) missing->push_back(keys.BitsAt(i));
  }
  return Status();
}

template <class K>
Status HashTable<K>::HoldRows(Exec& exec, const HeldRows* held, size_t num) {
  if (cold_ == nullptr) return Status();
  // The rows that are in memory stay there while the others come: they are pinned.
  std::vector<FoundRows> others;
  std::vector<std::vector<RowId>> in_memory(num);
  std::vector<uint64_t> keys;
  for (size_t h = 0; h < num; ++h) {
    const K* const k = held[h].keys.template As<K>();
    const size_t n = held[h].keys.size();
    in_memory[h].resize(n);
    FindQuietly(exec, held[h].keys, Expired(), in_memory[h].data());
    for (size_t i = 0; i < n; ++i) {
      if (in_memory[h][i] == kNoRow) keys.push_back(k[i]);
    }
    others.push_back({in_memory[h].data(), n});
  }
  if (!keys.empty()) {
    SortDistinct(&keys);
    Moved moved;
    DYNEMB_RETURN_IF_ERROR(TakeCold(keys, 0, &moved));
    DYNEMB_RETURN_IF_ERROR(MoveIn(exec, moved, stamps_.batch(), 0, others, false));
  }
  for (size_t h = 0; h < num; ++h) {
    const K* const k = held[h].keys.template As<K>();
    std::vector<RowId> now(held[h].keys.size());
    FindQuietly(exec, held[h].keys, Expired(), now.data());
    for (size_t i = 0; i < now.size(); ++i) {
      // A key that the lookup found or gave no row, and that has one since, gets no gradient.
      const bool had =
          held[h].rows[i] != kNoRow && !(admission_.enabled() && IsRefused(held[h].rows[i]));
      if (had && !Holds(held[h].rows[i], k[i])) held[h].rows[i] = now[i];
    }
  }
  return Status();
}

template <class K>
Status HashTable<K>::MoveAllOut() {
  constexpr size_t kRange = 65536;
  const TableView<K> view = View();
  OneLane lane;
  std::vector<RowId> rows;
  rows.reserve(std::min<uint64_t>(kRange, rows_.live()));
  for (uint64_t next = 0; next < rows_.high_water();) {
    rows.clear();
    for (; next < rows_.high_water() && rows.size() < kRange; ++next) {
      const auto row = static_cast<RowId>(next);
      if (*layout().update(rows_.At(row)) != 0) rows.push_back(row);
    }
    rows_.ReserveFree(rows.size());
    DYNEMB_RETURN_IF_ERROR(cold_->Reserve(rows.size()));
    for (const RowId row : rows) {
      const K key = view.KeyAt(row);
      const uint64_t hash = view.HashOf(key);
      const uint32_t segment = view.SegmentOf(hash);
      Bucket* const buckets = view.SegmentBuckets(segment);
      const Probe probe = MakeProbe(hash);
      const SlotRef at = dynemb::Find(lane, view, buckets, probe, key);
      BeforeEviction(key, row, at.bucket->score[at.slot], stamps_.batch());
      if (dynemb::Erase(lane, buckets, probe, at)) index_.Uncount(segment);
      FreeRow(row);
    }
    cold_->Settle();
  }
  rows_.Clear();
  return Status();
}

// hash_table.cc instantiates the class without the members that only this file defines.
#define DYNEMB_INSTANTIATE(K)                                                              \
  template Status HashTable<K>::BringIn(Exec&, const Batch&);                              \
  template void HashTable<K>::Warm(Exec&, KeySpan);                                        \
  template Status HashTable<K>::WarmRows(Exec&, KeySpan);                                  \
  template Status HashTable<K>::ListMissing(Exec&, KeySpan, std::vector<uint64_t>*) const; \
  template Status HashTable<K>::HoldRows(Exec&, const HeldRows*, size_t);                  \
  template Status HashTable<K>::MoveAllOut()
DYNEMB_INSTANTIATE(uint64_t);
DYNEMB_INSTANTIATE(uint32_t);
#undef DYNEMB_INSTANTIATE

}  // namespace dynemb
