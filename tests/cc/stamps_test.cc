// Stamps, compared with 64-bit ticks, and the sweep of a host table as the clock advances.
#include "cc/table/stamps.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using testing_table::Exported;
using testing_table::Floats;
using testing_table::Keys;
using testing_table::Progression;
using testing_table::Random;
using testing_table::Scattered;
using testing_table::Subject;

constexpr Tick kStep = Tick{1} << 30;
constexpr Tick kExact = Tick{1} << 31;

TEST(Stamps, TicksOfTheWindowHaveDistinctStamps) {
  Stamps stamps;
  bool begins = false;
  for (Tick at : {Tick{0}, 3 * kStep, 9 * kStep + 12345, (Tick{1} << 40) + 7}) {
    while (stamps.Follow(at, &begins) == 1) stamps.EndSweep();
    const Tick base = stamps.base();
    for (Tick tick : {base + 1, base + 2, base + kStep, base + 2 * kStep - 1, base + 3 * kStep,
                      base + 4 * kStep - 3, base + 4 * kStep - 2}) {
      if (tick < stamps.floor()) continue;
      const Stamp stamp = stamps.Encode(tick);
      EXPECT_NE(stamp, 0u);
      EXPECT_EQ(stamps.Decode(stamp), tick);
      EXPECT_EQ(stamps.order().Ranked(stamps.order().Rank(stamp)), stamp);
      EXPECT_EQ(stamps.order().Rank(stamp), tick - base);
    }
    // The next multiples of 2^32 - 1 and of 2^32, and the ticks around them.
    for (Tick near : {Tick{0xFFFFFFFFu}, Tick{1} << 32}) {
      for (Tick tick = base / near * near + near - 2; tick <= base / near * near + near + 2;
           ++tick) {
        if (tick <= stamps.floor() || tick >= base + 4 * kStep - 1) continue;
        EXPECT_EQ(stamps.Decode(stamps.Encode(tick)), tick);
        EXPECT_TRUE(stamps.After(tick - 1)(stamps.Encode(tick)));
        EXPECT_FALSE(stamps.After(tick)(stamps.Encode(tick)));
      }
    }
  }
}

TEST(Stamps, TicksOutsideTheWindowGetTheStampsOfItsEnds) {
  Stamps stamps;
  EXPECT_EQ(stamps.Decode(stamps.Encode(0)), 1u);  // no batch has tick 0
  EXPECT_EQ(stamps.Decode(stamps.Encode(Tick{1} << 33)), Tick{0xFFFFFFFEu});
  bool begins = false;
  EXPECT_EQ(stamps.Follow(3 * kStep - 1, &begins), 0);
  EXPECT_GT(stamps.Follow(3 * kStep, &begins), 0);
  EXPECT_TRUE(begins);
  EXPECT_EQ(stamps.floor(), kStep);
  EXPECT_EQ(stamps.base(), 0u);
  EXPECT_EQ(stamps.Decode(stamps.Encode(5)), kStep);  // no new stamp is below the floor
  EXPECT_EQ(stamps.Clamp(0), 0u);
}

// Random ticks, up to several steps apart: a stamp represents its tick until 2^31 ticks have
// passed, and never an earlier tick.
TEST(Stamps, AgreeWithTicksAsTheClockAdvances) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    Stamps stamps;
    std::vector<std::pair<Tick, Stamp>> held;
    size_t swept = 0;
    Tick tick = random.Below(2) == 0 ? 0 : random.Below(uint64_t{1} << 40);
    for (int batch = 0; batch < 400; ++batch) {
      tick += 1 + random.Below(uint64_t{1} << (1 + random.Below(seed % 2 == 0 ? 29 : 34)));
      bool begins = false;
      const double share = stamps.Follow(tick, &begins);
      if (begins) swept = 0;
      const auto due = static_cast<size_t>(share * static_cast<double>(held.size()));
      for (; swept < due; ++swept) held[swept].second = stamps.Clamp(held[swept].second);
      if (share == 1) stamps.EndSweep();
      held.emplace_back(tick, stamps.Encode(tick));
      const UpdatedAfter after = stamps.After(tick - 1);
      for (const auto& [was, stamp] : held) {
        ASSERT_NE(stamp, 0u);
        const Tick now = stamps.Decode(stamp);
        ASSERT_LE(now, tick);
        ASSERT_GE(now, was);
        if (was + kExact > tick) {
          ASSERT_EQ(now, was);
        }
        ASSERT_EQ(after(stamp), was == tick);
        const Tick since = random.Below(tick + 1);
        ASSERT_EQ(stamps.After(since)(stamp), now > since);
      }
    }
  }
}

// A batch sweeps its share of the table and no more, while rows are inserted, erased and moved.
TEST(Stamps, TableIsSweptAsTheClockAdvances) {
  TableOptions options;
  options.dim = 1;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Table::Create(options, &table).ok());
  SerialExec exec;
  Subject t(std::move(table), &exec);
  constexpr size_t kRows = 20000;
  const Keys old = Scattered(1, kRows);
  t.set_tick(99);
  t.FindOrInsert(old);  // tick 100
  const auto clamped = [&] {
    size_t n = 0;
    for (const Exported& row : t.Export()) n += row.update == static_cast<int64_t>(kStep);
    return static_cast<double>(n) / kRows;
  };
  t.set_tick(3 * kStep - 2);
  t.FindOrInsert({7});
  EXPECT_EQ(clamped(), 0);
  uint64_t next = 1000000;
  for (const double share : {0.125, 0.25, 0.5, 0.75}) {
    const auto at = static_cast<Tick>(share * static_cast<double>(kStep / 2));
    t.set_tick(3 * kStep + at - 1);
    t.FindOrInsert({7});
    EXPECT_NEAR(clamped(), std::min(1.0, share * static_cast<double>(t.size()) / kRows), 0.01);
    t.Check();
    // Segments split while the sweep runs; it misses none of the old rows.
    t.FindOrInsert(Scattered(next, 5000));
    next += 5000;
    t.Check();
  }
  t.Erase(Keys(old.begin(), old.begin() + 1000));
  t.set_tick(3 * kStep + kStep / 2);
  t.FindOrInsert({7});
  t.Check();
  for (const Exported& row : t.Export()) EXPECT_GE(row.update, static_cast<int64_t>(kStep));
  EXPECT_EQ(t.size(), kRows + 1 + 20000 - 1000);
  // The sweep does not affect later deltas.
  const Tick before = t.tick();
  t.Upsert({7, 8}, {1, 2});
  EXPECT_EQ(t.ExportedKeys(before), (Keys{7, 8}));
}

}  // namespace
}  // namespace dynemb
