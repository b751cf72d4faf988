// What only pooling on a device has: the work that it gives the device, ids without rows, and
// failures.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cc/device/gather.h"
#include "tests/cc/counting_session.h"
#include "tests/cc/gather_fixture.h"

namespace dynemb {
namespace {

template <class Place>
class DeviceGatherTest : public GatherFixture<Place> {};

TYPED_TEST_SUITE(DeviceGatherTest, ForSimulatedDevices<DevicePlace>);

TYPED_TEST(DeviceGatherTest, IndexOutOfRangeByHand) {
  const std::vector<float> vectors = {-1, -2, -3, -4}, weights = {2, 3, 1, 1};
  const std::vector<uint32_t> index = {1, 2, 0xFFFFFFFF, 0};
  const std::vector<float> upstream = {1, 10, 100, 1000};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(2, 4, 2).ok());
  std::vector<float> pooled(4, 77), gradient(4, 77);
  std::vector<int32_t> argmax(4, 77);
  GatherTask pool;
  pool.bags = &bags;
  pool.weights = weights.data();
  pool.combiner = Combiner::kMax;
  pool.pooled = pooled.data();
  pool.argmax = argmax.data();
  pool.vectors = vectors.data();
  pool.n = 2;
  pool.index = index.data();
  pool.dim = 2;
  ASSERT_TRUE(PoolAt(this->place_, {pool}).ok());
  EXPECT_EQ(pooled, (std::vector<float>{0, 0, 0, 0}));
  EXPECT_EQ(argmax, (std::vector<int32_t>{1, 1, 2, 2}));
  pool.combiner = Combiner::kSum;
  ASSERT_TRUE(PoolAt(this->place_, {pool}).ok());
  EXPECT_EQ(pooled, (std::vector<float>{-6, -8, -1, -2}));
  GatherWeightTask task;
  task.bags = &bags;
  task.weights = weights.data();
  task.pooled = pooled.data();
  task.upstream = upstream.data();
  task.gradient = gradient.data();
  task.vectors = vectors.data();
  task.n = 2;
  task.index = index.data();
  task.dim = 2;
  ASSERT_TRUE(WeightGradientAt(this->place_, {task}).ok());
  EXPECT_EQ(gradient, (std::vector<float>{-43, 0, 0, -2100}));
}

TYPED_TEST(DeviceGatherTest, TooManyBagsOrIds) {
  for (const int64_t hotness : {1, 2}) {
    const int64_t num_bags = Bags::kMaxSize / hotness;
    Bags large, small;
    ASSERT_TRUE(large.InitUniform(hotness, hotness * num_bags, num_bags).ok());
    ASSERT_TRUE(small.InitUniform(1, 1, 1).ok());
    std::vector<GatherTask> pool(2);
    std::vector<GatherWeightTask> weights(2);
    pool[0].bags = weights[0].bags = &large;
    pool[1].bags = weights[1].bags = &small;
    if (hotness == 1) {
      this->place_.ExpectTooMany("bags", [&] { return PoolAt(this->place_, pool); });
    }
    this->place_.ExpectTooMany(hotness == 1 ? "bags" : "ids",
                               [&] { return WeightGradientAt(this->place_, weights); });
  }
}

TYPED_TEST(DeviceGatherTest, WorkspaceAllocationFails) {
  std::mt19937_64 random(7);
  std::vector<Feature> features;
  Shape s{10, 60, 6, 20};
  AddAllKinds(s, 20, &random, {}, &features);
  const GatherTasks tasks(features, Placement::kRows, /*on_host=*/false);
  auto& at = this->place_;
  EXPECT_GT(at.FailEach([&] { return PoolAt(at, tasks.pool); }), features.size() / 2);
  EXPECT_GT(at.FailEach([&] { return WeightGradientAt(at, tasks.weights); }), features.size() / 2);
  ASSERT_NO_FATAL_FAILURE(this->Check(features));
}

TEST(DeviceGatherWorkTest, LaunchesDoNotDependOnTheNumberOfTasks) {
  ThreadsDevice device;
  for (const size_t count : {0, 1, 30}) {
    std::mt19937_64 random(8);
    std::vector<Feature> features;
    for (size_t t = 0; t < count; ++t) {
      // Many tasks, the widest of which is neither the first nor the last.
      Shape s{10, 60, t % 20 == 0 ? 37 : 9, 20};
      if (t == 7) s.dim = 70;
      s.combiner = kCombiners[t % 4];
      s.weighted = true;
      features.push_back(MakeFeature(s, 20, &random));
    }
    const GatherTasks tasks(features, Placement::kArray, /*on_host=*/false);
    CountingSession<> session(device, nullptr);
    ASSERT_TRUE(device::GatherPool(session, tasks.pool).ok());
    // One more if a combiner divides: for the factors of bags.
    const int launches = count == 0 ? 0 : count == 1 && !HasScale(kCombiners[0]) ? 1 : 2;
    EXPECT_EQ(session.launches, launches);
    EXPECT_EQ(session.quads, count == 0   ? std::vector<size_t>{}
                             : count == 1 ? std::vector<size_t>{10}
                                          : std::vector<size_t>{18});
    ASSERT_TRUE(device::GatherWeightGradient(session, tasks.weights).ok());
    EXPECT_EQ(session.launches, launches + (count == 0 ? 0 : 2));
  }
}

}  // namespace
}  // namespace dynemb
