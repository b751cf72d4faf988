// The exchange of a GPU.
#ifndef DYNEMB_DEVICE_CUDA_EXCHANGE_H_
#define DYNEMB_DEVICE_CUDA_EXCHANGE_H_

#include "cc/lookup/exchange.h"
#include "cc/table/status.h"

namespace dynemb {

// That of the GPU of this number, made at the first call. Lives as long as the process.
// FailedPrecondition: there is none, or it cannot be used (CudaDevice::Get).
Status CudaExchange(int ordinal, Exchange** exchange);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_EXCHANGE_H_
