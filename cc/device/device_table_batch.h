// DeviceTable: lookups, and writes to rows that exist.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_BATCH_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_BATCH_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_work.h"
#include "cc/device/kernels_admission.h"
#include "cc/device/parts.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"

namespace dynemb {

namespace device {
// The number of items of a kernel that sums over n things; each item examines kSumEach of them.
constexpr size_t kSumEach = 64;
inline size_t SumItems(size_t n) { return (n + kSumEach - 1) / kSumEach; }
}  // namespace device

template <class Device>
InitializerView DeviceTable<Device>::initial() const {
  return {initializer_.seed(), options_.dim, reinterpret_cast<const InitRun*>(runs_.data()),
          static_cast<uint32_t>(initializer_.runs().size())};
}

template <class Device>
Stamp DeviceTable<Device>::BeginBatch(Exec& exec, Tick tick, size_t n) {
  WaitForReader();
  (void)HorizonAt(tick);  // records the time of this use
  Stamps stamps = stamps_;
  bool sweep = false;
  stamps.Follow(tick, &sweep);
  if (sweep) {
    // The whole table at once: a device has the bandwidth, and rows move between tiers.
    Work work(*this, &exec);
    work.Changes();
    if (!Refresh(work).ok()) return stamps_.batch();
    if (scoring_.by_time()) {
      work.ForEach(store_.ring.count, device::ClampScores{store_.ring.buckets, stamps});
    }
    work.ForEach(bounds_.high_water, device::ClampUpdates{View(), stamps});
    if (cold_ != nullptr) {
      cold_->ChangeTimes([&](const RowTimes& times) {
        return RowTimes{stamps.Clamp(times.updated),
                        scoring_.by_time() ? stamps.Clamp(times.score) : times.score};
      });
    }
    stamps.EndSweep();
    stamps_ = stamps;
  }
  return stamps_.BeginBatch(tick, n);
}

template <class Device>
Stamp DeviceTable<Device>::BeginLookup(Exec& exec, Tick tick, size_t n) {
  if (scoring_.Step(tick)) Fail(AdvanceEpoch(exec), false);
  admission_.BeginLookup(tick);
  return BeginInsert(exec, tick, n);
}

template <class Device>
Stamp DeviceTable<Device>::BeginInsert(Exec& exec, Tick tick, size_t n) {
  expiry_.Step(tick);
  if (expiry_.active()) {
    if (expiry_.min_rows() != 0) {
      Work work(*this, &exec);
      (void)Refresh(work);  // a later call reports the failure
    }
    // A scan waits for the device, so that a scan of few rows costs as much as one of many.
    examined_due_ += 4 * uint64_t{n};
    if (examined_due_ >= std::min(kScanLeast, bounds_.high_water)) {
      Reclaim(exec, tick, {examined_due_, examined_due_});
      examined_due_ = 0;
    }
  }
  return BeginBatch(exec, tick, n);
}

template <class Device>
Status DeviceTable<Device>::AdvanceEpoch(Exec& exec) {
  if (!scoring_.has_epochs() || !scoring_.Advance()) return Status();
  RebaseCold();
  Work work(*this, &exec, Work::Reports::kYes);
  work.Changes();
  work.ForEach(store_.ring.count, device::RebaseScores{store_.ring.buckets});
  work.Settled();
  return work.status();
}

template <class Device>
device::TableView DeviceTable<Device>::ViewAt(Stamp now, bool inserts) const {
  device::TableView view;
  static_cast<DeviceView&>(view) = View();
  view.initial = initial();
  view.initial_state = initial_state_;
  view.counters = counters();
  if (now != 0 && tiered() && store_.split != 0) {
    view.candidates = {noted(), num_noted()};
  }
  view.capacity = capacity();
  view.rows_move = rows_move();
  view.has_cold_rows = cold_ != nullptr;
  view.now = now;
  view.stamps = stamps_.order();
  if (now != 0) view.touch = scoring_.Lookup(now, inserts);
  view.new_score = scoring_.New(now);
  view.expired =
      Expired(stamps_, HorizonAt(now == 0 ? 0 : stamps_.Decode(now)), expiry_.since_access());
  view.evictable = {scoring_.Order(stamps_), stamps_.order().Rank(now), pins_};
  view.num_pinned = num_pinned_;
  if (catch_up_.active()) view.steps = steps_.view();
  view.formula = CatchUpView::FormulaOf(catch_up_.kind(), catch_up_.flags());
  view.bring_step = RoundingStep(Update::kCatchUp, catch_up_.step());
  if (catch_up_.enabled()) view.step_mark = step_mark();
  view.mailbox = mailbox();
  view.batch = batch_ + 1;
  view.admission = AdmissionAt();
  return view;
}

template <class Device>
device::TableViews DeviceTable<Device>::ViewsAt(Stamp now, size_t n) const {
  device::TableViews views;
  views.one = ViewAt(now);
  views.items = static_cast<uint32_t>(n);
  return views;
}

template <class Device>
const device::TableViews& DeviceTable<Device>::ViewsOf(Work& work, Batch& batch) {
  if (batch.viewed) return batch.views;
  std::vector<device::TableView> each;
  uint64_t lines = 0;  // of the tables so far
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    each.push_back(batch.tables[t]->ViewAt(batch.now[t], batch.inserts));
    each[t].rounding = batch.tables[t]->RoundingAt(batch.step);
    if (!batch.gradients.empty()) each[t].gradients = batch.gradients[t];
    each[t].admission.first_number = lines;
    each[t].promotes_read = batch.tables[t]->Promotes(batch);
    lines += static_cast<uint64_t>(each[t].admission.lines.num);
  }
  device::TableViews& views = batch.views;
  views.one = each[0];
  views.items = static_cast<uint32_t>(batch.size());
  views.count = static_cast<uint32_t>(each.size());
  if (views.count > 1) {
    const auto tables = device::ToDevice(work, each, batch.begins);
    views.many = tables.parts;
    views.begins = tables.begins;
  }
  batch.viewed = true;
  return views;
}

