// DeviceTable: creating and erasing rows, and the lookups that insert.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_INSERT_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_INSERT_H_

#include <algorithm>
#include <string>

#include "cc/device/device_table.h"
#include "cc/device/device_table_batch.h"
#include "cc/device/device_table_room.h"
#include "cc/device/device_table_work.h"
#include "cc/device/parts.h"
#include "cc/table/phase.h"

namespace dynemb {

template <class Device>
void DeviceTable<Device>::NoteEvicted(Work& work, Batch& batch, const RowId* rows,
                                      const std::vector<bool>& tracked) {
  const size_t n = batch.size(), num_tables = batch.tables.size();
  uint32_t* const sums = work.template Take<uint32_t>(n + 1);
  uint32_t* const ends = work.template Take<uint32_t>(num_tables);
  uint32_t* const host_ends = work.template Pinned<uint32_t>(num_tables);
  uint64_t* const keys = work.template Take<uint64_t>(n);
  if (!work.status().ok()) return;
  const device::TableViews& tables = ViewsOf(work, batch);
  work.ForEach(n + 1, device::FlagRows{rows, n, sums});
  work.ExclusiveSum(sums, n + 1);
  work.ForEach(n, device::ListLost{tables, rows, sums, keys});
  work.ForEach(num_tables, device::ReadEnds{tables, sums, ends});
  work.Copy(host_ends, ends, num_tables * sizeof(uint32_t));
  if (!work.Synchronize().ok()) return;
  const uint32_t total = host_ends[num_tables - 1];
  uint64_t* const host_keys = work.template Pinned<uint64_t>(total);
  work.Copy(host_keys, keys, total * sizeof(uint64_t));
  if (total != 0 && !work.Synchronize().ok()) return;
  for (size_t t = 0, i = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    const Tick tick = table.stamps_.Decode(batch.now[t]);
    for (; i < host_ends[t]; ++i) {
      if (tracked[t]) table.deletions().Add(tick, host_keys[i], Removal::kEvict);
    }
    if (tracked[t]) table.TrimDeletions();
  }
}

template <class Device>
Status DeviceTable<Device>::Refuse(uint64_t keys, uint64_t size, const std::string& why) {
  refused_ += keys;
  return Full(keys, size, capacity(), why);
}

template <class Device>
Status DeviceTable<Device>::CheckCapacity(Work& work, const uint32_t* from, const uint32_t* to,
                                          Stamp now) {
  // The batch uses at most batch_keys() rows: one per key.
  const bool evicts = options_.evict_strategy != EvictStrategy::kNone && options_.max_capacity != 0;
  if (evicts && capacity() >= stamps_.batch_keys()) return Status();
  const uint64_t keys = ToHost(work, to, 1)[0] - ToHost(work, from, 1)[0];
  const uint64_t size = Read(work).size();
  DYNEMB_RETURN_IF_ERROR(work.status());
  if (size + keys <= capacity()) return Status();
  const uint64_t evictions = size + keys - capacity();
  if (options_.evict_strategy == EvictStrategy::kNone) {
    return Refuse(evictions, size, kEvictsNothing);
  }
  if (!evicts) {
    return Refuse(evictions, size,
                  "the system has no addresses for more rows, and a table without max_capacity "
                  "evicts nothing. Set max_capacity");
  }
  if (num_pinned_ != nullptr) {
    if (size - ToHost(work, num_pinned_, 1)[0] >= evictions) return work.status();
  } else {
    auto* older = work.template Take<uint64_t>(1);
    if (older == nullptr) return work.status();
    work.Fill(older, 0, sizeof(*older));
    const size_t items = device::SumItems(store_.ring.count);
    work.ForEach(items, device::CountOlder{store_.ring, ViewAt(now).evictable, items, older});
    if (ToHost(work, older, 1)[0] >= evictions) return work.status();
  }
  return Refuse(evictions, size, kAllInUse);
}

template <class Device>
Status DeviceTable<Device>::PinFound(Work& work, Batch& batch, const std::vector<bool>& evicts) {
  // In one array: a counter and the bits of each table, 64 of them in a word.
  const auto words_of = [](const DeviceTable& table) { return 1 + (table.capacity() + 63) / 64; };
  std::vector<DeviceTable*> pinning;
  size_t words = 0;
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    DeviceTable& table = *batch.tables[t];
    // Rows that other calls at this tick have used may become cold, so only this call's rows are
    // pinned.
    if (!evicts[t] || (table.scoring_.by_time() && table.cold_ == nullptr)) continue;
    pinning.push_back(&table);
    words += words_of(table);
  }
  if (pinning.empty()) return Status();
  auto* pins = work.template Take<uint64_t>(words);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.Fill(pins, 0, words * sizeof(uint64_t));
  for (DeviceTable* table : pinning) {
    table->num_pinned_ = pins;
    table->pins_ = reinterpret_cast<uint32_t*>(pins + 1);
    pins += words_of(*table);
  }
  batch.viewed = false;
  work.ForKeys(batch.size(), device::PinRows{ViewsOf(work, batch), batch.rows});
  if (batch.is_move) {
    batch.held->viewed = false;
    work.ForKeys(batch.held->size(), device::PinRows{ViewsOf(work, *batch.held), batch.held->rows});
    batch.held->viewed = false;  // without pins
  }
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::RemoveExpiredRows(Work& work, Batch& batch) {
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    DeviceTable& table = *batch.tables[t];
    const Tick tick = table.stamps_.Decode(batch.now[t]);
    const Expired expired(table.stamps_, table.HorizonAt(tick), table.expiry_.since_access());
    if (!expired.any() || batch.size(t) == 0) continue;
    table.Remove(work, batch.keys.From(batch.begins[t]), batch.size(t), tick, Removal::kExpire,
                 expired);
    DYNEMB_RETURN_IF_ERROR(work.status());
    work.Settled();
  }
  return work.status();
}

