// Snapshots of tables on a simulated device, with rows in both tiers.
#include <memory>

#include "cc/device/device_table.h"
#include "cc/device/simulated_device.h"
#include "cc/device/thread_lane.h"
#include "tests/cc/snapshot_suite.h"

namespace dynemb {
namespace testing_table {

Status MakeTable(const TableOptions& given, std::unique_ptr<Table>* table) {
  using Device = SimulatedDevice<ThreadLane, ThreadLane>;
  static Device device;
  TableOptions options = given;
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = 2000;
  return DeviceTable<Device>::Make(options, &device, table);
}

std::string MissingTable() { return ""; }

}  // namespace testing_table
}  // namespace dynemb
