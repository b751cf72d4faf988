// DeviceTable: cuts, and the copies of rows that batches save before they overwrite or evict them.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_CUT_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_CUT_H_

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_state.h"
#include "cc/device/device_table_work.h"

namespace dynemb {

template <class Device>
void DeviceTable<Device>::SaveAll(Work& work) {
  if (cut() == nullptr) return;
  ForRowsInChunks(work, [&](const RowId* rows, size_t n) { BeforeWrite(work, rows, n); });
}

template <class Device>
void DeviceTable<Device>::WaitForReader() {
  if (cut() != nullptr) changes_.cut()->saved->WaitForRoom(store_.layout.stride);
}

template <class Device>
void DeviceTable<Device>::BeforeWrite(Work& work, const RowId* rows, size_t n,
                                      const Score* scores) {
  if (cut() == nullptr) return;
  const std::vector<RowId> all = ToHost(work, rows, n);
  std::vector<Score> all_scores;
  if (scores != nullptr) all_scores = ToHost(work, scores, n);
  if (!work.status().ok()) return;
  std::vector<ToSave> taken;
  taken.push_back(TakeOfCut(work, all.data(), n, scores != nullptr ? all_scores.data() : nullptr));
  Save(work, taken);
}

template <class Device>
template <class Where>
void DeviceTable<Device>::BeforeWrite(Work& work, const Batch& batch, const Where& where) {
  std::vector<size_t> cut;
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    if (batch.tables[t]->cut() != nullptr && batch.size(t) != 0 && where(t)) cut.push_back(t);
  }
  if (cut.empty()) return;
  const std::vector<RowId> rows = ToHost(work, batch.rows, batch.size());
  if (!work.status().ok()) return;
  std::vector<ToSave> all;
  for (size_t t : cut) {
    DeviceTable& table = *batch.tables[t];
    all.push_back(table.TakeOfCut(work, rows.data() + batch.begins[t], batch.size(t), nullptr));
  }
  Save(work, all);
}

template <class Device>
typename DeviceTable<Device>::ToSave DeviceTable<Device>::TakeOfCut(Work& work, const RowId* rows,
                                                                    size_t n, const Score* scores) {
  ToSave taken{this, {}, {}};
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] == kNoRow || rows[i] >= changes_.cut()->todo.rows() ||
        !changes_.cut()->todo.Take(rows[i]))
      continue;
    taken.rows.push_back(rows[i]);
    if (scores != nullptr) taken.scores.push_back(scores[i]);
  }
  if (scores == nullptr && !scoring_.by_time()) {
    taken.scores.resize(taken.rows.size());
    ReadToHost(work, taken.rows, RowColumns<Stamp>::Scores(taken.scores.data()));
  }
  return taken;
}

template <class Device>
void DeviceTable<Device>::Save(Work& work, const std::vector<ToSave>& all) {
  std::vector<RowId> ids;
  size_t bytes = 0, widest = 0;
  for (const ToSave& of : all) {
    const size_t stride = of.table->store_.layout.stride;
    ids.insert(ids.end(), of.rows.begin(), of.rows.end());
    bytes += of.rows.size() * stride;
    widest = std::max(widest, stride);
  }
  if (ids.empty()) return;
  typename Device::Session::Scratch scratch(work);
  const size_t room = std::min(bytes, std::max(device::kCopyMost, widest));
  RowId* const on_device = work.template Take<RowId>(ids.size());
  char* const copies = work.template Take<char>(room);
  // The rows are no longer to be read, so that they are missing from the cut if they are not saved.
  const auto fail = [&all] {
    for (const ToSave& of : all) of.table->changes_.cut()->saved->Fail();
  };
  if (!work.status().ok()) return fail();
  // Pageable memory: pinned memory would be held until the session ends, and the session may save a
  // whole table.
  work.Copy(on_device, ids.data(), ids.size() * sizeof(RowId));
  // Rows of one table that follow each other in the buffer.
  struct Part {
    const ToSave* of;
    size_t first, num;  // of its rows
    size_t at;          // in the buffer
  };
  std::vector<Part> parts;
  size_t used = 0;
  const auto push = [&] {
    const std::vector<char> host = ToHost(work, copies, used);
    if (!work.status().ok()) return false;
    for (const Part& part : parts) {
      part.of->table->Push(*part.of, part.first, part.num, host.data() + part.at);
    }
    parts.clear();
    used = 0;
    return true;
  };
  const RowId* next = on_device;
  for (const ToSave& of : all) {
    const size_t stride = of.table->store_.layout.stride;
    for (size_t first = 0; first < of.rows.size();) {
      const size_t num = std::min(of.rows.size() - first, (room - used) / stride);
      if (num == 0) {
        if (!push()) return fail();
        continue;
      }
      work.ForRows(num, device::QuadsOfBytes(stride),
                   device::CopyRows{of.table->View(), next, copies + used});
      parts.push_back({&of, first, num, used});
      used += num * stride;
      first += num;
      next += num;
    }
  }
  if (!push()) fail();
}

