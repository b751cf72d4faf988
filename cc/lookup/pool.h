// Pool: finds the rows of many ids and combines each bag's vectors, for several tables in one call.
//
// Finding and combining are one pass: a row is added to its bag's sum, in the output, while it is
// in the cache; there is no [ids, dim] array. A bag that meets an unknown key is put aside, and
// done again from the remembered row ids once the key has a row. In steady state there are few of
// those; and inserting costs far more than adding twice.
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
  RowId* rows = nullptr;       // out [nnz]: where each id's row is, kNoRow if it has none
};

// The caller holds the locks of all tables: exclusively if `insert`, else shared. Without `insert`
// a key that has no row counts with the vector it would start with. Several tasks may name one
// table. On ResourceExhausted some tables may have new rows, with their initial vectors; no other
// row has changed.
Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert);

struct WeightGradientTask : BagWeightTask {
  Table* table = nullptr;
  const void* keys = nullptr;
  const RowId* rows = nullptr;  // as Pool gave them
};

// The caller holds the locks of all tables, at least shared.
void WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks);

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_POOL_H_
