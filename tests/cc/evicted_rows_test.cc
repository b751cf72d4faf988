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
    std::vector<uint64_t> keys(rows.size());
    std::vector<char> vectors(rows.size() * layout.vector_bytes());
    std::vector<char> state(rows.size() * layout.state_bytes());
    std::vector<int64_t> scores(rows.size());
    rows.Copy(keys.data(), vectors.data(), reinterpret_cast<float*>(state.data()), scores.data());
    ASSERT_EQ(keys.size(), added);
    for (uint64_t i = 0; i < keys.size(); ++i) {
      ASSERT_EQ(keys[i], i);
      ASSERT_EQ(scores[i], score_of(i));
    }
    ASSERT_EQ(state, std::vector<char>(state.size(), 7));
    ASSERT_EQ(vectors, std::vector<char>(vectors.size(), 7));
  }
  EXPECT_GT(added, 101u);
}

}  // namespace
}  // namespace dynemb
