// What only GatherGradient on a device has: the work that it gives the device, ids without rows,
// and failures.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/gather_gradient.h"
#include "tests/cc/counting_session.h"
#include "tests/cc/gather_gradient_fixture.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

template <class Place>
class DeviceGatherGradientTest : public GatherGradientFixture<Place> {};

TYPED_TEST_SUITE(DeviceGatherGradientTest, ForSimulatedDevices<DevicePlace>);

// An id whose index is out of range adds to no row, neither of its table nor of the next.
TYPED_TEST(DeviceGatherGradientTest, IndicesOutOfRange) {
  std::mt19937_64 random(9);
  for (uint32_t beyond : {0u, 1u, 250u, 0x7FFFFFFFu, 0xFFFFFFFFu - 200u}) {
    GradientCases cases;
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
    cases.back().features.push_back(IdsOf({0, beyond, 7}, 5, &random));
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(DeviceGatherGradientTest, IdsWithoutRows) {
  std::mt19937_64 random(10);
  GradientCases cases;
  cases.push_back({0, 5, {}});
  cases.back().features.push_back(IdsOf({0, 1, 7}, 5, &random));
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
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
  const auto expect = [&](const GatherGradientTasks& tasks, const std::string& what) {
    this->place_.ExpectTooMany(what, [&] { return this->TryRun(tasks); });
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
  GradientCases cases;
  for (Form form : kForms) {
    Shape s{40, 600, 4, 2};
    s.form = form;
    s.combiner = Combiner::kMean;
    s.weighted = true;
    cases.push_back(MakeTable({s, s}, 5, &random));
  }
  const uint64_t arrays = this->place_.FailEach([&] {
    const GatherOutputs outputs(cases, /*several_outputs=*/true);
    const Status status = this->TryRun(outputs.tasks);
    for (size_t t = 0; t < cases.size(); ++t) {
      for (float sum : outputs.Take(t)) EXPECT_EQ(std::isnan(sum), !status.ok());
    }
    return status;
  });
  EXPECT_GT(arrays, 20u);
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// A session whose arrays are initially full of different numbers.
class GarbageSession : public ThreadsDevice::Session {
 public:
  using Base = ThreadsDevice::Session;
  using Base::Base;

  template <class T>
  T* Take(size_t n) {
    T* const taken = Base::Take<T>(n);
    auto* const bytes = reinterpret_cast<unsigned char*>(taken);
    for (size_t i = 0; i < n * sizeof(T); ++i) bytes[i] = static_cast<unsigned char>(i / 4 % 251);
    return taken;
  }
};

TEST(DeviceGatherGradientWorkTest, WorkspaceIsNotReadBeforeItIsWritten) {
  std::mt19937_64 random(16);
  ThreadsDevice device;
  GradientCases cases;
  for (size_t t = 0; t < 4; ++t) {
    Shape s{30, 600, 5, 6};
    s.combiner = kCombiners[t];
    s.form = kForms[t];
    s.weighted = true;
    cases.push_back(MakeTable({s, s}, 100, &random));
  }
  const GatherOutputs outputs(cases, /*several_outputs=*/false);
  GarbageSession session(device, nullptr);
  ASSERT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
  for (size_t t = 0; t < cases.size(); ++t) {
    const std::vector<float> expected = Expected(cases[t], /*in_chunks=*/true),
                             sums = outputs.Take(t);
    EXPECT_GE(std::count(sums.begin(), sums.end(), 0.0f), 88 * 5) << "rows without ids";
    ASSERT_EQ(sums.size(), expected.size());
    ASSERT_TRUE(SameBits(sums.data(), expected.data(), sums.size()));
  }
}

TEST(DeviceGatherGradientWorkTest, LaunchesDoNotDependOnTheNumberOfTasksOrFeatures) {
  std::mt19937_64 random(14);
  ThreadsDevice device;
  const auto launches = [&](size_t tables, size_t features, bool several_outputs) {
    GradientCases cases;
    for (size_t t = 0; t < tables; ++t) {
      Shape s{600, 600, 4, 1};
      s.combiner = Combiner::kMean;
      s.form = Form::kUnsorted;
      cases.push_back(MakeTable(std::vector<Shape>(features, s), 50, &random));
    }
    const GatherOutputs outputs(cases, several_outputs);
    CountingSession<> session(device, nullptr);
    EXPECT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
    EXPECT_EQ(session.sorted_bits.size(), 1u);
    return session.launches;
  };
  EXPECT_EQ(launches(1, 1, false), 6);
  EXPECT_EQ(launches(10, 6, false), 6);
  EXPECT_EQ(launches(10, 6, true), 6);
  EXPECT_EQ(device.waits(), 0u);
}

TEST(DeviceGatherGradientWorkTest, TeamWidthFitsTheWidestSums) {
  std::mt19937_64 random(17);
  ThreadsDevice device;
  GradientCases cases;
  for (int64_t dim : {4, 130, 1}) cases.push_back(MakeTable({{1, 600, dim, 1}}, 50, &random));
  const GatherOutputs outputs(cases, /*several_outputs=*/false);
  CountingSession<> session(device, nullptr);
  ASSERT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
  EXPECT_EQ(session.quads, std::vector<size_t>(3, 33));
}

TEST(DeviceGatherGradientWorkTest, NoWorkWithoutRows) {
  std::mt19937_64 random(18);
  ThreadsDevice device;
  GradientCases cases;
  cases.push_back({0, 1, {}});
  cases[0].features.push_back(IdsOf({0, 0, 7}, 1, &random));
  const GatherOutputs outputs(cases, /*several_outputs=*/false);
  CountingSession<> session(device, nullptr);
  EXPECT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
  EXPECT_TRUE(device::GatherGradient(session, GatherGradientTasks{}).ok());
  EXPECT_EQ(session.launches, 0);
  EXPECT_TRUE(session.sorted_bits.empty());
}

TEST(DeviceGatherGradientWorkTest, SortsOnlyTheBitsOfRowNumbers) {
  std::mt19937_64 random(15);
  ThreadsDevice device;
  // There is one more number, for ids without a row.
  for (const auto& [rows, bits] :
       {std::pair(1, 1), std::pair(2, 2), std::pair(3, 2), std::pair(255, 8), std::pair(256, 9)}) {
    GradientCases cases;
    cases.push_back({static_cast<size_t>(rows), 1, {}});
    cases[0].features.push_back(IdsOf({0, 0, 7}, 1, &random));
    const GatherOutputs outputs(cases, /*several_outputs=*/false);
    CountingSession<> session(device, nullptr);
    ASSERT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
    EXPECT_EQ(session.sorted_bits, std::vector<int>{bits});
  }
}

}  // namespace
}  // namespace dynemb
