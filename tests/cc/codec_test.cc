#include "cc/table/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "cc/table/float_bits.h"
#include "cc/table/half.h"
#include "cc/table/key.h"
#include "cc/table/philox.h"
#include "cc/table/rounding.h"

namespace dynemb {
namespace {

constexpr uint64_t kSeed = 11, kKey = 0x123456789ABCDEFu;
constexpr uint64_t kStep = 77;
constexpr unsigned char kGuard = 0xA5;

// A row of dim elements at a given alignment, between guard bytes that must not change.
class GuardedRow {
 public:
  GuardedRow(DType type, int64_t dim, size_t offset)
      : bytes_(offset + static_cast<size_t>(dim) * SizeOf(type) + 8, kGuard),
        offset_(offset),
        size_(static_cast<size_t>(dim) * SizeOf(type)) {}
  void* data() { return bytes_.data() + offset_; }
  std::vector<unsigned char> bytes() const {
    return {bytes_.begin() + static_cast<ptrdiff_t>(offset_),
            bytes_.begin() + static_cast<ptrdiff_t>(offset_ + size_)};
  }
  bool intact() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + size_) && bytes_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  std::vector<unsigned char> bytes_;
  size_t offset_, size_;
};

uint16_t Nearest(DType type, float f) {
  return type == DType::kFloat16 ? HalfFormat<DType::kFloat16>::ToNearest(f)
                                 : HalfFormat<DType::kBfloat16>::ToNearest(f);
}
uint16_t Stochastic(DType type, float f, uint32_t bits) {
  return type == DType::kFloat16 ? HalfFormat<DType::kFloat16>::Stochastic(f, bits)
                                 : HalfFormat<DType::kBfloat16>::Stochastic(f, bits);
}
float ToFloat(DType type, uint16_t h) {
  return type == DType::kFloat16 ? HalfFormat<DType::kFloat16>::ToFloat(h)
                                 : HalfFormat<DType::kBfloat16>::ToFloat(h);
}

// Ordinary values, with special values at columns that depend on the dim.
std::vector<float> Vector(int64_t dim) {
  std::vector<float> v;
  for (int64_t c = 0; c < dim; ++c) {
    const float special[] = {0.0f,  -0.0f, 1e-6f,  -3e-8f, 65519.0f,
                             1e30f, NAN,   1e-41f, 3.4e38, -INFINITY};
    v.push_back((c + dim) % 7 == 0 ? special[(c + dim) / 7 % 10]
                                   : 0.01f * static_cast<float>((c * 37 + dim) % 101 - 50));
  }
  return v;
}

class CodecTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, CodecTest,
                         testing::Values(DType::kFloat32, DType::kFloat16, DType::kBfloat16));

TEST_P(CodecTest, EveryDimAndAlignment) {
  const DType type = GetParam();
  for (int64_t dim = 0; dim <= 140; ++dim) {
    const std::vector<float> in = Vector(dim);
    const auto n = static_cast<size_t>(dim);
    for (const size_t offset : {0u, 2u, 4u, 1u}) {
      GuardedRow nearest(type, dim, offset), random(type, dim, offset);
      StoreVector(type, in.data(), dim, nearest.data());
      StoreVectorStochastic(type, in.data(), dim, random.data(), kSeed, kKey, kStep);
      ASSERT_TRUE(nearest.intact() && random.intact());
      std::vector<float> out(n + 1, 42.0f);
      LoadVector(type, random.data(), dim, out.data());
      ASSERT_EQ(out.back(), 42.0f);
      const std::vector<unsigned char> nearest_bytes = nearest.bytes(), bytes = random.bytes();
      for (size_t c = 0; c < n; ++c) {
        if (type == DType::kFloat32) {
          ASSERT_EQ(LoadUnaligned<uint32_t>(&nearest_bytes[4 * c]), FloatBits(in[c]));
          ASSERT_EQ(LoadUnaligned<uint32_t>(&bytes[4 * c]), FloatBits(in[c]));
          ASSERT_EQ(FloatBits(out[c]), FloatBits(in[c]));
          continue;
        }
        const uint32_t bits = PhiloxBlock(MixKey(MixKey(kSeed) + kStep), kKey,
                                          PhiloxStream::kRounding, static_cast<uint32_t>(c / 4))
                                  .word[c % 4];
        const uint16_t expected = Stochastic(type, in[c], bits);
        ASSERT_EQ(LoadUnaligned<uint16_t>(&nearest_bytes[2 * c]), Nearest(type, in[c])) << c;
        ASSERT_EQ(LoadUnaligned<uint16_t>(&bytes[2 * c]), expected) << dim << " " << c;
        ASSERT_EQ(FloatBits(out[c]), FloatBits(ToFloat(type, expected))) << dim << " " << c;
      }
    }
  }
}

