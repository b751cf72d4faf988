// Features whose received vectors are pooled, the results that combiner.h promises for them, the
// placements of their arrays in memory, and the fixture that is typed by Places.
#ifndef DYNEMB_TESTS_CC_GATHER_FIXTURE_H_
#define DYNEMB_TESTS_CC_GATHER_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "cc/device/gather.h"
#include "cc/lookup/gather.h"
#include "cc/table/codec.h"
#include "tests/cc/exact_memory.h"
#include "tests/cc/gather_model.h"
#include "tests/cc/places.h"

namespace dynemb {

// The placement of vectors and results: one array that is aligned like an allocation, one array
// that is aligned only to its elements, or one array per vector, aligned only to its elements.
enum class Placement { kArray, kOddArray, kRows };
constexpr Placement kPlacements[] = {Placement::kArray, Placement::kOddArray, Placement::kRows};

// One feature. On a device, an index may be n or more. On the host, the ids with such an index read
// one more row, of zeros.
struct Feature {
  GatherCase c;  // with the device's indices
  std::vector<uint32_t> host_index;
  size_t n = 0;     // rows on the device
  Vectors vectors;  // [n + 1, dim]
  bool special = false;

  const Case& ids() const { return *c.ids; }
  size_t dim() const { return static_cast<size_t>(ids().task.dim); }
  size_t num_bags() const { return ids().bags.num_bags(); }
  size_t vector_bytes() const { return dim() * SizeOf(vectors.dtype); }
  bool has_argmax() const { return ids().task.combiner == Combiner::kMax; }
  float element(size_t i, size_t column) const {
    return vectors.values[host_index[i] * dim() + column];
  }
};

struct Numbers {
  size_t beyond = 0;     // one id in `beyond` has an index of n or more; 0: none
  bool special = false;  // some vector elements and weights are NaN, infinite, and so on
};

inline float Special(std::mt19937_64* random) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {
      Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity(), Limits::max(), 0.0f, -0.0f,
      Limits::denorm_min()};
  return specials[(*random)() % std::size(specials)];
}

inline Feature MakeFeature(Shape shape, size_t n, std::mt19937_64* random, Numbers numbers = {}) {
  if (n == 0) shape.vocabulary = 1;
  GatherCase c = MakeGatherCase(shape, std::max<size_t>(n, 1), random);
  std::vector<uint32_t> host_index = c.index;
  for (size_t i = 0; i < c.index.size(); ++i) {
    if (n != 0 && (numbers.beyond == 0 || (*random)() % numbers.beyond != 0)) continue;
    const auto first = static_cast<uint32_t>(n);
    const uint32_t beyond[] = {first, first + 1, 1u << 31, ~0u};
    c.index[i] = beyond[(*random)() % std::size(beyond)];
    host_index[i] = first;
  }
  Vectors vectors(n + 1, shape.dim, shape.dtype, random);
  const size_t bytes = vectors.raw.size() / (n + 1);
  if (numbers.special) {
    for (float& v : vectors.values) v = (*random)() % 4 == 0 ? Special(random) : v;
    StoreVector(shape.dtype, vectors.values.data(), static_cast<int64_t>(vectors.values.size()),
                vectors.raw.data());
    for (float& w : c.ids->weights) w = (*random)() % 8 == 0 ? Special(random) : w;
  }
  std::memset(&vectors.raw[n * bytes], 0, bytes);
  vectors.Read();
  return {std::move(c), std::move(host_index), n, std::move(vectors), numbers.special};
}

struct Results {
  std::vector<char> pooled;
  std::vector<int32_t> argmax;
  std::vector<float> gradient;  // of the weights
};

