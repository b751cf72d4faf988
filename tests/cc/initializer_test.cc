#include "cc/table/initializer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace dynemb {
namespace {

constexpr uint64_t kSeed = 2024;

Initializer Make(std::vector<ColumnInit> columns, int64_t dim, uint64_t seed = kSeed) {
  Initializer created;
  const Status status = Initializer::Create(std::move(columns), dim, seed, &created);
  EXPECT_TRUE(status.ok()) << status.message();
  return created;
}

std::vector<float> Fill(const Initializer& init, uint64_t key) {
  std::vector<float> v(static_cast<size_t>(init.dim()) + 1, 42.0f);
  init.Fill(key, v.data());
  EXPECT_EQ(v.back(), 42.0f);
  v.pop_back();
  return v;
}

std::vector<float> Sample(const ColumnInit& column, int64_t dim, uint64_t keys) {
  const Initializer init = Make({column}, dim);
  std::vector<float> all;
  for (uint64_t key = 0; key < keys; ++key) {
    const std::vector<float> v = Fill(init, key);
    all.insert(all.end(), v.begin(), v.end());
  }
  return all;
}

double Phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// Compares the moments and the whole distribution (Kolmogorov-Smirnov) with the expected ones.
template <class Cdf>
void ExpectDistribution(std::vector<float> sample, double mean, double stddev, Cdf cdf) {
  const auto n = static_cast<double>(sample.size());
  double sum = 0, squares = 0;
  for (const float x : sample) {
    sum += x;
    squares += (x - mean) * (x - mean);
  }
  EXPECT_NEAR(sum / n, mean, 4 * stddev / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n), stddev, 4 * stddev / std::sqrt(n));
  std::sort(sample.begin(), sample.end());
  double distance = 0;
  for (size_t i = 0; i < sample.size(); ++i) {
    const double p = cdf(sample[i]);
    distance = std::max({distance, std::fabs(p - static_cast<double>(i) / n),
                         std::fabs(p - static_cast<double>(i + 1) / n)});
  }
  EXPECT_LT(distance, 1.95 / std::sqrt(n));  // exceeded by chance once in a thousand seeds
}

constexpr int64_t kSampleDim = 20;
constexpr uint64_t kSampleKeys = 20000;

TEST(InitializerTest, Constant) {
  for (const float x : Fill(Make({{InitKind::kConstant, 0.25f, 0.0f}}, 70), 5)) {
    EXPECT_EQ(x, 0.25f);
  }
}

TEST(InitializerTest, UniformDistribution) {
  const auto sample = Sample({InitKind::kUniform, -0.05f, 0.15f}, kSampleDim, kSampleKeys);
  for (const float x : sample) {
    ASSERT_GE(x, -0.05f);
    ASSERT_LT(x, 0.15f);
  }
  ExpectDistribution(sample, 0.05, 0.2 / std::sqrt(12.0),
                     [](double x) { return (x + 0.05) / 0.2; });
}

TEST(InitializerTest, UniformNeverRoundsUpToHigh) {
  // float32 has 8 numbers in this interval; one draw in 16 would be rounded to its end.
  const float low = 1e6f, high = 1e6f + 0.5f;
  std::set<float> seen;
  for (const float x : Sample({InitKind::kUniform, low, high}, 16, 1000)) seen.insert(x);
  EXPECT_EQ(*seen.begin(), low);
  EXPECT_EQ(*seen.rbegin(), std::nextafter(high, low));
  EXPECT_EQ(seen.size(), 8u);
}

TEST(InitializerTest, NormalDistribution) {
  ExpectDistribution(Sample({InitKind::kNormal, 1.0f, 0.5f}, kSampleDim, kSampleKeys), 1.0, 0.5,
                     [](double x) { return Phi((x - 1.0) / 0.5); });
}

TEST(InitializerTest, NormalTails) {
  double sum4 = 0, beyond4 = 0;
  const auto sample = Sample({InitKind::kNormal, 0.0f, 1.0f}, 64, 40000);
  for (const float x : sample) {
    sum4 += static_cast<double>(x) * x * x * x;
    beyond4 += std::fabs(x) > 4.0f;
    ASSERT_LT(std::fabs(x), 6.0f);
  }
  const auto n = static_cast<double>(sample.size());
  EXPECT_NEAR(sum4 / n, 3.0, 4 * std::sqrt(96 / n));  // the fourth moment and its deviation
  EXPECT_NEAR(beyond4 / n, 2 * Phi(-4), 4 * std::sqrt(2 * Phi(-4) / n));
}

