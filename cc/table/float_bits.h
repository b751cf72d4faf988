// The bit pattern of a float32, and a branch-free choice between two patterns.
#ifndef DYNEMB_TABLE_FLOAT_BITS_H_
#define DYNEMB_TABLE_FLOAT_BITS_H_

#include <cstdint>
#include <cstring>

#include "cc/table/portability.h"

namespace dynemb {

DYNEMB_HD DYNEMB_INLINE uint32_t FloatBits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof(bits));
  return bits;
}
DYNEMB_HD DYNEMB_INLINE float BitsToFloat(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
}

// c ? a : b. gcc 12 compiles a plain ?: of computed values to a branch, and then does not vectorize
// the loop.
DYNEMB_HD DYNEMB_INLINE uint32_t Select(bool c, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(c);
  return (a & mask) | (b & ~mask);
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_FLOAT_BITS_H_
