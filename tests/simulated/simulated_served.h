// Served tables on a simulated device (simulated_place.h). For tests.
#ifndef DYNEMB_TESTS_SIMULATED_SERVED_H_
#define DYNEMB_TESTS_SIMULATED_SERVED_H_

#include "cc/serving/served_place.h"

namespace dynemb {

// The place of served tables on another device. Lives as long as the process.
ServedPlace& SimulatedServedPlace();

}  // namespace dynemb

#endif  // DYNEMB_TESTS_SIMULATED_SERVED_H_