TEST(InitializerTest, TruncatedNormalDistribution) {
  const auto sample = Sample({InitKind::kTruncatedNormal, -1.0f, 0.5f}, kSampleDim, kSampleKeys);
  for (const float x : sample) {
    ASSERT_GE(x, -2.0f);
    ASSERT_LE(x, 0.0f);
  }
  const double kept = Phi(2) - Phi(-2);
  // 1 - 4 phi(2) / kept: the variance of a standard normal distribution truncated at 2.
  const double variance = 1 - 4 * std::exp(-2.0) / std::sqrt(2 * M_PI) / kept;
  ExpectDistribution(sample, -1.0, 0.5 * std::sqrt(variance),
                     [kept](double x) { return (Phi((x + 1.0) / 0.5) - Phi(-2)) / kept; });
}

TEST(InitializerTest, ZeroWidthGivesTheCenter) {
  for (const InitKind kind : {InitKind::kNormal, InitKind::kTruncatedNormal}) {
    for (const float x : Fill(Make({{kind, 3.0f, 0.0f}}, 20), 1)) EXPECT_EQ(x, 3.0f);
  }
  for (const float x : Fill(Make({{InitKind::kUniform, 3.0f, 3.0f}}, 20), 1)) EXPECT_EQ(x, 3.0f);
}

TEST(InitializerTest, ColumnsAreIndependent) {
  // The value of a column depends neither on the kind of the other columns nor on their number.
  const ColumnInit kinds[] = {{InitKind::kConstant, 7.0f, 0.0f},
                              {InitKind::kUniform, -1.0f, 1.0f},
                              {InitKind::kUniform, 5.0f, 6.0f},
                              {InitKind::kNormal, 0.0f, 1.0f},
                              {InitKind::kTruncatedNormal, 0.0f, 1.0f}};
  for (const int64_t dim : {5, 16, 17, 63, 64, 65, 130, 256}) {
    std::vector<ColumnInit> columns;
    for (int64_t c = 0; c < dim; ++c) columns.push_back(kinds[c * c / 3 % 5]);
    const std::vector<float> mixed = Fill(Make(columns, dim), 99);
    for (const ColumnInit& kind : kinds) {
      const std::vector<float> pure = Fill(Make({kind}, dim + 3), 99);
      for (size_t c = 0; c < mixed.size(); ++c) {
        if (columns[c].kind == kind.kind && columns[c].a == kind.a) {
          ASSERT_EQ(mixed[c], pure[c]) << dim << " " << c;
        }
      }
    }
  }
}

TEST(InitializerTest, SeedsKeysAndColumnsGiveDifferentValues) {
  constexpr int64_t kDim = 32;
  std::set<float> seen;
  const ColumnInit uniform{InitKind::kUniform, 0.0f, 1.0f};
  const auto add = [&](uint64_t seed, uint64_t key) {
    for (const float x : Fill(Make({uniform}, kDim, seed), key)) seen.insert(x);
  };
  for (const uint64_t x : {0ull, 1ull, 1ull << 32, ~0ull}) {
    add(x, 7);
    add(9, x);
  }
  // 256 draws out of 2^24: two are equal with probability 0.002, and the seeds are fixed.
  EXPECT_EQ(seen.size(), 8u * kDim);
}

TEST(InitializerTest, VectorsDoNotDependOnTheOrderOfCalls) {
  const Initializer init = Make({{InitKind::kNormal, 0.0f, 1.0f}}, 33);
  std::vector<std::vector<float>> forward, backward;
  for (uint64_t key = 0; key < 50; ++key) forward.push_back(Fill(init, key));
  for (uint64_t key = 50; key-- > 0;) backward.push_back(Fill(init, key));
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(forward, backward);
}

