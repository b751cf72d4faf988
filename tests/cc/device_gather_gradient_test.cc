// GatherGradient on simulated devices: the same bits as on the host or, for rows of many ids, as by
// the rule of gather_gradient.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/gather_gradient.h"
#include "tests/cc/device_gather_model.h"
#include "tests/cc/gather_contract.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/simulated_devices.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

using Cases = GradientCases;
using Outputs = GatherOutputs;
using Tasks = GatherGradientTasks;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class Device>
class DeviceGatherGradientTest : public testing::Test {
 protected:
  Status TryRun(const Tasks& tasks) {
    typename Device::Session session(device_, &exec_);
    const Status status = device::GatherGradient(session, tasks);
    EXPECT_EQ(device_.waits(), 0u);
    return status;
  }

  // Checks the sums against the rule and, for rows of at most 256 ids, against the host.
  void CheckAll(const Cases& cases, bool host_too = true) {
    std::vector<std::vector<float>> on_host;
    if (host_too) {
      GatherGradient gradient;
      SerialExec serial;
      on_host = RunGradient(serial, cases, &gradient);
    }
    for (bool several_outputs : {false, true}) {
      SCOPED_TRACE(testing::Message() << "several outputs: " << several_outputs);
      const Outputs outputs(cases, several_outputs);
      const Status status = TryRun(outputs.tasks);
      ASSERT_TRUE(status.ok()) << status.message();
      for (size_t t = 0; t < cases.size(); ++t) {
        SCOPED_TRACE(testing::Message() << "task " << t);
        std::vector<size_t> counts;
        const std::vector<float> expected = Expected(cases[t], &counts), sums = outputs.Take(t);
        const auto dim = static_cast<size_t>(cases[t].dim);
        ASSERT_EQ(sums.size(), expected.size());
        for (size_t row = 0; row < counts.size(); ++row) {
          const size_t at = row * dim;
          ASSERT_TRUE(SameBits(&sums[at], &expected[at], dim)) << "row " << row;
          if (!host_too || counts[row] > kChunk) continue;
          ASSERT_TRUE(SameBits(&sums[at], &on_host[t][at], dim)) << "row " << row;
        }
      }
    }
  }

  Device device_;
  ThreadsExec exec_{3};
};

TYPED_TEST_SUITE(DeviceGatherGradientTest, SimulatedDevices);

TYPED_TEST(DeviceGatherGradientTest, EveryCombinerFormAndWeight) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  std::mt19937_64 random(1);
  std::vector<Shape> all;
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      for (bool weighted : {false, true}) {
        Shape s{100, 700, 5, 300};
        s.combiner = combiner;
        s.form = form;
        s.weighted = weighted;
        ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeTable({s}, 400, &random))));
        all.push_back(s);
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeTable(all, 400, &random))));
}

