// Tables on simulated devices, compiled once for all that test them.
#ifndef DYNEMB_DEVICE_SIMULATED_TABLES_H_
#define DYNEMB_DEVICE_SIMULATED_TABLES_H_

#include "cc/device/device_table.h"
#include "cc/device/simulated_device.h"
#include "cc/device/thread_lane.h"
#include "cc/table/lanes_lockstep.h"

namespace dynemb {

// One thread for each key and each row; emulated teams of 8 for a key and 4 for a row, or of 4 and
// 32.
using ThreadsDevice = SimulatedDevice<ThreadLane, ThreadLane>;
using NarrowTeamsDevice = SimulatedDevice<LockstepLanes<8>, LockstepLanes<4>>;
using WideTeamsDevice = SimulatedDevice<LockstepLanes<4>, LockstepLanes<32>>;

extern template class DeviceTable<ThreadsDevice>;
extern template class DeviceTable<NarrowTeamsDevice>;
extern template class DeviceTable<WideTeamsDevice>;

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_SIMULATED_TABLES_H_
