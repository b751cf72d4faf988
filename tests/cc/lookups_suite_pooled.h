// Contract of ApplyPooled: the rows have the same bits as after SumGradients and Apply on the host.
// Typed by a Place, as lookups_suite.h; host memory is one, too.
#ifndef DYNEMB_TESTS_CC_LOOKUPS_SUITE_POOLED_H_
#define DYNEMB_TESTS_CC_LOOKUPS_SUITE_POOLED_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/table/changes.h"
#include "tests/cc/pooled_worlds.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {

template <class Place>
class ApplyPooledTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Place::Missing().empty()) GTEST_SKIP() << Place::Missing();
  }
};
TYPED_TEST_SUITE_P(ApplyPooledTest);

// Every optimizer; keys of many ids, keys that lose their row before the step, and lookups that did
// not insert, whose gradients are dropped and counted.
TYPED_TEST_P(ApplyPooledTest, StepsLikeTheHost) {
  for (const OptimizerCase& with : OptimizerCases()) {
    SCOPED_TRACE(with.name);
    PooledWorlds<TypeParam> worlds;
    const bool whole = with.kind != OptimizerKind::kAdamax;
    worlds.Add(whole ? WholeTables(24) : FourTables(24), with);
    if (this->HasFailure()) return;
    std::vector<TableOptions> options;
    for (size_t t = 0; t < worlds.place.num_tables(); ++t) {
      options.push_back(worlds.place.table(t).options());
    }
    Random random(71);
    uint64_t keys = 30;
    for (Tick tick = 1; tick < 3 * TypeParam::kSteps; tick += 3, keys += 15) {
      SCOPED_TRACE(tick);
      std::vector<Ask> asks = OneAskEach(random, options.size(), keys);
      if (tick % 4 == 1) {  // in another order, and without one of them
        std::swap(asks.front(), asks.back());
        asks.pop_back();
      }
      if (tick % 5 == 1) {  // a key of more ids than a segment has
        Ask& ask = asks[0];
        ask.combiner = Combiner::kSum;
        ask.uniform = false;
        for (size_t i = 0; i < 700; ++i) {
          ask.bag_of.push_back(static_cast<int64_t>(i % 7));
          ask.keys.push_back(5);
          if (!ask.weights.empty()) ask.weights.push_back(1.0f);
        }
        ask.num_bags = std::max<int64_t>(ask.num_bags, 7);
      }
      Hyper hyper;
      hyper.weight_decay = tick % 2 == 0 ? 0.1f : 0.0f;
      // Multiples of 2^-6, whose sums are exact: for keys with many ids, the device adds in another
      // order than the host.
      std::vector<Floats> upstream = Upstreams(random, asks, options);
      for (size_t a = 0; a < asks.size(); ++a) {
        if (asks[a].combiner != Combiner::kSum) continue;
        for (float& g : upstream[a]) g = static_cast<float>(random.Below(128)) / 64.0f - 1.0f;
        for (float& w : asks[a].weights) w = static_cast<float>(random.Below(8)) / 4.0f - 1.0f;
      }
      // In the last step: lookups compare NaNs as bytes, which are not defined.
      const bool last = tick + 3 >= 3 * TypeParam::kSteps;
      if (last && !upstream[0].empty()) upstream[0][0] = std::numeric_limits<float>::infinity();
      const uint64_t gone = random.Below(20);
      worlds.Step(asks, upstream, with, tick, tick % 6 != 1, hyper,
                  [&](auto& world, Exec& exec) { EraseRange(world, exec, gone, gone + 3, tick); });
      if (this->HasFailure()) return;
      for (size_t t = 0; t < options.size(); ++t) {
        ASSERT_TRUE(worlds.place.table(t).Promote(TypeParam::exec(), tick + 2).ok());
      }
      worlds.ExpectSameTables(keys, tick);
      if (this->HasFailure()) return;
    }
  }
}

