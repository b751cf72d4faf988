// The contract suite of a device on a GPU: memory.
#include "tests/cc/device_suite_memory.h"
#include "tests/cuda/cuda_setup.h"

namespace dynemb {
namespace testing_device {

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, DeviceMemory, CudaSetup);

}  // namespace testing_device
}  // namespace dynemb
