#include "cc/device/device_table_members.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {

template class DeviceTable<NarrowTeamsDevice>;
template class DeviceLookups<NarrowTeamsDevice>;

// No test uses these under sanitizers, where they take as long to compile as the rest.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
template class DeviceTable<WideTeamsDevice>;
template class DeviceLookups<WideTeamsDevice>;
#endif

}  // namespace dynemb
