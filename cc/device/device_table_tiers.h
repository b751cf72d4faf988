// DeviceTable: promotion of rows between tiers. Included by device_table.h only.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_

#include <algorithm>

#include "cc/device/device_table.h"
#include "cc/table/phase.h"

namespace dynemb {

template <class Device>
Status DeviceTable<Device>::Promote(Exec& exec, Tick tick) {
  // A cut identifies its rows by id, so rows do not move while a cut is read.
  if (!tiered() || store_.split == 0 || cut_ != nullptr || sweeps_rows()) return Status();
  DYNEMB_RETURN_IF_ERROR(Error());
  if (bounds_.high_water <= store_.split || reads_.exchange(0) == 0) return Status();
  Phase phase("promote");
  Work work(*this, &exec, Work::Reports::kYes);
  const size_t noted_most = 2 * promote_most_;
  const size_t window =
      std::min<uint64_t>(store_.split, uint64_t{device::kPlacesEach} * promote_most_);
  const size_t pairs = std::min<size_t>(window, promote_most_);
  auto* order = work.template Take<uint64_t>(noted_most);
  auto* victims = work.template Take<uint64_t>(window);
  auto* rows = work.template Take<uint32_t>(noted_most);
  auto* unused = work.template Take<uint32_t>(std::max<size_t>(noted_most, window));
  auto* swaps = work.template Take<device::Swap>(pairs);
  DYNEMB_RETURN_IF_ERROR(work.status());

  // Unused entries are kNoPlace, and are sorted last.
  work.ForEach(noted_most, device::CopyCandidates{tier_state(), noted(), order});
  work.SortPairs(order, unused, noted_most, device::kOrderBits);
  work.ForKeys(window, device::LookAtPlaces{View(), store_.split, tier_state(), counters(),
                                            scoring_.by_time(), stamps_.order(),
                                            stamps_.Encode(tick), victims});
  work.SortPairs(victims, unused, window, device::kOrderBits);
  work.ForEach(pairs, device::ListCandidates{order, rows});
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  device::Elect<false>(work, KeyArray{rows, sizeof(RowId)}, nullptr, pairs, &places, &of);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.Changes();
  work.ForKeys(pairs, device::PairUp{View(), scoring_.strategy(), order, victims, places, of,
                                     counters(), swaps});
  work.ForRows(pairs, device::QuadsOfBytes(layout().stride), device::SwapRows{View(), swaps});
  const size_t items = device::SumItems(pairs);
  work.ForEach(items, device::CountSwaps{swaps, pairs, items, counters()});
  work.ForEach(1, device::EndRound{store_.split, window, tier_state()});
  return work.status();
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_
