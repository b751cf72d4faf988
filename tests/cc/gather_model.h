// Random ids with rows, and the formulas of combiner.h in double. For the tests of gather.h and of
// gradients.
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
#include <utility>
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

// A table's rows and the features that read it.
struct GradientCase {
  size_t n;
  int64_t dim;
  std::vector<GatherCase> features;
};

using GradientCases = std::vector<GradientCase>;

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

// Changes the key and the row of an id.
inline void SetRow(GatherCase* c, size_t i, uint32_t row) {
  c->index[i] = row;
  SetKey(c->ids.get(), i, row);
}

// Ids of these rows, in bags of about one id.
inline GatherCase IdsOf(const std::vector<uint32_t>& rows, int64_t dim, std::mt19937_64* random,
                        Form form = Form::kUniform) {
  GatherCase c;
  Shape s{rows.size(), rows.size(), dim, 1};
  s.form = form;
  s.weighted = form != Form::kUniform;
  c.ids = MakeCase(s, random);
  c.index.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) SetRow(&c, i, rows[i]);
  return c;
}

// The number of terms that a device sums before it adds their sum.
constexpr size_t kChunk = 256;

inline bool SameBits(const float* a, const float* b, size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(float)) == 0;
}

// The factor of each bag.
inline std::vector<float> ScalesOf(const Case& c) {
  std::vector<float> scales;
  for (size_t bag = 0; bag < c.bags.num_bags(); ++bag) {
    scales.push_back(BagScale(c.task.combiner, c.bags, c.task.weights, bag));
  }
  return scales;
}

// The term that the id at position i adds.
inline float TermOf(const Case& c, const std::vector<float>& scales, size_t i, size_t column) {
  const UpstreamTask& t = c.task;
  const size_t bag = c.bag_of[i], at = bag * static_cast<size_t>(t.dim) + column;
  float x = c.upstream[at];
  float scale = scales[bag];
  if (scale == 0.0f) x = 0.0f;
  if (t.weights != nullptr) scale *= t.weights[i];
  if (t.combiner == Combiner::kMax && t.argmax[at] != static_cast<int32_t>(i)) return 0.0f;
  return scale * x;
}

// The sum of terms in order. On a device, 256 consecutive terms are summed first, and then these
// sums are added in order.
inline float SumOf(const std::vector<float>& terms, bool in_chunks) {
  const size_t length = in_chunks ? kChunk : std::max<size_t>(1, terms.size());
  float sum = 0.0f;
  for (size_t begin = 0; begin < terms.size(); begin += length) {
    float chunk = terms[begin];
    for (size_t i = begin + 1; i < std::min(begin + length, terms.size()); ++i) chunk += terms[i];
    sum = begin == 0 ? chunk : sum + chunk;
  }
  return sum;
}

// Ids, and the row to whose sum each id adds. An id whose index is not a row adds to none.
struct IndexedIds {
  const Case* ids;
  const std::vector<uint32_t>* index;
};

// Checks the sums of n rows against the definition in upstream.h, in double.
inline void CheckSums(size_t n, int64_t width, const std::vector<IndexedIds>& features,
                      const std::vector<float>& sums) {
  const auto dim = static_cast<size_t>(width);
  std::vector<double> model(n * dim), magnitude(n * dim);
  for (const auto& [ids, index] : features) {
    const UpstreamTask& task = ids->task;
    const std::vector<double> norms = Norms(*ids);
    for (size_t i = 0; i < index->size(); ++i) {
      if ((*index)[i] >= n) continue;
      const size_t bag = ids->bag_of[i];
      const double w = task.weights == nullptr ? 1.0 : double{task.weights[i]};
      const double scale = w * ScaleOf(task.combiner, norms[bag]);
      for (size_t col = 0; col < dim; ++col) {
        const size_t from = bag * dim + col, to = (*index)[i] * dim + col;
        if (task.combiner == Combiner::kMax && task.argmax[from] != static_cast<int32_t>(i)) {
          continue;
        }
        model[to] += scale * ids->upstream[from];
        magnitude[to] += std::abs(scale * ids->upstream[from]);
      }
    }
  }
  ASSERT_EQ(sums.size(), model.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    ASSERT_NEAR(sums[i], model[i], 1e-5 * magnitude[i] + 1e-30)
        << "row " << i / dim << ", column " << i % dim;
  }
}

// The exact bits of the sums of n rows, by the order of terms on the host or on a device. Checks
// that they agree with the definition.
inline std::vector<float> ExactSums(size_t n, int64_t dim, const std::vector<IndexedIds>& features,
                                    bool in_chunks) {
  std::vector<std::vector<std::pair<size_t, size_t>>> of_row(n);  // features and positions
  std::vector<std::vector<float>> scales;
  for (size_t f = 0; f < features.size(); ++f) {
    scales.push_back(ScalesOf(*features[f].ids));
    const std::vector<uint32_t>& index = *features[f].index;
    for (size_t i = 0; i < index.size(); ++i) {
      if (index[i] < n) of_row[index[i]].push_back({f, i});
    }
  }
  std::vector<float> sums, terms;
  for (const auto& ids : of_row) {
    for (size_t column = 0; column < static_cast<size_t>(dim); ++column) {
      terms.clear();
      for (const auto& [f, i] : ids) {
        terms.push_back(TermOf(*features[f].ids, scales[f], i, column));
      }
      sums.push_back(SumOf(terms, in_chunks));
    }
  }
  CheckSums(n, dim, features, sums);
  return sums;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GATHER_MODEL_H_
