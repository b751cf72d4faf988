// The contract suite of Lookups on a device: the results have the same bits as the results of the
// host's functions on host tables. Typed by a Place:
//
//   static std::string Missing()      the reason why there are no tables; empty if there are
//   static Status Make(options, std::unique_ptr<Table>*)
//   static Lookups& lookups()
//   static Exec& exec()
//   static constexpr Tick kSteps      the maximal number of steps of a test
//   class Arrays                      arrays in the memory of the tables; it owns them:
//     T* Up(const std::vector<T>&), std::vector<T> Down(const T*, n)
#ifndef DYNEMB_TESTS_CC_LOOKUPS_SUITE_H_
#define DYNEMB_TESTS_CC_LOOKUPS_SUITE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/lookups.h"
#include "tests/cc/lookups_world.h"
#include "tests/cc/table_suite.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {

template <class Place>
class LookupsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Place::Missing().empty()) GTEST_SKIP() << Place::Missing();
  }
};
TYPED_TEST_SUITE_P(LookupsTest);

// Many steps of each of three optimizers, while rows move between the tiers. All outputs, rows and
// counts are the same as on the host.
TYPED_TEST_P(LookupsTest, TrainsLikeTheHost) {
  for (const auto kind :
       {OptimizerKind::kAdagrad, OptimizerKind::kAdam, OptimizerKind::kRowwiseAdagrad}) {
    SCOPED_TRACE(static_cast<int>(kind));
    World<TypeParam> device;
    World<HostPlace> host;
    const std::vector<TableOptions> options = FourTables(24);
    for (const TableOptions& o : options) {
      ASSERT_TRUE(device.Add(o).ok());
      ASSERT_TRUE(host.Add(o).ok());
      StateSpec spec;
      spec.optimizer = "optimizer";
      spec.widths = StateWidths(kind, {}, o.dim);
      spec.inits.assign(spec.widths.size(), 0.1f);
      Table& d = device.table(device.num_tables() - 1);
      ASSERT_TRUE(d.AttachState(TypeParam::exec(), spec).ok());
      ASSERT_TRUE(host.table(host.num_tables() - 1).AttachState(HostPlace::exec(), spec).ok());
    }
    Random random(5);
    uint64_t keys = 30;
    for (Tick tick = 1; tick < 2 * TypeParam::kSteps; tick += 2, keys += 15) {
      SCOPED_TRACE(tick);
      const std::vector<Ask> asks = SevenAsks(random, keys);
      const std::vector<Floats> upstream = Upstreams(random, asks, options);
      Outcome got, want;
      const Status status = device.Train(asks, upstream, kind, tick, &got);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(host.Train(asks, upstream, kind, tick, &want).ok());
      ExpectSame(got, want);
      for (size_t t = 0; t < device.num_tables(); ++t) {
        ASSERT_TRUE(device.table(t).Promote(TypeParam::exec(), tick + 1).ok());
      }
      if (this->HasFailure()) return;
    }
    uint64_t promotions = 0;
    for (size_t t = 0; t < options.size(); ++t) {
      SCOPED_TRACE(options[t].name);
      ExpectSameTable(device, host, t, keys);
      const TableStats d = device.table(t).stats(), h = host.table(t).stats();
      EXPECT_EQ(d.nonfinite_gradients, h.nonfinite_gradients);
      promotions += d.promotions;
    }
    EXPECT_GT(promotions, 0u);
  }
}