template <class Device>
Status DeviceTable<Device>::FindRows(Work& work, Batch& batch, bool counts) {
  work.ForKeys(batch.size(),
               device::FindKeys{ViewsOf(work, batch), batch.keys, batch.rows, nullptr, batch.read});
  for (DeviceTable* table : batch.tables) {
    if (!table->Promotes(batch)) ++table->reads_;  // it notes candidates
  }
  if (AnyCold(batch)) DYNEMB_RETURN_IF_ERROR(BringIn(work, batch, nullptr));
  if (counts) {
    work.ForEach(device::TallyItems(batch.size()),
                 device::CountFound{ViewsOf(work, batch), batch.rows});
  }
  return Status();
}

template <class Device>
void DeviceTable<Device>::Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) {
  const size_t n = keys.size();
  if (cold_ != nullptr) WaitForReader();
  Work work(*this, &exec);
  Batch batch = BatchOf(KeysAt(keys), n, stamps_.Encode(tick), rows);
  KeepErrorBeside(work, FindRows(work, batch, true));
}

template <class Device>
void DeviceTable<Device>::Contains(Exec& exec, KeySpan keys, bool* found) const {
  const size_t n = keys.size();
  Work work(*this, &exec);
  work.ForKeys(n, device::FindKeys{ViewsAt(0, n), KeysAt(keys), nullptr, found});
  if (!any_cold()) return;
  const std::vector<char> on_host = KeysToHost(work, keys);
  std::vector<char> flags = ToHost(work, reinterpret_cast<const char*>(found), n);
  if (!work.status().ok()) return;
  ForCold(KeySpan(options_.key_type, on_host.data(), n),
          [&flags](size_t i, const ColdRow&) { flags[i] = 1; });
  work.Copy(found, flags.data(), n);
}

