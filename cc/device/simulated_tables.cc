#include "cc/device/simulated_tables.h"

namespace dynemb {

template class DeviceTable<ThreadsDevice>;

}  // namespace dynemb
