#include "cc/device/device_exchange.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "cc/device/simulated_tables.h"
#include "tests/cc/exchange_suite.h"
#include "tests/cc/execs.h"

namespace dynemb {
namespace testing_exchange {
namespace {

template <class Device>
struct Simulated {
  using Arrays = HostArrays;
  static std::string Missing() {
#if defined(__SANITIZE_THREAD__)
    if (!std::is_same_v<Device, ThreadsDevice>) return "emulated teams take minutes here";
#endif
    return "";
  }
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

using Places = ::testing::Types<Simulated<ThreadsDevice>, Simulated<NarrowTeamsDevice>,
                                Simulated<WideTeamsDevice>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, ExchangeTest, Places);

}  // namespace
}  // namespace testing_exchange
}  // namespace dynemb
