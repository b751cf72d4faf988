// Tables for tests of GatherGradient on devices, and the exact bits of their expected sums.
#ifndef DYNEMB_TESTS_CC_DEVICE_GATHER_MODEL_H_
#define DYNEMB_TESTS_CC_DEVICE_GATHER_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cc/lookup/gather.h"
#include "tests/cc/device_gradient_model.h"
#include "tests/cc/gather_model.h"

namespace dynemb {

using GradientCases = std::vector<GradientCase>;
using GatherGradientTasks = std::vector<GatherGradient::Task>;

inline GatherGradient::Feature FeatureOf(const GatherCase& c) {
  GatherGradient::Feature feature;
  static_cast<UpstreamTask&>(feature) = c.ids->task;
  feature.index = c.index.data();
  return feature;
}

inline GradientCase MakeTable(const std::vector<Shape>& features, size_t n,
                              std::mt19937_64* random) {
  GradientCase c{n, features[0].dim, {}};
  for (const Shape& s : features) c.features.push_back(MakeGatherCase(s, n, random));
  return c;
}

inline GradientCases Alone(GradientCase c) {
  GradientCases cases;
  cases.push_back(std::move(c));
  return cases;
}

// One id per bag, with these indices.
inline GatherCase OneEach(const std::vector<uint32_t>& index, int64_t dim,
                          std::mt19937_64* random) {
  GatherCase c;
  c.ids = MakeCase({index.size(), index.size(), dim, 1}, random);
  c.index = index;
  return c;
}

// The sums by the rule of gather_gradient.h, without the ids that have no row. `counts` gets the
// number of ids of each row.
inline std::vector<float> Expected(const GradientCase& c, std::vector<size_t>* counts) {
  const auto dim = static_cast<size_t>(c.dim);
  std::vector<std::vector<std::pair<const Case*, size_t>>> ids(c.n);
  for (const GatherCase& feature : c.features) {
    for (size_t i = 0; i < feature.index.size(); ++i) {
      if (feature.index[i] < c.n) ids[feature.index[i]].push_back({feature.ids.get(), i});
    }
  }
  std::vector<float> sums;
  for (const auto& of_row : ids) {
    counts->push_back(of_row.size());
    for (size_t column = 0; column < dim; ++column) {
      std::vector<float> terms;
      for (const auto& [of, i] : of_row) terms.push_back(TermOf(*of, i, column));
      sums.push_back(SumInChunks(terms));
    }
  }
  return sums;
}

// The tasks, and uninitialized memory for their sums: for each task one array or several outputs,
// each followed by a guard.
struct GatherOutputs {
  GatherOutputs(const GradientCases& cases, bool several_outputs) : tasks(cases.size()) {
    std::mt19937_64 random(99);
    for (size_t t = 0; t < cases.size(); ++t) {
      tasks[t].n = cases[t].n;
      tasks[t].dim = cases[t].dim;
      for (const GatherCase& c : cases[t].features) tasks[t].features.push_back(FeatureOf(c));
      if (!several_outputs) {
        tasks[t].sums = Add(t, cases[t].n);
        continue;
      }
      size_t left = cases[t].n;
      do {
        const size_t rows =
            std::min<size_t>(left, random() % 3 == 0 ? random() % 3 : random() % (left + 1));
        tasks[t].outputs.push_back({rows, Add(t, rows)});
        left -= rows;
      } while (left > 0);
    }
  }

  // The sums of task t, in the order of the rows.
  std::vector<float> Take(size_t t) const {
    std::vector<float> sums;
    for (const Array& array : arrays_) {
      if (array.task != t) continue;
      EXPECT_TRUE(std::isnan(array.floats[array.n]));
      sums.insert(sums.end(), array.floats.get(), array.floats.get() + array.n);
    }
    return sums;
  }

  GatherGradientTasks tasks;

 private:
  struct Array {
    size_t task, n;
    std::unique_ptr<float[]> floats;
  };
  float* Add(size_t t, size_t rows) {
    const size_t n = rows * static_cast<size_t>(tasks[t].dim);
    arrays_.push_back({t, n, std::make_unique<float[]>(n + 1)});
    std::fill_n(arrays_.back().floats.get(), n + 1, std::numeric_limits<float>::quiet_NaN());
    return arrays_.back().floats.get();
  }
  std::vector<Array> arrays_;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_GATHER_MODEL_H_
