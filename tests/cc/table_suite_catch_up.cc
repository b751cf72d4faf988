// Catch-up (catch_up.h): rows that make up for missed steps, compared with an optimizer that steps
// every row in every step.
#include "tests/cc/catch_up_world.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

TABLE_TEST(TableCatchUp, RandomCallsMatchTheDenseOptimizer) {
  if (!Is32Bit(f)) return;
  for (const CatchUpCase& c : CatchUpCases()) {
    SCOPED_TRACE(c.name);
    Random random(7);
    CatchUpWorld w(f, c, f.Options(3));
    const Keys keys = Progression(1, 24);
    w.Upsert(keys, RandomFloats(&random, 24 * 3));
    // With 400, each branch below is taken. Under sanitizers, tables on the host take all of them.
    const int steps = static_cast<int>(f.Scaled(900, kSanitized ? 50 : 400));
    for (int step = 0; step < steps; ++step) {
      // Rows of low numbers have gradients often; others in no step, or hardly any.
      Keys touched;
      for (size_t k = 0; k < keys.size(); ++k) {
        if (w.rows.count(keys[k]) != 0 && random.Below(1 + k * k * k) == 0)
          touched.push_back(keys[k]);
      }
      // One rate for a time, then a schedule.
      if (step > 300 || step == 100) w.hyper.learning_rate *= 0.997f;
      w.Step(touched, RandomFloats(&random, touched.size() * 3));
      if (step % 300 == 250) w.iteration += 5;  // steps in which the table had no gradient
      if (step % 7 == 0) w.Cool();
      const uint64_t key = keys[random.Below(keys.size())];
      switch (random.Below(40)) {
        case 0:
          w.Upsert({key}, RandomFloats(&random, 3));
          break;
        case 1:
          if (w.rows.count(key) != 0) w.Accumulate({key}, RandomFloats(&random, 3));
          break;
        case 2:
          w.Erase(key);
          break;
        case 3: {
          const Keys some = w.AllKeys();
          w.ExpectVectors({some[0], some[1], some[0]}, w.t.Lookup({some[0], some[1], some[0]}));
          break;
        }
        case 4:
          w.ExpectEqual();
          break;
        default:
          break;
      }
    }
    w.ExpectEqual();
    w.t.Check();
  }
}

TABLE_TEST(TableCatchUp, GapsOfAnyLength) {
  if (!Is32Bit(f)) return;
  for (const CatchUpCase& c : CatchUpCases()) {
    SCOPED_TRACE(c.name);
    Random random(3);
    CatchUpWorld w(f, c, f.Options(2));
    w.hyper.weight_decay /= 10;
    const Keys keys = Progression(1, 8);
    w.Upsert(keys, RandomFloats(&random, 16));
    w.Step(keys, RandomFloats(&random, 16));
    w.Step(keys, RandomFloats(&random, 16));
    const int gaps[] = {1, 2, 10, 100, 200, 1000, 10000};
    int step = 0;
    for (size_t g = 0; g < std::size(gaps) && gaps[g] <= static_cast<int>(f.Scaled(10000)); ++g) {
      for (; step < gaps[g]; ++step) w.Step({}, {});
      w.Cool();
      // The rounding of the dense optimizer's own steps adds up.
      w.ExpectVectors({keys[g]}, w.t.Lookup({keys[g]}), 1e-5f);
    }
    w.ExpectVectors(keys, w.t.Lookup(keys), 1e-5f);
    w.Step(keys, RandomFloats(&random, 16));
    w.ExpectVectors(keys, w.t.Lookup(keys), 1e-5f);
  }
}

TABLE_TEST(TableCatchUp, OtherHyperparametersMayFollow) {
  if (!Is32Bit(f)) return;
  CatchUpWorld w(f, CatchUpCases()[5], f.Options(2));
  const Keys keys = Progression(1, 5);
  Random random(5);
  w.Upsert(keys, RandomFloats(&random, 10));
  for (const float beta : {0.9f, 0.5f, 0.95f}) {
    w.hyper.beta_1 = beta;
    w.Step({keys[1]}, RandomFloats(&random, 2));
    for (int i = 0; i < 20; ++i) w.Step({keys[0]}, RandomFloats(&random, 2));
    w.Cool();
  }
  w.ExpectEqual();
}

