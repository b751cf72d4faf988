// GatherPool and GatherWeightGradient; for GatherGradient see gather_gradient_test.
#include "cc/lookup/gather.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/pool.h"
#include "tests/cc/execs.h"
#include "tests/cc/gather_model.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Checks the pooled vectors of the cases, which must have the same bits for every Exec.
void CheckAll(const std::vector<GatherCase>& cases, const std::vector<Vectors>& vectors) {
  std::vector<Pooled> first;
  ForEachExec([&](Exec& exec) {
    std::vector<Pooled> pooled;
    std::vector<GatherTask> tasks;
    for (size_t t = 0; t < cases.size(); ++t) {
      const Case& ids = *cases[t].ids;
      pooled.emplace_back(ids.bags.num_bags(), ids.task.dim, vectors[t].dtype, ids.task.combiner);
    }
    for (size_t t = 0; t < cases.size(); ++t) {
      tasks.push_back(TaskOf(cases[t], vectors[t], &pooled[t]));
      ASSERT_TRUE(CheckIndex(exec, tasks[t].index, cases[t].index.size(), tasks[t].n).ok());
    }
    GatherPool(exec, tasks);
    if (exec.parallelism() == 1) first = pooled;
    // The same vectors at scattered addresses give the same results.
    const std::vector<Pooled> of_array = pooled;
    std::vector<std::vector<const void*>> rows(cases.size());
    std::vector<std::vector<char>> copies(cases.size());
    for (size_t t = 0; t < cases.size(); ++t) {
      const size_t bytes = static_cast<size_t>(tasks[t].dim) * SizeOf(tasks[t].dtype);
      copies[t].resize(2 * tasks[t].n * bytes, '\x7F');
      for (size_t row = 0; row < tasks[t].n; ++row) {
        char* const copy = &copies[t][2 * (tasks[t].n - 1 - row) * bytes];
        std::memcpy(copy, vectors[t].raw.data() + row * bytes, bytes);
        rows[t].push_back(copy);
      }
      tasks[t].rows = rows[t].data();
      tasks[t].vectors = nullptr;
    }
    GatherPool(exec, tasks);
    for (size_t t = 0; t < cases.size(); ++t) {
      ASSERT_EQ(pooled[t].raw, of_array[t].raw);
      ASSERT_EQ(pooled[t].argmax, of_array[t].argmax);
    }
    for (size_t t = 0; t < cases.size(); ++t) {
      SCOPED_TRACE(testing::Message() << "task " << t);
      if (exec.parallelism() == 1) {
        ASSERT_NO_FATAL_FAILURE(CheckPooled(cases[t], vectors[t], pooled[t]));
      }
      ASSERT_EQ(pooled[t].raw, first[t].raw);
      ASSERT_EQ(pooled[t].argmax, first[t].argmax);
    }
  });
}

TEST(GatherPoolTest, EveryCombinerFormWeightAndDtype) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  std::mt19937_64 random(1);
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      for (bool weighted : {false, true}) {
        for (DType dtype : kDTypes) {
          SCOPED_TRACE(testing::Message() << "combiner " << int(combiner) << ", form " << int(form)
                                          << ", weighted " << weighted << ", dtype " << int(dtype));
          Shape s{500, 2000, 5, 300};
          s.combiner = combiner;
          s.form = form;
          s.weighted = weighted;
          std::vector<GatherCase> cases;
          cases.push_back(MakeGatherCase(s, 400, &random));
          s.num_bags = 3000;
          s.nnz = 30000;  // several ranges of work
          cases.push_back(MakeGatherCase(s, 300, &random));
          ASSERT_NO_FATAL_FAILURE(
              CheckAll(cases, {Vectors(400, 5, dtype, &random), Vectors(300, 5, dtype, &random)}));
        }
      }
    }
  }
}

TEST(GatherPoolTest, EveryDim) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  std::mt19937_64 random(2);
  for (int64_t dim : {1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 65, 128, 255, 256, 257, 300}) {
    for (DType dtype : kDTypes) {
      for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
        SCOPED_TRACE(testing::Message() << "dim " << dim << ", dtype " << int(dtype)
                                        << ", combiner " << int(combiner));
        Shape s{50, 300, dim, 40};
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kSplits;
        std::vector<GatherCase> cases;
        cases.push_back(MakeGatherCase(s, 40, &random));
        ASSERT_NO_FATAL_FAILURE(CheckAll(cases, {Vectors(40, dim, dtype, &random)}));
      }
    }
  }
}