// Rows move to the other tier between the lookup and the step.
TYPED_TEST_P(ApplyPooledTest, RowsMoveBeforeTheStep) {
  const OptimizerCase with{"adagrad", OptimizerKind::kAdagrad};
  PooledWorlds<TypeParam> worlds;
  const std::vector<TableOptions> options = WholeTables(24);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  Random random(72);
  for (Tick tick = 1; tick < 3 * TypeParam::kSteps; tick += 3) {
    const std::vector<Ask> asks = OneAskEach(random, options.size(), 100);
    worlds.Step(asks, Upstreams(random, asks, options), with, tick, true, {},
                [&](auto& world, Exec& exec) {
                  for (size_t t = 0; t < options.size(); ++t) {
                    ASSERT_TRUE(world.table(t).Promote(exec, tick).ok());
                  }
                });
    worlds.ExpectSameTables(100);
    if (this->HasFailure()) return;
  }
}

// Other keys get rows between the lookup and the step. In a table with files, they take the places
// in memory of the rows that the step needs.
TYPED_TEST_P(ApplyPooledTest, OtherKeysGetRowsBeforeTheStep) {
  const OptimizerCase with{"adagrad", OptimizerKind::kAdagrad};
  PooledWorlds<TypeParam> worlds;
  const std::vector<TableOptions> options = WholeTables(24);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  Random random(74);
  for (Tick tick = 1; tick < 3 * TypeParam::kSteps; tick += 3) {
    const std::vector<Ask> asks = OneAskEach(random, options.size(), 100);
    const Keys others = Progression(100 + 180 * (tick % 2), 180);
    worlds.Step(asks, Upstreams(random, asks, options), with, tick, true, {},
                [&](auto& world, Exec& exec) {
                  for (size_t t = 0; t < options.size(); ++t) {
                    typename std::decay_t<decltype(world)>::Step step;
                    RowId* const rows = step.arrays.Up(RowIds(others.size()));
                    const void* const keys = step.arrays.Up(world.Pack(t, others));
                    const KeySpan span(options[t].key_type, keys, others.size());
                    ASSERT_TRUE(world.table(t).FindOrInsert(exec, span, tick + 1, rows).ok());
                  }
                });
    worlds.ExpectSameTables(500);
    if (this->HasFailure()) return;
  }
}

// Tables are cleared, and filled again, between the lookup and the step: no row gets a gradient of
// another key.
TYPED_TEST_P(ApplyPooledTest, TablesAreClearedBeforeTheStep) {
  const OptimizerCase with{"sgd", OptimizerKind::kSgd};
  PooledWorlds<TypeParam> worlds;
  const std::vector<TableOptions> options = WholeTables(24);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  Random random(73);
  for (Tick tick = 1; tick < 4 * TypeParam::kSteps; tick += 4) {
    SCOPED_TRACE(tick);
    const std::vector<Ask> asks = OneAskEach(random, options.size(), 100);
    const Keys others = Progression(200, 1 + random.Below(30));
    worlds.Step(
        asks, Upstreams(random, asks, options), with, tick, true, {}, [&](auto& world, Exec& exec) {
          for (size_t t = 0; t < options.size(); ++t) {
            Table& table = world.table(t);
            ASSERT_TRUE(table.Clear(exec, tick).ok());
            typename std::decay_t<decltype(world)>::Step step;
            RowId* const rows = step.arrays.Up(RowIds(others.size()));
            ASSERT_TRUE(table
                            .FindOrInsert(exec,
                                          {table.options().key_type,
                                           step.arrays.Up(world.Pack(t, others)), others.size()},
                                          tick, rows)
                            .ok());
          }
        });
    worlds.ExpectSameTables(300);
    if (this->HasFailure()) return;
  }
}

