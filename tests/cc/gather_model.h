// The expected results of GatherPool and GatherGradient, by the formulas of combiner.h and
// upstream.h in double, and random cases. For the tests of gather.h.
#ifndef DYNEMB_TESTS_CC_GATHER_MODEL_H_
#define DYNEMB_TESTS_CC_GATHER_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <unordered_map>
#include <vector>

#include "cc/lookup/gather.h"
#include "cc/table/codec.h"
#include "tests/cc/backward_model.h"

namespace dynemb {

constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn,
                                   Combiner::kMax};
constexpr Form kForms[] = {Form::kUniform, Form::kSplits, Form::kSorted, Form::kUnsorted};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};

// The ids of one feature, and the row of each id. Every distinct key has one of the n rows, in
// random order; the other rows have no ids.
struct GatherCase {
  std::unique_ptr<Case> ids;
  std::vector<uint32_t> index;
};

inline GatherCase MakeGatherCase(const Shape& shape, size_t n, std::mt19937_64* random) {
  GatherCase c;
  c.ids = MakeCase(shape, random);
  std::vector<uint32_t> rows(n);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), *random);
  std::unordered_map<uint64_t, uint32_t> row_of;
  for (uint64_t key : c.ids->keys) {
    EXPECT_TRUE(row_of.size() < n || row_of.count(key) > 0) << "more keys than rows";
    const uint32_t row = rows[std::min(row_of.size(), n - 1)];
    c.index.push_back(row_of.try_emplace(key, row).first->second);
  }
  return c;
}

// Σ w or Σ w² of each bag.
inline std::vector<double> Norms(const Case& c) {
  std::vector<double> norms(c.bags.num_bags());
  for (size_t i = 0; i < c.keys.size(); ++i) {
    const double w = c.task.weights == nullptr ? 1.0 : double{c.task.weights[i]};
    norms[c.bag_of[i]] += c.task.combiner == Combiner::kMean ? w : w * w;
  }
  return norms;
}

// The factor by which a bag's sum is multiplied.
inline double ScaleOf(Combiner combiner, double norm) {
  if (!HasScale(combiner)) return 1;
  if (norm == 0) return 0;
  return 1 / (combiner == Combiner::kMean ? norm : std::sqrt(norm));
}

// Vectors of `dtype`, and the same vectors as float32.
struct Vectors {
  Vectors(size_t n, int64_t dim, DType type, std::mt19937_64* random)
      : dtype(type), values(n * static_cast<size_t>(dim)), raw(values.size() * SizeOf(type)) {
    std::normal_distribution<float> normal;
    for (float& v : values) v = normal(*random);
    StoreVector(dtype, values.data(), static_cast<int64_t>(values.size()), raw.data());
    Read();
  }
  void Read() { LoadVector(dtype, raw.data(), static_cast<int64_t>(values.size()), values.data()); }

  DType dtype;
  std::vector<float> values;
  std::vector<char> raw;
};

// Outputs of GatherPool, filled with garbage at first.
struct Pooled {
  Pooled(size_t bags, int64_t dim, DType type, Combiner combiner)
      : dtype(type),
        raw(bags * static_cast<size_t>(dim) * SizeOf(type), '\x7F'),
        argmax(combiner == Combiner::kMax ? bags * static_cast<size_t>(dim) : 0, -77) {}
  std::vector<float> Values() const {
    std::vector<float> values(raw.size() / SizeOf(dtype));
    LoadVector(dtype, raw.data(), static_cast<int64_t>(values.size()), values.data());
    return values;
  }

  DType dtype;
  std::vector<char> raw;
  std::vector<int32_t> argmax;
};

inline GatherTask TaskOf(const GatherCase& c, const Vectors& vectors, Pooled* pooled) {
  GatherTask task;
  task.bags = &c.ids->bags;
  task.weights = c.ids->task.weights;
  task.combiner = c.ids->task.combiner;
  task.pooled = pooled->raw.data();
  task.argmax = pooled->argmax.data();
  task.vectors = vectors.raw.data();
  task.dim = c.ids->task.dim;
  task.n = vectors.values.size() / static_cast<size_t>(task.dim);
  task.index = c.index.data();
  task.dtype = vectors.dtype;
  return task;
}

