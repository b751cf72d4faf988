// The kernels of a pooled lookup: bodies (kernels.h) that combine bags of rows (combiner.h), and
// the derivative by the weights of their ids. One launch serves all tasks of a batch; each is a
// part of it (parts.h).
//
// The results are those of the host, bit by bit but for which NaN a NaN is: the float32 operations
// of BagCombiner and of WeightGradientOfBags are done in the same order, whatever the team's width.
// As row_math.h, this needs code without contraction.
//
// `keys` and `rows` are arrays of the whole batch: the id at position p of a task is at first_id +
// p. A row is that of its key, or kNoRow: then the id counts with the vector that its key starts
// with. Weights, argmax and gradients are arrays of one task.
#ifndef DYNEMB_DEVICE_KERNELS_POOL_H_
#define DYNEMB_DEVICE_KERNELS_POOL_H_

#include <cstdint>

#include "cc/device/flat_index.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/device/thread_lane.h"
#include "cc/lookup/combiner.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// The ids of a task, in bags.
struct BagsPart {
  BagsView bags;
  uint32_t first_id = 0;
  uint32_t table = 0;              // in TableViews
  const float* weights = nullptr;  // [nnz], or null for none
  Combiner combiner = Combiner::kSum;
};

// --- Combining -------------------------------------------------------------------------------

struct PoolPart : BagsPart {
  void* pooled = nullptr;  // out [num_bags, dim] of the table's dtype; zeros for an empty bag
  int32_t* argmax =
      nullptr;  // out [num_bags, dim] for kMax: the position in nnz, the first of equals; -1: empty
};

// Four columns of a bag while its ids are added, in bag order.
struct ColumnSums {
  // Any number added to -0 is that number.
  Quad<float> value{{-0.0f, -0.0f, -0.0f, -0.0f}};

  DYNEMB_HD DYNEMB_INLINE void Add(uint32_t, float weight, const Quad<float>& v) {
    for (int j = 0; j < kQuad; ++j) value.at[j] += weight * v.at[j];
  }
  DYNEMB_HD DYNEMB_INLINE void StoreArgmax(int, int32_t*, size_t) const {}
};
struct ColumnMaxima {
  Quad<float> value{};
  Quad<int32_t> argmax{{-1, -1, -1, -1}};

  DYNEMB_HD DYNEMB_INLINE void Add(uint32_t position, float weight, const Quad<float>& v) {
    for (int j = 0; j < kQuad; ++j) {
      const float weighted = weight * v.at[j];
      if (argmax.at[j] != -1 && !(weighted > value.at[j])) continue;
      value.at[j] = weighted;
      argmax.at[j] = static_cast<int32_t>(position);
    }
  }
  DYNEMB_HD DYNEMB_INLINE void StoreArgmax(int n, int32_t* to, size_t at) const {
    StoreQuad(argmax, n, to + at);
  }
};

// ForRows; item i is a bag: of part p those from parts.begin(p) on. Writes the bag's row of
// `pooled` and, for kMax, of `argmax`.
struct PoolBags {
  TableViews tables;
  Parts<PoolPart> parts;
  KeyArray keys;
  const RowId* rows;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const PoolPart& part = parts[p];
    const auto bag = static_cast<uint32_t>(i - parts.begin(p));
    const bool is_half = tables[part.table].layout.dtype != DType::kFloat32;
    if (part.combiner == Combiner::kMax) {
      is_half ? Pool<uint16_t, ColumnMaxima>(lanes, part, bag)
              : Pool<float, ColumnMaxima>(lanes, part, bag);
    } else {
      is_half ? Pool<uint16_t, ColumnSums>(lanes, part, bag)
              : Pool<float, ColumnSums>(lanes, part, bag);
    }
  }

 private:
  // Rows that a thread reads at once: what a bag takes is the time that it waits for them.
  static constexpr uint32_t kInFlight = 4;

  // Element is the table's, or uint16_t for any of 16 bits.
  template <class Element, class Columns, class Lanes>
  DYNEMB_HD void Pool(Lanes& lanes, const PoolPart& part, uint32_t bag) const {
    const RowLayout& layout = tables[part.table].layout;
    const size_t begin = part.bags.begin(bag), end = part.bags.end(bag);
    const float scale = begin == end ? 0.0f : BagScale(part.combiner, part.bags, part.weights, bag);
    ForEachQuad(lanes, layout.dim, [&](int64_t first, int n) {
      Columns columns;
      for (size_t place = begin; place < end;) {
        place += AddIds<Element>(part, place, end, first, n, &columns);
      }
      Quad<float> pooled{};  // for a scale of 0, whatever the sum is, NaN too
      if (scale != 0.0f) {
        for (int j = 0; j < kQuad; ++j) pooled.at[j] = columns.value.at[j] * scale;
      }
      StoreColumns(layout.dtype, pooled, first, n, Rounding{},
                   static_cast<char*>(part.pooled) + bag * layout.vector_bytes());
      columns.StoreArgmax(n, part.argmax, bag * layout.dim + first);
    });
  }

  // Adds columns [first, first + n) of the ids from `place` < end on: of those that have rows, as
  // many as are read at once, or of a single one that has none. Returns how many ids that were.
  template <class Element, class Columns>
  DYNEMB_HD DYNEMB_INLINE uint32_t AddIds(const PoolPart& part, size_t place, size_t end,
                                          int64_t first, int n, Columns* columns) const {
    const TableView& table = tables[part.table];
    const auto ids = static_cast<uint32_t>(end - place < kInFlight ? end - place : kInFlight);
    uint32_t position[kInFlight] = {};
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k < ids) position[k] = part.bags.position(static_cast<uint32_t>(place) + k);
    }
    RowId row[kInFlight] = {};
    float weight[kInFlight] = {};
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k >= ids) continue;
      row[k] = rows[size_t{part.first_id} + position[k]];
      weight[k] = part.weights != nullptr ? part.weights[position[k]] : 1.0f;
    }
    if (row[0] == kNoRow) {
      const uint64_t key = keys[size_t{part.first_id} + position[0]];
      columns->Add(position[0], weight[0],
                   InitialColumns(table.initial, key, table.layout.dtype, first, n));
      return 1;
    }
    uint32_t count = 1;
    for (uint32_t k = 1; k < kInFlight; ++k) {
      if (count == k && k < ids && row[k] != kNoRow) ++count;
    }
    Quad<Element> loaded[kInFlight] = {};
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k >= count) continue;
      const char* const vector = table.layout.vector(table.RowAt(row[k]));
      loaded[k] = LoadQuad(reinterpret_cast<const Element*>(vector) + first, n);
    }
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k >= count) continue;
      columns->Add(position[k], weight[k], ToFloats(table.layout.dtype, loaded[k]));
    }
    return count;
  }
};

