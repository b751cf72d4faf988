// The layout of messages, and the counts that they can hold.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/wire.h"
#include "tests/cc/wire_model.h"

namespace dynemb {
namespace {

// The number of words in a section.
size_t ExpectedWords(const WireTable& table, size_t rows) {
  return (SectionBytes(table, rows) + 3) / 4;
}

TEST(WireLayoutTest, SectionsAreOrderedByRankAndTable) {
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

TEST(WireLayoutTest, TypesHaveNames) {
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

TEST(WireLayoutTest, ImpossibleCountsAreRefused) {
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
  // The tables of a message share its words.
  const int64_t quarter = int64_t{1} << 28;
  for (const int64_t rows : {quarter - 1, quarter}) {
    const std::vector<int64_t> counts = {quarter, rows};
    EXPECT_EQ(layout.Init({floats, floats}, counts.data(), 1).ok(), rows < quarter);
  }
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
