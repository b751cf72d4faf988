// The simulated devices that tests of what runs on any device are typed by.
#ifndef DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_
#define DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_

#include <gtest/gtest.h>

#include "cc/device/simulated_tables.h"

namespace dynemb {

// Each as OfDevice<Device>. Emulated teams starve all else: under thread sanitizer there are none,
// and under address sanitizer none of 32.
#if defined(__SANITIZE_THREAD__)
template <template <class> class OfDevice>
using ForSimulatedDevices = testing::Types<OfDevice<ThreadsDevice>>;
#elif defined(__SANITIZE_ADDRESS__)
template <template <class> class OfDevice>
using ForSimulatedDevices = testing::Types<OfDevice<ThreadsDevice>, OfDevice<NarrowTeamsDevice>>;
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
