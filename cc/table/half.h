// Conversion of float16 (IEEE binary16) and bfloat16 to and from float32, on bit patterns.
//
// Contract:
//
// - ToFloat is exact.
// - ToNearest rounds to nearest, ties to even, and overflows to infinity as IEEE requires.
// - Stochastic(value, bits) rounds up in magnitude with a probability equal to the fraction that is
//   cut off. Over uniform `bits`, the expectation is therefore the value itself, up to the largest
//   finite number. This is exact (for float16 below 2^-25: within 2^-24 of a unit in the last
//   place). Between the largest finite number and the point where rounding to nearest overflows,
//   the result is the largest finite number.
// - In both directions, NaN stays NaN with its sign, and infinity stays infinity. In conversions to
//   16 bits, a NaN keeps the leading bits of its payload, and its quiet bit is set.
//
// All functions are branch-free, for SIMD. They do not depend on the denormal modes that TensorFlow
// sets in its threads: no float operation has a denormal operand or result that matters.
#ifndef DYNEMB_TABLE_HALF_H_
#define DYNEMB_TABLE_HALF_H_

#include <cstdint>

#include "cc/table/float_bits.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"
#include "cc/table/unaligned.h"

namespace dynemb {

namespace internal_half {
constexpr uint32_t kInfinity = 0x7F800000u;       // of float32
constexpr uint32_t kQuiet = 0x00400000u;          // the bit of a quiet NaN, in float32
constexpr uint32_t kSmallestNormal = 113u << 23;  // float16's smallest normal, 2^-14, as float32
}  // namespace internal_half

// The conversions of a 16-bit format: ToFloat, ToNearest and Stochastic.
template <DType kType>
struct HalfFormat;

template <>
struct HalfFormat<DType::kBfloat16> {
  static constexpr uint32_t kOverflow = 0x7F7F8000u;  // from here on, ToNearest gives infinity
  static constexpr uint32_t kLargest = 0x7F7Fu;

  DYNEMB_HD static DYNEMB_INLINE float ToFloat(uint16_t h) {
    return BitsToFloat(static_cast<uint32_t>(h) << 16);
  }

  DYNEMB_HD static DYNEMB_INLINE uint16_t ToNearest(float f) {
    const uint32_t u = FloatBits(f);
    const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u | internal_half::kQuiet) >> 16;
    return static_cast<uint16_t>(
        Select((u & 0x7FFFFFFFu) > internal_half::kInfinity, nan, rounded));
  }

  // The float32 patterns between two neighboring results are equidistant in every binade,
  // including the binade of denormals. Adding 16 random bits and truncating therefore rounds up
  // with exactly the right probability.
  DYNEMB_HD static DYNEMB_INLINE uint16_t Stochastic(float f, uint32_t bits) {
    const uint32_t u = FloatBits(f);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const uint32_t up = (magnitude + (bits >> 16)) >> 16;
    const uint32_t finite = (up < kLargest ? up : kLargest) | ((u >> 16) & 0x8000u);
    return static_cast<uint16_t>(Select(magnitude >= kOverflow, ToNearest(f), finite));
  }
};

template <>
struct HalfFormat<DType::kFloat16> {
  static constexpr uint32_t kOverflow = 0x477FF000u;  // 65520
  static constexpr uint32_t kLargest = 0x7BFFu;

  DYNEMB_HD static DYNEMB_INLINE float ToFloat(uint16_t h) {
    const uint32_t shifted = (h & 0x7FFFu) << 13;
    const uint32_t exponent = shifted & (0x7C00u << 13);
    // A subnormal is read as 2^-14 (1 + m / 1024), a normal float32, minus 2^-14.
    const float subnormal = BitsToFloat(shifted + internal_half::kSmallestNormal) -
                            BitsToFloat(internal_half::kSmallestNormal);
    const uint32_t normal = shifted + (112u << 23);
    const uint32_t special = shifted | internal_half::kInfinity;
    const uint32_t finite = Select(exponent == 0, FloatBits(subnormal), normal);
    const uint32_t magnitude = Select(exponent == (0x7C00u << 13), special, finite);
    return BitsToFloat(magnitude | (static_cast<uint32_t>(h & 0x8000u) << 16));
  }

  DYNEMB_HD static DYNEMB_INLINE uint16_t ToNearest(float f) {
    const uint32_t u = FloatBits(f);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const bool tiny = magnitude < internal_half::kSmallestNormal;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 moves 2^-24 to the last bit of the significand; the addition itself rounds to
    // nearest even.
    const float small = BitsToFloat(Select(tiny, magnitude, 0u));
    const uint32_t subnormal = FloatBits(small + 0.5f) - FloatBits(0.5f);
    const uint32_t nan = 0x7E00u | ((u >> 13) & 0x3FFu);
    const uint32_t special = Select(magnitude > internal_half::kInfinity, nan, 0x7C00u);
    const uint32_t finite = Select(tiny, subnormal, normal);
    const uint32_t result = Select(magnitude >= kOverflow, special, finite);
    return static_cast<uint16_t>(result | ((u >> 16) & 0x8000u));
  }

  DYNEMB_HD static DYNEMB_INLINE uint16_t Stochastic(float f, uint32_t bits) {
    const uint32_t u = FloatBits(f);
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const bool tiny = magnitude < internal_half::kSmallestNormal;
    const uint32_t normal = (magnitude - (112u << 23) + (bits >> 19)) >> 13;
    // A subnormal is a multiple of 2^-24, whatever the exponent of f, so adding 13 bits to the
    // pattern would be wrong.
    const float small = BitsToFloat(Select(tiny, magnitude, 0u));
    const float scaled = small * 0x1p24f;
    const int32_t whole = static_cast<int32_t>(scaled);
    const float fraction = scaled - static_cast<float>(whole);
    const float unit = static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
    const uint32_t subnormal = static_cast<uint32_t>(whole) + (unit < fraction ? 1u : 0u);
    const uint32_t up = normal < kLargest ? normal : kLargest;
    const uint32_t finite = Select(tiny, subnormal, up);
    const uint32_t result = finite | ((u >> 16) & 0x8000u);
    return static_cast<uint16_t>(Select(magnitude >= kOverflow, ToNearest(f), result));
  }
};

// Conversions of n elements. The 16-bit array may have any alignment. `from` and `to` do not
// overlap.
template <DType kType>
DYNEMB_INLINE void HalfToFloat(const void* DYNEMB_RESTRICT from, int64_t n,
                               float* DYNEMB_RESTRICT to) {
  const auto* p = static_cast<const unsigned char*>(from);
  for (int64_t i = 0; i < n; ++i) {
    to[i] = HalfFormat<kType>::ToFloat(LoadUnaligned<uint16_t>(p + 2 * i));
  }
}

template <DType kType>
DYNEMB_INLINE void FloatToHalf(const float* DYNEMB_RESTRICT from, int64_t n,
                               void* DYNEMB_RESTRICT to) {
  auto* p = static_cast<unsigned char*>(to);
  for (int64_t i = 0; i < n; ++i) {
    StoreUnaligned(p + 2 * i, HalfFormat<kType>::ToNearest(from[i]));
  }
}

template <DType kType>
DYNEMB_INLINE void FloatToHalfStochastic(const float* DYNEMB_RESTRICT from,
                                         const uint32_t* DYNEMB_RESTRICT bits, int64_t n,
                                         void* DYNEMB_RESTRICT to) {
  auto* p = static_cast<unsigned char*>(to);
  for (int64_t i = 0; i < n; ++i) {
    StoreUnaligned(p + 2 * i, HalfFormat<kType>::Stochastic(from[i], bits[i]));
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HALF_H_
