// A library with kernels, like the library of the operators. load_test.cc loads it.
#include <cstdint>
#include <cstdio>

#include "cc/device/cuda_device.cuh"

namespace dynemb {

struct Zero {
  uint32_t* to;
  DYNEMB_HD void operator()(size_t i) const { to[i] = 0; }
};

}  // namespace dynemb

// Launches a kernel on GPU 0. Writes the error to `message`, or an empty string.
extern "C" void DynembRunKernel(char* message, size_t bytes) {
  dynemb::CudaDevice* device = nullptr;
  dynemb::Status status = dynemb::CudaDevice::Get(0, &device);
  if (status.ok()) {
    dynemb::CudaDevice::Session session(*device, nullptr);
    session.ForEach(1000, dynemb::Zero{session.Take<uint32_t>(1000)});
    status = session.Synchronize();
  }
  std::snprintf(message, bytes, "%s", status.message().c_str());
}
