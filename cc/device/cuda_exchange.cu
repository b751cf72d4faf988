#include "cc/device/cuda_exchange.h"
#include "cc/device/cuda_of_gpu.cuh"
#include "cc/device/device_exchange.h"

namespace dynemb {

Status CudaExchange(int ordinal, Exchange** exchange) {
  DeviceExchange<CudaDevice>* of_gpu = nullptr;
  DYNEMB_RETURN_IF_ERROR(OfGpu(ordinal, &of_gpu));
  *exchange = of_gpu;
  return Status();
}

}  // namespace dynemb