// The results, by the formulas of combiner.h in float32, in the order of the ids.
inline Results Expected(const Feature& f) {
  const Case& ids = f.ids();
  const Combiner combiner = ids.task.combiner;
  const size_t dim = f.dim(), num_bags = f.num_bags(), nnz = f.c.index.size();
  std::vector<std::vector<size_t>> of_bag(num_bags);
  for (size_t i = 0; i < nnz; ++i) of_bag[ids.bag_of[i]].push_back(i);
  const auto scale_of = [&](size_t bag, const float* weights) {
    float norm = 0;
    for (const size_t i : of_bag[bag]) {
      const float w = weights == nullptr ? 1.0f : weights[i];
      norm += combiner == Combiner::kMean ? w : w * w;
    }
    if (combiner == Combiner::kSqrtn) norm = std::sqrt(norm);
    return !HasScale(combiner) ? 1.0f : norm == 0 ? 0.0f : 1.0f / norm;
  };
  Results results{std::vector<char>(num_bags * f.vector_bytes()), {}, std::vector<float>(nnz)};
  std::vector<float> pooled(num_bags * dim);
  for (size_t bag = 0; bag < num_bags; ++bag) {
    const float scale = scale_of(bag, ids.task.weights);
    for (size_t column = 0; column < dim; ++column) {
      float sum = 0;
      int32_t argmax = -1;
      for (const size_t i : of_bag[bag]) {
        const float w = ids.task.weights == nullptr ? 1.0f : ids.task.weights[i];
        const float term = w * f.element(i, column);
        const bool first = i == of_bag[bag][0], larger = first || term > sum;
        if (larger) argmax = static_cast<int32_t>(i);
        if (combiner != Combiner::kMax) {
          sum = first ? term : sum + term;
        } else if (larger) {
          sum = term;
        }
      }
      // Zero even if the sum is NaN.
      if (HasScale(combiner)) sum = scale == 0 ? 0 : sum * scale;
      pooled[bag * dim + column] = sum;
      if (f.has_argmax()) results.argmax.push_back(argmax);
    }
  }
  const auto n = static_cast<int64_t>(pooled.size());
  StoreVector(f.vectors.dtype, pooled.data(), n, results.pooled.data());
  LoadVector(f.vectors.dtype, results.pooled.data(), n, pooled.data());
  for (size_t i = 0; i < nnz; ++i) {
    const size_t bag = ids.bag_of[i];
    const float scale = scale_of(bag, ids.weights.data());
    float dot = 0, pooled_dot = 0;
    for (size_t column = 0; column < dim; ++column) {
      const size_t at = bag * dim + column;
      pooled_dot += ids.upstream[at] * pooled[at];
      if (f.has_argmax() && results.argmax[at] != static_cast<int32_t>(i)) continue;
      dot += ids.upstream[at] * f.element(i, column);
    }
    results.gradient[i] = dot;
    if (combiner == Combiner::kMean) results.gradient[i] = (dot - pooled_dot) * scale;
    if (combiner == Combiner::kSqrtn) {
      results.gradient[i] = (dot - pooled_dot * ids.weights[i] * scale) * scale;
    }
  }
  return results;
}

