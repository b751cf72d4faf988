// Pool, WeightGradient and Apply, compared with plain sums in double.
#include "cc/lookup/pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cc/lookup/apply.h"
#include "cc/table/codec.h"
#include "cc/table/table.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

struct Feature {
  std::unique_ptr<Table> table;
  std::vector<int64_t> keys;
  std::vector<int64_t> bag_of;
  std::vector<float> weights;
  Bags bags;
  size_t num_bags;
  Combiner combiner;
  // Pool's outputs
  std::vector<char> pooled;
  std::vector<RowId> rows;
  std::vector<int32_t> argmax;
};

std::unique_ptr<Table> MakeTable(int64_t dim, DType dtype, int64_t max_capacity = 0) {
  TableOptions options;
  options.name = "table";
  options.dim = dim;
  options.dtype = dtype;
  options.init_capacity = 8;
  options.max_capacity = max_capacity;
  options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
  std::unique_ptr<Table> table;
  const Status status = Table::Create(options, &table);
  EXPECT_TRUE(status.ok()) << status.message();
  return table;
}

std::vector<float> AsFloats(const Table& table, const std::vector<char>& vectors) {
  const RowLayout& l = table.layout();
  std::vector<float> floats(vectors.size() / l.vector_bytes() * static_cast<size_t>(l.dim));
  for (size_t i = 0; i < vectors.size() / l.vector_bytes(); ++i) {
    LoadVector(l.dtype, vectors.data() + i * l.vector_bytes(), l.dim,
               floats.data() + i * static_cast<size_t>(l.dim));
  }
  return floats;
}

// The vectors of `keys`; for a key without a row, its initial vector.
std::vector<float> Vectors(Exec& exec, Table& table, const std::vector<int64_t>& keys, Tick tick) {
  std::vector<char> vectors(keys.size() * table.layout().vector_bytes());
  std::vector<RowId> rows(keys.size());
  table.Lookup(exec, {keys.data(), keys.size()}, tick, nullptr, vectors.data(), rows.data());
  return AsFloats(table, vectors);
}

// Random bags, some of them empty. `shuffled`: the ids are in random order of their bags.
Feature MakeFeature(Exec& exec, std::mt19937_64& random, int64_t dim, DType dtype,
                    Combiner combiner, bool weighted, bool shuffled) {
  Feature f;
  f.table = MakeTable(dim, dtype);
  f.num_bags = random() % 40;
  f.combiner = combiner;
  for (size_t b = 0; b < f.num_bags; ++b) {
    for (size_t i = random() % 5 == 0 ? 0 : random() % 30; i > 0; --i) {
      f.bag_of.push_back(static_cast<int64_t>(b));
    }
  }
  if (shuffled) std::shuffle(f.bag_of.begin(), f.bag_of.end(), random);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < f.bag_of.size(); ++i) {
    f.keys.push_back(static_cast<int64_t>(random() % 50) - 25);
    // A sum of weights of both signs may be close to 0; a mean is then too inexact to compare.
    const float w = normal(random);
    if (weighted) f.weights.push_back(combiner == Combiner::kMean ? 0.1f + std::abs(w) : w);
  }
  const auto nnz = static_cast<int64_t>(f.bag_of.size());
  EXPECT_TRUE(
      f.bags.InitIndices(exec, f.bag_of.data(), 1, nnz, static_cast<int64_t>(f.num_bags)).ok());
  f.pooled.resize(f.num_bags * f.table->layout().vector_bytes());
  f.rows.resize(f.keys.size());
  f.argmax.resize(combiner == Combiner::kMax ? f.num_bags * static_cast<size_t>(dim) : 0);
  return f;
}

// A task with the outputs `pooled` and `rows`.
template <class Pooled>
PoolTask TaskOn(Table& table, const std::vector<int64_t>& keys, const Bags& bags,
                std::vector<Pooled>* pooled, std::vector<RowId>* rows) {
  PoolTask task;
  task.table = &table;
  task.keys = keys.data();
  task.bags = &bags;
  task.pooled = pooled->data();
  task.rows = rows->data();
  return task;
}

PoolTask TaskOf(Feature& f) {
  PoolTask task = TaskOn(*f.table, f.keys, f.bags, &f.pooled, &f.rows);
  task.weights = f.weights.empty() ? nullptr : f.weights.data();
  task.combiner = f.combiner;
  task.argmax = f.argmax.data();
  return task;
}

