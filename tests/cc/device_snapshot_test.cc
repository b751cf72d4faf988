// Snapshots of tables on a simulated device, with rows in both tiers.
#include <memory>

#include "tests/cc/snapshot_suite.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace testing_table {

Status MakeTable(const TableOptions& given, std::unique_ptr<Table>* table) {
  static ThreadsDevice device;
  TableOptions options = given;
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = 2000;
  return DeviceTable<ThreadsDevice>::Make(options, &device, table);
}

std::string MissingTable() { return ""; }

}  // namespace testing_table
}  // namespace dynemb
