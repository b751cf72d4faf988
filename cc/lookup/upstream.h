// Upstream: the term that each id adds to the gradient of its key.
//
// `upstream` [num_bags, dim] is the gradient of the loss with respect to the pooled vectors. The id
// at position i, in bag b, adds
//
//   sum, mean, sqrtn   weight_i × scale[b] × upstream[b]          (combiner.h)
//   max                in column c: weight_i × upstream[b, c] if argmax[b, c] == i, otherwise 0
//
// An id whose key was refused by admission adds zeros; if its row is kSkippedRow, it does not count
// in scale[b] either.
//
// Classes that sum per key (Backward, GatherGradient) call Add for ranges of ids with few keys.
//
// Contract. One thread calls Prepare; then several threads may call Add, each with its own sums.
// Everything that the task points to must stay valid. An Upstream is reusable scratch.
#ifndef DYNEMB_LOOKUP_UPSTREAM_H_
#define DYNEMB_LOOKUP_UPSTREAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/lookup/bags.h"
#include "cc/lookup/combiner.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

struct UpstreamTask {
  Bags* bags = nullptr;            // Prepare calls BuildBagOf; tasks must not share it
  const float* weights = nullptr;  // [nnz], or null for none
  Combiner combiner = Combiner::kSum;
  const int32_t* argmax = nullptr;  // [num_bags, dim], for max only: position in nnz, -1: none
  DType dtype = DType::kFloat32;    // of upstream
  // The gradient: upstream_rows if it is not null, otherwise `upstream`.
  const void* upstream = nullptr;              // [num_bags, dim]
  const void* const* upstream_rows = nullptr;  // [num_bags]: the address of each row
  int64_t dim = 0;
  const RowId* rows = nullptr;  // [nnz], as the lookup returned them; null: no id was refused
};

class Upstream {
 public:
  // The most ids per call of Add.
  static constexpr size_t kChunk = 256;

  // InvalidArgument if a member of the task is missing or not valid.
  static Status Check(const UpstreamTask& task);
  // `task` must pass Check.
  void Prepare(Exec& exec, const UpstreamTask& task);

  // For each j < n <= kChunk, adds the term of positions[j] to row local[j] of `sums`. If
  // is_first[j], the term is stored there instead, so the memory need not be initialized.
  void Add(const uint32_t* positions, const uint32_t* local, const bool* is_first, size_t n,
           float* sums) const;

 private:
  // Sets any_refused_, and whether any id is absent from its bag.
  void FindRefused(Exec& exec, bool* any_skipped);

  UpstreamTask task_;
  bool any_refused_ = false;
  std::vector<float> scales_;  // [num_bags] if scale_by_bag_
  bool scale_by_bag_ = false;
  float scale_ = 1.0f;  // of every bag, if not scale_by_bag_
  // Replaces the upstream row of a bag whose divisor is 0, and of an id that was refused.
  std::vector<float> zeros_;
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_UPSTREAM_H_
