// The contract suites of Table, for tables of which most rows are in files.
#include "tests/cc/file_table_kind.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kFileTables[] = {FileTable(KeyType::kInt64, DType::kFloat32, 2000),
                                 FileTable(KeyType::kInt32, DType::kBfloat16, 2000)};
INSTANTIATE_TABLE_SUITES(File, kFileTables);

// Topics whose batches fit a small memory, which most rows have left.
const TableKind kSmallFileTables[] = {FileTable(KeyType::kInt64, DType::kFloat32, 200),
                                      FileTable(KeyType::kInt32, DType::kBfloat16, 200)};
INSTANTIATE_TABLE_SUITE(SmallFile, TableExpiry, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableGradient, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableRandom, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableSelect, kSmallFileTables);
INSTANTIATE_TABLE_SUITE(SmallFile, TableTime, kSmallFileTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
