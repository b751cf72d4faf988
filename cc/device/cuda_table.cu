#include "cc/device/cuda_device.cuh"
#include "cc/device/cuda_table.h"
#include "cc/device/device_table.h"

namespace dynemb {

Status MakeCudaTable(const TableOptions& options, int ordinal, std::unique_ptr<Table>* table) {
  CudaDevice* device = nullptr;
  DYNEMB_RETURN_IF_ERROR(CudaDevice::Get(ordinal, &device));
  return DeviceTable<CudaDevice>::Make(options, device, table);
}

}  // namespace dynemb
