// DeviceTable: looking up, and writing rows that are there. Included by device_table.h only.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_BATCH_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_BATCH_H_

#include <algorithm>
#include <cstring>
#include <string>

#include "cc/device/device_table.h"
#include "cc/table/phase.h"

namespace dynemb {

namespace device {
// Items of a kernel that sums over n things, and how many things each looks at.
constexpr size_t kSumEach = 64;
inline size_t SumItems(size_t n) { return (n + kSumEach - 1) / kSumEach; }
}  // namespace device

template <class Device>
DeviceTable<Device>::Work::Work(const DeviceTable& table, Exec* exec, Tells tells)
    : Device::Session(*table.device_, StreamFor(exec)),
      table_(table),
      stream_(StreamFor(exec)),
      tells_(tells) {
  const Stream before = table.stream_.load();
  if (before != stream_) this->After(before);
}

template <class Device>
DeviceTable<Device>::Work::~Work() {
  if (!this->status().ok() && (changes_ || tells_ == Tells::kNo)) {
    table_.Fail(this->status(), changes_);
  }
  // Calls that share the lock may have been under way on another stream meanwhile: whoever comes
  // next waits for this stream, and so for that one too.
  const Stream other = table_.stream_.exchange(stream_);
  if (other != stream_) this->After(other);
}

template <class Device>
void DeviceTable<Device>::Fail(const Status& status, bool disorder) const {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!disorder) {
    untold_ = status;
  } else if (disorder_.ok()) {
    disorder_ = Status(status.code(),
                       "table '" + options_.name +
                           "' is in disorder since an operation on it failed: " + status.message());
  }
}

template <class Device>
Status DeviceTable<Device>::Error() const {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!disorder_.ok()) return disorder_;
  return std::exchange(untold_, Status());
}

template <class Device>
InitializerView DeviceTable<Device>::initial() const {
  return {initializer_.seed(), options_.dim, reinterpret_cast<const InitRun*>(runs_.data()),
          static_cast<uint32_t>(initializer_.runs().size())};
}

template <class Device>
Stamp DeviceTable<Device>::BeginBatch(Exec& exec, Tick tick, size_t n) {
  WaitForReader();
  if (const Tick move = stamps_.MoveBefore(tick)) {
    Work work(*this, &exec);
    work.Changes();
    if (!Refresh(work).ok()) return stamps_.batch();
    work.ForEach(store_.ring.count, device::RebaseAccesses{store_.ring.buckets, move});
    work.ForEach(bounds_.high_water, device::RebaseUpdates{View(), move});
    stamps_.Move(move);
  }
  return stamps_.BeginBatch(tick, n);
}

template <class Device>
void DeviceTable<Device>::FindRows(Work& work, KeyArray keys, size_t n, Stamp now, bool counts,
                                   RowId* rows) {
  device::Candidates candidates;
  if (now != 0 && tiered() && store_.split != 0) {
    candidates = {&tier_state()->candidates, noted(), 2 * promote_most_};
  }
  work.ForKeys(n, device::FindKeys{View(), keys, now, rows, nullptr, candidates});
  if (!counts) return;
  const size_t items = device::SumItems(n);
  work.ForEach(items, device::CountFound{rows, n, items, store_.split, counters()});
}

template <class Device>
void DeviceTable<Device>::Find(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) {
  Work work(*this, &exec);
  FindRows(work, KeysAt(keys), n, stamps_.Of(tick), true, rows);
}

template <class Device>
void DeviceTable<Device>::Contains(Exec& exec, const void* keys, size_t n, bool* found) const {
  Work work(*this, &exec);
  work.ForKeys(n, device::FindKeys{View(), KeysAt(keys), 0, nullptr, found, {}});
}

template <class Device>
void DeviceTable<Device>::Lookup(Exec& exec, const void* keys, size_t n, Tick tick,
                                 const void* default_vector, void* vectors, RowId* rows) {
  Work work(*this, &exec);
  const KeyArray k = KeysAt(keys);
  FindRows(work, k, n, stamps_.Of(tick), true, rows);
  work.ForRows(n, device::ReadVectors{View(), initial(), k, rows, default_vector,
                                      static_cast<char*>(vectors)});
}

template <class Device>
void DeviceTable<Device>::ReadRows(Exec& exec, const void* keys, size_t n, float* vectors,
                                   float* state, bool* found) const {
  Work work(*this, &exec);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return;
  work.ForKeys(n, device::FindKeys{View(), KeysAt(keys), 0, rows, found, {}});
  work.ForRows(
      n, device::ReadColumns{View(), rows, nullptr, nullptr, vectors, state, nullptr, nullptr});
}

template <class Device>
void DeviceTable<Device>::Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n,
                                  Tick since, Tick now, bool* changed) const {
  Work work(*this, &exec);
  work.ForEach(
      n, device::CompareUpdates{View(), rows, rows_before, stamps_.base(), since, now, changed});
}

template <class Device>
Status DeviceTable<Device>::CheckBatch(size_t n) {
  constexpr size_t kMostKeys = size_t{1} << 30;
  if (n <= kMostKeys) return Status();
  return InvalidArgument("at most " + std::to_string(kMostKeys) + " keys in one call, got " +
                         std::to_string(n));
}

