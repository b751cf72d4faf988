// The functions of cuda_algorithms.cu.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "cc/device/cuda_algorithms.h"
#include "tests/fake_cuda/fake_state.h"

namespace dynemb {

using fake_cuda::Lock;
using fake_cuda::MayUse;
using fake_cuda::Misuse;
using fake_cuda::mutex;

int FindCudaKernels() { return cudaSuccess; }

int CudaExclusiveSum(void* storage, size_t* bytes, uint32_t* values, uint32_t n,
                     CUstream_st* stream) {
  if (storage == nullptr) {
    *bytes = 1000;
    return cudaSuccess;
  }
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a sum in a stream of another GPU, or none");
  stream->queue->work.emplace_back([=] {
    std::memset(storage, 0x5A, 1000);
    std::exclusive_scan(values, values + n, values, 0u);
  });
  return cudaSuccess;
}

template <class Key>
int CudaSortPairs(void* storage, size_t* bytes, Key* keys, Key* other_keys, uint32_t* values,
                  uint32_t* other_values, uint32_t n, int bits, CUstream_st* stream,
                  bool* in_others) {
  if (storage == nullptr) {
    *bytes = 1000;
    return cudaSuccess;
  }
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a sort in a stream of another GPU, or none");
  const bool others = *in_others = (bits + 7) / 8 % 2 != 0;
  stream->queue->work.emplace_back([=] {
    std::memset(storage, 0x5A, 1000);
    const Key mask = bits < static_cast<int>(8 * sizeof(Key)) ? (Key{1} << bits) - 1 : ~Key{0};
    std::vector<std::pair<Key, uint32_t>> pairs(n);
    for (uint32_t i = 0; i < n; ++i) pairs[i] = {keys[i], values[i]};
    std::stable_sort(pairs.begin(), pairs.end(), [mask](const auto& a, const auto& b) {
      return (a.first & mask) < (b.first & mask);
    });
    std::memset(others ? keys : other_keys, 0x5A, n * sizeof(Key));
    std::memset(others ? values : other_values, 0x5A, n * sizeof(uint32_t));
    for (uint32_t i = 0; i < n; ++i) {
      (others ? other_keys : keys)[i] = pairs[i].first;
      (others ? other_values : values)[i] = pairs[i].second;
    }
  });
  return cudaSuccess;
}
template int CudaSortPairs(void*, size_t*, uint64_t*, uint64_t*, uint32_t*, uint32_t*, uint32_t,
                           int, CUstream_st*, bool*);
template int CudaSortPairs(void*, size_t*, uint32_t*, uint32_t*, uint32_t*, uint32_t*, uint32_t,
                           int, CUstream_st*, bool*);

}  // namespace dynemb
