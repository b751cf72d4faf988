// The contract suites of Table, for tables on a simulated device of which most rows are in files.
#include <gtest/gtest.h>

#include "tests/cc/device_file_kind.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kDeviceFileTables[] = {
    DeviceFileTable<ThreadsDevice>(800, 1200, KeyType::kInt64, DType::kFloat32),
    DeviceFileTable<ThreadsDevice>(0, 2000, KeyType::kInt32, DType::kBfloat16)};
INSTANTIATE_TABLE_SUITES(DeviceFile, kDeviceFileTables);

// Topics whose batches fit a small memory, which most rows have left.
const TableKind kSmallDeviceFileTables[] = {
    DeviceFileTable<ThreadsDevice>(70, 130, KeyType::kInt64, DType::kFloat32),
    DeviceFileTable<ThreadsDevice>(200, 0, KeyType::kInt32, DType::kBfloat16)};
INSTANTIATE_TABLE_SUITE(SmallDeviceFile, TableExpiry, kSmallDeviceFileTables);
INSTANTIATE_TABLE_SUITE(SmallDeviceFile, TableGradient, kSmallDeviceFileTables);
INSTANTIATE_TABLE_SUITE(SmallDeviceFile, TableRandom, kSmallDeviceFileTables);
INSTANTIATE_TABLE_SUITE(SmallDeviceFile, TableSelect, kSmallDeviceFileTables);
INSTANTIATE_TABLE_SUITE(SmallDeviceFile, TableTime, kSmallDeviceFileTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
