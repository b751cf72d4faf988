// Tables with admission, against a model: which keys have rows, what lookups return for the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cc/lookup/backward.h"
#include "cc/lookup/pool.h"
#include "cc/table/snapshot.h"
#include "cc/table/table.h"
#include "tests/cc/execs.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

constexpr int64_t kDim = 2;
constexpr float kInitial = 5.0f;

TableOptions Options(int64_t times, Unadmitted unadmitted = Unadmitted::kZeros) {
  TableOptions options;
  options.name = "admission";
  options.dim = kDim;
  options.initializer = {{InitKind::kConstant, kInitial, 0.0f}};
  options.admission.rule = Admit::kFrequency;
  options.admission.unadmitted = unadmitted;
  options.admission.times = times;
  options.admission.lines = options.admission.num_lines = 1000;
  return options;
}

std::unique_ptr<Table> Make(const TableOptions& options) {
  std::unique_ptr<Table> table;
  const Status status = Table::Create(options, &table);
  EXPECT_TRUE(status.ok()) << status.message();
  return table;
}

KeySpan Span(const std::vector<uint64_t>& keys) { return {keys.data(), keys.size()}; }

struct Found {
  std::vector<float> vectors;
  std::vector<RowId> rows;
};

// LookupCounted, or LookupOrInsert if there are no times.
Found LookUp(Table* table, Exec& exec, const std::vector<uint64_t>& keys, Tick tick,
             const std::vector<uint32_t>& times = {}) {
  Found found{std::vector<float>(keys.size() * kDim, -1), std::vector<RowId>(keys.size(), 7)};
  const Status status =
      times.empty()
          ? table->LookupOrInsert(exec, Span(keys), tick, found.vectors.data(), found.rows.data())
          : table->LookupCounted(exec, Span(keys), times.data(), tick, found.vectors.data(),
                                 found.rows.data());
  EXPECT_TRUE(status.ok()) << status.message();
  return found;
}

std::vector<bool> Has(const Table& table, const std::vector<uint64_t>& keys) {
  SerialExec exec;
  std::unique_ptr<bool[]> found(new bool[keys.size()]);
  table.Contains(exec, Span(keys), found.get());
  return std::vector<bool>(found.get(), found.get() + keys.size());
}

std::vector<uint32_t> CountsOf(const Table& table, const std::vector<uint64_t>& keys) {
  SerialExec exec;
  std::vector<Table::KeyState> states(keys.size());
  table.Explain(exec, Span(keys), states.data());
  std::vector<uint32_t> counts;
  for (const auto& state : states) counts.push_back(state.admission_count);
  return counts;
}

TEST(AdmissionTable, RepeatsCountAndAllOccurrencesOfABatchAreAdmitted) {
  SerialExec exec;
  auto table = Make(Options(3));
  Found found = LookUp(table.get(), exec, {1, 2, 1, 3, 3, 3}, 1);
  EXPECT_EQ(found.vectors, (std::vector<float>{0, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5}));
  EXPECT_EQ(found.rows[0], kUnadmittedRow);
  EXPECT_EQ(found.rows[2], kUnadmittedRow);
  EXPECT_EQ(found.rows[3], found.rows[5]);
  EXPECT_EQ(Has(*table, {1, 2, 3}), (std::vector<bool>{false, false, true}));
  EXPECT_EQ(CountsOf(*table, {1, 2, 3, 4}), (std::vector<uint32_t>{2, 1, 0, 0}));
  EXPECT_EQ(table->stats().unadmitted, 3u);
  EXPECT_EQ(table->stats().inserts, 1u);
  EXPECT_EQ(table->stats().refused, 0u);
  found = LookUp(table.get(), exec, {1, 2}, 2);
  EXPECT_EQ(found.vectors, (std::vector<float>{5, 5, 0, 0}));
  EXPECT_EQ(table->stats().unadmitted, 4u);
}

TEST(AdmissionTable, OccurrencesOnOtherRanksCount) {
  SerialExec exec;
  auto table = Make(Options(10));
  LookUp(table.get(), exec, {1, 2, 1}, 1, {4, 9, 5});
  EXPECT_EQ(CountsOf(*table, {1, 2}), (std::vector<uint32_t>{9, 9}));
  LookUp(table.get(), exec, {1, 2}, 2, {1, 1});
  EXPECT_EQ(Has(*table, {1, 2}), (std::vector<bool>{true, true}));
  EXPECT_EQ(table->stats().unadmitted, 18u);
}

