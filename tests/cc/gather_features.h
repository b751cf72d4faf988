// Features whose received vectors are pooled on a device, the placements of their arrays in memory,
// and the tasks over them. For device_gather_test.
#ifndef DYNEMB_TESTS_CC_GATHER_FEATURES_H_
#define DYNEMB_TESTS_CC_GATHER_FEATURES_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cc/lookup/gather.h"
#include "cc/table/codec.h"
#include "tests/cc/gather_model.h"

namespace dynemb {

constexpr unsigned char kGuard = 0xA5;
constexpr size_t kGuards = 32;

// The placement of vectors and results: one array that is aligned like an allocation, one array
// that is aligned only to its elements, or one array per vector, aligned only to its elements.
enum class Placement { kArray, kOddArray, kRows };
constexpr Placement kPlacements[] = {Placement::kArray, Placement::kOddArray, Placement::kRows};

inline float Special(std::mt19937_64* random) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {
      Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity(), Limits::max(), 0.0f, -0.0f,
      Limits::denorm_min()};
  return specials[(*random)() % std::size(specials)];
}

// One feature. On a device, an index may be n or more. On the host, the ids with such an index read
// one more row, of zeros.
struct Feature {
  GatherCase c;  // with the device's indices
  std::vector<uint32_t> host_index;
  size_t n = 0;     // rows on the device
  Vectors vectors;  // [n + 1, dim]

  const Case& ids() const { return *c.ids; }
  size_t vector_bytes() const {
    return static_cast<size_t>(ids().task.dim) * SizeOf(vectors.dtype);
  }
  bool has_argmax() const { return ids().task.combiner == Combiner::kMax; }
};

struct Numbers {
  size_t beyond = 0;     // one id in `beyond` has an index of n or more; 0: none
  bool special = false;  // some vector elements and weights are NaN, infinite, and so on
};

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
  return {std::move(c), std::move(host_index), n, std::move(vectors)};
}

// An allocation that ends after exactly `bytes` bytes, so that the address sanitizer reports an
// access past its end. Filled with garbage. It begins `odd` bytes after an aligned address.
class Block {
 public:
  Block(size_t bytes, size_t odd, const void* contents = nullptr)
      : odd_(odd), bytes_(bytes), memory_(new char[odd + bytes]) {
    std::memset(memory_.get(), kGuard, odd + bytes);
    if (contents != nullptr && bytes != 0) std::memcpy(data(), contents, bytes);
  }
  char* data() const { return memory_.get() + odd_; }
  // All bytes, including the `odd` bytes in front.
  std::vector<char> Bytes() const { return {memory_.get(), memory_.get() + odd_ + bytes_}; }

 private:
  size_t odd_, bytes_;
  std::unique_ptr<char[]> memory_;
};

template <class T>
T* OrNull(const Block& block, size_t n) {
  return n == 0 ? nullptr : reinterpret_cast<T*>(block.data());
}

// A feature's vectors in one of the placements. Arrays without elements are null.
class PlacedVectors {
 public:
  PlacedVectors(const Feature& f, Placement placement) : n_(f.n) {
    const size_t odd = placement == Placement::kArray ? 0 : SizeOf(f.vectors.dtype);
    if (placement != Placement::kRows) {
      blocks_.emplace_back(f.n * f.vector_bytes(), odd, f.vectors.raw.data());
      return;
    }
    for (size_t row = 0; row < f.n; ++row) {
      blocks_.emplace_back(f.vector_bytes(), odd, &f.vectors.raw[row * f.vector_bytes()]);
      rows_.push_back(blocks_.back().data());
    }
  }
  template <class Task>
  void Set(Task* task) {
    task->n = n_;
    task->rows = rows_.empty() ? nullptr : rows_.data();
    task->vectors = rows_.empty() && n_ != 0 ? blocks_[0].data() : nullptr;
  }

 private:
  size_t n_;
  std::vector<Block> blocks_;
  std::vector<const void*> rows_;
};

// The outputs, between guard bytes.
struct Outputs {
  Outputs(const Feature& f, size_t before)
      : odd(before * SizeOf(f.vectors.dtype)),
        num_bags(f.ids().bags.num_bags()),
        pooled(num_bags * f.vector_bytes() + kGuards, odd),
        argmax(
            (f.has_argmax() ? num_bags * static_cast<size_t>(f.ids().task.dim) : 0) * 4 + kGuards,
            before * 4),
        gradient(f.c.index.size() * 4 + kGuards, before * 4) {}

  size_t odd, num_bags;
  Block pooled, argmax, gradient;
};

// Replaces every NaN by one, because the bits of NaNs may differ.
inline std::vector<char> OneNan(DType dtype, size_t odd, std::vector<char> bytes) {
  std::vector<float> values((bytes.size() - odd - kGuards) / SizeOf(dtype));
  LoadVector(dtype, bytes.data() + odd, static_cast<int64_t>(values.size()), values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) std::memset(&bytes[odd + i * SizeOf(dtype)], 0xFF, SizeOf(dtype));
  }
  return bytes;
}

// Tasks over a feature's ids. PlacedVectors::Set then sets their vectors.
inline GatherTask PoolTaskOf(const Feature& f, const std::vector<uint32_t>& index, Outputs* out) {
  GatherTask task;
  task.bags = &f.ids().bags;
  task.weights = index.empty() ? nullptr : f.ids().task.weights;
  task.combiner = f.ids().task.combiner;
  task.pooled = OrNull<char>(out->pooled, out->num_bags);
  task.argmax = OrNull<int32_t>(out->argmax, f.has_argmax() ? out->num_bags : 0);
  task.index = index.empty() ? nullptr : index.data();
  task.dtype = f.vectors.dtype;
  task.dim = f.ids().task.dim;
  return task;
}

inline GatherWeightTask WeightTaskOf(const Feature& f, const std::vector<uint32_t>& index,
                                     const Outputs& pooled, Outputs* out) {
  GatherWeightTask task;
  task.bags = &f.ids().bags;
  task.weights = index.empty() ? nullptr : f.ids().weights.data();
  task.combiner = f.ids().task.combiner;
  task.argmax = OrNull<int32_t>(pooled.argmax, f.has_argmax() ? pooled.num_bags : 0);
  task.pooled = OrNull<char>(pooled.pooled, pooled.num_bags);
  task.upstream = pooled.num_bags == 0 ? nullptr : f.ids().task.upstream;
  task.gradient = OrNull<float>(out->gradient, index.size());
  task.index = index.empty() ? nullptr : index.data();
  task.dtype = f.vectors.dtype;
  task.dim = f.ids().task.dim;
  return task;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GATHER_FEATURES_H_
