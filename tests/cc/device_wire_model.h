// Rows and messages in a simulated device's memory, at any address. For device_wire_test.
#ifndef DYNEMB_TESTS_CC_DEVICE_WIRE_MODEL_H_
#define DYNEMB_TESTS_CC_DEVICE_WIRE_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cc/lookup/wire.h"
#include "cc/table/codec.h"
#include "tests/cc/wire_model.h"

namespace dynemb {

using Random = std::mt19937_64;

inline size_t RowBytes(const WireTable& table) {
  return static_cast<size_t>(table.dim) * SizeOf(table.dtype);
}

// Bytes that begin `shift` bytes after a multiple of 16. They end where their memory ends, so that
// sanitizers detect reads beyond. Null if there are none.
class Input {
 public:
  Input(const void* bytes, size_t n, size_t shift) : shift_(shift) {
    if (n == 0) return;
    memory_.reset(new char[shift + n]);
    memcpy(memory_.get() + shift, bytes, n);
  }
  const char* get() const { return memory_ == nullptr ? nullptr : memory_.get() + shift_; }

 private:
  size_t shift_;
  std::unique_ptr<char[]> memory_;
};

// Bytes to write to, `shift` bytes after a multiple of 16. They initially hold garbage, and have
// guards on both sides.
class Output {
 public:
  Output(size_t n, size_t shift)
      : n_(n), begin_(16 + shift), bytes_(begin_ + n + kGuards, kGarbage) {}
  char* get() { return n_ == 0 ? nullptr : bytes_.data() + begin_; }
  // The written bytes. Checks the guards.
  std::vector<char> Take() const {
    const auto begin = bytes_.begin() + static_cast<ptrdiff_t>(begin_);
    const auto end = begin + static_cast<ptrdiff_t>(n_);
    const auto is_guard = [](char byte) { return byte == kGarbage; };
    EXPECT_TRUE(std::all_of(bytes_.begin(), begin, is_guard)) << "written before the array";
    EXPECT_TRUE(std::all_of(end, bytes_.end(), is_guard)) << "written after the array";
    return {begin, end};
  }

 private:
  static constexpr char kGarbage = '\xA5';
  static constexpr size_t kGuards = 32;

  size_t n_, begin_;
  std::vector<char> bytes_;
};

// Replaces random bits by numbers of the table's type. Kind 0: ordinary numbers; 1: also special
// values; 2: rows of any magnitude.
inline void FillNumbers(const WireTable& table, size_t kind, Random* random,
                        std::vector<char>* vectors) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {0.0f,
                            -0.0f,
                            Limits::max(),
                            -Limits::max(),
                            Limits::infinity(),
                            -Limits::infinity(),
                            Limits::quiet_NaN(),
                            Limits::denorm_min(),
                            -Limits::min(),
                            65504.0f,
                            65520.0f,
                            1e-8f};
  std::vector<float> x(vectors->size() / SizeOf(table.dtype));
  std::normal_distribution<float> normal;
  float magnitude = 1.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    if (kind == 2 && i % static_cast<size_t>(table.dim) == 0) {
      magnitude = std::ldexp(1.0f, static_cast<int>((*random)() % 276) - 149);
    }
    x[i] = normal(*random) * magnitude;
    if (kind == 1 && (*random)() % 16 == 0) x[i] = specials[(*random)() % std::size(specials)];
  }
  StoreVector(table.dtype, x.data(), static_cast<int64_t>(x.size()), vectors->data());
}

// Random bits in a quarter of the tables, numbers of each kind in the others.
inline void FillNumbers(Random* random, Rows* rows) {
  for (size_t t = 0; t < rows->tables.size(); ++t) {
    const size_t kind = (*random)() % 4;
    if (kind < 3) FillNumbers(rows->tables[t], kind, random, &rows->vectors[t]);
  }
}

// Rows and messages in memory. Rows begin `shift` elements after a multiple of 16 bytes, and
// messages `shift` words.
struct Placed {
  WireLayout layout;
  std::vector<Input> rows, own;
  size_t shift;

  // The rows in `own` differ from the packed ones, so that a mix-up is detected.
  Placed(const Rows& of, size_t shift, Random* random) : shift(shift) {
    EXPECT_TRUE(layout.Init(of.tables, of.counts.data(), of.ranks, of.self).ok());
    for (size_t t = 0; t < of.tables.size(); ++t) {
      const size_t at = shift * SizeOf(of.tables[t].dtype);
      rows.emplace_back(of.vectors[t].data(), of.vectors[t].size(), at);
      if (of.self == kNoRank) continue;
      std::vector<char> bytes(layout.section(t, of.self).rows * RowBytes(of.tables[t]));
      for (char& byte : bytes) byte = static_cast<char>((*random)());
      own.emplace_back(bytes.data(), bytes.size(), at);
    }
  }
  static std::vector<const void*> Pointers(const std::vector<Input>& inputs) {
    std::vector<const void*> pointers;
    for (const Input& input : inputs) pointers.push_back(input.get());
    return pointers;
  }
  Output Words() const { return {layout.num_words() * sizeof(int32_t), shift * sizeof(int32_t)}; }
  std::vector<Output> Unpacked() const {
    std::vector<Output> unpacked;
    for (size_t t = 0; t < layout.tables().size(); ++t) {
      const WireTable& table = layout.tables()[t];
      unpacked.emplace_back(layout.num_rows(t) * RowBytes(table), shift * SizeOf(table.dtype));
    }
    return unpacked;
  }
};

inline int32_t* AsWords(char* bytes) { return reinterpret_cast<int32_t*>(bytes); }

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_WIRE_MODEL_H_
