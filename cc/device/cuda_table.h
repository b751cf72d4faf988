// Tables in a GPU's memory.
#ifndef DYNEMB_DEVICE_CUDA_TABLE_H_
#define DYNEMB_DEVICE_CUDA_TABLE_H_

#include <memory>

#include "cc/lookup/lookups.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

// A table as options.tier says, kHbm or kHybrid, on the GPU of this number. FailedPrecondition:
// there is none, or it cannot be used (CudaDevice::Get).
Status MakeCudaTable(const TableOptions& options, int ordinal, std::unique_ptr<Table>* table);

// Those of the tables on that GPU, made at the first call. Lives as long as the process. Fails as
// MakeCudaTable does.
Status CudaLookups(int ordinal, Lookups** lookups);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_TABLE_H_
