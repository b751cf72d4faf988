// Random cases of gradients of pooled vectors, and the results of Backward. For the tests of
// Backward and GatherGradient.
#ifndef DYNEMB_TESTS_CC_BACKWARD_MODEL_H_
#define DYNEMB_TESTS_CC_BACKWARD_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cc/lookup/backward.h"
#include "cc/table/codec.h"
#include "cc/table/hash.h"

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

// Equal keys have equal rows. One key in eight has none.
inline RowId RowOf(uint32_t key) {
  const uint64_t hash = MixKey(key);
  return hash % 8 == 0 ? kNoRow : static_cast<RowId>(hash >> 33);
}

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
    c->rows.push_back(RowOf(static_cast<uint32_t>(key)));
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

inline uint64_t KeyOf(const Case& c, size_t i) {
  return c.task.key_type == KeyType::kInt32 ? c.keys32[i] : c.keys[i];
}

inline void SetKey(Case* c, size_t i, uint64_t key) {
  c->keys[i] = key;
  c->keys32[i] = static_cast<uint32_t>(key);
}

// Copies of a task's upstream rows, each at any multiple of four bytes, like received rows. The
// task then reads the copies.
class ScatteredRows {
 public:
  explicit ScatteredRows(UpstreamTask* task) {
    const size_t n = task->bags->num_bags();
    const size_t bytes = static_cast<size_t>(task->dim) * SizeOf(task->dtype);
    const size_t words = (bytes + 3) / 4 / 2 * 2 + 3;  // odd, so that every alignment occurs
    copies_.assign(n * words, std::numeric_limits<float>::quiet_NaN());
    for (size_t row = 0; row < n; ++row) {
      float* const copy = &copies_[(n - 1 - row) * words];
      std::memcpy(copy, static_cast<const char*>(task->upstream) + row * bytes, bytes);
      rows_.push_back(copy);
    }
    task->upstream = nullptr;
    task->upstream_rows = rows_.data();
  }
  ScatteredRows(ScatteredRows&&) = default;

 private:
  std::vector<float> copies_;
  std::vector<const void*> rows_;
};

struct Result {
  std::vector<uint64_t> keys;
  std::vector<RowId> rows;
  std::vector<float> sums;
  bool operator==(const Result& o) const {
    return keys == o.keys && rows == o.rows && sums.size() == o.sums.size() &&
           (sums.empty() || std::memcmp(sums.data(), o.sums.data(), sums.size() * 4) == 0);
  }
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_BACKWARD_MODEL_H_
