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

#include "cc/lookup/gather.h"
#include "tests/cc/execs.h"
#include "tests/cc/gather_contract.h"
#include "tests/cc/gather_model.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Checks the sums of the cases, which must have the same bits for every Exec.
void CheckAll(const std::vector<GradientCase>& cases, GatherGradient* gradient) {
  std::vector<std::vector<float>> first;
  ForEachExec([&](Exec& exec) {
    const std::vector<std::vector<float>> sums = RunGradient(exec, cases, gradient);
    for (size_t t = 0; t < cases.size(); ++t) {
      SCOPED_TRACE(testing::Message() << "task " << t);
      if (exec.parallelism() == 1) {
        ASSERT_NO_FATAL_FAILURE(CheckSums(cases[t], sums[t]));
      } else if (!sums[t].empty()) {
        ASSERT_EQ(std::memcmp(sums[t].data(), first[t].data(), 4 * sums[t].size()), 0);
      }
    }
    if (exec.parallelism() == 1) first = sums;
  });
}

std::vector<GradientCase> One(const std::vector<Shape>& features, size_t n,
                              std::mt19937_64* random) {
  std::vector<GradientCase> cases(1);
  cases[0].n = n;
  cases[0].dim = features[0].dim;
  for (const Shape& s : features) cases[0].features.push_back(MakeGatherCase(s, n, random));
  return cases;
}

TEST(GatherGradientTest, EveryCombinerFormAndWeight) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  GatherGradient gradient;
  std::mt19937_64 random(1);
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      for (bool weighted : {false, true}) {
        SCOPED_TRACE(testing::Message() << "combiner " << int(combiner) << ", form " << int(form)
                                        << ", weighted " << weighted);
        Shape s{300, 3000, 5, 700};
        s.combiner = combiner;
        s.form = form;
        s.weighted = weighted;
        ASSERT_NO_FATAL_FAILURE(CheckAll(One({s}, 1000, &random), &gradient));
        s.num_bags = 9000;
        s.nnz = 40000;  // several threads split it
        s.vocabulary = 15000;
        ASSERT_NO_FATAL_FAILURE(CheckAll(One({s}, 20000, &random), &gradient));
      }
    }
  }
}

TEST(GatherGradientTest, EveryDimAndDtype) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  GatherGradient gradient;
  std::mt19937_64 random(2);
  for (int64_t dim : {1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64, 100, 128, 255, 256, 257, 600}) {
    for (DType dtype : kDTypes) {
      for (Combiner combiner : {Combiner::kSqrtn, Combiner::kMax}) {
        SCOPED_TRACE(testing::Message() << "dim " << dim << ", dtype " << int(dtype)
                                        << ", combiner " << int(combiner));
        Shape s{100, 1500, dim, 300};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kUnsorted;
        ASSERT_NO_FATAL_FAILURE(CheckAll(One({s}, 400, &random), &gradient));
      }
    }
  }
}

// A range has 32,768 rows at dim 1, 2,048 at dim 16, and 64 at large dims.
TEST(GatherGradientTest, RowsOfManyRanges) {
  GatherGradient gradient;
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
    for (size_t nnz : {size_t{7}, n, 2 * n}) {
      SCOPED_TRACE(testing::Message() << n << " rows of dim " << dim << ", " << nnz << " ids");
      Shape s{std::min<size_t>(nnz, 500), nnz, dim, n};
      s.form = Form::kSplits;
      s.combiner = Combiner::kMean;
      ASSERT_NO_FATAL_FAILURE(CheckAll(One({s}, n, &random), &gradient));
    }
  }
}

