// The contract suites of catch-up on host tables, serial and with threads.
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kHostTables[] = {HostTable(KeyType::kInt64, DType::kFloat32),
                                 HostTable(KeyType::kInt32, DType::kFloat32),
                                 HostTable(KeyType::kUint64, DType::kBfloat16)};
INSTANTIATE_CATCH_UP_SUITES(HostCatchUp, kHostTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
