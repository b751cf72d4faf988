// The suites of Lookups on a simulated device, for tables of which most rows are in files.
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
template <class Device>
struct WithFiles : SimulatedLookups<Device, 3> {
  static constexpr Tick kSteps = kSanitized ? 4 : 20;
  static constexpr size_t kMostIds = 150;
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    const int64_t state_width = 3 * options.dim + 1;  // the widest of the suites
    return MakeDeviceFileTable(options, TestFiles(), 60, 140, state_width,
                               &SimulatedLookups<Device, 3>::device(), table);
  }
};
using Places = ::testing::Types<WithFiles<ThreadsDevice>, WithFiles<NarrowTeamsDevice>>;

INSTANTIATE_TYPED_TEST_SUITE_P(WithFiles, LookupsTest, Places);
INSTANTIATE_TYPED_TEST_SUITE_P(WithFiles, LookupsAdmissionTest, Places);
INSTANTIATE_TYPED_TEST_SUITE_P(WithFiles, ApplyPooledTest, Places);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
