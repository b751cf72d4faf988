// The functions of CUDA's driver that have no counterpart in its runtime library. Their addresses
// come from the runtime library, so nothing links to libcuda.so.1, and programs with this code also
// start on hosts without a driver.
#ifndef DYNEMB_DEVICE_CUDA_DRIVER_H_
#define DYNEMB_DEVICE_CUDA_DRIVER_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "cc/table/status.h"

namespace dynemb {

struct CudaDriver {
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuCtxPushCurrent) ctx_push_current;
  decltype(&cuCtxPopCurrent) ctx_pop_current;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuMemAddressReserve) mem_address_reserve;
  decltype(&cuMemAddressFree) mem_address_free;
  decltype(&cuMemCreate) mem_create;
  decltype(&cuMemRelease) mem_release;
  decltype(&cuMemMap) mem_map;
  decltype(&cuMemUnmap) mem_unmap;
  decltype(&cuMemSetAccess) mem_set_access;
  decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity;

  // Must be called before the functions are used; may be called again. FailedPrecondition names a
  // function that the driver lacks.
  static Status Load();
  // The loaded functions.
  static const CudaDriver& Get();
};

// The error "<what>: <name of the error>: <its text>": ResourceExhausted if memory ran out,
// otherwise Internal. The driver and the runtime library have the same error numbers.
Status CudaError(const std::string& what, int error);

// The description of memory of GPU `ordinal` for cuMemCreate.
CUmemAllocationProp MemoryOf(int ordinal);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_DRIVER_H_
