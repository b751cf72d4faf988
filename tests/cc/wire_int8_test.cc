// The bounds of int8 on the wire, on the host and on simulated devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cc/lookup/wire.h"
#include "cc/table/codec.h"
#include "cc/table/half.h"
#include "tests/cc/wire_fixture.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kMin = std::numeric_limits<float>::min();  // the least normal number
constexpr float kTiny = std::numeric_limits<float>::denorm_min();
// A row whose largest magnitude is smaller arrives as zeros.
constexpr double kUnderflow = 127 * 0x1p-125;

// The rows of one table, sent as int8: their values before and after, and the message.
struct SentInt8 {
  std::vector<float> sent, arrived;
  std::vector<float> scales;  // [rows]
  std::vector<int8_t> q;      // [rows, dim]
};

template <class Place>
class WireInt8Test : public WireFixture<Place> {
 protected:
  // The place sends what the model does (WireFixture), so the model's rows are the place's.
  SentInt8 Send(DType dtype, int64_t dim, const std::vector<float>& x) {
    SentInt8 result;
    const size_t rows = x.size() / static_cast<size_t>(dim);
    Rows r =
        MakeRows({{dtype, dim, WireType::kInt8}}, {static_cast<int64_t>(rows)}, &this->random_);
    const auto elements = static_cast<int64_t>(x.size());
    StoreVector(dtype, x.data(), elements, r.vectors[0].data());
    Sent sent;
    this->Check(r, 0, {}, &sent);
    result.sent.resize(x.size());
    result.arrived.resize(x.size());
    LoadVector(dtype, r.vectors[0].data(), elements, result.sent.data());
    LoadVector(dtype, sent.vectors[0].data(), elements, result.arrived.data());
    result.scales.resize(rows);
    result.q.resize(x.size());
    std::memcpy(result.scales.data(), sent.message.data(), 4 * rows);
    std::memcpy(result.q.data(), sent.message.data() + 4 * rows, x.size());
    return result;
  }
};

TYPED_TEST_SUITE(WireInt8Test, Places);

// Checks the bound of wire.h for finite rows.
void CheckBound(DType dtype, int64_t dim, const SentInt8& s) {
  // The error that the final rounding to the table's type may add.
  const double relative = dtype == DType::kFloat32   ? 0
                          : dtype == DType::kFloat16 ? std::ldexp(1, -11)
                                                     : std::ldexp(1, -8);
  const double absolute = dtype == DType::kFloat16 ? std::ldexp(1, -25) : kTiny;
  const auto d = static_cast<size_t>(dim);
  for (size_t row = 0; row < s.scales.size(); ++row) {
    double largest = 0;
    for (size_t i = row * d; i < (row + 1) * d; ++i) {
      largest = std::max(largest, std::abs(double{s.sent[i]}));
    }
    if (largest < kUnderflow) {
      ASSERT_EQ(s.scales[row], 0.0f);
      for (size_t i = row * d; i < (row + 1) * d; ++i) ASSERT_EQ(s.arrived[i], 0.0f);
      continue;
    }
    const double scale = largest / 127;
    ASSERT_NEAR(s.scales[row], scale, scale * 1e-6) << "row " << row;
    for (size_t i = row * d; i < (row + 1) * d; ++i) {
      ASSERT_GE(s.q[i], -127);
      const double x = s.sent[i];
      // The quotient x / scale is rounded first, which may add an error of 2^-16 of the scale.
      ASSERT_NEAR(double{s.scales[row]} * s.q[i], x, scale * (0.5 + std::ldexp(1, -16)));
      ASSERT_NEAR(s.arrived[i], x,
                  scale * (0.5 + std::ldexp(1, -16)) + std::abs(x) * relative * 1.01 + absolute)
          << "row " << row << ", column " << i % d << ", scale " << scale;
      if (std::abs(x) == largest) {
        ASSERT_EQ(s.q[i], x > 0 ? 127 : -127);
      }
    }
  }
}

