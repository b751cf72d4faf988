#include "cc/device/cuda_driver.h"

#include <mutex>

namespace dynemb {
namespace {

// The version of the functions: CUDA 12.0, which every driver that can run this library supports.
constexpr unsigned int kInterface = 12000;

CudaDriver loaded;

template <class Function>
Status Find(const char* name, Function* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kInterface, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    (void)cudaGetLastError();
    return FailedPrecondition(std::string("the NVIDIA driver has no ") + name + " (" +
                              cudaGetErrorString(error) + ")");
  }
  *function = reinterpret_cast<Function>(address);
  return Status();
}

}  // namespace

Status CudaDriver::Load() {
  static std::mutex mutex;
  static bool done = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (done) return Status();
  DYNEMB_RETURN_IF_ERROR(Find("cuCtxGetCurrent", &loaded.ctx_get_current));
  DYNEMB_RETURN_IF_ERROR(Find("cuCtxPushCurrent", &loaded.ctx_push_current));
  DYNEMB_RETURN_IF_ERROR(Find("cuCtxPopCurrent", &loaded.ctx_pop_current));
  DYNEMB_RETURN_IF_ERROR(Find("cuDeviceGetAttribute", &loaded.device_get_attribute));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemAddressReserve", &loaded.mem_address_reserve));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemAddressFree", &loaded.mem_address_free));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemCreate", &loaded.mem_create));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemRelease", &loaded.mem_release));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemMap", &loaded.mem_map));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemUnmap", &loaded.mem_unmap));
  DYNEMB_RETURN_IF_ERROR(Find("cuMemSetAccess", &loaded.mem_set_access));
  DYNEMB_RETURN_IF_ERROR(
      Find("cuMemGetAllocationGranularity", &loaded.mem_get_allocation_granularity));
  done = true;
  return Status();
}

const CudaDriver& CudaDriver::Get() { return loaded; }

Status CudaError(const std::string& what, int error) {
  const auto e = static_cast<cudaError_t>(error);
  // Clears the error, so that the next caller of the runtime library does not get it.
  (void)cudaGetLastError();
  return Status(e == cudaErrorMemoryAllocation ? Code::kResourceExhausted : Code::kInternal,
                what + ": " + cudaGetErrorName(e) + ": " + cudaGetErrorString(e));
}

CUmemAllocationProp MemoryOf(int ordinal) {
  CUmemAllocationProp memory = {};
  memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory.location.id = ordinal;
  return memory;
}

}  // namespace dynemb