// Rows that are older than the first step lack none, whatever its number.
TABLE_TEST(TableCatchUp, TheFirstStepMayBeLate) {
  if (!Is32Bit(f)) return;
  CatchUpWorld w(f, CatchUpCases()[5], f.Options(2));
  Random random(5);
  w.Upsert({1, 2, 3}, RandomFloats(&random, 6));
  w.Cool();
  w.t.set_tick(CatchUpView::kMostSpan + 1000);  // as marks, far from those that rows begin with
  for (int i = 0; i < 5; ++i) w.Step({1}, RandomFloats(&random, 2));
  w.ExpectEqual();
}

// A schedule makes a run of every step. Their number is bounded, and old steps are not lost.
TABLE_TEST(TableCatchUp, OldStepsAreForgotten) {
  if (!Is32Bit(f) || (f.slowness() > 1 && !f.cold())) return;
  CatchUpWorld w(f, CatchUpCases()[0], f.Options(1));
  Random random(6);
  // More than a step of the sweep brings up to date.
  const Keys keys = Progression(1, f.cold() ? 100 : 200);
  w.Upsert(keys, RandomFloats(&random, keys.size()));
  w.hyper.weight_decay = 1e-3f;
  for (int step = 0; step < 80000; ++step) {
    w.hyper.learning_rate = step % 2 == 0 ? 0.01f : 0.02f;
    w.Step({keys[0]}, {0.0f});
    if (step % 1000 != 0) continue;
    w.Cool();
    ASSERT_LE(w.t->catch_up().Save(1).size(), 3 * CatchUp::kMostRuns);
  }
  EXPECT_GT(w.t->catch_up().forgotten(), 0u);
  w.ExpectVectors(keys, w.t.Lookup(keys), 2e-4f);
}

// A drift whose terms grow: every missed step is computed.
TABLE_TEST(TableCatchUp, DriftMayGrow) {
  if (!Is32Bit(f)) return;
  for (const char* name : {"adam catch_up", "adamax catch_up"}) {
    CatchUpCase c{name, {}};
    c.hyper.learning_rate = 0.01f;
    c.hyper.beta_1 = 0.9f;
    c.hyper.beta_2 = 0.7f;
    CatchUpWorld w(f, c, f.Options(2));
    w.Upsert({1, 2}, {1, 2, 3, 4});
    w.Step({1, 2}, {100, 1, 0.01f, 10});
    for (int i = 0; i < 400; ++i) w.Step({}, {});
    w.ExpectEqual();
  }
}

// A step of an optimizer without catch_up, which needs no state, is none of the table's steps.
TABLE_TEST(TableCatchUp, StepsOfOtherOptimizers) {
  if (!Is32Bit(f)) return;
  CatchUpWorld w(f, CatchUpCases()[5], f.Options(2));
  w.Upsert({1, 2}, {1, 2, 3, 4});
  Random random(5);
  for (int i = 0; i < 10; ++i) {
    w.Step({1, 2}, RandomFloats(&random, 4));
    for (int k = 0; k < 3; ++k) w.Step({2}, RandomFloats(&random, 2));
    const uint64_t steps = w.t->catch_up().step();
    Hyper hyper;
    hyper.learning_rate = 0.5f;
    ASSERT_TRUE(w.t->BeginStep(w.t.exec(), {}, hyper, w.t.tick() + 1).ok());
    const RowOptimizer sgd(OptimizerKind::kSgd, {}, hyper, 2);
    w.t.Apply(sgd, {1}, w.t.Find({1}), {0.25f, 0.5f}, 1);
    w.t->EndStep(w.t.exec(), hyper, 1, w.t.tick());
    w.rows[1].vector[0] -= 0.125f;
    w.rows[1].vector[1] -= 0.25f;
    EXPECT_EQ(w.t->catch_up().step(), steps);
    w.ExpectEqual();
  }
}