TEST(GatherPoolTest, ManyTasksOfAllKinds) {
  std::mt19937_64 random(3);
  for (size_t tasks : {0, 1, 2, 60}) {
    std::vector<GatherCase> cases;
    std::vector<Vectors> vectors;
    for (size_t t = 0; t < tasks; ++t) {
      Shape s{random() % 200, 0, int64_t(1 + random() % 40), 1 + random() % 500};
      // Bags without ids, also at the ends; and no bags at all.
      if (s.num_bags > 0 && t % 5 != 4) s.nnz = random() % 1000;
      s.combiner = kCombiners[random() % 4];
      s.form = kForms[random() % 4];
      s.weighted = random() % 2;
      cases.push_back(MakeGatherCase(s, s.vocabulary, &random));
      vectors.emplace_back(s.vocabulary, s.dim, kDTypes[random() % 3], &random);
    }
    ASSERT_NO_FATAL_FAILURE(CheckAll(cases, vectors)) << tasks << " tasks";
  }
}

// div_no_nan: a divisor of 0 hides even NaN and infinity. Another divisor does not.
TEST(GatherPoolTest, BagsWithoutWeightAreZeros) {
  const std::vector<float> vectors = {kNan, HUGE_VALF, 3}, weights = {1, -1, 0, 2, 1};
  const std::vector<uint32_t> index = {0, 0, 1, 2, 0};
  const std::vector<int64_t> splits = {0, 2, 3, 4, 4, 5};
  SerialExec exec;
  Bags bags;
  ASSERT_TRUE(bags.InitSplits(exec, splits.data(), 6, 5, 5).ok());
  std::vector<float> pooled(5, 77);
  GatherTask task;
  task.bags = &bags;
  task.weights = weights.data();
  task.combiner = Combiner::kMean;
  task.pooled = pooled.data();
  task.vectors = vectors.data();
  task.n = 3;
  task.index = index.data();
  task.dim = 1;
  GatherPool(exec, {task});
  EXPECT_EQ(std::vector<float>(pooled.begin(), pooled.begin() + 4),
            (std::vector<float>{0, 0, 3, 0}));
  EXPECT_TRUE(std::isnan(pooled[4]));
}

TEST(GatherPoolTest, IndexBeyondTheRowsIsRefused) {
  ForEachExec([](Exec& exec) {
    std::vector<uint32_t> index(200000, 6);
    EXPECT_TRUE(CheckIndex(exec, index.data(), index.size(), 7).ok());
    EXPECT_FALSE(CheckIndex(exec, index.data(), index.size(), 6).ok());
    for (size_t at : {size_t{0}, size_t{65535}, size_t{65536}, index.size() - 1}) {
      for (uint32_t bad : {7u, 1u << 31, ~0u}) {
        index[at] = bad;
        const Status status = CheckIndex(exec, index.data(), index.size(), 7);
        EXPECT_EQ(status.code(), Code::kInvalidArgument);
        for (const std::string& part : {std::to_string(bad), std::string("7 rows")}) {
          EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
        }
        EXPECT_TRUE(CheckIndex(exec, index.data(), at, 7).ok()) << "later indices are not checked";
      }
      index[at] = 6;
    }
    EXPECT_TRUE(CheckIndex(exec, index.data(), index.size(), size_t{1} << 32).ok());
    EXPECT_FALSE(CheckIndex(exec, index.data(), 1, 0).ok());
    EXPECT_TRUE(CheckIndex(exec, nullptr, 0, 0).ok());
  });
}