template <class Device>
template <class Fill>
Status DeviceTable<Device>::Insert(Work& work, Batch& batch, Keys repeat, const Fill& fill,
                                   const Election* election) {
  const size_t n = batch.size();
  const size_t num_tables = batch.tables.size();
  if (n == 0 || batch.has_all) return work.status();
  Phase phase("insert");
  if (!batch.is_move) DYNEMB_RETURN_IF_ERROR(RemoveExpiredRows(work, batch));
  InsertArrays in;
  if (election != nullptr) {
    static_cast<Election&>(in) = *election;
  } else if (repeat == Keys::kMayRepeat) {
    const device::BatchKeys keys{batch.keys, ViewsOf(work, batch)};
    device::Elect<false>(work, keys, batch.rows, n, &in.places, &in.of);
  }
  in.sums = work.template Take<uint32_t>(n + 1);
  in.positions = work.template Take<uint32_t>(n);
  in.new_rows = work.template Take<RowId>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.ForEach(n + 1, device::FlagFirst{batch.rows, in.places, in.of, n, in.sums});
  work.ExclusiveSum(in.sums, n + 1);
  DYNEMB_RETURN_IF_ERROR(Admit(work, batch, &in));

  // A batch is refused before anything changes.
  bool may_evict = false, list_gone = false;
  std::vector<bool> lists_gone(num_tables), evicts(num_tables), tracked(num_tables);
  std::vector<LeavingRows> leaving(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    table.ReadMail();
    if (batch.size(t) == 0 || table.bounds_.live + batch.size(t) <= table.capacity()) continue;
    may_evict = evicts[t] = true;
    lists_gone[t] = table.cold_ == nullptr && (table.tracking() || table.evicted_ != nullptr);
    list_gone = list_gone || lists_gone[t];
  }
  struct Unpinned {
    Batch& batch;
    ~Unpinned() {
      for (DeviceTable* table : batch.tables) {
        if (table->pins_ != nullptr) batch.viewed = false;
        table->pins_ = nullptr;
        table->num_pinned_ = nullptr;
      }
    }
  } unpinned{batch};
  DYNEMB_RETURN_IF_ERROR(PinFound(work, batch, evicts));
  for (size_t t = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    const uint32_t* const from = in.sums + batch.begins[t];
    const uint32_t* const to = in.sums + batch.begins[t + 1];
    if (evicts[t] && table.cold_ == nullptr) {
      DYNEMB_RETURN_IF_ERROR(table.CheckCapacity(work, from, to, batch.now[t]));
    }
  }
  DYNEMB_RETURN_IF_ERROR(PlanLeaving(work, batch, evicts, in.sums, &leaving));
  const bool any_leave = std::any_of(leaving.begin(), leaving.end(),
                                     [](const LeavingRows& rows) { return rows.n != 0; });
  RowId* gone = list_gone ? work.template Take<RowId>(n) : nullptr;
  Score* evicted_scores = list_gone || any_leave ? work.template Take<Score>(n) : nullptr;
  Score* gone_scores = list_gone ? work.template Take<Score>(n) : nullptr;
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(MakeRoom(work, batch, in.sums));
  const device::TableViews& tables = ViewsOf(work, batch);  // with this batch's number
  DYNEMB_RETURN_IF_ERROR(work.status());
  for (size_t t = 0; t < num_tables; ++t) {
    DeviceTable& table = *batch.tables[t];
    ++table.batch_;
    table.given_[table.batch_ % kBatches] =
        table.given_[(table.batch_ - 1) % kBatches] + batch.size(t);
  }

  work.Changes();
  const device::NewKeys added{tables, batch.keys, in.sums, in.positions, in.new_rows, batch.scores};
  work.ForEach(n, device::ListNew{added});
  work.ForKeys(n, device::ClaimSlots{added});
  if (may_evict) {
    work.ForKeys(n, device::EvictSlots{added, evicted_scores});
    if (list_gone) {
      work.Fill(gone, 0xFF, n * sizeof(RowId));
      work.ForEach(n, device::ListEvicted{added, evicted_scores, gone, gone_scores});
    }
    bool any_tracked = false;
    for (size_t t = 0; t < num_tables; ++t) {
      if (!lists_gone[t]) continue;
      DeviceTable& table = *batch.tables[t];
      const RowId* const gone_here = gone + batch.begins[t];
      const Score* const scores_here = gone_scores + batch.begins[t];
      table.BeforeWrite(work, gone_here, batch.size(t), scores_here);
      if (table.evicted_ != nullptr) {
        table.BeforeLoss(work, gone_here, scores_here, batch.size(t),
                         table.stamps_.Decode(batch.now[t]), Removal::kEvict);
      } else {
        any_tracked = tracked[t] = true;
      }
    }
    if (any_tracked) NoteEvicted(work, batch, gone, tracked);
    if (any_leave) Leave(work, batch.tables, &leaving, in.new_rows, evicted_scores);
  }
  work.ForRows(n, batch.quads(), device::FillRows<Fill>{added, fill});
  const auto counts = [](const DeviceTable* table) {
    return table->scoring_.Lookup(1, true).kind == Touch::Kind::kCount;
  };
  if (batch.inserts && in.places != nullptr &&
      std::any_of(batch.tables.begin(), batch.tables.end(), counts)) {
    work.ForKeys(n, device::CountRepeats{tables, batch.keys, batch.rows, in.places, in.of});
  }
  work.ForEach(std::max(n, num_tables), device::SpreadRows{added, batch.rows, in.places, in.of,
                                                           !AnyAdmission(batch), !batch.is_move});
  work.Settled();
  for (size_t t = 0; t < num_tables; ++t) {
    if (batch.tables[t]->cold_ == nullptr) continue;
    leaving[t].Settle();
    if (!batch.is_move) DYNEMB_RETURN_IF_ERROR(batch.tables[t]->Trim(work, batch.now[t]));
    if (leaving[t].n != 0) batch.tables[t]->CompactSoon();
  }
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) {
  const size_t n = keys.size();
  Stamp now;
  DYNEMB_RETURN_IF_ERROR(Begin(exec, n, tick, &now, Kind::kLookup));
  Work work(*this, &exec, Work::Reports::kYes);
  Batch batch = BatchOf(KeysAt(keys), n, now, rows);
  batch.inserts = true;
  batch.admits = evicted_ == nullptr;
  DYNEMB_RETURN_IF_ERROR(FindRows(work, batch, true));
  Bring(work, batch);
  return Insert(work, batch, Keys::kMayRepeat, device::FillInitial{});
}

