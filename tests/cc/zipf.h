// Ranks by Zipf's law, for tests.
#ifndef DYNEMB_TESTS_CC_ZIPF_H_
#define DYNEMB_TESTS_CC_ZIPF_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

// Draws ranks with probability proportional to rank^-exponent, by inverting the cumulative sum.
class Zipf {
 public:
  Zipf(size_t n, double exponent) : sums_(n) {
    double sum = 0;
    for (size_t k = 0; k < n; ++k) {
      sum += std::pow(static_cast<double>(k + 1), -exponent);
      sums_[k] = sum;
    }
  }
  size_t Draw(Random& random) const {
    const double u = static_cast<double>(random.Next() >> 11) * 0x1p-53 * sums_.back();
    return static_cast<size_t>(std::upper_bound(sums_.begin(), sums_.end(), u) - sums_.begin());
  }
  // The total probability of the `n` most frequent ranks.
  double Share(size_t n) const { return sums_[n - 1] / sums_.back(); }

 private:
  std::vector<double> sums_;
};

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_ZIPF_H_
