// GatherGradient on the host and on simulated devices. For the sums of all kinds of tasks see
// gradient_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/gather_gradient_fixture.h"

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class Place>
class GatherGradientTest : public GatherGradientFixture<Place> {};

TYPED_TEST_SUITE(GatherGradientTest, Places);

// On the host, a range has 32,768 rows at dim 1, 2,048 at dim 16, and 64 at large dims.
TYPED_TEST(GatherGradientTest, RowsOfManyRanges) {
  std::mt19937_64 random(3);
  for (const auto& [dim, n] : {std::pair<int64_t, size_t>{1, 100000},
                               {1, 32768},
                               {1, 32769},
                               {3, 60000},
                               {16, 2048},
                               {16, 2049},
                               {16, 20000},
                               {300, 1000},
                               {600, 64},
                               {600, 65},
                               {600, 1}}) {
    if (!this->kIsHost && n > 65) continue;
    for (size_t nnz : {size_t{7}, n, 2 * n}) {
      SCOPED_TRACE(testing::Message() << n << " rows of dim " << dim << ", " << nnz << " ids");
      Shape s{std::min<size_t>(nnz, 500), nnz, dim, n};
      s.form = Form::kSplits;
      s.combiner = Combiner::kMean;
      ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeTable({s}, n, &random))));
    }
  }
}

// The terms of a row come from several features, and some features in between have none.
TYPED_TEST(GatherGradientTest, RunsOfFeatures) {
  std::mt19937_64 random(5);
  GradientCases cases;
  for (size_t most : {1, 2, 5, 12}) {
    for (int i = 0; i < 10; ++i) {
      GradientCase c{3, 5, {}};
      for (int f = 0; f < 9; ++f) {
        std::vector<uint32_t> index;
        for (uint32_t row = 0; row < 3; ++row) {
          index.insert(index.end(), random() % (most + 1), row);
        }
        std::shuffle(index.begin(), index.end(), random);
        c.features.push_back(IdsOf(index, 5, &random));
      }
      cases.push_back(std::move(c));
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// Terms are added feature by feature, in the order of the ids. In float32 the order matters:
// (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
TYPED_TEST(GatherGradientTest, AddsTermsInTheOrderOfFeaturesAndIds) {
  const std::vector<uint32_t> first = {0, 1, 0, 2, 2, 2}, second = {1, 1, 0};
  const std::vector<float> of_first = {1e8f, 1e8f, 1, 1e8f, -1e8f, 1},
                           of_second = {-1e8f, 1, -1e8f};
  Bags six, three;
  ASSERT_TRUE(six.InitUniform(1, 6, 6).ok());
  ASSERT_TRUE(three.InitUniform(1, 3, 3).ok());
  GatherGradient::Feature a, b;
  a.bags = &six;
  a.upstream = of_first.data();
  a.index = first.data();
  b.bags = &three;
  b.upstream = of_second.data();
  b.index = second.data();
  a.dim = b.dim = 1;
  this->place_.ForEach([&] {
    std::vector<float> sums(4, kNan);
    ASSERT_TRUE(this->TryRun({{{a, b}, 4, 1, sums.data()}}).ok());
    EXPECT_EQ(sums, (std::vector<float>{0, 1, 1, 0}));
    EXPECT_FALSE(std::signbit(sums[3])) << "the zero of a row without ids";
  });
}

// With one row per id, each sum is the term of one position.
TYPED_TEST(GatherGradientTest, IdentityIndexGivesTheTermOfEachPosition) {
  std::mt19937_64 random(5);
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      Shape s{400, this->kIsHost ? 3000u : 500u, 6, 3000};
      s.combiner = combiner;
      s.form = form;
      s.weighted = true;
      GradientCases cases = Alone(MakeTable({s}, 3000, &random));
      GatherCase& c = cases[0].features[0];
      cases[0].n = c.index.size();
      std::iota(c.index.begin(), c.index.end(), 0);
      ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
    }
  }
}

// A sum of negative zeros keeps the sign.
TYPED_TEST(GatherGradientTest, NegativeZeros) {
  const std::vector<uint32_t> index = {0, 1, 1, 2, 2};
  const std::vector<float> upstream = {-0.0f, -0.0f, -0.0f, -0.0f, 0.0f};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, 5, 5).ok());
  GatherGradient::Feature feature;
  feature.bags = &bags;
  feature.upstream = upstream.data();
  feature.index = index.data();
  feature.dim = 1;
  std::vector<float> sums(3, kNan);
  ASSERT_TRUE(this->TryRun({{{feature}, 3, 1, sums.data()}}).ok());
  this->ExpectSums(sums, {-0.0f, -0.0f, 0.0f});
}

// As if thousands of ranks requested rows of few tables.
TYPED_TEST(GatherGradientTest, ThousandsOfOutputs) {
  std::mt19937_64 random(8);
  GradientCases cases;
  for (int t = 0; t < 3; ++t) cases.push_back(MakeTable({{500, 6000, 3, 4000}}, 4000, &random));
  GatherOutputs outputs(cases, /*several_outputs=*/false);
  for (GatherGradient::Task& task : outputs.tasks) {
    for (size_t begin = 0; begin < task.n;) {
      const size_t rows = std::min<size_t>(random() % 3, task.n - begin);
      // An empty output is null.
      task.outputs.push_back({rows, rows == 0 ? nullptr : task.sums + begin * 3});
      begin += rows;
    }
    EXPECT_GT(task.outputs.size(), 3000u);
    task.sums = nullptr;
  }
  ASSERT_TRUE(this->TryRun(outputs.tasks).ok());
  for (size_t t = 0; t < cases.size(); ++t) {
    this->ExpectSums(outputs.Take(t), Expected(cases[t], !this->kIsHost));
  }
}

