// Tables in a GPU's memory.
#ifndef DYNEMB_DEVICE_CUDA_TABLE_H_
#define DYNEMB_DEVICE_CUDA_TABLE_H_

#include <memory>

#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

// A table as options.tier says, kHbm or kHybrid, on the GPU of this number. FailedPrecondition:
// there is none, or it cannot be used (CudaDevice::Get).
Status MakeCudaTable(const TableOptions& options, int ordinal, std::unique_ptr<Table>* table);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_TABLE_H_