TEST(AdmissionTable, OnlyLookupsThatInsertCountAndRefuse) {
  SerialExec exec;
  auto table = Make(Options(2));
  Found found{std::vector<float>(kDim, -1), {7}};
  const std::vector<uint64_t> one{1};
  table->Lookup(exec, Span(one), 1, nullptr, found.vectors.data(), found.rows.data());
  EXPECT_EQ(found.rows[0], kUnadmittedRow);
  EXPECT_EQ(found.vectors, (std::vector<float>{0, 0}));
  const float given[] = {3, 4};
  table->Lookup(exec, Span(one), 2, given, found.vectors.data(), found.rows.data());
  EXPECT_EQ(found.vectors, (std::vector<float>{3, 4}));
  EXPECT_EQ(CountsOf(*table, {1}), std::vector<uint32_t>{0});
  EXPECT_EQ(table->stats().unadmitted, 0u);
  // Other calls that create rows.
  const std::vector<std::vector<uint64_t>> keys{{1}, {2}, {3}, {4}};
  EXPECT_TRUE(table->Upsert(exec, Span(keys[0]), given, 3).ok());
  EXPECT_TRUE(table->Accumulate(exec, Span(keys[1]), given, 4).ok());
  EXPECT_TRUE(table->WriteRows(exec, Span(keys[2]), given, nullptr, true, 1, 5).ok());
  EvictedRows evicted(table->layout());
  EXPECT_TRUE(table->InsertAndEvict(exec, Span(keys[3]), 6, found.rows.data(), &evicted).ok());
  EXPECT_EQ(Has(*table, {1, 2, 3, 4}), (std::vector<bool>{true, true, true, true}));
}

TEST(AdmissionTable, AKeyThatLostItsRowIsCountedAgain) {
  SerialExec exec;
  auto table = Make(Options(2));
  LookUp(table.get(), exec, {1, 1}, 1);
  EXPECT_EQ(table->Erase(exec, Span({1}), 2, Removal::kErase), 1u);
  LookUp(table.get(), exec, {1}, 3);
  EXPECT_EQ(Has(*table, {1}), std::vector<bool>{false});
  EXPECT_EQ(CountsOf(*table, {1}), std::vector<uint32_t>{1});
  // Erasing keys without rows leaves their counts; wiping them does not.
  table->Erase(exec, Span({1}), 4, Removal::kErase);
  EXPECT_EQ(CountsOf(*table, {1}), std::vector<uint32_t>{1});
  table->Erase(exec, Span({1}), 5, Removal::kWipe);
  EXPECT_EQ(CountsOf(*table, {1}), std::vector<uint32_t>{0});
  LookUp(table.get(), exec, {1}, 6);
  EXPECT_TRUE(table->Clear(exec, 7).ok());
  EXPECT_EQ(CountsOf(*table, {1}), std::vector<uint32_t>{0});
}

TEST(AdmissionTable, GradientsOfRefusedKeysAreNotDroppedGradients) {
  SerialExec exec;
  auto table = Make(Options(2));
  const Found found = LookUp(table.get(), exec, {1, 2, 2}, 1);
  const RowOptimizer sgd(OptimizerKind::kSgd, OptimizerFlags{}, Hyper{}, kDim);
  const std::vector<uint64_t> keys{1, 2};
  const RowId rows[] = {found.rows[0], found.rows[1]};
  const float gradients[] = {1, 1, 1, 1};
  table->ApplyRange(exec, sgd, Span(keys), rows, gradients, 0, 2, 1, 2);
  EXPECT_EQ(table->stats().dropped_gradients, 0u);
  EXPECT_EQ(Has(*table, keys), (std::vector<bool>{false, true}));
}

TEST(AdmissionTable, AFullTableEvictsForAdmittedKeysOnly) {
  SerialExec exec;
  for (const EvictStrategy strategy : {EvictStrategy::kLru, EvictStrategy::kLfu}) {
    TableOptions options = Options(2);
    options.evict_strategy = strategy;
    options.init_capacity = options.max_capacity = 20;
    auto table = Make(options);
    std::vector<uint64_t> twice, once;
    for (uint64_t k = 0; k < 20; ++k) twice.insert(twice.end(), {k, k});
    for (uint64_t k = 100; k < 200; ++k) once.push_back(k);
    LookUp(table.get(), exec, twice, 1);
    LookUp(table.get(), exec, once, 2);
    EXPECT_EQ(table->stats().evictions, 0u);
    once.resize(15);
    // Half of the batch has rows already, which it must not evict.
    std::vector<uint64_t> batch = once;
    for (uint64_t k = 0; k < 5; ++k) batch.push_back(k);
    batch.push_back(500);
    const Found found = LookUp(table.get(), exec, batch, 3);
    EXPECT_EQ(table->stats().evictions, 15u);
    EXPECT_EQ(Has(*table, batch), [&] {
      std::vector<bool> expected(21, true);
      expected.back() = false;
      return expected;
    }());
    EXPECT_EQ(found.rows.back(), kUnadmittedRow);
    table->CheckInvariants();
  }
}

