// Rows of any numbers at any address, of many tables and ranks, packed and unpacked on the host and
// on simulated devices. For the bounds of int8 see wire_int8_test; for the layout of messages,
// wire_layout_test.
#include "cc/lookup/wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cc/table/codec.h"
#include "tests/cc/wire_fixture.h"

namespace dynemb {
namespace {

template <class Place>
class WireTest : public WireFixture<Place> {};

TYPED_TEST_SUITE(WireTest, Places);

// Rows of every dtype, dim and wire type in one call, with numbers of every kind.
TYPED_TEST(WireTest, EveryTypeDimAndAddress) {
  Random random(1);
  const std::vector<int64_t> few = {1, 2, 3, 4, 5, 7, 8, 16, 33, 130},
                             all = {1,  2,  3,  4,  5,   7,   8,   15,  16, 17,
                                    31, 33, 64, 65, 127, 128, 130, 257, 300};
  std::vector<WireTable> tables;
  for (DType dtype : kDTypes) {
    for (WireType wire : kWires) {
      for (int64_t dim : this->kSlow ? few : all) tables.push_back({dtype, dim, wire});
    }
  }
  for (size_t kind = 0; kind < 4; ++kind) {
    SCOPED_TRACE(testing::Message() << "kind " << kind);
    std::vector<int64_t> counts;
    for (size_t t = 0; t < tables.size(); ++t) {
      for (int64_t most : {3, 5, 2}) counts.push_back(static_cast<int64_t>(random()) & most);
    }
    Rows rows = MakeRows(tables, counts, &random);
    rows.self = kind == 3 ? kNoRank : static_cast<uint32_t>(kind);
    for (size_t t = 0; t < tables.size() && kind < 3; ++t) {
      FillNumbers(tables[t], kind, &random, &rows.vectors[t]);
    }
    for (size_t shift = 0; shift < 8; ++shift) {
      if (this->kSlow && shift % 4 != kind) continue;
      SCOPED_TRACE(testing::Message() << "shift " << shift);
      ASSERT_NO_FATAL_FAILURE(this->Check(rows, shift));
    }
  }
}

TYPED_TEST(WireTest, ManyTablesAndRanks) {
  Random random(2);
  for (int round = 0; round < (this->kSlow ? 12 : 150); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    // On the host, some tables have more rows than one range of work.
    const uint64_t most = this->kSlow ? 6 : round % 15 == 0 ? 4000 : 40;
    Rows rows = RandomRows(random() % 7, 1 + static_cast<uint32_t>(random() % 6), most, &random);
    FillNumbers(&random, &rows);
    std::vector<size_t> left_out;
    for (size_t t = 0; t < rows.tables.size(); ++t) {
      if (random() % 4 == 0) left_out.push_back(t);
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(rows, random() % 4, left_out));
  }
}

// Rows longer than the width of a team, and more rows than one wave of a launch has.
TYPED_TEST(WireTest, LongRows) {
  Random random(3);
  const int64_t most = this->kSlow ? 70 : 700;
  for (WireType wire : kWires) {
    for (DType dtype : kDTypes) {
      Rows rows =
          MakeRows({{dtype, 300, wire}, {dtype, 1, WireType::kInt8}}, {2, 1, 7, most}, &random);
      for (size_t t = 0; t < 2; ++t) FillNumbers(rows.tables[t], 0, &random, &rows.vectors[t]);
      ASSERT_NO_FATAL_FAILURE(this->Check(rows, 1));
    }
  }
}

// The rows that a rank sends to itself are not rounded, even if there are many.
TYPED_TEST(WireTest, OwnRowsKeepEveryBit) {
  Random random(7);
  const int64_t most = this->kSlow ? 90 : 9000;
  for (WireType wire : kWires) {
    Rows rows = MakeRows({{DType::kFloat32, 5, wire}, {DType::kFloat32, 16, wire}},
                         {3, most, 4, 2, 0, 7}, &random);
    rows.self = 1;
    ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  }
}

// The largest element of a row, or an element that is not finite, may be in any column.
TYPED_TEST(WireTest, ScaleDependsOnAllColumns) {
  Random random(4);
  for (DType dtype : kDTypes) {
    constexpr size_t kDim = 70;
    Rows rows = MakeRows({{dtype, kDim, WireType::kInt8}}, {kDim, kDim}, &random);
    std::vector<float> x(2 * kDim * kDim);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 11) - 5.0f;
    for (size_t r = 0; r < kDim; ++r) {
      x[r * kDim + r] = r % 2 == 0 ? -100.0f : 90.0f;
      x[(kDim + r) * kDim + r] = r % 2 == 0 ? HUGE_VALF : std::nanf("");
    }
    StoreVector(dtype, x.data(), static_cast<int64_t>(x.size()), rows.vectors[0].data());
    ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  }
}

TYPED_TEST(WireTest, FewOrNoRows) {
  Random random(5);
  Rows rows;
  rows.ranks = 4;
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));  // no tables
  rows.self = 2;
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  const std::vector<WireTable> tables = {{DType::kFloat32, 5, WireType::kInt8},
                                         {DType::kFloat16, 3, WireType::kSame},
                                         {DType::kFloat32, 4, WireType::kBfloat16}};
  for (const uint32_t self : {kNoRank, 0u, 2u}) {
    Rows empty = MakeRows(tables, std::vector<int64_t>(9, 0), &random);
    empty.self = self;
    ASSERT_NO_FATAL_FAILURE(this->Check(empty));  // all pointers are null
    Rows first = MakeRows(tables, {2, 0, 0, 3, 0, 0, 1, 0, 0}, &random);
    first.self = self;  // if that is 0, nothing is sent
    ASSERT_NO_FATAL_FAILURE(this->Check(first));
    ASSERT_NO_FATAL_FAILURE(this->Check(first, 0, {0, 1, 2}));
    ASSERT_NO_FATAL_FAILURE(this->Check(first, 0, {0, 2}));
  }
}

// Only a few of many sections have rows.
TYPED_TEST(WireTest, MaximalNumberOfRanks) {
  Random random(6);
  constexpr uint32_t kRanks = Owners::kMaxRanks;
  std::vector<int64_t> counts(3 * kRanks);
  for (int i = 0; i < 60; ++i) counts[random() % counts.size()] = 1;
  counts[kRanks - 1] = counts[kRanks] = counts.back() = 2;
  Rows rows = MakeRows({{DType::kFloat32, 6, WireType::kInt8},
                        {DType::kBfloat16, 5, WireType::kSame},
                        {DType::kFloat32, 3, WireType::kFloat16}},
                       counts, &random);
  rows.self = kRanks - 1;
  ASSERT_NO_FATAL_FAILURE(this->Check(rows));
  if (this->kSlow) return;
  for (int64_t& count : counts) count = static_cast<int64_t>(random() % 3);
  rows = MakeRows(rows.tables, counts, &random);
  ASSERT_NO_FATAL_FAILURE(this->Check(rows, 1));
}

}  // namespace
}  // namespace dynemb