template <class Device>
void DeviceTable<Device>::Push(const ToSave& of, size_t first, size_t num, const char* rows) {
  for (size_t i = 0; i < num; ++i, rows += store_.layout.stride) {
    const CutTime score = scoring_.by_time() ? changes_.cut()->Time(changes_.cut()->watermark)
                                             : CutTime{of.scores[first + i]};
    changes_.cut()->saved->PushAtOnce(
        changes_.cut()->table, changes_.cut()->layout, rows,
        changes_.cut()->Time(stamps_.Decode(*store_.layout.update(rows))), score);
  }
}

template <class Device>
void DeviceTable<Device>::BeforeLoss(Work& work, const RowId* rows, const Score* scores, size_t n,
                                     Tick tick, Removal how) {
  const bool evicts = evicted_ != nullptr && how == Removal::kEvict;
  if (!tracking() && !evicts) return;
  typename Device::Session::Scratch scratch(work);
  uint32_t* const sums = work.template Take<uint32_t>(n + 1);
  uint32_t* const total = work.template Pinned<uint32_t>(1);
  if (sums == nullptr) return;
  work.ForEach(n + 1, device::FlagRows{rows, n, sums});
  work.ExclusiveSum(sums, n + 1);
  work.Copy(total, sums + n, sizeof(*total));
  if (!work.Synchronize().ok() || *total == 0) return;
  if (evicts) {
    CopyEvicted(work, rows, scores, sums, n, *total, tick);
  } else {
    uint64_t* const keys = work.template Take<uint64_t>(*total);
    if (keys == nullptr) return;
    work.ForEach(n, device::ListLost{ViewsAt(0, n), rows, sums, keys});
    const std::vector<uint64_t> lost = ToHost(work, keys, *total);
    if (!work.status().ok()) return;
    for (uint64_t key : lost) deletions().Add(tick, key, how);
  }
  if (tracking()) TrimDeletions();
}

template <class Device>
void DeviceTable<Device>::CopyEvicted(Work& work, const RowId* rows, const Score* scores,
                                      const uint32_t* sums, size_t n, uint32_t total, Tick tick) {
  const RowLayout& l = store_.layout;
  const bool on_device = evicted_->memory() == EvictedRows::Memory::kDevice;
  uint64_t* const sorted = work.template Take<uint64_t>(total);
  uint32_t* const positions = work.template Take<uint32_t>(total);
  RowId* const ids = work.template Take<RowId>(total);
  int64_t* const listed = on_device ? nullptr : work.template Take<int64_t>(total);
  if (!work.status().ok()) return;
  const TickColumns& to = evicted_->Place(total);
  work.ForEach(n, device::ListEvictedKeys{View(), rows, sums, sorted, positions});
  work.SortPairs(sorted, positions, total, static_cast<int>(8 * l.key_size));
  if (on_device) {
    if (to.keys != nullptr) {
      work.ForEach(total, device::ListEvictedRows{rows, scores, positions, stamps_,
                                                  scoring_.by_time(), ids, to.scores});
      work.ForRows(
          total, device::QuadsOfBytes(l.stride),
          device::ReadColumns{View(), ids, {to.keys, to.vectors, to.state, nullptr, nullptr}});
    }
    if (!tracking()) return;
    const std::vector<uint64_t> lost = ToHost(work, sorted, total);
    if (!work.status().ok()) return;
    for (uint64_t key : lost) deletions().Add(tick, key, Removal::kEvict);
    return;
  }
  work.ForEach(total, device::ListEvictedRows{rows, scores, positions, stamps_, scoring_.by_time(),
                                              ids, listed});
  work.Copy(to.scores, listed, total * sizeof(*listed));
  CopyColumns(work, ids, total, to);
  if (!work.Synchronize().ok()) return;
  if (tracking()) {
    const KeySpan lost(options_.key_type, to.keys, total);
    for (size_t i = 0; i < total; ++i) deletions().Add(tick, lost.BitsAt(i), Removal::kEvict);
  }
  SerialExec serial;
  if (catch_up_.active()) catch_up_.BringColumns(serial, l, total, to.vectors, to.state);
}

