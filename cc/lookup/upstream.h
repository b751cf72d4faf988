// Upstream: what each id adds to the gradient of its key.
//
// With the gradient of the loss by the pooled vectors, `upstream` [num_bags, dim], the id at
// position i of bag b adds
//
//   sum, mean, sqrtn   weight_i × scale[b] × upstream[b]          (combiner.h)
//   max                in column c: weight_i × upstream[b, c] if argmax[b, c] == i, else 0
//
// Who sums per key (Backward, Gather) calls Add for stretches of ids of the same few keys.
//
// Contract. Prepare once, by one thread; then Add from several, on sums apart from each other. What
// the task points to must stay. Reusable scratch.
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
  Bags* bags = nullptr;            // its BuildBagOf is called; not shared by tasks
  const float* weights = nullptr;  // [nnz], or null for none
  Combiner combiner = Combiner::kSum;
  const int32_t* argmax = nullptr;  // [num_bags, dim], for max only: position in nnz, or -1
  DType dtype = DType::kFloat32;    // of upstream
  const void* upstream = nullptr;   // [num_bags, dim], or
  const void* const* upstream_rows = nullptr;  // [num_bags]: the address of each row
  int64_t dim = 0;
};

class Upstream {
 public:
  // Ids that are added at a time.
  static constexpr size_t kChunk = 256;

  // What is missing or wrong.
  static Status Check(const UpstreamTask& task);
  // The task has passed the check.
  void Prepare(Exec& exec, const UpstreamTask& task);

  // For each j < n <= kChunk: the term of positions[j] is added to row local[j] of `sums`, or
  // stored there if is_first[j]: the memory need not be initialised.
  void Add(const uint32_t* positions, const uint32_t* local, const bool* is_first, size_t n,
           float* sums) const;

 private:
  UpstreamTask task_;
  std::vector<float> scales_;  // [num_bags] if scale_by_bag_
  bool scale_by_bag_ = false;
  float scale_ = 1.0f;        // of every bag, otherwise
  std::vector<float> zeros_;  // stands in for the upstream row of a bag whose divisor is 0
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_UPSTREAM_H_
