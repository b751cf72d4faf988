// DeviceTable::CheckInvariants: copies the whole structure to the host and checks it.
#ifndef DYNEMB_DEVICE_DEVICE_TABLE_CHECK_H_
#define DYNEMB_DEVICE_DEVICE_TABLE_CHECK_H_

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/device/device_table_work.h"
#include "cc/table/require.h"

namespace dynemb {

template <class Device>
void DeviceTable<Device>::CheckInvariants() const {
  Work work(*this, nullptr);
  const device::Counters c = Read(work);
  const std::vector<Bucket> buckets = ToHost(work, store_.ring.buckets, store_.ring.count);
  RowId* listed = work.template Take<RowId>(c.free_count);
  if (listed != nullptr) work.ForEach(c.free_count, device::ListFree{View(), listed});
  const std::vector<RowId> free = ToHost(work, listed, c.free_count);
  std::vector<RowId> all(c.high_water);
  std::iota(all.begin(), all.end(), RowId{0});
  std::vector<uint64_t> packed(all.size());  // room for either width
  std::vector<Stamp> updates(all.size());
  ReadToHost(work, all, {packed.data(), nullptr, nullptr, updates.data(), nullptr});
  Require(work.status().ok(), "the structure is copied to the host", 0);
  const KeyArray keys = KeysAt(packed.data());
  Require(c.high_water <= store_.capacity, "no more rows than capacity", c.high_water);
  if (admission_.counts()) {
    const auto lines = ToHost(work, AdmissionAt().counters, CounterBytes() / sizeof(uint64_t));
    Require(AdmissionCounters::CheckLines(lines.data(), 0, admission_lines_.num).ok(),
            "Count can have left the lines", 0);
  }
  Require(bounds_.high_water >= c.high_water && bounds_.live >= c.size(), "bounds hold", c.size());

  FlatRing ring = store_.ring;
  ring.buckets = nullptr;  // only for ProbeIn
  std::vector<bool> seen(all.size());
  std::vector<uint32_t> passes(ring.count);
  uint64_t held = 0;
  for (uint32_t b = 0; b < ring.count; ++b) {
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      const RowId row = buckets[b].row[s];
      Require((row == kNoRow) == (buckets[b].digests()[s] == 0), "empty iff no digest", b);
      if (row == kNoRow) continue;
      ++held;
      Require(row < c.high_water, "the row id was allocated", row);
      Require(!seen[row], "a row belongs to one slot", row);
      seen[row] = true;
      Require(updates[row] != 0, "a held row is live", row);
      const FlatProbe probe = ProbeIn(ring, HashKey(keys[row], ring.salt));
      Require(probe.digest == buckets[b].digests()[s], "a slot has its key's digest", row);
      for (uint32_t i = probe.home; i != b; i = (i + 1) % ring.count) ++passes[i];
    }
  }
  for (uint32_t b = 0; b < ring.count; ++b) {
    Require(buckets[b].overflow() == kOverflowSticky || buckets[b].overflow() == passes[b],
            "overflow counts the keys that passed", b);
  }
  Require(held == c.size(), "every live row has a slot", held);
  for (RowId row : free) {
    Require(row < c.high_water && !seen[row] && updates[row] == 0, "a free row is free", row);
    seen[row] = true;
  }
  for (uint64_t r = 0; r < all.size(); ++r) Require(seen[r], "a row is held or free", r);

  // Every key is found, and no key has two rows.
  std::vector<uint64_t> held_keys;
  for (uint64_t r = 0; r < all.size(); ++r) {
    if (updates[r] != 0) held_keys.push_back(keys[r]);
  }
  std::vector<char> found(held_keys.size());
  HaveHot(work, held_keys, &found);
  Require(work.status().ok(), "held keys are looked up", 0);
  for (size_t i = 0; i < found.size(); ++i) Require(found[i], "a held key is found", held_keys[i]);
  std::sort(held_keys.begin(), held_keys.end());
  for (size_t i = 1; i < held_keys.size(); ++i) {
    Require(held_keys[i] != held_keys[i - 1], "a key has one row", held_keys[i]);
  }
  if (cold_ == nullptr) return;
  cold_->CheckInvariants();
  // Files that cannot be read are no broken invariant.
  (void)cold_->Find(held_keys.data(), held_keys.size(), [&](size_t i, const ColdRow&) {
    Require(false, "a key has its row in one place", held_keys[i]);
  });
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_TABLE_CHECK_H_
