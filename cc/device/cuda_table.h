// Tables in a GPU's memory.
#ifndef DYNEMB_DEVICE_CUDA_TABLE_H_
#define DYNEMB_DEVICE_CUDA_TABLE_H_

#include <memory>

#include "cc/lookup/lookups.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

// Creates a table with options.tier kHbm or kHybrid on the GPU with this number; `cold` as for
// DeviceTable::Make. FailedPrecondition if there is no GPU, or it cannot be used (CudaDevice::Get).
Status MakeCudaTable(const TableOptions& options, int ordinal, std::unique_ptr<Table>* table,
                     std::unique_ptr<ColdRows> cold = nullptr);

// The Lookups of the tables on that GPU, created by the first call. Lives as long as the process.
// Fails like CudaDevice::Get.
Status CudaLookups(int ordinal, Lookups** lookups);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_TABLE_H_
