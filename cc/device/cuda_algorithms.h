// What of CudaDevice is compiled by nvcc, for the sources of CudaDevice only.
#ifndef DYNEMB_DEVICE_CUDA_ALGORITHMS_H_
#define DYNEMB_DEVICE_CUDA_ALGORITHMS_H_

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace dynemb {

// Threads of a block, for all kernels: enough for any GPU to be full, few enough that a kernel may
// have 255 registers.
constexpr unsigned int kCudaThreadsPerBlock = 256;

// All return a cudaError_t. Whether the current GPU can run the kernels of this library.
int FindCudaKernels();

// With `storage` null they only say how many bytes of it they need.
int CudaExclusiveSum(void* storage, size_t* bytes, uint32_t* values, uint32_t n,
                     CUstream_st* stream);
// By the low `bits` bits, at least one, of the keys. From keys and values to either the same arrays
// or the others: *in_others.
int CudaSortPairs(void* storage, size_t* bytes, uint64_t* keys, uint64_t* other_keys,
                  uint32_t* values, uint32_t* other_values, uint32_t n, int bits,
                  CUstream_st* stream, bool* in_others);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_ALGORITHMS_H_