inline void CheckPooled(const GatherCase& c, const Vectors& vectors, const Pooled& pooled) {
  const Case& ids = *c.ids;
  const Combiner combiner = ids.task.combiner;
  const auto dim = static_cast<size_t>(ids.task.dim);
  const size_t n = ids.bags.num_bags() * dim;
  const std::vector<double> norms = Norms(ids);
  std::vector<double> sum(n), magnitude(n);
  std::vector<int32_t> argmax(n, -1);
  for (size_t i = 0; i < c.index.size(); ++i) {
    const float w = ids.task.weights == nullptr ? 1.0f : ids.task.weights[i];
    for (size_t col = 0; col < dim; ++col) {
      const size_t at = ids.bag_of[i] * dim + col;
      const float term = w * vectors.values[c.index[i] * dim + col];
      if (combiner == Combiner::kMax) {
        if (argmax[at] >= 0 && term <= sum[at]) continue;
        sum[at] = magnitude[at] = term;
        argmax[at] = static_cast<int32_t>(i);
      } else {
        sum[at] += double{w} * vectors.values[c.index[i] * dim + col];
        magnitude[at] += std::abs(term);
      }
    }
  }
  if (combiner == Combiner::kMax) {
    ASSERT_EQ(pooled.argmax, argmax);
  }
  // The relative errors of the sum in float32, and of its rounding to the output's type.
  const double sums = 2e-6, last = pooled.dtype == DType::kFloat32   ? 1e-7
                                   : pooled.dtype == DType::kFloat16 ? std::ldexp(1, -11)
                                                                     : std::ldexp(1, -8);
  const std::vector<float> values = pooled.Values();
  for (size_t at = 0; at < n; ++at) {
    const double scale = ScaleOf(combiner, norms[at / dim]);
    const double expected = sum[at] * scale, error = sums * std::abs(magnitude[at] * scale);
    ASSERT_NEAR(values[at], expected, error + (std::abs(expected) + error) * last + 0x1p-25)
        << "bag " << at / dim << ", column " << at % dim;
    if (scale == 0) {
      ASSERT_EQ(values[at], 0);
    }
  }
}

// A table's rows and the features that read it.
struct GradientCase {
  size_t n;
  int64_t dim;
  std::vector<GatherCase> features;
};

// Returns the sums of each task. Also checks that a second run, to several outputs, gives the same.
inline std::vector<std::vector<float>> RunGradient(Exec& exec,
                                                   const std::vector<GradientCase>& cases,
                                                   GatherGradient* gradient) {
  std::vector<std::vector<float>> sums;
  std::vector<GatherGradient::Task> tasks(cases.size());
  for (const GradientCase& c : cases) {
    sums.emplace_back(c.n * static_cast<size_t>(c.dim), std::numeric_limits<float>::quiet_NaN());
  }
  for (size_t t = 0; t < cases.size(); ++t) {
    tasks[t].n = cases[t].n;
    tasks[t].dim = cases[t].dim;
    tasks[t].sums = sums[t].data();
    for (const GatherCase& c : cases[t].features) {
      GatherGradient::Feature feature;
      static_cast<UpstreamTask&>(feature) = c.ids->task;
      feature.index = c.index.data();
      tasks[t].features.push_back(feature);
    }
  }
  Status status = gradient->Run(exec, tasks);
  EXPECT_TRUE(status.ok()) << status.message();
  // Each output is a separate allocation. In one array, sums past the end of an output would be
  // right by accident.
  std::vector<std::vector<std::unique_ptr<float[]>>> outputs(cases.size());
  std::mt19937_64 random(7);
  for (size_t t = 0; t < cases.size(); ++t) {
    const auto dim = static_cast<size_t>(cases[t].dim);
    for (size_t left = cases[t].n; left > 0;) {
      const size_t rows =
          std::min<size_t>(left, random() % 3 == 0 ? random() % 5 : random() % left + 1);
      outputs[t].emplace_back(new float[rows * dim]);
      tasks[t].outputs.push_back({rows, outputs[t].back().get()});
      left -= rows;
    }
    tasks[t].sums = nullptr;
  }
  status = gradient->Run(exec, tasks);
  EXPECT_TRUE(status.ok()) << status.message();
  for (size_t t = 0; t < cases.size(); ++t) {
    size_t at = 0;
    for (const GatherGradient::Output& output : tasks[t].outputs) {
      const size_t floats = output.rows * static_cast<size_t>(cases[t].dim);
      if (floats == 0) continue;
      EXPECT_EQ(std::memcmp(output.sums, &sums[t][at], 4 * floats), 0) << "several outputs";
      at += floats;
    }
  }
  return sums;
}

inline void CheckSums(const GradientCase& c, const std::vector<float>& sums) {
  const auto dim = static_cast<size_t>(c.dim);
  std::vector<double> model(c.n * dim), magnitude(c.n * dim);
  for (const GatherCase& feature : c.features) {
    const UpstreamTask& task = feature.ids->task;
    const std::vector<double> norms = Norms(*feature.ids);
    for (size_t i = 0; i < feature.index.size(); ++i) {
      const size_t bag = feature.ids->bag_of[i];
      const double w = task.weights == nullptr ? 1.0 : double{task.weights[i]};
      const double scale = w * ScaleOf(task.combiner, norms[bag]);
      for (size_t col = 0; col < dim; ++col) {
        const size_t from = bag * dim + col, to = feature.index[i] * dim + col;
        if (task.combiner == Combiner::kMax && task.argmax[from] != static_cast<int32_t>(i)) {
          continue;
        }
        model[to] += scale * feature.ids->upstream[from];
        magnitude[to] += std::abs(scale * feature.ids->upstream[from]);
      }
    }
  }
  ASSERT_EQ(sums.size(), model.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    ASSERT_NEAR(sums[i], model[i], 1e-5 * magnitude[i])
        << "row " << i / dim << ", column " << i % dim;
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GATHER_MODEL_H_
