// Prints one line about GPU 0. Exits with 77, and prints the reason, if it cannot be used.
#include <cstdio>

#include "cc/device/cuda_device.h"

int main() {
  dynemb::CudaDevice* device = nullptr;
  dynemb::Status status = dynemb::CudaDevice::Get(0, &device);
  size_t left = 0;
  if (status.ok()) status = device->FreeMemory(&left);
  if (!status.ok()) {
    std::printf("no GPU: %s\n", status.message().c_str());
    return 77;
  }
  std::printf("%s, %zu of %zu MiB free\n", device->name().c_str(), left >> 20,
              device->memory() >> 20);
  return 0;
}
