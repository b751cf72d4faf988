// The contract suite of tables with two tiers, on simulated devices.
#include <memory>

#include "cc/device/device_table_members.h"
#include "tests/cc/tiers_suite.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace testing_table {
namespace {

template <class Device, int kSlownessOfDevice>
struct Simulated {
  static constexpr int kSlowness = kSlownessOfDevice;
  static std::string Missing() { return ""; }
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    static Device device;
    return DeviceTable<Device>::Make(options, &device, table);
  }
};

using Makers =
    ::testing::Types<Simulated<SimulatedDevice<ThreadLane, ThreadLane>, 1>,
                     Simulated<SimulatedDevice<LockstepLanes<4>, LockstepLanes<4>>, 100>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, Tiers, Makers);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