// The same, and then some keys have rows again, in other places. What becomes of their gradients is
// the same as in two calls.
TYPED_TEST_P(ApplyPooledTest, KeysHaveRowsAgainBeforeTheStep) {
  const OptimizerCase with{"adagrad", OptimizerKind::kAdagrad};
  PooledWorlds<TypeParam> one, two;
  const std::vector<TableOptions> options = WholeTables(24);
  one.Add(options, with);
  two.Add(options, with);
  if (this->HasFailure()) return;
  Random random(79);
  std::vector<Ask> asks = OneAskEach(random, options.size(), 40);
  for (Ask& ask : asks) {
    ask = {ask.table, Combiner::kSum, Progression(0, 40), {}, 40, true, {}, false};
  }
  const std::vector<Floats> upstream = Upstreams(random, asks, options);
  const Keys again{39, 38, 37, 36, 5};
  const auto begin = [&](World<TypeParam>& world, typename World<TypeParam>::Step* step) {
    Outcome outcome;
    ASSERT_TRUE(world.Pool(asks, 1, true, step, &outcome).ok());
    for (size_t t = 0; t < options.size(); ++t) {
      Table& table = world.table(t);
      ASSERT_TRUE(table.Clear(TypeParam::exec(), 1).ok());
      RowId* const rows = step->arrays.Up(RowIds(again.size()));
      ASSERT_TRUE(table
                      .FindOrInsert(TypeParam::exec(),
                                    {table.options().key_type,
                                     step->arrays.Up(world.Pack(t, again)), again.size()},
                                    1, rows)
                      .ok());
    }
  };
  typename World<TypeParam>::Step step, other;
  Outcome outcome;
  begin(one.place, &step);
  begin(two.place, &other);
  if (this->HasFailure()) return;
  ASSERT_TRUE(one.place.ApplyPooled(asks, upstream, with.kind, 1, &step).ok());
  ASSERT_TRUE(two.place.SumAndApply(asks, upstream, with.kind, 1, &other, &outcome).ok());
  for (size_t t = 0; t < options.size(); ++t) {
    SCOPED_TRACE(options[t].name);
    const auto got = one.place.Rows(t, Progression(0, 40));
    const auto want = two.place.Rows(t, Progression(0, 40));
    EXPECT_EQ(Bits(got.first), Bits(want.first));
    EXPECT_EQ(Bits(got.second), Bits(want.second));
    EXPECT_EQ(one.place.table(t).stats().dropped_gradients,
              two.place.table(t).stats().dropped_gradients);
  }
}

// Other keys are stepped between the lookup and the step: with catch_up, the rows first make up for
// that step.
TYPED_TEST_P(ApplyPooledTest, RowsMissAStepBeforeTheirOwn) {
  OptimizerCase with{"adam catch_up", OptimizerKind::kAdam};
  with.flags.catch_up = true;
  PooledWorlds<TypeParam> worlds;
  const std::vector<TableOptions> options = WholeTables(24);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  Random random(80);
  Hyper hyper;
  hyper.weight_decay = 0.1f;
  for (Tick tick = 1; tick < 4 * TypeParam::kSteps; tick += 4) {
    SCOPED_TRACE(tick);
    const std::vector<Ask> asks = OneAskEach(random, options.size(), 100);
    const std::vector<Ask> others = OneAskEach(random, options.size(), 100);
    const std::vector<Floats> of_others = Upstreams(random, others, options);
    worlds.Step(
        asks, Upstreams(random, asks, options), with, tick, true, hyper,
        [&](auto& world, Exec&) {
          typename std::decay_t<decltype(world)>::Step step;
          Outcome outcome;
          ASSERT_TRUE(world.Pool(others, tick + 1, true, &step, &outcome).ok());
          ASSERT_TRUE(world
                          .SumAndApply(others, of_others, with.kind, tick + 1, &step, &outcome,
                                       with.flags, hyper)
                          .ok());
        },
        /*later=*/2);
    worlds.ExpectSameTables(100);
    if (this->HasFailure()) return;
  }
}

// A key that admission refuses has no gradient, and none that counts as dropped.
TYPED_TEST_P(ApplyPooledTest, RefusedKeysHaveNoGradient) {
  for (const auto unadmitted : {Unadmitted::kZeros, Unadmitted::kSkip}) {
    const OptimizerCase with{"adagrad", OptimizerKind::kAdagrad};
    PooledWorlds<TypeParam> worlds;
    std::vector<TableOptions> options = WholeTables(24);
    for (TableOptions& o : options) {
      o.admission.rule = Admit::kFrequency;
      o.admission.unadmitted = unadmitted;
      o.admission.times = 3;
      o.admission.lines = o.admission.num_lines = 20000;
    }
    worlds.Add(options, with);
    if (this->HasFailure()) return;
    Random random(74);
    for (Tick tick = 1; tick < 2 * TypeParam::kSteps; tick += 2) {
      SCOPED_TRACE(tick);
      const std::vector<Ask> asks = OneAskEach(random, options.size(), 200);
      worlds.Step(asks, Upstreams(random, asks, options), with, tick, true, {},
                  [](auto&, Exec&) {});
      worlds.ExpectSameTables(200);
      if (this->HasFailure()) return;
    }
  }
}

