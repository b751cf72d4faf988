// Device tables on a simulated device, for the contract suites of Table.
#ifndef DYNEMB_TESTS_CC_DEVICE_CONFIG_H_
#define DYNEMB_TESTS_CC_DEVICE_CONFIG_H_

#include <memory>

#include "cc/table/table.h"
#include "tests/cc/table_suite.h"
#include "tests/cc/test_length.h"
#include "tests/simulated/lane_turns.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace testing_table {

// `hbm_rows`: the number of rows of the smallest stride that fit in the device tier; -1: all rows.
template <class Device>
TableKind SimulatedTable(int hbm_rows, KeyType key_type, DType dtype, size_t slowness) {
  const auto make = [hbm_rows](const TableOptions& options, std::unique_ptr<Table>* table) {
    static Device device;
    return DeviceTable<Device>::Make(OnDevice(options, hbm_rows), &device, table);
  };
  return {key_type, dtype, slowness, true, hbm_rows >= 0, make};
}

// The slowness of a table whose kernels are run by emulated teams of `lanes` lanes.
constexpr size_t SlownessOfTeams(size_t lanes) {
  return LaneTurns::kThreads ? 25 * lanes : kSanitized ? 5 * lanes : lanes / 2;
}

// A table whose kernels are run by one thread for each key or row.
inline TableKind QuickTable(int hbm_rows, KeyType key_type, DType dtype) {
  return SimulatedTable<ThreadsDevice>(hbm_rows, key_type, dtype, 2);
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_CONFIG_H_
