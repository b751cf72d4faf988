// The contract suite of tables with two tiers: the tier of each row, the rows that move, and that
// nothing else changes. Typed by a Maker, which has
//
//   static Status Make(options, table)
//   kSlowness      the time per key, as a multiple of the time on simulated threads
//   Missing()      the reason why this machine cannot have such tables; empty if it can
#ifndef DYNEMB_TESTS_CC_TIERS_SUITE_H_
#define DYNEMB_TESTS_CC_TIERS_SUITE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suite.h"
#include "tests/cc/test_length.h"
#include "tests/cc/zipf.h"

namespace dynemb {
namespace testing_table {

inline TableOptions TierOptions(int64_t dim) {
  TableOptions options;
  options.name = "tiers";
  options.dim = dim;
  options.init_capacity = 16;
  options.seed = 7;
  options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
  return options;
}

template <class Maker>
class Tiers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Maker::Missing().empty()) GTEST_SKIP() << Maker::Missing();
  }
  // A table whose device tier holds `device_rows` rows with a state of this width; -1: all rows.
  static Subject Make(TableOptions options, int64_t device_rows, Exec* exec,
                      int64_t state_width = 0) {
    options.tier = device_rows < 0 ? Tier::kHbm : Tier::kHybrid;
    const RowLayout row(SizeOf(options.key_type), options.dtype, options.dim, state_width, 16);
    if (device_rows >= 0) options.max_hbm_bytes = static_cast<uint64_t>(device_rows) * row.stride;
    std::unique_ptr<Table> table;
    const Status status = Maker::Make(options, &table);
    EXPECT_TRUE(status.ok()) << status.message();
    if (table == nullptr) std::abort();
    return Subject(std::move(table), exec);
  }
};
TYPED_TEST_SUITE_P(Tiers);

inline void Promote(Subject& t) {
  const Status status = t->Promote(t.exec(), t.tick());
  EXPECT_TRUE(status.ok()) << status.message();
}

TYPED_TEST_P(Tiers, RowsFillTheDeviceTierFirst) {
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 100, &exec);
  t.FindOrInsert(Progression(0, 60));
  EXPECT_EQ(t.stats().device_rows, 60u);
  t.FindOrInsert(Progression(60, 90));
  EXPECT_EQ(t.stats().device_rows, 100u);
  EXPECT_EQ(t.size(), 150u);
  t.Find(Progression(0, 150));
  EXPECT_EQ(t.stats().hits, 150u);
  EXPECT_EQ(t.stats().device_hits, 100u);
  t.Check();
}

// The bytes of the device tier limit its rows with their state. When rows get state, the rows that
// no longer fit move to the host tier.
TYPED_TEST_P(Tiers, StateUsesRoomOfTheDeviceTier) {
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 100, &exec);
  const Keys keys = Progression(0, 150);
  t.FindOrInsert(keys);
  ASSERT_TRUE(t->AttachState(exec, {"adam", {4, 4}, {0.0f, 0.5f}}).ok());
  // Rows of 32 bytes have become rows of 64.
  EXPECT_EQ(t.stats().device_rows, 50u);
  Floats state;
  const Floats vectors = t.Read(keys, &state);
  Subject same = this->Make(TierOptions(4), -1, &exec);
  same.FindOrInsert(keys);
  EXPECT_EQ(vectors, same.Read(keys));
  for (size_t i = 0; i < state.size(); ++i) ASSERT_EQ(state[i], i % 8 < 4 ? 0.0f : 0.5f) << i;
  t.Check();
}

TYPED_TEST_P(Tiers, HotRowsArePromoted) {
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 100, &exec);
  const Keys cold = Progression(0, 100), hot = Progression(1000, 50);
  t.FindOrInsert(cold);
  t.FindOrInsert(hot);  // in the host tier
  const auto hits_of = [&](const Keys& keys) {
    const uint64_t before = t.stats().device_hits;
    t.Find(keys);
    return t.stats().device_hits - before;
  };
  for (int round = 0; round < 10; ++round) {
    t.Find(hot);
    Promote(t);
    t.Check();
  }
  EXPECT_EQ(hits_of(hot), 50u);
  EXPECT_EQ(t.stats().promotions, 50u);
  EXPECT_EQ(hits_of(cold), 50u);  // the others were moved to the host tier
  EXPECT_EQ(t.size(), 150u);
  EXPECT_EQ(t.CountContained(cold), 100u);
}

