#include "tests/simulated/simulated_tables.h"

#include "cc/device/device_table_members.h"

namespace dynemb {

template class DeviceTable<ThreadsDevice>;
template class DeviceLookups<ThreadsDevice>;

}  // namespace dynemb
