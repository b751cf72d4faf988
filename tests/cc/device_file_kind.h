// Kinds of tables on a simulated device whose memory has room for a few rows only; the others are
// in files.
#ifndef DYNEMB_TESTS_CC_DEVICE_FILE_KIND_H_
#define DYNEMB_TESTS_CC_DEVICE_FILE_KIND_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "cc/file/file_rows.h"
#include "tests/cc/device_config.h"
#include "tests/cc/file_table_kind.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace testing_table {

// Memory holds `hbm_rows` rows of this state width in the device tier, and `host_rows` in the host
// tier.
template <class Device>
Status MakeDeviceFileTable(TableOptions options, const FileOptions& files, uint64_t hbm_rows,
                           uint64_t host_rows, int64_t state_width, Device* device,
                           std::unique_ptr<Table>* table) {
  const RowLayout row(SizeOf(options.key_type), options.dtype, options.dim, state_width, 16);
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = hbm_rows * row.stride;
  options.max_dram_bytes = host_rows * row.stride;
  std::unique_ptr<ColdRows> cold;
  DYNEMB_RETURN_IF_ERROR(FileRows::Create(files, options, &cold));
  return DeviceTable<Device>::Make(options, device, table, std::move(cold));
}

template <class Device>
TableKind DeviceFileTable(uint64_t hbm_rows, uint64_t host_rows, KeyType key_type, DType dtype,
                          size_t slowness = 16) {
  TableKind kind = SimulatedTable<Device>(0, key_type, dtype, slowness);
  kind.cold = true;
  kind.make = [hbm_rows, host_rows](const TableOptions& options, std::unique_ptr<Table>* table) {
    static Device device;
    return MakeDeviceFileTable(options, TestFiles(), hbm_rows, host_rows, 0, &device, table);
  };
  return kind;
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_FILE_KIND_H_
