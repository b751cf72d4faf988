// DeviceTable: cold rows (cc/table/cold_rows.h), of a table whose memory is limited. Included by
// device_table.h only.
//
//   FindRows misses -> ListAbsent -> ColdRows::Find, on the host -> MoveIn: an Insert of these rows
//   Insert -> PlanLeaving -> evicted rows -> Leave: one gather, one copy, ColdRows::Add
//
// The rows that a batch has found are pinned while others move, so that all rows of a batch are in
// memory together. Rows leave the device tier and the host tier alike: eviction takes the row with
// the lowest score, wherever it is.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_COLD_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_COLD_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_state.h"
#include "cc/device/kernels_cold.h"
#include "cc/table/phase.h"
#include "cc/table/row_columns.h"
#include "cc/table/unaligned.h"

namespace dynemb {

namespace device {
// The rows that are listed, copied and added together where all rows of a table are.
constexpr uint64_t kColdRange = 65536;
}  // namespace device

template <class Device>
Status DeviceTable<Device>::HostRows(const RowLayout& layout, uint64_t split,
                                     uint64_t* rows) const {
  const uint64_t most =
      options_.max_capacity != 0 ? static_cast<uint64_t>(options_.max_capacity) : kMostRows;
  *rows = most - split;
  if (cold_ == nullptr) return Status();
  *rows = std::min(*rows, options_.max_dram_bytes / layout.stride);
  if (split + *rows >= std::min(most, kLeastHotRows)) return Status();
  return InvalidArgument("max_hbm_for_vectors and max_dram_for_vectors of table '" + options_.name +
                         "' are " + std::to_string(options_.max_hbm_bytes) + " and " +
                         std::to_string(options_.max_dram_bytes) + " bytes, which hold " +
                         std::to_string(split + *rows) + " rows of " +
                         std::to_string(layout.stride) + " bytes; at least " +
                         std::to_string(kLeastHotRows) + " rows are needed");
}

template <class Device>
bool DeviceTable<Device>::AnyCold(const Batch& batch) {
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    if (batch.size(t) != 0 && batch.tables[t]->any_cold()) return true;
  }
  return false;
}

template <class Device>
std::vector<char> DeviceTable<Device>::KeysToHost(Work& work, KeySpan keys) const {
  return ToHost(work, static_cast<const char*>(keys.data()), keys.size() * store_.layout.key_size);
}

// --- To memory

