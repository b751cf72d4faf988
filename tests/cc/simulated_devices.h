// The simulated devices that tests of what runs on any device are typed by.
#ifndef DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_
#define DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_

#include <gtest/gtest.h>

#include "cc/device/simulated_tables.h"

namespace dynemb {

// Under thread sanitizer emulated warps starve all else.
#if defined(__SANITIZE_THREAD__)
using SimulatedDevices = testing::Types<ThreadsDevice>;
#else
using SimulatedDevices = testing::Types<ThreadsDevice, NarrowTeamsDevice, WideTeamsDevice>;
#endif

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SIMULATED_DEVICES_H_
