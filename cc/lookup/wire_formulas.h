// The encoding of a row in int8 on the wire (wire.h), for host and device code.
//
// Contract. The results have the same bits wherever they are computed without contraction, in any
// of the denormal modes that TensorFlow sets in its threads.
#ifndef DYNEMB_LOOKUP_WIRE_FORMULAS_H_
#define DYNEMB_LOOKUP_WIRE_FORMULAS_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "cc/table/float_bits.h"
#include "cc/table/portability.h"

namespace dynemb::formulas {

// The smallest scale of a row that is not sent as zeros. A denormal element is then at most half
// the scale, and becomes 0; no other number is denormal.
inline constexpr float kLeastScale = 0x1p-125f;
// The scale of a row that is not finite: the NaN that arithmetic on a GPU returns for any NaN, so
// that such rows arrive with the same bits everywhere.
inline constexpr uint32_t kNanScale = 0x7FFFFFFFu;

// The bits of |x|. Their order is the order of magnitudes, with NaN above infinity.
DYNEMB_HD DYNEMB_INLINE uint32_t Magnitude(float x) { return FloatBits(x) & 0x7FFFFFFFu; }

struct Int8Scale {
  float scale;
  float inverse;  // about 1 / scale; 0: all elements are sent as 0
};

// The scale of a row with this largest Magnitude.
DYNEMB_HD DYNEMB_INLINE Int8Scale ScaleOf(uint32_t largest_magnitude) {
  constexpr uint32_t kInfinity = 0x7F800000u;
  if (largest_magnitude >= kInfinity) return {BitsToFloat(kNanScale), 0.0f};
  const float largest = BitsToFloat(largest_magnitude);
  float scale = largest / 127.0f;
  // 127 times a scale that was rounded up may overflow; the next smaller scale does not.
  if (scale * 127.0f > std::numeric_limits<float>::max()) scale = BitsToFloat(FloatBits(scale) - 1);
  if (!(scale >= kLeastScale)) return {0.0f, 0.0f};
  return {scale, 127.0f / largest};
}

// Rounds to nearest, ties to even.
DYNEMB_HD DYNEMB_INLINE int8_t ToInt8(const Int8Scale& scale, float x) {
  const float scaled = scale.inverse == 0.0f ? 0.0f : x * scale.inverse;
  return static_cast<int8_t>(std::nearbyint(scaled));
}

DYNEMB_HD DYNEMB_INLINE float FromInt8(float scale, int8_t q) {
  return scale * static_cast<float>(q);
}

}  // namespace dynemb::formulas

#endif  // DYNEMB_LOOKUP_WIRE_FORMULAS_H_
