// Apply and ApplyPooled: one optimizer step on the rows of many tables, in one call.
#ifndef DYNEMB_LOOKUP_APPLY_H_
#define DYNEMB_LOOKUP_APPLY_H_

#include <string>
#include <vector>

#include "cc/lookup/backward.h"
#include "cc/table/exec.h"
#include "cc/table/optimizer.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

struct ApplyTask {
  Table* table = nullptr;
  const void* keys = nullptr;  // [n], of the table's key type
  // [n], the row ids that the lookup returned; the keys must then be distinct. If null, Apply looks
  // the keys up.
  const RowId* rows = nullptr;
  const float* gradients = nullptr;  // [n, dim]
  size_t n = 0;
  // Read only if rows is null: whether the keys are distinct. If not, the gradients of repeated
  // keys add up.
  bool distinct = false;
};

// A lookup whose pooled vectors have a gradient. If it has ids, it has `rows`, which one lookup
// found: equal keys have equal rows, and different keys different ones, except that several may
// have none.
struct ApplyPooledTask : BackwardTask {
  Table* table = nullptr;
};

// One step of one optimizer.
struct OptimizerStep {
  OptimizerKind kind = OptimizerKind::kSgd;
  OptimizerFlags flags{};
  Hyper hyper{};
  // hyper.iteration as an exact integer. The rounding of 16-bit rows depends on it, and on the
  // number of earlier tasks of the call for the same table.
  uint64_t iteration = 1;
  // The optimizer's state as it was attached: `optimizer` and `inits` of its StateSpec, and its
  // owner (Table::TakeState). The kind and the flags determine the widths.
  std::string state{};
  std::vector<float> inits{};
  std::string owner{};
};

// FailedPrecondition if a table's state is not this optimizer's (Table::CheckState); then nothing
// has changed. Otherwise, this optimizer becomes the owner of each state that has none.
Status CheckStates(const std::vector<ApplyTask>& tasks, const OptimizerStep& step);

// Updates vectors and state. The gradient of a key that has no row, or no longer has the row that
// the lookup found, is dropped and counted. Calls CheckStates first; if that fails, no table has
// changed. The caller holds the locks of all tables exclusively.
Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step, Tick tick);

// Sums the gradients per key (Backward), and applies the sums, in one call, which need not write
// them. Each task has another table. InvalidArgument if two have the same, or a task has no rows;
// fails like Backward::Check and CheckStates, too, and no table has changed.
Status ApplyPooled(Exec& exec, const std::vector<ApplyPooledTask>& tasks, const OptimizerStep& step,
                   Tick tick);
// The checks of ApplyPooled, except CheckStates.
Status CheckApplyPooled(const std::vector<ApplyPooledTask>& tasks);

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_APPLY_H_
