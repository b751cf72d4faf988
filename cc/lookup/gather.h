// Gather: pools vectors that are stored in arrays, selected by index, and takes gradients back to
// them. This is the work of a rank on rows that other ranks sent it (route.h); Pool and Backward do
// the same with a table.
//
//   vectors  [n, dim]      one row for each key of a request, in one array or by their addresses
//   index    [nnz]         the row of each id; every row of a request has at least one id
#ifndef DYNEMB_LOOKUP_GATHER_H_
#define DYNEMB_LOOKUP_GATHER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/split.h"
#include "cc/lookup/upstream.h"
#include "cc/lookup/weight_gradient.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

struct GatherTask : BagTask {
  const void* vectors = nullptr;
  const void* const* rows = nullptr;  // [n] addresses; null: `vectors` is an array
  size_t n = 0;
  const uint32_t* index = nullptr;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
};

// InvalidArgument if an index is n or more. Call before anything is written.
Status CheckIndex(Exec& exec, const uint32_t* index, size_t nnz, size_t n);
// The caller has checked the indices.
void GatherPool(Exec& exec, const std::vector<GatherTask>& tasks);

struct GatherWeightTask : BagWeightTask {
  const void* vectors = nullptr;  // vectors or rows, as in GatherTask
  const void* const* rows = nullptr;
  size_t n = 0;  // rows; not read on the host, where the indices have been checked
  const uint32_t* index = nullptr;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
};

void GatherWeightGradient(Exec& exec, const std::vector<GatherWeightTask>& tasks);

// The gradient of each row: the sum of the terms that its ids add (upstream.h), feature after
// feature, in the order of the ids. One thread sums a range of rows, without atomics, so the bits
// are the same for any number of threads.
class GatherGradient {
 public:
  struct Feature : UpstreamTask {
    const uint32_t* index = nullptr;
  };
  // The sums of some consecutive rows.
  struct Output {
    size_t rows;
    float* sums;
  };
  struct Task {
    std::vector<Feature> features;  // of one dim
    size_t n = 0;
    int64_t dim = 0;
    float* sums = nullptr;  // out [n, dim]; zeros for a row without ids
    // The outputs if they are not one array: for the first rows, the next rows, and so on, n rows
    // in all. `sums` is then not used.
    std::vector<Output> outputs{};
  };

  // InvalidArgument if a task is not valid; the message names the task and the problem. Does not
  // read indices.
  static Status Check(const std::vector<Task>& tasks);
  // Fails only if Check or CheckIndex does. The object is reusable scratch: only one call at a
  // time.
  Status Run(Exec& exec, const std::vector<Task>& tasks);
  // Frees memory that only a huge batch needs.
  void Shrink();

 private:
  struct Prepared {
    size_t nnz = 0;
    Upstream upstream;
    Split<uint32_t> split;  // of the indices, by range of rows
  };

  void PlaceRange(const Task& task, const std::vector<const Prepared*>& features,
                  size_t range) const;
  // Sums rows [begin, end) of the range. `sums` is where the sum of row `begin` goes.
  void SumRows(const Task& task, const std::vector<const Prepared*>& features, size_t range,
               size_t begin, size_t end, float* sums) const;

  std::deque<Prepared> prepared_;  // one per feature, for all tasks
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_GATHER_H_
