// The functions of CUDA's driver that its runtime library has no counterpart of. They are asked of
// the runtime library, so that nothing links to libcuda.so.1 and a program with this code starts
// where there is no driver.
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

  // Once per process, before the other functions are used; FailedPrecondition names what the driver
  // lacks. May be called again.
  static Status Load();
  // What has been loaded.
  static const CudaDriver& Get();
};

// "<what>: <name of the error>: <its text>": ResourceExhausted if it is about memory, else
// Internal. Numbers of the driver's errors are those of the runtime library.
Status CudaError(const std::string& what, int error);

// Memory of GPU `ordinal`, as cuMemCreate wants it described.
CUmemAllocationProp MemoryOf(int ordinal);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_DRIVER_H_
