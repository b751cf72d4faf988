// The functions of CudaDevice that nvcc compiles. Only the sources of CudaDevice include this
// header.
#ifndef DYNEMB_DEVICE_CUDA_ALGORITHMS_H_
#define DYNEMB_DEVICE_CUDA_ALGORITHMS_H_

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace dynemb {

// Threads per block: enough to fill any GPU, and few enough that a kernel may use
// 255 registers.
constexpr unsigned int kCudaThreadsPerBlock = 256;
// The same for ForRows, whose teams may have very different amounts of work. The place of a block
// becomes free when its last team ends.
constexpr unsigned int kCudaThreadsPerRowBlock = 64;

// All functions return a cudaError_t.

// Fails if the current GPU cannot run the kernels of this library.
int FindCudaKernels();

// With null `storage`, the following functions only set *bytes to the size of the storage that they
// need.
int CudaExclusiveSum(void* storage, size_t* bytes, uint32_t* values, uint32_t n,
                     CUstream_st* stream);
// Sorts by the low `bits` >= 1 bits of the keys. The result is in `keys` and `values`, or in the
// other arrays if *in_others.
template <class Key>  // uint64_t or uint32_t
int CudaSortPairs(void* storage, size_t* bytes, Key* keys, Key* other_keys, uint32_t* values,
                  uint32_t* other_values, uint32_t n, int bits, CUstream_st* stream,
                  bool* in_others);

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_ALGORITHMS_H_