// In pieces, so that the stream's workspace stays small. If the columns are page-locked, nothing
// waits in between.
template <class Device>
void DeviceTable<Device>::CopyColumns(Work& work, const RowId* rows, uint32_t n,
                                      const TickColumns& to) {
  const RowLayout& l = store_.layout;
  const size_t row_bytes = l.key_size + l.vector_bytes() + l.state_bytes();
  const size_t chunk = std::min<size_t>(n, std::max<size_t>(1, device::kCopyPinned / row_bytes));
  const auto width = static_cast<size_t>(l.state_width);
  char* const keys = work.template Take<char>(chunk * l.key_size);
  char* const vectors = work.template Take<char>(chunk * l.vector_bytes());
  float* const state = work.template Take<float>(chunk * width);
  if (!work.status().ok()) return;
  for (size_t begin = 0; begin < n; begin += chunk) {
    const size_t num = std::min(chunk, n - begin);
    work.ForRows(
        num, device::QuadsOfBytes(l.stride),
        device::ReadColumns{View(), rows + begin, {keys, vectors, state, nullptr, nullptr}});
    work.Copy(static_cast<char*>(to.keys) + begin * l.key_size, keys, num * l.key_size);
    work.Copy(static_cast<char*>(to.vectors) + begin * l.vector_bytes(), vectors,
              num * l.vector_bytes());
    work.Copy(to.state + begin * width, state, num * l.state_bytes());
  }
}

template <class Device>
void DeviceTable<Device>::TrimDeletions() {
  changes_.TrimDeletions(RowsHeld());
}

template <class Device>
Status DeviceTable<Device>::HasLostHot(bool* lost) const {
  Work work(*this, nullptr);
  const device::Counters c = Read(work);
  *lost = c.erased != 0 || c.evictions != 0 || c.expired != 0;
  return work.status();
}

template <class Device>
void DeviceTable<Device>::HaveHot(Work& work, const std::vector<uint64_t>& keys,
                                  std::vector<char>* has) const {
  typename Device::Session::Scratch scratch(work);
  auto* on_device = work.template Take<uint64_t>(keys.size());
  RowId* rows = work.template Take<RowId>(keys.size());
  if (on_device == nullptr || rows == nullptr) return;
  work.Copy(on_device, keys.data(), keys.size() * sizeof(uint64_t));
  device::TableViews views = ViewsAt(0, keys.size());
  views.one.expired = Expired();
  work.ForKeys(keys.size(), device::FindKeys{views, {on_device, 8}, rows, nullptr});
  const std::vector<RowId> found = ToHost(work, rows, keys.size());
  for (size_t i = 0; i < found.size(); ++i) (*has)[i] = found[i] != kNoRow;
}

template <class Device>
Status DeviceTable<Device>::HaveHot(Exec& exec, const std::vector<uint64_t>& keys,
                                    std::vector<char>* has) const {
  Work work(*this, &exec, Work::Reports::kYes);
  HaveHot(work, keys, has);
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::StartCut(Exec& exec, std::unique_ptr<Cut> cut) {
  Work work(*this, &exec, Work::Reports::kYes);
  cut->todo.Reset(Read(work).high_water, false);
  // Only the rows that belong to the cut: unlike in a host table, these bits are exact.
  std::vector<RowPredicate> any(1);
  any[0].updated_after = cut->since;
  if (cut->used) any.emplace_back().score_from = static_cast<int64_t>(cut->since) + 1;
  for (const RowPredicate& where : any) {
    uint64_t next = 0;
    while (next < cut->todo.rows()) {
      for (RowId row : ListRows(work, next, cut->todo.rows(), where, device::kListMost, &next)) {
        cut->todo.Add(row);
      }
      if (!work.status().ok()) return work.status();
    }
  }
  DYNEMB_RETURN_IF_ERROR(work.status());
  cut->most_rows = cut->todo.Count();
  changes_.KeepCut(std::move(cut));
  return Status();
}

template <class Device>
std::vector<RowId> DeviceTable<Device>::PlanHotCut(size_t limit) {
  Cut& cut = *changes_.cut();
  std::vector<RowId> plan;
  for (uint64_t r = cut.todo.Next(cut.cursor); r < cut.todo.rows() && plan.size() < limit;
       r = cut.todo.Next(r + 1)) {
    plan.push_back(static_cast<RowId>(r));
  }
  if (plan.empty()) cut.cursor = cut.todo.rows();
  return plan;
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_CUT_H_
