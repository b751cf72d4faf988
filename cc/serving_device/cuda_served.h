// Served tables in a GPU's memory.
#ifndef DYNEMB_SERVING_DEVICE_CUDA_SERVED_H_
#define DYNEMB_SERVING_DEVICE_CUDA_SERVED_H_

#include "cc/serving/served_place.h"
#include "cc/table/status.h"

namespace dynemb {

// The place of served tables on the GPU with this number, created by the first call. Lives as long
// as the process. Fails like CudaDevice::Get.
Status CudaServedPlace(int ordinal, ServedPlace** place);

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DEVICE_CUDA_SERVED_H_
