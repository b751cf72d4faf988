// The kernels of a pooled lookup, which combine bags of vectors (combiner.h), and of the gradient
// of the ids' weights. One launch serves all tasks of a batch; each task is a part of it (parts.h).
// Source supplies the vectors (vector_sources.h).
//
// The results have the same bits as on the host, except for the bits of a NaN: the float32
// operations of BagCombiner and WeightGradientOfBags are done in the same order, whatever the width
// of the teams. Like row_math.h, this needs code without contraction.
//
// Weights, argmax and gradients are arrays per task.
#ifndef DYNEMB_DEVICE_KERNELS_POOL_H_
#define DYNEMB_DEVICE_KERNELS_POOL_H_

#include <cstdint>

#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/device/thread_lane.h"
#include "cc/device/vector_sources.h"
#include "cc/lookup/combiner.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// The ids of a task, in bags.
template <class Source>
struct BagsPart : Source::Part {
  BagsView bags;
  const float* weights = nullptr;  // [nnz], or null for none
  Combiner combiner = Combiner::kSum;
};

// --- Combining -------------------------------------------------------------------------------

template <class Source>
struct PoolPart : BagsPart<Source> {
  void* pooled = nullptr;  // out [num_bags, dim] of the vectors' dtype; zeros for an empty bag
  // out [num_bags, dim] for kMax: the position of the maximum (the first of equals); -1: empty bag
  int32_t* argmax = nullptr;
};

// The sums or maxima of four columns of a bag, while its ids are added in bag order.
struct ColumnSums {
  // Adding any number to -0 gives that number.
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

// For ForRows. Item i is a run of bags: `length` bags from bag i * length on, but none after
// `num_bags`. The bags of part p begin at parts.begin(p). Writes each bag's row of `pooled` and,
// for kMax, of `argmax`.
//
// The time of a run is the latency of reading vectors. A thread therefore reads several at once, if
// necessary those of several bags.
template <class Source>
struct PoolBags {
  using Part = PoolPart<Source>;
  using Vectors = typename Source::Vectors;

  Source source;
  Parts<Part> parts;
  size_t num_bags;
  uint32_t length;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const size_t end = (i + 1) * length < num_bags ? (i + 1) * length : num_bags;
    for (size_t at = i * length; at < end;) {
      const uint32_t p = parts.IndexOf(at), begin = parts.begin(p);
      const size_t last = parts.end(p) < end ? parts.end(p) : end;
      PoolPartOfRun(lanes, parts[p], static_cast<uint32_t>(at - begin),
                    static_cast<uint32_t>(last - begin));
      at = last;
    }
  }

 private:
  // The number of vectors that a thread reads at once.
  static constexpr uint32_t kInFlight = 4;

  template <class Lanes>
  DYNEMB_HD DYNEMB_INLINE void PoolPartOfRun(Lanes& lanes, const Part& part, uint32_t bag,
                                             uint32_t last) const {
    const Vectors vectors(source, part);
    const bool is_half = vectors.dtype() != DType::kFloat32;
    if (part.combiner == Combiner::kMax) {
      is_half ? Pool<uint16_t, ColumnMaxima>(lanes, part, vectors, bag, last)
              : Pool<float, ColumnMaxima>(lanes, part, vectors, bag, last);
    } else {
      is_half ? Pool<uint16_t, ColumnSums>(lanes, part, vectors, bag, last)
              : Pool<float, ColumnSums>(lanes, part, vectors, bag, last);
    }
  }

  // The bag of a run that is being combined, in some columns.
  template <class ColumnsOfBag>
  struct Current {
    uint32_t bag;
    uint32_t end;  // the place after its last id
    ColumnsOfBag columns{};
    bool any = false;  // whether it has an id that is not absent
  };

  // Combines the bags [bag, last). Element is float, or uint16_t for both 16-bit types.
  template <class Element, class Columns, class Lanes>
  DYNEMB_HD void Pool(Lanes& lanes, const Part& part, const Vectors& vectors, uint32_t bag,
                      uint32_t last) const {
    const uint32_t begin = part.bags.begin(bag), end = part.bags.begin(last);
    ForEachQuad(lanes, vectors.dim(), [&](int64_t first, int n) {
      Current<Columns> current{bag, part.bags.end(bag)};
      FinishBags(part, vectors, begin, last, first, n, &current);
      for (uint32_t place = begin; place < end;) {
        place = AddIds<Element>(part, vectors, place, end, last, first, n, &current);
      }
    });
  }

  // Writes the current bag if it ends at `place`, and all bags after it that are empty. Then the
  // next bag is the current one, unless it is `last`.
  template <class Columns>
  DYNEMB_HD DYNEMB_INLINE void FinishBags(const Part& part, const Vectors& vectors, uint32_t place,
                                          uint32_t last, int64_t first, int n,
                                          Current<Columns>* current) const {
    while (place == current->end) {
      const uint32_t bag = current->bag;
      // Zeros if the scale is 0, even if the sum is NaN, and if all ids are absent.
      Quad<float> pooled{};
      if (current->any) {
        const float scale =
            BagScale(part.combiner, part.bags, part.weights, bag, vectors.counted());
        if (scale != 0.0f) {
          for (int j = 0; j < kQuad; ++j) pooled.at[j] = current->columns.value.at[j] * scale;
        }
      }
      StoreColumns(vectors.dtype(), pooled, first, n, Rounding{},
                   static_cast<char*>(part.pooled) + bag * vectors.vector_bytes());
      current->columns.StoreArgmax(n, part.argmax, bag * vectors.dim() + first);
      if (bag + 1 == last) return;
      *current = Current<Columns>{bag + 1, part.bags.end(bag + 1)};
    }
  }

