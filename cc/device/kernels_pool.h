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
  float* scales = nullptr;  // [num_bags], from ScalePooled; null: all bags have `scale`
  float scale = 1.0f;
};

// For ForEach, before PoolBags. Item i is a bag; the bags of part p with `scales` begin at
// parts.begin(p), and there are none of other parts. Writes the factor of the bag's sum.
template <class Source>
struct ScalePooled {
  Source source;
  Parts<PoolPart<Source>> parts;

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const PoolPart<Source>& part = parts[p];
    const auto bag = static_cast<uint32_t>(i - parts.begin(p));
    const typename Source::Vectors vectors(source, part);
    part.scales[bag] = BagScale(part.combiner, part.bags, part.weights, bag, vectors.counted());
  }
};

// The sums or maxima of four columns of a bag, while its ids are added in bag order.
struct ColumnSums {
  static constexpr bool kPositions = false;
  // Adding any number to -0 gives that number.
  Quad<float> value{{-0.0f, -0.0f, -0.0f, -0.0f}};

  DYNEMB_HD DYNEMB_INLINE void Add(uint32_t, float weight, const Quad<float>& v) {
    for (int j = 0; j < kQuad; ++j) value.at[j] += weight * v.at[j];
  }
  DYNEMB_HD DYNEMB_INLINE void StoreArgmax(int, int32_t*, size_t) const {}
};
struct ColumnMaxima {
  static constexpr bool kPositions = true;  // of the ids that are added
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
// The time of a run is the latency of reading vectors. A team therefore reads several at once, if
// necessary from several bags. Each thread finds the vector of another id, and passes it on when
// it is needed.
template <class Source>
struct PoolBags {
  using Part = PoolPart<Source>;
  using Vectors = typename Source::Vectors;
  static constexpr unsigned int kLeastBlocks = Source::kLeastBlocks;

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
  // The number of vectors that a thread reads at once, at most the width of the team.
  template <class Lanes>
  static constexpr uint32_t kInFlight = Lanes::width() < Source::kInFlight ? 4 : Source::kInFlight;

  template <class Lanes>
  DYNEMB_HD DYNEMB_INLINE void PoolPartOfRun(Lanes& lanes, const Part& part, uint32_t bag,
                                             uint32_t last) const {
    const Vectors vectors(source, part);
    const bool is_half = vectors.dtype() != DType::kFloat32;
    if (part.combiner == Combiner::kMax) {
      is_half ? Pool<uint16_t, ColumnMaxima, false>(lanes, part, vectors, bag, last)
              : Pool<float, ColumnMaxima, false>(lanes, part, vectors, bag, last);
    } else if (is_half) {
      Pool<uint16_t, ColumnSums, false>(lanes, part, vectors, bag, last);
    } else if (vectors.AreWhole() && IsAligned(part.pooled)) {
      Pool<float, ColumnSums, true>(lanes, part, vectors, bag, last);
    } else {
      Pool<float, ColumnSums, false>(lanes, part, vectors, bag, last);
    }
  }

  // An id, as the thread that has it knows it.
  struct Id {
    const char* vector = nullptr;  // null: it has no row
    float weight = 1.0f;
    uint32_t position = 0;
    uint32_t row = 0;
  };

  // The fields of a part that finishing a bag reads, as a copy: the compiler cannot know that
  // stores do not change the part.
  struct Output {
    BagsView bags;
    char* pooled;
    uint32_t vector_bytes;
    DType dtype;
    const float* scales;
    float scale;
    uint32_t last;  // the bag after the run
  };

  // The bag of a run that is being combined, in some columns.
  template <class ColumnsOfBag>
  struct Current {
    uint32_t bag;
    uint32_t end;  // the place after its last id
    ColumnsOfBag columns{};
    bool any = false;  // whether it has an id that is not absent
  };