// The pooled vectors, by combiner.h's formulas.
std::vector<double> Expected(const Feature& f, const std::vector<float>& vectors, int64_t dim) {
  std::vector<double> pooled(f.num_bags * static_cast<size_t>(dim), 0.0);
  for (size_t b = 0; b < f.num_bags; ++b) {
    double norm = 0;
    bool first = true;
    for (size_t i = 0; i < f.keys.size(); ++i) {
      if (f.bag_of[i] != static_cast<int64_t>(b)) continue;
      const double w = f.weights.empty() ? 1.0 : f.weights[i];
      norm += f.combiner == Combiner::kMean ? w : w * w;
      for (int64_t c = 0; c < dim; ++c) {
        double& out = pooled[b * static_cast<size_t>(dim) + static_cast<size_t>(c)];
        const double v = w * vectors[i * static_cast<size_t>(dim) + static_cast<size_t>(c)];
        out = f.combiner == Combiner::kMax ? (first ? v : std::max(out, v)) : out + v;
      }
      first = false;
    }
    if (!HasScale(f.combiner) || first) continue;
    const double divisor = f.combiner == Combiner::kMean ? norm : std::sqrt(norm);
    for (int64_t c = 0; c < dim; ++c) {
      pooled[b * static_cast<size_t>(dim) + static_cast<size_t>(c)] /= divisor;
    }
  }
  return pooled;
}

class PoolTest : public testing::TestWithParam<int> {};

TEST_P(PoolTest, AgreesWithPlainSums) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  std::mt19937_64 random(7);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
  const int64_t dims[] = {1, 3, 4, 16, 33, 300};
  Tick tick = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<Feature> features;
    for (size_t t = 0, n = 1 + random() % 5; t < n; ++t) {
      features.push_back(MakeFeature(exec, random, dims[random() % 6], dtypes[random() % 3],
                                     static_cast<Combiner>(random() % 4), random() % 2 == 0,
                                     random() % 2 == 0));
    }
    std::vector<PoolTask> tasks;
    for (Feature& f : features) tasks.push_back(TaskOf(f));
    const bool insert = round % 3 != 0;
    ASSERT_TRUE(Pool(exec, tasks, ++tick, insert).ok());
    for (Feature& f : features) {
      const int64_t dim = f.table->layout().dim;
      EXPECT_TRUE(insert || f.table->size() == 0);
      const std::vector<float> vectors = Vectors(exec, *f.table, f.keys, ++tick);
      const std::vector<double> want = Expected(f, vectors, dim);
      const std::vector<float> got = AsFloats(*f.table, f.pooled);
      double scale = 0;
      for (double w : want) scale = std::max(scale, std::abs(w));
      const double tolerance = scale * (f.table->layout().dtype == DType::kFloat32   ? 1e-5
                                        : f.table->layout().dtype == DType::kFloat16 ? 2e-3
                                                                                     : 2e-2);
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance) << i;
      for (size_t i = 0; i < f.argmax.size(); ++i) {
        const int32_t at = f.argmax[i];
        const size_t bag = i / static_cast<size_t>(dim);
        if (at < 0) {
          EXPECT_EQ(f.bags.begin(bag), f.bags.end(bag));
        } else {
          EXPECT_EQ(f.bag_of[static_cast<size_t>(at)], static_cast<int64_t>(bag));
        }
      }
      f.table->CheckInvariants();
    }
  }
}

TEST_P(PoolTest, TwoFeaturesOfOneTableShareItsRows) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  auto table = MakeTable(4, DType::kFloat32);
  std::vector<int64_t> keys(3000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i % 1000);
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(3, 3000, 1000).ok());
  std::vector<float> pooled[2];
  std::vector<RowId> rows[2];
  std::vector<PoolTask> tasks(2);
  for (int t = 0; t < 2; ++t) {
    pooled[t].resize(1000 * 4);
    rows[t].resize(3000);
    tasks[t] = TaskOn(*table, keys, bags, &pooled[t], &rows[t]);
  }
  ASSERT_TRUE(Pool(exec, tasks, 1, true).ok());
  EXPECT_EQ(table->size(), 1000u);
  table->CheckInvariants();
  EXPECT_EQ(pooled[0], pooled[1]);
  EXPECT_EQ(rows[0], rows[1]);
  EXPECT_EQ(table->stats().misses, 6000u);  // the find pass is before the insert pass
  EXPECT_EQ(table->stats().hits, 0u);
}

