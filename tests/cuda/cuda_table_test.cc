// The contract suites of tables, on tables in a GPU's memory.
#include <memory>
#include <string>

#include "tests/cc/table_suite_catch_up.h"
#include "tests/cc/table_suite_catch_up_saved.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/tiers_suite.h"
#include "tests/cuda/staged_table.h"

namespace dynemb {
namespace testing_table {
namespace {

// `kHbmRows`: the number of rows without state that fit in the device tier; -1: all rows.
template <KeyType kKey, DType kDType, int kHbmRows>
struct CudaConfig {
  static constexpr KeyType key_type = kKey;
  static constexpr DType dtype = kDType;
  static constexpr size_t slowness = 2;
  static std::string Missing() { return StagedTable::Missing(); }
  static constexpr bool flat = true;
  static constexpr bool rows_move = kHbmRows >= 0;
  static Status Make(const TableOptions& given, std::unique_ptr<Table>* table) {
    TableOptions options = given;
    options.tier = kHbmRows < 0 ? Tier::kHbm : Tier::kHybrid;
    if (kHbmRows >= 0) {
      const RowLayout row(SizeOf(kKey), kDType, options.dim, 0, 16);
      options.max_hbm_bytes = static_cast<uint64_t>(kHbmRows) * row.stride;
    }
    return StagedTable::Make(options, table);
  }
};

using CudaTables = ::testing::Types<CudaConfig<KeyType::kInt64, DType::kFloat32, -1>,
                                    CudaConfig<KeyType::kInt32, DType::kFloat16, -1>,
                                    CudaConfig<KeyType::kUint64, DType::kBfloat16, 0>,
                                    CudaConfig<KeyType::kInt64, DType::kFloat32, 7>,
                                    CudaConfig<KeyType::kInt32, DType::kBfloat16, 100>>;
INSTANTIATE_TABLE_SUITES(Cuda, CudaTables);

using CudaCatchUpTables = ::testing::Types<CudaConfig<KeyType::kInt64, DType::kFloat32, -1>,
                                           CudaConfig<KeyType::kInt32, DType::kFloat32, 7>,
                                           CudaConfig<KeyType::kUint64, DType::kBfloat16, 100>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, TableCatchUp, CudaCatchUpTables);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, TableCatchUpSaved, CudaCatchUpTables);

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
