#include <utility>

#include "cc/device/cuda_of_gpu.cuh"
#include "cc/device/cuda_table.h"
#include "cc/device/device_lookups.h"
#include "cc/device/device_table_members.h"

namespace dynemb {

Status MakeCudaTable(const TableOptions& options, int ordinal, std::unique_ptr<Table>* table,
                     std::unique_ptr<ColdRows> cold) {
  CudaDevice* device = nullptr;
  DYNEMB_RETURN_IF_ERROR(CudaDevice::Get(ordinal, &device));
  return DeviceTable<CudaDevice>::Make(options, device, table, std::move(cold));
}

Status CudaLookups(int ordinal, Lookups** lookups) {
  DeviceLookups<CudaDevice>* of_gpu = nullptr;
  DYNEMB_RETURN_IF_ERROR(OfGpu(ordinal, &of_gpu));
  *lookups = of_gpu;
  return Status();
}

}  // namespace dynemb