template <class Device>
Status DeviceTable<Device>::ListAbsent(Work& work, Batch& batch, const RowId* absent,
                                       std::vector<uint64_t>* keys, std::vector<uint32_t>* ends) {
  const size_t n = batch.size(), num_tables = batch.tables.size();
  const typename Device::Session::Scratch scratch(work);
  const device::TableViews& tables = ViewsOf(work, batch);
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  device::Elect<false>(work, device::BatchKeys{batch.keys, tables}, absent, n, &places, &of);
  uint32_t* const sums = work.template Take<uint32_t>(n + 1);
  uint32_t* const on_device = work.template Take<uint32_t>(num_tables);
  uint64_t* const listed = work.template Take<uint64_t>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.ForEach(n + 1, device::FlagFirst{absent, places, of, n, sums});
  work.ExclusiveSum(sums, n + 1);
  work.ForEach(n, device::ListKeys{batch.keys, sums, listed});
  work.ForEach(num_tables, device::ReadEnds{tables, sums, on_device});
  *ends = ToHost(work, on_device, num_tables);
  *keys = ToHost(work, listed, ends->back());
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::BringIn(Work& work, Batch& batch, const RowId* found) {
  Phase phase("read cold rows");
  const size_t n = batch.size(), num_tables = batch.tables.size();
  const bool is_access = found == nullptr && batch.now[0] != 0;
  // Otherwise these rows, which are not pinned, could become cold while their keys get new ones.
  if (is_access) DYNEMB_RETURN_IF_ERROR(RemoveExpiredRows(work, batch));
  const RowId* absent = batch.rows;
  if (found != nullptr) {
    RowId* const lost = work.template Take<RowId>(n);
    DYNEMB_RETURN_IF_ERROR(work.status());
    work.ForEach(n, device::FlagLost{found, batch.rows, lost});
    absent = lost;
  }
  std::vector<uint64_t> keys;
  std::vector<uint32_t> ends;
  DYNEMB_RETURN_IF_ERROR(ListAbsent(work, batch, absent, &keys, &ends));
  bool any = false;
  for (size_t t = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    const uint32_t begin = t == 0 ? 0 : ends[t - 1];
    if (begin == ends[t] || !table.any_cold()) continue;
    Moved moved;
    DYNEMB_RETURN_IF_ERROR(table.TakeCold({keys.begin() + begin, keys.begin() + ends[t]},
                                          is_access ? table.stamps_.Decode(batch.now[t]) : 0,
                                          &moved));
    if (moved.keys.empty()) continue;
    any = true;
    batch.viewed = false;  // the index may grow
    DYNEMB_RETURN_IF_ERROR(table.MoveIn(work, moved, batch, t));
  }
  if (!any) return work.status();
  const device::TableViews& tables = ViewsOf(work, batch);
  work.ForKeys(
      n, device::FindAgain{{tables, batch.keys, batch.rows, nullptr}, absent, found != nullptr});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::MoveIn(Work& work, const Moved& moved, const Batch& from, size_t t) {
  const size_t n = moved.keys.size();
  const RowLayout& l = content_layout();
  std::vector<char> keys(n * l.key_size), vectors(n * l.vector_bytes());
  std::vector<float> state(n * static_cast<size_t>(l.state_width));
  std::vector<Stamp> updates(n);
  std::vector<Score> scores(n);
  const RowColumns columns{keys.data(), vectors.data(), state.data()};
  for (size_t i = 0; i < n; ++i) {
    columns.Set(i, l, &moved.keys[i], moved.ContentOf(i, l));  // low bytes of the key come first
    const RowTimes times = Clamped(moved.times[i]);
    updates[i] = times.updated;
    scores[i] = times.score;
  }
  const typename Device::Session::Scratch scratch(work);
  const auto bring = [&work](const auto& array) {
    using T = typename std::decay_t<decltype(array)>::value_type;
    T* const to = work.template Take<T>(array.size());
    if (to != nullptr) work.Copy(to, array.data(), array.size() * sizeof(T));
    return to;
  };
  const char* const keys_there = bring(keys);
  const device::FillMoved fill{bring(vectors), bring(state), bring(updates)};
  const Score* const scores_there = bring(scores);
  RowId* const rows = work.template Take<RowId>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.Fill(rows, 0xFF, n * sizeof(RowId));
  Batch batch = BatchOf(KeysAt(keys_there), n, from.now[t], rows);
  batch.is_move = true;
  batch.held = from.rows + from.begins[t];
  batch.num_held = from.size(t);
  DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kDistinct, fill));
  RemoveMoved(moved);
  work.Changes();
  work.ForKeys(n, device::WriteScores{View(), rows, scores_there, nullptr, nullptr});
  work.Settled();
  // A sweep may have passed the row's new place, and not have come to its old one.
  if (IsBringing()) Bring(work, batch);
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::HoldFound(Work& work, Batch& batch, const RowId* found) {
  work.ForKeys(batch.size(),
               device::ResolveRows{ViewsOf(work, batch), batch.keys, found, batch.rows});
  return AnyCold(batch) ? BringIn(work, batch, found) : Status();
}

template <class Device>
Status DeviceTable<Device>::FindQuietly(Work& work, Batch& batch) {
  work.ForKeys(batch.size(),
               device::FindKeys{ViewsOf(work, batch), batch.keys, batch.rows, nullptr});
  return AnyCold(batch) ? BringIn(work, batch, nullptr) : Status();
}

template <class Device>
Status DeviceTable<Device>::ListMissing(Exec& exec, KeySpan keys,
                                        std::vector<uint64_t>* missing) const {
  const size_t n = keys.size();
  if (n == 0 || !any_cold()) return Status();
  Work work(*this, &exec, Work::Reports::kYes);
  RowId* const rows = work.template Take<RowId>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  device::TableViews views = ViewsAt(0, n);
  views.one.expired = Expired();
  work.ForKeys(n, device::FindKeys{views, KeysAt(keys), rows, nullptr});
  const std::vector<RowId> found = ToHost(work, rows, n);
  const std::vector<char> on_host = KeysToHost(work, keys);
  DYNEMB_RETURN_IF_ERROR(work.status());
  const KeySpan bits(options_.key_type, on_host.data(), n);
  for (size_t i = 0; i < n; ++i) {
    if (found[i] == kNoRow) missing->push_back(bits.BitsAt(i));
  }
  return Status();
}

// --- From memory

template <class Device>
bool DeviceTable<Device>::MayExceed(size_t n) const {
  return cold_ != nullptr && options_.max_capacity != 0 &&
         options_.evict_strategy == EvictStrategy::kNone &&
         RowsHeld() + n > static_cast<uint64_t>(options_.max_capacity);
}

template <class Device>
Status DeviceTable<Device>::PlanLeaving(Work& work, const Batch& batch, const uint32_t* from,
                                        const uint32_t* to, LeavingRows* leaving) {
  auto* const ends = work.template Pinned<uint32_t>(2);
  auto* const now = work.template Pinned<device::Counters>(1);
  auto* const num_pinned = work.template Pinned<uint64_t>(1);
  DYNEMB_RETURN_IF_ERROR(work.status());
  *num_pinned = 0;
  work.Copy(&ends[0], from, sizeof(*from));
  work.Copy(&ends[1], to, sizeof(*to));
  work.Copy(now, counters(), sizeof(*now));
  if (num_pinned_ != nullptr) work.Copy(num_pinned, num_pinned_, sizeof(*num_pinned));
  DYNEMB_RETURN_IF_ERROR(work.Synchronize());
  const uint64_t keys = ends[1] - ends[0], held = now->size();
  const auto most = static_cast<uint64_t>(options_.max_capacity);
  if (!batch.is_move && MayExceed(keys) && held + num_cold() + keys > most) {
    refused_ += keys;
    return Full(keys, held + num_cold(), most, "evict_strategy is none");
  }
  if (held + keys <= capacity()) return Status();
  const uint64_t n = held + keys - capacity();
  if (held - *num_pinned < n) {
    return Refuse(n, held,
                  "max_hbm_for_vectors and max_dram_for_vectors have no room for all rows of this "
                  "batch; the rows of a step must be in memory together");
  }
  leaving->first = ends[1] - n;
  return PrepareLeaving(work, n, leaving);
}

template <class Device>
Status DeviceTable<Device>::PrepareLeaving(Work& work, size_t n, LeavingRows* leaving) {
  const size_t stride = store_.layout.stride;
  leaving->n = n;
  leaving->chunk = std::min<size_t>(n, std::max<size_t>(1, device::kCopyPinned / stride));
  leaving->copies = work.template Take<char>(leaving->chunk * stride);
  leaving->host_copies = work.template Pinned<char>(leaving->chunk * stride);
  leaving->scores = work.template Pinned<Score>(leaving->chunk);
  leaving->row.assign(content_layout().stride, 0);
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(cold_->Reserve(n));
  leaving->reserved = cold_.get();
  return Status();
}

template <class Device>
void DeviceTable<Device>::Leave(Work& work, LeavingRows* leaving, const RowId* rows,
                                const Score* scores) {
  const RowLayout &l = store_.layout, &to = content_layout();
  char* const row = leaving->row.data();
  rows += leaving->first;
  scores += leaving->first;
  BeforeWrite(work, rows, leaving->n, scores);
  for (size_t begin = 0; begin < leaving->n; begin += leaving->chunk) {
    const size_t num = std::min(leaving->chunk, leaving->n - begin);
    work.ForRows(num, device::QuadsOfBytes(l.stride),
                 device::CopyLeaving{View(), rows + begin, leaving->copies});
    work.Copy(leaving->host_copies, leaving->copies, num * l.stride);
    work.Copy(leaving->scores, scores + begin, num * sizeof(Score));
    if (!work.Synchronize().ok()) return;
    for (size_t i = 0; i < num; ++i) {
      const char* const copy = leaving->host_copies + i * l.stride;
      const Stamp updated = *l.update(copy);
      if (updated == 0) continue;
      memcpy(to.vector(row), l.vector(copy), l.vector_bytes());
      memcpy(to.state(row), l.state(copy), l.state_bytes());
      const uint64_t key =
          l.key_size == 8 ? LoadUnaligned<uint64_t>(copy) : LoadUnaligned<uint32_t>(copy);
      cold_->Add(key, row, Clamped({updated, leaving->scores[i]}), TickOf(updated));
    }
  }
}

template <class Device>
Status DeviceTable<Device>::Trim(Work& work, Stamp now) {
  const auto most = static_cast<uint64_t>(options_.max_capacity);
  if (most == 0 || RowsHeld() <= most) return Status();
  DYNEMB_RETURN_IF_ERROR(Refresh(work));
  KeepError(TrimCold(stamps_.Decode(now), bounds_.live));
  return Status();
}

template <class Device>
Status DeviceTable<Device>::MoveAllOut(Work& work) {
  const uint64_t end = Read(work).high_water;
  for (uint64_t next = 0; next < end;) {
    const typename Device::Session::Scratch scratch(work);
    const std::vector<RowId> rows =
        ListRows(work, next, end, RowPredicate(), device::kColdRange, &next);
    const size_t n = rows.size();
    char* const keys = work.template Take<char>(n * store_.layout.key_size);
    RowId* const leaving_rows = work.template Take<RowId>(n);
    RowId* const gone = work.template Take<RowId>(n);
    Score* const scores = work.template Take<Score>(n);
    uint32_t* const sums = work.template Take<uint32_t>(n + 1);
    DYNEMB_RETURN_IF_ERROR(work.status());
    if (n == 0) continue;
    LeavingRows leaving;
    DYNEMB_RETURN_IF_ERROR(PrepareLeaving(work, n, &leaving));
    work.Copy(leaving_rows, rows.data(), n * sizeof(RowId));
    work.ForRows(n, 1,
                 device::ReadColumns{View(), leaving_rows, keys, nullptr, nullptr, nullptr, nullptr,
                                     scores});
    DYNEMB_RETURN_IF_ERROR(work.status());
    work.Changes();
    Leave(work, &leaving, leaving_rows, scores);
    work.ForKeys(n, device::EraseKeys{View(), KeysAt(keys), Expired(), gone, scores});
    work.ForEach(n + 1, device::FlagRows{gone, n, sums});
    work.ExclusiveSum(sums, n + 1);
    work.ForRows(n, 1, device::FreeRows{View(), gone, sums, counters(), false});
    work.ForEach(1, device::CountFreed{sums, n, counters(), nullptr});
    work.Settled();
    DYNEMB_RETURN_IF_ERROR(work.status());
  }
  return Refresh(work);
}

template <class Device>
Status DeviceTable<Device>::AddHotRows(Exec& exec, const ColdRows::AddHotFn& add) {
  Work work(*this, &exec, Work::Reports::kYes);
  const RowLayout& l = content_layout();
  const uint64_t end = Read(work).high_water;
  for (uint64_t next = 0; next < end;) {
    const std::vector<RowId> rows =
        ListRows(work, next, end, RowPredicate(), device::kColdRange, &next);
    const size_t n = rows.size();
    std::vector<char> keys(n * l.key_size), vectors(n * l.vector_bytes());
    std::vector<float> state(n * static_cast<size_t>(l.state_width));
    std::vector<Stamp> updates(n);
    std::vector<Score> scores(n);
    ReadToHost(work, rows, keys.data(), vectors.data(), state.data(), updates.data(),
               scores.data());
    DYNEMB_RETURN_IF_ERROR(work.status());
    const KeySpan bits(options_.key_type, keys.data(), n);
    std::vector<char> row(l.stride);
    for (size_t i = 0; i < n; ++i) {
      memcpy(l.vector(row.data()), vectors.data() + i * l.vector_bytes(), l.vector_bytes());
      if (l.state_width != 0) {
        memcpy(l.state(row.data()), state.data() + i * static_cast<size_t>(l.state_width),
               l.state_bytes());
      }
      DYNEMB_RETURN_IF_ERROR(
          add(bits.BitsAt(i), row.data(), Clamped({updates[i], scores[i]}), TickOf(updates[i])));
    }
  }
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::CopyAdmission(Exec& exec, std::vector<uint64_t>* words,
                                          int64_t* first_line) {
  Work work(*this, &exec, Work::Reports::kYes);
  words->clear();
  *first_line = admission_lines_.first;
  if (admission_.counts()) {
    *words = ToHost(work, AdmissionAt().counters, CounterBytes() / sizeof(uint64_t));
  }
  return work.status();
}

template <class Device>
void DeviceTable<Device>::RestartChanges(Tick tick) {
  tracking_ = true;
  deletions_.Restart(tick);
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_COLD_H_
