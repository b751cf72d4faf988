// Served tables in a GPU's memory.
#include "cc/serving_device/cuda_served.h"

#include "tests/cc/served_suite.h"
#include "tests/cuda/cuda_place.h"

namespace dynemb {
namespace testing_served_rows {
namespace {

struct Cuda : CudaPlace {
  static ServedPlace* place() {
    ServedPlace* place = nullptr;
    const Status status = CudaServedPlace(/*ordinal=*/0, &place);
    if (!status.ok()) std::abort();
    return place;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, DeviceServedSuite, Cuda);

}  // namespace
}  // namespace testing_served_rows
}  // namespace dynemb