// In whatever order bags come: new rows are numbered in the order of the ids, and each id counts
// towards the admission of its key.
TEST_P(PoolTest, NewKeysComeInTheOrderOfTheIds) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  constexpr size_t kIds = 20000, kBags = 700;
  std::mt19937_64 random(3);
  std::vector<int64_t> keys(kIds), bag_of(kIds);
  for (int64_t& key : keys) key = static_cast<int64_t>(random() % 9000);
  for (int64_t& bag : bag_of) bag = static_cast<int64_t>(random() % kBags);
  Bags bags;
  ASSERT_TRUE(bags.InitIndices(exec, bag_of.data(), 1, kIds, kBags).ok());
  ASSERT_NE(bags.order(), nullptr);
  std::map<int64_t, uint32_t> times;
  for (int64_t key : keys) ++times[key];
  for (const uint32_t needed : {0u, 3u}) {
    TableOptions options;
    options.name = "table";
    options.dim = 4;
    if (needed != 0) {
      options.admission.rule = Admit::kFrequency;
      options.admission.times = needed;
      options.admission.lines = options.admission.num_lines = 1 << 16;
    }
    std::unique_ptr<Table> table;
    ASSERT_TRUE(Table::Create(options, &table).ok());
    std::vector<float> pooled(kBags * 4);
    std::vector<RowId> rows(kIds);
    const PoolTask task = TaskOn(*table, keys, bags, &pooled, &rows);
    ASSERT_TRUE(Pool(exec, {task}, 1, true).ok());
    table->CheckInvariants();
    std::map<int64_t, RowId> expected;
    for (size_t i = 0; i < kIds; ++i) {
      if (times[keys[i]] < needed) {
        ASSERT_TRUE(IsRefused(rows[i])) << i;
        continue;
      }
      expected.emplace(keys[i], static_cast<RowId>(expected.size()));
      ASSERT_EQ(rows[i], expected[keys[i]]) << i;
    }
    EXPECT_EQ(table->size(), expected.size());
  }
}

TEST_P(PoolTest, BitsDoNotDependOnThreads) {
  std::vector<std::vector<char>> results;
  for (size_t threads : {size_t{1}, static_cast<size_t>(GetParam()), size_t{4}}) {
    ThreadsExec exec(threads);
    std::mt19937_64 random(11);
    auto table = MakeTable(16, DType::kFloat32);
    std::vector<int64_t> keys(40000);
    for (int64_t& k : keys) k = static_cast<int64_t>(random() % 30000);
    Bags bags;
    ASSERT_TRUE(bags.InitUniform(10, 40000, 4000).ok());
    std::vector<char> pooled(4000 * 64);
    std::vector<RowId> rows(40000);
    PoolTask task = TaskOn(*table, keys, bags, &pooled, &rows);
    task.combiner = Combiner::kMean;
    ASSERT_TRUE(Pool(exec, {task}, 1, true).ok());
    pooled.insert(pooled.end(), reinterpret_cast<char*>(rows.data()),
                  reinterpret_cast<char*>(rows.data() + rows.size()));
    results.push_back(std::move(pooled));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(PoolTest, ErrorNamesTheFullTable) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  auto table = MakeTable(4, DType::kFloat32, 10);
  std::vector<int64_t> keys(11);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, 11, 11).ok());
  std::vector<float> pooled(44);
  std::vector<RowId> rows(11);
  const PoolTask task = TaskOn(*table, keys, bags, &pooled, &rows);
  const Status status = Pool(exec, {task}, 1, true);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("'table'"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("10"), std::string::npos) << status.message();
  EXPECT_EQ(table->size(), 0u);
}

