// DeviceTable: promotion of rows between tiers.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_TIERS_H_

#include <algorithm>
#include <utility>
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
bool DeviceTable<Device>::HasTwoTiers() const {
  // A cut identifies its rows by id, so rows do not move while a cut is read.
  return tiered() && store_.split != 0 && bounds_.high_water > store_.split && cut() == nullptr &&
         !sweeps_rows();
}

template <class Device>
Status DeviceTable<Device>::Promote(Exec& exec, Tick tick) {
  return Promote(exec, {this}, tick);
}

template <class Device>
Status DeviceTable<Device>::Promote(Exec& exec, const std::vector<DeviceTable*>& tables,
                                    Tick tick) {
  for (const DeviceTable* table : tables) DYNEMB_RETURN_IF_ERROR(table->Error());
  std::vector<Promotion> group;
  uint64_t entries = 0;
  const auto promote = [&] {
    if (group.empty()) return Status();
    std::vector<const DeviceTable*> locked;
    for (const Promotion& p : group) locked.push_back(p.table);
    Work work(std::move(locked), &exec, Work::Reports::kYes);
    return Promote(work, group, device::Promotes::kHotter, nullptr);
  };
  for (DeviceTable* table : tables) {
    if (!table->HasTwoTiers() || table->reads_.exchange(0) == 0) continue;
    const uint32_t noted = table->num_noted(), window = table->PromotionWindow();
    const uint64_t more = std::max(noted, window);
    if (entries + more > kPromotionEntries) {
      DYNEMB_RETURN_IF_ERROR(promote());
      group.clear();
      entries = 0;
    }
    group.push_back({table, table->stamps_.Encode(tick), noted, window, 0});
    entries += more;
  }
  return promote();
}

template <class Device>
Status DeviceTable<Device>::FindToPromote(Work& work, Batch& batch) {
  batch.inserts = true;
  batch.read = work.template Take<RowId>(batch.size());
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(FindRows(work, batch, true));
  return work.status();
}

template <class Device>
Status DeviceTable<Device>::PromoteRead(Work& work, Batch& batch) {
  std::vector<Promotion> promotions;
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    DeviceTable* const table = batch.tables[t];
    const auto n = static_cast<uint32_t>(batch.size(t));
    if (n == 0 || !table->Promotes(batch)) continue;
    // At most kPlacesEach places are examined for each row in the host tier. Most ids repeat, or
    // their rows are in the device tier already, so that a window of n places suffices.
    const auto places = static_cast<uint32_t>(std::min<uint64_t>(table->store_.split, n));
    promotions.push_back({table, batch.now[t], n, places, batch.begins[t]});
  }
  if (promotions.empty()) return Status();
  const Status status = Promote(work, promotions, device::Promotes::kRead, batch.read);
  return status.code() == Code::kResourceExhausted && !work.changes() ? Status() : status;
}

template <class Device>
Status DeviceTable<Device>::Promote(Work& work, const std::vector<Promotion>& promotions,
                                    device::Promotes which, const RowId* read) {
  Phase phase("promote");
  const size_t num_tables = promotions.size();
  std::vector<device::TierTable> each;
  // The begins of the tables' candidates, places and pairs.
  std::vector<uint32_t> begins(3 * (num_tables + 1));
  uint32_t* const slots = begins.data();
  uint32_t* const places = slots + num_tables + 1;
  uint32_t* const pairs = places + num_tables + 1;
  size_t quads = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    const Promotion& p = promotions[t];
    const DeviceTable& table = *p.table;
    each.push_back({table.View(), table.tier_state(), table.noted(), p.first_id, table.counters(),
                    table.scoring_.strategy(), which, table.scoring_.by_time(),
                    table.stamps_.order(), p.now});
    const uint32_t most = which == device::Promotes::kRead ? p.candidates : table.promote_most_;
    slots[t + 1] = slots[t] + p.candidates;
    places[t + 1] = places[t] + p.places;
    pairs[t + 1] = pairs[t] + std::min(p.places, most);
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
  if (which == device::Promotes::kRead) {
    work.ForEach(num_slots, device::ListRead{tables, read, candidates});
  } else {
    work.ForEach(num_slots, device::ListCandidates{tables, candidates});
  }
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
