// The process's simulated device, so that what is built upon tables of a device runs where there is
// no GPU. For tests.
#ifndef DYNEMB_DEVICE_SIMULATED_PLACE_H_
#define DYNEMB_DEVICE_SIMULATED_PLACE_H_

#include <memory>

#include "cc/lookup/exchange.h"
#include "cc/lookup/lookups.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

// A table as options.tier says, kHbm or kHybrid, on that device. Its arrays are of the host.
Status MakeSimulatedTable(const TableOptions& options, std::unique_ptr<Table>* table);

// Those of its tables. Lives as long as the process.
Lookups& SimulatedLookups();

// That of the device. Lives as long as the process.
Exchange& SimulatedExchange();

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_SIMULATED_PLACE_H_