// More rows than the maximal number of ranges (Split::kMaxPartitions) of the usual length hold.
TEST(GatherGradientTest, RequestOfManyMillionFloats) {
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

TEST(GatherGradientTest, ManyTasksAndFeaturesOfAllKinds) {
  GatherGradient gradient;  // reused, so that features grow and shrink in number and size
  std::mt19937_64 random(4);
  for (size_t tasks : {0, 1, 7, 60, 3}) {
    std::vector<GradientCase> cases(tasks);
    for (size_t t = 0; t < tasks; ++t) {
      cases[t].dim = 1 + static_cast<int64_t>(random() % 40);
      cases[t].n = t % 4 == 3 ? 5000 : random() % 300;
      for (size_t f = random() % 4; f > 0; --f) {
        Shape s{1 + random() % 100, random() % 500, cases[t].dim, std::max<size_t>(1, cases[t].n)};
        if (cases[t].n == 0) s.nnz = 0;
        if (t == 3) s.nnz = s.num_bags * 400;  // one large task among small ones
        s.combiner = kCombiners[random() % 4];
        s.form = kForms[random() % 4];
        s.weighted = random() % 2;
        s.dtype = kDTypes[random() % 3];
        cases[t].features.push_back(MakeGatherCase(s, s.vocabulary, &random));
      }
    }
    ASSERT_NO_FATAL_FAILURE(CheckAll(cases, &gradient)) << tasks << " tasks";
  }
}

TEST(GatherGradientTest, TermsAreAddedFeatureByFeatureInTheOrderOfIds) {
  ForEachExec([&](Exec& exec) {
    ExpectTermsInOrder([&](const std::vector<GatherGradient::Task>& tasks) {
      return GatherGradient().Run(exec, tasks);
    });
  });
}

// With one row per id, each sum is the term of one position.
TEST(GatherGradientTest, IdentityIndexGivesTheTermOfEachPosition) {
  std::mt19937_64 random(5);
  GatherGradient gradient;
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      Shape s{400, 3000, 6, 3000};
      s.combiner = combiner;
      s.form = form;
      s.weighted = true;
      std::vector<GradientCase> cases = One({s}, 3000, &random);
      GatherCase& c = cases[0].features[0];
      cases[0].n = c.index.size();
      std::iota(c.index.begin(), c.index.end(), 0);
      ASSERT_NO_FATAL_FAILURE(CheckAll(cases, &gradient));
    }
  }
}

TEST(GatherGradientTest, NanReachesOnlyItsRows) {
  SerialExec exec;
  ExpectNanWhereItBelongs([&](const std::vector<GatherGradient::Task>& tasks) {
    return GatherGradient().Run(exec, tasks);
  });
}

TEST(GatherGradientTest, ErrorsNameTheTableAndWriteNothing) {
  std::mt19937_64 random(6);
  SerialExec exec;
  GatherGradient gradient;
  Shape shape{10, 20, 4, 10};
  shape.combiner = Combiner::kMax;
  const GatherCase c = MakeGatherCase(shape, 10, &random),
                   other = MakeGatherCase(shape, 10, &random);
  const auto feature_of = [](const GatherCase& of) {
    GatherGradient::Feature feature;
    static_cast<UpstreamTask&>(feature) = of.ids->task;
    feature.index = of.index.data();
    return feature;
  };
  std::vector<float> sums[2];
  for (std::vector<float>& s : sums) s.assign(40, 77);
  const GatherGradient::Task good{{feature_of(c)}, 10, 4, sums[0].data()};
  const GatherGradient::Task intact{{feature_of(other)}, 10, 4, sums[1].data()};
  GatherGradient::Task bad = intact;
  const auto expect = [&](const std::string& part) {
    const Status status = gradient.Run(exec, {good, bad});
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    for (const std::vector<float>& s : sums) EXPECT_EQ(s, std::vector<float>(40, 77));
    bad = intact;
  };
  bad.features[0].bags = nullptr;
  expect("bags");
  bad.features[0].upstream = nullptr;
  expect("upstream");
  bad.features[0].argmax = nullptr;
  expect("argmax");
  bad.features[0].dim = 0;
  expect("got 0");
  bad.features[0].dim = 5;
  expect("5, expected 4");
  bad.outputs = {{4, sums[1].data()}, {5, sums[1].data() + 16}};
  expect("9 rows, expected 10");
  std::vector<uint32_t> index = other.index;
  index[19] = 10;
  bad.features[0].index = index.data();
  EXPECT_TRUE(GatherGradient::Check({good, bad}).ok());
  expect("10 rows");
  bad.n = 0;
  expect("0 rows");
  EXPECT_TRUE(gradient.Run(exec, {good, bad}).ok());
}

}  // namespace
}  // namespace dynemb
