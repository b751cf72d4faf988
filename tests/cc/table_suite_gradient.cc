// ApplyRange: the generation check, counters, and rounding of 16-bit rows.
#include <cmath>
#include <limits>

#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

TABLE_TEST(TableGradient, UpdatesVectorAndState) {
  TableOptions options = f.Options(2);
  options.initializer = {{InitKind::kConstant, 1.0f, 0.0f}};
  Subject t = f.Create(options);
  ASSERT_TRUE(t->AttachState(t.exec(), {"sgd", {2}, {0.0f}}).ok());
  Hyper hyper;
  hyper.learning_rate = 1.0f;
  hyper.momentum = 0.5f;
  OptimizerFlags flags;
  flags.momentum = true;
  const RowOptimizer momentum(OptimizerKind::kSgd, flags, hyper, 2);
  const RowIds rows = t.FindOrInsert({1, 2});
  t.Apply(momentum, {2, 1}, {rows[1], rows[0]}, {1, 2, 3, 4});
  Floats state;
  EXPECT_EQ(t.Read({1, 2}, &state), (Floats{-2, -3, 0, -1}));
  EXPECT_EQ(state, (Floats{-3, -4, -1, -2}));
  t.Apply(momentum, {1}, {rows[0]}, {0, 0});
  EXPECT_EQ(t.Read({1, 2}, &state), (Floats{-3.5f, -5, 0, -1}));
  EXPECT_EQ(t.stats().dropped_gradients, 0u);
}

// Only the gradients [begin, end) are applied.
TABLE_TEST(TableGradient, RangeIsRespected) {
  Subject t = f.Create(f.Options(1));
  const Keys keys = Scattered(1, 40);
  t.Upsert(keys, Floats(40, 0.0f));
  const RowIds rows = t.Find(keys);
  const Floats gradients(40, -1.0f);
  t->ApplyRange(t.exec(), Sgd(1, 1), t.Pack(keys), rows.data(), gradients.data(), 10, 25, 1,
                t.tick() + 1);
  const Floats got = t.Read(keys);
  for (size_t i = 0; i < 40; ++i) EXPECT_EQ(got[i], i >= 10 && i < 25 ? 1.0f : 0.0f) << i;
}

TABLE_TEST(TableGradient, StaleRowsAreDroppedAndCounted) {
  const size_t n = f.Scaled(500, 16);
  TableOptions options = f.Options(1);
  options.max_capacity = static_cast<int64_t>(2 * n);
  options.initializer = {{InitKind::kConstant, 2.0f, 0.0f}};
  Subject t = f.Create(options);
  const Keys keys = Scattered(1, n);
  const RowIds rows = t.FindOrInsert(keys);
  const Floats gradients(n, 1.0f);
  const RowOptimizer sgd = Sgd(1, 1);
  uint64_t dropped = 0;
  const auto untouched = [&](const char* what) {
    const std::vector<Exported> before = t.Export();
    t.Apply(sgd, keys, rows, gradients);
    dropped += n;
    EXPECT_EQ(t.stats().dropped_gradients, dropped) << what;
    EXPECT_TRUE(t.Export() == before) << what << ": a dropped gradient reached a row";
    t.Check();
  };
  t.Erase(keys);
  untouched("erased");
  const Keys others = Scattered(100000, n);
  const RowIds reused = t.FindOrInsert(others);
  EXPECT_EQ(std::unordered_set<RowId>(reused.begin(), reused.end()),
            std::unordered_set<RowId>(rows.begin(), rows.end()));
  untouched("row given to another key");
  const RowIds again = t.FindOrInsert(keys);  // the same keys in other rows
  for (size_t i = 0; i < n; ++i) ASSERT_NE(again[i], rows[i]);
  if (!f.rows_move()) untouched("key has another row");
  t.FindOrInsert(Scattered(200000, 2 * n));  // all evicted
  EXPECT_EQ(t.CountContained(keys), 0u);
  untouched("evicted");
  ASSERT_TRUE(t.Clear().ok());
  untouched("cleared");
}

