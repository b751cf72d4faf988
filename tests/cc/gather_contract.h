// The contract of a GatherGradient, on the host or on a device: run(tasks) runs one.
#ifndef DYNEMB_TESTS_CC_GATHER_CONTRACT_H_
#define DYNEMB_TESTS_CC_GATHER_CONTRACT_H_

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cc/lookup/gather.h"

namespace dynemb {

// Terms are added feature by feature, in the order of the ids. In float32 the order matters:
// (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
template <class Run>
void ExpectTermsInOrder(const Run& run) {
  const std::vector<uint32_t> first = {0, 1, 0, 2, 2, 2}, second = {1, 1, 0};
  const std::vector<float> of_first = {1e8f, 1e8f, 1, 1e8f, -1e8f, 1},
                           of_second = {-1e8f, 1, -1e8f};
  Bags six, three;
  ASSERT_TRUE(six.InitUniform(1, 6, 6).ok());
  ASSERT_TRUE(three.InitUniform(1, 3, 3).ok());
  GatherGradient::Feature a, b;
  a.bags = &six;
  a.upstream = of_first.data();
  a.index = first.data();
  b.bags = &three;
  b.upstream = of_second.data();
  b.index = second.data();
  a.dim = b.dim = 1;
  std::vector<float> sums(4, std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(run({{{a, b}, 4, 1, sums.data()}}).ok());
  EXPECT_EQ(sums, (std::vector<float>{0, 1, 1, 0}));
  EXPECT_FALSE(std::signbit(sums[3])) << "the zero of a row without ids";
}

// The divisor of the first bag is 0, so its gradient is 0, even for an upstream NaN. The NaN of
// another bag reaches the row of its id, and no other row.
template <class Run>
void ExpectNanWhereItBelongs(const Run& run) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<uint32_t> index = {0, 1, 2, 1};
  const std::vector<float> weights = {1, -1, 3, 1}, upstream = {kNan, 5, kNan};
  const std::vector<int64_t> splits = {0, 2, 3, 4};
  SerialExec exec;
  Bags bags;
  ASSERT_TRUE(bags.InitSplits(exec, splits.data(), 4, 4, 3).ok());
  GatherGradient::Feature feature;
  feature.bags = &bags;
  feature.weights = weights.data();
  feature.combiner = Combiner::kMean;
  feature.upstream = upstream.data();
  feature.dim = 1;
  feature.index = index.data();
  std::vector<float> sums(4, 77);
  ASSERT_TRUE(run({{{feature}, 4, 1, sums.data()}}).ok());
  EXPECT_EQ(sums[0], 0);
  EXPECT_TRUE(std::isnan(sums[1]));
  EXPECT_EQ(sums[2], 5);
  EXPECT_EQ(sums[3], 0);
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GATHER_CONTRACT_H_
