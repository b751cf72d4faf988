// DeviceTable: rows that make up for missed steps (cc/table/catch_up.h).
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_CATCH_UP_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_CATCH_UP_H_

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_state.h"
#include "cc/device/device_table_work.h"
#include "cc/device/kernels_catch_up.h"
#include "cc/table/codec.h"
#include "cc/table/optimizer_formulas.h"
#include "cc/table/phase.h"

namespace dynemb {

namespace device {
// WithFormula, for the optimizers that may have the flag `catch_up`.
template <class Fn>
void WithCatchUpFormula(const CatchUp& steps, const Fn& fn) {
  WithFormula(steps.kind(), steps.flags(), /*power=*/0.5f, [&](auto formula) {
    using Formula = typename decltype(formula)::Formula;
    if constexpr (!std::is_same_v<Formula, formulas::Lion> &&
                  !std::is_same_v<Formula, formulas::Ftrl<true>> &&
                  !std::is_same_v<Formula, formulas::Ftrl<false>>) {
      fn(formula);
    }
  });
}
}  // namespace device

template <class Device>
void DeviceTable<Device>::Bring(Work& work, Batch& batch) {
  std::vector<size_t> active;
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    if (batch.size(t) != 0 && batch.tables[t]->catch_up_.active()) active.push_back(t);
  }
  if (active.empty()) return;
  Phase phase("catch up rows");
  const device::TableViews& tables = ViewsOf(work, batch);
  if (!work.status().ok()) return;
  work.Changes();
  BeforeWrite(work, batch, [&](size_t t) { return batch.tables[t]->catch_up_.active(); });
  // One launch brings the rows of all tables with the same formula.
  std::vector<uint32_t> done;
  for (size_t t : active) {
    const CatchUp& steps = batch.tables[t]->catch_up_;
    const uint32_t formula = CatchUpView::FormulaOf(steps.kind(), steps.flags());
    if (std::find(done.begin(), done.end(), formula) != done.end()) continue;
    done.push_back(formula);
    device::WithCatchUpFormula(steps, [&](auto tag) {
      using Formula = typename decltype(tag)::Formula;
      work.ForRows(batch.size(), batch.quads(),
                   device::BringRows<Formula>{tables, batch.rows, formula});
    });
  }
  work.Settled();
}

template <class Device>
void DeviceTable<Device>::BringCopies(Work& work, const RowId* rows, size_t n, float* vectors,
                                      float* state) const {
  if (!catch_up_.active()) return;
  device::WithCatchUpFormula(catch_up_, [&](auto tag) {
    using Formula = typename decltype(tag)::Formula;
    work.ForRows(n, QuadsOf(options_.dim),
                 device::BringCopies<Formula>{steps_.view(), rows, vectors, state, options_.dim,
                                              layout().state_width});
  });
}

template <class Device>
const float* DeviceTable<Device>::CopyBrought(Work& work, uint64_t begin, uint64_t* n) const {
  const auto dim = static_cast<size_t>(options_.dim);
  const auto width = static_cast<size_t>(layout().state_width);
  *n = std::min<uint64_t>(
      *n, std::max<uint64_t>(1, device::kCopyMost / ((dim + width) * sizeof(float))));
  RowId* rows = work.template Take<RowId>(*n);
  float* vectors = work.template Take<float>(*n * dim);
  float* state = work.template Take<float>(*n * width);
  if (rows == nullptr || vectors == nullptr || state == nullptr) return nullptr;
  work.ForEach(*n, device::ListLive{View(), counters(), begin, rows});
  work.ForRows(
      *n, QuadsOf(options_.dim),
      device::ReadColumns{View(), rows, {nullptr, nullptr, state, nullptr, nullptr}, vectors});
  BringCopies(work, rows, *n, vectors, state);
  return vectors;
}

template <class Device>
void DeviceTable<Device>::ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state,
                                   bool* found) const {
  const size_t n = keys.size();
  Work work(*this, &exec);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return;
  work.ForKeys(n, device::FindKeys{ViewsAt(0, n), KeysAt(keys), rows, found});
  work.ForRows(
      n, QuadsOf(options_.dim),
      device::ReadColumns{View(), rows, {nullptr, nullptr, state, nullptr, nullptr}, vectors});
  BringCopies(work, rows, n, vectors, state);
  if (any_cold()) ReadColdRows(work, keys, vectors, state, found);
}

