// Apply: one optimizer step on the rows of many tables in one call.
#ifndef DYNEMB_LOOKUP_APPLY_H_
#define DYNEMB_LOOKUP_APPLY_H_

#include <string>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/optimizer.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

struct ApplyTask {
  Table* table = nullptr;
  const void* keys = nullptr;        // [n], of the table's key type
  const RowId* rows = nullptr;       // [n] from the lookup, keys then distinct; or null: found here
  const float* gradients = nullptr;  // [n, dim]
  size_t n = 0;
  bool distinct = false;  // without rows: the keys are; else gradients of repeated keys add up
};

// One step of one optimizer.
struct OptimizerStep {
  OptimizerKind kind = OptimizerKind::kSgd;
  OptimizerFlags flags{};
  Hyper hyper{};
  // hyper.iteration, exact. 16-bit rows are rounded by it, and by how many tasks of the call are
  // for the same table and come before.
  uint64_t iteration = 1;
  // Its state, of the widths that kind and flags say, as it was attached: StateSpec's `optimizer`
  // and `inits`, and the owner (Table::TakeState).
  std::string state{};
  std::vector<float> inits{};
  std::string owner{};
};

// FailedPrecondition if a table's state is not this optimizer's (Table::CheckState); then nothing
// has changed. Otherwise state that had no owner is this one's.
Status TakeStates(const std::vector<ApplyTask>& tasks, const OptimizerStep& step);

// Updates vectors and state. A gradient whose key has no row, or no longer the row it had in the
// lookup, is dropped and counted. Begins with TakeStates: if that fails no table has changed. The
// caller holds the locks of all tables exclusively.
Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step, Tick tick);

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_APPLY_H_
