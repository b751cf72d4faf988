#include "cc/device/device_exchange.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/cc/exchange_suite.h"
#include "tests/cc/simulated_devices.h"

namespace dynemb {
namespace testing_exchange {
namespace {

template <class Device>
struct Simulated {
  using Arrays = HostArrays;
  static std::string Missing() { return ""; }
  static Exchange& exchange() {
    static Device device;
    static DeviceExchange<Device> exchange(&device);
    return exchange;
  }
  static Exec& exec() {
    static ThreadsExec exec(3);
    return exec;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, ExchangeTest, ForSimulatedDevices<Simulated>);

}  // namespace
}  // namespace testing_exchange
}  // namespace dynemb
