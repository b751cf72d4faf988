// Rows of several tables in memory, and the messages and rows that wire.h promises for them, by its
// formulas. For the tests of the wire.
#ifndef DYNEMB_TESTS_CC_WIRE_MODEL_H_
#define DYNEMB_TESTS_CC_WIRE_MODEL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "cc/lookup/wire.h"
#include "cc/table/codec.h"
#include "cc/table/float_bits.h"
#include "cc/table/half.h"
#include "tests/cc/exact_memory.h"

namespace dynemb {

using Random = std::mt19937_64;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
constexpr WireType kWires[] = {WireType::kSame, WireType::kFloat16, WireType::kBfloat16,
                               WireType::kInt8};

struct Rows {
  std::vector<WireTable> tables;
  uint32_t ranks = 1;
  uint32_t self = kNoRank;
  std::vector<int64_t> counts;             // [tables, ranks]
  std::vector<std::vector<char>> vectors;  // of each table
};

// Rows of random bits.
inline Rows MakeRows(const std::vector<WireTable>& tables, const std::vector<int64_t>& counts,
                     Random* random) {
  Rows rows;
  rows.tables = tables;
  rows.ranks = static_cast<uint32_t>(counts.size() / tables.size());
  rows.counts = counts;
  for (size_t t = 0; t < tables.size(); ++t) {
    int64_t n = 0;
    for (uint32_t r = 0; r < rows.ranks; ++r) n += counts[t * rows.ranks + r];
    rows.vectors.emplace_back(static_cast<size_t>(n * tables[t].dim) * SizeOf(tables[t].dtype));
    for (char& byte : rows.vectors[t]) byte = static_cast<char>((*random)());
  }
  return rows;
}

inline Rows RandomRows(size_t tables, uint32_t ranks, uint64_t most, Random* random) {
  std::vector<WireTable> of_table(tables);
  std::vector<int64_t> counts;
  for (WireTable& table : of_table) {
    table.dtype = static_cast<DType>((*random)() % 3);
    table.wire = static_cast<WireType>((*random)() % 4);
    table.dim = 1 + static_cast<int64_t>((*random)() % 40);
    for (uint32_t r = 0; r < ranks; ++r) {
      counts.push_back((*random)() % 3 == 0 ? 0 : static_cast<int64_t>((*random)() % most));
    }
  }
  Rows rows;
  if (tables > 0) rows = MakeRows(of_table, counts, random);
  rows.ranks = ranks;
  if ((*random)() % 3 > 0) rows.self = static_cast<uint32_t>((*random)() % ranks);
  return rows;
}

// Replaces random bits by numbers of the table's type. Kind 0: ordinary numbers; 1: also special
// values; 2: rows of any magnitude.
inline void FillNumbers(const WireTable& table, size_t kind, Random* random,
                        std::vector<char>* vectors) {
  using Limits = std::numeric_limits<float>;
  // Also ties, and values that a 16-bit type cannot hold.
  const float specials[] = {0.0f,
                            -0.0f,
                            1.0f,
                            Limits::max(),
                            -Limits::max(),
                            Limits::infinity(),
                            -Limits::infinity(),
                            Limits::quiet_NaN(),
                            Limits::denorm_min(),
                            -Limits::min(),
                            65504.0f,
                            65519.9f,
                            65520.0f,
                            1e-8f,
                            -6e-8f,
                            1.001953f,
                            3.39e38f};
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

inline size_t RowBytes(const WireTable& table) {
  return static_cast<size_t>(table.dim) * SizeOf(table.dtype);
}

// Whether rows are sent in the table's own type, which is exact.
inline bool Unchanged(const WireTable& table) {
  return table.wire == WireType::kSame ||
         (table.wire != WireType::kInt8 && table.dtype != DType::kFloat32);
}

// The bytes of a section of `rows` rows, by the table in wire.h, without the rest of the last word.
inline size_t SectionBytes(const WireTable& table, size_t rows) {
  const size_t elements = rows * static_cast<size_t>(table.dim);
  if (table.wire == WireType::kInt8) return 4 * rows + elements;
  return Unchanged(table) ? elements * SizeOf(table.dtype) : 2 * elements;
}

// Appends the section of these rows to `message`.
inline void AppendSection(const WireTable& table, const char* vectors, size_t rows,
                          std::vector<char>* message) {
  const auto append = [message](const void* bytes, size_t n) {
    const char* const begin = static_cast<const char*>(bytes);
    message->insert(message->end(), begin, begin + n);
  };
  const auto dim = static_cast<size_t>(table.dim);
  std::vector<float> x(rows * dim);
  if (Unchanged(table)) {
    append(vectors, rows * RowBytes(table));
  } else if (table.wire == WireType::kInt8) {
    LoadVector(table.dtype, vectors, static_cast<int64_t>(x.size()), x.data());
    std::vector<int8_t> q;
    for (size_t r = 0; r < rows; ++r) {
      const float* const row = x.data() + r * dim;
      float largest = 0;
      bool finite = true;
      for (size_t c = 0; c < dim; ++c) {
        finite &= std::isfinite(row[c]);
        largest = std::max(largest, std::abs(row[c]));
      }
      // The scale is rounded down if 127 times it would overflow, and 0 if it is below 2^-125.
      float scale = largest / 127.0f;
      if (!std::isfinite(scale * 127.0f)) scale = std::nextafter(scale, 0.0f);
      if (scale < 0x1p-125f) scale = 0.0f;
      for (size_t c = 0; c < dim; ++c) {
        const bool zero = !finite || scale == 0.0f;
        q.push_back(zero ? int8_t{0}
                         : static_cast<int8_t>(std::nearbyint(row[c] * (127.0f / largest))));
      }
      if (!finite) scale = BitsToFloat(0x7FFFFFFFu);
      append(&scale, sizeof(scale));
    }
    append(q.data(), q.size());
  } else {
    x.resize(rows * dim);
    if (!x.empty()) std::memcpy(x.data(), vectors, x.size() * sizeof(float));
    for (const float value : x) {
      const uint16_t half = table.wire == WireType::kFloat16
                                ? HalfFormat<DType::kFloat16>::ToNearest(value)
                                : HalfFormat<DType::kBfloat16>::ToNearest(value);
      append(&half, sizeof(half));
    }
  }
  // Every byte of the last word is defined.
  while (message->size() % sizeof(int32_t) != 0) message->push_back(0);
}

// Appends to `vectors` the rows that arrive in this section.
inline void AppendRows(const WireTable& table, const char* section, size_t rows,
                       std::vector<char>* vectors) {
  const auto dim = static_cast<size_t>(table.dim);
  std::vector<float> x(rows * dim);
  std::vector<char> bytes(rows * RowBytes(table));
  if (bytes.empty()) return;
  if (Unchanged(table)) {
    std::memcpy(bytes.data(), section, bytes.size());
  } else if (table.wire == WireType::kInt8) {
    for (size_t i = 0; i < x.size(); ++i) {
      float scale;
      std::memcpy(&scale, section + i / dim * sizeof(float), sizeof(float));
      const auto q = static_cast<int8_t>(section[rows * sizeof(float) + i]);
      // The elements of a row that is not finite have the bits of its scale.
      x[i] = std::isnan(scale) ? scale : scale * q;
    }
    StoreVector(table.dtype, x.data(), static_cast<int64_t>(x.size()), bytes.data());
  } else {
    for (size_t i = 0; i < x.size(); ++i) {
      uint16_t half;
      std::memcpy(&half, section + i * sizeof(half), sizeof(half));
      x[i] = table.wire == WireType::kFloat16 ? HalfFormat<DType::kFloat16>::ToFloat(half)
                                              : HalfFormat<DType::kBfloat16>::ToFloat(half);
    }
    std::memcpy(bytes.data(), x.data(), bytes.size());
  }
  vectors->insert(vectors->end(), bytes.begin(), bytes.end());
}

// Rows and messages in memory. Rows begin `shift` elements after a multiple of 16 bytes, and
// messages `shift` words.
struct Placed {
  WireLayout layout;
  std::vector<Input> rows, own;
  std::vector<std::vector<char>> own_bytes;
  size_t shift;

  // The rows in `own` differ from the packed ones, so that a mix-up is detected.
  Placed(const Rows& of, size_t shift, Random* random) : shift(shift) {
    EXPECT_TRUE(layout.Init(of.tables, of.counts.data(), of.ranks, of.self).ok());
    for (size_t t = 0; t < of.tables.size(); ++t) {
      const size_t at = shift * SizeOf(of.tables[t].dtype);
      rows.emplace_back(of.vectors[t].data(), of.vectors[t].size(), at);
      if (of.self == kNoRank) continue;
      const auto n = static_cast<size_t>(of.counts[t * of.ranks + of.self]);
      own_bytes.emplace_back(n * RowBytes(of.tables[t]));
      for (char& byte : own_bytes[t]) byte = static_cast<char>((*random)());
      own.emplace_back(own_bytes[t].data(), own_bytes[t].size(), at);
    }
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

// What is sent, and what arrives.
struct Sent {
  std::vector<char> message;                  // to all ranks
  std::vector<std::vector<char>> vectors;     // of each table
  std::vector<std::vector<size_t>> sections;  // [tables][ranks]: where each begins in the message
};

// The words of the tables in `left_out`, which are not packed, are the garbage of Output.
inline Sent Expected(const Rows& rows, const Placed& placed, const std::vector<size_t>& left_out) {
  const size_t tables = rows.tables.size();
  Sent sent;
  sent.vectors.resize(tables);
  sent.sections.resize(tables);
  std::vector<size_t> read(tables);  // bytes of each table's vectors
  for (uint32_t rank = 0; rank < rows.ranks; ++rank) {
    for (size_t t = 0; t < tables; ++t) {
      const WireTable& table = rows.tables[t];
      const auto n = static_cast<size_t>(rows.counts[t * rows.ranks + rank]);
      const size_t begin = sent.message.size();
      sent.sections[t].push_back(begin);
      std::vector<char>& arrived = sent.vectors[t];
      if (rank == rows.self) {
        arrived.insert(arrived.end(), placed.own_bytes[t].begin(), placed.own_bytes[t].end());
      } else {
        AppendSection(table, rows.vectors[t].data() + read[t], n, &sent.message);
        if (std::count(left_out.begin(), left_out.end(), t) > 0) {
          std::fill(sent.message.begin() + static_cast<ptrdiff_t>(begin), sent.message.end(),
                    Output::kGarbage);
        }
        AppendRows(table, sent.message.data() + begin, n, &arrived);
      }
      read[t] += n * RowBytes(table);
    }
  }
  return sent;
}

inline int32_t* AsWords(char* bytes) { return reinterpret_cast<int32_t*>(bytes); }

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_WIRE_MODEL_H_
