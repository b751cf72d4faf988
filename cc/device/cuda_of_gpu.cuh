// OfGpu: objects of which there is one per GPU.
#ifndef DYNEMB_DEVICE_CUDA_OF_GPU_CUH_
#define DYNEMB_DEVICE_CUDA_OF_GPU_CUH_

#include <map>
#include <mutex>

#include "cc/device/cuda_device.cuh"
#include "cc/table/status.h"

namespace dynemb {

// The process's T for the GPU with this number. The first call constructs it from the CudaDevice.
// Lives as long as the process. Fails like CudaDevice::Get.
template <class T>
Status OfGpu(int ordinal, T** of_gpu) {
  CudaDevice* device = nullptr;
  DYNEMB_RETURN_IF_ERROR(CudaDevice::Get(ordinal, &device));
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<int, T*>;
  const std::lock_guard<std::mutex> lock(*mutex);
  T*& made = (*all)[ordinal];
  if (made == nullptr) made = new T(device);
  *of_gpu = made;
  return Status();
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_OF_GPU_CUH_
