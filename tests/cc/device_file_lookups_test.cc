// The suites of Lookups, for tables of which most rows are in files: on a simulated device, and
// those of ApplyPooled on the host.
#include <gtest/gtest.h>

#include <memory>

#include "tests/cc/device_file_kind.h"
#include "tests/cc/lookups_suite.h"
#include "tests/cc/lookups_suite_admission.h"
#include "tests/cc/lookups_suite_pooled.h"
#include "tests/cc/simulated_lookups.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

// Memory holds the rows of a step, and few others.
template <class Device, uint64_t kHotRows>
struct WithFiles : SimulatedLookups<Device, 3> {
  static constexpr Tick kSteps = 20;
  static constexpr size_t kMostIds = 600;
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    const int64_t state_width = 3 * options.dim + 1;  // the widest of the suites
    return MakeDeviceFileTable(options, TestFiles(), kHotRows / 3, kHotRows - kHotRows / 3,
                               state_width, &SimulatedLookups<Device, 3>::device(), table);
  }
};
template <uint64_t kHotRows>
using Places =
    ::testing::Types<WithFiles<ThreadsDevice, kHotRows>, WithFiles<NarrowTeamsDevice, kHotRows>>;
template <class Device>
struct FewSteps : WithFiles<Device, 200> {
  static constexpr Tick kSteps = kSanitized ? 4 : 20;
};
using FewStepsPlaces = ::testing::Types<FewSteps<ThreadsDevice>, FewSteps<NarrowTeamsDevice>>;

INSTANTIATE_TYPED_TEST_SUITE_P(WithFiles, LookupsTest, Places<200>);
INSTANTIATE_TYPED_TEST_SUITE_P(WithFiles, LookupsAdmissionTest, Places<600>);
INSTANTIATE_TYPED_TEST_SUITE_P(WithFiles, ApplyPooledTest, FewStepsPlaces);

struct HostWithFiles : HostPlace {
  static constexpr Tick kSteps = kSanitized ? 4 : 20;
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    TableOptions host = options;
    host.tier = Tier::kHost;
    const RowLayout row(SizeOf(options.key_type), options.dtype, options.dim, 3 * options.dim + 1);
    return CreateFileTable(host, TestFiles(), 200 * row.stride, table);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(HostWithFiles, ApplyPooledTest, ::testing::Types<HostWithFiles>);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
