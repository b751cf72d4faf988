// DeviceTable: cold rows (cc/table/cold_rows.h), of a table whose memory is limited.
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
#include "cc/device/device_table_work.h"
#include "cc/device/kernels_cold.h"
#include "cc/device/parts.h"
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
void DeviceTable<Device>::KeepErrorBeside(const Work& work, const Status& status) const {
  if (work.status().ok()) KeepError(status);
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
  uint32_t* const pinned = work.template Pinned<uint32_t>(num_tables);
  uint64_t* const listed = work.template Take<uint64_t>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.ForEach(n + 1, device::FlagFirst{absent, places, of, n, sums});
  work.ExclusiveSum(sums, n + 1);
  work.ForEach(n, device::ListKeys{batch.keys, sums, listed});
  work.ForEach(num_tables, device::ReadEnds{tables, sums, on_device});
  work.Copy(pinned, on_device, num_tables * sizeof(uint32_t));
  DYNEMB_RETURN_IF_ERROR(work.Synchronize());
  ends->assign(pinned, pinned + num_tables);
  if (ends->back() != 0) *keys = ToHost(work, listed, ends->back());
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
    work.ForEach(n, device::FlagLost{ViewsOf(work, batch), found, batch.rows, lost});
    absent = lost;
  }
  std::vector<uint64_t> keys;
  std::vector<uint32_t> ends;
  DYNEMB_RETURN_IF_ERROR(ListAbsent(work, batch, absent, &keys, &ends));
  std::vector<Moved> moved(num_tables);
  size_t total = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    const uint32_t begin = t == 0 ? 0 : ends[t - 1];
    if (begin == ends[t] || !table.any_cold()) continue;
    DYNEMB_RETURN_IF_ERROR(table.TakeCold({keys.begin() + begin, keys.begin() + ends[t]},
                                          is_access ? table.stamps_.Decode(batch.now[t]) : 0,
                                          &moved[t]));
    total += moved[t].keys.size();
  }
  batch.has_all = is_access && total == keys.size();
  if (total == 0) return work.status();
  DYNEMB_RETURN_IF_ERROR(MoveIn(work, moved, total, &batch));
  const device::TableViews& tables = ViewsOf(work, batch);
  work.ForKeys(
      n, device::FindAgain{{tables, batch.keys, batch.rows, nullptr}, absent, found != nullptr});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::MoveIn(Work& work, const std::vector<Moved>& moved, size_t n,
                                   Batch* from) {
  from->viewed = false;  // an index may grow
  Batch batch;
  batch.begins = {0};
  batch.is_move = true;
  batch.held = from;
  // In one array, which is copied at once: the keys, last updates and scores of all rows, and the
  // vectors and states of each table.
  struct Place {
    size_t vectors, state;
  };
  std::vector<Place> places;
  size_t bytes = 0;
  const auto place = [&bytes](size_t size) {
    const size_t at = bytes;
    bytes += (size + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
    return at;
  };
  const size_t keys_at = place(n * sizeof(uint64_t)), updates_at = place(n * sizeof(Stamp)),
               scores_at = place(n * sizeof(Score));
  for (size_t t = 0; t < moved.size(); ++t) {
    const size_t rows = moved[t].keys.size();
    if (rows == 0) continue;
    const RowLayout& l = from->tables[t]->content_layout();
    batch.tables.push_back(from->tables[t]);
    batch.now.push_back(from->now[t]);
    batch.begins.push_back(batch.begins.back() + static_cast<uint32_t>(rows));
    places.push_back({place(rows * l.vector_bytes()), place(rows * l.state_bytes())});
  }
  const typename Device::Session::Scratch scratch(work);
  char* const there = work.template Take<char>(bytes);
  RowId* const rows = work.template Take<RowId>(n);
  std::vector<char> ordinary(bytes <= device::kCopyPinned ? 0 : bytes);
  char* const here = ordinary.empty() ? work.template Pinned<char>(bytes) : ordinary.data();
  DYNEMB_RETURN_IF_ERROR(work.status());
  auto* const keys = reinterpret_cast<uint64_t*>(here + keys_at);
  auto* const updates = reinterpret_cast<Stamp*>(here + updates_at);
  auto* const scores = reinterpret_cast<Score*>(here + scores_at);
  std::vector<device::MovedPart> parts;
  size_t i = 0;
  for (size_t t = 0; t < moved.size(); ++t) {
    const Moved& of = moved[t];
    if (of.keys.empty()) continue;
    const DeviceTable& table = *from->tables[t];
    const RowLayout& l = table.content_layout();
    // A sweep may have passed the rows' new places, and not have come to their old ones.
    const bool brings = table.catch_up_.active() && table.IsBringing();
    std::vector<char> brought(brings ? l.content_bytes() : 0);
    std::vector<float> unpacked(brings ? static_cast<size_t>(l.dim) : 0);
    const Place& at = places[parts.size()];
    const RowColumns<Stamp> columns{nullptr, here + at.vectors,
                                    reinterpret_cast<float*>(here + at.state), nullptr, nullptr};
    for (size_t r = 0; r < of.keys.size(); ++r, ++i) {
      const char* content = of.ContentOf(r, l);
      if (brings) {
        memcpy(brought.data(), content, brought.size());
        table.BringContent(of.keys[r], brought.data(), unpacked.data());
        content = brought.data();
      }
      columns.Set(r, l, &of.keys[r], content);
      const RowTimes times = table.Clamped(of.times[r]);
      keys[i] = of.keys[r];
      updates[i] = times.updated;
      scores[i] = times.score;
    }
    parts.push_back({there + at.vectors, reinterpret_cast<float*>(there + at.state)});
  }
  work.Copy(there, here, bytes);
  work.Fill(rows, 0xFF, n * sizeof(RowId));
  batch.keys = {there + keys_at, sizeof(uint64_t)};
  batch.rows = rows;
  batch.scores = reinterpret_cast<const Score*>(there + scores_at);
  const device::FillMoved fill{device::ToDevice(work, parts, batch.begins),
                               reinterpret_cast<const Stamp*>(there + updates_at)};
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kDistinct, fill));
  // The rows are in two places: nothing fails here.
  for (size_t t = 0; t < moved.size(); ++t) {
    if (!moved[t].keys.empty()) from->tables[t]->RemoveMoved(moved[t]);
  }
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
Status DeviceTable<Device>::PlanLeaving(Work& work, Batch& batch, const std::vector<bool>& evicts,
                                        const uint32_t* sums, std::vector<LeavingRows>* leaving) {
  const size_t num_tables = batch.tables.size();
  const auto is_asked = [&](size_t t) {
    const DeviceTable& table = *batch.tables[t];
    return table.cold_ != nullptr && (evicts[t] || table.MayExceed(batch.size(t)));
  };
  bool any = false;
  for (size_t t = 0; t < num_tables; ++t) any = any || is_asked(t);
  if (!any) return Status();
  auto* const on_device = work.template Take<device::LeavingRoom>(num_tables);
  auto* const rooms = work.template Pinned<device::LeavingRoom>(num_tables);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.ForEach(num_tables, device::ReadLeavingRooms{ViewsOf(work, batch), sums, on_device});
  work.Copy(rooms, on_device, num_tables * sizeof(device::LeavingRoom));
  DYNEMB_RETURN_IF_ERROR(work.Synchronize());
  for (size_t t = 0; t < num_tables; ++t) {
    if (!is_asked(t)) continue;
    DeviceTable& table = *batch.tables[t];
    const device::LeavingRoom& room = rooms[t];
    const uint64_t keys = room.keys, held = room.held;
    const auto most = static_cast<uint64_t>(table.options_.max_capacity);
    if (!batch.is_move && table.MayExceed(keys) && held + table.num_cold() + keys > most) {
      table.refused_ += keys;
      return table.Full(keys, held + table.num_cold(), most, kEvictsNothing);
    }
    if (held + keys <= table.capacity()) continue;
    const uint64_t n = held + keys - table.capacity();
    if (held - room.pinned < n) {
      return table.Refuse(n, held,
                          "max_hbm_for_vectors and max_dram_for_vectors have no room for all rows "
                          "of this batch; the rows of a step must be in memory together. Raise "
                          "one of them, or pass fewer different ids at a time");
    }
    (*leaving)[t].first = room.end - n;
    DYNEMB_RETURN_IF_ERROR(table.TakeLeaving(work, n, &(*leaving)[t]));
    DYNEMB_RETURN_IF_ERROR(table.ReserveLeaving(&(*leaving)[t]));
  }
  return Status();
}