TEST(AdmissionTable, ProbabilityDoesNotDependOnThreadsOrOtherReads) {
  std::vector<uint64_t> keys(30000);
  std::mt19937_64 random(5);
  for (uint64_t& key : keys) key = random() % 20000;
  std::vector<bool> expected;
  ForEachExec([&](Exec& exec) {
    TableOptions options = Options(1);
    options.admission.rule = Admit::kProbability;
    options.admission.probability = 0.25;
    auto table = Make(options);
    Tick tick = 0;
    std::vector<RowId> rows(keys.size());
    for (int batch = 0; batch < 3; ++batch) {
      // A read that does not insert takes a tick, and changes no draw.
      if (exec.parallelism() > 1) table->Find(exec, Span(keys), ++tick, rows.data());
      ASSERT_TRUE(table->FindOrInsert(exec, Span(keys), ++tick, rows.data()).ok());
      table->CheckInvariants();
    }
    if (expected.empty()) expected = Has(*table, keys);
    EXPECT_EQ(Has(*table, keys), expected);
    // A key that occurs m times has a row after three lookups with probability 1 - 0.75^(3 m).
    std::map<uint64_t, int> occurrences;
    for (uint64_t key : keys) ++occurrences[key];
    double mean = 0;
    for (const auto& [key, m] : occurrences) mean += 1 - std::pow(0.75, 3 * m);
    EXPECT_NEAR(static_cast<double>(table->size()), mean, 350);  // five standard deviations
  });
}

// Random lookups of one and of several tasks; the model counts without a limit, so the counters
// must be large enough.
TEST(AdmissionTable, AgreesWithAModel) {
  std::vector<std::set<uint64_t>> rows_of_first_exec;
  ForEachExec([&](Exec& exec) {
    std::mt19937_64 random(23);
    constexpr uint32_t kTimes = 4;
    TableOptions options = Options(kTimes);
    options.admission.lines = options.admission.num_lines = 20000;
    auto table = Make(options);
    std::map<uint64_t, uint32_t> counts;
    std::set<uint64_t> rows;
    uint64_t refused = 0;
    for (Tick tick = 1; tick <= Longer(25); ++tick) {
      const size_t features = tick % 3 + 1;
      std::vector<std::vector<uint64_t>> keys(features);
      std::vector<std::vector<RowId>> found(features);
      std::vector<std::vector<float>> pooled(features);
      std::vector<Bags> bags(features);
      std::vector<PoolTask> tasks(features);
      std::map<uint64_t, uint32_t> times;
      for (size_t f = 0; f < features; ++f) {
        const size_t n = random() % 6000;
        for (size_t i = 0; i < n; ++i) keys[f].push_back(random() % (random() % 20000 + 1));
        for (uint64_t key : keys[f]) ++times[key];
        found[f].resize(n);
        pooled[f].resize(n * kDim);
        const auto size = static_cast<int64_t>(n);
        ASSERT_TRUE(bags[f].InitUniform(1, size, size).ok());
        tasks[f].table = table.get();
        tasks[f].keys = keys[f].data();
        tasks[f].bags = &bags[f];
        tasks[f].rows = found[f].data();
        tasks[f].pooled = pooled[f].data();
      }
      ASSERT_TRUE(Pool(exec, tasks, tick, true).ok());
      for (const auto& [key, n] : times) {
        if (rows.count(key) != 0) continue;
        counts[key] += n;
        if (counts[key] >= kTimes) {
          rows.insert(key);
        } else {
          refused += n;
        }
      }
      for (size_t f = 0; f < features; ++f) {
        for (size_t i = 0; i < keys[f].size(); ++i) {
          const bool has = rows.count(keys[f][i]) != 0;
          ASSERT_EQ(found[f][i] == kUnadmittedRow, !has) << "key " << keys[f][i];
          ASSERT_EQ(pooled[f][i * kDim], has ? kInitial : 0.0f);
        }
      }
      ASSERT_EQ(table->size(), rows.size());
      ASSERT_EQ(table->stats().unadmitted, refused);
      table->CheckInvariants();
    }
    for (const auto& [key, count] : counts) {
      const bool has = rows.count(key) != 0;
      ASSERT_EQ(CountsOf(*table, {key})[0], has ? 0 : count);
    }
  });
}

