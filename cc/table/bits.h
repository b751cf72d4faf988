// The bits of a word, in host and device code.
#ifndef DYNEMB_TABLE_BITS_H_
#define DYNEMB_TABLE_BITS_H_

#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb {

// The number of the lowest bit that is set. `bits` is not 0.
DYNEMB_HD inline uint32_t LowestBit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__ffs(static_cast<int>(bits)) - 1);
#else
  return static_cast<uint32_t>(__builtin_ctz(bits));
#endif
}
DYNEMB_HD inline uint32_t LowestBit(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__ffsll(static_cast<long long>(bits)) - 1);
#else
  return static_cast<uint32_t>(__builtin_ctzll(bits));
#endif
}

// The number of bits that are set.
DYNEMB_HD inline uint32_t CountBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(bits));
#else
  return static_cast<uint32_t>(__builtin_popcount(bits));
#endif
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BITS_H_
