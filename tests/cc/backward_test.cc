// Backward on the host, SumGradients on simulated devices. For the sums of all kinds of tasks see
// gradient_test.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/backward_fixture.h"

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class Place>
class BackwardTest : public BackwardFixture<Place> {};

TYPED_TEST_SUITE(BackwardTest, Places);

Cases Alone(std::unique_ptr<Case> c) {
  Cases cases;
  cases.push_back(std::move(c));
  return cases;
}

TYPED_TEST(BackwardTest, SizesAndSkew) {
  std::mt19937_64 random(12);
  for (size_t nnz : {0, 1, 2, 255, 256, 257, 2048, 2049, 60000}) {
    if (!this->kIsHost && nnz > 2049) continue;
    for (uint64_t vocabulary : {1, 50, 1000000}) {
      for (KeyType key_type : {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64}) {
        SCOPED_TRACE(testing::Message() << nnz << " ids of " << vocabulary);
        Shape s{nnz, nnz, 3, vocabulary};
        s.key_type = key_type;
        s.rows = nnz % 2 == 0;
        ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeCase(s, &random))));
      }
    }
  }
}

// In float32 the order matters: (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
TYPED_TEST(BackwardTest, AddsTermsInTheOrderOfPositions) {
  const std::vector<uint64_t> keys = {5, 6, 5, 5, 6, 6};
  const std::vector<float> values = {1e8f, 1e8f, 1, -1e8f, -1e8f, 1};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, 6, 6).ok());
  BackwardTask task;
  task.keys = keys.data();
  task.bags = &bags;
  task.upstream = values.data();
  task.dim = 1;
  const Result result = Sorted(this->Sum({task})[0], 1);
  EXPECT_EQ(result.keys, (std::vector<uint64_t>{5, 6}));
  EXPECT_EQ(result.sums, (std::vector<float>{0, 1}));
}

// div_no_nan: if the divisor is 0, the gradient is 0, even for NaN and infinity.
TYPED_TEST(BackwardTest, BagsOfZeroWeightHaveZeroGradients) {
  for (Combiner combiner : {Combiner::kMean, Combiner::kSqrtn}) {
    for (DType dtype : kDTypes) {
      const std::vector<uint64_t> keys = {1, 2, 3, 4};
      const float first = combiner == Combiner::kMean ? 1 : 0;
      const std::vector<float> weights = {first, -first, 0, 2};
      const std::vector<float> values = {kNan, HUGE_VALF, 3};
      std::vector<float> upstream(3);
      StoreVector(dtype, values.data(), 3, upstream.data());
      const std::vector<int64_t> splits = {0, 2, 3, 4};
      Bags bags;
      ASSERT_TRUE(bags.InitSplits(this->place_.exec(), splits.data(), 4, 4, 3).ok());
      BackwardTask task;
      task.keys = keys.data();
      task.bags = &bags;
      task.weights = weights.data();
      task.combiner = combiner;
      task.dtype = dtype;
      task.upstream = upstream.data();
      task.dim = 1;
      const Result result = Sorted(this->Sum({task})[0], 1);
      EXPECT_EQ(result.keys, keys);
      EXPECT_EQ(result.sums, (std::vector<float>{0, 0, 0, 3}));
    }
  }
}

// With max, a NaN weight reaches only the columns in which its id is the maximum.
TYPED_TEST(BackwardTest, MaxDoesNotChangeOtherColumns) {
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
  const std::vector<float> sums = Sorted(this->Sum({task})[0], 2).sums;
  EXPECT_TRUE(std::isnan(sums[0]));
  EXPECT_EQ(std::vector<float>(sums.begin() + 1, sums.end()), (std::vector<float>{0, 0, 14}));
}

TYPED_TEST(BackwardTest, ErrorsNameTheTask) {
  std::mt19937_64 random(9);
  Shape shape{10, 20, 4, 10};
  shape.combiner = Combiner::kMax;
  auto good = MakeCase(shape, &random), bad = MakeCase(shape, &random);
  const BackwardTask intact = bad->task;
  const auto expect = [&](const std::string& part) {
    const std::vector<BackwardTask> tasks = {good->task, bad->task};
    Outputs outputs(tasks);
    const Status status = this->TrySum(tasks, &outputs);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(), Backward::Check(tasks.data(), 2).message());
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_TRUE(outputs.num_unique.empty());
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

// Write writes nothing, after a Prepare that succeeded and one that failed.
TEST(HostBackwardTest, NothingIsWrittenAfterAnError) {
  std::mt19937_64 random(1);
  auto good = MakeCase({10, 20, 4, 10}, &random), bad = MakeCase({10, 20, 4, 10}, &random);
  bad->task.dim = -4;
  SerialExec exec;
  Backward backward;
  ASSERT_TRUE(backward.Prepare(exec, &good->task, 1).ok());
  const BackwardTask tasks[] = {good->task, bad->task};
  EXPECT_EQ(backward.Prepare(exec, tasks, 2).code(), Code::kInvalidArgument);
  backward.Write(exec, nullptr);
}

}  // namespace
}  // namespace dynemb
