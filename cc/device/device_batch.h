// DeviceBatch: the keys of a call on one or several tables of a device; InsertArrays: the session's
// arrays for a batch that inserts.
#ifndef DYNEMB_DEVICE_DEVICE_BATCH_H_
#define DYNEMB_DEVICE_DEVICE_BATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/device/flat_index.h"
#include "cc/device/kernels_insert.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/table/types.h"

namespace dynemb {

template <class Device>
class DeviceTable;

// The keys of tables[t] are at the positions [begins[t], begins[t + 1]). Each table is listed once.
template <class Device>
struct DeviceBatch {
  std::vector<DeviceTable<Device>*> tables;
  std::vector<uint32_t> begins;
  std::vector<Stamp> now;
  std::vector<const float*> gradients;  // per table; empty: the batch has none
  KeyArray keys;
  RowId* rows = nullptr;
  uint64_t step = 0;                // for rounding vectors, if the batch has gradients
  bool inserts = false;             // it is an inserting lookup
  bool admits = false;              // new keys need admission
  RowId* read = nullptr;            // FindToPromote writes the rows for PromoteRead here
  const uint32_t* times = nullptr;  // per key: how often it counts; null: once
  bool has_all = false;             // every key is known to have a row
  // If the batch moves cold rows to memory: their scores, and the batch whose rows stay there.
  bool is_move = false;
  const Score* scores = nullptr;
  DeviceBatch* held = nullptr;
  // From ViewsOf; current if `viewed`.
  device::TableViews views{};
  bool viewed = false;

  size_t size() const { return begins.back(); }
  size_t size(size_t t) const { return begins[t + 1] - begins[t]; }
  // For ForRows: the quads of the widest vectors.
  size_t quads() const {
    size_t most = 0;
    for (const DeviceTable<Device>* table : tables) {
      most = std::max(most, QuadsOf(table->options().dim));
    }
    return most;
  }
};

// The election of one position of each key of a batch (device::Elect). Null places: keys are
// distinct.
struct Election {
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
};

struct InsertArrays : Election {
  uint32_t* sums = nullptr;  // of the keys that get rows
  uint32_t* positions = nullptr;
  RowId* new_rows = nullptr;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_BATCH_H_