TYPED_TEST(WireInt8Test, ErrorIsAtMostHalfTheScale) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (DType dtype : kDTypes) {
    for (int64_t dim : {1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 100, 128, 257, 300, 1000}) {
      std::vector<float> x;
      for (int row = 0; row < (this->kSlow ? 8 : 40); ++row) {
        // Rows of many magnitudes, with large and small elements in one row.
        const float size = std::ldexp(1.0f, static_cast<int>(random() % 20) - 10);
        for (int64_t c = 0; c < dim; ++c) {
          x.push_back(size * normal(random) * (random() % 4 == 0 ? 1e-2f : 1.0f));
        }
      }
      SCOPED_TRACE(testing::Message() << "dtype " << int(dtype) << ", dim " << dim);
      ASSERT_NO_FATAL_FAILURE(CheckBound(dtype, dim, this->Send(dtype, dim, x)));
    }
  }
}

// All exponents: no quotient, scale or product overflows.
TYPED_TEST(WireInt8Test, AnyMagnitude) {
  std::mt19937_64 random(3);
  std::vector<float> x;
  for (int exponent = -149; exponent < 128; ++exponent) {
    for (int repeat = 0; repeat < (this->kSlow ? 2 : 8); ++repeat) {
      for (int c = 0; c < 5; ++c) {
        const double mantissa = 1.0 + static_cast<double>(random() >> 12) * 0x1p-52;
        const float value = static_cast<float>(std::ldexp(mantissa, exponent));
        x.push_back((random() % 2 == 0 ? 1.0f : -1.0f) * std::min(value, kMax));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(CheckBound(DType::kFloat32, 5, this->Send(DType::kFloat32, 5, x)));
}

TYPED_TEST(WireInt8Test, LargestFloatsStayFinite) {
  std::vector<float> x;
  float largest = kMax;
  for (int i = 0; i < (this->kSlow ? 100 : 1000); ++i) {
    for (float other : {0.0f, -largest, largest / 2, 1.0f}) {
      x.push_back(largest);
      x.push_back(other);
    }
    largest = std::nextafter(largest, 0.0f);
  }
  const SentInt8 s = this->Send(DType::kFloat32, 2, x);
  for (size_t i = 0; i < x.size(); ++i) ASSERT_TRUE(std::isfinite(s.arrived[i])) << x[i];
  ASSERT_NO_FATAL_FAILURE(CheckBound(DType::kFloat32, 2, s));
  // The largest numbers of the 16-bit types.
  const std::vector<float> halves = {65504.0f, -65504.0f, 65504.0f, 30000.0f};
  ASSERT_NO_FATAL_FAILURE(CheckBound(DType::kFloat16, 2, this->Send(DType::kFloat16, 2, halves)));
  const float most = HalfFormat<DType::kBfloat16>::ToFloat(0x7F7F);
  const std::vector<float> brains = {most, -most, most, most / 3};
  ASSERT_NO_FATAL_FAILURE(CheckBound(DType::kBfloat16, 2, this->Send(DType::kBfloat16, 2, brains)));
}

TYPED_TEST(WireInt8Test, ZerosAndDenormals) {
  const auto least = static_cast<float>(kUnderflow);
  const float below = std::nextafter(least, 0.0f);
  const std::vector<float> x = {0.0f,   0.0f,   0.0f,       // zeros
                                -0.0f,  0.0f,   -0.0f,      // of either sign
                                kTiny,  -kTiny, 0.0f,       // denormals
                                kMin,   kTiny,  -kMin / 2,  // and the least normal
                                below,  0.0f,   -below,     // the largest row that arrives as zeros
                                1.0f,   kTiny,  -kMin,      // small beside large
                                -least, kTiny,  least / 2,  // the least row that does not
                                least,  kMin,   -kTiny};
  const SentInt8 s = this->Send(DType::kFloat32, 3, x);
  ASSERT_NO_FATAL_FAILURE(CheckBound(DType::kFloat32, 3, s));
  for (size_t i = 0; i < 15; ++i) EXPECT_EQ(s.q[i], 0) << i;
  EXPECT_EQ(s.arrived[15], 1.0f);
}

#if defined(__SSE2__)
// TensorFlow's threads treat denormals as zeros. The caller's thread may not.
TEST(WireDenormalModeTest, BitsDoNotDependOnTheDenormalMode) {
  std::mt19937_64 random(5);
  Rows rows = MakeRows({{DType::kFloat32, 6, WireType::kInt8}}, {20000}, &random);
  auto* const x = reinterpret_cast<float*>(rows.vectors[0].data());
  for (size_t i = 0; i < 120000; ++i) {
    // Magnitudes at which elements, scales or products may be denormal.
    const double mantissa = static_cast<double>(random() >> 12) * 0x1p-51 - 1;
    x[i] = static_cast<float>(std::ldexp(mantissa, static_cast<int>(random() % 30) - 140));
  }
  WireLayout layout;
  ASSERT_TRUE(layout.Init(rows.tables, rows.counts.data(), 1).ok());
  SerialExec exec;
  std::vector<int32_t> words[2];
  std::vector<uint32_t> arrived[2];
  const unsigned mode = _mm_getcsr();
  for (int flush = 0; flush < 2; ++flush) {
    words[flush].resize(layout.num_words());
    arrived[flush].resize(120000);
    _mm_setcsr(flush == 0 ? mode : mode | 0x8040u);  // flush to zero, denormals are zero
    Pack(exec, layout, {x}, words[flush].data());
    Unpack(exec, layout, words[flush].data(), {}, {arrived[flush].data()});
    _mm_setcsr(mode);
  }
  EXPECT_EQ(words[0], words[1]);
  EXPECT_EQ(arrived[0], arrived[1]);
}
#endif

// Rows that are not finite are visible to training, as they are without a narrow wire type.
TYPED_TEST(WireInt8Test, NonfiniteRowsArriveAsNan) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  const float bad[] = {kNan, -kNan, HUGE_VALF, -HUGE_VALF};
  for (DType dtype : kDTypes) {
    for (int64_t dim : {1, 2, 7, 8, 16, 33, 300}) {
      const auto d = static_cast<size_t>(dim);
      std::vector<float> x;
      for (size_t row = 0; row < 40; ++row) {
        for (size_t c = 0; c < d; ++c) x.push_back(normal(random));
        if (row % 2 == 0) x[row * d + random() % d] = bad[row / 2 % 4];
        // Also two in one row, and one in a row of zeros.
        if (row % 8 == 4) x[row * d + random() % d] = bad[random() % 4];
        if (row % 16 == 6) {
          std::fill_n(x.begin() + static_cast<ptrdiff_t>(row * d), d, 0.0f);
          x[row * d + d / 2] = bad[row / 16];
        }
      }
      const SentInt8 s = this->Send(dtype, dim, x);
      for (size_t row = 0; row < 40; ++row) {
        bool all_finite = true;
        for (size_t c = 0; c < d; ++c) all_finite &= std::isfinite(s.sent[row * d + c]);
        ASSERT_EQ(all_finite, row % 2 == 1);
        // The NaN is the same for all inputs.
        ASSERT_TRUE(all_finite || FloatBits(s.scales[row]) == 0x7FFFFFFFu);
        for (size_t c = 0; c < d; ++c) {
          ASSERT_EQ(std::isnan(s.arrived[row * d + c]), !all_finite)
              << "row " << row << ", column " << c << ", dim " << dim;
          if (dtype == DType::kFloat32 && !all_finite) {
            ASSERT_EQ(FloatBits(s.arrived[row * d + c]), 0x7FFFFFFFu);
          }
        }
      }
    }
  }
}

TYPED_TEST(WireInt8Test, TiesGoToEven) {
  const std::vector<float> x = {254, 1, 3, 5, 7, 253, -1, -3, -5, -7, -253};
  const SentInt8 s = this->Send(DType::kFloat32, 11, x);
  EXPECT_EQ(s.q, (std::vector<int8_t>{127, 0, 2, 2, 4, 126, 0, -2, -2, -4, -126}));
}

TYPED_TEST(WireInt8Test, RowsAreIndependent) {
  const std::vector<float> x = {1, -127, 1e30f, -1e28f, 0, 0, kNan, 1, 1e-20f, 5e-21f, 254, 3};
  const SentInt8 together = this->Send(DType::kFloat32, 2, x);
  for (size_t row = 0; row < 6; ++row) {
    const SentInt8 alone = this->Send(DType::kFloat32, 2, {x[2 * row], x[2 * row + 1]});
    EXPECT_EQ(std::memcmp(&alone.arrived[0], &together.arrived[2 * row], 8), 0) << "row " << row;
  }
  EXPECT_EQ(together.arrived[0], 1.0f);
  EXPECT_EQ(together.arrived[1], -127.0f);
  EXPECT_EQ(together.arrived[10], 254.0f);
  EXPECT_EQ(together.arrived[11], 4.0f) << "3 / 2, to even";
}

}  // namespace
}  // namespace dynemb
