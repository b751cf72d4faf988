// The work that GatherGradient gives a device: its amount, and that it reads no unwritten memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "cc/device/gather_gradient.h"
#include "tests/cc/device_gather_model.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

using Cases = GradientCases;
using Outputs = GatherOutputs;
using Tasks = GatherGradientTasks;

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
  Cases cases;
  for (size_t t = 0; t < 4; ++t) {
    Shape s{30, 600, 5, 6};
    s.combiner = kCombiners[t];
    s.form = kForms[t];
    s.weighted = true;
    cases.push_back(MakeTable({s, s}, 100, &random));
  }
  const Outputs outputs(cases, /*several_outputs=*/false);
  GarbageSession session(device, nullptr);
  ASSERT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
  for (size_t t = 0; t < cases.size(); ++t) {
    std::vector<size_t> counts;
    const std::vector<float> expected = Expected(cases[t], &counts), sums = outputs.Take(t);
    EXPECT_GE(std::count(counts.begin(), counts.end(), 0), 88);
    ASSERT_EQ(sums.size(), expected.size());
    ASSERT_TRUE(SameBits(sums.data(), expected.data(), sums.size()));
  }
}

TEST(DeviceGatherGradientWorkTest, LaunchesDoNotDependOnTheNumberOfTasksOrFeatures) {
  std::mt19937_64 random(14);
  ThreadsDevice device;
  const auto launches = [&](size_t tables, size_t features, bool several_outputs) {
    Cases cases;
    for (size_t t = 0; t < tables; ++t) {
      Shape s{600, 600, 4, 1};
      s.combiner = Combiner::kMean;
      s.form = Form::kUnsorted;
      cases.push_back(MakeTable(std::vector<Shape>(features, s), 50, &random));
    }
    const Outputs outputs(cases, several_outputs);
    CountingSession session(device, nullptr);
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
  Cases cases;
  for (int64_t dim : {4, 130, 1}) cases.push_back(MakeTable({{1, 600, dim, 1}}, 50, &random));
  const Outputs outputs(cases, /*several_outputs=*/false);
  CountingSession session(device, nullptr);
  ASSERT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
  EXPECT_EQ(session.quads, std::vector<size_t>(3, 33));
}

TEST(DeviceGatherGradientWorkTest, NoWorkWithoutRows) {
  std::mt19937_64 random(18);
  ThreadsDevice device;
  Cases cases;
  cases.push_back({0, 1, {}});
  cases[0].features.push_back(OneEach({0, 0, 7}, 1, &random));
  const Outputs outputs(cases, /*several_outputs=*/false);
  CountingSession session(device, nullptr);
  EXPECT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
  EXPECT_TRUE(device::GatherGradient(session, Tasks{}).ok());
  EXPECT_EQ(session.launches, 0);
  EXPECT_TRUE(session.sorted_bits.empty());
}

TEST(DeviceGatherGradientWorkTest, SortsOnlyTheBitsOfRowNumbers) {
  std::mt19937_64 random(15);
  ThreadsDevice device;
  // There is one more number, for ids without a row.
  for (const auto& [rows, bits] :
       {std::pair(1, 1), std::pair(2, 2), std::pair(3, 2), std::pair(255, 8), std::pair(256, 9)}) {
    Cases cases;
    cases.push_back({static_cast<size_t>(rows), 1, {}});
    cases[0].features.push_back(OneEach({0, 0, 7}, 1, &random));
    const Outputs outputs(cases, /*several_outputs=*/false);
    CountingSession session(device, nullptr);
    ASSERT_TRUE(device::GatherGradient(session, outputs.tasks).ok());
    EXPECT_EQ(session.sorted_bits, std::vector<int>{bits});
  }
}

}  // namespace
}  // namespace dynemb
