// The exchange of a GPU.
#ifndef DYNEMB_DEVICE_CUDA_EXCHANGE_H_
#define DYNEMB_DEVICE_CUDA_EXCHANGE_H_

#include "cc/lookup/exchange.h"
#include "cc/table/status.h"

namespace dynemb {

// The Exchange of the GPU with this number, created by the first call. Lives as long as the
// process. FailedPrecondition if there is no GPU, or it cannot be used (CudaDevice::Get).
Status CudaExchange(int ordinal, Exchange** exchange);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_EXCHANGE_H_
