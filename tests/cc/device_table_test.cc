// The contract suite of Table on device tables, whose device is simulated: all rows in the device
// tier, all in the host tier, and both; kernels run by one thread for each key or row, and by
// emulated warps.
#include "cc/device/device_table.h"

#include <memory>

#include "cc/device/simulated_device.h"
#include "cc/device/thread_lane.h"
#include "cc/table/lanes_lockstep.h"
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

using Threads = SimulatedDevice<ThreadLane, ThreadLane>;
template <KeyType kKey, DType kDType, int kHbmRows>
using Quick = DeviceConfig<kKey, kDType, Threads, kHbmRows, 2>;

using DeviceTables = ::testing::Types<
    Quick<KeyType::kInt64, DType::kFloat32, -1>, Quick<KeyType::kInt32, DType::kFloat16, -1>,
    Quick<KeyType::kUint64, DType::kBfloat16, 0>, Quick<KeyType::kInt64, DType::kFloat32, 7>,
    Quick<KeyType::kInt32, DType::kBfloat16, 100>>;
INSTANTIATE_TABLE_SUITES(Device, DeviceTables);

template <uint32_t kKeyWidth, uint32_t kRowWidth>
using Warps = SimulatedDevice<LockstepLanes<kKeyWidth>, LockstepLanes<kRowWidth>>;
using WarpTables =
    ::testing::Types<DeviceConfig<KeyType::kInt64, DType::kFloat32, Warps<8, 4>, -1, 25 * 8>,
                     DeviceConfig<KeyType::kInt32, DType::kFloat16, Warps<4, 32>, 20, 25 * 32>>;
INSTANTIATE_TABLE_SUITES(DeviceWarp, WarpTables);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