  // Combines the bags [bag, last). Element is float, or uint16_t for both 16-bit types. kWhole:
  // vectors and pooled vectors are whole (row_math.h).
  template <class Element, class Columns, bool kWhole, class Lanes>
  DYNEMB_HD void Pool(Lanes& lanes, const Part& part, const Vectors& vectors, uint32_t bag,
                      uint32_t last) const {
    const Output output{part.bags,
                        static_cast<char*>(part.pooled),
                        static_cast<uint32_t>(vectors.vector_bytes()),
                        vectors.dtype(),
                        part.scales,
                        part.scale,
                        last};
    const uint32_t begin = output.bags.begin(bag), end = output.bags.begin(last);
    // As in ForEachQuad, but threads without columns (n is 0) take part in the collectives.
    const int64_t dim = vectors.dim();
    for (int64_t base = 0; base < dim; base += int64_t{kQuad} * lanes.width()) {
      const int64_t first = base + int64_t{kQuad} * lanes.rank(), left = dim - first;
      const int n = static_cast<int>(left < 0 ? 0 : left < kQuad ? left : kQuad);
      Current<Columns> current{bag, output.bags.end(bag)};
      FinishBags<kWhole>(output, part, vectors, begin, first, n, &current);
      for (uint32_t at = begin; at < end; at += lanes.width()) {
        const uint32_t count = end - at < lanes.width() ? end - at : lanes.width();
        Id id;
        if (lanes.rank() < count) {
          id.position = output.bags.position(at + lanes.rank());
          id.row = vectors.Row(id.position);
          if (part.weights != nullptr) id.weight = part.weights[id.position];
          if (vectors.Has(id.row)) id.vector = vectors.Vector(id.row);
        }
        for (uint32_t done = 0; done < count;) {
          done += AddIds<Element, kWhole>(lanes, output, part, vectors, id, at, done, count, first,
                                          n, &current);
        }
      }
    }
  }

  // Writes the current bag if it ends at `place`, and all bags after it that are empty. Then the
  // next bag is the current one, unless the run ends.
  template <bool kWhole, class Columns>
  DYNEMB_HD DYNEMB_INLINE void FinishBags(const Output& output, const Part& part,
                                          const Vectors& vectors, uint32_t place, int64_t first,
                                          int n, Current<Columns>* current) const {
    while (place == current->end) {
      const uint32_t bag = current->bag;
      // Zeros if the scale is 0, even if the sum is NaN, and if all ids are absent.
      Quad<float> pooled{};
      if (current->any) {
        const float scale = output.scales != nullptr ? output.scales[bag] : output.scale;
        if (scale != 0.0f) {
          for (int j = 0; j < kQuad; ++j) pooled.at[j] = current->columns.value.at[j] * scale;
        }
      }
      if (n != 0) {
        StoreColumns<kWhole>(output.dtype, pooled, first, n, Rounding{},
                             output.pooled + size_t{bag} * output.vector_bytes);
        current->columns.StoreArgmax(n, part.argmax, bag * vectors.dim() + first);
      }
      if (bag + 1 == output.last) return;
      *current = Current<Columns>{bag + 1, output.bags.end(bag + 1)};
    }
  }

  // Adds columns [first, first + n) of some of the `count` ids that begin at place `at`, and of
  // which thread r has the r-th: from number `done` on up to kInFlight ids with rows, or one id
  // without a row. Writes the bags that end with them. Returns the number of these ids.
  template <class Element, bool kWhole, class Columns, class Lanes>
  DYNEMB_HD DYNEMB_INLINE uint32_t AddIds(Lanes& lanes, const Output& output, const Part& part,
                                          const Vectors& vectors, const Id& id, uint32_t at,
                                          uint32_t done, uint32_t count, int64_t first, int n,
                                          Current<Columns>* current) const {
    constexpr uint32_t kAtOnce = kInFlight<Lanes>;
    const char* vector[kAtOnce];
    vector[0] = lanes.FromRank(id.vector, done);
    if (vector[0] == nullptr) {
      if (!vectors.Skips(lanes.FromRank(id.row, done))) {
        const uint32_t position = lanes.FromRank(id.position, done);
        const float weight = lanes.FromRank(id.weight, done);
        current->any = true;
        if (n != 0) current->columns.Add(position, weight, vectors.Columns(position, first, n));
      }
      FinishBags<kWhole>(output, part, vectors, at + done + 1, first, n, current);
      return 1;
    }
    // All loads are issued; loads past the end read the first vector. The compiler may copy a value
    // that is loaded under a condition, and the copy would wait for the memory.
    uint32_t rows = 1;
    DYNEMB_UNROLL
    for (uint32_t k = 1; k < kAtOnce; ++k) {
      const bool is_id = done + k < count;
      const char* const next = lanes.FromRank(id.vector, is_id ? done + k : done);
      if (rows == k && is_id && next != nullptr) ++rows;
      vector[k] = next != nullptr ? next : vector[0];
    }
    Quad<Element> loaded[kAtOnce];
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const auto* const from = reinterpret_cast<const Element*>(vector[k]);
      loaded[k] =
          kWhole ? LoadQuad<true>(from + (n != 0 ? first : 0), kQuad) : LoadQuad(from + first, n);
    }
    DYNEMB_UNROLL
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (k >= rows) continue;
      current->any = true;
      uint32_t position = 0;
      if constexpr (Columns::kPositions) position = lanes.FromRank(id.position, done + k);
      current->columns.Add(position, lanes.FromRank(id.weight, done + k),
                           ToFloats(output.dtype, loaded[k]));
      FinishBags<kWhole>(output, part, vectors, at + done + k + 1, first, n, current);
    }
    return rows;
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
