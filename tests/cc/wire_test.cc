// The layout of messages, and the types that keep all bits or round to nearest; for int8 see
// wire_int8_test.
#include "cc/lookup/wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/half.h"
#include "tests/cc/execs.h"
#include "tests/cc/wire_model.h"

namespace dynemb {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
constexpr WireType kWires[] = {WireType::kSame, WireType::kFloat16, WireType::kBfloat16,
                               WireType::kInt8};
constexpr int64_t kDims[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 128, 257, 300};

// The number of words, by the table in wire.h.
size_t ExpectedWords(const WireTable& t, size_t rows) {
  const size_t elements = rows * static_cast<size_t>(t.dim);
  if (t.wire == WireType::kInt8) return rows + (elements + 3) / 4;
  if (t.wire == WireType::kSame && t.dtype == DType::kFloat32) return elements;
  return (elements + 1) / 2;
}

TEST(WireTest, SectionsAreOrderedByRankAndTable) {
  std::mt19937_64 random(1);
  WireLayout layout;  // reused in all rounds
  for (int round = 0; round < 300; ++round) {
    const Rows rows = RandomRows(random() % 6, 1 + random() % 5, 30, &random);
    ASSERT_TRUE(layout.Init(rows.tables, rows.counts.data(), rows.ranks, rows.self).ok());
    ASSERT_EQ(layout.ranks(), rows.ranks);
    ASSERT_EQ(layout.self(), rows.self);
    ASSERT_EQ(layout.tables().size(), rows.tables.size());
    size_t word = 0;
    std::vector<size_t> first_row(rows.tables.size());
    for (uint32_t r = 0; r < rows.ranks; ++r) {
      const size_t begin = word;
      for (size_t t = 0; t < rows.tables.size(); ++t) {
        const WireLayout::Section& s = layout.section(t, r);
        const auto count = static_cast<size_t>(rows.counts[t * rows.ranks + r]);
        ASSERT_EQ(s.word, word) << "table " << t << ", rank " << r;
        ASSERT_EQ(s.first_row, first_row[t]);
        ASSERT_EQ(s.rows, count);
        ASSERT_EQ(WireLayout::Words(rows.tables[t], count), ExpectedWords(rows.tables[t], count));
        if (r != rows.self) word += ExpectedWords(rows.tables[t], count);
        first_row[t] += count;
      }
      ASSERT_EQ(layout.num_words(r), word - begin);
    }
    ASSERT_EQ(layout.num_words(), word);
    for (size_t t = 0; t < rows.tables.size(); ++t) ASSERT_EQ(layout.num_rows(t), first_row[t]);
  }
}

TEST(WireTest, SameKeepsEveryBit) {
  std::mt19937_64 random(2);
  for (int64_t dim : kDims) {
    for (DType dtype : kDTypes) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", dtype " << int(dtype));
      // All bit patterns may occur, including NaNs with any payload.
      Rows rows = MakeRows({{dtype, dim, WireType::kSame}}, {0, 7, 1, 0, 300}, &random);
      std::vector<std::vector<char>> unpacked;
      ASSERT_NO_FATAL_FAILURE(PackAndUnpack(rows, nullptr, &unpacked));
      ASSERT_EQ(unpacked, rows.vectors);
    }
  }
}

// Rows that a rank sends to itself are not rounded.
TEST(WireTest, OwnRowsKeepEveryBit) {
  std::mt19937_64 random(7);
  for (WireType wire : kWires) {
    Rows rows = MakeRows({{DType::kFloat32, 5, wire}, {DType::kFloat32, 16, wire}},
                         {3, 9000, 4, 2, 0, 7}, &random);
    rows.self = 1;
    std::vector<std::vector<char>> unpacked;
    ASSERT_NO_FATAL_FAILURE(PackAndUnpack(rows, nullptr, &unpacked));
    const auto begin = rows.vectors[0].begin() + 3 * 20, end = begin + 9000 * 20;
    ASSERT_TRUE(std::equal(begin, end, unpacked[0].begin() + 3 * 20)) << int(wire);
  }
}