// Rows make up for missed steps. Tables of two optimizers are stepped in turn, and all are looked
// up in one call, with rows in both tiers. All outputs and rows are the same as on the host.
TYPED_TEST_P(LookupsTest, RowsCatchUpAsOnTheHost) {
  World<TypeParam> device;
  World<HostPlace> host;
  const std::vector<TableOptions> options = FourTables(24);
  const auto is_adam = [](size_t table) { return table % 2 == 0; };
  OptimizerFlags adam, sgd;
  adam.catch_up = sgd.catch_up = sgd.momentum = true;
  for (size_t t = 0; t < options.size(); ++t) {
    ASSERT_TRUE(device.Add(options[t]).ok());
    ASSERT_TRUE(host.Add(options[t]).ok());
    StateSpec spec;
    spec.optimizer = is_adam(t) ? "adam catch_up" : "sgd momentum catch_up";
    spec.widths = is_adam(t) ? StateWidths(OptimizerKind::kAdam, adam, options[t].dim)
                             : StateWidths(OptimizerKind::kSgd, sgd, options[t].dim);
    spec.inits.assign(spec.widths.size(), 0.0f);
    ASSERT_TRUE(device.table(t).AttachState(TypeParam::exec(), spec).ok());
    ASSERT_TRUE(host.table(t).AttachState(HostPlace::exec(), spec).ok());
    ASSERT_TRUE(device.table(t).catch_up().enabled());
  }
  Random random(5);
  uint64_t keys = 30;
  for (Tick tick = 1; tick < 4 * TypeParam::kSteps; tick += 4, keys += 7) {
    SCOPED_TRACE(tick);
    const std::vector<Ask> asks = SevenAsks(random, keys);
    const bool steps_adam = random.Below(2) == 0;
    std::vector<Ask> stepped;
    for (const Ask& ask : asks) {
      if (is_adam(ask.table) == steps_adam) stepped.push_back(ask);
    }
    const std::vector<Floats> upstream = Upstreams(random, stepped, options);
    Hyper hyper;
    hyper.momentum = 0.9f;
    hyper.weight_decay = 0.1f;
    if (random.Below(3) == 0) hyper.learning_rate = 0.01f;
    const auto kind = steps_adam ? OptimizerKind::kAdam : OptimizerKind::kSgd;
    const OptimizerFlags flags = steps_adam ? adam : sgd;
    Outcome got, want;
    const Status status = device.Train(stepped, upstream, kind, tick, &got, flags, hyper);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(host.Train(stepped, upstream, kind, tick, &want, flags, hyper).ok());
    ExpectSame(got, want);
    for (size_t t = 0; t < device.num_tables(); ++t) {
      ASSERT_TRUE(device.table(t).Promote(TypeParam::exec(), tick + 1).ok());
    }
    const bool insert = random.Below(2) == 0;
    typename World<TypeParam>::Step of_device;
    World<HostPlace>::Step of_host;
    Outcome read, expected;
    ASSERT_TRUE(device.Pool(asks, tick + 2, insert, &of_device, &read).ok());
    ASSERT_TRUE(host.Pool(asks, tick + 2, insert, &of_host, &expected).ok());
    ExpectSame(read, expected);
    if (this->HasFailure()) return;
  }
  for (size_t t = 0; t < options.size(); ++t) {
    SCOPED_TRACE(options[t].name);
    EXPECT_EQ(device.table(t).catch_up().step(), host.table(t).catch_up().step());
    EXPECT_TRUE(device.table(t).catch_up().active());
    const auto got = device.Rows(t, Progression(0, keys));
    const auto want = host.Rows(t, Progression(0, keys));
    EXPECT_EQ(Bits(got.first), Bits(want.first));
    EXPECT_EQ(Bits(got.second), Bits(want.second));
    device.table(t).CheckInvariants();
  }
}

