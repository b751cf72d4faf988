// Where the functions of an exchange run: on the host, or on a simulated device. A suite that is
// typed by Places checks a promise once for all of them. Its overloads of a function for HostPlace
// and DevicePlace call the host's function and the device's.
#ifndef DYNEMB_TESTS_CC_PLACES_H_
#define DYNEMB_TESTS_CC_PLACES_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "tests/cc/execs.h"
#include "tests/cc/simulated_devices.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {

class HostPlace {
 public:
  static constexpr bool kIsHost = true;
  static constexpr bool kSlow = false;

  // Calls fn() with each Exec of execs.h in turn, which must all give the same bits.
  template <class Fn>
  void ForEach(const Fn& fn) {
    ForEachExec([&](Exec& exec) {
      exec_ = &exec;
      fn();
    });
    exec_ = &serial_;
  }
  Exec& exec() { return *exec_; }

 private:
  SerialExec serial_;
  Exec* exec_ = &serial_;
};

template <class DeviceT>
class DevicePlace {
 public:
  using Device = DeviceT;
  static constexpr bool kIsHost = false;
  // Emulated teams are slow.
  static constexpr bool kSlow = !std::is_same_v<Device, ThreadsDevice>;

  template <class Fn>
  void ForEach(const Fn& fn) {
    fn();
  }
  // Returns fn(session), which must wait for the device `waits` times, or less often if it fails.
  template <class Fn>
  Status Call(const Fn& fn, uint64_t waits = 0) {
    const uint64_t before = device_.waits();
    typename Device::Session session(device_, &exec_);
    const Status status = fn(session);
    if (status.ok()) {
      EXPECT_EQ(device_.waits() - before, waits);
    } else {
      EXPECT_LE(device_.waits() - before, waits);
    }
    // Only memory that runs out makes a session fail.
    if (status.code() != Code::kResourceExhausted) {
      EXPECT_TRUE(session.status().ok());
    }
    return status;
  }
  // Calls fn() until it succeeds: without memory for the first array that it takes, then for the
  // second, and so on. Returns the number of arrays.
  template <class Fn>
  uint64_t FailEach(const Fn& fn) {
    for (uint64_t n = 0;; ++n) {
      device_.FailTake(n);
      const Status status = fn();
      if (device_.FailTake(Device::kNever)) {
        EXPECT_TRUE(status.ok()) << status.message();
        return n;
      }
      EXPECT_EQ(status.code(), Code::kResourceExhausted) << "array " << n;
    }
  }
  // Checks that fn() refuses 2^32 - 1 bags, ids or rows before it takes memory.
  template <class Fn>
  void ExpectTooMany(const std::string& what, const Fn& fn) {
    device_.FailTake(0);
    const Status status = fn();
    EXPECT_TRUE(device_.FailTake(Device::kNever));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(), "all tables together may have at most 2^32 - 2 " + what +
                                    " in a batch, got 4294967295");
  }
  Device& device() { return device_; }
  Exec& exec() { return exec_; }

 private:
  Device device_;
  ThreadsExec exec_{3};
};

template <class Devices>
struct WithHost;
template <class... Devices>
struct WithHost<testing::Types<Devices...>> {
  using Places = testing::Types<HostPlace, Devices...>;
};
using Places = WithHost<ForSimulatedDevices<DevicePlace>>::Places;

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_PLACES_H_