TABLE_TEST(TableCatchUp, DecayOfMoreThanAllIsAnError) {
  CatchUpWorld w(f, CatchUpCases()[0], f.Options(2));
  Hyper hyper;
  hyper.learning_rate = 0.5f;
  hyper.weight_decay = 2.0f;
  const Status status = w.t->BeginStep(w.t.exec(), w.flags, hyper, 5);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("weight_decay 2 times"), std::string::npos) << status.message();
}

TABLE_TEST(TableCatchUp, EvictedRowsAndNormsAreUpToDate) {
  if (!Is32Bit(f)) return;
  TableOptions options = f.Options(2);
  options.max_capacity = 4;
  CatchUpWorld w(f, CatchUpCases()[0], options);
  w.hyper.weight_decay = 10;
  w.Upsert({1, 2, 3, 4}, {1, 1, 2, 2, 4, 4, 8, 8});
  for (int i = 0; i < 5; ++i) w.Step({1}, {0, 0});
  // The norms were 1.4, 2.8, 5.7 and 11.3, and are 0.59 times that.
  RowPredicate where;
  where.has_norms = true;
  where.norm_from = 3;
  where.norm_below = 4;
  const ExportPlan plan = w.t->SelectRows(w.t.exec(), 0, 100, where);
  EXPECT_EQ(plan.rows.size(), 1u);
  EvictedRows evicted(w.t->layout());
  RowIds rows(2);
  ASSERT_TRUE(
      w.t->InsertAndEvict(w.t.exec(), w.t.Pack({5, 6}), w.t.tick() + 1, rows.data(), &evicted)
          .ok());
  ASSERT_EQ(evicted.size(), 2u);
  const TickColumns& columns = evicted.Finish();
  const KeySpan keys(w.t->options().key_type, columns.keys, 2);
  Floats vectors(4);
  std::memcpy(vectors.data(), columns.vectors, vectors.size() * sizeof(float));
  w.ExpectVectors({keys.BitsAt(0), keys.BitsAt(1)}, vectors);
}

// Rounding at random leaves the mean of 16-bit rows where it belongs.
TABLE_TEST(TableCatchUp, SmallDecaysAddUp) {
  CatchUpWorld w(f, CatchUpCases()[0], f.Options(8));
  const Keys keys = Progression(1, f.Scaled(500, 100));
  w.Upsert(keys, Floats(keys.size() * 8, 1.0f));
  w.hyper.weight_decay = 0.1f;
  for (int i = 0; i < 300; ++i) {
    w.Step({}, {});
    if (i % 10 == 0) (void)w.t.Lookup(keys);
    if (i % 30 == 0) w.Cool();
  }
  double sum = 0;
  for (const float x : w.t.Lookup(keys)) sum += x;
  EXPECT_NEAR(sum / static_cast<double>(keys.size() * 8), std::pow(1 - 0.01 * 0.1, 300), 2e-3);
}

// Another optimizer's rows have what the steps of the first one did to them.
TABLE_TEST(TableCatchUp, StateThatGoesLeavesItsEffect) {
  if (!Is32Bit(f)) return;
  CatchUpWorld w(f, CatchUpCases()[1], f.Options(2));
  w.Upsert({1, 2}, {1, 2, 3, 4});
  w.Step({1, 2}, {1, 1, 1, 1});
  for (int i = 0; i < 5; ++i) w.Step({1}, {0, 0});
  w.Cool();
  ASSERT_TRUE(w.t->AttachState(w.t.exec(), {"adam", {2, 2}, {0.0f, 0.0f}}).ok());
  EXPECT_FALSE(w.t->catch_up().enabled());
  w.ExpectVectors({1, 2}, w.t.Lookup({1, 2}));
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
