// What only SumGradients on a device has: launches, teams, sorted bits, room for ranges of ids, and
// failures.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "cc/device/sum_gradients.h"
#include "tests/cc/backward_fixture.h"
#include "tests/cc/counting_session.h"
#include "tests/cc/simulated_devices.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

template <class Place>
class DeviceGradientTest : public BackwardFixture<Place> {};

TYPED_TEST_SUITE(DeviceGradientTest, ForSimulatedDevices<DevicePlace>);

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
  this->place_.ExpectTooMany("ids", [&] { return this->TrySum(tasks, &outputs); });
  EXPECT_TRUE(outputs.num_unique.empty());
  EXPECT_EQ(this->place_.device().waits(), 0u);
}

TYPED_TEST(DeviceGradientTest, AllocateFails) {
  std::mt19937_64 random(10);
  Cases cases;
  for (int i = 0; i < 4; ++i) cases.push_back(MakeCase({10, 30, 4, 10}, &random));
  for (const size_t failing : {0u, 2u, 3u}) {
    const std::vector<BackwardTask> tasks = TasksOf(cases);
    Outputs outputs(tasks);
    size_t calls = 0;
    const auto allocate = [&](size_t t, size_t n, BackwardOutput* output) {
      ++calls;
      return t == failing ? FailedPrecondition("no room") : outputs(t, n, output);
    };
    const Status status = this->place_.Call(
        [&](auto& session) { return device::SumGradients(session, tasks, allocate); }, 1);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    EXPECT_EQ(status.message(), "no room");
    EXPECT_EQ(calls, failing + 1);
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(DeviceGradientTest, WorkspaceAllocationFails) {
  std::mt19937_64 random(11);
  Cases cases;
  for (Form form : {Form::kUniform, Form::kSplits, Form::kSorted, Form::kUnsorted}) {
    Shape s{40, 600, 4, 2};
    s.form = form;
    s.combiner = Combiner::kMean;
    s.weighted = true;
    cases.push_back(MakeCase(s, &random));
  }
  const std::vector<BackwardTask> tasks = TasksOf(cases);
  const uint64_t arrays = this->place_.FailEach([&] {
    Outputs outputs(tasks);
    const Status status = this->TrySum(tasks, &outputs);
    EXPECT_TRUE(status.ok() || outputs.Untouched());
    // `allocate` was not called with a wrong number of keys.
    if (!outputs.num_unique.empty()) {
      EXPECT_EQ(outputs.num_unique, std::vector<size_t>(4, 2));
    }
    return status;
  });
  EXPECT_GT(arrays, 20u);
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TEST(DeviceGradientWorkTest, LaunchesDoNotDependOnTheNumberOfTasks) {
  std::mt19937_64 random(12);
  ThreadsDevice device;
  const auto launches = [&](size_t count) {
    Cases cases;
    for (size_t t = 0; t < count; ++t) {
      Shape s{600, 600, 4, 1};
      s.combiner = Combiner::kMean;
      s.form = Form::kUnsorted;
      cases.push_back(MakeCase(s, &random));
    }
    const std::vector<BackwardTask> tasks = TasksOf(cases);
    Outputs outputs(tasks);
    CountingSession<> session(device, nullptr);
    EXPECT_TRUE(device::SumGradients(session, tasks, std::ref(outputs)).ok());
    return session.launches;
  };
  const int one = launches(1);
  EXPECT_EQ(one, 8);
  EXPECT_EQ(launches(30), one);
}

TEST(DeviceGradientWorkTest, TeamWidthFitsTheWidestSums) {
  std::mt19937_64 random(14);
  ThreadsDevice device;
  Cases cases;
  for (int64_t dim : {4, 130, 1}) cases.push_back(MakeCase({1, 600, dim, 1}, &random));
  const std::vector<BackwardTask> tasks = TasksOf(cases);
  Outputs outputs(tasks);
  CountingSession<> session(device, nullptr);
  ASSERT_TRUE(device::SumGradients(session, tasks, std::ref(outputs)).ok());
  EXPECT_EQ(session.quads, std::vector<size_t>(2, 33));
}

TEST(DeviceGradientWorkTest, SortsOnlyTheBitsOfKeyNumbers) {
  std::mt19937_64 random(13);
  ThreadsDevice device;
  for (const auto& [keys, bits] :
       {std::pair(1, 0), std::pair(2, 1), std::pair(3, 2), std::pair(256, 8), std::pair(257, 9)}) {
    Cases cases;
    cases.push_back(MakeCase({600, 600, 1, 1}, &random));
    for (size_t i = 0; i < 600; ++i) SetKey(cases[0].get(), i, i % static_cast<size_t>(keys));
    const std::vector<BackwardTask> tasks = TasksOf(cases);
    Outputs outputs(tasks);
    CountingSession<> session(device, nullptr);
    ASSERT_TRUE(device::SumGradients(session, tasks, std::ref(outputs)).ok());
    EXPECT_EQ(session.sorted_bits, std::vector<int>{bits});
  }
}

// The keys of the tasks are adjacent in memory, and there are so few places that keys of all tasks
// collide.
TEST(DeviceGradientWorkTest, TasksDoNotShareKeys) {
  constexpr uint32_t kTasks = 8, kIds = 100, kKeys = 50, kIdsInAll = kTasks * kIds;
  constexpr uint32_t kLogPlaces = 9;
  static_assert(kTasks * kKeys < 1u << kLogPlaces, "more places than keys");
  std::vector<uint64_t> keys(kIdsInAll);
  for (uint32_t i = 0; i < kIdsInAll; ++i) keys[i] = i % kKeys;
  std::vector<device::GradientPart> parts(kTasks);
  std::vector<uint32_t> begins(kTasks + 1);
  for (uint32_t t = 0; t <= kTasks; ++t) begins[t] = t * kIds;
  for (uint32_t t = 0; t < kTasks; ++t) parts[t].task.keys = keys.data() + begins[t];
  for (bool descending : {false, true}) {
    std::vector<uint32_t> places(size_t{1} << kLogPlaces, device::kNoPosition), of(kIdsInAll);
    const device::ElectPositions</*kLast=*/false, device::TaskKeys> body{
        {{parts.data(), begins.data(), kTasks}},
        /*rows=*/nullptr,
        places.data(),
        kLogPlaces,
        of.data()};
    for (uint32_t i = 0; i < kIdsInAll; ++i) body(descending ? kIdsInAll - 1 - i : i);
    for (uint32_t i = 0; i < kIdsInAll; ++i) {
      ASSERT_EQ(places[of[i]], i / kIds * kIds + i % kKeys) << i;
    }
  }
}

// The terms of one task, whose sums are in an array.
struct PlainSums {
  struct Target {
    float* sums;
    DYNEMB_HD float* SumOf(uint32_t key) const { return sums + key * kDim; }
  };
  static constexpr size_t kDim = 6;
  static constexpr bool kSteps = false;
  static constexpr uint32_t kInFlight = 8;
  static constexpr unsigned int kLeastBlocks = 0;

  device::SortedTerms terms;
  uint32_t num_keys;
  float* sums;

  DYNEMB_HD uint32_t TaskOf(uint32_t) const { return 0; }
  DYNEMB_HD uint32_t KeysEnd(uint32_t) const { return num_keys; }
  DYNEMB_HD int64_t dim(uint32_t) const { return kDim; }
  DYNEMB_HD Target TargetOf(uint32_t) const { return {sums}; }
  DYNEMB_HD device::TermForm FormOf(uint32_t, uint32_t, uint32_t*) const { return {}; }
};

// Windows that are shorter and longer than segments, and end at every place in them.
template <class Device>
class DeviceSegmentsTest : public testing::Test {};
TYPED_TEST_SUITE(DeviceSegmentsTest, SimulatedDevices);

TYPED_TEST(DeviceSegmentsTest, WindowsOfAnyLength) {
  std::mt19937_64 random(17);
  std::normal_distribution<float> normal;
  TypeParam device;
  for (const uint32_t length : {1u, 7u, 32u, 255u, 256u, 257u, 600u, 5000u}) {
    std::vector<device::Term> terms;
    std::vector<device::TermRange> ranges;
    std::vector<std::vector<float>> rows;
    std::vector<float> expected;
    for (const uint32_t count : {3u, 600u, 1u, 257u, 256u, 1u, 513u, 40u, 512u, 2u}) {
      const auto begin = static_cast<uint32_t>(terms.size());
      std::vector<std::vector<float>> of_column(PlainSums::kDim);
      for (uint32_t i = 0; i < count; ++i) {
        rows.emplace_back();
        const float scale = normal(random);
        for (auto& column : of_column) {
          rows.back().push_back(normal(random));
          column.push_back(scale * rows.back().back());
        }
        terms.push_back({rows.back().data(), scale, static_cast<uint32_t>(ranges.size())});
      }
      ranges.push_back({begin, begin + count});
      for (const auto& column : of_column) expected.push_back(SumOf(column, /*in_chunks=*/true));
    }
    const auto n = static_cast<uint32_t>(terms.size());
    const auto num_keys = static_cast<uint32_t>(ranges.size());
    std::vector<float> sums(expected.size());
    const size_t places = device::ChunkSums::CountOf(n), stride = 8;
    std::vector<float> chunk_sums(2 * places * stride);
    std::vector<uint32_t> long_keys(places, device::ChunkSums::kNoKey);
    const device::ChunkSums chunks{chunk_sums.data(), stride, long_keys.data()};
    const PlainSums plain{
        {{}, nullptr, nullptr, ranges.data(), terms.data(), n}, num_keys, sums.data()};
    typename TypeParam::Session session(device, nullptr);
    session.ForRows(device::NumRuns(n, length), 2,
                    device::SumSegments<PlainSums, false>{plain, chunks, length});
    session.ForRows(places, 2, device::AddChunks<PlainSums>{plain, chunks});
    ASSERT_TRUE(session.Synchronize().ok());
    ASSERT_EQ(sums, expected) << "windows of " << length;
  }
}

// The chunks of long keys have distinct places, whatever the numbers of terms of the keys are.
TEST(DeviceGradientWorkTest, PlacesOfChunks) {
  std::mt19937_64 random(15);
  const std::vector<uint32_t> counts{1, 2, 255, 256, 257, 300, 511, 512, 513, 700, 769, 1025};
  for (int round = 0; round < 2000; ++round) {
    std::vector<size_t> places;
    std::vector<uint32_t> long_keys;
    uint32_t n = 0;
    for (int key = 0; key < 8; ++key) {
      const uint32_t count = counts[random() % counts.size()];
      for (uint32_t at = 0; count > kChunk && at < count; at += kChunk) {
        places.push_back(device::ChunkSums::PlaceOf(n + at, at != 0));
        if (at == 0) long_keys.push_back(n / kChunk);
      }
      n += count;
    }
    for (const size_t place : places) ASSERT_LT(place, 2 * device::ChunkSums::CountOf(n));
    for (const uint32_t at : long_keys) ASSERT_LT(at, device::ChunkSums::CountOf(n));
    std::sort(long_keys.begin(), long_keys.end());
    ASSERT_EQ(std::unique(long_keys.begin(), long_keys.end()), long_keys.end());
    std::sort(places.begin(), places.end());
    ASSERT_EQ(std::unique(places.begin(), places.end()), places.end());
  }
}

}  // namespace
}  // namespace dynemb