// Checks the pooled vectors against the definition, in double.
inline void CheckPooled(const Feature& f, const Results& results) {
  const Case& ids = f.ids();
  const Combiner combiner = ids.task.combiner;
  const size_t dim = f.dim(), n = f.num_bags() * dim;
  const std::vector<double> norms = Norms(ids);
  std::vector<double> sum(n), magnitude(n);
  std::vector<int32_t> argmax(n, -1);
  for (size_t i = 0; i < f.c.index.size(); ++i) {
    const float w = ids.task.weights == nullptr ? 1.0f : ids.task.weights[i];
    for (size_t column = 0; column < dim; ++column) {
      const size_t at = ids.bag_of[i] * dim + column;
      const float term = w * f.element(i, column);
      if (combiner == Combiner::kMax) {
        if (argmax[at] >= 0 && term <= sum[at]) continue;
        sum[at] = magnitude[at] = term;
        argmax[at] = static_cast<int32_t>(i);
      } else {
        sum[at] += double{w} * f.element(i, column);
        magnitude[at] += std::abs(term);
      }
    }
  }
  if (f.has_argmax()) {
    ASSERT_EQ(results.argmax, argmax);
  }
  // The relative errors of the sum in float32, and of its rounding to the output's type.
  const double sums = 2e-6, last = f.vectors.dtype == DType::kFloat32   ? 1e-7
                                   : f.vectors.dtype == DType::kFloat16 ? std::ldexp(1, -11)
                                                                        : std::ldexp(1, -8);
  std::vector<float> values(n);
  LoadVector(f.vectors.dtype, results.pooled.data(), static_cast<int64_t>(n), values.data());
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

// A feature's vectors in one of the placements, with the row of zeros if they are on the host.
class PlacedVectors {
 public:
  PlacedVectors(const Feature& f, Placement placement, bool on_host) : n_(f.n + on_host) {
    const size_t odd = placement == Placement::kArray ? 0 : SizeOf(f.vectors.dtype);
    if (placement != Placement::kRows) {
      inputs_.emplace_back(f.vectors.raw.data(), n_ * f.vector_bytes(), odd);
      return;
    }
    for (size_t row = 0; row < n_; ++row) {
      inputs_.emplace_back(&f.vectors.raw[row * f.vector_bytes()], f.vector_bytes(), odd);
    }
    rows_ = Pointers(inputs_);
  }
  template <class Task>
  void Set(Task* task) const {
    task->n = n_;
    task->rows = rows_.empty() ? nullptr : rows_.data();
    task->vectors = rows_.empty() && n_ != 0 ? inputs_[0].get() : nullptr;
  }

 private:
  size_t n_;
  std::vector<Input> inputs_;
  std::vector<const void*> rows_;
};

// The outputs, which begin `before` elements after an aligned address.
struct Outputs {
  Outputs(const Feature& f, size_t before)
      : pooled(f.num_bags() * f.vector_bytes(), before * SizeOf(f.vectors.dtype)),
        argmax((f.has_argmax() ? f.num_bags() * f.dim() : 0) * 4, before * 4),
        gradient(f.c.index.size() * 4, before * 4) {}

  Output pooled, argmax, gradient;
};

// Replaces every NaN by one, because the bits of NaNs may differ.
inline std::vector<char> OneNan(DType dtype, std::vector<char> bytes) {
  std::vector<float> values(bytes.size() / SizeOf(dtype));
  LoadVector(dtype, bytes.data(), static_cast<int64_t>(values.size()), values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) std::memset(&bytes[i * SizeOf(dtype)], 0xFF, SizeOf(dtype));
  }
  return bytes;
}

// The tasks over features. Empty arrays are null.
struct GatherTasks {
  std::vector<PlacedVectors> placed;
  std::vector<Outputs> outputs;
  std::vector<GatherTask> pool;
  std::vector<GatherWeightTask> weights;

  GatherTasks(const std::vector<Feature>& features, Placement placement, bool on_host) {
    for (const Feature& f : features) {
      placed.emplace_back(f, placement, on_host);
      outputs.emplace_back(f, placement == Placement::kArray ? 0 : 1);
      Add(f, on_host ? f.host_index : f.c.index);
    }
  }

 private:
  void Add(const Feature& f, const std::vector<uint32_t>& index) {
    Outputs& out = outputs.back();
    GatherTask task;
    task.bags = &f.ids().bags;
    task.weights = index.empty() ? nullptr : f.ids().task.weights;
    task.combiner = f.ids().task.combiner;
    task.pooled = out.pooled.get();
    task.argmax = reinterpret_cast<int32_t*>(out.argmax.get());
    task.index = index.empty() ? nullptr : index.data();
    task.dtype = f.vectors.dtype;
    task.dim = f.ids().task.dim;
    placed.back().Set(&task);
    pool.push_back(task);
    GatherWeightTask weight;
    weight.bags = task.bags;
    weight.weights = index.empty() ? nullptr : f.ids().weights.data();
    weight.combiner = task.combiner;
    weight.argmax = task.argmax;
    weight.pooled = task.pooled;
    weight.upstream = f.num_bags() == 0 ? nullptr : f.ids().task.upstream;
    weight.gradient = reinterpret_cast<float*>(out.gradient.get());
    weight.index = task.index;
    weight.dtype = task.dtype;
    weight.dim = task.dim;
    placed.back().Set(&weight);
    weights.push_back(weight);
  }
};

