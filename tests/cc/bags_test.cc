#include "cc/lookup/bags.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cc/lookup/combiner.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

using Model = std::vector<std::vector<size_t>>;  // the positions of each bag, ascending

void Check(const Bags& bags, const Model& model, size_t nnz) {
  ASSERT_EQ(bags.nnz(), nnz);
  ASSERT_EQ(bags.num_bags(), model.size());
  std::vector<uint32_t> positions, expected;
  for (size_t b = 0; b < model.size(); ++b) {
    std::vector<size_t> got;
    for (size_t i = bags.begin(b); i < bags.end(b); ++i) got.push_back(bags.position(i));
    ASSERT_EQ(got, model[b]) << "bag " << b;
    for (size_t p : model[b]) {
      positions.push_back(p);
      expected.push_back(b);
    }
  }
  std::vector<uint32_t> got(positions.size());
  bags.BagOf(positions.data(), positions.size(), got.data());
  ASSERT_EQ(got, expected);
  for (size_t i = 0; i < positions.size(); i += 997) {
    ASSERT_EQ(bags.bag_of(positions[i]), expected[i]);
  }
}

class BagsTest : public testing::TestWithParam<size_t> {
 protected:
  ThreadsExec exec_{GetParam()};
  std::mt19937_64 random_{7};
};

INSTANTIATE_TEST_SUITE_P(Threads, BagsTest, testing::Values(1, 2, 4));

TEST_P(BagsTest, Uniform) {
  Bags bags;
  for (size_t hotness : {0, 1, 2, 3, 7, 10, 1000}) {
    for (size_t num_bags : {0, 1, 5, 1000}) {
      const size_t nnz = hotness * num_bags;
      ASSERT_TRUE(bags.InitUniform(hotness, nnz, num_bags).ok());
      bags.BuildBagOf(exec_);
      Model model(num_bags);
      for (size_t i = 0; i < nnz; ++i) model[i / hotness].push_back(i);
      ASSERT_NO_FATAL_FAILURE(Check(bags, model, nnz));
      EXPECT_EQ(bags.splits(), nullptr);
      EXPECT_EQ(bags.order(), nullptr);
    }
  }
}

// Splits and indices of bags of equal length, except for one id.
TEST_P(BagsTest, SplitsAndIndicesMayBeUniform) {
  Bags bags;
  for (const size_t hotness : {1, 3}) {
    for (const size_t num_bags : {1, 2, 700, 40000}) {
      const size_t nnz = hotness * num_bags;
      for (const size_t moved : {nnz, size_t{0}, nnz / 2, nnz - 1}) {
        Model model(num_bags);
        std::vector<int64_t> indices(nnz), splits{0};
        for (size_t i = 0; i < nnz; ++i) {
          const size_t bag = i / hotness;
          // The first id of a bag moves to the end of the one before, or the last to the one after.
          const bool back = i % hotness == 0;
          const size_t other = back ? (bag == 0 ? 0 : bag - 1) : std::min(bag + 1, num_bags - 1);
          const bool moves = i == moved && (back || i % hotness == hotness - 1);
          indices[i] = static_cast<int64_t>(moves ? other : bag);
          model[indices[i]].push_back(i);
        }
        for (const auto& b : model) splits.push_back(splits.back() + b.size());
        const bool uniform = std::all_of(model.begin(), model.end(),
                                         [&](const auto& b) { return b.size() == hotness; });
        EXPECT_EQ(bags.InitIndices(exec_, indices.data(), 1, nnz, num_bags).message(), "");
        EXPECT_EQ(bags.splits() == nullptr, uniform)
            << hotness << ", " << num_bags << ": " << moved;
        bags.BuildBagOf(exec_);
        ASSERT_NO_FATAL_FAILURE(Check(bags, model, nnz));
        EXPECT_EQ(bags.InitSplits(exec_, splits.data(), splits.size(), nnz, num_bags).message(),
                  "");
        EXPECT_EQ(bags.splits() == nullptr, uniform);
        bags.BuildBagOf(exec_);
        ASSERT_NO_FATAL_FAILURE(Check(bags, model, nnz));
      }
    }
  }
}

// Positions at which the division by a reciprocal is closest to a wrong quotient.
TEST(BagsUniformTest, BagOfLargePositions) {
  for (int64_t hotness : {2, 3, 641, 65535, 65536, 65537, 0x7FFFFFFF}) {
    Bags bags;
    const int64_t num_bags = Bags::kMaxSize / hotness;
    ASSERT_TRUE(bags.InitUniform(hotness, hotness * num_bags, num_bags).ok());
    for (int64_t bag : {int64_t{0}, int64_t{1}, num_bags / 2, num_bags - 1}) {
      EXPECT_EQ(bags.bag_of(bag * hotness), static_cast<size_t>(bag));
      EXPECT_EQ(bags.bag_of(bag * hotness + hotness - 1), static_cast<size_t>(bag));
    }
  }
}

