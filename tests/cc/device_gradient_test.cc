// SumGradients on simulated devices: the same bits as the host's Backward or, for keys of many ids,
// as by the rule of sum_gradients.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/sum_gradients.h"
#include "tests/cc/backward_model.h"
#include "tests/cc/device_gradient_cases.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/simulated_devices.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn,
                                   Combiner::kMax};
constexpr Form kForms[] = {Form::kUniform, Form::kSplits, Form::kSorted, Form::kUnsorted};
constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};

template <class Device>
class DeviceGradientTest : public testing::Test {
 protected:
  Status TrySum(const std::vector<BackwardTask>& tasks, Outputs* outputs) {
    typename Device::Session session(device_, &exec_);
    return device::SumGradients(session, tasks, std::ref(*outputs));
  }

  std::vector<Result> Sum(const std::vector<BackwardTask>& tasks) {
    Outputs outputs(tasks);
    const uint64_t waits = device_.waits();
    const Status status = TrySum(tasks, &outputs);
    EXPECT_TRUE(status.ok()) << status.message();
    const bool some = std::any_of(tasks.begin(), tasks.end(),
                                  [](const BackwardTask& t) { return t.bags->nnz() != 0; });
    EXPECT_EQ(device_.waits() - waits, some ? 1u : 0u);
    return outputs.Take();
  }

  // Checks the sums against the rule and, for keys of at most 256 ids, against the host.
  void CheckAll(const Cases& cases) {
    const std::vector<BackwardTask> tasks = TasksOf(cases);
    const std::vector<Result> results = Sum(tasks);
    SerialExec serial;
    Backward backward;
    const std::vector<Result> on_host = RunBackward(serial, tasks, &backward);
    for (size_t t = 0; t < tasks.size(); ++t) {
      SCOPED_TRACE(testing::Message() << "task " << t);
      const Result expected = Expected(*cases[t]);
      ASSERT_EQ(results[t].keys, expected.keys);
      ASSERT_EQ(results[t].rows, expected.rows);
      const auto dim = static_cast<size_t>(tasks[t].dim);
      ASSERT_EQ(results[t].sums.size(), expected.keys.size() * dim);
      for (size_t u = 0; u < expected.keys.size(); ++u) {
        ASSERT_TRUE(SameBits(&results[t].sums[u * dim], &expected.sums[u * dim], dim))
            << "key " << u << " of " << expected.keys.size();
      }
      ASSERT_NO_FATAL_FAILURE(CheckHost(*cases[t], results[t], on_host[t]));
    }
  }

  Device device_;
  ThreadsExec exec_{3};

 private:
  static void CheckHost(const Case& c, const Result& result, const Result& on_host) {
    const auto dim = static_cast<size_t>(c.task.dim);
    std::map<uint64_t, size_t> ids, at;
    for (size_t i = 0; i < c.bags.nnz(); ++i) ++ids[KeyOf(c, i)];
    for (size_t u = 0; u < result.keys.size(); ++u) at[result.keys[u]] = u;
    ASSERT_EQ(on_host.keys.size(), result.keys.size());
    for (size_t u = 0; u < on_host.keys.size(); ++u) {
      const uint64_t key = on_host.keys[u];
      ASSERT_EQ(at.count(key), 1u);
      if (c.task.rows != nullptr) {
        ASSERT_EQ(result.rows[at[key]], on_host.rows[u]);
      }
      if (ids[key] > kChunk) continue;
      ASSERT_TRUE(SameBits(&result.sums[at[key] * dim], &on_host.sums[u * dim], dim));
    }
  }
};

TYPED_TEST_SUITE(DeviceGradientTest, SimulatedDevices);

TYPED_TEST(DeviceGradientTest, EveryCombinerFormAndWeight) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  std::mt19937_64 random(1);
  Cases cases;
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      for (bool weighted : {false, true}) {
        // All tasks have the same keys.
        Shape s{100, 1000, 5, 300};
        s.combiner = combiner;
        s.form = form;
        s.weighted = weighted;
        s.rows = weighted == (form == Form::kSplits);
        cases.push_back(MakeCase(s, &random));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  for (auto& c : cases) {
    Cases alone;
    alone.push_back(std::move(c));
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(alone));
  }
}