// A bag whose weights add up to zero adds nothing, whatever the gradients of other bags are.
TYPED_TEST_P(ApplyPooledTest, BagsOfWeightZero) {
  const OptimizerCase with{"sgd", OptimizerKind::kSgd};
  PooledWorlds<TypeParam> worlds;
  std::vector<TableOptions> options = WholeTables(24);
  options.resize(1);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  const std::vector<Ask> asks{
      {0, Combiner::kMean, {1, 2, 3}, {0, 1, 2}, 3, false, {1.0f, 0.0f, 1.0f}, false}};
  std::vector<Floats> upstream{Floats(3 * static_cast<size_t>(options[0].dim), 1.0f)};
  upstream[0][0] = std::numeric_limits<float>::infinity();
  worlds.Step(asks, upstream, with, 1, true, {}, [](auto&, Exec&) {});
  worlds.ExpectSameTables(10);
  EXPECT_EQ(worlds.place.table(0).stats().nonfinite_gradients, 1u);
}

// A cut that is read after the step has the rows of before it.
TYPED_TEST_P(ApplyPooledTest, CutsKeepTheRowsOfBefore) {
  const OptimizerCase with{"adagrad", OptimizerKind::kAdagrad};
  PooledWorlds<TypeParam> worlds;
  const std::vector<TableOptions> options = WholeTables(24);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  Random random(75);
  Tick tick = 1;
  const auto step = [&] {
    const std::vector<Ask> asks = OneAskEach(random, options.size(), 100);
    worlds.Step(asks, Upstreams(random, asks, options), with, tick, true, {}, [](auto&, Exec&) {});
    tick += 3;
  };
  for (int i = 0; i < 4; ++i) step();
  const Keys keys = Progression(0, 100);
  std::vector<Floats> before;
  std::vector<size_t> sizes;
  for (size_t t = 0; t < options.size(); ++t) {
    before.push_back(worlds.place.Rows(t, keys).first);
    sizes.push_back(worlds.place.table(t).size());
  }
  SavedRows saved(size_t{1} << 30);
  for (size_t t = 0; t < options.size(); ++t) {
    Table& table = worlds.place.table(t);
    ASSERT_TRUE(table.BeginCut(TypeParam::exec(), tick, 0, CutOf::kRows, &saved, t).ok());
  }
  ++tick;
  for (int i = 0; i < 2; ++i) step();
  std::vector<std::map<uint64_t, Floats>> cut(options.size());
  const auto add = [&](size_t t, const char* key_at, const char* vector) {
    uint64_t key = 0;
    std::memcpy(&key, key_at, SizeOf(options[t].key_type));
    Floats floats(static_cast<size_t>(options[t].dim));
    std::memcpy(floats.data(), vector, floats.size() * sizeof(float));
    EXPECT_TRUE(cut[t].emplace(key, floats).second);
  };
  size_t pushed = 0;
  for (size_t t = 0; t < options.size(); ++t) {
    Table& table = worlds.place.table(t);
    const RowLayout& l = table.layout();
    while (!table.CutIsRead()) {
      const std::vector<RowId> plan = table.PlanCut(7);
      std::vector<char> packed(plan.size() * l.key_size), vectors(plan.size() * l.vector_bytes());
      std::vector<CutTime> updates(plan.size()), scores(plan.size());
      Floats state(plan.size() * static_cast<size_t>(l.state_width));
      table.ReadCut(TypeParam::exec(), plan,
                    {packed.data(), vectors.data(), state.data(), updates.data(), scores.data()});
      for (size_t i = 0; i < plan.size(); ++i) {
        add(t, &packed[i * l.key_size], &vectors[i * l.vector_bytes()]);
      }
    }
  }
  for (SavedRows::Chunk chunk; saved.Pop(&chunk);) {
    const RowLayout& l = worlds.place.table(chunk.table).layout();
    for (size_t i = 0; i < chunk.n; ++i, ++pushed) {
      const char* const row = &chunk.rows[i * chunk.stride];
      add(chunk.table, row, l.vector(row));
    }
  }
  EXPECT_GT(pushed, 10u);
  for (size_t t = 0; t < options.size(); ++t) {
    SCOPED_TRACE(t);
    worlds.place.table(t).EndCut();
    EXPECT_EQ(cut[t].size(), sizes[t]);
    const auto dim = static_cast<size_t>(options[t].dim);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto at = cut[t].find(keys[i]);
      if (at == cut[t].end()) continue;
      EXPECT_EQ(Bits(at->second), Bits(Floats(&before[t][i * dim], &before[t][i * dim] + dim)));
    }
  }
}

