// The gradients of pooled vectors, summed per key by Backward (on a device, SumGradients) and per
// row by GatherGradient, on the host and on simulated devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "tests/cc/backward_fixture.h"
#include "tests/cc/gather_gradient_fixture.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

template <class Fixture>
class GradientTest : public Fixture {};

template <class Places>
struct FixturesOf;
template <class... Place>
struct FixturesOf<testing::Types<Place...>> {
  using Types = testing::Types<BackwardFixture<Place>..., GatherGradientFixture<Place>...>;
};

TYPED_TEST_SUITE(GradientTest, FixturesOf<Places>::Types);

TYPED_TEST(GradientTest, EveryCombinerFormAndWeight) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all combiners");
  std::mt19937_64 random(1);
  std::vector<Shape> all;
  for (Combiner combiner : kCombiners) {
    for (Form form : kForms) {
      for (bool weighted : {false, true}) {
        SCOPED_TRACE(testing::Message() << "combiner " << int(combiner) << ", form " << int(form)
                                        << ", weighted " << weighted);
        Shape s{100, 700, 5, 300};
        s.combiner = combiner;
        s.form = form;
        s.weighted = weighted;
        s.rows = weighted == (form == Form::kSplits);
        all.push_back(s);
        ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeTable({s}, 400, &random))));
        if (!this->kIsHost || (kSanitized && all.size() % 3 != 0)) continue;
        s.num_bags = 9000;
        s.nnz = 20000;  // several threads split it
        s.vocabulary = 15000;
        ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeTable({s}, 20000, &random))));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(Alone(MakeTable(all, 400, &random))));
}

