#include "tests/simulated/simulated_place.h"

#include <utility>

#include "cc/device/device_exchange.h"
#include "cc/device/device_lookups.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

ThreadsDevice* Device() {
  static auto* const device = new ThreadsDevice;  // never destroyed: tables may outlive statics
  return device;
}

}  // namespace

Status MakeSimulatedTable(const TableOptions& options, std::unique_ptr<Table>* table,
                          std::unique_ptr<ColdRows> cold) {
  return DeviceTable<ThreadsDevice>::Make(options, Device(), table, std::move(cold));
}

Lookups& SimulatedLookups() {
  static Lookups* const lookups = new DeviceLookups<ThreadsDevice>(Device());
  return *lookups;
}

Exchange& SimulatedExchange() {
  static Exchange* const exchange = new DeviceExchange<ThreadsDevice>(Device());
  return *exchange;
}

}  // namespace dynemb
