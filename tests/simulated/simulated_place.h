// The simulated device of the process. On it, code that uses device tables runs without a GPU. For
// tests.
#ifndef DYNEMB_TESTS_SIMULATED_PLACE_H_
#define DYNEMB_TESTS_SIMULATED_PLACE_H_

#include <memory>

#include "cc/lookup/exchange.h"
#include "cc/lookup/lookups.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

// A table on that device, with options.tier kHbm or kHybrid; `cold` as for DeviceTable::Make. The
// arrays of its calls are in host memory.
Status MakeSimulatedTable(const TableOptions& options, std::unique_ptr<Table>* table,
                          std::unique_ptr<ColdRows> cold = nullptr);

// The Lookups of its tables. Lives as long as the process.
Lookups& SimulatedLookups();

// The Exchange of the device. Lives as long as the process.
Exchange& SimulatedExchange();

}  // namespace dynemb

#endif  // DYNEMB_TESTS_SIMULATED_PLACE_H_
