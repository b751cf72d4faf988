#include "cc/table/evicted_rows.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <new>
#include <vector>

#include "tests/cc/failing_allocations.h"

namespace dynemb {
namespace {

using failing::WithAllocations;

TEST(EvictedRows, ReservedRowsNeedNoAllocation) {
  const RowLayout layout(8, DType::kFloat32, 5, 2);
  const std::vector<char> row(layout.stride, 7);
  const auto score_of = [](uint64_t key) { return static_cast<int64_t>(1000 - key); };
  EvictedRows rows(layout);
  rows.Add(0, row.data(), score_of(0));
  rows.Reserve(100);
  ASSERT_NO_THROW(WithAllocations(0, [&] {
    for (uint64_t i = 1; i <= 100; ++i) rows.Add(i, row.data(), score_of(i));
  }));
  // Rows beyond the reserved room are added completely or not at all.
  size_t added = 101;
  for (size_t allocations : {0, 1, 1, 1, 2, 2, 3, 3}) {
    try {
      WithAllocations(allocations, [&] { rows.Add(added, row.data(), score_of(added)); });
      ++added;
    } catch (const std::bad_alloc&) {
    }
    ASSERT_EQ(rows.size(), added);
  }
  EXPECT_GT(added, 101u);
  const TickColumns& columns = rows.Finish();
  ASSERT_EQ(rows.size(), added);
  for (uint64_t i = 0; i < added; ++i) {
    ASSERT_EQ(static_cast<const uint64_t*>(columns.keys)[i], i);
    ASSERT_EQ(columns.scores[i], score_of(i));
  }
  for (size_t i = 0; i < added * layout.vector_bytes(); ++i)
    ASSERT_EQ(static_cast<const char*>(columns.vectors)[i], 7);
  const char* const state = reinterpret_cast<const char*>(columns.state);
  for (size_t i = 0; i < added * layout.state_bytes(); ++i) ASSERT_EQ(state[i], 7);
}

// Rows that were added are sorted into the caller's arrays; a table may also write these itself.
TEST(EvictedRows, ColumnsAreWhereTheCallerWantsThem) {
  const RowLayout layout(4, DType::kFloat32, 1, 1);
  std::vector<uint32_t> keys(8);
  std::vector<float> vectors(8), state(8);
  std::vector<int64_t> scores(8);
  size_t allocated = 0, calls = 0;
  const auto allocate = [&](size_t n) {
    allocated = n;
    ++calls;
    return TickColumns{keys.data(), vectors.data(), state.data(), nullptr, scores.data()};
  };
  EvictedRows added(layout, allocate);
  for (uint32_t key : {0x80000000u, 3u, 7u}) {
    std::vector<char> row(layout.stride);
    *reinterpret_cast<float*>(layout.vector(row.data())) = static_cast<float>(key);
    *layout.state(row.data()) = 0.5f * static_cast<float>(key);
    added.Add(key, row.data(), key + 1);
  }
  added.Finish();
  added.Finish();
  EXPECT_EQ(allocated, 3u);
  EXPECT_EQ(calls, 1u);
  const std::vector<uint32_t> sorted{3, 7, 0x80000000u};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(keys[i], sorted[i]);
    EXPECT_EQ(vectors[i], static_cast<float>(sorted[i]));
    EXPECT_EQ(state[i], 0.5f * static_cast<float>(sorted[i]));
    EXPECT_EQ(scores[i], int64_t{sorted[i]} + 1);
  }
  EvictedRows placed(layout, allocate);
  EXPECT_EQ(placed.Place(5).keys, keys.data());
  EXPECT_EQ(placed.size(), 5u);
  EXPECT_EQ(placed.Finish().scores, scores.data());
  EXPECT_EQ(calls, 2u);
  // None is a number of rows, too.
  EvictedRows none(layout, allocate);
  none.Finish();
  EXPECT_EQ(calls, 3u);
  EXPECT_EQ(allocated, 0u);
}

}  // namespace
}  // namespace dynemb
