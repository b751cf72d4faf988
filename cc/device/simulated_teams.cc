#include "cc/device/simulated_tables.h"

namespace dynemb {

template class DeviceTable<NarrowTeamsDevice>;
template class DeviceTable<WideTeamsDevice>;

}  // namespace dynemb
