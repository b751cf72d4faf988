// Pool: finds the rows of many ids and combines each bag's vectors, for several tables in one call.
//
// Finding and combining are one pass: a row is added to the sum of its bag, in the output, while it
// is in cache. There is no [ids, dim] array. A bag with an unknown key is put aside; when its keys
// have rows, it is pooled again from the row ids that were found. In steady state there are few
// such bags, and inserting a key costs far more than adding its bag twice.
#ifndef DYNEMB_LOOKUP_POOL_H_
#define DYNEMB_LOOKUP_POOL_H_

#include <cstdint>
#include <vector>

#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/weight_gradient.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

struct PoolTask : BagTask {
  Table* table = nullptr;
  const void* keys = nullptr;  // [bags->nnz()], of the table's key type
  // out [nnz]: the row of each id's key. If it has none: kNoRow, or kUnadmittedRow or kSkippedRow
  // (types.h) in a table with admission.
  RowId* rows = nullptr;
};

// The caller holds the locks of all tables: exclusively if `insert`, otherwise TableLock::kRead.
// Without `insert`, a key that has no row contributes its initial vector. In a table with
// admission, a key that has no row contributes what Unadmitted (admission.h) says, with or without
// `insert`; the occurrences of a key in all tasks on the table count together. Several tasks may
// have the same table. On ResourceExhausted, some tables may have new rows, with their initial
// vectors; no other row has changed.
Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert);

struct WeightGradientTask : BagWeightTask {
  Table* table = nullptr;
  const void* keys = nullptr;
  const RowId* rows = nullptr;  // as Pool returned them
};

// The caller holds the locks of all tables, TableLock::kRead. It fails if cold rows cannot be read.
Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks);

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_POOL_H_