// Each table has features of every dtype.
TYPED_TEST(GradientTest, EveryDimDtypeAndKeyType) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  std::mt19937_64 random(2);
  const std::vector<int64_t> few = {1, 2, 3, 4, 7, 8, 33, 128, 130, 300},
                             all = {1,  2,  3,   4,   7,   8,   15,  16,  17,  20, 32,
                                    33, 64, 100, 128, 130, 255, 256, 257, 300, 600};
  GradientCases cases;
  for (int64_t dim : this->kIsHost && !kSanitized ? all : few) {
    std::vector<Shape> shapes;
    for (DType dtype : kDTypes) {
      for (Combiner combiner : {Combiner::kMean, Combiner::kSqrtn, Combiner::kMax}) {
        Shape s{60, this->kIsHost ? 1000u : 200u, dim, 100};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.key_type = static_cast<KeyType>(shapes.size() % 3);
        s.form = dim % 2 == 0 ? Form::kSplits : Form::kUnsorted;
        shapes.push_back(s);
      }
    }
    std::shuffle(shapes.begin(), shapes.end(), random);
    cases.push_back(MakeTable(shapes, 150, &random));
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// Kernels for whole rows (row_math.h), which run if all tasks have them. The 60 rows have about 75
// ids each, except for the first, which has about 1000, so that windows begin and end inside of
// segments and chunks.
TYPED_TEST(GradientTest, WholeRows) {
  std::mt19937_64 random(4);
  for (const int64_t dim : {4, 16, 36, 128, 140}) {
    Shape sum{300, 1500, dim, 60}, mean = sum, sqrtn = sum;
    sum.form = Form::kSplits;
    mean.combiner = Combiner::kMean;
    mean.form = Form::kUnsorted;
    sqrtn.combiner = Combiner::kSqrtn;
    mean.weighted = sqrtn.weighted = true;
    GradientCases cases = Alone(MakeTable({sum, mean, sqrtn}, 64, &random));
    for (GatherCase& feature : cases[0].features) {
      for (size_t i = 0; i < feature.index.size(); ++i) {
        if (random() % 5 == 0) SetRow(&feature, i, 0);
      }
      ASSERT_FALSE(device::IsWhole(feature.ids->task)) << "the array of MakeCase is not aligned";
      feature.ids->task.upstream = feature.ids->upstream.data();
      ASSERT_TRUE(device::IsWhole(feature.ids->task));
    }
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(GradientTest, RowsOfManyIds) {
  std::mt19937_64 random(3);
  GradientCases cases;
  for (size_t ids : {5000u, 1u, 3000u, 700u, 90u}) {
    for (int64_t dim : {33, 1, 4}) {
      for (uint64_t vocabulary : {1, 3}) {
        std::vector<Shape> shapes;
        for (size_t f = 0; f < 1 + cases.size() % 4; ++f) {
          const size_t kind = cases.size() + 5 * f;
          Shape s{ids, ids, dim, vocabulary};
          s.dtype = kDTypes[kind % 3];
          s.combiner = kCombiners[kind % 4];
          s.weighted = kind % 2 == 0;
          s.form = kForms[kind / 2 % 4];
          shapes.push_back(s);
        }
        cases.push_back(MakeTable(shapes, 4, &random));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

// Rows whose numbers of ids are close to multiples of 256, in random order, from one or more
// features.
TYPED_TEST(GradientTest, ChunksAreOf256Ids) {
  std::mt19937_64 random(4);
  GradientCases cases;
  for (const std::vector<size_t>& counts :
       {std::vector<size_t>{1, 255, 256, 257, 3, 0, 511, 512, 513, 767, 768, 769, 5000},
        std::vector<size_t>{256}, std::vector<size_t>{257}, std::vector<size_t>{257, 257, 257},
        std::vector<size_t>{0, 512, 0}, std::vector<size_t>{513}}) {
    for (size_t num_features : {1, 2, 7}) {
      std::vector<uint32_t> rows;
      for (size_t r = 0; r < counts.size(); ++r) {
        rows.insert(rows.end(), counts[r], static_cast<uint32_t>(r));
      }
      std::shuffle(rows.begin(), rows.end(), random);
      GradientCase c{counts.size(), 6, {}};
      for (size_t f = 0, begin = 0; f < num_features; ++f) {
        const size_t end =
            f + 1 == num_features ? rows.size() : std::min(begin + random() % 150, rows.size());
        c.features.push_back(IdsOf({rows.begin() + begin, rows.begin() + end}, 6, &random,
                                   f % 2 == 0 ? Form::kUnsorted : Form::kUniform));
        begin = end;
      }
      cases.push_back(std::move(c));
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(GradientTest, ManyTasksAndFeaturesOfAllKinds) {
  std::mt19937_64 random(6);
  for (size_t count : {0, 1, 2, 9, 60, 3}) {
    SCOPED_TRACE(testing::Message() << count << " tasks");
    GradientCases cases(count);
    for (size_t t = 0; t < count; ++t) {
      cases[t].dim = 1 + static_cast<int64_t>(random() % 40);
      cases[t].n = t % 7 == 2 ? 1 : t % 4 == 3 ? (this->kIsHost ? 5000 : 900) : random() % 300;
      for (size_t f = random() % 4; f > 0; --f) {
        Shape s{1 + random() % 100, random() % 500, cases[t].dim, std::max<size_t>(1, cases[t].n)};
        if (cases[t].n == 0 || random() % 5 == 0) s.nnz = 0;
        // One large task among small ones.
        if (t == 3) s.nnz = s.num_bags * (this->kIsHost ? 400 : 30);
        s.combiner = kCombiners[random() % 4];
        s.form = kForms[random() % 4];
        s.weighted = random() % 2;
        s.dtype = kDTypes[random() % 3];
        s.key_type = static_cast<KeyType>(random() % 3);
        s.rows = random() % 2;
        cases[t].features.push_back(MakeGatherCase(s, s.vocabulary, &random));
      }
    }
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

TYPED_TEST(GradientTest, NothingToSum) {
  std::mt19937_64 random(7);
  GradientCases cases;
  cases.push_back({0, 4, {}});
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  cases.push_back(MakeTable({{0, 0, 4, 10}, {10, 0, 4, 10}}, 0, &random));
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  // Rows without ids have zero sums, too.
  cases.push_back({5, 3, {}});
  cases.push_back(MakeTable({{10, 0, 7, 10}}, 6, &random));
  // A task without ids may have null arrays.
  BackwardTask& bare = cases.back().features[0].ids->task;
  bare.keys = bare.upstream = nullptr;
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  cases.push_back(MakeTable({{10, 30, 4, 10}}, 20, &random));
  cases.push_back({0, 4, {}});
  cases.push_back({5, 3, {}});
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

TYPED_TEST(GradientTest, BagsInDescendingOrder) {
  std::mt19937_64 random(7);
  for (bool weighted : {false, true}) {
    Shape s{50, 200, 8, 40};
    s.form = Form::kUnsorted;
    s.combiner = Combiner::kSqrtn;
    s.weighted = weighted;
    GradientCases cases = Alone(MakeTable({s}, 40, &random));
    Case& ids = *cases[0].features[0].ids;
    for (size_t i = 0; i < 200; ++i) {
      ids.bag_of[i] = static_cast<uint32_t>((199 - i) / 4);
      ids.bag_values[2 * i] = ids.bag_of[i];
    }
    ASSERT_TRUE(ids.bags.InitIndices(this->place_.exec(), ids.bag_values.data(), 2, 200, 50).ok());
    ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
  }
}

// Each row is at any multiple of four bytes, like received rows.
TYPED_TEST(GradientTest, ScatteredUpstreamRows) {
  std::mt19937_64 random(11);
  GradientCases cases;
  for (int64_t dim : {8, 9}) {
    std::vector<Shape> shapes;
    for (Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
      for (DType dtype : kDTypes) {
        Shape s{50, 300, dim, 2};
        s.combiner = combiner;
        s.dtype = dtype;
        s.form = Form::kSorted;
        shapes.push_back(s);
      }
    }
    cases.push_back(MakeTable(shapes, 7, &random));
  }
  std::vector<ScatteredRows> rows;
  for (GradientCase& table : cases) {
    for (GatherCase& c : table.features) rows.emplace_back(&c.ids->task);
  }
  ASSERT_NO_FATAL_FAILURE(this->CheckAll(cases));
}

}  // namespace
}  // namespace dynemb
