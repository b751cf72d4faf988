// The kernels of ApplyPooled (device_apply_pooled.h), which also uses kernels of SumGradients. One
// launch sums the gradients of each row and applies an optimizer's step to the row.
//
// As in SumGradients, the ids of all tasks are sorted, and a window of them is summed by a team.
// But they are sorted by row instead of by key, so that no election has to number the keys, and the
// team that has a sum steps the row at once. The sum is never written. The steps, in this order:
//
//   ListIds<FoundNumbers>, SortPairs    bring the ids of each row together, in order
//   FlagLast, a sum, ReadBegins         number the rows that have ids
//   ListStepped                         finds the present row of each of them, and lists the terms
//   SumSegments, AddChunks              as in SumGradients, with SteppedSums
#ifndef DYNEMB_DEVICE_KERNELS_APPLY_POOLED_H_
#define DYNEMB_DEVICE_KERNELS_APPLY_POOLED_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/kernels.h"
#include "cc/device/kernels_gradient.h"
#include "cc/device/kernels_segments.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/device/thread_lane.h"
#include "cc/table/optimizer_formulas.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// For ListIds: the number of an id is the number of its row; also writes found[position], the row.
// Task t has the numbers from begins[t] on (NumbersOf). Ids without a row have the last of them.
//
// If there are fewer rows than when the id was looked up, the table has been cleared. Where rows
// may move, the key's present row counts, if it has one. Its number differs from the number of a
// found row, which another key's id may have.
struct FoundNumbers {
  Parts<GradientPart> parts;
  TableViews tables;
  const uint32_t* begins;  // [tasks + 1]
  RowId* found;

  // The numbers of a task whose table has at most `rows` rows.
  static constexpr uint64_t NumbersOf(uint64_t rows, bool rows_move) {
    return (rows_move ? 2 * rows : rows) + 1;
  }

  DYNEMB_HD uint32_t operator()(uint32_t t, uint32_t position) const {
    const TableView& table = tables[t];
    const uint32_t none = begins[t + 1] - 1, numbers = none - begins[t];
    const uint32_t rows = table.rows_move ? numbers / 2 : numbers;
    RowId row = parts[t].task.rows[position - parts.begin(t)];
    uint32_t first = begins[t];
    if (IsRow(row) && row >= rows) {
      ThreadLane lane;
      const uint64_t key = parts[t].keys()[position - parts.begin(t)];
      row = table.rows_move ? table.Find(lane, key).row : kNoRow;
      first += rows;
    }
    found[position] = row;
    return IsRow(row) ? first + row : none;
  }
};

// flags[i] = whether the sorted number i is the last of its kind; flags[n] = 0. Their sum is then
// the number of different numbers before i.
struct FlagLast {
  const uint32_t* numbers;
  size_t n;
  uint32_t* flags;

  DYNEMB_HD void operator()(size_t i) const {
    flags[i] = i + 1 == n || (i + 1 < n && numbers[i] != numbers[i + 1]) ? 1 : 0;
  }
};

// A row to step, and the position of its first id.
struct alignas(8) SteppedRow {
  RowId row;
  uint32_t position;
};

// For ListTerms: nothing is to be written of a row's first id.
struct NothingOfFirst {
  DYNEMB_HD void operator()(uint32_t, uint32_t, uint32_t) const {}
};

// Item i is the i-th of the sorted ids. Lists its term, and resolves its row. The first id of a row
// has the row, if the row still belongs to the key (ResolvedRow). The other ids of the row count as
// refused: they have no separate gradient. The elected id of a key without a row has kNoRow, and
// the other ids of the key count as refused, too. So every key is counted once (CountApplied).
struct ListStepped {
  TableViews tables;
  ListTerms<NothingOfFirst> list;  // its keys are the numbers of the rows
  const RowId* found;              // by position
  const uint32_t* places;          // of ElectPositions, for ids without a row
  const uint32_t* of;
  RowId* rows;          // by position
  RowId* firsts;        // by sorted id: the row of a first id; kNoRow for the others
  SteppedRow* stepped;  // by number

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint32_t number = list.keys[i], position = list.positions[i];
    const bool first = i == 0 || list.keys[i - 1] != number;
    RowId row = found[position];
    if (row == kNoRow) {
      if (places[of[position]] != position) row = kUnadmittedRow;
    } else if (IsRow(row)) {
      const uint32_t t = list.parts.IndexOf(position);
      const uint64_t key = list.parts[t].keys()[position - list.parts.begin(t)];
      row = first ? ResolvedRow(lanes, tables[t], key, row) : kUnadmittedRow;
    }
    if (lanes.rank() != 0) return;
    list(i);
    rows[position] = row;
    firsts[i] = first ? row : kNoRow;
    if (first) stepped[number] = {row, position};
  }
};

