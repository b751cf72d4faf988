#include "cc/table/key.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using testing_table::Random;
using testing_table::UnmixKey;

TEST(MixKey, IsABijection) {
  Random random(1);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t x = random.Next();
    ASSERT_EQ(UnmixKey(MixKey(x)), x);
    ASSERT_EQ(MixKey(UnmixKey(x)), x);
  }
  for (uint64_t x : {uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 63})
    EXPECT_EQ(UnmixKey(MixKey(x)), x);
}

// The published first output of SplitMix64 for seed 0. The index column of dumps depends on it.
TEST(MixKey, IsSplitMix) { EXPECT_EQ(MixKey(0), 0xE220A8397B1DCDAFull); }

TEST(Spiral, IsMonotone) {
  Random random(2);
  for (int i = 0; i < 200000; ++i) {
    const auto x = static_cast<uint32_t>(random.Next());
    if (x == 0xFFFFFFFFu) continue;
    ASSERT_LE(Spiral(x), Spiral(x + 1)) << x;
    const auto further = static_cast<uint32_t>(random.Below(0xFFFFFFFFu - x));
    ASSERT_LE(Spiral(x), Spiral(x + further)) << x;
  }
  EXPECT_EQ(Spiral(0), 0u);
  EXPECT_GE(Spiral(0xFFFFFFFFu), 0xFFFFFFF0u);
  for (uint32_t x : {0u, 1u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFEu})
    EXPECT_LE(Spiral(x), Spiral(x + 1));
}

// Close to 2^x - 1. Keys are twice as dense at the low end as at the high end.
TEST(Spiral, FollowsTwoToTheX) {
  double worst = 0;
  for (uint32_t i = 0; i < 4096; ++i) {
    const double x = i / 4096.0;
    const double y = std::ldexp(static_cast<double>(Spiral(i << 20)), -32);
    worst = std::max(worst, std::fabs(y - (std::exp2(x) - 1)));
  }
  EXPECT_LT(worst, 0.005);
  const auto density = [](uint32_t x) {  // keys per step of the prefix
    return 65536.0 * 256 / (static_cast<double>(Spiral(x + 65536 * 256)) - Spiral(x));
  };
  EXPECT_NEAR(density(0) / density(0xFE000000u), 2.0, 0.1);
  for (uint32_t x = 0; x < 0xFD000000u; x += 0x01000000u) {
    ASSERT_GE(density(x) + 1e-9, density(x + 0x01000000u)) << x;
  }
}

// The chi-square of `counts` against equal probabilities.
double ChiSquare(const std::vector<uint64_t>& counts) {
  double total = 0, chi = 0;
  for (uint64_t c : counts) total += static_cast<double>(c);
  const double mean = total / static_cast<double>(counts.size());
  for (uint64_t c : counts)
    chi += (static_cast<double>(c) - mean) * (static_cast<double>(c) - mean) / mean;
  return chi;
}

TEST(Probe, HomesAndDigestsAreUniform) {
  for (const uint64_t step : {1ull, 64ull, 1ull << 20, 1ull << 40, 0x9E3779B97F4A7C15ull}) {
    std::vector<uint64_t> home(kBucketsPerSegment), digest(256), both(kBucketsPerSegment * 255);
    for (uint64_t i = 0; i < 1000000; ++i) {
      const Probe p = MakeProbe(MixKey(i * step));
      ASSERT_LT(p.home, kBucketsPerSegment);
      ASSERT_GE(p.digest, 1);
      ++home[p.home];
      ++digest[p.digest];
      ++both[p.home * 255u + p.digest - 1u];
    }
    EXPECT_EQ(digest[0], 0u);
    digest.erase(digest.begin());
    // Five standard deviations of a chi-square with k - 1 degrees of freedom.
    EXPECT_LT(ChiSquare(home), 63 + 5 * std::sqrt(2.0 * 63)) << step;
    EXPECT_LT(ChiSquare(digest), 254 + 5 * std::sqrt(2.0 * 254)) << step;
    EXPECT_LT(ChiSquare(both), 16319 + 5 * std::sqrt(2.0 * 16319)) << step;
  }
}

TEST(Probe, PrefixIsTheSpiralOfTheTopBits) {
  const Probe p = MakeProbe(0x80000000FFFFFFFFull);
  EXPECT_EQ(PrefixOf(0x80000000FFFFFFFFull), Spiral(0x80000000u));
  EXPECT_EQ(p.home, 63);
  EXPECT_EQ(p.digest, 255);
  EXPECT_EQ(MakeProbe(0).digest, 1);
}

}  // namespace
}  // namespace dynemb
