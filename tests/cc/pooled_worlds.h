// PooledWorlds: the same tables in a place and on the host, of which the first are stepped by
// ApplyPooled. For lookups_suite_pooled.h.
#ifndef DYNEMB_TESTS_CC_POOLED_WORLDS_H_
#define DYNEMB_TESTS_CC_POOLED_WORLDS_H_

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/cc/lookups_world.h"

namespace dynemb {
namespace testing_table {

// Tables of float32 whose rows are whole, for which a device sums and steps in one pass: in both
// tiers, with narrow keys, and wider than a warp has quads.
inline std::vector<TableOptions> WholeTables(uint64_t device_rows) {
  std::vector<TableOptions> all = FourTables(device_rows);
  all.resize(2);
  all.push_back(all[0]);
  all[2].name = "wider";
  all[2].dim = 136;
  all[2].tier = Tier::kHbm;
  for (size_t t = 0; t < all.size(); ++t) all[t].seed = 60 + t;
  return all;
}

// One lookup of each of the tables. Few keys have many ids. Every third call has no maximum, which
// needs another path on a device.
inline std::vector<Ask> OneAskEach(Random& random, size_t num_tables, uint64_t keys) {
  constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn,
                                     Combiner::kMax};
  const uint64_t combiners = random.Below(3) == 0 ? 4 : 3;
  std::vector<Ask> asks;
  for (size_t t = 0; t < num_tables; ++t) {
    Ask ask;
    ask.table = t;
    ask.combiner = kCombiners[random.Below(combiners)];
    ask.repeats = false;
    ask.num_bags = static_cast<int64_t>(random.Below(60));
    ask.uniform = ask.num_bags != 0 && random.Below(2) == 0;
    for (int64_t b = 0; b < ask.num_bags; ++b) {
      const uint64_t ids = ask.uniform ? 3 : random.Below(9);
      for (uint64_t i = 0; i < ids; ++i) ask.bag_of.push_back(b);
    }
    const bool weighted = random.Below(2) == 0;
    for (size_t i = 0; i < ask.bag_of.size(); ++i) {
      ask.keys.push_back(random.Below(2) == 0 ? random.Below(10) : random.Below(keys));
      if (weighted) ask.weights.push_back(static_cast<float>(random.Below(100)) / 50.0f - 0.5f);
    }
    asks.push_back(std::move(ask));
  }
  return asks;
}

struct OptimizerCase {
  const char* name;
  OptimizerKind kind;
  OptimizerFlags flags{};
};
inline std::vector<OptimizerCase> OptimizerCases() {
  OptimizerFlags momentum, amsgrad, catch_up;
  momentum.momentum = momentum.nesterov = true;
  amsgrad.amsgrad = true;
  catch_up.catch_up = true;
  return {{"sgd", OptimizerKind::kSgd},
          {"nesterov", OptimizerKind::kSgd, momentum},
          {"adagrad", OptimizerKind::kAdagrad},
          {"adam", OptimizerKind::kAdam},
          {"amsgrad", OptimizerKind::kAdam, amsgrad},
          {"adam catch_up", OptimizerKind::kAdam, catch_up},
          {"adamax", OptimizerKind::kAdamax},
          {"rmsprop", OptimizerKind::kRmsprop},
          {"adadelta", OptimizerKind::kAdadelta},
          {"lion", OptimizerKind::kLion},
          {"rowwise_adagrad", OptimizerKind::kRowwiseAdagrad}};
}

// The same tables in a place, stepped by ApplyPooled, and on the host, stepped by SumGradients and
// Apply.
template <class Place>
struct PooledWorlds {
  World<Place> place;
  World<HostPlace> host;

  void Add(const std::vector<TableOptions>& options, const OptimizerCase& with) {
    for (const TableOptions& o : options) {
      StateSpec spec;
      spec.optimizer = with.name;
      spec.widths = StateWidths(with.kind, with.flags, o.dim);
      spec.inits.assign(spec.widths.size(), with.flags.catch_up ? 0.0f : 0.1f);
      ASSERT_TRUE(place.Add(o).ok());
      ASSERT_TRUE(host.Add(o).ok());
      const size_t t = place.num_tables() - 1;
      ASSERT_TRUE(place.table(t).AttachState(Place::exec(), spec).ok());
      ASSERT_TRUE(host.table(t).AttachState(HostPlace::exec(), spec).ok());
    }
  }
  // A step that looks up at `tick`, and steps at `tick` + 1 + `later`. between(world, exec) changes
  // each world between the lookup and the step.
  template <class Between>
  void Step(const std::vector<Ask>& asks, const std::vector<Floats>& upstream,
            const OptimizerCase& with, Tick tick, bool insert, const Hyper& hyper,
            const Between& between, Tick later = 0) {
    typename World<Place>::Step in_place;
    World<HostPlace>::Step on_host;
    Outcome got, want;
    ASSERT_TRUE(place.Pool(asks, tick, insert, &in_place, &got).ok());
    ASSERT_TRUE(host.Pool(asks, tick, insert, &on_host, &want).ok());
    ExpectSame(got, want);
    between(place, Place::exec());
    between(host, HostPlace::exec());
    const Status status =
        place.ApplyPooled(asks, upstream, with.kind, tick + later, &in_place, with.flags, hyper);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(host.SumAndApply(asks, upstream, with.kind, tick + later, &on_host, &want,
                                 with.flags, hyper)
                    .ok());
  }
  // Also compares the numbers of rows that were updated after `since`, which a delta has.
  void ExpectSameTables(uint64_t keys, Tick since = 0) const {
    for (size_t t = 0; t < place.num_tables(); ++t) {
      SCOPED_TRACE(place.table(t).options().name);
      ExpectSameTable(place, host, t, keys);
      const auto updated = [&](const Table& table, Exec& exec) {
        size_t rows = 0;
        for (int64_t cursor = 0; cursor >= 0;) {
          const ExportPlan plan =
              table.PlanExport(exec, static_cast<uint64_t>(cursor), 1 << 20, since);
          rows += plan.rows.size();
          cursor = plan.next_cursor;
        }
        return rows;
      };
      EXPECT_EQ(updated(place.table(t), Place::exec()), updated(host.table(t), HostPlace::exec()));
      EXPECT_EQ(place.table(t).stats().nonfinite_gradients,
                host.table(t).stats().nonfinite_gradients);
    }
  }
};

// Erases the keys [first, last) of all tables of a world.
template <class Place>
void EraseRange(World<Place>& world, Exec& exec, uint64_t first, uint64_t last, Tick tick) {
  typename Place::Arrays arrays;
  for (size_t t = 0; t < world.num_tables(); ++t) {
    Table& table = world.table(t);
    Keys keys;
    for (uint64_t key = first; key < last; ++key) keys.push_back(key);
    table.Erase(exec, {table.options().key_type, arrays.Up(world.Pack(t, keys)), keys.size()}, tick,
                Removal::kErase);
  }
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_POOLED_WORLDS_H_