// Each table has features of every dtype.
TYPED_TEST(DeviceGatherGradientTest, EveryDimAndDtype) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  std::mt19937_64 random(2);
  Cases cases;
  for (int64_t dim : {1, 2, 3, 4, 7, 8, 33, 128, 130, 300}) {
    std::vector<Shape> shapes;
    for (DType dtype : kDTypes) {
      for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
        Shape s{60, 300, dim, 100};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kSplits;
        shapes.push_back(s);
      }
    }
    std::shuffle(shapes.begin(), shapes.end(), random);
    cases.push_back(MakeTable(shapes, 150, &random));
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// Kernels for whole rows (row_math.h), which run if all tasks have them. The 60 rows have about 50
// ids each, except for the first, which has about 700.
TYPED_TEST(DeviceGatherGradientTest, WholeRows) {
  std::mt19937_64 random(4);
  for (const int64_t dim : {4, 16, 36, 128, 140}) {
    Shape sum{300, 1500, dim, 60}, mean = sum;
    sum.form = Form::kSplits;
    mean.combiner = Combiner::kMean;
    mean.weighted = true;
    Cases cases = Alone(MakeTable({sum, mean}, 64, &random));
    for (GatherCase& feature : cases[0].features) {
      for (uint32_t& index : feature.index) index = random() % 5 == 0 ? 0 : index;
      feature.ids->task.upstream = feature.ids->upstream.data();
      ASSERT_TRUE(device::IsWhole(feature.ids->task));
    }
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(DeviceGatherGradientTest, RowsOfManyIds) {
  std::mt19937_64 random(3);
  Cases cases;
  for (size_t ids : {5000u, 1u, 3000u, 700u, 90u}) {
    for (int64_t dim : {33, 1, 4}) {
      for (uint64_t vocabulary : {1, 3}) {
        std::vector<Shape> shapes;
        for (size_t f = 0; f < 1 + cases.size() % 4; ++f) {
          const size_t kind = cases.size() + 5 * f;
          Shape s{ids, ids, dim, vocabulary};
          s.dtype = kDTypes[kind % 3];
          s.combiner = kCombiners[kind % 4];
          s.weighted = kind % 2 == 0;
          s.form = kForms[kind / 2 % 4];
          shapes.push_back(s);
        }
        cases.push_back(MakeTable(shapes, 4, &random));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// Rows whose numbers of ids are close to multiples of 256, in random order, from one or more
// features.
TYPED_TEST(DeviceGatherGradientTest, ChunksAreOf256Ids) {
  std::mt19937_64 random(4);
  Cases cases;
  for (const std::vector<size_t>& counts :
       {std::vector<size_t>{1, 255, 256, 257, 3, 0, 511, 512, 513, 767, 768, 769, 5000},
        std::vector<size_t>{256}, std::vector<size_t>{257}, std::vector<size_t>{257, 257, 257},
        std::vector<size_t>{0, 512, 0}, std::vector<size_t>{513}}) {
    for (size_t num_features : {1, 2, 7}) {
      std::vector<uint32_t> rows;
      for (size_t r = 0; r < counts.size(); ++r) {
        rows.insert(rows.end(), counts[r], static_cast<uint32_t>(r));
      }
      std::shuffle(rows.begin(), rows.end(), random);
      GradientCase c{counts.size(), 6, {}};
      for (size_t f = 0, begin = 0; f < num_features; ++f) {
        const size_t end =
            f + 1 == num_features ? rows.size() : std::min(begin + random() % 150, rows.size());
        c.features.push_back(OneEach({rows.begin() + begin, rows.begin() + end}, 6, &random));
        begin = end;
      }
      cases.push_back(std::move(c));
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// The terms of a row come from several features, and some features in between have none.
TYPED_TEST(DeviceGatherGradientTest, RunsOfFeatures) {
  std::mt19937_64 random(5);
  Cases cases;
  for (size_t most : {1, 2, 5, 12}) {
    for (int i = 0; i < 10; ++i) {
      GradientCase c{3, 5, {}};
      for (int f = 0; f < 9; ++f) {
        std::vector<uint32_t> index;
        for (uint32_t row = 0; row < 3; ++row)
          index.insert(index.end(), random() % (most + 1), row);
        std::shuffle(index.begin(), index.end(), random);
        c.features.push_back(OneEach(index, 5, &random));
      }
      cases.push_back(std::move(c));
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGatherGradientTest, ManyTasksAndFeaturesOfAllKinds) {
  std::mt19937_64 random(6);
  for (size_t count : {0, 1, 2, 9, 60}) {
    SCOPED_TRACE(testing::Message() << count << " tasks");
    Cases cases(count);
    for (size_t t = 0; t < count; ++t) {
      cases[t].dim = 1 + static_cast<int64_t>(random() % 40);
      cases[t].n = t % 7 == 2 ? 1 : t % 4 == 3 ? 900 : random() % 300;
      for (size_t f = random() % 4; f > 0; --f) {
        Shape s{1 + random() % 100, random() % 500, cases[t].dim, std::max<size_t>(1, cases[t].n)};
        if (cases[t].n == 0 || random() % 5 == 0) s.nnz = 0;
        if (t == 3) s.nnz = s.num_bags * 30;  // one large task among small ones
        s.combiner = kCombiners[random() % 4];
        s.form = kForms[random() % 4];
        s.weighted = random() % 2;
        s.dtype = kDTypes[random() % 3];
        cases[t].features.push_back(MakeGatherCase(s, s.vocabulary, &random));
      }
    }
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(DeviceGatherGradientTest, NothingToSum) {
  std::mt19937_64 random(7);
  Cases cases;
  cases.push_back({0, 4, {}});
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  cases.push_back(MakeTable({{0, 0, 4, 10}, {10, 0, 4, 10}}, 0, &random));
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  // Rows without ids have zero sums, too.
  cases.push_back({5, 3, {}});
  cases.push_back(MakeTable({{10, 0, 7, 10}}, 6, &random));
  UpstreamTask& bare = cases.back().features[0].ids->task;
  bare.upstream = nullptr;
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  cases.push_back(MakeTable({{10, 30, 4, 10}}, 20, &random));
  cases.push_back({0, 4, {}});
  cases.push_back({5, 3, {}});
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGatherGradientTest, AddsTermsInTheOrderOfFeaturesAndIds) {
  ExpectTermsInOrder(
      [&](const std::vector<GatherGradient::Task>& tasks) { return this->TryRun(tasks); });
}

// A sum of negative zeros keeps the sign, as on the host.
TYPED_TEST(DeviceGatherGradientTest, NegativeZeros) {
  const std::vector<uint32_t> index = {0, 1, 1, 2, 2};
  const std::vector<float> upstream = {-0.0f, -0.0f, -0.0f, -0.0f, 0.0f};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, 5, 5).ok());
  GatherGradient::Feature feature;
  feature.bags = &bags;
  feature.upstream = upstream.data();
  feature.index = index.data();
  feature.dim = 1;
  std::vector<float> sums(3, kNan), on_host(3, kNan);
  ASSERT_TRUE(this->TryRun({{{feature}, 3, 1, sums.data()}}).ok());
  EXPECT_TRUE(SameBits(sums.data(), std::vector<float>{-0.0f, -0.0f, 0.0f}.data(), 3));
  GatherGradient gradient;
  ASSERT_TRUE(gradient.Run(this->exec_, {{{feature}, 3, 1, on_host.data()}}).ok());
  EXPECT_TRUE(SameBits(sums.data(), on_host.data(), 3));
}

// As if thousands of ranks requested rows of few tables.
TYPED_TEST(DeviceGatherGradientTest, ThousandsOfOutputs) {
  std::mt19937_64 random(8);
  Cases cases;
  for (int t = 0; t < 3; ++t) cases.push_back(MakeTable({{500, 6000, 3, 4000}}, 4000, &random));
  Outputs outputs(cases, /*several_outputs=*/false);
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
    std::vector<size_t> counts;
    const std::vector<float> expected = Expected(cases[t], &counts), sums = outputs.Take(t);
    ASSERT_EQ(sums.size(), expected.size());
    ASSERT_TRUE(SameBits(sums.data(), expected.data(), sums.size()));
  }
}

// An id whose index is out of range adds to no row, neither of its table nor of the next.
TYPED_TEST(DeviceGatherGradientTest, IndicesOutOfRange) {
  std::mt19937_64 random(9);
  for (uint32_t beyond : {0u, 1u, 250u, 0x7FFFFFFFu, 0xFFFFFFFFu - 200u}) {
    Cases cases;
    for (size_t t = 0; t < 4; ++t) {
      std::vector<Shape> shapes(2, Shape{60, 1200, 5, 3});
      shapes[0].combiner = Combiner::kMean;
      shapes[0].form = Form::kUnsorted;
      cases.push_back(MakeTable(shapes, 200, &random));
      for (GatherCase& c : cases.back().features) {
        for (uint32_t& index : c.index) {
          // In the third table, all indices are out of range.
          if (t == 2 || random() % 4 == 0) index = 200 + beyond;
        }
      }
    }
    cases.push_back({0, 5, {}});
    cases.back().features.push_back(OneEach({0, beyond, 7}, 5, &random));
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases, /*host_too=*/false));
  }
}

TYPED_TEST(DeviceGatherGradientTest, IdsWithoutRows) {
  std::mt19937_64 random(10);
  Cases cases;
  cases.push_back({0, 5, {}});
  cases.back().features.push_back(OneEach({0, 1, 7}, 5, &random));
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases, /*host_too=*/false));
}

// Each row is at any multiple of four bytes, like received rows.
TYPED_TEST(DeviceGatherGradientTest, ScatteredUpstreamRows) {
  std::mt19937_64 random(11);
  Cases cases;
  for (int64_t dim : {8, 9}) {
    std::vector<Shape> shapes;
    for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
      for (DType dtype : kDTypes) {
        Shape s{50, 300, dim, 2};
        s.combiner = combiner;
        s.dtype = dtype;
        s.form = Form::kSorted;
        shapes.push_back(s);
      }
    }
    cases.push_back(MakeTable(shapes, 7, &random));
  }
  std::vector<std::vector<float>> copies;
  std::vector<std::vector<const void*>> rows;
  for (GradientCase& table : cases) {
    for (GatherCase& c : table.features) {
      UpstreamTask& task = c.ids->task;
      const size_t n = task.bags->num_bags();
      const size_t bytes = static_cast<size_t>(task.dim) * SizeOf(task.dtype);
      const size_t words = (bytes + 3) / 4 / 2 * 2 + 3;  // odd, so that every alignment occurs
      copies.emplace_back(n * words, kNan);
      rows.emplace_back();
      for (size_t row = 0; row < n; ++row) {
        float* const copy = &copies.back()[(n - 1 - row) * words];
        std::memcpy(copy, static_cast<const char*>(task.upstream) + row * bytes, bytes);
        rows.back().push_back(copy);
      }
      task.upstream = nullptr;
      task.upstream_rows = rows.back().data();
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGatherGradientTest, NanReachesOnlyItsRows) {
  ExpectNanWhereItBelongs(
      [&](const std::vector<GatherGradient::Task>& tasks) { return this->TryRun(tasks); });
}

TYPED_TEST(DeviceGatherGradientTest, ErrorsMatchTheHostAndNothingIsWritten) {
  std::mt19937_64 random(12);
  Shape shape{10, 20, 4, 10};
  shape.combiner = Combiner::kMax;
  Cases cases;
  for (int t = 0; t < 2; ++t) cases.push_back(MakeTable({shape}, 10, &random));
  const Outputs outputs(cases, /*several_outputs=*/false);
  const GatherGradient::Task good = outputs.tasks[0], intact = outputs.tasks[1];
  GatherGradient::Task bad = intact;
  const auto expect = [&](const std::string& part) {
    const Status status = this->TryRun({good, bad});
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    GatherGradient gradient;
    EXPECT_EQ(gradient.Run(this->exec_, {good, bad}).message(), status.message());
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
  EXPECT_TRUE(this->TryRun({good, bad}).ok());
}

// More ids or rows than 32 bits can number: the call fails before it takes memory.
TYPED_TEST(DeviceGatherGradientTest, TooManyIdsOrRows) {
  const float something = 0;
  const uint32_t index = 0;
  Bags large, small;
  ASSERT_TRUE(large.InitUniform(1, Bags::kMaxSize, Bags::kMaxSize).ok());
  ASSERT_TRUE(small.InitUniform(1, 1, 1).ok());
  GatherGradient::Feature feature;
  feature.upstream = &something;
  feature.index = &index;
  feature.dim = 1;
  feature.bags = &small;
  const GatherGradient::Task one{{feature}, 1, 1, nullptr};
  const auto expect = [&](const Tasks& tasks, const std::string& what) {
    this->device_.FailTake(0);
    const Status status = this->TryRun(tasks);
    EXPECT_TRUE(this->device_.FailTake(TypeParam::kNever));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(), "all tables together may have at most 2^32 - 2 " + what +
                                    " in a batch, got 4294967295");
  };
  GatherGradient::Task many = one;
  many.features[0].bags = &large;
  expect({many, one}, "ids");
  many.features.push_back(feature);
  expect({many}, "ids");
  GatherGradient::Task tall = one;
  tall.n = Bags::kMaxSize;
  expect({one, tall}, "rows");
}

TYPED_TEST(DeviceGatherGradientTest, WorkspaceAllocationFails) {
  std::mt19937_64 random(13);
  Cases cases;
  for (Form form : kForms) {
    Shape s{40, 600, 4, 2};
    s.form = form;
    s.combiner = Combiner::kMean;
    s.weighted = true;
    cases.push_back(MakeTable({s, s}, 5, &random));
  }
  uint64_t n = 0;
  for (;; ++n) {
    const Outputs outputs(cases, /*several_outputs=*/true);
    this->device_.FailTake(n);
    const Status status = this->TryRun(outputs.tasks);
    if (this->device_.FailTake(TypeParam::kNever)) {
      EXPECT_TRUE(status.ok());
      break;
    }
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << "take " << n;
    for (size_t t = 0; t < cases.size(); ++t) {
      for (float sum : outputs.Take(t)) EXPECT_TRUE(std::isnan(sum)) << "take " << n;
    }
  }
  EXPECT_GT(n, 20u);
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

}  // namespace
}  // namespace dynemb