template <class Device>
Status DeviceTable<Device>::TakeLeaving(Work& work, size_t n, LeavingRows* leaving) const {
  const size_t stride = store_.layout.stride;
  leaving->n = n;
  leaving->chunk = std::min<size_t>(n, std::max<size_t>(1, device::kCopyPinned / stride));
  leaving->copies = work.template Take<char>(leaving->chunk * stride);
  leaving->host_copies = work.template Pinned<char>(leaving->chunk * stride);
  leaving->scores = work.template Pinned<Score>(leaving->chunk);
  leaving->row.reset(new char[content_layout().stride]());
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::ReserveLeaving(LeavingRows* leaving) {
  DYNEMB_RETURN_IF_ERROR(cold_->Reserve(leaving->n));
  leaving->reserved = cold_.get();
  return Status();
}

template <class Device>
void DeviceTable<Device>::Leave(Work& work, const std::vector<DeviceTable*>& tables,
                                std::vector<LeavingRows>* leaving, const RowId* rows,
                                const Score* scores) {
  for (size_t t = 0; t < tables.size(); ++t) {
    const LeavingRows& of = (*leaving)[t];
    if (of.n != 0) tables[t]->BeforeWrite(work, rows + of.first, of.n, scores + of.first);
  }
  // A chunk of each table at a time.
  for (bool any = true; any;) {
    any = false;
    for (size_t t = 0; t < tables.size(); ++t) {
      const LeavingRows& of = (*leaving)[t];
      const size_t num = of.in_chunk();
      if (num == 0) continue;
      any = true;
      const size_t stride = tables[t]->store_.layout.stride, at = of.first + of.done;
      work.ForRows(num, device::QuadsOfBytes(stride),
                   device::CopyRows{tables[t]->View(), rows + at, of.copies});
      work.Copy(of.host_copies, of.copies, num * stride);
      work.Copy(of.scores, scores + at, num * sizeof(Score));
    }
    if (!any || !work.Synchronize().ok()) return;
    for (size_t t = 0; t < tables.size(); ++t) {
      LeavingRows& of = (*leaving)[t];
      const size_t num = of.in_chunk();
      tables[t]->AddCold(of, num);
      of.done += num;
    }
  }
}

template <class Device>
void DeviceTable<Device>::AddCold(const LeavingRows& leaving, size_t num) {
  const RowLayout &l = store_.layout, &to = content_layout();
  char* const row = leaving.row.get();
  for (size_t i = 0; i < num; ++i) {
    const char* const copy = leaving.host_copies + i * l.stride;
    const Stamp updated = *l.update(copy);
    if (updated == 0) continue;
    memcpy(to.vector(row), l.vector(copy), l.vector_bytes());
    memcpy(to.state(row), l.state(copy), l.state_bytes());
    const uint64_t key =
        l.key_size == 8 ? LoadUnaligned<uint64_t>(copy) : LoadUnaligned<uint32_t>(copy);
    cold_->Add(key, row, Clamped({updated, leaving.scores[i]}), TickOf(updated));
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
  // Pinned memory is not freed with a Scratch, so all ranges have the same.
  std::vector<LeavingRows> leaving(1);
  const std::vector<DeviceTable*> tables{this};
  DYNEMB_RETURN_IF_ERROR(TakeLeaving(work, device::kColdRange, &leaving[0]));
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
    leaving[0].n = n;
    leaving[0].done = 0;
    DYNEMB_RETURN_IF_ERROR(ReserveLeaving(&leaving[0]));
    work.Copy(leaving_rows, rows.data(), n * sizeof(RowId));
    work.ForRows(
        n, 1, device::ReadColumns{View(), leaving_rows, {keys, nullptr, nullptr, nullptr, scores}});
    DYNEMB_RETURN_IF_ERROR(work.status());
    work.Changes();
    Leave(work, tables, &leaving, leaving_rows, scores);
    work.ForKeys(n, device::EraseKeys{View(), KeysAt(keys), Expired(), gone, scores});
    work.ForEach(n + 1, device::FlagRows{gone, n, sums});
    work.ExclusiveSum(sums, n + 1);
    work.ForRows(n, 1, device::FreeRows{View(), gone, sums, counters(), false});
    work.ForEach(1, device::CountFreed{sums, n, counters(), nullptr});
    work.Settled();
    leaving[0].Settle();
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
    ReadToHost(work, rows,
               {keys.data(), vectors.data(), state.data(), updates.data(), scores.data()});
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

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_COLD_H_
