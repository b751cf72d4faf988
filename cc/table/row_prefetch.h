// RowPrefetch: fetches the first bytes of rows into the cache, some time before they are used.
//
// The number of lines that the first bytes of a row touch depends on the row, but a branch on it
// would be unpredictable. Each row therefore gets as many prefetches as the row that touches most
// lines. This depends on the largest power of two whose multiples all rows begin at: 64 bytes are
// on one line if that is 64, and 76 bytes are on two lines if it is 16, but on up to three if it
// is 4.
#ifndef DYNEMB_TABLE_ROW_PREFETCH_H_
#define DYNEMB_TABLE_ROW_PREFETCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb {

class RowPrefetch {
 public:
  // For the first `bytes` bytes, bytes > 0, of rows at multiples of `stride` from `rows`. The
  // hardware's stream prefetchers fetch the rest of a long row.
  RowPrefetch(const char* rows, size_t stride, size_t bytes) {
    constexpr size_t kMost = 512;
    bytes = std::min(bytes, kMost);
    const size_t address = reinterpret_cast<uintptr_t>(rows) | stride | kLine;
    const size_t align = address & -address;
    last_ = bytes - 1;
    end_ = bytes > align ? bytes - align : 0;
  }

  DYNEMB_INLINE void operator()(const char* row) const {
    ForOffsets([row](size_t offset) { PrefetchLine(row + offset); });
  }
  // The number of prefetches of a row.
  size_t lines() const { return (end_ + kLine - 1) / kLine + 1; }
  // Calls fn(offset) for each prefetch of a row.
  template <class Fn>
  DYNEMB_INLINE void ForOffsets(const Fn& fn) const {
    for (size_t at = 0; at < end_; at += kLine) fn(at);
    fn(last_);
  }

 private:
  static constexpr size_t kLine = 64;

  size_t last_;  // the offset of the last byte
  size_t end_;   // an offset from here on is on the line of the last byte
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_PREFETCH_H_
