// The contract suite of a device on a GPU: work.
#include "tests/cc/device_suite_work.h"
#include "tests/cuda/cuda_setup.h"

namespace dynemb {
namespace testing_device {

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, DeviceWork, CudaSetup);

}  // namespace testing_device
}  // namespace dynemb
