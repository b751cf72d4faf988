// The kernels that give rows their missed steps (cc/table/catch_up.h; kernels.h defines kernels).
#ifndef DYNEMB_DEVICE_KERNELS_CATCH_UP_H_
#define DYNEMB_DEVICE_KERNELS_CATCH_UP_H_

#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/flat_index.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/table/catch_up_view.h"
#include "cc/table/float_bits.h"
#include "cc/table/types.h"

namespace dynemb::device {

// Brings rows[i] up to date (if it is a row), if the steps of its table have this formula. The same
// row may be listed several times: the first team that changes its mark brings it.
template <class Formula>
struct BringRows {
  TableViews tables;
  const RowId* rows;
  uint32_t formula;  // CatchUpView::FormulaOf

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (!IsRow(rows[i])) return;
    const TableView& table = tables.Of(i);
    if (table.steps == nullptr || table.formula != formula) return;
    const RowLayout& l = table.layout;
    float* const state = table.StateAt(rows[i]);
    uint32_t missed = 0;
    if (lanes.rank() == 0) {
      auto* const mark = reinterpret_cast<uint32_t*>(state + l.state_width - 1);
      const uint32_t was = AtomicLoad(mark);
      missed = static_cast<uint32_t>(table.steps->Missed(BitsToFloat(was)));
      const uint32_t now = FloatBits(table.steps->mark());
      if (missed != 0 && AtomicCompareExchange(mark, was, now) != was) missed = 0;
    }
    missed = lanes.FromLeader(missed);
    if (missed == 0) return;
    Rounding of_key = table.rounding;
    of_key.step = table.bring_step;
    of_key.key = table.KeyAt(rows[i]);
    BringColumns<Formula>(lanes, *table.steps, missed, l.dtype, l.dim, table.VectorAt(rows[i]),
                          state, of_key);
  }
};

// Brings copies of rows up to date: vectors[i] (float32) and state[i] are the copies of rows[i].
template <class Formula>
struct BringCopies {
  const CatchUpView* steps;
  const RowId* rows;
  float* vectors;
  float* state;
  int64_t dim, state_width;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    if (rows[i] == kNoRow) return;
    float* const of_row = state + i * static_cast<size_t>(state_width);
    float* const mark = of_row + state_width - 1;
    uint32_t missed = 0;
    if (lanes.rank() == 0) {
      missed = static_cast<uint32_t>(steps->Missed(*mark));
      *mark = missed != 0 ? steps->mark() : *mark;
    }
    missed = lanes.FromLeader(missed);
    if (missed == 0) return;
    BringColumns<Formula>(lanes, *steps, missed, DType::kFloat32, dim,
                          vectors + i * static_cast<size_t>(dim), of_row, Rounding{});
  }
};

// rows[i] = row `begin` + i if it is live, otherwise kNoRow.
struct ListLive {
  DeviceView view;
  const Counters* counters;
  uint64_t begin;
  RowId* rows;

  DYNEMB_HD void operator()(size_t i) const {
    const auto row = static_cast<RowId>(begin + i);
    const bool live = begin + i < counters->high_water && *view.UpdateAt(row) != 0;
    rows[i] = live ? row : kNoRow;
  }
};

// Sets the marks of rows[i].
struct MarkRows {
  DeviceView view;
  const RowId* rows;
  float mark;

  DYNEMB_HD void operator()(size_t i) const {
    if (rows[i] == kNoRow) return;
    view.StateAt(rows[i])[view.layout.state_width - 1] = mark;
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_CATCH_UP_H_
