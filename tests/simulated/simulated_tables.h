// Tables on simulated devices, and lookups in them, compiled once for all tests.
#ifndef DYNEMB_TESTS_SIMULATED_TABLES_H_
#define DYNEMB_TESTS_SIMULATED_TABLES_H_

#include "cc/device/device_lookups.h"
#include "cc/device/device_table.h"
#include "cc/device/thread_lane.h"
#include "tests/simulated/lanes_lockstep.h"
#include "tests/simulated/simulated_device.h"

namespace dynemb {

// ThreadsDevice has one thread per key and per row. NarrowTeamsDevice has emulated teams of 8
// threads per key and 4 per row; WideTeamsDevice, of 4 and 32.
using ThreadsDevice = SimulatedDevice<ThreadLane, ThreadLane>;
using NarrowTeamsDevice = SimulatedDevice<LockstepLanes<8>, LockstepLanes<4>>;
using WideTeamsDevice = SimulatedDevice<LockstepLanes<4>, LockstepLanes<32>>;

extern template class DeviceTable<ThreadsDevice>;
extern template class DeviceTable<NarrowTeamsDevice>;
extern template class DeviceTable<WideTeamsDevice>;
extern template class DeviceLookups<ThreadsDevice>;
extern template class DeviceLookups<NarrowTeamsDevice>;
extern template class DeviceLookups<WideTeamsDevice>;

}  // namespace dynemb

#endif  // DYNEMB_TESTS_SIMULATED_TABLES_H_
