// DeviceConfig: device tables on a simulated device, for the contract suites of Table.
#ifndef DYNEMB_TESTS_CC_DEVICE_CONFIG_H_
#define DYNEMB_TESTS_CC_DEVICE_CONFIG_H_

#include <memory>
#include <string>

#include "cc/device/simulated_tables.h"
#include "cc/table/table.h"

namespace dynemb {
namespace testing_table {

// `kHbmRows`: the number of rows of the smallest stride that fit in the device tier; -1: all rows.
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

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_CONFIG_H_
