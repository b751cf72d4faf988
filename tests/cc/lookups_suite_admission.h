// Contract of fused lookups in tables with admission: counting for all lookups of a call together,
// what refused ids add to their bags, and gradients. Typed by a Place, as lookups_suite.h; host
// memory is one, too.
#ifndef DYNEMB_TESTS_CC_LOOKUPS_SUITE_ADMISSION_H_
#define DYNEMB_TESTS_CC_LOOKUPS_SUITE_ADMISSION_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/admission_line.h"
#include "tests/cc/lookups_world.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {

template <class Place>
class LookupsAdmissionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Place::Missing().empty()) GTEST_SKIP() << Place::Missing();
  }
};
TYPED_TEST_SUITE_P(LookupsAdmissionTest);

constexpr float kAdmissionInitial = 5.0f;

// A table of dim 2 in device memory, if the place has any.
inline TableOptions AdmissionTable(int64_t times, Unadmitted unadmitted) {
  TableOptions options;
  options.name = "admission";
  options.dim = 2;
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = 2000;
  options.initializer = {{InitKind::kConstant, kAdmissionInitial, 0.0f}};
  options.admission.rule = Admit::kFrequency;
  options.admission.unadmitted = unadmitted;
  options.admission.times = times;
  options.admission.lines = options.admission.num_lines = 20000;
  return options;
}

inline uint32_t CountOf(const Table& table, Exec& exec, const void* key) {
  Table::KeyState state;
  table.Explain(exec, {table.options().key_type, key, 1}, &state);
  return state.admission_count;
}

inline std::vector<uint64_t> CountersOf(Table* table, Exec& exec, Tick tick) {
  SavedRows saved(size_t{1} << 30);
  const Status status = table->BeginCut(exec, tick, 0, CutOf::kRows, &saved, 0);
  EXPECT_TRUE(status.ok()) << status.message();
  if (!status.ok()) return {};
  const std::vector<uint64_t> counters = table->cut()->admission;
  table->EndCut();
  return counters;
}

// The first `n` keys of which no two have the same counter.
inline Keys KeysOfOwnCounters(size_t n, const AdmissionOptions& options) {
  AdmissionLines lines;
  lines.lines = lines.num = options.lines;
  Keys keys;
  std::set<std::pair<uint32_t, uint32_t>> taken;
  for (uint64_t key = 0; keys.size() < n; ++key) {
    const AdmissionLines::Place place = lines.Of(key);
    if (taken.emplace(place.line, place.fingerprint).second) keys.push_back(key);
  }
  return keys;
}

// Random lookups of one and of several tasks. The model has a counter for each key, so there must
// be enough of them.
TYPED_TEST_P(LookupsAdmissionTest, AgreesWithAModel) {
  constexpr uint32_t kTimes = 4;
  constexpr size_t kDim = 2;
  World<TypeParam> world;
  ASSERT_TRUE(world.Add(AdmissionTable(kTimes, Unadmitted::kZeros)).ok());
  Random random(23);
  std::map<uint64_t, uint32_t> counts;
  std::set<uint64_t> rows;
  uint64_t refused = 0;
  const uint64_t most = kSanitized ? 600 : TypeParam::kMostIds;
  const Keys keys = KeysOfOwnCounters(4 * most, world.table(0).options().admission);
  for (Tick tick = 1; tick <= Longer(25); ++tick) {
    std::vector<Ask> asks;
    std::map<uint64_t, uint32_t> times;
    for (size_t feature = 0; feature <= tick % 3; ++feature) {
      Ask ask;
      ask.table = 0;
      ask.combiner = Combiner::kSum;
      ask.uniform = true;
      ask.repeats = false;
      ask.keys.resize(1 + random.Below(most));
      ask.num_bags = static_cast<int64_t>(ask.keys.size());
      for (uint64_t& key : ask.keys) key = keys[random.Below(random.Below(keys.size()) + 1)];
      for (uint64_t key : ask.keys) ++times[key];
      asks.push_back(ask);
    }
    typename World<TypeParam>::Step step;
    Outcome outcome;
    ASSERT_TRUE(world.Pool(asks, tick, true, &step, &outcome).ok());
    for (const auto& [key, n] : times) {
      if (rows.count(key) != 0) continue;
      counts[key] += n;
      if (counts[key] >= kTimes) {
        rows.insert(key);
      } else {
        refused += n;
      }
    }
    for (size_t a = 0; a < asks.size(); ++a) {
      const RowIds found = step.arrays.Down(step.pools[a].rows, asks[a].keys.size());
      Floats pooled(asks[a].keys.size() * kDim);
      std::memcpy(pooled.data(), outcome.pooled[a].data(), outcome.pooled[a].size());
      for (size_t i = 0; i < asks[a].keys.size(); ++i) {
        const bool has = rows.count(asks[a].keys[i]) != 0;
        ASSERT_EQ(found[i] == kUnadmittedRow, !has) << "key " << asks[a].keys[i];
        ASSERT_EQ(pooled[i * kDim], has ? kAdmissionInitial : 0.0f);
      }
    }
    ASSERT_EQ(world.table(0).size(), rows.size());
    ASSERT_EQ(world.table(0).stats().unadmitted, refused);
    world.table(0).CheckInvariants();
  }
  typename TypeParam::Arrays arrays;
  size_t checked = 0;
  for (const auto& [key, count] : counts) {
    if (++checked > 1000) break;
    const bool has = rows.count(key) != 0;
    const uint64_t* const at = arrays.Up(Keys{key});
    ASSERT_EQ(CountOf(world.table(0), TypeParam::exec(), at), has ? 0 : count);
  }
}

