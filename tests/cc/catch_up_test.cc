// The contract suites of catch-up on host tables, serial and with threads.
#include "tests/cc/table_suite_catch_up.h"
#include "tests/cc/table_suite_catch_up_saved.h"

namespace dynemb {
namespace testing_table {
namespace {

using HostTypes = ::testing::Types<TableConfig<KeyType::kInt64, DType::kFloat32>,
                                   TableConfig<KeyType::kInt32, DType::kFloat32>,
                                   TableConfig<KeyType::kUint64, DType::kBfloat16>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Host, TableCatchUp, HostTypes);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, TableCatchUpSaved, HostTypes);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