// In its own type, a 16-bit vector is exact, and not longer than in the other 16-bit type.
TEST(WireTest, NarrowTablesAreSentUnchanged) {
  std::mt19937_64 random(3);
  for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    for (WireType wire : {WireType::kFloat16, WireType::kBfloat16}) {
      Rows same = MakeRows({{dtype, 5, WireType::kSame}}, {3, 0, 50}, &random);
      Rows rows = same;
      rows.tables[0].wire = wire;
      std::vector<int32_t> words, expected;
      std::vector<std::vector<char>> unpacked;
      ASSERT_NO_FATAL_FAILURE(PackAndUnpack(same, &expected, &unpacked));
      ASSERT_NO_FATAL_FAILURE(PackAndUnpack(rows, &words, &unpacked));
      EXPECT_EQ(words, expected);
      EXPECT_EQ(unpacked, rows.vectors);
    }
  }
}

template <DType kType>
void CheckNearest(WireType wire) {
  std::mt19937_64 random(4);
  for (int64_t dim : kDims) {
    SCOPED_TRACE(testing::Message() << "dim " << dim);
    Rows rows = MakeRows({{DType::kFloat32, dim, wire}}, {5, 0, 200}, &random);
    auto* const x = reinterpret_cast<float*>(rows.vectors[0].data());
    const auto n = static_cast<size_t>(205 * dim);
    // Besides random patterns: usual values, ties, and values that a format cannot hold.
    std::normal_distribution<float> normal;
    const float special[] = {0.0f,       -0.0f,
                             1.0f,       HUGE_VALF,
                             -HUGE_VALF, 65504.0f,
                             65520.0f,   65519.9f,
                             1e-8f,      -6e-8f,
                             1.001953f,  3.39e38f,
                             1e-45f,     std::numeric_limits<float>::max()};
    for (size_t i = 0; i < n; ++i) {
      if (i % 3 == 0) x[i] = normal(random);
      if (i % 7 == 0) x[i] = special[random() % 14];
    }
    std::vector<int32_t> words;
    std::vector<std::vector<char>> unpacked;
    ASSERT_NO_FATAL_FAILURE(PackAndUnpack(rows, &words, &unpacked));
    const auto* const arrived = reinterpret_cast<const uint32_t*>(unpacked[0].data());
    // The second section begins at a whole word.
    const size_t first = static_cast<size_t>(5 * dim), second_word = (first + 1) / 2;
    for (size_t i = 0; i < n; ++i) {
      const uint16_t expected = HalfFormat<kType>::ToNearest(x[i]);
      uint16_t on_the_wire;
      const size_t at = i < first ? 2 * i : 4 * second_word + 2 * (i - first);
      std::memcpy(&on_the_wire, reinterpret_cast<const char*>(words.data()) + at, 2);
      ASSERT_EQ(on_the_wire, expected) << x[i];
      ASSERT_EQ(arrived[i], FloatBits(HalfFormat<kType>::ToFloat(expected))) << x[i];
    }
  }
}

TEST(WireTest, Float16RoundsToNearest) { CheckNearest<DType::kFloat16>(WireType::kFloat16); }
TEST(WireTest, Bfloat16RoundsToNearest) { CheckNearest<DType::kBfloat16>(WireType::kBfloat16); }

// PackAndUnpack checks that all words are written, and that all Execs give the same bits.
TEST(WireTest, ManyTablesOfAllKinds) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    // Some tables have more rows than one range of work.
    const Rows rows =
        RandomRows(random() % 7, 1 + random() % 6, round % 4 == 0 ? 4000 : 40, &random);
    std::vector<std::vector<char>> unpacked;
    ASSERT_NO_FATAL_FAILURE(PackAndUnpack(rows, nullptr, &unpacked));
    for (size_t t = 0; t < rows.tables.size(); ++t) {
      if (rows.tables[t].wire == WireType::kSame) {
        ASSERT_EQ(unpacked[t], rows.vectors[t]) << t;
      }
    }
  }
}

