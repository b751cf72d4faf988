#include "cc/table/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cc/table/float_bits.h"
#include "cc/table/philox.h"
#include "tests/cc/sanitizers.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace dynemb {
namespace {

// The parameters of each format, for a second, slow implementation of the conversions.
template <DType kType>
struct Shape;
template <>
struct Shape<DType::kFloat16> {
  static constexpr int kMantissa = 10, kBias = 15, kExponents = 32;
};
template <>
struct Shape<DType::kBfloat16> {
  static constexpr int kMantissa = 7, kBias = 127, kExponents = 256;
};

template <class Format>
class HalfTest : public testing::Test {};

template <DType kType>
struct Format : HalfFormat<kType>, Shape<kType> {
  using S = Shape<kType>;
  static constexpr uint16_t kInfinity = (S::kExponents - 1) << S::kMantissa;

  static bool IsNan(uint16_t h) { return (h & 0x7FFF) > kInfinity; }

  // The value by the definition of the format. Not for NaN.
  static double Value(uint16_t h) {
    const int mantissa = h & ((1 << S::kMantissa) - 1);
    const int exponent = (h & 0x7FFF) >> S::kMantissa;
    double v = exponent == 0
                   ? std::ldexp(mantissa, 1 - S::kBias - S::kMantissa)
                   : std::ldexp(mantissa + (1 << S::kMantissa), exponent - S::kBias - S::kMantissa);
    if (exponent == S::kExponents - 1) v = std::numeric_limits<double>::infinity();
    return h & 0x8000 ? -v : v;
  }

  // The largest finite number that is at most |v|; |v| is finite.
  static uint16_t Floor(double v) {
    uint16_t low = 0, high = kInfinity;
    while (high - low > 1) {
      const auto middle = static_cast<uint16_t>((low + high) / 2);
      (Value(middle) <= std::fabs(v) ? low : high) = middle;
    }
    return low;
  }

  static uint16_t Nearest(float f) {
    const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    if (std::isinf(f)) return sign | kInfinity;
    const uint16_t floor = Floor(f);
    // The number above the largest finite one is one step away, as if there were one more exponent.
    const double next = floor + 1 == kInfinity
                            ? 2 * Value(floor) - Value(static_cast<uint16_t>(floor - 1))
                            : Value(static_cast<uint16_t>(floor + 1));
    const double below = std::fabs(f) - Value(floor), above = next - std::fabs(f);
    const bool up = below > above || (below == above && floor % 2 == 1);
    return sign | static_cast<uint16_t>(floor + up);
  }
};

using Formats = testing::Types<Format<DType::kFloat16>, Format<DType::kBfloat16>>;
TYPED_TEST_SUITE(HalfTest, Formats);

// Floats of every sign and exponent, with mantissas that are round, next to round, and random.
std::vector<float> ManyFloats() {
  std::vector<float> floats;
  for (uint32_t top = 0; top < 512; ++top) {
    for (uint32_t m = 0; m < 64; ++m) {
      const uint32_t random = PhiloxBlock(top, m, PhiloxStream::kRounding, 0).word[0];
      for (const uint32_t low : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u,
                                 0xFFFFu, random & 0x1FFFFu}) {
        floats.push_back(BitsToFloat(top << 23 | (m << 17) | low));
      }
    }
  }
  return floats;
}

TYPED_TEST(HalfTest, ToFloatIsExactForAll) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float f = TypeParam::ToFloat(static_cast<uint16_t>(h));
    if (TypeParam::IsNan(static_cast<uint16_t>(h))) {
      EXPECT_TRUE(std::isnan(f)) << h;
      EXPECT_EQ(std::signbit(f), h >= 0x8000) << h;
    } else {
      ASSERT_EQ(f, TypeParam::Value(static_cast<uint16_t>(h))) << h;
      ASSERT_EQ(std::signbit(f), h >= 0x8000) << h;
    }
  }
}

TYPED_TEST(HalfTest, RoundTripKeepsAll) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto h = static_cast<uint16_t>(i);
    const float f = TypeParam::ToFloat(h);
    const uint16_t quiet = 1 << (TypeParam::kMantissa - 1);
    const uint16_t expected = TypeParam::IsNan(h) ? h | quiet : h;
    ASSERT_EQ(TypeParam::ToNearest(f), expected) << h;
    for (const uint32_t bits : {0u, 1u, 0x80000000u, 0xFFFFFFFFu}) {
      ASSERT_EQ(TypeParam::Stochastic(f, bits), expected) << h;
    }
  }
}

TYPED_TEST(HalfTest, NearestAtAndAroundEveryTie) {
  for (uint16_t h = 0; h + 1 < TypeParam::kInfinity; ++h) {
    const double tie = (TypeParam::Value(h) + TypeParam::Value(h + 1)) / 2;
    const auto f = static_cast<float>(tie);
    ASSERT_EQ(f, tie);
    ASSERT_EQ(TypeParam::ToNearest(f), h % 2 == 0 ? h : h + 1) << h;
    ASSERT_EQ(TypeParam::ToNearest(std::nextafter(f, 0.0f)), h) << h;
    ASSERT_EQ(TypeParam::ToNearest(std::nextafter(f, INFINITY)), h + 1) << h;
    ASSERT_EQ(TypeParam::ToNearest(-f), (h % 2 == 0 ? h : h + 1) | 0x8000) << h;
  }
}