  // Adds columns [first, first + n) of some ids from `place` < end on: of up to kInFlight ids with
  // rows, or of one id without a row. Writes the bags that end with them. Returns the place after
  // these ids.
  template <class Element, class Columns>
  DYNEMB_HD DYNEMB_INLINE uint32_t AddIds(const Part& part, const Vectors& vectors, uint32_t place,
                                          uint32_t end, uint32_t last, int64_t first, int n,
                                          Current<Columns>* current) const {
    const uint32_t ids = end - place < kInFlight ? end - place : kInFlight;
    uint32_t position[kInFlight] = {};
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k < ids) position[k] = part.bags.position(place + k);
    }
    uint32_t row[kInFlight] = {};
    float weight[kInFlight] = {};
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k >= ids) continue;
      row[k] = vectors.Row(position[k]);
      weight[k] = part.weights != nullptr ? part.weights[position[k]] : 1.0f;
    }
    if (!vectors.Has(row[0])) {
      if (!vectors.Skips(row[0])) {
        current->any = true;
        current->columns.Add(position[0], weight[0], vectors.Columns(position[0], first, n));
      }
      FinishBags(part, vectors, place + 1, last, first, n, current);
      return place + 1;
    }
    uint32_t count = 1;
    DYNEMB_UNROLL
    for (uint32_t k = 1; k < kInFlight; ++k) {
      if (count == k && k < ids && vectors.Has(row[k])) ++count;
    }
    const char* vector[kInFlight] = {};
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k < count) vector[k] = vectors.Vector(row[k]);
    }
    Quad<Element> loaded[kInFlight] = {};
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k >= count) continue;
      loaded[k] = LoadQuad(reinterpret_cast<const Element*>(vector[k]) + first, n);
    }
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) {
      if (k >= count) continue;
      current->any = true;
      current->columns.Add(position[k], weight[k], ToFloats(vectors.dtype(), loaded[k]));
      FinishBags(part, vectors, place + k + 1, last, first, n, current);
    }
    return place + count;
  }
};

// --- The gradient of weights -----------------------------------------------------------------

// Values that the ids of a bag share, for combiners that divide.
struct BagTerms {
  float scale;
  float pooled_dot;
};

template <class Source>
struct WeightGradientPart : BagsPart<Source> {  // weights are not null
  const int32_t* argmax = nullptr;              // from PoolBags; for kMax
  const void* pooled = nullptr;    // [num_bags, dim] of the vectors' dtype, from PoolBags
  const void* upstream = nullptr;  // [num_bags, dim] of the same dtype: the gradient of `pooled`
  BagTerms* terms = nullptr;       // [num_bags] workspace, if HasScale
  float* gradient = nullptr;       // out [nnz]
};

// For ForEach. Item i is a bag. Writes its `terms` for BagWeightGradients; otherwise each id would
// have to read all weights of its bag.
template <class Source>
struct PrepareWeightGradients {
  Source source;
  Parts<WeightGradientPart<Source>> parts;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const WeightGradientPart<Source>& part = parts[p];
    if (!HasScale(part.combiner)) return;
    const auto bag = static_cast<uint32_t>(i - parts.begin(p));
    const typename Source::Vectors vectors(source, part);
    const char* const upstream = static_cast<const char*>(part.upstream);
    const char* const pooled = static_cast<const char*>(part.pooled);
    float dot = 0.0f;
    ThreadLane lane;
    ForEachQuad(lane, vectors.dim(), [&](int64_t first, int n) {
      const size_t at = bag * vectors.vector_bytes();
      const Quad<float> u = LoadColumns(vectors.dtype(), upstream + at, first, n);
      const Quad<float> v = LoadColumns(vectors.dtype(), pooled + at, first, n);
      // Zeros follow the last column. They do not change a sum that begins with 0.
      for (int j = 0; j < kQuad; ++j) dot += u.at[j] * v.at[j];
    });
    part.terms[bag] = {BagScale(part.combiner, part.bags, part.weights, bag, vectors.counted()),
                       dot};
  }
};

// For ForEach, after PrepareWeightGradients. Item i is an id, by its place in bag order; the places
// of part p begin at parts.begin(p). Writes the gradient of the id's weight. One thread adds up the
// columns, as on the host.
template <class Source>
struct BagWeightGradients {
  Source source;
  Parts<WeightGradientPart<Source>> parts;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const WeightGradientPart<Source>& part = parts[p];
    const typename Source::Vectors vectors(source, part);
    const auto place = static_cast<uint32_t>(i - parts.begin(p));
    const uint32_t position = part.bags.position(place);
    const size_t bag = part.bags.BagOf(place);
    const uint32_t row = vectors.Row(position);
    if (vectors.Skips(row)) {
      part.gradient[position] = 0.0f;
      return;
    }
    const bool has_row = vectors.Has(row);
    const char* const vector = has_row ? vectors.Vector(row) : nullptr;
    const char* const upstream =
        static_cast<const char*>(part.upstream) + bag * vectors.vector_bytes();
    const bool is_max = part.combiner == Combiner::kMax;
    float dot = 0.0f;
    ThreadLane lane;
    ForEachQuad(lane, vectors.dim(), [&](int64_t first, int n) {
      const Quad<float> u = LoadColumns(vectors.dtype(), upstream, first, n);
      const Quad<float> v = has_row ? LoadColumns(vectors.dtype(), vector, first, n)
                                    : vectors.Columns(position, first, n);
      for (int j = 0; j < kQuad; ++j) {
        if (j < n && (!is_max || part.argmax[bag * vectors.dim() + first + j] ==
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