// Without `insert`, a key without a row reads as its initial vector.
TYPED_TEST_P(LookupsTest, ReadsWithoutInserting) {
  World<TypeParam> device;
  World<HostPlace> host;
  for (const TableOptions& o : FourTables(24)) {
    ASSERT_TRUE(device.Add(o).ok());
    ASSERT_TRUE(host.Add(o).ok());
  }
  Random random(6);
  for (Tick tick = 1; tick < TypeParam::kSteps; ++tick) {
    const std::vector<Ask> asks = SevenAsks(random, 40 * tick);
    const bool insert = tick % 3 == 0;
    Outcome got, want;
    typename World<TypeParam>::Step step;
    World<HostPlace>::Step host_step;
    ASSERT_TRUE(device.Pool(asks, tick, insert, &step, &got).ok());
    ASSERT_TRUE(host.Pool(asks, tick, insert, &host_step, &want).ok());
    ExpectSame(got, want);
    // Row ids may differ, but the same keys have rows.
    for (size_t a = 0; a < asks.size(); ++a) {
      const RowIds rows = step.arrays.Down(step.pools[a].rows, asks[a].keys.size());
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(rows[i] == kNoRow, host_step.pools[a].rows[i] == kNoRow) << a << " " << i;
      }
    }
    for (size_t t = 0; t < 4; ++t) ASSERT_EQ(device.table(t).size(), host.table(t).size());
  }
}

// Each full table evicts rows, and records the evicted keys.
TYPED_TEST_P(LookupsTest, FullTablesEvict) {
  World<TypeParam> device;
  World<HostPlace> host;
  std::vector<TableOptions> options = FourTables(24);
  options[0].max_capacity = 300;
  options[1].max_capacity = 200;
  for (const TableOptions& o : options) {
    ASSERT_TRUE(device.Add(o).ok());
    device.table(device.num_tables() - 1).Track(0);
    TableOptions unlimited = o;
    unlimited.max_capacity = 0;
    ASSERT_TRUE(host.Add(unlimited).ok());
  }
  Random random(7);
  for (Tick tick = 1; tick < (kSanitized ? 8 : 20) + TypeParam::kSteps; ++tick) {
    const std::vector<Ask> asks = SevenAsks(random, 100000);
    Outcome got, want;
    typename World<TypeParam>::Step step;
    World<HostPlace>::Step host_step;
    const Status status = device.Pool(asks, tick, true, &step, &got);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(host.Pool(asks, tick, true, &host_step, &want).ok());
    ExpectSame(got, want);  // no row is ever updated: each has its initial vector
  }
  for (size_t t = 0; t < 2; ++t) {
    const TableStats stats = device.table(t).stats();
    EXPECT_EQ(stats.size, static_cast<uint64_t>(options[t].max_capacity));
    EXPECT_GT(stats.evictions, 0u);
    EXPECT_EQ(stats.inserts, stats.size + stats.evictions);
    device.table(t).CheckInvariants();
    // Every evicted key that was not inserted again is among the deleted keys.
    SavedRows saved(size_t{1} << 30);
    ASSERT_TRUE(device.table(t).BeginCut(TypeParam::exec(), 100, 1, CutOf::kDelta, &saved, 0).ok());
    EXPECT_GE(device.table(t).cut()->deleted.size() + stats.size, host.table(t).stats().inserts);
    device.table(t).EndCut();
  }
  for (size_t t = 2; t < 4; ++t) {
    EXPECT_EQ(device.table(t).size(), host.table(t).size());
    EXPECT_EQ(device.table(t).stats().evictions, 0u);
  }
}