// Kernels for whole rows (row_math.h), which run if all tasks have them. A third of the ids have
// one of three keys, so that windows begin and end inside of segments and chunks.
TYPED_TEST(DeviceGradientTest, WholeRows) {
  std::mt19937_64 random(16);
  for (const int64_t dim : {4, 16, 36, 128, 140}) {
    Cases cases;
    for (const Combiner combiner : {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn}) {
      Shape s{300, 2500, dim, 400};
      s.combiner = combiner;
      s.weighted = combiner != Combiner::kSum;
      s.form = combiner == Combiner::kMean ? Form::kUnsorted : Form::kSplits;
      s.rows = true;
      cases.push_back(MakeCase(s, &random));
      Case* const c = cases.back().get();
      for (size_t i = 0; i < c->bags.nnz(); ++i) {
        if (random() % 3 == 0) SetKey(c, i, 1000 + random() % 3);
      }
      ASSERT_FALSE(device::IsWhole(c->task)) << "the array of MakeCase is not aligned";
      c->task.upstream = c->upstream.data();
      ASSERT_TRUE(device::IsWhole(c->task));
    }
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(DeviceGradientTest, EveryDimDtypeAndKeyType) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  std::mt19937_64 random(2);
  Cases cases;
  for (int64_t dim : {1, 2, 3, 4, 7, 8, 33, 128, 130, 300}) {
    for (DType dtype : kDtypes) {
      for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
        Shape s{60, 400, dim, 150};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kSplits;
        s.key_type = static_cast<KeyType>(cases.size() % 3);
        cases.push_back(MakeCase(s, &random));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGradientTest, KeysOfManyIds) {
  std::mt19937_64 random(3);
  Cases cases;
  for (size_t ids : {5000u, 1u, 3000u, 700u}) {
    for (int64_t dim : {33, 1, 4}) {
      for (uint64_t vocabulary : {1, 3}) {
        Shape s{ids, ids, dim, vocabulary};
        s.dtype = kDtypes[cases.size() % 3];
        s.combiner = kCombiners[cases.size() % 4];
        s.weighted = cases.size() % 2 == 0;
        s.form = kForms[cases.size() / 2 % 4];
        cases.push_back(MakeCase(s, &random));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// Keys whose numbers of ids are close to multiples of 256, in random order.
TYPED_TEST(DeviceGradientTest, ChunksAreOf256Ids) {
  std::mt19937_64 random(4);
  Cases cases;
  for (const std::vector<size_t>& counts :
       {std::vector<size_t>{1, 255, 256, 257, 3, 511, 512, 513, 767, 768, 769, 5000},
        std::vector<size_t>{256}, std::vector<size_t>{257}, std::vector<size_t>{257, 257, 257},
        std::vector<size_t>{512}, std::vector<size_t>{513}}) {
    for (Form form : {Form::kUniform, Form::kUnsorted}) {
      std::vector<uint64_t> keys;
      for (size_t k = 0; k < counts.size(); ++k) keys.insert(keys.end(), counts[k], k);
      std::shuffle(keys.begin(), keys.end(), random);
      Shape s{keys.size(), keys.size(), 6, 10};
      s.form = form;
      s.weighted = true;
      cases.push_back(MakeCase(s, &random));
      for (size_t i = 0; i < keys.size(); ++i) SetKey(cases.back().get(), i, keys[i]);
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGradientTest, ManyTasksOfAllKinds) {
  std::mt19937_64 random(5);
  for (size_t count : {0, 1, 2, 9, 60}) {
    SCOPED_TRACE(testing::Message() << count << " tasks");
    Cases cases;
    for (size_t t = 0; t < count; ++t) {
      Shape s{1 + random() % 100, random() % 800, int64_t(1 + random() % 40), 1 + random() % 500};
      s.combiner = kCombiners[random() % 4];
      s.form = kForms[random() % 4];
      s.weighted = random() % 2;
      s.dtype = kDtypes[random() % 3];
      s.key_type = static_cast<KeyType>(random() % 3);
      s.rows = random() % 2;
      if (t % 5 == 1) s.nnz = 0;
      if (t % 7 == 2) s.vocabulary = 1;
      if (t == 3) s.nnz = s.num_bags * 30;  // one large task among small ones
      cases.push_back(MakeCase(s, &random));
    }
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(DeviceGradientTest, NothingToSum) {
  std::mt19937_64 random(6);
  Cases cases;
  cases.push_back(MakeCase({0, 0, 4, 10}, &random));
  cases.push_back(MakeCase({10, 0, 4, 10}, &random));
  // A task without ids may have null arrays.
  BackwardTask& bare = cases.back()->task;
  bare.keys = bare.upstream = nullptr;
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  cases.push_back(MakeCase({10, 30, 4, 10}, &random));
  cases.push_back(MakeCase({10, 0, 4, 10}, &random));
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGradientTest, BagsInDescendingOrder) {
  std::mt19937_64 random(7);
  for (bool weighted : {false, true}) {
    Shape s{50, 200, 8, 40};
    s.form = Form::kUnsorted;
    s.combiner = Combiner::kSqrtn;
    s.weighted = weighted;
    auto c = MakeCase(s, &random);
    SerialExec exec;
    for (size_t i = 0; i < 200; ++i) {
      c->bag_of[i] = static_cast<uint32_t>((199 - i) / 4);
      c->bag_values[2 * i] = c->bag_of[i];
    }
    ASSERT_TRUE(c->bags.InitIndices(exec, c->bag_values.data(), 2, 200, 50).ok());
    Cases cases;
    cases.push_back(std::move(c));
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

// Each row is at any multiple of four bytes, like received rows.
TYPED_TEST(DeviceGradientTest, ScatteredUpstreamRows) {
  std::mt19937_64 random(8);
  Cases cases;
  for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
    for (DType dtype : kDtypes) {
      for (int64_t dim : {8, 9}) {
        Shape s{50, 700, dim, 2};
        s.combiner = combiner;
        s.dtype = dtype;
        s.form = Form::kSorted;
        cases.push_back(MakeCase(s, &random));
      }
    }
  }
  std::vector<std::vector<float>> copies(cases.size());
  std::vector<std::vector<const void*>> rows(cases.size());
  for (size_t t = 0; t < cases.size(); ++t) {
    BackwardTask& task = cases[t]->task;
    const size_t n = task.bags->num_bags();
    const size_t bytes = static_cast<size_t>(task.dim) * SizeOf(task.dtype);
    const size_t words = (bytes + 3) / 4 / 2 * 2 + 3;  // odd, so that every alignment occurs
    copies[t].resize(n * words, kNan);
    for (size_t row = 0; row < n; ++row) {
      float* const copy = &copies[t][(n - 1 - row) * words];
      std::memcpy(copy, static_cast<const char*>(task.upstream) + row * bytes, bytes);
      rows[t].push_back(copy);
    }
    task.upstream = nullptr;
    task.upstream_rows = rows[t].data();
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// div_no_nan: if the divisor is 0, the gradient is 0, even for NaN and infinity.
TYPED_TEST(DeviceGradientTest, BagsOfZeroWeightHaveZeroGradients) {
  for (Combiner combiner : {Combiner::kMean, Combiner::kSqrtn}) {
    for (DType dtype : kDtypes) {
      const std::vector<uint64_t> keys = {1, 2, 3, 4};
      const float first = combiner == Combiner::kMean ? 1 : 0;
      const std::vector<float> weights = {first, -first, 0, 2};
      const std::vector<float> values = {kNan, HUGE_VALF, 3};
      std::vector<float> upstream(3);
      StoreVector(dtype, values.data(), 3, upstream.data());
      const std::vector<int64_t> splits = {0, 2, 3, 4};
      Bags bags;
      ASSERT_TRUE(bags.InitSplits(this->exec_, splits.data(), 4, 4, 3).ok());
      BackwardTask task;
      task.keys = keys.data();
      task.bags = &bags;
      task.weights = weights.data();
      task.combiner = combiner;
      task.dtype = dtype;
      task.upstream = upstream.data();
      task.dim = 1;
      const std::vector<Result> results = this->Sum({task});
      EXPECT_EQ(results[0].keys, keys);
      EXPECT_EQ(results[0].sums, (std::vector<float>{0, 0, 0, 3}));
    }
  }
}

// With max, a NaN weight reaches only the columns in which its id is the maximum.
TYPED_TEST(DeviceGradientTest, MaxDoesNotChangeOtherColumns) {
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
  const std::vector<float> sums = this->Sum({task})[0].sums;
  EXPECT_TRUE(std::isnan(sums[0]));
  EXPECT_EQ(std::vector<float>(sums.begin() + 1, sums.end()), (std::vector<float>{0, 0, 14}));
}

TYPED_TEST(DeviceGradientTest, ErrorsNameTheTask) {
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
    Backward backward;
    EXPECT_EQ(status.message(), backward.Prepare(this->exec_, tasks.data(), 2).message());
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
}

TYPED_TEST(DeviceGradientTest, TooManyIds) {
  const uint64_t something = 0;
  BackwardTask task;
  task.keys = &something;
  task.upstream = &something;
  task.dim = 1;
  Bags large, small;
  ASSERT_TRUE(large.InitUniform(1, Bags::kMaxSize, Bags::kMaxSize).ok());
  ASSERT_TRUE(small.InitUniform(1, 1, 1).ok());
  std::vector<BackwardTask> tasks(2, task);
  tasks[0].bags = &large;
  tasks[1].bags = &small;
  Outputs outputs(tasks);
  this->device_.FailTake(0);  // the call fails before it takes memory
  const Status status = this->TrySum(tasks, &outputs);
  EXPECT_TRUE(this->device_.FailTake(TypeParam::kNever));
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "all tables together may have at most 2^32 - 2 ids in a batch, got 4294967295");
  EXPECT_TRUE(outputs.num_unique.empty());
  EXPECT_EQ(this->device_.waits(), 0u);
}

TYPED_TEST(DeviceGradientTest, AllocateFails) {
  std::mt19937_64 random(10);
  Cases cases;
  for (int i = 0; i < 4; ++i) cases.push_back(MakeCase({10, 30, 4, 10}, &random));
  for (const size_t failing : {0u, 2u, 3u}) {
    const std::vector<BackwardTask> tasks = TasksOf(cases);
    Outputs outputs(tasks);
    typename TypeParam::Session session(this->device_, &this->exec_);
    size_t calls = 0;
    const auto allocate = [&](size_t t, size_t n, BackwardOutput* output) {
      ++calls;
      return t == failing ? FailedPrecondition("no room") : outputs(t, n, output);
    };
    const Status status = device::SumGradients(session, tasks, allocate);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_EQ(status.message(), "no room");
    EXPECT_EQ(calls, failing + 1);
    EXPECT_TRUE(session.status().ok());
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGradientTest, WorkspaceAllocationFails) {
  std::mt19937_64 random(11);
  Cases cases;
  for (Form form : kForms) {
    Shape s{40, 600, 4, 2};
    s.form = form;
    s.combiner = Combiner::kMean;
    s.weighted = true;
    cases.push_back(MakeCase(s, &random));
  }
  const std::vector<BackwardTask> tasks = TasksOf(cases);
  uint64_t n = 0;
  for (;; ++n) {
    Outputs outputs(tasks);
    this->device_.FailTake(n);
    const Status status = this->TrySum(tasks, &outputs);
    if (this->device_.FailTake(TypeParam::kNever)) {
      EXPECT_TRUE(status.ok());
      break;
    }
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << "take " << n;
    EXPECT_TRUE(outputs.Untouched()) << "take " << n;
    // `allocate` was not called with a wrong number of keys.
    if (!outputs.num_unique.empty()) {
      EXPECT_EQ(outputs.num_unique, std::vector<size_t>(4, 2));
    }
  }
  EXPECT_GT(n, 20u);
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

}  // namespace
}  // namespace dynemb