// --- The gradient of weights -----------------------------------------------------------------

// What the ids of a bag share, for combiners that divide.
struct BagTerms {
  float scale;
  float pooled_dot;
};

struct WeightGradientPart : BagsPart {  // weights are not null
  const int32_t* argmax = nullptr;      // as PoolBags gave it; for kMax
  const void* pooled = nullptr;         // [num_bags, dim] of the table's dtype: what PoolBags gave
  const void* upstream = nullptr;       // the same: the gradient of `pooled`
  BagTerms* terms = nullptr;            // [num_bags] workspace, if HasScale
  float* gradient = nullptr;            // out [nnz]
};

// ForEach; item i is a bag. Writes its `terms`, which BagWeightGradients reads: an id alone would
// need all weights of its bag.
struct PrepareWeightGradients {
  TableViews tables;
  Parts<WeightGradientPart> parts;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const WeightGradientPart& part = parts[p];
    if (!HasScale(part.combiner)) return;
    const auto bag = static_cast<uint32_t>(i - parts.begin(p));
    const RowLayout& layout = tables[part.table].layout;
    const char* const upstream = static_cast<const char*>(part.upstream);
    const char* const pooled = static_cast<const char*>(part.pooled);
    float dot = 0.0f;
    ThreadLane lane;
    ForEachQuad(lane, layout.dim, [&](int64_t first, int n) {
      const size_t at = bag * layout.vector_bytes();
      const Quad<float> u = LoadColumns(layout.dtype, upstream + at, first, n);
      const Quad<float> v = LoadColumns(layout.dtype, pooled + at, first, n);
      // Behind the last column are zeros, which change no sum that begins with 0.
      for (int j = 0; j < kQuad; ++j) dot += u.at[j] * v.at[j];
    });
    part.terms[bag] = {BagScale(part.combiner, part.bags, part.weights, bag), dot};
  }
};

// ForEach, after PrepareWeightGradients; item i is a place in bag order, of one id: of part p those
// from parts.begin(p) on. Writes the id's gradient. One thread adds up the columns, as on the host.
struct BagWeightGradients {
  TableViews tables;
  Parts<WeightGradientPart> parts;
  KeyArray keys;
  const RowId* rows;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const WeightGradientPart& part = parts[p];
    const TableView& table = tables[part.table];
    const RowLayout& layout = table.layout;
    const auto place = static_cast<uint32_t>(i - parts.begin(p));
    const uint32_t position = part.bags.position(place);
    const size_t bag = part.bags.BagOf(place);
    const RowId row = rows[size_t{part.first_id} + position];
    const uint64_t key = keys[size_t{part.first_id} + position];
    const char* const vector = row == kNoRow ? nullptr : layout.vector(table.RowAt(row));
    const char* const upstream =
        static_cast<const char*>(part.upstream) + bag * layout.vector_bytes();
    const bool is_max = part.combiner == Combiner::kMax;
    float dot = 0.0f;
    ThreadLane lane;
    ForEachQuad(lane, layout.dim, [&](int64_t first, int n) {
      const Quad<float> u = LoadColumns(layout.dtype, upstream, first, n);
      const Quad<float> v = vector == nullptr
                                ? InitialColumns(table.initial, key, layout.dtype, first, n)
                                : LoadColumns(layout.dtype, vector, first, n);
      for (int j = 0; j < kQuad; ++j) {
        if (j < n && (!is_max || part.argmax[bag * layout.dim + first + j] ==
                                     static_cast<int32_t>(position))) {
          dot += u.at[j] * v.at[j];
        }
      }
    });
    const BagTerms terms = HasScale(part.combiner) ? part.terms[bag] : BagTerms{};
    part.gradient[position] =
        WeightDerivative(part.combiner, dot, terms.pooled_dot, part.weights[position], terms.scale);
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_KERNELS_POOL_H_
