// The contract suites of tables, on tables in a GPU's memory.
#include <memory>
#include <string>

#include "tests/cc/table_suites.h"
#include "tests/cc/tiers_suite.h"
#include "tests/cuda/staged_table.h"

namespace dynemb {
namespace testing_table {
namespace {

// `hbm_rows`: the number of rows without state that fit in the device tier; -1: all rows.
TableKind CudaTable(int hbm_rows, KeyType key_type, DType dtype) {
  const auto make = [hbm_rows](const TableOptions& options, std::unique_ptr<Table>* table) {
    return StagedTable::Make(OnDevice(options, hbm_rows), table);
  };
  TableKind kind;
  kind.key_type = key_type;
  kind.dtype = dtype;
  kind.slowness = 12;  // a call copies all its arrays
  kind.flat = true;
  kind.rows_move = hbm_rows >= 0;
  kind.make = make;
  kind.missing = StagedTable::Missing;
  return kind;
}

const TableKind kTables[] = {CudaTable(-1, KeyType::kInt64, DType::kFloat32),
                             CudaTable(-1, KeyType::kInt32, DType::kFloat16),
                             CudaTable(0, KeyType::kUint64, DType::kBfloat16),
                             CudaTable(7, KeyType::kInt64, DType::kFloat32),
                             CudaTable(100, KeyType::kInt32, DType::kBfloat16)};
INSTANTIATE_TABLE_SUITES(Cuda, kTables);

const TableKind kCatchUpTables[] = {CudaTable(-1, KeyType::kInt64, DType::kFloat32),
                                    CudaTable(7, KeyType::kInt32, DType::kFloat32),
                                    CudaTable(100, KeyType::kUint64, DType::kBfloat16)};
INSTANTIATE_CATCH_UP_SUITES(Cuda, kCatchUpTables);

struct CudaTiers {
  static constexpr int kSlowness = 1;
  static std::string Missing() { return StagedTable::Missing(); }
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    return StagedTable::Make(options, table);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Tiers, CudaTiers);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