template <class Device>
void DeviceTable<Device>::Scores(Exec& exec, KeySpan keys, int64_t* scores) const {
  const size_t n = keys.size();
  Work work(*this, &exec);
  std::fill_n(scores, n, -1);
  RowId* rows = work.template Take<RowId>(n);
  Score* found = work.template Take<Score>(n);
  if (rows == nullptr || found == nullptr) return;
  work.ForKeys(n, device::FindKeys{ViewsAt(0, n), KeysAt(keys), rows, nullptr});
  work.ForRows(n, 1, device::ReadColumns{View(), rows, RowColumns<Stamp>::Scores(found)});
  const std::vector<RowId> host_rows = ToHost(work, rows, n);
  const std::vector<Score> host_scores = ToHost(work, found, n);
  for (size_t i = 0; work.status().ok() && i < n; ++i) {
    if (host_rows[i] != kNoRow) scores[i] = PublicScore(host_scores[i]);
  }
  if (!any_cold()) return;
  const std::vector<char> on_host = KeysToHost(work, keys);
  if (!work.status().ok()) return;
  ForCold(KeySpan(options_.key_type, on_host.data(), n),
          [&](size_t i, const ColdRow& row) { scores[i] = PublicScore(row.times.score); });
}

template <class Device>
void DeviceTable<Device>::Explain(Exec& exec, KeySpan keys, KeyState* states) const {
  const size_t n = keys.size();
  Work work(*this, &exec);
  std::fill_n(states, n, KeyState());
  RowId* found = work.template Take<RowId>(n);
  if (found == nullptr) return;
  work.ForKeys(n, device::FindKeys{ViewsAt(0, n), KeysAt(keys), found, nullptr});
  const std::vector<RowId> rows = ToHost(work, found, n);
  std::vector<RowId> held;
  std::vector<size_t> positions;
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] == kNoRow) continue;
    held.push_back(rows[i]);
    positions.push_back(i);
  }
  std::vector<Stamp> updates(held.size());
  std::vector<Score> scores(held.size());
  ReadToHost(work, held, RowColumns<Stamp>::Times(updates.data(), scores.data()));
  const std::vector<uint32_t> counts = CountsOf(work, KeysAt(keys), n);
  const std::vector<char> on_host = KeysToHost(work, keys);
  if (!work.status().ok()) return;
  for (size_t i = 0; i < n; ++i) states[i].admission_count = counts[i];
  for (size_t h = 0; h < held.size(); ++h) {
    KeyState& state = states[positions[h]];
    state.has_row = true;
    state.in_device = held[h] < store_.split;
    state.updated = stamps_.Decode(updates[h]);
    state.score = PublicScore(scores[h]);
  }
  const KeySpan host_keys(options_.key_type, on_host.data(), n);
  ExplainCold(host_keys, states);
  SetLosses(changes_.deletions(), host_keys, states);
}

template <class Device>
Status DeviceTable<Device>::SetScores(Exec& exec, KeySpan keys, const Score* scores) {
  const size_t n = keys.size();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(CheckScores(scoring_, scores, n));
  DYNEMB_RETURN_IF_ERROR(Error());
  WaitForReader();
  Work work(*this, &exec, Work::Reports::kYes);
  RowId* rows = work.template Take<RowId>(n);
  Score* on_device = work.template Take<Score>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.Copy(on_device, scores, n * sizeof(Score));
  const KeyArray k = KeysAt(keys);
  // The last position of each key sets its score.
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  device::Elect<true>(work, k, nullptr, n, &places, &of);
  DYNEMB_RETURN_IF_ERROR(work.status());
  Batch batch = BatchOf(k, n, 0, rows);
  DYNEMB_RETURN_IF_ERROR(FindQuietly(work, batch));
  work.ForKeys(n, device::WriteScores{View(), rows, on_device, places, of});
  return work.Synchronize();
}

