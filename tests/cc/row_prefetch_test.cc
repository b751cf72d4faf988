// RowPrefetch gives each row a prefetch for each line of its first bytes, and none that no row
// needs.
#include "cc/table/row_prefetch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

namespace dynemb {
namespace {

constexpr uintptr_t kLine = 64;

std::vector<size_t> OffsetsOf(const RowPrefetch& prefetch) {
  std::vector<size_t> offsets;
  prefetch.ForOffsets([&](size_t offset) { offsets.push_back(offset); });
  return offsets;
}

TEST(RowPrefetch, CoversTheFirstBytesOfEachRow) {
  for (const uintptr_t base : {uintptr_t{1} << 30, (uintptr_t{1} << 30) + 16}) {
    for (size_t stride = 4; stride <= 600; stride += 4) {
      for (size_t bytes = 1; bytes <= stride && bytes <= 512; bytes += 3) {
        const auto* const rows = reinterpret_cast<const char*>(base);
        const std::vector<size_t> offsets = OffsetsOf(RowPrefetch(rows, stride, bytes));
        size_t most = 0;
        for (size_t row = 0; row < 64; ++row) {
          const uintptr_t at = base + row * stride;
          std::set<uintptr_t> lines;
          for (const size_t offset : offsets) lines.insert((at + offset) / kLine);
          const uintptr_t first = at / kLine, last = (at + bytes - 1) / kLine;
          ASSERT_EQ(*lines.begin(), first) << stride << " " << bytes;
          ASSERT_EQ(*lines.rbegin(), last) << stride << " " << bytes;
          ASSERT_EQ(lines.size(), last - first + 1) << stride << " " << bytes;
          most = std::max<size_t>(most, last - first + 1);
        }
        // No more than the row that touches most lines needs, if the first row begins a line.
        ASSERT_LE(offsets.size(), most + (base % kLine != 0))
            << base << " " << stride << " " << bytes;
      }
    }
  }
}

// The hardware fetches the rest of a long row.
TEST(RowPrefetch, Ends) { EXPECT_EQ(OffsetsOf(RowPrefetch(nullptr, 4096, 4096)).back(), 511u); }

}  // namespace
}  // namespace dynemb