// In a table whose scores are not times, rows with high scores are promoted, and keep their scores.
TYPED_TEST_P(Tiers, RowsWithHighScoresArePromoted) {
  for (const EvictStrategy strategy :
       {EvictStrategy::kLfu, EvictStrategy::kEpochLfu, EvictStrategy::kScore}) {
    SerialExec exec;
    TableOptions options = TierOptions(4);
    options.evict_strategy = strategy;
    Subject t = this->Make(options, 100, &exec);
    const Keys cold = Progression(0, 100), hot = Progression(1000, 50);
    t.FindOrInsert(cold);
    t.FindOrInsert(hot);  // in the host tier
    for (int round = 0; round < 10; ++round) {
      t.FindOrInsert(hot);
      if (strategy == EvictStrategy::kScore) {
        ASSERT_TRUE(t.SetScores(hot, std::vector<Score>(50, 5)).ok());
      }
      Promote(t);
      t.Check();
    }
    const uint64_t before = t.stats().device_hits;
    t.Find(hot);
    EXPECT_EQ(t.stats().device_hits - before, 50u);
    EXPECT_EQ(t.stats().promotions, 50u);
    const int64_t score = strategy == EvictStrategy::kScore ? 5 : 11;
    EXPECT_EQ(t.Scores(hot), std::vector<int64_t>(50, score));
    const int64_t least = strategy == EvictStrategy::kScore ? 0 : 1;
    EXPECT_EQ(t.Scores(cold), std::vector<int64_t>(100, least));
    // Rows with equal scores stay where they are.
    t.Find(cold);
    Promote(t);
    EXPECT_EQ(t.stats().promotions, 50u);
  }
}

// An inserting lookup moves all rows that it reads to the device tier, in place of the rows that
// were not read for longest.
TYPED_TEST_P(Tiers, InsertingLookupsPromoteWhatTheyRead) {
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 100, &exec);
  const Keys first = Progression(0, 100), second = Progression(1000, 50);
  const Keys third = Progression(2000, 50);
  for (const Keys& keys : {first, second, third}) t.FindOrInsert(keys);
  const auto promoted = [&](const Keys& keys) {
    const TableStats before = t.stats();
    EXPECT_EQ(t.LookupOrInsert(keys), t.Read(keys));
    t.Check();
    const TableStats after = t.stats();
    EXPECT_EQ(after.hits - before.hits, keys.size());
    // Rows of the host tier count as such, although they have moved.
    const uint64_t moved = after.promotions - before.promotions;
    EXPECT_EQ(after.device_hits - before.device_hits, keys.size() - moved);
    return moved;
  };
  const auto in_device = [&](const Keys& keys) {
    const uint64_t before = t.stats().device_hits;
    t.Find(keys);
    return t.stats().device_hits - before;
  };
  EXPECT_EQ(promoted(second), 50u);
  EXPECT_EQ(promoted(third), 50u);
  EXPECT_EQ(promoted(third), 0u);
  EXPECT_EQ(promoted(second), 0u);  // rows of `first` were older
  const Keys read(second.begin(), second.begin() + 25), unread(second.begin() + 25, second.end());
  const Keys cold(first.begin(), first.begin() + 50);
  Keys mixed = read;
  mixed.insert(mixed.end(), cold.begin(), cold.end());
  EXPECT_EQ(promoted(mixed), 50u);
  EXPECT_EQ(in_device(read), 25u);  // rows of the batch that were there have stayed
  EXPECT_EQ(in_device(unread), 0u);
  EXPECT_EQ(in_device(cold), 50u);
  EXPECT_EQ(in_device(third), 25u);
}

TYPED_TEST_P(Tiers, InsertingLookupsReadMoreThanTheDeviceTierHolds) {
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 10, &exec);
  t.FindOrInsert(Progression(0, 10));
  Keys keys = Progression(100, 50);
  t.FindOrInsert(keys);
  keys.insert(keys.end(), keys.begin(), keys.begin() + 20);  // a repeated id is one candidate
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(t.LookupOrInsert(keys), t.Read(keys));
    EXPECT_EQ(t.stats().promotions, 10u);  // once all rows of the device tier are read, none moves
    t.Check();
  }
}

// Rows are promoted by the time of their last access. In a table whose scores are no times, an
// inserting lookup leaves rows where they are.
TYPED_TEST_P(Tiers, InsertingLookupsPromoteByTimeOnly) {
  SerialExec exec;
  TableOptions options = TierOptions(4);
  options.evict_strategy = EvictStrategy::kLfu;
  Subject t = this->Make(options, 10, &exec);
  t.FindOrInsert(Progression(0, 20));
  for (int i = 0; i < 5; ++i) t.LookupOrInsert(Progression(10, 10));
  EXPECT_EQ(t.stats().promotions, 0u);
  Promote(t);
  EXPECT_EQ(t.stats().promotions, 10u);
  t.Check();
}