template <class Device>
Status DeviceTable<Device>::AddCounts(Exec& exec, KeySpan keys, const uint32_t* counts) {
  const size_t n = keys.size();
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  const Touch touch = scoring_.Lookup(0, true);
  if (touch.kind != Touch::Kind::kCount) return Status();
  WaitForReader();
  Work work(*this, &exec, Work::Reports::kYes);
  RowId* rows = work.template Take<RowId>(n);
  auto* on_device = work.template Take<uint32_t>(n);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.Copy(on_device, counts, n * sizeof(*counts));
  Batch batch = BatchOf(KeysAt(keys), n, 0, rows);
  DYNEMB_RETURN_IF_ERROR(FindQuietly(work, batch));
  work.ForKeys(n, device::AddCounts{View(), touch, rows, on_device});
  return work.Synchronize();
}

template <class Device>
void DeviceTable<Device>::Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector,
                                 void* vectors, RowId* rows) {
  const size_t n = keys.size();
  if (reading_changes_rows()) WaitForReader();
  Work work(*this, &exec);
  const KeyArray k = KeysAt(keys);
  Batch batch = BatchOf(k, n, stamps_.Encode(tick), rows);
  KeepErrorBeside(work, FindRows(work, batch, true));
  Bring(work, batch);
  if (default_vector == nullptr && admission_.enabled()) {
    work.ForEach(n, device::MarkAbsent{ViewsOf(work, batch), rows});
  }
  work.ForRows(n, vector_quads(),
               device::ReadVectors{View(), initial(), admission_.AbsentIsZero(), k, rows,
                                   default_vector, static_cast<char*>(vectors)});
}

template <class Device>
void DeviceTable<Device>::Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n,
                                  Tick since, Tick now, bool* changed) const {
  Work work(*this, &exec);
  work.ForEach(n, device::CompareUpdates{View(), rows, rows_before, stamps_, since, now,
                                         catch_up_.last_tick(), changed});
}

template <class Device>
Status DeviceTable<Device>::CheckBatch(size_t n) {
  constexpr size_t kMostKeys = size_t{1} << 30;
  if (n <= kMostKeys) return Status();
  return InvalidArgument("at most " + std::to_string(kMostKeys) + " keys in one call, got " +
                         std::to_string(n));
}

template <class Device>
Status DeviceTable<Device>::Begin(Exec& exec, size_t n, Tick tick, Stamp* now, Kind kind) {
  DYNEMB_RETURN_IF_ERROR(CheckBatch(n));
  DYNEMB_RETURN_IF_ERROR(Error());
  *now = kind == Kind::kLookup   ? BeginLookup(exec, tick, n)
         : kind == Kind::kInsert ? BeginInsert(exec, tick, n)
                                 : BeginBatch(exec, tick, n);
  return Status();
}

