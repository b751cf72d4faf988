// Snapshots of tables in a GPU's memory, with rows in both tiers.
#include <memory>
#include <string>

#include "tests/cc/snapshot_suite.h"
#include "tests/cuda/staged_table.h"

namespace dynemb {
namespace testing_table {

Status MakeTable(const TableOptions& given, std::unique_ptr<Table>* table) {
  TableOptions options = given;
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = 2000;
  return StagedTable::Make(options, table);
}

std::string MissingTable() { return StagedTable::Missing(); }

}  // namespace testing_table
}  // namespace dynemb