// The `Sums` of ApplyPooled (kernels_segments.h): a key is a row, and a sum steps it. Everything is
// whole, and the formula is one of single columns.
template <class Formula>
struct SteppedSums {
  static_assert(!formulas::kIsRowwise<Formula>);
  static constexpr unsigned int kLeastBlocks = 0;

  // The table fields that a step reads; kept in registers while a window is summed.
  struct Target {
    RowHead* heads;
    TieredRows rows;
    uint32_t state, mark;  // offsets in a row's contents
    int64_t dim;
    Stamp now;
    float step_mark;
    const float* valid;  // an address of `dim` floats
  };
  SortedTerms terms;
  TableViews tables;
  const uint32_t* begins;  // [tasks + 1], of numbers
  const RowId* firsts;     // of ListStepped
  const SteppedRow* stepped;
  uint32_t* nonfinite;  // by position, zeros at first; 1: the gradient has a NaN or Inf
  OptimizerCoefficients coefficients;
  uint32_t num_keys;

  DYNEMB_HD uint32_t TaskOf(uint32_t number) const {
    return RangeOf(begins, terms.parts.count, number);
  }
  DYNEMB_HD uint32_t KeysEnd(uint32_t t) const { return begins[t + 1]; }
  DYNEMB_HD int64_t dim(uint32_t t) const { return terms.parts[t].task.dim; }
  DYNEMB_HD Target TargetOf(uint32_t t) const {
    const TableView& table = tables[t];
    const RowLayout& l = table.layout;
    Target target{};
    target.heads = table.heads;
    target.rows = table.rows;
    target.state = static_cast<uint32_t>(l.state_offset - l.vector_offset);
    target.mark = target.state + static_cast<uint32_t>(l.state_bytes() - sizeof(float));
    target.dim = l.dim;
    target.now = table.now;
    target.step_mark = table.step_mark;
    target.valid = static_cast<const float*>(terms.parts[t].task.upstream);
    return target;
  }
  // The row, or no row.
  using Place = RowId;
  static constexpr bool kSteps = true;
  static constexpr uint32_t kInFlight = 4;
  DYNEMB_HD RowId PlaceOf(uint32_t term) const { return firsts[term]; }
  DYNEMB_HD RowId PlaceOfKey(uint32_t number) const { return stepped[number].row; }
  DYNEMB_HD DYNEMB_INLINE void Prefetch(const Target& target, RowId place, int64_t column) const {
    if (!IsRow(place)) return;
    const char* const at = target.rows.At(place) + column * static_cast<int64_t>(sizeof(float));
    device::Prefetch(at);
    for (int k = 0; k < Formula::kStates; ++k) {
      device::Prefetch(at + target.state + static_cast<size_t>(k * target.dim) * sizeof(float));
    }
  }
  DYNEMB_HD DYNEMB_INLINE void Put(const Target& target, uint32_t number, RowId place,
                                   const Quad<float>& sum, int64_t column) const {
    if (!IsRow(place)) return;
    char* const row = target.rows.At(place);
    auto* const state = reinterpret_cast<float*>(row + target.state);
    RowQuad<Formula> quad;
    quad.template Load<true>(DType::kFloat32, target.dim, row, state, column, kQuad);
    quad.Step(coefficients, sum);
    quad.template Store<true>(DType::kFloat32, target.dim, row, state, Rounding{}, column, kQuad);
    if (!IsFinite(sum)) AtomicStore(&nonfinite[stepped[number].position], 1u);
    if (column != 0) return;
    if (target.step_mark >= 0) *reinterpret_cast<float*>(row + target.mark) = target.step_mark;
    target.heads[place].update = target.now;
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_APPLY_POOLED_H_