template <class Device>
Status DeviceTable<Device>::Upsert(Exec& exec, KeySpan keys, const void* vectors, Tick tick) {
  const size_t n = keys.size();
  Stamp now;
  DYNEMB_RETURN_IF_ERROR(Begin(exec, n, tick, &now, Kind::kInsert));
  Work work(*this, &exec, Work::Reports::kYes);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return work.status();
  Batch batch = BatchOf(KeysAt(keys), n, now, rows);
  // The last of a key's positions writes its row.
  Election last;
  device::Elect<true>(work, batch.keys, nullptr, n, &last.places, &last.of);
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(FindRows(work, batch, false));
  Bring(work, batch);
  DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kMayRepeat, device::FillNothing{}, &last));
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(n, vector_quads(),
               device::WriteVectors{View(), rows, last.places, last.of,
                                    static_cast<const char*>(vectors), now});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::Accumulate(Exec& exec, KeySpan keys, const float* deltas, Tick tick) {
  const size_t n = keys.size();
  Stamp now;
  DYNEMB_RETURN_IF_ERROR(Begin(exec, n, tick, &now, Kind::kInsert));
  const uint64_t step = RoundingStep(Update::kAddition, additions_ + 1);
  Work work(*this, &exec, Work::Reports::kYes);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return work.status();
  Batch batch = BatchOf(KeysAt(keys), n, now, rows);
  DYNEMB_RETURN_IF_ERROR(FindRows(work, batch, true));
  Bring(work, batch);
  DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kDistinct, device::FillInitial{}));
  ++additions_;  // a call that was refused does not count
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(
      n, QuadsOf(options_.dim),
      device::WriteFloats{View(), batch.keys, rows, deltas, nullptr, true, RoundingAt(step), now});
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::WriteRows(Exec& exec, KeySpan keys, const float* vectors,
                                      const float* state, bool insert, uint64_t rounding,
                                      Tick tick) {
  const size_t n = keys.size();
  Stamp now;
  DYNEMB_RETURN_IF_ERROR(Begin(exec, n, tick, &now, insert ? Kind::kInsert : Kind::kWrite));
  Work work(*this, &exec, Work::Reports::kYes);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return work.status();
  Batch batch = BatchOf(KeysAt(keys), n, now, rows);
  DYNEMB_RETURN_IF_ERROR(FindRows(work, batch, true));
  if (insert) {
    DYNEMB_RETURN_IF_ERROR(Insert(work, batch, Keys::kDistinct, device::FillNothing{}));
  }
  work.Changes();
  BeforeWrite(work, rows, n);
  work.ForRows(n, QuadsOf(options_.dim),
               device::WriteFloats{View(), batch.keys, rows, vectors,
                                   layout().state_width != 0 ? state : nullptr, false,
                                   RoundingAt(rounding), now});
  return work.status();
}

template <class Device>
void DeviceTable<Device>::ApplyRange(Exec& exec, const RowOptimizer& optimizer, KeySpan keys,
                                     const RowId* rows, const float* gradients, size_t begin,
                                     size_t end, uint64_t rounding, Tick tick) {
  const size_t n = end - begin;
  Work work(*this, &exec);
  RowId* resolved = work.template Take<RowId>(n);
  uint32_t* nonfinite = work.template Take<uint32_t>(n);
  if (resolved == nullptr || nonfinite == nullptr) return;
  Batch batch = BatchOf(KeysAt(keys).From(begin), n, stamps_.Encode(tick), resolved);
  batch.step = rounding;
  batch.gradients = {gradients + begin * static_cast<size_t>(options_.dim)};
  if (any_cold()) {
    const Status held = HoldFound(work, batch, rows + begin);
    KeepErrorBeside(work, held);
    if (!held.ok()) return;
  }
  Apply(work, batch, rows + begin, nonfinite, optimizer);
}

template <class Device>
void DeviceTable<Device>::Apply(Work& work, Batch& batch, const RowId* found, uint32_t* nonfinite,
                                const RowOptimizer& optimizer) {
  const size_t n = batch.size();
  const device::TableViews& tables = ViewsOf(work, batch);
  if (!work.status().ok()) return;
  work.ForKeys(n, device::ResolveRows{tables, batch.keys, found, batch.rows});
  Bring(work, batch);
  work.Changes();
  BeforeWrite(work, batch, [](size_t) { return true; });
  work.Fill(nonfinite, 0, n * sizeof(uint32_t));
  WithFormula(
      optimizer.kind(), optimizer.flags(), optimizer.coefficients().power, [&](auto formula) {
        using Body = device::ApplyGradients<typename decltype(formula)::Formula>;
        const uint32_t length = device::RunLength(work, n, batch.quads(), Body::kMostLength);
        work.ForRows(
            device::NumRuns(n, length), batch.quads(),
            Body{tables, optimizer.coefficients(), batch.keys, batch.rows, nonfinite, n, length});
      });
  work.ForEach(device::TallyItems(n), device::CountApplied{tables, batch.rows, nonfinite});
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_BATCH_H_
