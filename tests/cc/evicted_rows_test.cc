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
  EvictedRows rows(layout);
  rows.Add(0, row.data());
  rows.Reserve(100);
  ASSERT_NO_THROW(WithAllocations(0, [&] {
    for (uint64_t i = 1; i <= 100; ++i) rows.Add(i, row.data());
  }));
  // Rows beyond the reserved room are added completely or not at all.
  size_t added = 101;
  for (size_t allocations : {0, 1, 1, 1, 2, 2}) {
    try {
      WithAllocations(allocations, [&] { rows.Add(added, row.data()); });
      ++added;
    } catch (const std::bad_alloc&) {
    }
    std::vector<uint64_t> keys(rows.size());
    std::vector<char> vectors(rows.size() * layout.vector_bytes());
    rows.Copy(keys.data(), vectors.data());
    ASSERT_EQ(keys.size(), added);
    for (uint64_t i = 0; i < keys.size(); ++i) ASSERT_EQ(keys[i], i);
    ASSERT_EQ(vectors, std::vector<char>(vectors.size(), 7));
  }
  EXPECT_GT(added, 101u);
}

}  // namespace
}  // namespace dynemb
