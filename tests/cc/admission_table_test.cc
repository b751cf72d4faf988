// Fused lookups in host tables with admission; table_suite_admission.cc has the calls of one table.
#include <memory>
#include <string>

#include "tests/cc/lookups_suite_admission.h"

namespace dynemb {
namespace testing_table {
namespace {

template <size_t kThreads>
struct Host : HostPlace {
  static constexpr Tick kSteps = 12;
  static constexpr uint64_t kMostIds = 6000;
  static Exec& exec() {
    static ThreadsExec exec(kThreads);
    return exec;
  }
};

using Hosts = ::testing::Types<Host<1>, Host<2>, Host<4>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Host, LookupsAdmissionTest, Hosts);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