template <class Device>
void DeviceTable<Device>::ReadColdRows(Work& work, KeySpan keys, float* vectors, float* state,
                                       bool* found) const {
  const std::vector<char> on_host = KeysToHost(work, keys);
  if (!work.status().ok()) return;
  const auto dim = static_cast<size_t>(options_.dim);
  const auto width = static_cast<size_t>(layout().state_width);
  std::vector<uint32_t> positions;
  std::vector<float> cold_vectors, cold_state;
  ForCold(KeySpan(options_.key_type, on_host.data(), keys.size()),
          [&](size_t i, const ColdRow& row) {
            const size_t c = positions.size();
            positions.push_back(static_cast<uint32_t>(i));
            cold_vectors.resize((c + 1) * dim);
            cold_state.resize((c + 1) * width);
            LoadVector(options_.dtype, row.content, options_.dim, cold_vectors.data() + c * dim);
            if (width == 0) return;
            memcpy(cold_state.data() + c * width, StateIn(row.content), width * sizeof(float));
            if (catch_up_.active()) {
              catch_up_.Bring(cold_vectors.data() + c * dim, cold_state.data() + c * width);
            }
          });
  const size_t n = positions.size();
  if (n == 0) return;
  auto* const at = work.template Take<uint32_t>(n);
  auto* const vectors_there = work.template Take<float>(n * dim);
  auto* const state_there = work.template Take<float>(n * width);
  if (!work.status().ok()) return;
  work.Copy(at, positions.data(), n * sizeof(uint32_t));
  work.Copy(vectors_there, cold_vectors.data(), n * dim * sizeof(float));
  work.Copy(state_there, cold_state.data(), n * width * sizeof(float));
  work.ForRows(n, QuadsOf(options_.dim),
               device::PutColdRows{at, vectors_there, state_there, options_.dim,
                                   layout().state_width, vectors, state, found});
}

template <class Device>
void DeviceTable<Device>::BringKeys(Exec& exec, KeySpan keys) {
  if (!catch_up_.active()) return;
  const size_t n = keys.size();
  WaitForReader();
  Work work(*this, &exec);
  RowId* rows = work.template Take<RowId>(n);
  if (rows == nullptr) return;
  Batch batch = BatchOf(KeysAt(keys), n, 0, rows);
  work.ForKeys(n, device::FindKeys{ViewsOf(work, batch), batch.keys, rows, nullptr});
  Bring(work, batch);
}

template <class Device>
template <class Fn>
uint64_t DeviceTable<Device>::ForLiveRows(Work& work, uint64_t first, uint64_t num, const Fn& fn) {
  // The bound, so as not to wait: ListLive knows the exact number.
  const uint64_t all = bounds_.high_water;
  const uint64_t end = first < all ? first + std::min(num, all - first) : all;
  for (uint64_t next = first; next < end;) {
    const auto n = static_cast<size_t>(std::min(end - next, device::kListMost));
    typename Device::Session::Scratch scratch(work);
    RowId* rows = work.template Take<RowId>(n);
    if (rows == nullptr) return 0;
    work.ForEach(n, device::ListLive{View(), counters(), next, rows});
    fn(rows, n);
    next += n;
  }
  return end < all ? end : 0;
}

template <class Device>
uint64_t DeviceTable<Device>::BringRows(Exec& exec, uint64_t first, uint64_t num) {
  if (first >= kColdCursor) return BringColdFrom(exec, first, num);
  WaitForReader();
  uint64_t next = 0;
  {
    Work work(*this, &exec);
    next = ForLiveRows(work, first, num, [&](RowId* rows, size_t n) {
      Batch batch = BatchOf(KeyArray(), n, 0, rows);
      Bring(work, batch);
    });
    if (!work.status().ok()) return first;  // again
  }
  const uint64_t done = std::min(num, bounds_.high_water - std::min(first, bounds_.high_water));
  return BringCold(exec, next, num - done);
}

template <class Device>
void DeviceTable<Device>::MarkRows(Exec& exec, float mark) {
  WaitForReader();
  {
    Work work(*this, &exec);
    work.Changes();
    ForLiveRows(work, 0, bounds_.high_water, [&](RowId* rows, size_t n) {
      BeforeWrite(work, rows, n);
      work.ForEach(n, device::MarkRows{View(), rows, mark});
    });
  }
  MarkCold(exec, mark);
}

template <class Device>
void DeviceTable<Device>::MarkNewRows(Exec& exec, float mark) {
  Work work(*this, &exec);
  work.Changes();
  float* const pinned = work.template Pinned<float>(1);
  if (pinned == nullptr) return;
  *pinned = mark;
  auto* const initial = reinterpret_cast<float*>(initial_state_of_.data());
  work.Copy(initial + layout().state_width - 1, pinned, sizeof(mark));
  work.Settled();
}

template <class Device>
Status DeviceTable<Device>::CopySteps(Exec& exec, const CatchUp& steps) {
  Work work(*this, &exec, Work::Reports::kYes);
  return steps_.Copy(*device_, work, steps);
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_CATCH_UP_H_