// Calls that cannot succeed return an error, and change nothing in any table.
TYPED_TEST_P(LookupsTest, Errors) {
  World<TypeParam> device;
  World<HostPlace> host;
  std::vector<TableOptions> options = FourTables(24);
  options[3].max_capacity = 20;
  options[3].evict_strategy = EvictStrategy::kNone;
  for (const TableOptions& o : options) ASSERT_TRUE(device.Add(o).ok());
  ASSERT_TRUE(host.Add(options[0]).ok());
  Random random(8);
  std::vector<Ask> asks = SevenAsks(random, 30);
  for (Ask& ask : asks) {
    if (ask.table != 3) continue;
    ask.keys = Progression(0, 60);
    ask.num_bags = 20;
  }
  Outcome outcome;
  typename World<TypeParam>::Step step;
  const Status full = device.Pool(asks, 1, true, &step, &outcome);
  EXPECT_EQ(full.code(), Code::kResourceExhausted);
  EXPECT_NE(full.message().find("'odd'"), std::string::npos) << full.message();
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(device.table(t).size(), 0u);
    device.table(t).CheckInvariants();
  }
  // A table in another place.
  typename World<TypeParam>::Step mixed;
  device.Prepare(asks, &mixed);
  mixed.pools[1].table = &host.table(0);
  const Status elsewhere = TypeParam::lookups().Pool(TypeParam::exec(), mixed.pools, 2, true);
  EXPECT_EQ(elsewhere.code(), Code::kInvalidArgument);
  EXPECT_NE(elsewhere.message().find("'wide'"), std::string::npos) << elsewhere.message();
  // The state of another optimizer.
  ApplyTask apply;
  apply.table = &device.table(1);
  const Status stateless =
      TypeParam::lookups().Apply(TypeParam::exec(), {apply}, {OptimizerKind::kAdam}, 3);
  EXPECT_EQ(stateless.code(), Code::kFailedPrecondition);
  EXPECT_NE(stateless.message().find("'narrow keys'"), std::string::npos) << stateless.message();
  // Other state of the same widths, and state of another owner.
  bool was_reset = false;
  ASSERT_TRUE(device.table(1)
                  .TakeState(TypeParam::exec(),
                             {"adagrad", {device.table(1).options().dim}, {0.1f}}, "the owner",
                             &was_reset)
                  .ok());
  for (const OptimizerStep& step :
       {OptimizerStep{OptimizerKind::kLion, {}, {}, 1, "lion", {0.1f}},
        OptimizerStep{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.5f}},
        OptimizerStep{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}, "another"}}) {
    const Status refused = TypeParam::lookups().Apply(TypeParam::exec(), {apply}, step, 4);
    EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
    EXPECT_NE(refused.message().find("'narrow keys'"), std::string::npos) << refused.message();
  }
  const OptimizerStep own{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}, "the owner"};
  EXPECT_TRUE(TypeParam::lookups().Apply(TypeParam::exec(), {apply}, own, 5).ok());
}

// Lookups without ids, and calls without lookups.
TYPED_TEST_P(LookupsTest, EmptyCalls) {
  World<TypeParam> device;
  for (const TableOptions& o : FourTables(24)) ASSERT_TRUE(device.Add(o).ok());
  std::vector<Ask> asks(2);
  asks[0] = {1, Combiner::kMean, {}, {}, 3, false, {}, false};
  asks[1] = {0, Combiner::kMax, {}, {}, 0, false, {}, true};
  Outcome outcome;
  for (Table* table : {&device.table(0), &device.table(1)}) {
    ASSERT_TRUE(
        table->AttachState(TypeParam::exec(), {"adagrad", {table->options().dim}, {0.1f}}).ok());
  }
  const Status status =
      device.Train(asks, {Floats(12), Floats()}, OptimizerKind::kAdagrad, 1, &outcome);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(outcome.pooled[0], std::vector<char>(48, 0));
  EXPECT_TRUE(outcome.pooled[1].empty());
  EXPECT_TRUE(outcome.sums[0].empty());
  // The first task of a call may have no ids, and therefore no arrays.
  asks[1] = {0, Combiner::kSum, {5, 6}, {0, 2}, 3, false, {0.5f, 2.0f}, false};
  typename World<TypeParam>::Step step;
  ASSERT_TRUE(device.Pool(asks, 3, true, &step, &outcome).ok());
  const Keys keys{5, 6};
  const Floats vectors = device.Rows(0, keys).first;
  std::vector<WeightGradientTask> gradients(2);
  for (size_t a = 0; a < 2; ++a) {
    const PoolTask& pool = step.pools[a];
    static_cast<BagWeightTask&>(gradients[a]) = {pool.bags,
                                                 pool.weights,
                                                 pool.combiner,
                                                 pool.argmax,
                                                 pool.pooled,
                                                 step.arrays.Up(Floats(24, 1.0f)),
                                                 step.arrays.Up(Floats(asks[a].keys.size()))};
    gradients[a].table = pool.table;
    gradients[a].keys = pool.keys;
    gradients[a].rows = pool.rows;
  }
  ASSERT_TRUE(TypeParam::lookups().WeightGradient(TypeParam::exec(), gradients).ok());
  const Floats of_weights = step.arrays.Down(gradients[1].gradient, 2);
  for (size_t i = 0; i < 2; ++i) {  // all ones times the vector
    float sum = 0.0f;
    for (size_t c = 0; c < 8; ++c) sum += vectors[i * 8 + c];
    EXPECT_EQ(of_weights[i], sum);
  }
  Lookups& lookups = TypeParam::lookups();
  EXPECT_TRUE(lookups.Pool(TypeParam::exec(), {}, 4, true).ok());
  EXPECT_TRUE(lookups.WeightGradient(TypeParam::exec(), {}).ok());
  EXPECT_TRUE(lookups.SumGradients(TypeParam::exec(), {}, nullptr).ok());
  EXPECT_TRUE(lookups.Apply(TypeParam::exec(), {}, OptimizerStep(), 4).ok());
}