TEST_P(CodecTest, RoundingDependsOnSeedKeyAndStep) {
  const DType type = GetParam();
  if (type == DType::kFloat32) GTEST_SKIP() << "float32 is not rounded";
  constexpr int64_t kDim = 64;
  const std::vector<float> in(kDim, 0.3f);
  std::set<std::vector<unsigned char>> seen;
  const auto store = [&](uint64_t seed, uint64_t key, uint64_t step) {
    GuardedRow row(type, kDim, 0);
    StoreVectorStochastic(type, in.data(), kDim, row.data(), seed, key, step);
    seen.insert(row.bytes());
  };
  store(1, 1, 1);
  store(1, 1, 1);
  EXPECT_EQ(seen.size(), 1u);
  for (const uint64_t other : {2ull, 1ull << 32, 1ull << 63}) {
    store(other, 1, 1);
    store(1, other, 1);
    store(1, 1, other);
  }
  EXPECT_EQ(seen.size(), 10u);
}

// Updates that must not share random bits have distinct steps.
TEST(RoundingStepTest, StepsAreDistinct) {
  std::set<uint64_t> seen;
  size_t count = 0;
  for (const uint64_t base :
       {uint64_t{0}, uint64_t{1} << 24, uint64_t{1} << 53, ~uint64_t{0} - 7}) {
    for (uint64_t step = base; step < base + 6; ++step) {
      for (const Update update : {Update::kOptimizer, Update::kConstraint, Update::kAddition}) {
        for (uint64_t task = 0; task < 5; ++task, ++count) {
          seen.insert(RoundingStep(update, step, task));
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), count);
  EXPECT_EQ(RoundingStep(Update::kOptimizer, 7), RoundingStep(Update::kOptimizer, 7, 0));
}

// The purpose of stochastic rounding: updates far below half a unit in the last place must add up.
TEST_P(CodecTest, SmallUpdatesAddUp) {
  const DType type = GetParam();
  constexpr int64_t kDim = 256;
  constexpr int kSteps = 1000;
  constexpr float kUpdate = 1e-4f;
  GuardedRow row(type, kDim, 0);
  std::vector<float> v(kDim, 1.0f);
  StoreVector(type, v.data(), kDim, row.data());
  for (int step = 1; step <= kSteps; ++step) {
    LoadVector(type, row.data(), kDim, v.data());
    for (float& x : v) x += kUpdate;
    StoreVectorStochastic(type, v.data(), kDim, row.data(), kSeed, kKey,
                          static_cast<uint64_t>(step));
  }
  double mean = 0;
  for (const float x : v) mean += x / kDim;
  // In bfloat16, a step adds a unit of 2^-7 with probability p = 0.0128. The standard deviation of
  // the mean is 2^-7 sqrt(1000 p / 256).
  EXPECT_NEAR(mean, 1.0 + kSteps * kUpdate, 4 * 0x1p-7 * std::sqrt(kSteps * 0.0128 / kDim));
}

}  // namespace
}  // namespace dynemb
