// GatherPool and GatherWeightGradient on the host and on simulated devices; for GatherGradient see
// gather_gradient_test.
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
#include "tests/cc/gather_fixture.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

using Random = std::mt19937_64;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class Place>
class GatherTest : public GatherFixture<Place> {};

TYPED_TEST_SUITE(GatherTest, Places);

TYPED_TEST(GatherTest, EveryCombinerFormWeightAndDtype) {
  Random random(1);
  for (const bool special : {false, true}) {
    for (const size_t beyond : {0, 5, 1}) {
      SCOPED_TRACE(testing::Message() << "special " << special << ", beyond " << beyond);
      std::vector<Feature> features;
      for (const DType dtype : kDTypes) {
        Shape s{12, 70, 5, 30};
        s.dtype = dtype;
        AddAllKinds(s, 31, &random, {beyond, special}, &features);
        s.dim = 16;
        s.nnz = 24;  // some bags are empty
        AddAllKinds(s, 30, &random, {beyond, special}, &features);
      }
      ASSERT_NO_FATAL_FAILURE(this->Check(features));
    }
  }
}

// On the host, several threads divide them.
TYPED_TEST(GatherTest, ManyIds) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  Random random(10);
  for (const DType dtype : kDTypes) {
    std::vector<Feature> features;
    Shape s{1500, 15000, 5, 300};
    if (!this->kIsHost) s = {40, 200, 5, 40};
    s.dtype = dtype;
    AddAllKinds(s, 300, &random, {}, &features);
    ASSERT_NO_FATAL_FAILURE(this->Check(features));
  }
}

TYPED_TEST(GatherTest, EveryDim) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  Random random(2);
  for (const DType dtype : kDTypes) {
    std::vector<Feature> features;
    for (const int64_t dim :
         {1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 300}) {
      for (const Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
        Shape s{6, 40, dim, 20};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kSplits;
        features.push_back(MakeFeature(s, 20, &random, {9, false}));
      }
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(features));
  }
}

// Vectors are read several at a time: any number of ids may be left over, and any of them may have
// no row.
TYPED_TEST(GatherTest, BagsOfAnySizeWithMissingRows) {
  Random random(3);
  std::vector<Feature> features;
  for (size_t size = 0; size <= 9; ++size) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      Shape s{3, 3 * size, 4, 20};
      s.combiner = kCombiners[repeat % 4];
      s.weighted = true;
      features.push_back(MakeFeature(s, 20, &random, {3, false}));
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->Check(features));
}

TYPED_TEST(GatherTest, ManyTasksOfAllKinds) {
  Random random(4);
  for (const size_t tasks : {0, 1, 2, 60}) {
    SCOPED_TRACE(testing::Message() << tasks << " tasks");
    std::vector<Feature> features;
    for (size_t t = 0; t < tasks; ++t) {
      const size_t most = this->kIsHost ? 10 : 1;
      Shape s{random() % (20 * most), 0, int64_t(1 + random() % 40), 1 + random() % (50 * most)};
      // Some tasks have bags without ids, no bags, or ids without rows.
      if (s.num_bags > 0 && t % 5 != 4) s.nnz = random() % (80 * most);
      s.combiner = kCombiners[random() % 4];
      s.form = kForms[random() % 4];
      s.weighted = random() % 2;
      s.dtype = kDTypes[random() % 3];
      const size_t n = t % 7 == 3 ? 0 : s.vocabulary;
      features.push_back(MakeFeature(s, n, &random, {random() % 9, false}));
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(features));
  }
}

TYPED_TEST(GatherTest, OneBagOfFewIds) {
  Random random(9);
  for (const size_t nnz : {0, 1, 2}) {
    for (const Combiner combiner : kCombiners) {
      Shape s{1, nnz, 3, 4};
      s.combiner = combiner;
      std::vector<Feature> features;
      features.push_back(MakeFeature(s, 4, &random));
      ASSERT_NO_FATAL_FAILURE(this->Check(features));
    }
  }
}

TYPED_TEST(GatherTest, WithoutRows) {
  Random random(5);
  std::vector<Feature> features;
  Shape s{10, 60, 6, 1};
  AddAllKinds(s, 0, &random, {}, &features);
  s.nnz = 0;
  AddAllKinds(s, 0, &random, {}, &features);
  s.num_bags = 0;
  AddAllKinds(s, 0, &random, {}, &features);
  ASSERT_NO_FATAL_FAILURE(this->Check(features));
}

// div_no_nan: a divisor of 0 hides even NaN and infinity. Another divisor does not.
TYPED_TEST(GatherTest, BagsWithoutWeightAreZeros) {
  const std::vector<float> vectors = {kNan, HUGE_VALF, 3}, weights = {1, -1, 0, 2, 1};
  const std::vector<uint32_t> index = {0, 0, 1, 2, 0};
  const std::vector<int64_t> splits = {0, 2, 3, 4, 4, 5};
  Bags bags;
  ASSERT_TRUE(bags.InitSplits(this->place_.exec(), splits.data(), 6, 5, 5).ok());
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
  ASSERT_TRUE(PoolAt(this->place_, {task}).ok());
  EXPECT_EQ(std::vector<float>(pooled.begin(), pooled.begin() + 4),
            (std::vector<float>{0, 0, 3, 0}));
  EXPECT_TRUE(std::isnan(pooled[4]));
}

