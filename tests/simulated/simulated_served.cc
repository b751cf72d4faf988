#include "tests/simulated/simulated_served.h"

#include "cc/serving_device/device_served_lookups.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {

ServedPlace& SimulatedServedPlace() {
  // Never destroyed: tables may outlive statics.
  static auto* const device = new ThreadsDevice;
  static ServedPlace* const place = new DeviceServedPlace<ThreadsDevice>(device);
  return *place;
}

}  // namespace dynemb
