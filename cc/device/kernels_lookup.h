// The kernels that bring the ids of several lookups together and take their rows back (kernels.h
// says what a kernel is here). Ids of all tasks lie one task after the other in a batch.
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
  const RowId* found = nullptr;  // of CollectIds: where they were found
  RowId* rows = nullptr;         // of DeliverRows: where they are
};

// The keys of all tasks, 64 bits wide, and the rows where they were found, if that is asked for.
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
