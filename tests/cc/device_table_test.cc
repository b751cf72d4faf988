// The contract suite of Table on device tables, whose device is simulated: all rows in the device
// tier, all in the host tier, and both; kernels run by one thread for each key or row, and by
// emulated warps.

#include <algorithm>
#include <memory>
#include <utility>

#include "cc/device/simulated_tables.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

// `kHbmRows`: how many rows of the least stride the device tier holds; -1: all.
template <KeyType kKey, DType kDType, class Device, int kHbmRows, size_t kSlowness>
struct DeviceConfig {
  static constexpr KeyType key_type = kKey;
  static constexpr DType dtype = kDType;
  static constexpr size_t slowness = kSlowness;
  static std::string Missing() { return ""; }
  static constexpr bool flat = true;
  static constexpr bool rows_move = kHbmRows >= 0;
  static Status Make(const TableOptions& given, std::unique_ptr<Table>* table) {
    static Device device;
    TableOptions options = given;
    options.tier = kHbmRows < 0 ? Tier::kHbm : Tier::kHybrid;
    if (kHbmRows >= 0) {
      const RowLayout row(SizeOf(kKey), kDType, options.dim, 0, 16);
      options.max_hbm_bytes = static_cast<uint64_t>(kHbmRows) * row.stride;
    }
    return DeviceTable<Device>::Make(options, &device, table);
  }
};

template <KeyType kKey, DType kDType, int kHbmRows>
using Quick = DeviceConfig<kKey, kDType, ThreadsDevice, kHbmRows, 2>;

using DeviceTables = ::testing::Types<
    Quick<KeyType::kInt64, DType::kFloat32, -1>, Quick<KeyType::kInt32, DType::kFloat16, -1>,
    Quick<KeyType::kUint64, DType::kBfloat16, 0>, Quick<KeyType::kInt64, DType::kFloat32, 7>,
    Quick<KeyType::kInt32, DType::kBfloat16, 100>>;
INSTANTIATE_TABLE_SUITES(Device, DeviceTables);

// Under thread sanitizer, teams of 32 say no more than teams of 8, and take minutes.
using WarpTables =
    ::testing::Types<DeviceConfig<KeyType::kInt64, DType::kFloat32, NarrowTeamsDevice, -1, 25 * 8>
#if !defined(__SANITIZE_THREAD__)
                     ,
                     DeviceConfig<KeyType::kInt32, DType::kFloat16, WideTeamsDevice, 20, 25 * 32>
#endif
                     >;
INSTANTIATE_TABLE_SUITES(DeviceWarp, WarpTables);

// A training step gives work and does not wait for it: in tables that have room, that are full and
// evict, with one tier and with two. (A table that grows waits once in a while.)
TEST(DeviceSteps, DoNotWait) {
  struct Case {
    int64_t max_capacity;
    uint64_t keys;  // drawn from so many
    int hbm_rows;
  };
  for (const Case c :
       {Case{0, 6000, -1}, Case{0, 6000, 500}, Case{4000, 20000, -1}, Case{4000, 20000, 500}}) {
    SCOPED_TRACE(testing::Message() << c.max_capacity << " " << c.hbm_rows);
    ThreadsDevice device;
    ThreadsExec exec(2);
    TableOptions options;
    options.name = "steps";
    options.dim = 4;
    options.init_capacity = c.max_capacity != 0 ? c.max_capacity : 5600;
    options.max_capacity = c.max_capacity;
    options.tier = c.hbm_rows < 0 ? Tier::kHbm : Tier::kHybrid;
    options.max_hbm_bytes = static_cast<uint64_t>(std::max(c.hbm_rows, 0)) * 48;
    std::unique_ptr<Table> made;
    ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &made).ok());
    Subject t(std::move(made), &exec);
    const StateSpec spec{"adagrad", {4}, {0.0f}};
    ASSERT_TRUE(t->AttachState(exec, spec).ok());
    const RowOptimizer adagrad(OptimizerKind::kAdagrad, {}, Hyper(), 4);
    Random random(3);
    uint64_t waits = 0;
    for (int step = 0; step < 250; ++step) {
      if (step == 150) waits = device.waits();
      Keys keys;
      for (int i = 0; i < 300; ++i) keys.push_back(random.Below(c.keys));
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      RowIds rows;
      t.LookupOrInsert(keys, &rows);
      ASSERT_TRUE(t->Promote(exec, t.tick()).ok());
      t.Apply(adagrad, keys, rows, Floats(keys.size() * 4, 0.5f));
    }
    EXPECT_EQ(device.waits(), waits);
    EXPECT_EQ(t.stats().evictions != 0, c.max_capacity != 0);
    t.Check();
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
