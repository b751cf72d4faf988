// ApplyPooled on the host and on simulated devices, and what it does on a device: it does not wait,
// and reports memory that runs out.
#include <gtest/gtest.h>

#include <type_traits>
#include <vector>

#include "tests/cc/lookups_suite_pooled.h"
#include "tests/cc/simulated_lookups.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

template <class Device>
struct Simulated : SimulatedLookups<Device, 3> {
  static constexpr Tick kSteps = kSanitized                                  ? 4
                                 : std::is_same_v<Device, ThreadsDevice>     ? 20
                                 : std::is_same_v<Device, NarrowTeamsDevice> ? 8
                                                                             : 4;
};
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, ApplyPooledTest, ForSimulatedDevices<Simulated>);

struct OnTheHost : HostPlace {
  static constexpr Tick kSteps = 20;
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, ApplyPooledTest, ::testing::Types<OnTheHost>);

// The ids of a call make many partitions, which threads sum and step at the same time.
TEST(HostApplyPooled, ManyIdsOnSeveralThreads) {
  struct OnThreads : HostPlace {
    static Exec& exec() {
      static ThreadsExec exec(3);
      return exec;
    }
  };
  constexpr uint64_t kKeys = 20000;
  constexpr int64_t kBags = kSanitized ? 1200 : 3000, kHotness = 5;
  const OptimizerCase with{"adam", OptimizerKind::kAdam};
  PooledWorlds<OnThreads> worlds;
  const std::vector<TableOptions> options = FourTables(24);
  worlds.Add(options, with);
  if (HasFailure()) return;
  Random random(79);
  for (Tick tick = 1; tick < 9; tick += 3) {
    std::vector<Ask> asks(options.size());
    for (size_t t = 0; t < asks.size(); ++t) {
      Ask& ask = asks[t];
      ask.table = t;
      ask.combiner = t % 2 == 0 ? Combiner::kSum : Combiner::kMean;
      ask.num_bags = kBags;
      ask.uniform = true;
      ask.repeats = false;
      for (int64_t i = 0; i < kBags * kHotness; ++i) {
        ask.bag_of.push_back(i / kHotness);
        ask.keys.push_back(random.Below(3) == 0 ? random.Below(10) : random.Below(kKeys));
      }
    }
    worlds.Step(asks, Upstreams(random, asks, options), with, tick, true, {}, [](auto&, Exec&) {});
    worlds.ExpectSameTables(kKeys);
    if (HasFailure()) return;
  }
}

// One pass over tables of float32; two, with a wait for the number of keys, if a table has 16-bit
// rows.
TEST(DeviceApplyPooled, DoesNotWait) {
  using Place = Simulated<ThreadsDevice>;
  for (const bool whole : {true, false}) {
    World<Place> world;
    std::vector<TableOptions> options = whole ? WholeTables(24) : FourTables(24);
    for (TableOptions& o : options) {
      o.init_capacity = 50000;
      ASSERT_TRUE(world.AddForAdagrad(o).ok());
    }
    Random random(77);
    for (Tick tick = 1; tick < 20; tick += 2) {
      std::vector<Ask> asks = OneAskEach(random, options.size(), 300);
      for (Ask& ask : asks) {
        if (ask.combiner == Combiner::kMax) ask.combiner = Combiner::kSum;
      }
      asks[0] = {0, Combiner::kSum, {1, 2, 3}, {0, 1, 2}, 3, false, {}, false};
      World<Place>::Step step;
      Outcome outcome;
      ASSERT_TRUE(world.Pool(asks, tick, true, &step, &outcome).ok());
      const std::vector<Floats> upstream = Upstreams(random, asks, options);
      const uint64_t before = Place::device().waits();
      ASSERT_TRUE(world.ApplyPooled(asks, upstream, OptimizerKind::kAdagrad, tick, &step).ok());
      EXPECT_EQ(Place::device().waits() - before, whole ? 0u : 1u);
    }
  }
}

TEST(DeviceApplyPooled, ReportsFailures) {
  using Place = Simulated<ThreadsDevice>;
  bool failed = true;
  uint64_t k = 0;
  for (; failed; ++k) {
    ASSERT_LT(k, 200u);
    SCOPED_TRACE(k);
    World<Place> world;
    const std::vector<TableOptions> options = WholeTables(24);
    for (const TableOptions& o : options) ASSERT_TRUE(world.AddForAdagrad(o).ok());
    Random random(78);
    std::vector<Ask> asks = OneAskEach(random, options.size(), 50);
    for (Ask& ask : asks) ask.combiner = Combiner::kMean;
    const std::vector<Floats> upstream = Upstreams(random, asks, options);
    World<Place>::Step step;
    Outcome outcome;
    ASSERT_TRUE(world.Pool(asks, 1, true, &step, &outcome).ok());
    const Keys keys = Progression(0, 50);
    const Floats before = world.Rows(0, keys).first;
    Place::device().FailTake(k);
    const Status status = world.ApplyPooled(asks, upstream, OptimizerKind::kAdagrad, 1, &step);
    failed = !Place::device().FailTake(ThreadsDevice::kNever);
    EXPECT_EQ(status.ok(), !failed) << status.message();
    if (failed) {
      EXPECT_EQ(Bits(world.Rows(0, keys).first), Bits(before));
    }
    for (size_t t = 0; t < options.size(); ++t) {
      RowId row;
      const Status next = world.table(t).FindOrInsert(
          Place::exec(), {options[t].key_type, world.Pack(t, {1}).data(), 1}, 3, &row);
      EXPECT_EQ(next.message(), "");
      world.table(t).CheckInvariants();
    }
  }
  EXPECT_GT(k, 12u);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
