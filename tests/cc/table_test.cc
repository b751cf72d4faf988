// The contract suite of Table on the host, one config a line.
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

constexpr KeyType kI64 = KeyType::kInt64;
constexpr KeyType kI32 = KeyType::kInt32;
constexpr KeyType kU64 = KeyType::kUint64;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kBf16 = DType::kBfloat16;

using HostTables = ::testing::Types<  //
    TableConfig<kI64, kF32, OneLane, 1>, TableConfig<kI64, kF32, OneLane, 2>,
    TableConfig<kI64, kF32, OneLane, 4>, TableConfig<kI64, kF16, OneLane, 1>,
    TableConfig<kI64, kF16, OneLane, 2>, TableConfig<kI64, kF16, OneLane, 4>,
    TableConfig<kI64, kBf16, OneLane, 1>, TableConfig<kI64, kBf16, OneLane, 2>,
    TableConfig<kI64, kBf16, OneLane, 4>, TableConfig<kI32, kF32, OneLane, 1>,
    TableConfig<kI32, kF32, OneLane, 2>, TableConfig<kI32, kF32, OneLane, 4>,
    TableConfig<kI32, kF16, OneLane, 1>, TableConfig<kI32, kF16, OneLane, 2>,
    TableConfig<kI32, kF16, OneLane, 4>, TableConfig<kI32, kBf16, OneLane, 1>,
    TableConfig<kI32, kBf16, OneLane, 2>, TableConfig<kI32, kBf16, OneLane, 4>,
    TableConfig<kU64, kF32, OneLane, 1>, TableConfig<kU64, kF32, OneLane, 2>,
    TableConfig<kU64, kF32, OneLane, 4>, TableConfig<kU64, kF16, OneLane, 1>,
    TableConfig<kU64, kF16, OneLane, 2>, TableConfig<kU64, kF16, OneLane, 4>,
    TableConfig<kU64, kBf16, OneLane, 1>, TableConfig<kU64, kBf16, OneLane, 2>,
    TableConfig<kU64, kBf16, OneLane, 4>>;
INSTANTIATE_TABLE_SUITES(Host, HostTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
