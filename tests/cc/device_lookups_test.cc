#include "cc/device/device_lookups.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/cc/lookups_suite.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/simulated_lookups.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

template <class Device>
struct Simulated : SimulatedLookups<Device, 3> {
  static constexpr Tick kSteps = std::is_same_v<Device, ThreadsDevice>       ? 30
                                 : std::is_same_v<Device, NarrowTeamsDevice> ? 12
                                                                             : 6;
};

INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, LookupsTest, ForSimulatedDevices<Simulated>);

// A step waits only once, for the number of unique keys.
TEST(DeviceLookups, StepsDoNotWait) {
  SKIP_UNDER_SANITIZERS("counts the waits of steps that other tests take");
  using Place = Simulated<ThreadsDevice>;
  World<Place> world;
  std::vector<TableOptions> options = FourTables(24);
  for (TableOptions& o : options) {
    o.init_capacity = 50000;
    ASSERT_TRUE(world.AddForAdagrad(o).ok());
  }
  Random random(9);
  for (Tick tick = 1; tick < 40; tick += 2) {
    std::vector<Ask> asks = SevenAsks(random, 3000);
    for (Ask& ask : asks) ask.repeats = false;
    const uint64_t before = Place::device().waits();
    Outcome outcome;
    ASSERT_TRUE(
        world.Train(asks, Upstreams(random, asks, options), OptimizerKind::kAdagrad, tick, &outcome)
            .ok());
    EXPECT_EQ(Place::device().waits() - before, 1u);
  }
}

// Lookups that insert promote the rows that they read; every few lookups that do not, a promotion
// is due.
TEST(DeviceLookups, PromotesHotRowsWithoutTraining) {
  using Place = Simulated<ThreadsDevice>;
  World<Place> world;
  for (const TableOptions& o : FourTables(24)) ASSERT_TRUE(world.Add(o).ok());
  Random random(12);
  size_t due = 0;
  const auto promotions = [&](size_t t) { return world.table(t).stats().promotions; };
  uint64_t inserting = 0;  // promotions of lookups that insert
  for (Tick tick = 1; tick < 60; ++tick) {
    Outcome outcome;
    World<Place>::Step step;
    // The first batches fill the device tier. Later ones have only a few new keys, for which it has
    // no room.
    std::vector<Ask> asks = SevenAsks(random, 60);
    for (Ask& ask : asks) {
      for (uint64_t& key : ask.keys) key = tick < 15 ? key : 100000 + key % 10;
    }
    const bool insert = tick < 30;
    ASSERT_TRUE(world.Pool(asks, tick, insert, &step, &outcome).ok());
    if (insert) inserting = promotions(0);
    const bool is_due = world.table(0).PromotionIsDue();
    if (tick < 20) continue;  // all rows were in one tier
    EXPECT_FALSE(insert && is_due);
    due += is_due;
    if (!is_due) continue;
    ASSERT_TRUE(world.table(0).Promote(Place::exec(), tick).ok());
    EXPECT_FALSE(world.table(1).PromotionIsDue());  // all of its rows are in one tier
  }
  EXPECT_EQ(due, 3u);
  EXPECT_GT(inserting, 5u);
  EXPECT_EQ(promotions(1), 0u);
}

// Ten thousand steps, in which full tables evict and rows move between tiers, allocate no memory.
TEST(DeviceLookups, StepsAllocateNoMemory) {
  SKIP_UNDER_SANITIZERS("counts the memory of steps that other tests take");
  using Place = Simulated<ThreadsDevice>;
  World<Place> world;
  std::vector<TableOptions> options = FourTables(24);
  for (TableOptions& o : options) {
    o.max_capacity = 200;
    ASSERT_TRUE(world.AddForAdagrad(o).ok());
  }
  Random random(11);
  const auto host_bytes = [] { return mallinfo2().uordblks; };
  const Tick warm = 2000, last = 20000;
  size_t device_before = 0, host_before = 0;
  for (Tick tick = 1; tick < last; tick += 2) {
    {
      const std::vector<Ask> asks = SevenAsks(random, 400);
      Outcome outcome;
      ASSERT_TRUE(world
                      .Train(asks, Upstreams(random, asks, options), OptimizerKind::kAdagrad, tick,
                             &outcome)
                      .ok());
    }
    if (tick == warm + 1) {
      device_before = Place::device().used();
      host_before = host_bytes();
    }
  }
  EXPECT_EQ(Place::device().used(), device_before);
  // Freed memory that threads keep counts as used. A leak of 64 bytes per step would be twice as
  // much as this limit.
  EXPECT_LE(host_bytes(), host_before + (512 << 10));
  EXPECT_GT(world.table(0).stats().evictions, 1000u);
  EXPECT_GT(world.table(0).stats().promotions, 100u);
}

// Memory for the work runs out at every point of a step. The step reports it, and all tables remain
// usable.
TEST(DeviceLookups, ReportsFailures) {
  using Place = Simulated<ThreadsDevice>;
  bool failed = true;
  uint64_t k = 0;
  for (; failed; ++k) {
    ASSERT_LT(k, 500u);
    SCOPED_TRACE(k);
    World<Place> world;
    const std::vector<TableOptions> options = FourTables(24);
    for (const TableOptions& o : options) {
      ASSERT_TRUE(world.AddForAdagrad(o).ok());
    }
    Random random(10);
    const std::vector<Ask> asks = SevenAsks(random, 50);
    const std::vector<Floats> upstream = Upstreams(random, asks, options);
    Outcome outcome;
    Place::device().FailTake(k);
    const Status status = world.Train(asks, upstream, OptimizerKind::kAdagrad, 1, &outcome);
    failed = !Place::device().FailTake(ThreadsDevice::kNever);
    EXPECT_EQ(status.ok(), !failed) << status.message();
    for (size_t t = 0; t < options.size(); ++t) {
      Table& table = world.table(t);
      RowId row;
      const Status next = table.FindOrInsert(
          Place::exec(), {table.options().key_type, world.Pack(t, {1}).data(), 1}, 3, &row);
      EXPECT_EQ(next.message(), "");
      table.CheckInvariants();
    }
  }
  EXPECT_GT(k, 40u);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
