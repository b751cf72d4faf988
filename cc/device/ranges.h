// RangeOf: for consecutive ranges of items, the range that contains item i.
#ifndef DYNEMB_DEVICE_RANGES_H_
#define DYNEMB_DEVICE_RANGES_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb::device {

// Range r has the items [begins[r], begins[r + 1]), r < count. i is less than begins[count].
DYNEMB_HD inline uint32_t RangeOf(const uint32_t* begins, uint32_t count, size_t i) {
  uint32_t low = 0, high = count - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (begins[middle + 1] <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_RANGES_H_
