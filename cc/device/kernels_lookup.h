// The kernels that collect the ids of several tasks in a batch, and deliver their rows (kernels.h
// defines kernels). The ids of all tasks are in the batch task after task.
#ifndef DYNEMB_DEVICE_KERNELS_LOOKUP_H_
#define DYNEMB_DEVICE_KERNELS_LOOKUP_H_

#include <cstdint>

#include "cc/device/flat_index.h"
#include "cc/device/parts.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// The ids of a task.
struct IdPart {
  KeyArray keys;
  const RowId* found = nullptr;  // input of CollectIds: the rows that an earlier call found
  RowId* rows = nullptr;         // output of DeliverRows: the rows
};

// Copies the keys of all tasks as 64 bits, and the rows that were found, unless `found` is null.
struct CollectIds {
  Parts<IdPart> parts;
  uint64_t* keys;
  RowId* found;  // or null

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const size_t j = i - parts.begin(p);
    keys[i] = parts[p].keys[j];
    if (found != nullptr) found[i] = parts[p].found[j];
  }
};

// Copies the rows of the batch to the tasks' arrays.
struct DeliverRows {
  Parts<IdPart> parts;
  const RowId* rows;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    parts[p].rows[i - parts.begin(p)] = rows[i];
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_LOOKUP_H_