// A scan that reads each row once, such as an export for serving, moves no row.
TYPED_TEST_P(Tiers, ScanMovesNoRow) {
  SKIP_UNDER_TSAN("a test of which rows are chosen, not of threads");
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 100, &exec);
  const Keys hot = Progression(0, 100);
  t.FindOrInsert(hot);
  t.FindOrInsert(Progression(1000, 1000));
  for (int round = 0; round < 20; ++round) {
    t.Find(hot);
    t.Find(Progression(1000 + 50 * static_cast<uint64_t>(round), 50));
    Promote(t);
  }
  EXPECT_EQ(t.stats().promotions, 0u);
  const uint64_t before = t.stats().device_hits;
  t.Find(hot);
  EXPECT_EQ(t.stats().device_hits - before, 100u);
}

// A candidate that is erased, or whose row is given to another key, is not promoted.
TYPED_TEST_P(Tiers, ErasedCandidatesAreNotPromoted) {
  SKIP_UNDER_TSAN("a test of which rows are chosen, not of threads");
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 10, &exec);
  t.FindOrInsert(Progression(0, 10));
  const Keys hot = Progression(100, 30);
  for (int round = 0; round < 30; ++round) {
    t.FindOrInsert(hot);
    t.FindOrInsert(hot);
    t.Erase(Progression(100 + static_cast<uint64_t>(round), 5));
    if (round % 2 == 0) t.FindOrInsert(Progression(1000, 3));
    Promote(t);
    t.Check();
    t.Erase(Progression(1000, 3));
    t.Check();
  }
  EXPECT_GT(t.stats().promotions, 0u);
}

TYPED_TEST_P(Tiers, DeviceTierOfNoRows) {
  SerialExec exec;
  Subject t = this->Make(TierOptions(4), 0, &exec);
  t.FindOrInsert(Progression(0, 50));
  t.Find(Progression(0, 50));
  Promote(t);
  EXPECT_EQ(t.stats().device_rows, 0u);
  EXPECT_EQ(t.stats().promotions, 0u);
  t.Check();
}

// A table four times as large as its device tier trains to the same bits as a table that fits, and
// as a host table. Rows move between lookups, gradients and erasures.
TYPED_TEST_P(Tiers, TrainsToTheSameBits) {
  const size_t steps = TypeParam::kSlowness > 1 ? 8 : 60;
  const size_t keys_each = TypeParam::kSlowness > 1 ? 60 : 2000;
  const uint64_t key_range = 4 * keys_each;
  const OptimizerFlags flags;
  const std::vector<int64_t> widths = StateWidths(OptimizerKind::kAdam, flags, 8);
  const StateSpec spec{"adam", widths, {0.0f, 0.0f}};
  ThreadsExec threads(3);
  SerialExec serial;
  std::unique_ptr<Table> on_host;
  ASSERT_TRUE(Table::Create(TierOptions(8), &on_host).ok());
  Subject host(std::move(on_host), &serial);
  Subject fits = this->Make(TierOptions(8), -1, &threads);
  Subject hybrid = this->Make(TierOptions(8), static_cast<int64_t>(key_range / 4), &threads, 16);
  for (Subject* t : {&host, &fits, &hybrid}) {
    ASSERT_TRUE((*t)->AttachState(t->exec(), spec).ok());
  }
  const Zipf zipf(key_range, 1.05);
  Random random(11);
  for (size_t step = 1; step <= steps; ++step) {
    Keys keys(keys_each);
    for (uint64_t& key : keys) key = MixKey(zipf.Draw(random));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    Floats gradients(keys.size() * 8);
    for (float& g : gradients) g = random.Value() / 3.0f;
    const Keys gone = {MixKey(random.Below(key_range)), MixKey(random.Below(key_range))};
    Hyper hyper;
    hyper.iteration = static_cast<float>(step);
    const RowOptimizer adam(OptimizerKind::kAdam, flags, hyper, 8);
    for (Subject* t : {&host, &fits, &hybrid}) {
      const RowIds rows = t->FindOrInsert(keys);
      if (step % 3 != 0) Promote(*t);  // between forward and backward: moves rows that were found
      t->Apply(adam, keys, rows, gradients);
      if (step % 3 != 1) Promote(*t);
      if (step % 4 == 0) t->Erase(gone);
    }
    const Floats expected = host.Lookup(keys);
    ASSERT_EQ(fits.Lookup(keys), expected) << step;
    ASSERT_EQ(hybrid.Lookup(keys), expected) << step;
  }
  EXPECT_GT(hybrid.stats().promotions, keys_each / 4);
  EXPECT_EQ(hybrid.stats().dropped_gradients, 0u);
  const auto sorted = [](const Subject& t) {
    std::vector<Exported> all = t.Export();
    std::sort(all.begin(), all.end(),
              [](const Exported& a, const Exported& b) { return a.key < b.key; });
    for (Exported& row : all) row.row = 0;
    return all;
  };
  const std::vector<Exported> expected = sorted(host);
  EXPECT_TRUE(sorted(fits) == expected);
  EXPECT_TRUE(sorted(hybrid) == expected);
  hybrid.Check();
}

