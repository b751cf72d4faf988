// The definition of the gradient that Backward computes, and random cases of it. For backward_test.
#ifndef DYNEMB_TESTS_CC_BACKWARD_MODEL_H_
#define DYNEMB_TESTS_CC_BACKWARD_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "cc/lookup/backward.h"
#include "cc/table/codec.h"

namespace dynemb {

enum class Form { kUniform, kSplits, kSorted, kUnsorted };

// One task with the memory that it points to.
struct Case {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> keys32;
  std::vector<RowId> rows;
  std::vector<float> weights;
  std::vector<int64_t> bag_values;  // splits or indices
  std::vector<uint32_t> bag_of;
  std::vector<int32_t> argmax;
  std::vector<float> upstream;  // as read back from `raw`
  std::vector<char> raw;
  Bags bags;
  BackwardTask task;
};

struct Shape {
  size_t num_bags, nnz;  // nnz is rounded down for the uniform form
  int64_t dim;
  uint64_t vocabulary;
  Combiner combiner = Combiner::kSum;
  Form form = Form::kUniform;
  bool weighted = false;
  DType dtype = DType::kFloat32;
  KeyType key_type = KeyType::kInt64;
  bool rows = true;
};

inline std::unique_ptr<Case> MakeCase(const Shape& s, std::mt19937_64* random) {
  auto c = std::make_unique<Case>();
  SerialExec exec;
  std::normal_distribution<float> normal;
  const size_t hotness = s.num_bags == 0 ? 0 : s.nnz / s.num_bags;
  const size_t nnz = s.form == Form::kUniform ? hotness * s.num_bags : s.nnz;
  for (size_t i = 0; i < nnz; ++i) {
    const uint64_t key = ((*random)() % s.vocabulary) * 0x9E3779B97F4A7C15ull;
    c->keys.push_back(key);
    c->keys32.push_back(static_cast<uint32_t>(key));
    c->rows.push_back((*random)());
    // Some weights are 0. They have either sign, except for the mean, whose divisor would otherwise
    // be mostly rounding error.
    const float weight = (*random)() % 8 == 0 ? 0.0f : normal(*random);
    c->weights.push_back(s.combiner == Combiner::kMean ? std::abs(weight) : weight);
    c->bag_of.push_back(s.form == Form::kUniform ? i / hotness : (*random)() % s.num_bags);
  }
  if (s.form != Form::kUnsorted) std::sort(c->bag_of.begin(), c->bag_of.end());
  Status status;
  if (s.form == Form::kUniform) {
    status = c->bags.InitUniform(hotness, nnz, s.num_bags);
  } else if (s.form == Form::kSplits) {
    c->bag_values.resize(s.num_bags + 1);
    for (uint32_t b : c->bag_of) ++c->bag_values[b + 1];
    for (size_t b = 0; b < s.num_bags; ++b) c->bag_values[b + 1] += c->bag_values[b];
    status = c->bags.InitSplits(exec, c->bag_values.data(), c->bag_values.size(), nnz, s.num_bags);
  } else {
    c->bag_values.resize(nnz * 2);
    for (size_t i = 0; i < nnz; ++i) c->bag_values[2 * i] = c->bag_of[i];
    status = c->bags.InitIndices(exec, c->bag_values.data(), 2, nnz, s.num_bags);
  }
  EXPECT_TRUE(status.ok()) << status.message();

  // The array starts at an odd element, as a slice of a tensor may.
  const size_t n = s.num_bags * s.dim, element = SizeOf(s.dtype);
  c->raw.resize((n + 1) * element);
  c->upstream.resize(n);
  for (float& u : c->upstream) u = normal(*random);
  if (n > 0) {
    StoreVector(s.dtype, c->upstream.data(), n, c->raw.data() + element);
    LoadVector(s.dtype, c->raw.data() + element, n, c->upstream.data());
  }

  // Any position of the bag may be the maximum, including the first and the last.
  c->argmax.assign(n, -1);
  for (size_t i = 0; i < nnz; ++i) {
    for (int64_t col = 0; col < s.dim; ++col) {
      int32_t& won = c->argmax[c->bag_of[i] * s.dim + col];
      if (won < 0 || (*random)() % 3 == 0) won = i;
    }
  }

  c->task.key_type = s.key_type;
  c->task.keys = s.key_type == KeyType::kInt32 ? static_cast<const void*>(c->keys32.data())
                                               : static_cast<const void*>(c->keys.data());
  c->task.rows = s.rows ? c->rows.data() : nullptr;
  c->task.bags = &c->bags;
  c->task.weights = s.weighted ? c->weights.data() : nullptr;
  c->task.combiner = s.combiner;
  c->task.argmax = s.combiner == Combiner::kMax ? c->argmax.data() : nullptr;
  c->task.dtype = s.dtype;
  c->task.upstream = c->raw.data() + element;
  c->task.dim = s.dim;
  return c;
}

struct Result {
  std::vector<uint64_t> keys;
  std::vector<RowId> rows;
  std::vector<float> sums;
  bool operator==(const Result& o) const {
    return keys == o.keys && rows == o.rows && sums.size() == o.sums.size() &&
           (sums.empty() || std::memcmp(sums.data(), o.sums.data(), sums.size() * 4) == 0);
  }
};

inline std::vector<Result> RunBackward(Exec& exec, const std::vector<BackwardTask>& tasks,
                                       Backward* backward) {
  const Status status = backward->Prepare(exec, tasks.data(), tasks.size());
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<Result> results(tasks.size());
  std::vector<BackwardOutput> outputs(tasks.size());
  std::vector<std::vector<uint32_t>> keys32(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    const size_t unique = backward->num_unique(t);
    results[t].keys.resize(unique);
    keys32[t].resize(unique);
    results[t].rows.resize(tasks[t].rows == nullptr ? 0 : unique);
    results[t].sums.assign(unique * tasks[t].dim,
                           std::numeric_limits<float>::quiet_NaN());  // like uninitialized memory
    outputs[t].keys = tasks[t].key_type == KeyType::kInt32
                          ? static_cast<void*>(keys32[t].data())
                          : static_cast<void*>(results[t].keys.data());
    outputs[t].rows = results[t].rows.data();
    outputs[t].sums = results[t].sums.data();
  }
  backward->Write(exec, outputs.data());
  for (size_t t = 0; t < tasks.size(); ++t) {
    if (tasks[t].key_type == KeyType::kInt32) {
      results[t].keys.assign(keys32[t].begin(), keys32[t].end());
    }
  }
  return results;
}

// The definition of the gradient, in double.
inline void Check(const Case& c, const Result& result) {
  const BackwardTask& t = c.task;
  const size_t nnz = c.keys.size(), dim = t.dim;
  std::vector<double> norms(c.bags.num_bags());
  auto weight = [&](size_t i) { return t.weights == nullptr ? 1.0 : double{t.weights[i]}; };
  for (size_t i = 0; i < nnz; ++i) {
    const double w = weight(i);
    norms[c.bag_of[i]] += t.combiner == Combiner::kMean ? w : w * w;
  }
  struct Sum {
    RowId row;
    std::vector<double> sum, magnitude;
  };
  std::unordered_map<uint64_t, Sum> model;
  for (size_t i = 0; i < nnz; ++i) {
    const uint64_t key = t.key_type == KeyType::kInt32 ? c.keys32[i] : c.keys[i];
    auto [it, is_new] = model.try_emplace(key);
    Sum& sum = it->second;
    if (is_new) sum = {c.rows[i], std::vector<double>(dim), std::vector<double>(dim)};
    const size_t bag = c.bag_of[i];
    double scale = weight(i);
    if (t.combiner == Combiner::kMean) scale *= norms[bag] == 0 ? 0 : 1 / norms[bag];
    if (t.combiner == Combiner::kSqrtn) scale *= norms[bag] == 0 ? 0 : 1 / std::sqrt(norms[bag]);
    for (size_t col = 0; col < dim; ++col) {
      const size_t at = bag * dim + col;
      if (t.combiner == Combiner::kMax && t.argmax[at] != static_cast<int32_t>(i)) continue;
      sum.sum[col] += scale * c.upstream[at];
      sum.magnitude[col] += std::abs(scale * c.upstream[at]);
    }
  }
  ASSERT_EQ(result.keys.size(), model.size());
  for (size_t u = 0; u < result.keys.size(); ++u) {
    const auto it = model.find(result.keys[u]);
    ASSERT_NE(it, model.end());
    if (t.rows != nullptr) {
      ASSERT_EQ(result.rows[u], it->second.row);
    }
    for (size_t col = 0; col < dim; ++col) {
      ASSERT_NEAR(result.sums[u * dim + col], it->second.sum[col],
                  1e-5 * it->second.magnitude[col] + 1e-30)
          << "key " << u << ", column " << col;
    }
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_BACKWARD_MODEL_H_
