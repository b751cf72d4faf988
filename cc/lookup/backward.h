// Backward: gradients of pooled vectors, summed per unique key, for many tables in one call.
//
// The gradient of a unique key is the sum of what its ids add (upstream.h), in the order of the
// ids.
//
// Each partition of the dedup has one owner, who walks its entries in order and adds: no atomics,
// the same bits for any number of threads, and the sums of a partition stay in cache while they are
// built. An element's first term is stored, not added to zero, so the output need not be cleared.
// With one id per bag (Bags::InitUniform(1, n, n)) this is the plain sum of values per key.
//
//   Backward backward;
//   DYNEMB_RETURN_IF_ERROR(backward.Prepare(exec, tasks, n));   // dedup
//   ... allocate outputs of num_unique(t) rows ...
//   backward.Write(exec, outputs);                              // sums
//
// Contract. Everything that a task points to must stay until Write returns. A Backward is reusable
// scratch: a call of shapes seen before allocates nothing of their size. One call at a time.
#ifndef DYNEMB_LOOKUP_BACKWARD_H_
#define DYNEMB_LOOKUP_BACKWARD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "cc/lookup/dedup.h"
#include "cc/lookup/upstream.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

struct BackwardTask : UpstreamTask {
  KeyType key_type = KeyType::kInt64;
  const void* keys = nullptr;   // [bags->nnz()]
  const RowId* rows = nullptr;  // [nnz], or null: then outputs have no rows
};

struct BackwardOutput {
  void* keys = nullptr;   // [num_unique], of the task's key type
  RowId* rows = nullptr;  // [num_unique], of each key's first occurrence; unused without task.rows
  float* sums = nullptr;  // [num_unique, dim]
};

class Backward {
 public:
  // InvalidArgument names the task and what is wrong with it.
  static Status Check(const BackwardTask* tasks, size_t num_tasks);
  // Fails as Check does.
  Status Prepare(Exec& exec, const BackwardTask* tasks, size_t num_tasks);
  size_t num_unique(size_t task) const;
  // outputs[t] belongs to tasks[t] of Prepare.
  void Write(Exec& exec, const BackwardOutput* outputs) const;
  // Gives back what only a huge batch needs, once it is written.
  void Shrink();

 private:
  struct Prepared {
    BackwardTask task;
    Dedup<uint64_t> dedup64;  // the one of the key's width is used
    Dedup<uint32_t> dedup32;
    Upstream upstream;
  };
  // Consecutive partitions of all tasks together, of about equal work.
  struct Unit {
    uint32_t task, partition_begin, partition_end;
  };

  void PrepareTask(Exec& exec, Prepared* prepared);
  void MakeUnits();
  template <typename K>
  void WriteUnit(const Prepared& prepared, const Dedup<K>& dedup, const Unit& unit,
                 const BackwardOutput& out) const;

  size_t num_tasks_ = 0;
  std::deque<Prepared> prepared_;  // the first num_tasks_ are in use
  std::vector<Unit> units_;
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_BACKWARD_H_