TEST_P(BagsTest, SplitsAndIndicesInAnyOrder) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all orders");
  if (GetParam() != 4) SKIP_UNDER_ASAN("four threads run all that fewer would");
  Bags bags;  // reused, so that its size grows and shrinks and its form changes
  for (size_t num_bags : {1, 3, 100, 40000}) {
    for (size_t nnz : {0, 1, 10, 1000, 100000}) {
      for (int64_t stride : {1, 2, 3}) {
        for (bool sorted : {true, false}) {
          SCOPED_TRACE(testing::Message() << num_bags << " bags, " << nnz << " ids, stride "
                                          << stride << ", sorted " << sorted);
          // Some bags are empty, including ranges of bags at the beginning and the end.
          const size_t first = num_bags / 10, last = num_bags - 1 - num_bags / 10;
          std::vector<int64_t> of(nnz);
          for (int64_t& b : of) b = first + random_() % (last - first + 1);
          if (sorted) std::sort(of.begin(), of.end());
          Model model(num_bags);
          std::vector<int64_t> indices(nnz * stride, -5);
          for (size_t i = 0; i < nnz; ++i) {
            model[of[i]].push_back(i);
            indices[i * stride] = of[i];
          }
          ASSERT_TRUE(bags.InitIndices(exec_, indices.data(), stride, nnz, num_bags).ok());
          bags.BuildBagOf(exec_);
          ASSERT_NO_FATAL_FAILURE(Check(bags, model, nnz));
          EXPECT_EQ(bags.order() == nullptr, std::is_sorted(of.begin(), of.end()));

          if (!sorted) continue;
          std::vector<int64_t> splits = {0};
          for (const auto& b : model) splits.push_back(splits.back() + b.size());
          ASSERT_TRUE(bags.InitSplits(exec_, splits.data(), splits.size(), nnz, num_bags).ok());
          bags.BuildBagOf(exec_);
          bags.BuildBagOf(exec_);
          ASSERT_NO_FATAL_FAILURE(Check(bags, model, nnz));
        }
      }
    }
  }
}

// One index is out of order: at either end, or where two ranges of the parallel loop touch.
TEST_P(BagsTest, OneIndexOutOfOrder) {
  const size_t nnz = 50000, num_bags = 60000;
  for (size_t at : {1, 2, 16383, 16384, 16385, 32767, 32768, 32769, 49999}) {
    std::vector<int64_t> indices(nnz);
    Model model(num_bags);
    for (size_t i = 0; i < nnz; ++i) {
      indices[i] = i == at ? 0 : i + 1;
      model[indices[i]].push_back(i);
    }
    Bags bags;
    ASSERT_TRUE(bags.InitIndices(exec_, indices.data(), 1, nnz, num_bags).ok());
    ASSERT_NO_FATAL_FAILURE(Check(bags, model, nnz));
    EXPECT_NE(bags.order(), nullptr);
  }
}

void ExpectError(const Status& status, const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  for (const std::string& part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in " << status.message();
  }
}

