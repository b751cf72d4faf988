// Backward: gradients of pooled vectors, summed per unique key, for many tables in one call.
//
// The gradient of a unique key is the sum of the terms that its ids add (upstream.h), in the order
// of the ids.
//
// One thread adds up the entries of a partition of the dedup, in order. This needs no atomics,
// gives the same bits for any number of threads, and keeps the sums of a partition in cache while
// they are computed. The first term of an element is stored, not added to zero, so the output need
// not be cleared. With one id per bag (Bags::InitUniform(1, n, n)), the result is the plain sum of
// the values per key.
//
//   Backward backward;
//   DYNEMB_RETURN_IF_ERROR(backward.Prepare(exec, tasks, n));   // dedup
//   ... allocate outputs of num_unique(t) rows ...
//   backward.Write(exec, outputs);                              // sums
//
// Consume, instead of Write, hands each part of the outputs to the caller while it is in the cache.
//
// Contract. Everything that a task points to must stay valid until Write or Consume returns. A
// Backward is reusable scratch: a call with shapes that it has had before allocates nothing of
// their size. Only one call at a time.
#ifndef DYNEMB_LOOKUP_BACKWARD_H_
#define DYNEMB_LOOKUP_BACKWARD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "cc/lookup/dedup.h"
#include "cc/lookup/upstream.h"
#include "cc/table/exec.h"
#include "cc/table/function_ref.h"
#include "cc/table/scratch.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

struct BackwardTask : UpstreamTask {
  KeyType key_type = KeyType::kInt64;
  const void* keys = nullptr;  // [bags->nnz()]
  // Equal keys have equal `rows`, and the unique keys of a large table come in ranges of rows
  // (Dedup::RunByRow). If `rows` is null, the outputs have no rows.
};

struct BackwardOutput {
  void* keys = nullptr;  // [num_unique], of the task's key type
  // [num_unique], the row of each key's first occurrence. Not used if the task has no rows.
  RowId* rows = nullptr;
  float* sums = nullptr;  // [num_unique, dim]
};

class Backward {
 public:
  // InvalidArgument if a task is not valid; the message names the task and the problem.
  static Status Check(const BackwardTask* tasks, size_t num_tasks);
  // Fails only if Check does.
  Status Prepare(Exec& exec, const BackwardTask* tasks, size_t num_tasks);
  size_t num_unique(size_t task) const;
  // outputs[t] belongs to tasks[t] of Prepare.
  void Write(Exec& exec, const BackwardOutput* outputs) const;

  // Unique keys of a task, with the outputs for them.
  struct Part : BackwardOutput {
    size_t task = 0;
    size_t n = 0;
  };
  // Makes room for Consume, which then allocates nothing.
  void PrepareConsume(const Exec& exec);
  // Instead of Write: calls consume(part), from several threads, for parts that cover all unique
  // keys. The sums of a part are in the thread's cache, and are overwritten by those of the next.
  void Consume(Exec& exec, FunctionRef<void(const Part&)> consume);

  // Frees memory that only a huge batch needs. Call it after Write or Consume.
  void Shrink();

 private:
  struct Prepared {
    BackwardTask task;
    AnyDedup dedup;
    Upstream upstream;
  };
  // Consecutive partitions of a task. The units of all tasks are about equal work.
  struct Unit {
    uint32_t task, partition_begin, partition_end;
  };

  // The outputs of a part.
  struct PartScratch {
    Buffer<uint64_t> keys;  // room for either key width
    Buffer<RowId> rows;
    Buffer<float> sums;
  };

  void PrepareTask(Exec& exec, Prepared* prepared);
  void MakeUnits();
  // Writes the unique keys of a partition, their rows and their sums to `out`, from the key `at`
  // on.
  template <typename K>
  void WritePartition(const Prepared& prepared, const Dedup<K>& dedup, size_t partition,
                      const BackwardOutput& out, size_t at) const;

  size_t num_tasks_ = 0;
  std::deque<Prepared> prepared_;  // the first num_tasks_ are in use
  std::vector<Unit> units_;
  std::deque<PartScratch> parts_;  // one for each thread of Consume
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_BACKWARD_H_
