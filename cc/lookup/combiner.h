// Combiner: how the vectors v_i of a bag become one vector. w_i are the weights (1 if there are
// none):
//
//   sum    Σ w_i v_i          mean   Σ w_i v_i / Σ w_i
//   max    max_i w_i v_i      sqrtn  Σ w_i v_i / sqrt(Σ w_i²)
//
// tf.nn.embedding_lookup_sparse, which has no max, has the same results. If a divisor is 0, the
// result is 0 (`div_no_nan`), even for infinite and NaN vectors. The result of an empty bag is 0,
// too. Weights are accumulated in float32. The bits are the same in host and device code.
#ifndef DYNEMB_LOOKUP_COMBINER_H_
#define DYNEMB_LOOKUP_COMBINER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cc/table/portability.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

enum class Combiner : uint8_t { kSum, kMean, kSqrtn, kMax };

inline Status ParseCombiner(const std::string& name, Combiner* combiner) {
  if (name == "sum") {
    *combiner = Combiner::kSum;
  } else if (name == "mean") {
    *combiner = Combiner::kMean;
  } else if (name == "sqrtn") {
    *combiner = Combiner::kSqrtn;
  } else if (name == "max") {
    *combiner = Combiner::kMax;
  } else {
    return InvalidArgument("combiner must be sum, mean, sqrtn or max, got '" + name + "'");
  }
  return {};
}

// Whether the sum of a bag is divided.
constexpr bool HasScale(Combiner c) { return c == Combiner::kMean || c == Combiner::kSqrtn; }

// The factor for the sum of a bag that has `count` ids and no weights.
DYNEMB_HD inline float BagScale(Combiner c, size_t count) {
  if (!HasScale(c)) return 1.0f;
  if (count == 0) return 0.0f;
  const float n = static_cast<float>(count);
  return 1.0f / (c == Combiner::kMean ? n : __builtin_sqrtf(n));
}

// Which ids count in their bags: all, except those whose row is kSkippedRow.
struct CountedRows {
  const RowId* rows = nullptr;  // [nnz]; null: all ids count
  DYNEMB_HD bool all() const { return rows == nullptr; }
  DYNEMB_HD bool operator()(size_t position) const {
    return rows == nullptr || rows[position] != kSkippedRow;
  }
};

// The factor for the weighted sum of `bag`; 0 means that the result is 0, whatever the sum is.
// `weights` is [nnz], or null for none. AnyBags has begin, end and position, like Bags.
template <class AnyBags, class Index>
DYNEMB_HD float BagScale(Combiner c, const AnyBags& bags, const float* weights, Index bag,
                         CountedRows counted = {}) {
  const auto begin = bags.begin(bag), end = bags.end(bag);
  if (!HasScale(c) || (weights == nullptr && counted.all())) return BagScale(c, end - begin);
  if (weights == nullptr) {
    size_t count = 0;
    for (auto i = begin; i < end; ++i) count += counted(bags.position(i));
    return BagScale(c, count);
  }
  float norm = 0.0f;
  for (auto i = begin; i < end; ++i) {
    const auto position = bags.position(i);
    if (!counted(position)) continue;
    const float w = weights[position];
    norm += c == Combiner::kMean ? w : w * w;
  }
  if (c == Combiner::kSqrtn) norm = __builtin_sqrtf(norm);
  return norm == 0.0f ? 0.0f : 1.0f / norm;
}

// The derivative of a bag's result with respect to one weight, along `upstream`. `dot` is the dot
// product of `upstream` and the id's vector; for max, over the columns that the id won.
// `pooled_dot` is the dot product of `upstream` and the bag's result, and `scale` is BagScale's
// result; both are read only if HasScale.
DYNEMB_HD inline float WeightDerivative(Combiner c, float dot, float pooled_dot, float weight,
                                        float scale) {
  switch (c) {
    case Combiner::kMean:  // Σ w v / Σ w
      return (dot - pooled_dot) * scale;
    case Combiner::kSqrtn:  // Σ w v / n, n = sqrt(Σ w²)
      return (dot - pooled_dot * weight * scale) * scale;
    case Combiner::kSum:
    case Combiner::kMax:
      break;
  }
  return dot;
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_COMBINER_H_