TYPED_TEST(HalfTest, NearestAgreesWithTheDefinition) {
  for (const float f : ManyFloats()) {
    if (std::isnan(f)) {
      ASSERT_TRUE(TypeParam::IsNan(TypeParam::ToNearest(f)));
    } else {
      ASSERT_EQ(TypeParam::ToNearest(f), TypeParam::Nearest(f)) << f;
    }
  }
}

TYPED_TEST(HalfTest, StochasticIsOneOfTheTwoNeighbors) {
  for (const float f : ManyFloats()) {
    for (const uint32_t bits : {0u, 0x5A5A5A5Au, 0xFFFFFFFFu}) {
      const uint16_t got = TypeParam::Stochastic(f, bits);
      if (std::isnan(f)) {
        ASSERT_TRUE(TypeParam::IsNan(got));
        continue;
      }
      const uint16_t nearest = TypeParam::Nearest(f);
      if ((nearest & 0x7FFF) == TypeParam::kInfinity) {
        ASSERT_EQ(got, nearest) << f;
        continue;
      }
      ASSERT_EQ(got & 0x8000, nearest & 0x8000) << f;
      const uint16_t magnitude = got & 0x7FFF, floor = TypeParam::Floor(f);
      ASSERT_NE(magnitude, TypeParam::kInfinity) << f;
      ASSERT_TRUE(magnitude == floor || magnitude == floor + 1) << f << " " << got;
      // A number that the format can represent is not rounded, for any bits.
      if (TypeParam::Value(floor) == std::fabs(f)) {
        ASSERT_EQ(magnitude, floor) << f;
      }
    }
  }
}

// Over evenly spread bits, the mean is the value: in each binade, below the smallest normal and
// subnormal number, and up to the largest number.
TYPED_TEST(HalfTest, StochasticIsUnbiased) {
  SKIP_UNDER_ASAN("statistics of code that other tests run");
  constexpr uint32_t kDraws = 1u << 16;
  std::vector<double> values;
  const uint16_t largest = TypeParam::kInfinity - 1;
  for (uint32_t h = 0; h < largest; h += h < 2000 ? 37 : 331) values.push_back(h + 0.3);
  for (const double h : {0.001, 0.25, 1.7, 1023.4, 1024.6, largest - 1.5, largest - 0.5}) {
    values.push_back(h);
  }
  for (const double position : values) {
    const auto floor = static_cast<uint16_t>(position);
    const double low = TypeParam::Value(floor), step = TypeParam::Value(floor + 1) - low;
    const auto f = static_cast<float>(low + (position - floor) * step);
    for (const float signed_f : {f, -f}) {
      double sum = 0;
      for (uint32_t i = 0; i < kDraws; ++i) {
        sum += TypeParam::Value(TypeParam::Stochastic(signed_f, i * 65536u + 32768u)) / step;
      }
      EXPECT_NEAR(sum / kDraws, signed_f / step, 1.0 / kDraws) << position;
    }
  }
}

TYPED_TEST(HalfTest, StochasticNearOverflow) {
  const auto largest = static_cast<uint16_t>(TypeParam::kInfinity - 1);
  const float max = TypeParam::ToFloat(largest);
  const float half_step = (max - TypeParam::ToFloat(largest - 1)) / 2;
  for (const uint32_t bits : {0u, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
    EXPECT_EQ(TypeParam::Stochastic(std::nextafter(max + half_step, 0.0f), bits), largest);
    EXPECT_EQ(TypeParam::Stochastic(max + half_step, bits), TypeParam::kInfinity);
    EXPECT_EQ(TypeParam::Stochastic(-max, bits), largest | 0x8000);
    EXPECT_EQ(TypeParam::Stochastic(-INFINITY, bits), TypeParam::kInfinity | 0x8000);
  }
}

#if defined(__SSE2__)
// TensorFlow's threads flush denormals to zero. A row must not depend on the thread that wrote it.
TYPED_TEST(HalfTest, ResultsDoNotDependOnDenormalModes) {
  std::vector<uint32_t> expected, flushed;
  const std::vector<float> floats = ManyFloats();
  const auto convert = [&floats](std::vector<uint32_t>* to) {
    for (uint32_t h = 0; h < 65536; ++h) {
      to->push_back(FloatBits(TypeParam::ToFloat(static_cast<uint16_t>(h))));
    }
    for (const float f : floats) {
      to->push_back(TypeParam::ToNearest(f));
      to->push_back(TypeParam::Stochastic(f, 0x12345678u));
    }
  };
  convert(&expected);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040u);  // flush to zero, denormals are zero
  convert(&flushed);
  _mm_setcsr(mode);
  EXPECT_EQ(expected, flushed);
}
#endif

}  // namespace
}  // namespace dynemb
