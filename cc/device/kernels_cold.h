// The kernels that move rows between a table's memory and its cold rows (device_table_cold.h;
// kernels.h defines kernels).
#ifndef DYNEMB_DEVICE_KERNELS_COLD_H_
#define DYNEMB_DEVICE_KERNELS_COLD_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/table/types.h"

namespace dynemb::device {

// lost[i] = kNoRow if found[i] was a row, rows[i] is none, and the table has cold rows; another
// value otherwise.
struct FlagLost {
  TableViews tables;
  const RowId* found;
  const RowId* rows;
  RowId* lost;

  DYNEMB_HD void operator()(size_t i) const {
    const bool is_lost = rows[i] == kNoRow && IsRow(found[i]) && tables.Of(i).has_cold_rows;
    lost[i] = is_lost ? kNoRow : 0;
  }
};

// Lists the keys i with sums[i] < sums[i + 1] (those whose flag was set), in order.
struct ListKeys {
  KeyArray keys;
  const uint32_t* sums;
  uint64_t* listed;

  DYNEMB_HD void operator()(size_t i) const {
    if (sums[i] != sums[i + 1]) listed[sums[i]] = keys[i];
  }
};

// FindKeys, for the keys i with absent[i] == kNoRow. `quiet`: finds expired rows, too, and is no
// access. `absent` may be the array that `find` writes.
struct FindAgain {
  FindKeys find;
  const RowId* absent;
  bool quiet;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (absent[i] != kNoRow) return;
    if (!quiet) {
      find(lanes, i);
      return;
    }
    const SlotRef at = find.tables.Of(i).Find(lanes, find.keys[i]);
    if (lanes.rank() == 0) find.rows[i] = at.row;
  }
};

// The contents of the cold rows of a table.
struct MovedPart {
  const char* vectors;  // [rows, dim], of the table's dtype
  const float* state;   // [rows, state width]
};

// For FillRows: the contents and last updates that the new rows had as cold rows.
struct FillMoved {
  Parts<MovedPart> parts;
  const Stamp* updates;  // [n]

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, const TableView& table, size_t i, uint64_t,
                            RowId row) const {
    const RowLayout& l = table.layout;
    const uint32_t p = parts.IndexOf(i);
    const size_t r = i - parts.begin(p);
    CopyBytes(lanes, table.VectorAt(row), parts[p].vectors + r * l.vector_bytes(),
              l.vector_bytes());
    CopyBytes(lanes, table.StateAt(row), parts[p].state + r * static_cast<size_t>(l.state_width),
              l.state_bytes());
    if (lanes.rank() == 0) *table.UpdateAt(row) = updates[i];
  }
};

// The numbers that the host needs to move rows out of the memory of a table.
struct LeavingRoom {
  uint32_t end;   // the number of the table's last new key, plus 1
  uint32_t keys;  // distinct keys without a row
  uint32_t held;  // rows in memory
  uint32_t pinned;
};

// Item t reads the room of table t.
struct ReadLeavingRooms {
  TableViews tables;
  const uint32_t* sums;
  LeavingRoom* rooms;

  DYNEMB_HD void operator()(size_t t) const {
    const auto index = static_cast<uint32_t>(t);
    const TableView& table = tables[index];
    const uint32_t end = sums[tables.end(index)];
    const uint64_t pinned = table.num_pinned != nullptr ? *table.num_pinned : 0;
    rooms[t] = {end, end - sums[tables.begin(index)], static_cast<uint32_t>(table.counters->size()),
                static_cast<uint32_t>(pinned)};
  }
};

// Sets the items positions[c] of ReadRows to the cold row c.
struct PutColdRows {
  const uint32_t* positions;
  const float* from_vectors;  // [n, dim]
  const float* from_state;    // [n, width]
  int64_t dim, width;
  float* vectors;
  float* state;
  bool* found;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t c) const {
    const auto d = static_cast<size_t>(dim), w = static_cast<size_t>(width);
    const size_t i = positions[c];
    CopyBytes(lanes, reinterpret_cast<char*>(vectors + i * d), from_vectors + c * d,
              d * sizeof(float));
    CopyBytes(lanes, reinterpret_cast<char*>(state + i * w), from_state + c * w, w * sizeof(float));
    if (lanes.rank() == 0) found[i] = true;
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_COLD_H_