// Never regenerate: other values would mean that old seeds give other vectors. The uniform values
// were computed by a second Philox, in Python. The others agree with Python's
// statistics.NormalDist().inv_cdf to 5e-7.
struct Golden {
  ColumnInit column;
  uint64_t key;
  float values[6];  // columns 0, 1, 2, 3, 4 and 69
};
constexpr Golden kGolden[] = {
    {{InitKind::kUniform, -0.05f, 0.05f},
     0x0u,
     {0x1.53c558p-7f, -0x1.7b2f9ap-6f, 0x1.8cfbb6p-5f, -0x1.551e4p-5f, -0x1.4bae7ap-6f,
      0x1.891d22p-5f}},
    {{InitKind::kUniform, -0.05f, 0.05f},
     0x1u,
     {-0x1.f7b23p-7f, -0x1.a41fap-8f, 0x1.45f4eep-5f, -0x1.d8dp-9f, -0x1.4ba1a6p-6f,
      0x1.e2e74p-10f}},
    {{InitKind::kUniform, -0.05f, 0.05f},
     0x8000000000000001u,
     {-0x1.1781cp-5f, 0x1.45466p-9f, -0x1.2db434p-5f, 0x1.d8abcp-9f, -0x1.6180ap-6f,
      -0x1.d68bd8p-7f}},
    {{InitKind::kUniform, -0.05f, 0.05f},
     0xFFFFFFFFFFFFFFFFu,
     {0x1.e3fa6p-8f, 0x1.5f67a2p-5f, 0x1.4a1f46p-5f, 0x1.2afd82p-5f, -0x1.99386ap-5f,
      -0x1.4beccp-10f}},
    {{InitKind::kNormal, 0.0f, 1.0f},
     0x0u,
     {0.262909561f, -0.617163897f, 2.15961337f, -1.38128269f, -0.531438053f, 2.05117941f}},
    {{InitKind::kNormal, 0.0f, 1.0f},
     0x1u,
     {-0.395372003f, -0.161386982f, 1.26965642f, -0.0905443355f, -0.531349599f, 0.0461918972f}},
    {{InitKind::kNormal, 0.0f, 1.0f},
     0x8000000000000001u,
     {-0.999380469f, 0.0622460879f, -1.11834812f, 0.0905173346f, -0.570293844f, -0.368096441f}},
    {{InitKind::kNormal, 0.0f, 1.0f},
     0xFFFFFFFFFFFFFFFFu,
     {0.186182708f, 1.46809638f, 1.29872739f, 1.10296285f, -3.31183791f, -0.03174394f}},
    {{InitKind::kTruncatedNormal, 0.0f, 1.0f},
     0x0u,
     {0.250686973f, -0.585535824f, 1.78106785f, -1.26719654f, -0.505030155f, 1.7283895f}},
    {{InitKind::kTruncatedNormal, 0.0f, 1.0f},
     0x1u,
     {-0.376484692f, -0.153984085f, 1.17394805f, -0.0864140242f, -0.504946947f, 0.0440887585f}},
    {{InitKind::kTruncatedNormal, 0.0f, 1.0f},
     0x8000000000000001u,
     {-0.937192976f, 0.0594104603f, -1.043033f, 0.0863882601f, -0.541572928f, -0.350626022f}},
    {{InitKind::kTruncatedNormal, 0.0f, 1.0f},
     0xFFFFFFFFFFFFFFFFu,
     {0.177619517f, 1.33733404f, 1.19853425f, 1.02947497f, -1.99187374f, -0.0302991271f}},
};

TEST(InitializerTest, GoldenValues) {
  for (const Golden& g : kGolden) {
    const std::vector<float> v = Fill(Make({g.column}, 70), g.key);
    for (size_t i = 0; i < 6; ++i) EXPECT_EQ(v[i < 5 ? i : 69], g.values[i]) << g.key << " " << i;
  }
}

TEST(InitializerTest, ErrorsNameTheBadArgument) {
  const float inf = std::numeric_limits<float>::infinity(), max = std::numeric_limits<float>::max();
  struct Bad {
    std::vector<ColumnInit> columns;
    int64_t dim;
    std::string part;
  };
  const ColumnInit zero;
  const std::vector<Bad> bad = {
      {{}, 4, "got 0"},
      {{zero, zero}, 4, "dim = 4 entries, got 2"},
      {{zero}, 0, "dim must be at least 1, got 0"},
      {{zero}, -3, "got -3"},
      {{{InitKind::kConstant, NAN, 0}}, 4, "column 0 must have finite"},
      {{zero, {InitKind::kUniform, 0, inf}}, 2, "column 1 must have finite"},
      {{zero, {InitKind::kUniform, 0.5f, 0.25f}}, 2, "low <= high and a finite range, got 0.5"},
      {{{InitKind::kUniform, -max, max}}, 1, "finite range"},
      {{{InitKind::kNormal, 0, -0.125f}}, 1, "stddev -0.125"},
      {{{InitKind::kTruncatedNormal, 0, -0.125f}}, 1, "stddev -0.125"},
      {{{InitKind::kNormal, 0, max / 2}}, 1, "within float32"},
      {{{static_cast<InitKind>(9), 0, 0}}, 1, "unknown kind 9"},
  };
  for (const Bad& b : bad) {
    Initializer init = Make({zero}, 3);
    const Status status = Initializer::Create(b.columns, b.dim, kSeed, &init);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << b.part;
    EXPECT_NE(status.message().find(b.part), std::string::npos) << status.message();
    EXPECT_EQ(init.dim(), 3);
  }
}

}  // namespace
}  // namespace dynemb