TEST_P(BagsTest, ErrorsNameTheFirstInvalidValue) {
  Bags bags;
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  ExpectError(bags.InitUniform(2, 7, 3), {"num_bags times", "7", "3", "2"});
  ExpectError(bags.InitUniform(-1, 0, 0), {"negative", "-1"});
  ExpectError(bags.InitUniform(kMax, 4, 4), {"num_bags times"});
  // The product is 2^64, which would wrap to 0.
  ExpectError(bags.InitUniform(int64_t{1} << 62, 0, 4), {"num_bags times"});
  ExpectError(bags.InitUniform(0, 5, 3), {"num_bags times"});
  ExpectError(bags.InitUniform(3, 5, 0), {"num_bags times"});
  ExpectError(bags.InitUniform(1, 5, -5), {"num_bags", "-5"});
  ExpectError(bags.InitUniform(1, -5, 5), {"-5"});
  ExpectError(bags.InitUniform(1, int64_t{1} << 32, int64_t{1} << 32), {"num_bags", "4294967296"});

  std::vector<int64_t> splits(100001);
  for (size_t i = 0; i < splits.size(); ++i) splits[i] = i;
  auto init_splits = [&](int64_t nnz, int64_t num_bags) {
    return bags.InitSplits(exec_, splits.data(), splits.size(), nnz, num_bags);
  };
  ASSERT_TRUE(init_splits(100000, 100000).ok());
  ExpectError(init_splits(100001, 100000), {"end", "100001", "100000"});
  ExpectError(init_splits(99999, 100000), {"end", "99999", "100000"});
  ExpectError(init_splits(100000, 99999), {"num_bags + 1", "100001"});
  ExpectError(bags.InitSplits(exec_, nullptr, 0, 0, -1), {"num_bags", "-1"});
  ExpectError(bags.InitSplits(exec_, nullptr, 0, 0, 0), {"num_bags + 1", "got 0"});
  splits[0] = 1;
  ExpectError(init_splits(100000, 100000), {"start at 0", "1"});
  splits[0] = 0;
  splits[70000] = 3;
  splits[90000] = -1;
  ExpectError(init_splits(100000, 100000), {"descend", "got 3 after 69999", "position 70000"});
  splits[70000] = 70000;
  splits[90000] = kMin;
  ExpectError(init_splits(100000, 100000), {"-9223372036854775808", "position 90000"});

  std::vector<int64_t> indices(2 * 100000);
  for (size_t i = 0; i < 100000; ++i) indices[2 * i] = i;
  auto init_indices = [&](int64_t num_bags) {
    return bags.InitIndices(exec_, indices.data(), 2, 100000, num_bags);
  };
  ASSERT_TRUE(init_indices(100000).ok());
  ExpectError(init_indices(99998), {"[0, num_bags = 99998)", "99998", "position 99998"});
  ExpectError(init_indices(0), {"position 0"});
  for (int64_t bad : {kMin, int64_t{-1}, int64_t{100000}, kMax}) {
    for (size_t at : {0, 1, 16383, 16384, 40000, 99999}) {
      const int64_t good = indices[2 * at];
      indices[2 * at] = bad;
      if (at < 90000) indices[2 * 95000] = -7;  // a later error is not reported
      ExpectError(init_indices(100000), {std::to_string(bad), "position " + std::to_string(at)});
      indices[2 * at] = good;
      indices[2 * 95000] = 95000;
    }
  }
  ExpectError(bags.InitIndices(exec_, indices.data(), 0, 5, 5), {"column"});
}

TEST(CombinerTest, Parse) {
  Combiner c = Combiner::kSum;
  ASSERT_TRUE(ParseCombiner("mean", &c).ok());
  EXPECT_EQ(c, Combiner::kMean);
  ASSERT_TRUE(ParseCombiner("sqrtn", &c).ok());
  EXPECT_EQ(c, Combiner::kSqrtn);
  ASSERT_TRUE(ParseCombiner("max", &c).ok());
  EXPECT_EQ(c, Combiner::kMax);
  ASSERT_TRUE(ParseCombiner("sum", &c).ok());
  EXPECT_EQ(c, Combiner::kSum);
  ExpectError(ParseCombiner("Mean", &c), {"combiner", "'Mean'"});
  ExpectError(ParseCombiner("", &c), {"''"});
}

// The divisors of tf.nn.embedding_lookup_sparse, computed by hand. A divisor of 0 gives a scale of
// 0, as in div_no_nan.
TEST(CombinerTest, Scale) {
  SerialExec exec;
  const std::vector<int64_t> of = {2, 0, 2, 3, 3, 5};  // bags 1 and 4 are empty
  const std::vector<float> weights = {2, 3, 6, 1, -1, 0};
  Bags bags;
  ASSERT_TRUE(bags.InitIndices(exec, of.data(), 1, of.size(), 6).ok());
  auto scales = [&](Combiner c, const float* w) {
    std::vector<float> s;
    for (size_t b = 0; b < 6; ++b) s.push_back(BagScale(c, bags, w, b));
    return s;
  };
  const float r2 = 1 / std::sqrt(2.0f);
  using Floats = std::vector<float>;
  EXPECT_EQ(scales(Combiner::kSum, weights.data()), Floats(6, 1.0f));
  EXPECT_EQ(scales(Combiner::kMax, nullptr), Floats(6, 1.0f));
  EXPECT_EQ(scales(Combiner::kMean, nullptr), (Floats{1, 0, 0.5f, 0.5f, 0, 1}));
  EXPECT_EQ(scales(Combiner::kSqrtn, nullptr), (Floats{1, 0, r2, r2, 0, 1}));
  EXPECT_EQ(scales(Combiner::kMean, weights.data()), (Floats{1 / 3.0f, 0, 1 / 8.0f, 0, 0, 0}));
  EXPECT_EQ(scales(Combiner::kSqrtn, weights.data()),
            (Floats{1 / 3.0f, 0, 1 / std::sqrt(40.0f), r2, 0, 0}));
}

}  // namespace
}  // namespace dynemb