inline Status PoolAt(HostPlace& at, const std::vector<GatherTask>& tasks) {
  GatherPool(at.exec(), tasks);
  return Status();
}
template <class Device>
Status PoolAt(DevicePlace<Device>& at, const std::vector<GatherTask>& tasks) {
  return at.Call([&](auto& session) { return device::GatherPool(session, tasks); });
}

inline Status WeightGradientAt(HostPlace& at, const std::vector<GatherWeightTask>& tasks) {
  GatherWeightGradient(at.exec(), tasks);
  return Status();
}
template <class Device>
Status WeightGradientAt(DevicePlace<Device>& at, const std::vector<GatherWeightTask>& tasks) {
  return at.Call([&](auto& session) { return device::GatherWeightGradient(session, tasks); });
}

template <class Place>
class GatherFixture : public testing::Test {
 protected:
  static constexpr bool kIsHost = Place::kIsHost;

  // All features in one call, in every placement.
  void Check(const std::vector<Feature>& features) {
    std::vector<Results> expected;
    for (const Feature& f : features) {
      expected.push_back(Expected(f));
      if (f.special) continue;
      ASSERT_NO_FATAL_FAILURE(CheckPooled(f, expected.back()));
    }
    place_.ForEach([&] {
      for (const Placement placement : kPlacements) {
        SCOPED_TRACE(testing::Message() << "placement " << static_cast<int>(placement));
        const GatherTasks tasks(features, placement, kIsHost);
        ASSERT_TRUE(PoolAt(place_, tasks.pool).ok());
        ASSERT_TRUE(WeightGradientAt(place_, tasks.weights).ok());
        for (size_t t = 0; t < features.size(); ++t) {
          const Feature& f = features[t];
          const Outputs& got = tasks.outputs[t];
          SCOPED_TRACE(Text(f, t));
          ASSERT_EQ(OneNan(f.vectors.dtype, got.pooled.Take()),
                    OneNan(f.vectors.dtype, expected[t].pooled));
          ASSERT_EQ(got.argmax.Take(), BytesOf(expected[t].argmax));
          ASSERT_EQ(OneNan(DType::kFloat32, got.gradient.Take()),
                    OneNan(DType::kFloat32, BytesOf(expected[t].gradient)));
        }
      }
    });
  }

  Place place_;

 private:
  template <class T>
  static std::vector<char> BytesOf(const std::vector<T>& values) {
    const char* const begin = reinterpret_cast<const char*>(values.data());
    return {begin, begin + values.size() * sizeof(T)};
  }

  static testing::Message Text(const Feature& f, size_t t) {
    return testing::Message() << "task " << t << " dtype " << static_cast<int>(f.vectors.dtype)
                              << " dim " << f.dim() << " combiner "
                              << static_cast<int>(f.ids().task.combiner) << " bags " << f.num_bags()
                              << " ids " << f.c.index.size() << " rows " << f.n
                              << (f.ids().task.weights != nullptr ? " weighted" : "");
  }
};

// Every combiner and form of bags, with weights and without.
inline void AddAllKinds(Shape shape, size_t n, std::mt19937_64* random, Numbers numbers,
                        std::vector<Feature>* features) {
  for (const Combiner combiner : kCombiners) {
    for (const Form form : kForms) {
      for (const bool weighted : {false, true}) {
        shape.combiner = combiner;
        shape.form = form;
        shape.weighted = weighted;
        features->push_back(MakeFeature(shape, n, random, numbers));
      }
    }
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GATHER_FIXTURE_H_
