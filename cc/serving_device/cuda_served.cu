#include "cc/device/cuda_of_gpu.cuh"
#include "cc/serving_device/cuda_served.h"
#include "cc/serving_device/device_served_lookups.h"

namespace dynemb {

Status CudaServedPlace(int ordinal, ServedPlace** place) {
  DeviceServedPlace<CudaDevice>* of_gpu = nullptr;
  DYNEMB_RETURN_IF_ERROR(OfGpu(ordinal, &of_gpu));
  *place = of_gpu;
  return Status();
}

}  // namespace dynemb