// The derivative of sum(upstream * pooled) by finite differences in double.
TEST_P(PoolTest, WeightGradientIsTheDerivative) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  std::mt19937_64 random(13);
  std::normal_distribution<float> normal;
  Tick tick = 0;
  for (Combiner combiner : {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn, Combiner::kMax}) {
    for (bool insert : {true, false}) {
      Feature f = MakeFeature(exec, random, 5, DType::kFloat32, combiner, true, true);
      for (float& w : f.weights) w = 0.5f + std::abs(w);  // keeps divisors away from 0
      ASSERT_TRUE(Pool(exec, {TaskOf(f)}, ++tick, insert).ok());
      const std::vector<float> vectors = Vectors(exec, *f.table, f.keys, ++tick);
      std::vector<float> upstream(f.num_bags * 5);
      for (float& u : upstream) u = normal(random);
      std::vector<float> gradient(f.keys.size());
      size_t compared = 0;
      WeightGradientTask task;
      task.table = f.table.get();
      task.keys = f.keys.data();
      task.rows = f.rows.data();
      task.bags = &f.bags;
      task.weights = f.weights.data();
      task.combiner = combiner;
      task.argmax = f.argmax.data();
      task.pooled = f.pooled.data();
      task.upstream = upstream.data();
      task.gradient = gradient.data();
      ASSERT_TRUE(WeightGradient(exec, {task}).ok());
      const auto loss = [&] {
        const std::vector<double> pooled = Expected(f, vectors, 5);
        double sum = 0;
        for (size_t i = 0; i < pooled.size(); ++i) sum += pooled[i] * upstream[i];
        return sum;
      };
      for (size_t i = 0; i < f.keys.size(); ++i) {
        const float w = f.weights[i];
        f.weights[i] = w + 1e-3f;
        const double up = loss();
        f.weights[i] = w - 1e-3f;
        const double down = loss();
        f.weights[i] = w;
        // Max has a kink where two ids of a bag are about equally large. There, the two one-sided
        // differences disagree.
        const double here = loss();
        if (combiner == Combiner::kMax && std::abs(up + down - 2 * here) > 1e-6) continue;
        ++compared;
        ASSERT_NEAR(gradient[i], (up - down) / 2e-3, 2e-2) << static_cast<int>(combiner);
      }
      EXPECT_GT(compared, f.keys.size() / 2);
    }
  }
}

TEST_P(PoolTest, ApplyAddsUpRepeatedKeysAndDropsUnknownOnes) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  auto table = MakeTable(2, DType::kFloat32);
  const std::vector<int64_t> keys = {1, 2};
  const std::vector<float> start = {1, 2, 3, 4};
  ASSERT_TRUE(table->Upsert(exec, {keys.data(), 2}, start.data(), 1).ok());
  const std::vector<int64_t> touched = {1, 2, 1, 99};
  const std::vector<float> gradients = {1, 1, 10, 20, 2, 3, 5, 5};
  Hyper hyper;
  hyper.learning_rate = 0.5f;
  ApplyTask task;
  task.table = table.get();
  task.keys = touched.data();
  task.gradients = gradients.data();
  task.n = touched.size();
  ASSERT_TRUE(Apply(exec, {task}, {OptimizerKind::kSgd, {}, hyper}, 2).ok());
  EXPECT_EQ(Vectors(exec, *table, keys, 3), (std::vector<float>{-0.5f, 0.0f, -2.0f, -6.0f}));
  EXPECT_EQ(table->stats().dropped_gradients, 1u);
  EXPECT_EQ(table->size(), 2u);
  // Two tasks of one table in a call are applied one after the other.
  ASSERT_TRUE(Apply(exec, {task, task}, {OptimizerKind::kSgd, {}, hyper}, 4).ok());
  EXPECT_EQ(Vectors(exec, *table, keys, 5), (std::vector<float>{-3.5f, -4.0f, -12.0f, -26.0f}));
}

TEST_P(PoolTest, ApplyRefusesTheStateOfAnotherOptimizer) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  auto table = MakeTable(2, DType::kFloat32);
  ASSERT_TRUE(table->AttachState(exec, {"adagrad", {2}, {0.1f}}).ok());
  const std::vector<int64_t> keys = {1, 2};
  const std::vector<float> vectors = {1, 2, 3, 4};
  ASSERT_TRUE(table->Upsert(exec, {keys.data(), 2}, vectors.data(), 1).ok());
  auto other = MakeTable(2, DType::kFloat32);
  ApplyTask task;
  task.table = table.get();
  task.keys = keys.data();
  task.gradients = vectors.data();
  task.n = 2;
  task.distinct = true;
  OptimizerFlags centered;
  centered.centered = true;
  struct Case {
    OptimizerStep step;
    const char* named;
  };
  // State of other widths, of the same widths and another name, and of other initial values.
  for (const Case& c :
       {Case{{OptimizerKind::kAdam, {}, {}, 1, "adam", {0.0f, 0.0f}}, "'adam' (2 floats from 0, 2"},
        Case{{OptimizerKind::kLion, {}, {}, 1, "lion", {0.1f}}, "'lion'"},
        Case{{OptimizerKind::kRmsprop, {}, {}, 1, "rmsprop", {0.1f}}, "'rmsprop'"},
        Case{{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.5f}},
             "'adagrad' (2 floats from 0.5)"},
        Case{{OptimizerKind::kRmsprop, centered, {}, 1, "rmsprop", {0.0f, 0.0f}}, "'rmsprop' ("}}) {
    ApplyTask first = task;
    first.table = other.get();
    ASSERT_TRUE(other
                    ->AttachState(exec, {c.step.state, StateWidths(c.step.kind, c.step.flags, 2),
                                         c.step.inits})
                    .ok());
    const Status status = Apply(exec, {first, task}, c.step, 2);
    EXPECT_EQ(status.code(), Code::kFailedPrecondition);
    for (const char* text : {"'table'", "'adagrad' (2 floats from 0.1)", c.named}) {
      EXPECT_NE(status.message().find(text), std::string::npos) << text << ": " << status.message();
    }
    EXPECT_EQ(Vectors(exec, *table, keys, 3), vectors);
  }
  EXPECT_TRUE(Apply(exec, {task}, {OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}}, 4).ok());
  // An optimizer without state may step any table.
  EXPECT_TRUE(Apply(exec, {task}, {OptimizerKind::kSgd, {}, {}, 1, "sgd", {}, "sgd 9"}, 5).ok());
}

