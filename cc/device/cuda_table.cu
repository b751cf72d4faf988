#include <map>
#include <mutex>

#include "cc/device/cuda_device.cuh"
#include "cc/device/cuda_table.h"
#include "cc/device/device_lookups.h"
#include "cc/device/device_table.h"

namespace dynemb {

Status MakeCudaTable(const TableOptions& options, int ordinal, std::unique_ptr<Table>* table) {
  CudaDevice* device = nullptr;
  DYNEMB_RETURN_IF_ERROR(CudaDevice::Get(ordinal, &device));
  return DeviceTable<CudaDevice>::Make(options, device, table);
}

Status CudaLookups(int ordinal, Lookups** lookups) {
  CudaDevice* device = nullptr;
  DYNEMB_RETURN_IF_ERROR(CudaDevice::Get(ordinal, &device));
  static auto* const mutex = new std::mutex;
  static auto* const of_gpu = new std::map<int, Lookups*>;
  const std::lock_guard<std::mutex> lock(*mutex);
  Lookups*& made = (*of_gpu)[ordinal];
  if (made == nullptr) made = new DeviceLookups<CudaDevice>(device);
  *lookups = made;
  return Status();
}

}  // namespace dynemb