// A single rank therefore gets the same results with and without an exchange.
TEST(GatherPoolTest, SameBitsAsPoolAndWeightGradient) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 48; ++round) {
    const int64_t dims[] = {3, 16, 33, 257};
    Shape s{100, 1500, dims[round % 4], 200};
    s.combiner = kCombiners[round / 4 % 4];
    s.form = kForms[random() % 4];
    s.weighted = true;
    const DType dtype = kDTypes[round / 16];
    SCOPED_TRACE(testing::Message() << "round " << round);
    const GatherCase c = MakeGatherCase(s, 200, &random);
    Vectors vectors(200, s.dim, dtype, &random);
    TableOptions options;
    options.dim = s.dim;
    options.dtype = dtype;
    std::unique_ptr<Table> table;
    ASSERT_TRUE(Table::Create(options, &table).ok());
    ThreadsExec exec(2);
    std::vector<uint64_t> keys;
    for (uint32_t row = 0; row < 200; ++row) keys.push_back(row * 0x9E3779B97F4A7C15ull);
    ASSERT_TRUE(table->Upsert(exec, {keys.data(), 200}, vectors.raw.data(), 1).ok());
    std::vector<uint64_t> id_keys;
    for (uint32_t row : c.index) id_keys.push_back(keys[row]);

    Pooled gathered(100, s.dim, dtype, s.combiner), looked_up(100, s.dim, dtype, s.combiner);
    const GatherTask task = TaskOf(c, vectors, &gathered);
    GatherPool(exec, {task});
    std::vector<RowId> rows(c.index.size());
    PoolTask pool;
    static_cast<BagTask&>(pool) = task;
    pool.pooled = looked_up.raw.data();
    pool.argmax = looked_up.argmax.data();
    pool.table = table.get();
    pool.keys = id_keys.data();
    pool.rows = rows.data();
    ASSERT_TRUE(Pool(exec, {pool}, 2, false).ok());
    ASSERT_EQ(gathered.raw, looked_up.raw);
    ASSERT_EQ(gathered.argmax, looked_up.argmax);

    const Vectors upstream(100, s.dim, dtype, &random);
    std::vector<float> by_gather(rows.size(), kNan), by_table(rows.size(), 77);
    BagWeightTask weights;
    weights.bags = task.bags;
    weights.weights = task.weights;
    weights.combiner = s.combiner;
    weights.argmax = gathered.argmax.data();
    weights.pooled = gathered.raw.data();
    weights.upstream = upstream.raw.data();
    weights.gradient = by_gather.data();
    GatherWeightTask gather_weights;
    static_cast<BagWeightTask&>(gather_weights) = weights;
    gather_weights.vectors = vectors.raw.data();
    gather_weights.index = c.index.data();
    gather_weights.dtype = dtype;
    gather_weights.dim = s.dim;
    GatherWeightGradient(exec, {gather_weights});
    WeightGradientTask table_weights;
    static_cast<BagWeightTask&>(table_weights) = weights;
    table_weights.gradient = by_table.data();
    table_weights.table = table.get();
    table_weights.keys = id_keys.data();
    table_weights.rows = rows.data();
    ASSERT_TRUE(WeightGradient(exec, {table_weights}).ok());
    ASSERT_EQ(std::memcmp(by_gather.data(), by_table.data(), 4 * rows.size()), 0);
  }
}

// The derivative of sum(upstream * pooled), by finite differences of GatherPool.
TEST(GatherWeightGradientTest, IsTheDerivative) {
  std::mt19937_64 random(5);
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      SCOPED_TRACE(testing::Message() << "combiner " << int(combiner) << ", form " << int(form));
      Shape s{20, 100, 5, 30};
      s.combiner = combiner;
      s.form = form;
      s.weighted = true;
      const GatherCase c = MakeGatherCase(s, 30, &random);
      // Keeps divisors away from 0.
      for (float& w : c.ids->weights) w = 0.5f + std::abs(w);
      const Vectors vectors(30, 5, DType::kFloat32, &random);
      Pooled pooled(20, 5, DType::kFloat32, combiner);
      const GatherTask pool = TaskOf(c, vectors, &pooled);
      const auto loss = [&](size_t i, float step) {
        SerialExec exec;
        float& w = c.ids->weights[i];
        const float before = std::exchange(w, w + step);
        GatherPool(exec, {pool});
        w = before;
        double sum = 0;
        const std::vector<float> values = pooled.Values();
        for (size_t at = 0; at < values.size(); ++at) {
          sum += double{values[at]} * c.ids->upstream[at];
        }
        return sum;
      };
      std::vector<double> expected, kink;
      for (size_t i = 0; i < c.index.size(); ++i) {
        const double up = loss(i, 1e-2f), down = loss(i, -1e-2f);
        expected.push_back((up - down) / 2e-2);
        // Max has a kink where two ids of a bag are about equally large. There, the two one-sided
        // differences disagree.
        kink.push_back(combiner == Combiner::kMax ? std::abs(up + down - 2 * loss(i, 0)) : 0);
      }
      std::vector<float> first;
      ForEachExec([&](Exec& exec) {
        GatherPool(exec, {pool});
        std::vector<float> gradient(c.index.size(), kNan);
        GatherWeightTask task;
        task.bags = pool.bags;
        task.weights = pool.weights;
        task.combiner = combiner;
        task.argmax = pooled.argmax.data();
        task.pooled = pooled.raw.data();
        task.upstream = c.ids->upstream.data();
        task.gradient = gradient.data();
        task.vectors = pool.vectors;
        task.index = pool.index;
        task.dim = 5;
        GatherWeightGradient(exec, {task});
        if (exec.parallelism() == 1) first = gradient;
        ASSERT_EQ(gradient, first);
        size_t compared = 0;
        for (size_t i = 0; i < gradient.size(); ++i) {
          if (kink[i] > 1e-5) continue;
          ++compared;
          ASSERT_NEAR(gradient[i], expected[i], 5e-3) << "id " << i;
        }
        EXPECT_GT(compared, gradient.size() / 2);
      });
    }
  }
}

}  // namespace
}  // namespace dynemb
