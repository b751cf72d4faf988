// The contract suite of Table on emulated warps: the many-lane path of bucket_ops.h, where teams
// compete for buckets.
#include "cc/table/lanes_lockstep.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

template <KeyType kKey, DType kDType, uint32_t kWidth>
using Warp = TableConfig<kKey, kDType, LockstepLanes<kWidth>>;

// Each width meets every key type and every vector type. Under thread sanitizer, teams of 32 say no
// more than teams of 4, and take minutes.
using LockstepTables = ::testing::Types<  //
    Warp<KeyType::kInt64, DType::kFloat32, 4>, Warp<KeyType::kInt32, DType::kBfloat16, 4>,
    Warp<KeyType::kUint64, DType::kFloat16, 4>
#if !defined(__SANITIZE_THREAD__)
    ,
    Warp<KeyType::kUint64, DType::kFloat32, 32>, Warp<KeyType::kInt32, DType::kFloat16, 32>,
    Warp<KeyType::kInt64, DType::kBfloat16, 32>
#endif
    >;
INSTANTIATE_TABLE_SUITES(Lockstep, LockstepTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