TYPED_TEST_P(ApplyPooledTest, Errors) {
  const OptimizerCase with{"adagrad", OptimizerKind::kAdagrad};
  PooledWorlds<TypeParam> worlds;
  const std::vector<TableOptions> options = WholeTables(24);
  worlds.Add(options, with);
  if (this->HasFailure()) return;
  Random random(76);
  std::vector<Ask> asks = OneAskEach(random, options.size(), 100);
  for (Ask& ask : asks) {
    ask = {ask.table, Combiner::kSum, {1, 2, 3}, {0, 1, 2}, 3, false, {}, false};
  }
  typename World<TypeParam>::Step step;
  Outcome outcome;
  ASSERT_TRUE(worlds.place.Pool(asks, 1, true, &step, &outcome).ok());
  const std::vector<Floats> upstream = Upstreams(random, asks, options);
  const std::vector<BackwardTask> gradients = worlds.place.Gradients(asks, upstream, &step);
  std::vector<ApplyPooledTask> good(asks.size());
  for (size_t a = 0; a < asks.size(); ++a) {
    static_cast<BackwardTask&>(good[a]) = gradients[a];
    good[a].table = &worlds.place.table(a);
  }
  const auto apply = [&](const std::vector<ApplyPooledTask>& tasks, OptimizerStep with_step) {
    return TypeParam::lookups().ApplyPooled(TypeParam::exec(), tasks, with_step, 2);
  };
  const OptimizerStep own{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}};
  const auto before = worlds.place.Rows(0, {1, 2, 3});
  const auto refused = [&](const Status& status, Code code, const std::string& text) {
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    const auto now = worlds.place.Rows(0, {1, 2, 3});
    EXPECT_EQ(Bits(now.first), Bits(before.first));
    EXPECT_EQ(Bits(now.second), Bits(before.second));
  };
  std::vector<ApplyPooledTask> tasks = good;
  tasks[2] = tasks[0];
  refused(apply(tasks, own), Code::kInvalidArgument, "not the first task of this table");
  tasks = good;
  tasks[1].rows = nullptr;
  refused(apply(tasks, own), Code::kInvalidArgument, "has no row ids");
  tasks = good;
  tasks[1].dim = 3;
  refused(apply(tasks, own), Code::kInvalidArgument, "'narrow keys'");
  tasks = good;
  tasks[2].upstream = nullptr;
  refused(apply(tasks, own), Code::kInvalidArgument, "");
  refused(apply(good, {OptimizerKind::kAdam, {}, {}, 1, "adam", {0.0f, 0.0f}}),
          Code::kFailedPrecondition, "'wide'");
  EXPECT_TRUE(apply(good, own).ok());
  EXPECT_NE(Bits(worlds.place.Rows(0, {1, 2, 3}).first), Bits(before.first));
  EXPECT_TRUE(apply({}, own).ok());
}

REGISTER_TYPED_TEST_SUITE_P(ApplyPooledTest, StepsLikeTheHost, RowsMoveBeforeTheStep,
                            OtherKeysGetRowsBeforeTheStep, TablesAreClearedBeforeTheStep,
                            KeysHaveRowsAgainBeforeTheStep, RowsMissAStepBeforeTheirOwn,
                            RefusedKeysHaveNoGradient, BagsOfWeightZero, CutsKeepTheRowsOfBefore,
                            Errors);

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_LOOKUPS_SUITE_POOLED_H_
