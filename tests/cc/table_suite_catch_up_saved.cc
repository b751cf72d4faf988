// Catch-up (catch_up.h) in cuts, deltas and loaded tables.
#include "cc/table/snapshot.h"
#include "tests/cc/catch_up_world.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

TABLE_TEST(TableCatchUpSaved, CutsAreOfTheWatermark) {
  if (!Is32Bit(f)) return;
  for (const CatchUpCase& c : {CatchUpCases()[2], CatchUpCases()[5]}) {
    CatchUpWorld w(f, c, f.Options(3));
    Random random(8);
    const Keys keys = Progression(1, 30);
    w.Upsert(keys, RandomFloats(&random, 90));
    Clock clock;
    Tick since = 0;
    for (int cut = 0; cut < 4; ++cut) {
      for (int i = 0; i < 20; ++i) {
        w.Step({keys[0], keys[static_cast<size_t>(i + 1)]}, RandomFloats(&random, 6));
      }
      clock.Advance(w.t.tick(), 0);
      std::unique_ptr<Snapshot> snapshot;
      ASSERT_TRUE(
          Snapshot::Begin(w.t.exec(), {&w.t.table()}, {since}, CutOf::kRows, &clock, &snapshot)
              .ok());
      w.t.set_tick(snapshot->watermark());
      const std::map<uint64_t, CatchUpWorld::Row> expected = w.rows;
      const float mark = w.t->catch_up().mark();
      for (int i = 0; i < 3; ++i) w.Step({keys[2]}, RandomFloats(&random, 3));
      (void)w.t.Lookup(Keys(keys.begin() + 5, keys.begin() + 15));  // writes what it brings
      size_t rows = 0;
      for (;;) {
        Snapshot::Block block;
        ASSERT_TRUE(snapshot->Next(7, &block).ok());
        if (block.n == 0) break;
        rows += block.n;
        std::vector<char> some(block.n * w.t.key_size());
        Floats vectors(block.n * 3), state(block.n * static_cast<size_t>(w.t.state_width()));
        const size_t n = block.n;
        const bool with_state = random.Below(2) == 0;
        ASSERT_TRUE(snapshot
                        ->Read(w.t.exec(), &block,
                               {some.data(), vectors.data(), with_state ? state.data() : nullptr,
                                nullptr, nullptr})
                        .ok());
        for (size_t i = 0; i < n; ++i) {
          const CatchUpWorld::Row& row = expected.at(w.t.KeyAt(some, i));
          for (size_t column = 0; column < 3; ++column) {
            CatchUpWorld::ExpectClose(vectors[i * 3 + column], row.vector[column], 2e-6f);
          }
          if (with_state) {
            EXPECT_EQ(state[(i + 1) * static_cast<size_t>(w.t.state_width()) - 1], mark);
          }
        }
      }
      EXPECT_EQ(rows, since == 0 ? 30u : 21u);
      since = snapshot->watermark();
    }
  }
}