// The sum, divisor and gradients of bags with refused ids.
TEST(AdmissionTable, PoolsWithoutSkippedIds) {
  SerialExec exec;
  for (const bool insert : {true, false}) {
    for (const bool weighted : {true, false}) {
      for (const Combiner combiner : {Combiner::kMean, Combiner::kSqrtn, Combiner::kSum}) {
        auto table = Make(Options(2, Unadmitted::kSkip));
        LookUp(table.get(), exec, {1, 1, 2, 2, 3, 3}, 1);
        // Bags {1, 8, 2}, {}, {9}, {3}.
        const std::vector<uint64_t> keys{1, 8, 2, 9, 3};
        const std::vector<int64_t> splits{0, 3, 3, 4, 5};
        const std::vector<float> weights{2, 10, 3, 10, 4};
        Bags bags;
        ASSERT_TRUE(bags.InitSplits(exec, splits.data(), 5, 5, 4).ok());
        std::vector<float> pooled(4 * kDim, -1);
        std::vector<RowId> rows(5);
        PoolTask task;
        task.table = table.get();
        task.keys = keys.data();
        task.bags = &bags;
        task.weights = weighted ? weights.data() : nullptr;
        task.combiner = combiner;
        task.pooled = pooled.data();
        task.rows = rows.data();
        ASSERT_TRUE(Pool(exec, {task}, 2, insert).ok());
        EXPECT_EQ(rows[1], kSkippedRow);
        EXPECT_EQ(rows[3], kSkippedRow);
        const float a = weighted ? 2 : 1, b = weighted ? 3 : 1, c = weighted ? 4 : 1;
        const float first = combiner == Combiner::kSum    ? 1
                            : combiner == Combiner::kMean ? 1 / (a + b)
                                                          : 1 / std::sqrt(a * a + b * b);
        const float last = combiner == Combiner::kSum ? 1 : 1 / c;
        EXPECT_FLOAT_EQ(pooled[0], kInitial * (a + b) * first);
        EXPECT_EQ(pooled[2], 0);
        EXPECT_EQ(pooled[4], 0);
        EXPECT_FLOAT_EQ(pooled[6], kInitial * c * last);

        const std::vector<float> upstream{1, 1, 1, 1, 1, 1, 1, 1};
        BackwardTask back;
        back.keys = keys.data();
        back.rows = rows.data();
        back.bags = &bags;
        back.weights = task.weights;
        back.combiner = combiner;
        back.upstream = upstream.data();
        back.dim = kDim;
        Backward backward;
        ASSERT_TRUE(backward.Prepare(exec, &back, 1).ok());
        ASSERT_EQ(backward.num_unique(0), 5u);
        std::vector<uint64_t> unique(5);
        std::vector<float> sums(5 * kDim);
        BackwardOutput out{unique.data(), rows.data(), sums.data()};
        backward.Write(exec, &out);
        std::map<uint64_t, float> gradient;
        for (size_t u = 0; u < 5; ++u) gradient[unique[u]] = sums[u * kDim];
        EXPECT_FLOAT_EQ(gradient[1], a * first);
        EXPECT_FLOAT_EQ(gradient[2], b * first);
        EXPECT_FLOAT_EQ(gradient[3], c * last);
        EXPECT_EQ(gradient[8], 0);
        EXPECT_EQ(gradient[9], 0);
      }
    }
  }
}

// A snapshot has the counters of its watermark, which load into a table with part of the lines.
TEST(AdmissionTable, SnapshotsHaveTheCounters) {
  SerialExec exec;
  auto table = Make(Options(9));
  LookUp(table.get(), exec, {1, 2, 2, 3, 3, 3}, 1);
  Clock clock;
  clock.Advance(10, 0);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Snapshot::Begin(exec, {table.get()}, {0}, false, &clock, &snapshot).ok());
  LookUp(table.get(), exec, {1, 1, 4}, 20);
  const std::vector<uint64_t>& saved = snapshot->admission(0);
  ASSERT_EQ(saved.size(), 8000u);
  EXPECT_EQ(snapshot->first_admission_line(0), 0);
  auto loaded = Make(Options(9));
  LookUp(loaded.get(), exec, {4}, 1);
  ASSERT_TRUE(loaded->LoadAdmission(saved.data(), 0, 1000, false).ok());
  EXPECT_EQ(CountsOf(*loaded, {1, 2, 3, 4}), (std::vector<uint32_t>{1, 2, 3, 0}));
  EXPECT_EQ(CountsOf(*table, {1, 2, 3, 4}), (std::vector<uint32_t>{3, 2, 3, 1}));
  // SwapRows also swaps the counters.
  table->SwapRows(loaded.get(), 30);
  EXPECT_EQ(CountsOf(*table, {1, 2, 3, 4}), (std::vector<uint32_t>{1, 2, 3, 0}));
  EXPECT_EQ(CountsOf(*loaded, {1, 2, 3, 4}), (std::vector<uint32_t>{3, 2, 3, 1}));
  // A table that counts no keys refuses counters.
  TableOptions options = Options(9);
  options.admission = AdmissionOptions();
  EXPECT_FALSE(Make(options)->LoadAdmission(saved.data(), 0, 1000, false).ok());
}

}  // namespace
}  // namespace dynemb