// Random batches with ten million keys in all, fewer where that would be slow. Each key has a row
// in one tier, with the vector that was last written to it.
TYPED_TEST_P(Tiers, RandomStateMachine) {
  const size_t operations = TypeParam::kSlowness > 1 ? 20000 : kSanitized ? 200000 : 10000000;
  constexpr size_t kBatch = TypeParam::kSlowness > 1 ? 100 : 1000;
  constexpr uint64_t kKeys = 20 * kBatch;
  ThreadsExec exec(kSanitized ? 3 : 2);
  Subject t = this->Make(TierOptions(1), 3 * kBatch, &exec);
  std::unordered_map<uint64_t, float> model;
  Random random(5);
  const Zipf zipf(kKeys, 1.05);
  float written = 0;
  for (size_t done = 0; done < operations; done += kBatch) {
    Keys keys(kBatch);
    for (uint64_t& key : keys) key = MixKey(zipf.Draw(random));
    switch (random.Below(8)) {
      case 0:
        t.Erase(Keys(keys.begin(), keys.begin() + kBatch / 5));
        for (size_t i = 0; i < kBatch / 5; ++i) model.erase(keys[i]);
        break;
      case 1:
      case 2: {
        Floats values(kBatch);
        for (size_t i = 0; i < kBatch; ++i) model[keys[i]] = values[i] = ++written;
        if (written > 1e6f) written = 0;
        t.Upsert(keys, values);
        break;
      }
      case 3: {
        const std::vector<char> held = t.Contains(keys);
        for (size_t i = 0; i < kBatch; ++i) ASSERT_EQ(held[i] != 0, model.count(keys[i]) != 0);
        break;
      }
      default: {
        const Floats got = t.Lookup(keys, {-5.0f});
        for (size_t i = 0; i < kBatch; ++i) {
          const auto at = model.find(keys[i]);
          ASSERT_EQ(got[i], at == model.end() ? -5.0f : at->second) << keys[i];
        }
      }
    }
    if (random.Below(2) == 0) Promote(t);
    if (done % (operations / 100) == 0) t.Check();
    ASSERT_EQ(t.size(), model.size());
  }
  t.Check();
  EXPECT_GT(t.stats().promotions, operations / 2000);
}

// Under zipf(1.05), at least 85% of the reads hit a device tier of a tenth of the rows. The ideal,
// with the most frequent rows always in the device tier, is 88.4%.
TYPED_TEST_P(Tiers, HitRateUnderZipf) {
  if (kSanitized || TypeParam::kSlowness > 1)
    GTEST_SKIP() << "slow, and the hit rate is the same on simulated threads";
  constexpr size_t kRows = 1000000;
  constexpr size_t kBatch = 65536;
  ThreadsExec exec(2);
  Subject t = this->Make(TierOptions(1), kRows / 10, &exec);
  const Zipf zipf(kRows, 1.05);
  // The frequency of a row is independent of the time of its insertion.
  Keys ids = Progression(0, kRows);
  Random random(3);
  for (size_t i = kRows; i > 1; --i) std::swap(ids[i - 1], ids[random.Below(i)]);
  for (size_t i = 0; i < kRows; i += kBatch) {
    t.FindOrInsert(Progression(i, std::min(kBatch, kRows - i)));
  }
  uint64_t reads = 0, hits = 0;
  constexpr size_t kBatches = 6 * kRows / kBatch, kMeasured = kRows / kBatch;
  for (size_t b = 0; b < kBatches; ++b) {
    Keys keys(kBatch);
    for (uint64_t& key : keys) key = ids[zipf.Draw(random)];
    const uint64_t before = t.stats().device_hits;
    t.Find(keys);
    if (b + kMeasured >= kBatches) {
      hits += t.stats().device_hits - before;
      reads += kBatch;
    }
    Promote(t);
  }
  const double rate = static_cast<double>(hits) / static_cast<double>(reads);
  EXPECT_GE(rate, 0.85);
  EXPECT_LE(rate, zipf.Share(kRows / 10) + 0.005);
  this->RecordProperty("hit_rate", std::to_string(rate));
  t.Check();
}

REGISTER_TYPED_TEST_SUITE_P(Tiers, RowsFillTheDeviceTierFirst, StateUsesRoomOfTheDeviceTier,
                            HotRowsArePromoted, RowsWithHighScoresArePromoted,
                            InsertingLookupsPromoteWhatTheyRead,
                            InsertingLookupsReadMoreThanTheDeviceTierHolds,
                            InsertingLookupsPromoteByTimeOnly, ScanMovesNoRow,
                            ErasedCandidatesAreNotPromoted, DeviceTierOfNoRows, TrainsToTheSameBits,
                            RandomStateMachine, HitRateUnderZipf);

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_TIERS_SUITE_H_
