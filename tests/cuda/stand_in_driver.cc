// In the place of NVIDIA's driver: has no GPU, and is of the CUDA version that STAND_IN_CUDA names,
// such as 12040.
#include <cstdlib>

extern "C" int cuDriverGetVersion(int* version) {
  *version = std::atoi(std::getenv("STAND_IN_CUDA"));
  return 0;
}

extern "C" int cuInit(unsigned int) { return 100; }  // CUDA_ERROR_NO_DEVICE
