// DeviceTable: promotion of rows between tiers.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_

#include <algorithm>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_work.h"
#include "cc/device/parts.h"
#include "cc/table/phase.h"

namespace dynemb {

template <class Device>
uint32_t DeviceTable<Device>::PromotionWindow() const {
  return static_cast<uint32_t>(
      std::min<uint64_t>(store_.split, uint64_t{device::kPlacesEach} * promote_most_));
}

template <class Device>
Status DeviceTable<Device>::Promote(Exec& exec, Tick tick) {
  return Promote(exec, {this}, tick);
}

template <class Device>
Status DeviceTable<Device>::Promote(Exec& exec, const std::vector<DeviceTable*>& tables,
                                    Tick tick) {
  for (const DeviceTable* table : tables) DYNEMB_RETURN_IF_ERROR(table->Error());
  std::vector<DeviceTable*> group;
  uint64_t entries = 0;
  const auto promote = [&] {
    if (group.empty()) return Status();
    Work work({group.begin(), group.end()}, &exec, Work::Reports::kYes);
    return PromoteGroup(work, group, tick);
  };
  for (DeviceTable* table : tables) {
    // A cut identifies its rows by id, so rows do not move while a cut is read.
    if (!table->tiered() || table->store_.split == 0 || table->cut() != nullptr ||
        table->sweeps_rows()) {
      continue;
    }
    if (table->bounds_.high_water <= table->store_.split || table->reads_.exchange(0) == 0) {
      continue;
    }
    const uint64_t more = std::max(table->num_noted(), table->PromotionWindow());
    if (entries + more > kPromotionEntries) {
      DYNEMB_RETURN_IF_ERROR(promote());
      group.clear();
      entries = 0;
    }
    group.push_back(table);
    entries += more;
  }
  return promote();
}

template <class Device>
Status DeviceTable<Device>::PromoteGroup(Work& work, const std::vector<DeviceTable*>& group,
                                         Tick tick) {
  Phase phase("promote");
  const size_t num_tables = group.size();
  std::vector<device::TierTable> each;
  // The begins of the tables' slots, places and pairs.
  std::vector<uint32_t> begins(3 * (num_tables + 1));
  uint32_t* const slots = begins.data();
  uint32_t* const places = slots + num_tables + 1;
  uint32_t* const pairs = places + num_tables + 1;
  size_t quads = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    const DeviceTable& table = *group[t];
    each.push_back({table.View(), table.tier_state(), table.noted(), table.counters(),
                    table.scoring_.strategy(), table.scoring_.by_time(), table.stamps_.order(),
                    table.stamps_.Encode(tick)});
    const uint32_t window = table.PromotionWindow();
    slots[t + 1] = slots[t] + table.num_noted();
    places[t + 1] = places[t] + window;
    pairs[t + 1] = pairs[t] + std::min(window, table.promote_most_);
    quads = std::max(quads, device::QuadsOfBytes(table.layout().stride));
  }
  const uint32_t num_slots = slots[num_tables], num_places = places[num_tables];
  const uint32_t num_pairs = pairs[num_tables];
  const auto on_device = device::ToDevice(work, each, begins);
  const device::OrderedRows candidates{work.template Take<uint64_t>(num_slots),
                                       work.template Take<RowId>(num_slots)};
  const device::OrderedRows in_turn{work.template Take<uint64_t>(num_places),
                                    work.template Take<RowId>(num_places)};
  auto* const swaps = work.template Take<device::Swap>(num_pairs);
  DYNEMB_RETURN_IF_ERROR(work.status());
  const device::TierTables tables{
      on_device.parts, on_device.begins, on_device.begins + (places - slots),
      on_device.begins + (pairs - slots), static_cast<uint32_t>(num_tables)};

  const int bits = device::OrderedRows::kOrderBits + device::BitsBelow(num_tables);
  work.ForEach(num_slots, device::ListCandidates{tables, candidates});
  work.SortPairs(candidates.keys, candidates.rows, num_slots, bits);
  work.ForKeys(num_places, device::LookAtPlaces{tables, candidates, in_turn});
  work.SortPairs(in_turn.keys, in_turn.rows, num_places, bits);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.Changes();
  work.ForKeys(num_pairs, device::PairUp{tables, candidates, in_turn, swaps});
  work.ForRows(num_pairs, quads, device::SwapRows{tables, swaps});
  work.ForEach(device::TallyItems(num_pairs), device::CountSwaps{tables, swaps});
  work.ForEach(num_tables, device::EndPromotion{tables, candidates});
  return work.status();
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_
