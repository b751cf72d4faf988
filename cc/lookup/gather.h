// Gather: pools vectors that lie in arrays, by index, and takes gradients back to them. What a rank
// does with the rows that others sent it (route.h); Pool and Backward are the same over a table.
//
//   vectors  [n, dim]      one row for each key of a request, in one array or by their addresses
//   index    [nnz]         which row each id means; every row is meant by at least one id
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
  const void* const* rows = nullptr;  // [n]: addresses; null: vectors is an array
  size_t n = 0;
  const uint32_t* index = nullptr;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
};

// InvalidArgument, before anything is written, if an index is n or more.
Status CheckIndex(Exec& exec, const uint32_t* index, size_t nnz, size_t n);
// The indices have been checked.
void GatherPool(Exec& exec, const std::vector<GatherTask>& tasks);

struct GatherWeightTask : BagWeightTask {
  const void* vectors = nullptr;  // or
  const void* const* rows = nullptr;
  size_t n = 0;  // of rows; the host, where indices have been checked, does not need it
  const uint32_t* index = nullptr;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
};

void GatherWeightGradient(Exec& exec, const std::vector<GatherWeightTask>& tasks);

// The gradient of each row: the sum of what the ids that mean it add (upstream.h), feature after
// feature, in the order of the ids. One thread sums a stretch of rows: no atomics, the same bits
// for any number of threads.
class GatherGradient {
 public:
  struct Feature : UpstreamTask {
    const uint32_t* index = nullptr;
  };
  struct Piece {
    size_t rows;
    float* sums;
  };
  struct Task {
    std::vector<Feature> features;  // of one dim
    size_t n = 0;
    int64_t dim = 0;
    float* sums = nullptr;  // out [n, dim]; a row that no id means is zeros
    // Or apart: of the first rows, the next ones, ...; n in all. Then `sums` is not used.
    std::vector<Piece> pieces{};
  };

  // InvalidArgument names the task and what is wrong with it. Does not read indices.
  static Status Check(const std::vector<Task>& tasks);
  // Fails as Check and CheckIndex do. Reusable scratch, one call at a time.
  Status Run(Exec& exec, const std::vector<Task>& tasks);
  // Gives back what only a huge batch needs.
  void Shrink();

 private:
  struct Prepared {
    size_t nnz = 0;
    Upstream upstream;
    Split<uint32_t> split;  // of the indices, by stretch
  };

  void PlaceStretch(const Task& task, const std::vector<const Prepared*>& features,
                    size_t stretch) const;
  // Of rows [begin, end) of the stretch; `sums` is that of row `begin`.
  void SumRows(const Task& task, const std::vector<const Prepared*>& features, size_t stretch,
               size_t begin, size_t end, float* sums) const;

  std::deque<Prepared> prepared_;  // of the features of all tasks
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_GATHER_H_
