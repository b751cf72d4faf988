// GPU 0 for the contract suite of devices (tests/cc/device_suite.h), and for other tests.
#ifndef DYNEMB_TESTS_CUDA_CUDA_SETUP_H_
#define DYNEMB_TESTS_CUDA_CUDA_SETUP_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "cc/device/cuda_device.cuh"

namespace dynemb {
namespace testing_device {

struct CudaSetup {
  using Device = CudaDevice;
  static constexpr size_t kTeams = 100000;

  static Device* Get() {
    Device* device = nullptr;
    return CudaDevice::Get(0, &device).ok() ? device : nullptr;
  }
  static std::string Missing() {
    Device* device = nullptr;
    return "no GPU here: " + CudaDevice::Get(0, &device).message();
  }
  static Device::Stream StreamOf(int i) {
    // Never destroyed, like TensorFlow's streams.
    static const std::array<Device::Stream, 3> streams = [] {
      std::array<Device::Stream, 3> made{};
      for (size_t s = 1; s < made.size(); ++s) {
        EXPECT_EQ(cudaStreamCreateWithFlags(&made[s], cudaStreamNonBlocking), cudaSuccess);
      }
      return made;
    }();
    return streams[static_cast<size_t>(i)];
  }
  static size_t FreeMemory() {
    size_t bytes = 0;
    EXPECT_EQ(Get()->FreeMemory(&bytes).message(), "");
    return bytes;
  }
};

}  // namespace testing_device
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CUDA_CUDA_SETUP_H_