template <class Device>
Status DeviceTable<Device>::InsertAndEvict(Exec& exec, KeySpan keys, Tick tick, RowId* rows,
                                           EvictedRows* evicted) {
  struct Wanted {
    EvictedRows** slot;
    ~Wanted() { *slot = nullptr; }
  } wanted{&evicted_};
  // Rows from files, and those that make up for missed steps, are in host memory first.
  const bool directly =
      evicted->memory() == EvictedRows::Memory::kHost || (cold_ == nullptr && !catch_up_.active());
  EvictedRows on_host(layout());
  evicted_ = directly ? evicted : &on_host;
  DYNEMB_RETURN_IF_ERROR(FindOrInsert(exec, keys, tick, rows));
  if (directly) return Status();
  const TickColumns& from = on_host.Finish();
  const size_t n = on_host.size();
  const TickColumns& to = evicted->Place(n);
  if (n == 0 || to.keys == nullptr) return Status();
  Work work(*this, &exec, Work::Reports::kYes);
  work.Copy(to.keys, from.keys, n * layout().key_size);
  work.Copy(to.vectors, from.vectors, n * layout().vector_bytes());
  work.Copy(to.state, from.state, n * layout().state_bytes());
  work.Copy(to.scores, from.scores, n * sizeof(*from.scores));
  return work.Synchronize();
}