// The sum, divisor and gradients of bags with refused ids.
TYPED_TEST_P(LookupsAdmissionTest, PoolsWithoutSkippedIds) {
  for (const bool insert : {true, false}) {
    for (const bool weighted : {true, false}) {
      for (const Combiner combiner : {Combiner::kMean, Combiner::kSqrtn, Combiner::kSum}) {
        SCOPED_TRACE(testing::Message() << insert << weighted << " " << static_cast<int>(combiner));
        World<TypeParam> world;
        ASSERT_TRUE(world.Add(AdmissionTable(2, Unadmitted::kSkip)).ok());
        Ask admit{0, Combiner::kSum, {1, 1, 2, 2, 3, 3}, {}, 6, true, {}, false};
        typename World<TypeParam>::Step first_step, step;
        Outcome first_outcome, outcome;
        ASSERT_TRUE(world.Pool({admit}, 1, true, &first_step, &first_outcome).ok());
        // Bags {1, 8, 2}, {}, {9}, {3}.
        Ask ask{0, combiner, {1, 8, 2, 9, 3}, {0, 0, 0, 2, 3}, 4, false, {}, false};
        if (weighted) ask.weights = {2, 10, 3, 10, 4};
        const std::vector<Ask> asks{ask};  // the bags refer to it
        ASSERT_TRUE(world.Pool(asks, 2, insert, &step, &outcome).ok());
        const RowIds rows = step.arrays.Down(step.pools[0].rows, 5);
        EXPECT_EQ(rows[1], kSkippedRow);
        EXPECT_EQ(rows[3], kSkippedRow);
        Floats pooled(8);
        std::memcpy(pooled.data(), outcome.pooled[0].data(), outcome.pooled[0].size());
        const float a = weighted ? 2 : 1, b = weighted ? 3 : 1, c = weighted ? 4 : 1;
        const float first = combiner == Combiner::kSum    ? 1
                            : combiner == Combiner::kMean ? 1 / (a + b)
                                                          : 1 / std::sqrt(a * a + b * b);
        const float last = combiner == Combiner::kSum ? 1 : 1 / c;
        EXPECT_FLOAT_EQ(pooled[0], kAdmissionInitial * (a + b) * first);
        EXPECT_EQ(Bits({pooled[2], pooled[3], pooled[4], pooled[5]}), Bits({0, 0, 0, 0}));
        EXPECT_FLOAT_EQ(pooled[6], kAdmissionInitial * c * last);

        BackwardTask back;
        back.keys = step.pools[0].keys;
        back.rows = step.pools[0].rows;
        back.bags = &step.bags[0];
        back.weights = step.pools[0].weights;
        back.combiner = combiner;
        back.upstream = step.arrays.Up(Floats(8, 1.0f));
        back.dim = 2;
        BackwardOutput out;
        const auto allocate = [&](size_t, size_t n, BackwardOutput* output) {
          EXPECT_EQ(n, 5u);
          out.keys = step.arrays.Up(Keys(n));
          out.rows = step.arrays.Up(RowIds(n));
          out.sums = step.arrays.Up(Floats(2 * n));
          *output = out;
          return Status();
        };
        ASSERT_TRUE(TypeParam::lookups().SumGradients(TypeParam::exec(), {back}, allocate).ok());
        const Keys unique = step.arrays.Down(static_cast<const uint64_t*>(out.keys), 5);
        const Floats sums = step.arrays.Down(out.sums, 10);
        std::map<uint64_t, float> gradient;
        for (size_t u = 0; u < 5; ++u) gradient[unique[u]] = sums[2 * u];
        EXPECT_FLOAT_EQ(gradient[1], a * first);
        EXPECT_FLOAT_EQ(gradient[2], b * first);
        EXPECT_FLOAT_EQ(gradient[3], c * last);
        EXPECT_EQ(gradient[8], 0);
        EXPECT_EQ(gradient[9], 0);
      }
    }
  }
}

