// The contract suite of Table on emulated warps: the many-lane path of bucket_ops.h, where teams
// compete for buckets.
#include "cc/table/lanes_lockstep.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

using LockstepTables =
    ::testing::Types<TableConfig<KeyType::kInt64, DType::kFloat32, LockstepLanes<4>>,
                     TableConfig<KeyType::kInt32, DType::kBfloat16, LockstepLanes<4>>,
                     TableConfig<KeyType::kUint64, DType::kFloat32, LockstepLanes<32>>>;
INSTANTIATE_TABLE_SUITES(Lockstep, LockstepTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
