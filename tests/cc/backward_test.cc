#include "cc/lookup/backward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cc/backward_model.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Checks the results of one thread against the definition. Other Execs must give the same bits.
void CheckAll(const std::vector<Shape>& shapes, uint64_t seed, Backward* backward) {
  std::mt19937_64 random(seed);
  std::vector<std::unique_ptr<Case>> cases;
  std::vector<BackwardTask> tasks;
  for (const Shape& s : shapes) {
    cases.push_back(MakeCase(s, &random));
    tasks.push_back(cases.back()->task);
  }
  SerialExec serial;
  const std::vector<Result> expected = RunBackward(serial, tasks, backward);
  for (size_t t = 0; t < tasks.size(); ++t) {
    SCOPED_TRACE(testing::Message() << "task " << t);
    ASSERT_NO_FATAL_FAILURE(Check(*cases[t], expected[t]));
  }
  for (size_t threads : {2, 4}) {
    ThreadsExec exec(threads);
    const std::vector<Result> results = RunBackward(exec, tasks, backward);
    for (size_t t = 0; t < tasks.size(); ++t)
      ASSERT_TRUE(results[t] == expected[t]) << "task " << t;
  }
  // Upstream rows at arbitrary addresses give the same bits.
  std::vector<std::vector<char>> copies(tasks.size());
  std::vector<std::vector<const void*>> rows(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    const size_t n = cases[t]->bags.num_bags();
    const size_t bytes = static_cast<size_t>(tasks[t].dim) * SizeOf(tasks[t].dtype);
    copies[t].resize(2 * n * bytes, '\x7F');
    for (size_t row = 0; row < n; ++row) {
      char* const copy = &copies[t][2 * (n - 1 - row) * bytes];
      std::memcpy(copy, static_cast<const char*>(tasks[t].upstream) + row * bytes, bytes);
      rows[t].push_back(copy);
    }
    tasks[t].upstream = nullptr;
    tasks[t].upstream_rows = rows[t].data();
  }
  const std::vector<Result> results = RunBackward(serial, tasks, backward);
  for (size_t t = 0; t < tasks.size(); ++t) {
    ASSERT_TRUE(results[t] == expected[t]) << "task " << t << ", scattered rows";
  }
}

constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn,
                                   Combiner::kMax};
constexpr Form kForms[] = {Form::kUniform, Form::kSplits, Form::kSorted, Form::kUnsorted};

TEST(BackwardTest, EveryCombinerFormAndWeight) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  Backward backward;
  uint64_t seed = 0;
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      for (bool weighted : {false, true}) {
        SCOPED_TRACE(testing::Message() << "combiner " << int(combiner) << ", form " << int(form)
                                        << ", weighted " << weighted);
        Shape s{500, 5000, 5, 700};
        s.combiner = combiner;
        s.form = form;
        s.weighted = weighted;
        Shape large = s;
        large.num_bags = 9000;
        large.nnz = 20000;
        large.vocabulary = 15000;
        ASSERT_NO_FATAL_FAILURE(CheckAll({s, large}, ++seed, &backward));
      }
    }
  }
}

TEST(BackwardTest, EveryDimAndDtype) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  Backward backward;
  uint64_t seed = 100;
  for (int64_t dim :
       {1, 2, 3, 4, 7, 8, 15, 16, 17, 20, 32, 64, 65, 100, 128, 130, 255, 256, 257, 600}) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
        SCOPED_TRACE(testing::Message() << "dim " << dim << ", dtype " << int(dtype)
                                        << ", combiner " << int(combiner));
        Shape s{100, 3000, dim, 400};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kSplits;
        ASSERT_NO_FATAL_FAILURE(CheckAll({s}, ++seed, &backward));
      }
    }
  }
}

TEST(BackwardTest, SizesAndSkew) {
  Backward backward;
  uint64_t seed = 200;
  for (size_t nnz : {0, 1, 2, 255, 256, 257, 2048, 2049, 60000}) {
    for (uint64_t vocabulary : {1, 50, 1000000}) {
      for (KeyType key_type : {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64}) {
        SCOPED_TRACE(testing::Message() << nnz << " ids of " << vocabulary);
        Shape s{nnz, nnz, 3, vocabulary};
        s.key_type = key_type;
        s.rows = nnz % 2 == 0;
        ASSERT_NO_FATAL_FAILURE(CheckAll({s}, ++seed, &backward));
      }
    }
  }
}