TABLE_TEST(TableGradient, GarbageRowIdsAreHarmless) {
  Subject t = f.Create(f.Options(1));
  const Keys keys = Scattered(1, 64);
  const RowIds rows = t.FindOrInsert(keys);
  const std::vector<Exported> before = t.Export();
  Random random(9);
  RowIds garbage(64);
  for (RowId& row : garbage) row = static_cast<RowId>(random.Next() | 0x100);
  garbage[0] = kNoRow;
  garbage[1] = kNoRow - 1;
  garbage[2] = 0x80000000u;
  garbage[3] = 64;       // just past the last row
  garbage[4] = rows[5];  // another key's
  t.Apply(Sgd(1, 1), keys, garbage, Floats(64, 1.0f));
  t.Apply(Sgd(1, 1), {0xABCDEF}, {rows[0]}, {1});
  if (f.rows_move()) {
    EXPECT_EQ(t.stats().dropped_gradients, 2u);  // the key with kNoRow, and the unknown key
    const Floats initial = f.InitialVectors(t, keys), now = t.Read(keys);
    EXPECT_EQ(now[0], initial[0]);
    for (size_t i = 1; i < now.size(); ++i) ASSERT_NEAR(now[i], initial[i] - 1, 0.02) << i;
  } else {
    EXPECT_EQ(t.stats().dropped_gradients, 65u);
    EXPECT_TRUE(t.Export() == before);
  }
  t.Check();
  // Also in a table that never had a row.
  Subject u = f.Create(f.Options(1));
  u.Apply(Sgd(1, 1), {0, 1, 2}, {0, kNoRow, 77}, {1, 1, 1});
  EXPECT_EQ(u.stats().dropped_gradients, 3u);
  EXPECT_EQ(u.size(), 0u);
}

TABLE_TEST(TableGradient, NonfiniteIsAppliedAndCounted) {
  Subject t = f.Create(f.Options(2));
  t.Upsert({1, 2, 3, 4}, Floats(8, 1.0f));
  const RowIds rows = t.Find({1, 2, 3, 4});
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  t.Apply(Sgd(1, 2), {1, 2, 3, 4}, rows, {nan, nan, 1, -inf, 1, 1, nan, 0});
  EXPECT_EQ(t.stats().nonfinite_gradients, 3u);  // rows, not elements
  const Floats got = t.Read({1, 2, 3, 4});
  EXPECT_TRUE(std::isnan(got[0]) && std::isnan(got[1]));
  EXPECT_EQ(got[2], 0.0f);
  EXPECT_EQ(got[3], inf);
  EXPECT_EQ(got[4], 0.0f);
  EXPECT_EQ(got[5], 0.0f);
  EXPECT_TRUE(std::isnan(got[6]));
  EXPECT_EQ(got[7], 1.0f);
  // A dropped gradient is not checked.
  t.Apply(Sgd(1, 2), {5}, {kNoRow}, {nan, nan});
  EXPECT_EQ(t.stats().nonfinite_gradients, 3u);
}

float UlpOfOne(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-23f : dtype == DType::kFloat16 ? 0x1p-10f : 0x1p-7f;
}

// Updates of a sixteenth of a unit in the last place add up on average. Without stochastic rounding
// they are lost.
TABLE_TEST(TableGradient, SmallUpdatesAddUp) {
  if (f.dtype() == DType::kFloat32) GTEST_SKIP() << "float32 is not rounded";
  const float ulp = UlpOfOne(f.dtype());
  const size_t n = f.Scaled(64, 16);
  const int rounds = f.slowness() > 1 ? 60 : 400;
  for (const bool stochastic : {true, false}) {
    TableOptions options = f.Options(4);
    options.stochastic_rounding = stochastic;
    Subject t = f.Create(options);
    const Keys keys = Scattered(1, n);
    t.Upsert(keys, Floats(4 * n, 1.0f));
    const RowIds rows = t.Find(keys);
    const Floats gradients(4 * n, -ulp / 16);
    for (int i = 0; i < rounds; ++i) {
      t.Apply(Sgd(1, 4), keys, rows, gradients);
      ASSERT_TRUE(t.TryAccumulate(keys, Floats(4 * n, ulp / 16)).ok());
    }
    const Floats got = t.Read(keys);
    if (!stochastic) {
      EXPECT_EQ(got, Floats(4 * n, 1.0f));
      continue;
    }
    double sum = 0;
    for (float value : got) sum += (value - 1.0f) / ulp;
    const double cells = static_cast<double>(got.size());
    // Each round has two updates, which each round an element up with probability 1/16. The
    // tolerance is five standard deviations of the mean.
    const double deviation = std::sqrt(2.0 * rounds * (1 / 16.0) * (15 / 16.0) / cells);
    EXPECT_NEAR(sum / cells, rounds / 8.0, 5 * deviation);
    EXPECT_GT(std::unordered_set<float>(got.begin(), got.end()).size(),
              4u);  // elements are rounded independently
  }
}