TEST_P(PoolTest, StateOfAnotherOwnerIsNotStepped) {
  ThreadsExec exec(static_cast<size_t>(GetParam()));
  auto table = MakeTable(2, DType::kFloat32);
  const StateSpec adagrad{"adagrad", {2}, {0.1f}};
  const std::vector<int64_t> keys = {1, 2};
  const std::vector<float> ones(4, 1.0f);
  Tick tick = 0;
  ASSERT_TRUE(table->Upsert(exec, {keys.data(), 2}, ones.data(), ++tick).ok());
  ApplyTask task;
  task.table = table.get();
  task.keys = keys.data();
  task.gradients = ones.data();
  task.n = 2;
  task.distinct = true;
  const auto step = [&](const std::string& owner) {
    return Apply(exec, {task}, {OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}, owner},
                 ++tick);
  };
  const auto state = [&] {
    std::vector<float> vectors(4), states(4);
    bool found[2];
    table->ReadRows(exec, {keys.data(), 2}, vectors.data(), states.data(), found);
    return states[3];
  };
  bool was_reset = false;
  ASSERT_TRUE(table->TakeState(exec, adagrad, "first", &was_reset).ok());
  EXPECT_TRUE(was_reset);
  ASSERT_TRUE(step("first").ok());
  ASSERT_TRUE(table->TakeState(exec, adagrad, "first", &was_reset).ok());
  EXPECT_FALSE(was_reset);
  EXPECT_FLOAT_EQ(state(), 1.1f);
  // Equal state of another owner.
  ASSERT_TRUE(table->TakeState(exec, adagrad, "second", &was_reset).ok());
  EXPECT_TRUE(was_reset);
  EXPECT_FLOAT_EQ(state(), 0.1f);
  const Status refused = step("first");
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
  for (const char* text : {"'table'", "first", "second", "one wrapper"}) {
    EXPECT_NE(refused.message().find(text), std::string::npos) << refused.message();
  }
  EXPECT_FLOAT_EQ(state(), 0.1f);
  ASSERT_TRUE(step("second").ok());
  // State without an owner gets the first optimizer that steps it as its owner.
  ASSERT_TRUE(table->TakeState(exec, adagrad, "", &was_reset).ok());
  EXPECT_FALSE(was_reset);
  ASSERT_TRUE(step("first").ok());
  EXPECT_FLOAT_EQ(state(), 2.1f);
  EXPECT_FALSE(step("second").ok());
  // After a swap of rows, the table keeps its owner if the state is equal; otherwise it has none.
  auto other = MakeTable(2, DType::kFloat32);
  ASSERT_TRUE(other->AttachState(exec, adagrad).ok());
  table->SwapRows(other.get(), ++tick);
  EXPECT_FALSE(step("second").ok());
  EXPECT_TRUE(step("first").ok());
  auto lion = MakeTable(2, DType::kFloat32);
  ASSERT_TRUE(lion->AttachState(exec, {"lion", {2}, {0.0f}}).ok());
  table->SwapRows(lion.get(), ++tick);
  EXPECT_EQ(table->state_owner(), "");
}

INSTANTIATE_TEST_SUITE_P(Threads, PoolTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace dynemb
