// The simulated devices by which the tests of device-independent code are typed.
#ifndef DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_
#define DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_

#include <gtest/gtest.h>

#include "tests/simulated/simulated_tables.h"

namespace dynemb {

// OfDevice<Device> for each device. Emulated teams are slow: under thread sanitizer there are none.
// Under address sanitizer there are only teams of 4.
#if defined(__SANITIZE_THREAD__)
template <template <class> class OfDevice>
using ForSimulatedDevices = testing::Types<OfDevice<ThreadsDevice>>;
#elif defined(__SANITIZE_ADDRESS__)
template <template <class> class OfDevice>
using ForSimulatedDevices = testing::Types<OfDevice<NarrowTeamsDevice>>;
#else
template <template <class> class OfDevice>
using ForSimulatedDevices =
    testing::Types<OfDevice<ThreadsDevice>, OfDevice<NarrowTeamsDevice>, OfDevice<WideTeamsDevice>>;
#endif

template <class Device>
using JustTheDevice = Device;
using SimulatedDevices = ForSimulatedDevices<JustTheDevice>;

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_
