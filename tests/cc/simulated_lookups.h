// SimulatedLookups: the part of a Place (lookups_suite.h) that is the same for all simulated
// devices. A test's Place derives from it, and says how long its tests are.
#ifndef DYNEMB_TESTS_CC_SIMULATED_LOOKUPS_H_
#define DYNEMB_TESTS_CC_SIMULATED_LOOKUPS_H_

#include <memory>
#include <string>

#include "cc/device/device_lookups.h"
#include "tests/cc/lookups_world.h"
#include "tests/cc/simulated_devices.h"

namespace dynemb {
namespace testing_table {

template <class Device, size_t kThreads>
struct SimulatedLookups {
  using Arrays = HostPlace::Arrays;
  static Device& device() {
    static Device device;
    return device;
  }
  static std::string Missing() { return ""; }
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    return DeviceTable<Device>::Make(options, &device(), table);
  }
  static Lookups& lookups() {
    static DeviceLookups<Device> lookups(&device());
    return lookups;
  }
  static Exec& exec() {
    static ThreadsExec exec(kThreads);
    return exec;
  }
};

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SIMULATED_LOOKUPS_H_