template <class Device>
Status DeviceTable<Device>::LookupCounted(Exec& exec, KeySpan keys, const uint32_t* times,
                                          Tick tick, void* vectors, RowId* rows) {
  const size_t n = keys.size();
  Stamp now;
  DYNEMB_RETURN_IF_ERROR(Begin(exec, n, tick, &now, Kind::kLookup));
  const bool promotes = PromotesRead();
  if (promotes) {
    Work work(*this, &exec, Work::Reports::kYes);
    Batch batch = BatchOf(KeysAt(keys), n, now, rows);
    DYNEMB_RETURN_IF_ERROR(FindToPromote(work, batch));
    DYNEMB_RETURN_IF_ERROR(PromoteRead(work, batch));
  }
  Work work(*this, &exec, Work::Reports::kYes);
  Batch batch = BatchOf(KeysAt(keys), n, now, rows);
  batch.inserts = batch.admits = true;
  if (times != nullptr && admission_.enabled()) {
    batch.times = device::ToDevice(work, times, n);
    DYNEMB_RETURN_IF_ERROR(work.status());
  }
  DYNEMB_RETURN_IF_ERROR(promotes ? HoldFound(work, batch, rows) : FindRows(work, batch, true));
  Bring(work, batch);
  DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kMayRepeat, device::FillInitial{}));
  work.ForRows(n, vector_quads(),
               device::ReadVectors{View(), initial(), admission_.AbsentIsZero(), batch.keys, rows,
                                   nullptr, static_cast<char*>(vectors)});
  return work.status();
}

template <class Device>
size_t DeviceTable<Device>::Erase(Exec& exec, KeySpan keys, Tick tick, Removal how) {
  if (keys.size() == 0) return 0;
  WaitForReader();
  Work work(*this, &exec);
  if (!any_cold() && !(how == Removal::kWipe && has_flushes())) {
    return Remove(work, KeysAt(keys), keys.size(), tick, how);
  }
  const std::vector<char> on_host = KeysToHost(work, keys);
  if (!work.status().ok()) return 0;
  return Remove(work, KeysAt(keys), keys.size(), tick, how, Expired(),
                KeySpan(options_.key_type, on_host.data(), keys.size()));
}

template <class Device>
Status DeviceTable<Device>::RemoveKeys(Exec& exec, KeySpan keys, Tick tick, Removal how,
                                       uint64_t* removed) {
  WaitForReader();
  Work work(*this, &exec, Work::Reports::kYes);
  const size_t bytes = keys.size() * store_.layout.key_size;
  char* on_device = work.template Take<char>(bytes);
  if (on_device == nullptr) return work.status();
  work.Copy(on_device, keys.data(), bytes);
  *removed += Remove(work, KeysAt(on_device), keys.size(), tick, how, Expired(), keys);
  DYNEMB_RETURN_IF_ERROR(KeptError());
  return Refresh(work);  // RowsHeld
}

template <class Device>
size_t DeviceTable<Device>::Remove(Work& work, KeyArray keys, size_t n, Tick tick, Removal how,
                                   const Expired& expired, KeySpan on_host) {
  RowId* gone = work.template Take<RowId>(n);
  Score* scores = work.template Take<Score>(n);
  uint32_t* sums = work.template Take<uint32_t>(n + 1);
  uint32_t* const removed = work.template Pinned<uint32_t>(1);
  if (!work.status().ok()) return 0;
  if (how == Removal::kWipe && !ForgetCounts(work, keys, n).ok()) return 0;
  // Cold rows first: they have to be read, which may fail.
  size_t cold = 0;
  if (!on_host.empty()) {
    const Status status = EraseCold(on_host, tick, how, &cold);
    KeepError(status);
    if (!status.ok()) return 0;
    if (tracking()) TrimDeletions();
  }
  work.Changes();
  work.ForKeys(n, device::EraseKeys{View(), keys, expired, gone, scores});
  BeforeWrite(work, gone, n, scores);
  BeforeLoss(work, gone, scores, n, tick, how);
  work.ForEach(n + 1, device::FlagRows{gone, n, sums});
  work.ExclusiveSum(sums, n + 1);
  // Without wiping, one thread per row is enough.
  const bool wipe = how == Removal::kWipe;
  const size_t quads = wipe ? device::QuadsOfBytes(layout().stride) : 1;
  work.ForRows(n, quads, device::FreeRows{View(), gone, sums, counters(), wipe});
  work.ForEach(1, device::CountFreed{sums, n, counters(),
                                     how == Removal::kEvict    ? &counters()->evictions
                                     : how == Removal::kExpire ? &counters()->expired
                                                               : &counters()->erased});
  work.Copy(removed, sums + n, sizeof(*removed));
  return work.Synchronize().ok() ? cold + *removed : 0;
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_INSERT_H_