// A promotion of several tables in one call moves the same rows as one of each table by itself.
TYPED_TEST_P(LookupsTest, PromotesAllTablesAtOnce) {
  World<TypeParam> each, all;
  std::vector<TableOptions> options = FourTables(24);
  options[1].tier = Tier::kHybrid;
  options[1].max_hbm_bytes = 40 * 64;
  options[2].evict_strategy = EvictStrategy::kLfu;
  for (const TableOptions& o : options) {
    ASSERT_TRUE(each.Add(o).ok());
    ASSERT_TRUE(all.Add(o).ok());
  }
  Random random(31);
  Tick tick = 0;
  const auto pool = [&](const std::vector<Ask>& asks, bool insert) {
    Outcome of_each, of_all;
    typename World<TypeParam>::Step step, other;
    ++tick;
    ASSERT_TRUE(each.Pool(asks, tick, insert, &step, &of_each).ok());
    ASSERT_TRUE(all.Pool(asks, tick, insert, &other, &of_all).ok());
    ExpectSame(of_each, of_all);
  };
  for (int i = 0; i < 4; ++i) pool(SevenAsks(random, 1000), true);
  std::vector<Table*> tables;
  for (size_t t : {2, 0, 1, 0, 3}) tables.push_back(&all.table(t));
  for (int round = 0; round < 4; ++round) {
    SCOPED_TRACE(round);
    const std::vector<Ask> hot = SevenAsks(random, 200);
    pool(hot, true);
    for (int i = 0; i < 8; ++i) pool(i % 3 == 0 ? SevenAsks(random, 1000) : hot, false);
    ++tick;
    for (size_t t = 0; t < options.size(); ++t) {
      ASSERT_TRUE(each.table(t).Promote(TypeParam::exec(), tick).ok());
    }
    ASSERT_TRUE(TypeParam::lookups().PromoteIfDue(TypeParam::exec(), tables, tick).ok());
    pool(hot, false);
    for (size_t t = 0; t < options.size(); ++t) {
      const TableStats a = each.table(t).stats(), b = all.table(t).stats();
      EXPECT_EQ(a.promotions, b.promotions) << options[t].name;
      EXPECT_EQ(a.device_hits, b.device_hits) << options[t].name;
      each.table(t).CheckInvariants();
      all.table(t).CheckInvariants();
    }
    if (this->HasFailure()) return;
  }
  for (size_t t : {0, 2}) EXPECT_GT(all.table(t).stats().promotions, 0u) << options[t].name;
}

REGISTER_TYPED_TEST_SUITE_P(LookupsTest, TrainsLikeTheHost, RowsCatchUpAsOnTheHost,
                            ReadsWithoutInserting, FullTablesEvict, Errors, EmptyCalls,
                            PromotesAllTablesAtOnce);

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_LOOKUPS_SUITE_H_