// A table that loads rows and steps of another continues as that one does.
TABLE_TEST(TableCatchUpSaved, StepsAreLoaded) {
  if (!Is32Bit(f)) return;
  for (const bool schedule : {false, true}) {
    CatchUpWorld w(f, CatchUpCases()[5], f.Options(2));
    CatchUpWorld copy(f, CatchUpCases()[5], f.Options(2));
    Random random(9);
    const Keys keys = Progression(1, 10);
    w.Upsert(keys, RandomFloats(&random, 20));
    const auto train = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        if (schedule) w.hyper.learning_rate *= 0.99f;
        w.Step({keys[random.Below(5)]}, RandomFloats(&random, 2));
      }
    };
    Tick since = 0;
    for (int part = 0; part < 4; ++part) {
      train(30);
      const std::vector<double> steps = w.t->catch_up().Save(since);
      ASSERT_TRUE(copy.t->LoadSteps(copy.t.exec(), steps, w.t.tick()).ok());
      w.Cool();
      copy.Cool();
      for (const Exported& row : w.t.Export(since)) {
        ASSERT_TRUE(copy.t.TryWriteRows({row.key}, row.vector, row.state, true).ok());
      }
      ASSERT_TRUE(copy.t->LoadSteps(copy.t.exec(), steps, w.t.tick()).ok());  // again
      since = w.t.tick();
      const Keys all = w.AllKeys();
      w.ExpectVectors(all, copy.t.Lookup(all));
      EXPECT_EQ(copy.t->catch_up().step(), w.t->catch_up().step());
    }
    // A record of no steps that does not continue the present one: the present rows do not change.
    const Floats before = copy.t.Lookup(keys);
    train(20);
    ASSERT_TRUE(copy.t->LoadSteps(copy.t.exec(), w.t->catch_up().Save(0), w.t.tick()).ok());
    EXPECT_EQ(copy.t.Lookup(keys), before);
    EXPECT_EQ(copy.t->catch_up().step(), w.t->catch_up().step());

    const std::vector<double> steps = w.t->catch_up().Save(since);
    for (size_t n = 0; n < steps.size(); ++n) {
      std::vector<double> damaged(steps.begin(), steps.begin() + static_cast<int64_t>(n));
      if (n == 18 && !schedule) continue;  // a whole record
      EXPECT_EQ(copy.t->LoadSteps(copy.t.exec(), damaged, w.t.tick()).code(),
                Code::kInvalidArgument);
      damaged = steps;
      if (n >= 3 && (n < 18 || (n - 18) % 3 == 1)) continue;  // any number is allowed
      damaged[n] = -1;
      EXPECT_EQ(copy.t->LoadSteps(copy.t.exec(), damaged, w.t.tick()).code(),
                Code::kInvalidArgument);
    }
  }
}

// The steps of a state that replaced another one follow the steps of the first.
TABLE_TEST(TableCatchUpSaved, AnotherStateHasLaterSteps) {
  if (!Is32Bit(f)) return;
  const CatchUpCase c = CatchUpCases()[0];
  CatchUpWorld first(f, c, f.Options(1));
  CatchUpWorld copy(f, c, f.Options(1));
  for (CatchUpWorld* w : {&first, &copy}) w->Upsert({1, 2}, {1.0f, 2.0f});
  for (int i = 0; i < 4; ++i) first.Step({1}, {0.0f});
  const auto load = [&](const CatchUpWorld& from, Tick since) {
    const std::vector<double> steps = from.t->catch_up().Save(since);
    ASSERT_TRUE(copy.t->LoadSteps(copy.t.exec(), steps, from.t.tick()).ok());
  };
  load(first, 1);
  first.ExpectVectors({1, 2}, copy.t.Lookup({1, 2}));
  // A process that has loaded the rows without their state continues the ticks.
  CatchUpWorld second(f, c, f.Options(1));
  second.t.set_tick(first.t.tick());
  second.Upsert({1, 2}, first.t.Lookup({1, 2}));
  for (int i = 0; i < 3; ++i) second.Step({2}, {0.0f});
  EXPECT_GT(second.t->catch_up().Save(1)[1], first.t->catch_up().Save(1)[0]);
  load(second, 1);
  second.ExpectVectors({1, 2}, copy.t.Lookup({1, 2}));
  second.Step({2}, {0.0f});
  load(second, 1);
  second.ExpectVectors({1, 2}, copy.t.Lookup({1, 2}));
}

// A table that takes steps between two loads has these steps and the steps of both records.
TABLE_TEST(TableCatchUpSaved, StepsAreAddedToOwnOnes) {
  if (!Is32Bit(f)) return;
  for (const int own : {0, 3, 10, 20}) {
    CatchUpWorld w(f, CatchUpCases()[0], f.Options(1)), copy(f, CatchUpCases()[0], f.Options(1));
    SavedRows saved(size_t{1} << 20);
    for (CatchUpWorld* each : {&w, &copy}) each->Upsert({1, 2}, {1.0f, 2.0f});
    const auto cut = [&] {
      w.t.set_tick(w.t.tick() + 1);
      EXPECT_TRUE(w.t->BeginCut(w.t.exec(), w.t.tick(), 0, CutOf::kRows, &saved, 0).ok());
      w.t->EndCut();
      return w.t.tick();
    };
    Tick since = cut();
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 10; ++i) w.Step({1}, {0.0f});
      for (int i = 0; i < own; ++i) copy.Step({1}, {0.0f});
      const std::vector<double> steps = w.t->catch_up().Save(since);
      EXPECT_EQ(steps[0] - steps[1], 10);
      ASSERT_TRUE(copy.t->LoadSteps(copy.t.exec(), steps, w.t.tick()).ok());
      since = cut();
      const float expected =
          std::pow(1 - 0.01f * 0.05f, static_cast<float>((round + 1) * (10 + own)));
      CatchUpWorld::ExpectClose(copy.t.Lookup({2})[0], 2 * expected, 2e-6f);
    }
  }
}