// The divisor of the first bag is 0, so its gradient is 0, even for an upstream NaN. The NaN of
// another bag reaches the row of its id, and no other row.
TYPED_TEST(GatherGradientTest, NanReachesOnlyItsRows) {
  const std::vector<uint32_t> index = {0, 1, 2, 1};
  const std::vector<float> weights = {1, -1, 3, 1}, upstream = {kNan, 5, kNan};
  const std::vector<int64_t> splits = {0, 2, 3, 4};
  Bags bags;
  ASSERT_TRUE(bags.InitSplits(this->place_.exec(), splits.data(), 4, 4, 3).ok());
  GatherGradient::Feature feature;
  feature.bags = &bags;
  feature.weights = weights.data();
  feature.combiner = Combiner::kMean;
  feature.upstream = upstream.data();
  feature.dim = 1;
  feature.index = index.data();
  std::vector<float> sums(4, 77);
  ASSERT_TRUE(this->TryRun({{{feature}, 4, 1, sums.data()}}).ok());
  EXPECT_EQ(sums[0], 0);
  EXPECT_TRUE(std::isnan(sums[1]));
  EXPECT_EQ(sums[2], 5);
  EXPECT_EQ(sums[3], 0);
}

TYPED_TEST(GatherGradientTest, ErrorsNameTheTableAndWriteNothing) {
  std::mt19937_64 random(12);
  Shape shape{10, 20, 4, 10};
  shape.combiner = Combiner::kMax;
  GradientCases cases;
  for (int t = 0; t < 2; ++t) cases.push_back(MakeTable({shape}, 10, &random));
  const GatherOutputs outputs(cases, /*several_outputs=*/false);
  const GatherGradient::Task good = outputs.tasks[0], intact = outputs.tasks[1];
  GatherGradient::Task bad = intact;
  const auto expect = [&](const std::string& part) {
    const Status status = this->TryRun({good, bad});
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    SerialExec serial;
    EXPECT_EQ(status.message(), GatherGradient().Run(serial, {good, bad}).message());
    for (size_t t = 0; t < 2; ++t) {
      for (float sum : outputs.Take(t)) EXPECT_TRUE(std::isnan(sum));
    }
    bad = intact;
  };
  bad.features[0].bags = nullptr;
  expect("bags");
  bad.features[0].upstream = nullptr;
  expect("upstream");
  bad.features[0].argmax = nullptr;
  expect("argmax");
  bad.features[0].index = nullptr;
  expect("no index");
  bad.features[0].dim = 0;
  expect("got 0");
  bad.features[0].dim = 5;
  expect("5, expected 4");
  bad.outputs = {{4, bad.sums}, {5, bad.sums + 16}};
  expect("9 rows, expected 10");
  bad.outputs = {{11, bad.sums}};
  expect("11 rows, expected 10");
  // On a device, an index is not an error.
  std::vector<uint32_t> index = cases[1].features[0].index;
  index[19] = 10;
  if (TypeParam::kIsHost) {
    bad.features[0].index = index.data();
    EXPECT_TRUE(GatherGradient::Check({good, bad}).ok());
    expect("10 rows");
    bad.n = 0;
    expect("0 rows");
  }
  EXPECT_TRUE(this->TryRun({good, bad}).ok());
}

// More rows than the maximal number of ranges (Split::kMaxPartitions) of the usual length hold.
TEST(HostGatherGradientTest, RequestOfManyMillionFloats) {
  constexpr size_t kRows = 4096 * 64 + 1, kDim = 257;
  constexpr uint32_t kLast = kRows - 1;
  const std::vector<uint32_t> index = {kLast, 0, 4095 * 64, kLast, 12345};
  std::vector<float> upstream;
  for (size_t i = 0; i < 5 * kDim; ++i) upstream.push_back(static_cast<float>(i));
  std::unique_ptr<float[]> sums(new float[kRows * kDim]);
  std::memset(static_cast<void*>(sums.get()), 0xFF, 4 * kRows * kDim);
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, 5, 5).ok());
  GatherGradient::Feature feature;
  feature.bags = &bags;
  feature.upstream = upstream.data();
  feature.dim = kDim;
  feature.index = index.data();
  GatherGradient gradient;
  ThreadsExec exec(2);
  ASSERT_TRUE(gradient.Run(exec, {{{feature}, kRows, kDim, sums.get()}}).ok());
  for (size_t c = 0; c < kDim; ++c) {
    ASSERT_EQ(sums[kLast * kDim + c], upstream[c] + upstream[3 * kDim + c]);
    ASSERT_EQ(sums[c], upstream[kDim + c]);
    ASSERT_EQ(sums[4095 * 64 * kDim + c], upstream[2 * kDim + c]);
    ASSERT_EQ(sums[12345 * kDim + c], upstream[4 * kDim + c]);
  }
  for (uint32_t row : index) std::memset(&sums[row * kDim], 0, 4 * kDim);
  const char* const bytes = reinterpret_cast<const char*>(sums.get());
  // All bytes are 0: the first one is, and each equals the one before it.
  EXPECT_EQ(bytes[0], 0);
  EXPECT_EQ(std::memcmp(bytes, bytes + 1, 4 * kRows * kDim - 1), 0);
}

}  // namespace
}  // namespace dynemb