TEST(BackwardTest, ManyTablesOfAllKinds) {
  Backward backward;
  std::mt19937_64 random(11);
  for (size_t tables : {0, 1, 7, 100}) {
    std::vector<Shape> shapes;
    for (size_t t = 0; t < tables; ++t) {
      Shape s{1 + random() % 200, random() % 3000, int64_t(1 + random() % 40), 1 + random() % 2000};
      s.combiner = kCombiners[random() % 4];
      s.form = kForms[random() % 4];
      s.weighted = random() % 2;
      s.dtype = static_cast<DType>(random() % 3);
      s.key_type = static_cast<KeyType>(random() % 3);
      s.rows = random() % 2;
      if (t == 3) s.nnz = s.num_bags * 400;  // one large task among small ones
      shapes.push_back(s);
    }
    ASSERT_NO_FATAL_FAILURE(CheckAll(shapes, 300 + tables, &backward)) << tables << " tables";
  }
}

TEST(BackwardTest, AddsTermsInTheOrderOfPositions) {
  // In float32 the order matters: (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
  const std::vector<uint64_t> keys = {5, 6, 5, 5, 6, 6};
  const std::vector<float> values = {1e8f, 1e8f, 1, -1e8f, -1e8f, 1};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, 6, 6).ok());
  BackwardTask task;
  task.keys = keys.data();
  task.bags = &bags;
  task.upstream = values.data();
  task.dim = 1;
  Backward backward;
  SerialExec exec;
  const Result result = RunBackward(exec, {task}, &backward)[0];
  EXPECT_EQ(result.keys, (std::vector<uint64_t>{5, 6}));
  EXPECT_EQ(result.sums, (std::vector<float>{0, 1}));
}

// div_no_nan: if the divisor is 0, the gradient is 0, even for NaN and infinity.
TEST(BackwardTest, BagsOfZeroWeightHaveZeroGradients) {
  const std::vector<uint64_t> keys = {1, 2, 3, 4};
  const std::vector<float> weights = {1, -1, 0, 2};
  const std::vector<float> upstream = {kNan, HUGE_VALF, 3};
  const std::vector<int64_t> splits = {0, 2, 3, 4};
  SerialExec exec;
  Bags bags;
  ASSERT_TRUE(bags.InitSplits(exec, splits.data(), 4, 4, 3).ok());
  BackwardTask task;
  task.keys = keys.data();
  task.bags = &bags;
  task.weights = weights.data();
  task.combiner = Combiner::kMean;
  task.upstream = upstream.data();
  task.dim = 1;
  Backward backward;
  const Result result = RunBackward(exec, {task}, &backward)[0];
  EXPECT_EQ(result.sums, (std::vector<float>{0, 0, 0, 3}));
}

// With max, a NaN weight reaches only the columns in which its id is the maximum.
TEST(BackwardTest, MaxDoesNotChangeOtherColumns) {
  const std::vector<uint64_t> keys = {1, 2};
  const std::vector<float> weights = {kNan, 2}, upstream = {5, 7};
  const std::vector<int32_t> argmax = {0, 1};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(2, 2, 1).ok());
  BackwardTask task;
  task.keys = keys.data();
  task.bags = &bags;
  task.weights = weights.data();
  task.combiner = Combiner::kMax;
  task.argmax = argmax.data();
  task.upstream = upstream.data();
  task.dim = 2;
  Backward backward;
  SerialExec exec;
  const Result result = RunBackward(exec, {task}, &backward)[0];
  EXPECT_TRUE(std::isnan(result.sums[0]));
  EXPECT_EQ(result.sums[1], 0);
  EXPECT_EQ(result.sums[2], 0);
  EXPECT_EQ(result.sums[3], 14);
}

TEST(BackwardTest, ErrorsNameTheTask) {
  std::mt19937_64 random(1);
  Shape shape{10, 20, 4, 10};
  shape.combiner = Combiner::kMax;
  auto good = MakeCase(shape, &random), bad = MakeCase(shape, &random);
  SerialExec exec;
  Backward backward;
  const BackwardTask intact = bad->task;
  auto expect = [&](const std::string& part) {
    ASSERT_TRUE(backward.Prepare(exec, &good->task, 1).ok());
    const BackwardTask tasks[] = {good->task, bad->task};
    const Status status = backward.Prepare(exec, tasks, 2);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    backward.Write(exec, nullptr);  // nothing is prepared, so nothing is written
    bad->task = intact;
  };
  bad->task.bags = nullptr;
  expect("bags");
  bad->task.keys = nullptr;
  expect("keys");
  bad->task.upstream = nullptr;
  expect("upstream");
  bad->task.argmax = nullptr;
  expect("argmax");
  bad->task.dim = 0;
  expect("got 0");
  bad->task.dim = -4;
  expect("got -4");
}

}  // namespace
}  // namespace dynemb