// Every byte of a message is defined, not left from earlier contents of the memory.
TEST(WireTest, PaddingIsZero) {
  std::mt19937_64 random(6);
  for (DType dtype : kDTypes) {
    for (WireType wire : kWires) {
      for (int64_t dim : {1, 2, 3, 5, 8}) {
        Rows rows = MakeRows({{dtype, dim, wire}, {dtype, dim, wire}}, {1, 3, 0, 5, 7, 1}, &random);
        std::vector<int32_t> words;
        std::vector<std::vector<char>> unpacked;
        ASSERT_NO_FATAL_FAILURE(PackAndUnpack(rows, &words, &unpacked));
        WireLayout layout;
        ASSERT_TRUE(layout.Init(rows.tables, rows.counts.data(), rows.ranks).ok());
        for (size_t t = 0; t < 2; ++t) {
          for (uint32_t r = 0; r < rows.ranks; ++r) {
            const WireLayout::Section& s = layout.section(t, r);
            const size_t elements = s.rows * static_cast<size_t>(dim);
            const size_t used = wire == WireType::kInt8 ? 4 * s.rows + elements
                                : wire == WireType::kSame && dtype == DType::kFloat32
                                    ? 4 * elements
                                    : 2 * elements;
            const char* const bytes = reinterpret_cast<const char*>(words.data() + s.word);
            for (size_t b = used; b < 4 * ExpectedWords(rows.tables[t], s.rows); ++b) {
              ASSERT_EQ(bytes[b], 0) << "table " << t << ", rank " << r << ", byte " << b;
            }
          }
        }
      }
    }
  }
}

TEST(WireTest, TypesHaveNames) {
  const std::pair<std::string, WireType> names[] = {{"same", WireType::kSame},
                                                    {"float16", WireType::kFloat16},
                                                    {"bfloat16", WireType::kBfloat16},
                                                    {"int8", WireType::kInt8}};
  for (const auto& [name, expected] : names) {
    WireType type = expected == WireType::kSame ? WireType::kInt8 : WireType::kSame;
    ASSERT_TRUE(ParseWireType(name, &type).ok());
    EXPECT_EQ(type, expected) << name;
  }
  for (const char* name : {"", "Same", "float32", "int8 ", "fp16"}) {
    WireType type;
    const Status status = ParseWireType(name, &type);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(std::string("'") + name + "'"), std::string::npos);
  }
}

TEST(WireTest, ImpossibleCountsAreRefused) {
  WireLayout layout;
  const auto init = [&](const WireTable& table, const std::vector<int64_t>& counts) {
    return layout.Init({table}, counts.data(), static_cast<uint32_t>(counts.size()));
  };
  const WireTable floats{DType::kFloat32, 4, WireType::kSame};
  EXPECT_EQ(init({DType::kFloat32, 0, WireType::kSame}, {1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(init({DType::kFloat32, -3, WireType::kInt8}, {1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(init(floats, {0, -1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(init(floats, {std::numeric_limits<int64_t>::min()}).code(), Code::kInvalidArgument);
  // 2^31 - 1 words at most.
  EXPECT_TRUE(init(floats, {1, (int64_t{1} << 29) - 1}).ok());
  EXPECT_EQ(layout.num_words(1), (size_t{1} << 31) - 4);
  const Status status = init(floats, {1, int64_t{1} << 29});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
  // Counts whose sizes in bytes would wrap around to small numbers.
  for (WireType wire : kWires) {
    for (DType dtype : kDTypes) {
      for (int64_t dim : {int64_t{1}, int64_t{4}, int64_t{3}, int64_t{1} << 20}) {
        for (int shift = 33; shift <= 62; ++shift) {
          const int64_t half = int64_t{1} << shift;
          for (const std::vector<int64_t>& counts :
               {std::vector<int64_t>{half, half, half, half + 1},
                std::vector<int64_t>{half - 1 + half, 1}}) {
            ASSERT_FALSE(init({dtype, dim, wire}, counts).ok())
                << "counts of 2^" << shift << ", dim " << dim;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace dynemb