// Training steps of four tables, of which one or two count, the others draw, and one admits every
// key; in one round a cut is being read, in another rows make up for missed steps. All outputs,
// gradients, rows, counters and counts are the same as on the host.
TYPED_TEST_P(LookupsAdmissionTest, TrainsLikeTheHost) {
  constexpr Unadmitted kAll[] = {Unadmitted::kSkip, Unadmitted::kZeros, Unadmitted::kInitial};
  for (size_t round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    std::vector<TableOptions> options = FourTables(24);
    for (size_t t = 0; t < 3; ++t) {
      AdmissionOptions& admission = options[t].admission;
      admission.unadmitted = kAll[(t + round) % 3];
      admission.rule = (t + round) % 2 == 0 ? Admit::kFrequency : Admit::kProbability;
      admission.times = 3;
      admission.probability = 0.2;
      // So few lines that keys are pushed out. The lines of the tables follow each other.
      admission.lines = admission.num_lines = 2 + static_cast<int64_t>(t);
    }
    const bool cuts = round == 1, catches_up = round == 2;
    const OptimizerKind kind = catches_up ? OptimizerKind::kSgd : OptimizerKind::kAdagrad;
    OptimizerFlags flags;
    flags.catch_up = flags.momentum = catches_up;
    World<TypeParam> device;
    World<HostPlace> host;
    SavedRows saved(size_t{1} << 30), saved_there(size_t{1} << 30);
    for (size_t t = 0; t < options.size(); ++t) {
      ASSERT_TRUE(device.Add(options[t]).ok());
      ASSERT_TRUE(host.Add(options[t]).ok());
      StateSpec spec;
      spec.optimizer = catches_up ? "sgd momentum catch_up" : "adagrad";
      spec.widths = StateWidths(kind, flags, options[t].dim);
      spec.inits.assign(spec.widths.size(), catches_up ? 0.0f : 0.1f);
      ASSERT_TRUE(device.table(t).AttachState(TypeParam::exec(), spec).ok());
      ASSERT_TRUE(host.table(t).AttachState(HostPlace::exec(), spec).ok());
      ASSERT_EQ(device.table(t).catch_up().enabled(), catches_up);
    }
    Random random(5 + round);
    uint64_t keys = 60;
    size_t with_refused = 0;
    for (Tick tick = 2; tick < 2 * TypeParam::kSteps; tick += 2, keys += 15) {
      SCOPED_TRACE(tick);
      const std::vector<Ask> asks = SevenAsks(random, keys);
      const std::vector<Floats> upstream = Upstreams(random, asks, options);
      for (size_t t = 0; cuts && tick == 6 && t < options.size(); ++t) {
        Table &here = device.table(t), &there = host.table(t);
        ASSERT_TRUE(here.BeginCut(TypeParam::exec(), 5, 0, CutOf::kRows, &saved, t).ok());
        ASSERT_TRUE(there.BeginCut(HostPlace::exec(), 5, 0, CutOf::kRows, &saved_there, t).ok());
      }
      Outcome got, want;
      const Status status = device.Train(asks, upstream, kind, tick, &got, flags);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(host.Train(asks, upstream, kind, tick, &want, flags).ok());
      ExpectSame(got, want);
      // Lookups that do not insert.
      typename World<TypeParam>::Step step;
      World<HostPlace>::Step host_step;
      ASSERT_TRUE(device.Pool(asks, tick + 1, false, &step, &got).ok());
      ASSERT_TRUE(host.Pool(asks, tick + 1, false, &host_step, &want).ok());
      ExpectSame(got, want);
      for (size_t a = 0; a < asks.size(); ++a) {
        const RowIds rows = step.arrays.Down(step.pools[a].rows, asks[a].keys.size());
        for (size_t i = 0; i < rows.size(); ++i) {
          const RowId there = host_step.pools[a].rows[i];
          ASSERT_EQ(IsRow(rows[i]), IsRow(there)) << a << " " << i;
          if (!IsRow(there)) {
            ASSERT_EQ(rows[i], there) << a << " " << i;
          }
          with_refused += IsRefused(there);
        }
      }
      for (size_t t = 0; t < options.size(); ++t) {
        ASSERT_TRUE(device.table(t).Promote(TypeParam::exec(), tick + 1).ok());
      }
      if (this->HasFailure()) return;
    }
    EXPECT_GT(with_refused, 100u);
    for (size_t t = 0; t < options.size(); ++t) {
      SCOPED_TRACE(options[t].name);
      if (cuts) {
        device.table(t).EndCut();
        host.table(t).EndCut();
      }
      const Tick tick = 2 * TypeParam::kSteps + 10;
      EXPECT_EQ(CountersOf(&device.table(t), TypeParam::exec(), tick),
                CountersOf(&host.table(t), HostPlace::exec(), tick));
      ExpectSameTable(device, host, t, keys);
      const TableStats d = device.table(t).stats(), h = host.table(t).stats();
      EXPECT_EQ(d.unadmitted, h.unadmitted);
      EXPECT_EQ(d.unadmitted != 0, t != 3);
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(LookupsAdmissionTest, AgreesWithAModel, PoolsWithoutSkippedIds,
                            TrainsLikeTheHost);

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_LOOKUPS_SUITE_ADMISSION_H_