// A reader of a base and its deltas that knows no optimizer: the rows that a delta lacks are
// multiplied by the factors in its record.
TABLE_TEST(TableCatchUpSaved, DeltasHaveTheRowsThatDrift) {
  if (!Is32Bit(f)) return;
  for (const CatchUpCase& c : CatchUpCases()) {
    if (f.slowness() > 8 && c.name != "adam catch_up") continue;
    SCOPED_TRACE(c.name);
    CatchUpWorld w(f, c, f.Options(3));
    Random random(11);
    const Keys keys = Progression(1, 30);
    w.Upsert(keys, RandomFloats(&random, 90));
    Clock clock;
    std::map<uint64_t, Floats> rows, states;
    Tick since = 0;
    double step = 0;
    size_t least = keys.size();
    for (const int steps : {0, 100, 400, 3, 170, 250, 250}) {
      for (int i = 0; i < steps; ++i) {
        if (since != 0 && step > 0) w.hyper.learning_rate *= 0.999f;
        w.Step({keys[random.Below(8)], keys[8 + random.Below(2)]}, RandomFloats(&random, 6));
      }
      clock.Advance(w.t.tick(), 0);
      std::unique_ptr<Snapshot> cut;
      ASSERT_TRUE(
          Snapshot::Begin(w.t.exec(), {&w.t.table()}, {since}, CutOf::kDelta, &clock, &cut).ok());
      w.t.set_tick(cut->watermark());
      const std::vector<double> record = cut->steps(0);
      double decay = 1, number = record[1];
      std::vector<double> rates(3, 1.0);
      for (size_t i = 18; i < record.size(); i += 3) {
        for (double k = 0; k < record[i]; ++k) {
          if (++number <= step) continue;
          decay *= 1 - static_cast<double>(w.hyper.weight_decay) * record[i + 1];
          for (size_t s = 0; s < 3; ++s) rates[s] *= record[15 + s];
        }
      }
      step = record[0];
      for (auto& [key, row] : rows) {
        for (float& x : row) x *= static_cast<float>(decay);
        Floats& state = states[key];
        for (size_t s = 0; s + 1 < state.size(); ++s) state[s] *= static_cast<float>(rates[s / 3]);
      }
      size_t in_delta = 0;
      for (;;) {
        Snapshot::Block block;
        ASSERT_TRUE(cut->Next(7, &block).ok());
        if (block.n == 0) break;
        const auto width = static_cast<size_t>(w.t.state_width());
        std::vector<char> some(block.n * w.t.key_size());
        Floats vectors(block.n * 3), state(block.n * width);
        const size_t n = block.n;
        ASSERT_TRUE(cut->Read(w.t.exec(), &block,
                              {some.data(), vectors.data(), state.data(), nullptr, nullptr})
                        .ok());
        for (size_t i = 0; i < n; ++i) {
          const uint64_t key = w.t.KeyAt(some, i);
          rows[key] = Floats(&vectors[i * 3], &vectors[i * 3] + 3);
          states[key] = Floats(&state[i * width], &state[i * width] + width);
        }
        in_delta += n;
      }
      least = std::min(least, in_delta);
      cut.reset();
      ASSERT_EQ(rows.size(), keys.size());
      for (const auto& [key, row] : rows) {
        SCOPED_TRACE(key);
        const CatchUpWorld::Row& expected = w.rows.at(key);
        for (size_t i = 0; i < 3; ++i) CatchUpWorld::ExpectClose(row[i], expected.vector[i], 4e-6f);
        for (size_t i = 0; i < expected.state.size(); ++i) {
          CatchUpWorld::ExpectClose(states[key][i], expected.state[i], 4e-6f);
        }
      }
      since = w.t.tick();
    }
    EXPECT_LE(least, 10u);  // settled rows are in no delta
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
