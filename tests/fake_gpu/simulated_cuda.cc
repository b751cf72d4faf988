// The CUDA device's interface (cc/device:cuda_interface), implemented by the simulated device.
#include <utility>

#include "cc/device/cuda_exchange.h"
#include "cc/device/cuda_table.h"
#include "cc/device/stream_exec.h"
#include "cc/serving_device/cuda_served.h"
#include "tests/simulated/simulated_place.h"
#include "tests/simulated/simulated_served.h"

namespace dynemb {

Status MakeCudaTable(const TableOptions& options, int, std::unique_ptr<Table>* table,
                     std::unique_ptr<ColdRows> cold) {
  return MakeSimulatedTable(options, table, std::move(cold));
}

Status CudaLookups(int, Lookups** lookups) {
  *lookups = &SimulatedLookups();
  return Status();
}

Status CudaExchange(int, Exchange** exchange) {
  *exchange = &SimulatedExchange();
  return Status();
}

Status CudaServedPlace(int, ServedPlace** place) {
  *place = &SimulatedServedPlace();
  return Status();
}

}  // namespace dynemb

// ExecOfStream: any stream. The linker renames the calls (--wrap in BUILD).
extern "C" dynemb::Status
__wrap__ZN6dynemb12ExecOfStreamEP11CUstream_stPSt10unique_ptrINS_4ExecESt14default_deleteIS3_EE(
    CUstream_st* stream, std::unique_ptr<dynemb::Exec>* exec) {
  *exec = std::make_unique<dynemb::StreamExec>(stream);
  return dynemb::Status();
}
