// What the operators call of the CUDA device, on the simulated device.
#include "cc/device/cuda_exchange.h"
#include "cc/device/cuda_table.h"
#include "cc/device/simulated_place.h"

namespace dynemb {

Status MakeCudaTable(const TableOptions& options, int, std::unique_ptr<Table>* table) {
  return MakeSimulatedTable(options, table);
}

Status CudaLookups(int, Lookups** lookups) {
  *lookups = &SimulatedLookups();
  return Status();
}

Status CudaExchange(int, Exchange** exchange) {
  *exchange = &SimulatedExchange();
  return Status();
}

}  // namespace dynemb
