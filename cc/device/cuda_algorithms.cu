#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "cc/device/cuda_algorithms.h"

namespace dynemb {
namespace internal_cuda_device {

__global__ void AnyKernel() {}

}  // namespace internal_cuda_device

int FindCudaKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, internal_cuda_device::AnyKernel);
}

int CudaExclusiveSum(void* storage, size_t* bytes, uint32_t* values, uint32_t n,
                     CUstream_st* stream) {
  return cub::DeviceScan::ExclusiveSum(storage, *bytes, values, n, stream);
}

template <class Key>
int CudaSortPairs(void* storage, size_t* bytes, Key* keys, Key* other_keys, uint32_t* values,
                  uint32_t* other_values, uint32_t n, int bits, CUstream_st* stream,
                  bool* in_others) {
  cub::DoubleBuffer<Key> both_keys(keys, other_keys);
  cub::DoubleBuffer<uint32_t> both_values(values, other_values);
  const cudaError_t error =
      cub::DeviceRadixSort::SortPairs(storage, *bytes, both_keys, both_values, n, 0, bits, stream);
  *in_others = both_keys.Current() != keys;
  return error;
}
template int CudaSortPairs(void*, size_t*, uint64_t*, uint64_t*, uint32_t*, uint32_t*, uint32_t,
                           int, CUstream_st*, bool*);
template int CudaSortPairs(void*, size_t*, uint32_t*, uint32_t*, uint32_t*, uint32_t*, uint32_t,
                           int, CUstream_st*, bool*);

}  // namespace dynemb