// The derivative of sum(upstream * pooled), by finite differences of the results.
TYPED_TEST(GatherTest, WeightGradientIsTheDerivative) {
  Random random(5);
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      SCOPED_TRACE(testing::Message() << "combiner " << int(combiner) << ", form " << int(form));
      Shape s{20, 100, 5, 30};
      s.combiner = combiner;
      s.form = form;
      s.weighted = true;
      std::vector<Feature> features;
      features.push_back(MakeFeature(s, 30, &random));
      Case& ids = *features[0].c.ids;
      // Keeps divisors away from 0.
      for (float& w : ids.weights) w = 0.5f + std::abs(w);
      ASSERT_NO_FATAL_FAILURE(this->Check(features));
      const std::vector<float> gradient = Expected(features[0]).gradient;
      const auto loss = [&](size_t i, float step) {
        const float before = std::exchange(ids.weights[i], ids.weights[i] + step);
        const Results results = Expected(features[0]);
        ids.weights[i] = before;
        const auto* const values = reinterpret_cast<const float*>(results.pooled.data());
        double sum = 0;
        for (size_t at = 0; at < 20 * 5; ++at) sum += double{values[at]} * ids.upstream[at];
        return sum;
      };
      size_t compared = 0;
      for (size_t i = 0; i < gradient.size(); ++i) {
        const double up = loss(i, 1e-2f), down = loss(i, -1e-2f);
        // Max has a kink where two ids of a bag are about equally large. There, the two one-sided
        // differences disagree.
        if (combiner == Combiner::kMax && std::abs(up + down - 2 * loss(i, 0)) > 1e-5) continue;
        ++compared;
        ASSERT_NEAR(gradient[i], (up - down) / 2e-2, 5e-3) << "id " << i;
      }
      EXPECT_GT(compared, gradient.size() / 2);
    }
  }
}

TEST(HostGatherTest, IndexBeyondTheRowsIsRefused) {
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
TEST(HostGatherTest, SameBitsAsPoolAndWeightGradient) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 48; ++round) {
    const int64_t dims[] = {3, 16, 33, 257};
    Shape s{100, 1500, dims[round % 4], 200};
    s.combiner = kCombiners[round / 4 % 4];
    s.form = kForms[random() % 4];
    s.weighted = true;
    s.dtype = kDTypes[round / 16];
    SCOPED_TRACE(testing::Message() << "round " << round);
    std::vector<Feature> features;
    features.push_back(MakeFeature(s, 200, &random));
    const Feature& f = features[0];
    TableOptions options;
    options.dim = s.dim;
    options.dtype = s.dtype;
    std::unique_ptr<Table> table;
    ASSERT_TRUE(Table::Create(options, &table).ok());
    ThreadsExec exec(2);
    std::vector<uint64_t> keys;
    for (uint32_t row = 0; row < 200; ++row) keys.push_back(row * 0x9E3779B97F4A7C15ull);
    ASSERT_TRUE(table->Upsert(exec, {keys.data(), 200}, f.vectors.raw.data(), 1).ok());
    std::vector<uint64_t> id_keys;
    for (uint32_t row : f.c.index) id_keys.push_back(keys[row]);

    const GatherTasks gathered(features, Placement::kArray, /*on_host=*/true);
    Outputs looked_up(f, 0);
    GatherPool(exec, gathered.pool);
    std::vector<RowId> rows(f.c.index.size());
    PoolTask pool;
    static_cast<BagTask&>(pool) = gathered.pool[0];
    pool.pooled = looked_up.pooled.get();
    pool.argmax = reinterpret_cast<int32_t*>(looked_up.argmax.get());
    pool.table = table.get();
    pool.keys = id_keys.data();
    pool.rows = rows.data();
    ASSERT_TRUE(Pool(exec, {pool}, 2, false).ok());
    ASSERT_EQ(gathered.outputs[0].pooled.Take(), looked_up.pooled.Take());
    ASSERT_EQ(gathered.outputs[0].argmax.Take(), looked_up.argmax.Take());

    GatherWeightGradient(exec, gathered.weights);
    WeightGradientTask weights;
    const GatherWeightTask& from = gathered.weights[0];
    weights.bags = from.bags;
    weights.weights = from.weights;
    weights.combiner = from.combiner;
    weights.argmax = from.argmax;
    weights.pooled = from.pooled;
    weights.upstream = from.upstream;
    weights.gradient = reinterpret_cast<float*>(looked_up.gradient.get());
    weights.table = table.get();
    weights.keys = id_keys.data();
    weights.rows = rows.data();
    ASSERT_TRUE(WeightGradient(exec, {weights}).ok());
    ASSERT_EQ(gathered.outputs[0].gradient.Take(), looked_up.gradient.Take());
  }
}

}  // namespace
}  // namespace dynemb
