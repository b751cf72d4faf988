// Apply: one optimizer step on the rows of many tables in one call.
#ifndef DYNEMB_LOOKUP_APPLY_H_
#define DYNEMB_LOOKUP_APPLY_H_

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

// FailedPrecondition, naming it, if a table's state is not this optimizer's.
Status CheckStates(const std::vector<ApplyTask>& tasks, OptimizerKind kind, OptimizerFlags flags);

// Updates vectors and state. A gradient whose key has no row, or no longer the row it had in the
// lookup, is dropped and counted. FailedPrecondition if a table's state is not this optimizer's
// (AttachState); then no table has changed. The caller holds the locks of all tables exclusively.
Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, OptimizerKind kind,
             OptimizerFlags flags, const Hyper& hyper, Tick tick);

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_APPLY_H_