template <class Device>
template <class Fill>
Status DeviceTable<Device>::FindOrInsertWith(Work& work, KeyArray keys, size_t n, Stamp now,
                                             Keys repeat, RowId* rows, const Fill& fill,
                                             bool counts) {
  FindRows(work, keys, n, now, counts, rows);
  DYNEMB_RETURN_IF_ERROR(Insert(work, keys, n, now, repeat, rows, fill));
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::FindOrInsert(Exec& exec, const void* keys, size_t n, Tick tick,
                                         RowId* rows) {
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  const Stamp now = BeginBatch(exec, tick, n);
  Work work(*this, &exec, Work::Tells::kYes);
  return FindOrInsertWith(work, KeysAt(keys), n, now, Keys::kMayRepeat, rows,
                          device::FillInitial{initial(), layout()}, true);
}

template <class Device>
Status DeviceTable<Device>::InsertAndEvict(Exec& exec, const void* keys, size_t n, Tick tick,
                                           RowId* rows, EvictedRows* evicted) {
  evicted_ = evicted;
  const Status status = FindOrInsert(exec, keys, n, tick, rows);
  evicted_ = nullptr;
  return status;
}

template <class Device>
Status DeviceTable<Device>::LookupOrInsert(Exec& exec, const void* keys, size_t n, Tick tick,
                                           void* vectors, RowId* rows) {
  const KeyArray k = KeysAt(keys);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  const Stamp now = BeginBatch(exec, tick, n);
  Work work(*this, &exec, Work::Tells::kYes);
  DYNEMB_RETURN_IF_ERROR(FindOrInsertWith(work, k, n, now, Keys::kMayRepeat, rows,
                                          device::FillInitial{initial(), layout()}, true));
  work.ForRows(
      n, device::ReadVectors{View(), initial(), k, rows, nullptr, static_cast<char*>(vectors)});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::Upsert(Exec& exec, const void* keys, size_t n, const void* vectors,
                                   Tick tick) {
  const KeyArray k = KeysAt(keys);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  const Stamp now = BeginBatch(exec, tick, n);
  Work work(*this, &exec, Work::Tells::kYes);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return work.status();
  // The last of a key's positions writes its row.
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  Elect<true>(work, k, nullptr, n, &places, &of);
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(
      FindOrInsertWith(work, k, n, now, Keys::kMayRepeat, rows, device::FillNothing{}, false));
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(
      n, device::WriteVectors{View(), rows, places, of, static_cast<const char*>(vectors), now});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::Accumulate(Exec& exec, const void* keys, size_t n, const float* deltas,
                                       Tick tick) {
  const KeyArray k = KeysAt(keys);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  const Stamp now = BeginBatch(exec, tick, n);
  Work work(*this, &exec, Work::Tells::kYes);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return work.status();
  DYNEMB_RETURN_IF_ERROR(FindOrInsertWith(work, k, n, now, Keys::kDistinct, rows,
                                          device::FillInitial{initial(), layout()}, true));
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(n,
               device::WriteFloats{View(), k, rows, deltas, nullptr, true, RoundingAt(tick), now});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::WriteRows(Exec& exec, const void* keys, size_t n, const float* vectors,
                                      const float* state, bool insert, Tick tick) {
  const KeyArray k = KeysAt(keys);
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  const Stamp now = BeginBatch(exec, tick, n);
  Work work(*this, &exec, Work::Tells::kYes);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return work.status();
  FindRows(work, k, n, now, true, rows);
  if (insert) {
    DYNEMB_RETURN_IF_ERROR(Insert(work, k, n, now, Keys::kDistinct, rows, device::FillNothing{}));
  }
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(
      n, device::WriteFloats{View(), k, rows, vectors, layout().state_width != 0 ? state : nullptr,
                             false, RoundingAt(tick), now});
  return work.status();
}

template <class Device>
void DeviceTable<Device>::ApplyRange(Exec& exec, const RowOptimizer& optimizer, const void* keys,
                                     const RowId* rows, const float* gradients, size_t begin,
                                     size_t end, Tick tick) {
  const size_t n = end - begin;
  const KeyArray k = KeysAt(keys).From(begin);
  Work work(*this, &exec);
  RowId* resolved = work.template Take<RowId>(n);
  uint32_t* nonfinite = work.template Take<uint32_t>(n);
  if (resolved == nullptr || nonfinite == nullptr) return;
  work.Changes();
  work.ForKeys(n, device::ResolveRows{View(), k, rows + begin, resolved, counters(), tiered()});
  BeforeWrite(work, resolved, n);
  work.Fill(nonfinite, 0, n * sizeof(uint32_t));
  const Stamp now = stamps_.Of(tick);
  WithFormula(optimizer.kind(), optimizer.flags(), optimizer.coefficients().power,
              [&](auto formula) {
                using Formula = typename decltype(formula)::Formula;
                work.ForRows(n, device::ApplyGradients<Formula>{
                                    View(), optimizer.coefficients(), k, resolved,
                                    gradients + begin * static_cast<size_t>(options_.dim),
                                    RoundingAt(tick), now, nonfinite});
              });
  const size_t items = device::SumItems(n);
  work.ForEach(items, device::CountApplied{resolved, nonfinite, n, items, counters()});
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_BATCH_H_