// Rounding depends on the step, not on the tick: batches that only read change no bit of it.
TABLE_TEST(TableGradient, RoundingDependsOnTheStep) {
  if (f.dtype() == DType::kFloat32) GTEST_SKIP() << "float32 is not rounded";
  const float ulp = UlpOfOne(f.dtype());
  const size_t n = f.Scaled(64, 16);
  const Keys keys = Scattered(1, n);
  const Floats ones(4 * n, 1.0f), up(4 * n, ulp / 2), down(4 * n, -ulp / 2);
  // The vectors after each update of a table, with `reads` lookups before each update.
  const auto train = [&](int reads, uint64_t first_step) {
    std::vector<Floats> seen;
    Subject t = f.Create(f.Options(4));
    t.Upsert(keys, ones);
    const auto read = [&] {
      for (int i = 0; i < reads; ++i) t.Lookup(keys);
    };
    for (uint64_t step = first_step; step < first_step + 3; ++step) {
      read();
      t.Apply(Sgd(1, 4), keys, t.Find(keys), down, step);
      seen.push_back(t.Read(keys));
      read();
      Floats written = seen.back();
      for (float& value : written) value += ulp / 2;
      EXPECT_TRUE(t.TryWriteRows(keys, written, {}, false, step).ok());
      seen.push_back(t.Read(keys));
      read();
      EXPECT_TRUE(t.TryAccumulate(keys, up).ok());
      seen.push_back(t.Read(keys));
    }
    return seen;
  };
  const std::vector<Floats> plain = train(0, 1);
  EXPECT_EQ(train(1, 1), plain);
  EXPECT_EQ(train(3, 1), plain);
  // Other steps have other random bits, even steps that are equal as float32.
  const uint64_t large = uint64_t{1} << 24;
  const Floats at = train(0, large)[0], after = train(0, large + 1)[0];
  EXPECT_NE(at, plain[0]);
  EXPECT_NE(at, after);
  // Each call of Accumulate has other random bits.
  Subject t = f.Create(f.Options(4));
  std::vector<Floats> added;
  for (int i = 0; i < 2; ++i) {
    t.Upsert(keys, ones);
    EXPECT_TRUE(t.TryAccumulate(keys, up).ok());
    added.push_back(t.Read(keys));
  }
  EXPECT_NE(added[0], added[1]);
}

// The number of earlier calls of Accumulate determines the rounding. Refused calls do not count.
TABLE_TEST(TableGradient, RefusedAdditionsAreNotCounted) {
  TableOptions options = f.Options(32);
  options.max_capacity = 4;
  options.evict_strategy = EvictStrategy::kNone;
  const Keys keys = Scattered(1, 4);
  const Floats third(4 * 32, 1.0f / 3);
  Floats sums[2];
  for (const bool refused : {false, true}) {
    Subject t = f.Create(options);
    t.FindOrInsert(keys);
    for (int call = 0; call < 3; ++call) {
      if (refused) {
        EXPECT_FALSE(t.TryAccumulate({keys[0], 12345}, Floats(2 * 32, 1.0f)).ok());
      }
      EXPECT_TRUE(t.TryAccumulate(keys, third).ok());
    }
    sums[refused] = t.Read(keys);
  }
  EXPECT_EQ(sums[0], sums[1]);
}

TABLE_TEST(TableGradient, RoundingIsWithinOneUlp) {
  const float ulp = UlpOfOne(f.dtype());
  Subject t = f.Create(f.Options(4));
  const size_t n = f.Scaled(500, 30);
  const Keys keys = Scattered(1, n);
  Random random(4);
  for (int round = 0; round < 2; ++round) {
    Floats exact(4 * n);
    for (float& value : exact) {
      value = 1.0f + static_cast<float>(random.Below(1 << 23)) * 0x1p-23f;
      if (random.Below(2) == 0) value = -value;
    }
    if (round == 0) {
      ASSERT_TRUE(t.TryWriteRows(keys, exact, {}, true).ok());
    } else {
      const Floats was = t.Read(keys);
      Floats deltas(4 * n);
      for (size_t i = 0; i < exact.size(); ++i) deltas[i] = exact[i] - was[i];
      ASSERT_TRUE(t.TryAccumulate(keys, deltas).ok());
      for (size_t i = 0; i < exact.size(); ++i) exact[i] = was[i] + deltas[i];
    }
    const Floats got = t.Read(keys);
    double bias = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      ASSERT_LE(std::fabs(got[i] - exact[i]), ulp) << exact[i];
      bias += (got[i] - exact[i]) / ulp;
    }
    EXPECT_LT(std::fabs(bias) / static_cast<double>(exact.size()), n >= 500 ? 0.06 : 0.25);
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
