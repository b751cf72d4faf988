#include "cc/table/row_bits.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using testing_table::Random;

void ExpectHolds(const RowBits& bits, const std::set<uint64_t>& rows) {
  ASSERT_EQ(bits.Count(), rows.size());
  uint64_t from = 0;
  for (uint64_t row : rows) {
    ASSERT_EQ(bits.Next(from), row);
    ASSERT_EQ(bits.Next(row), row);
    from = row + 1;
  }
  ASSERT_EQ(bits.Next(from), bits.rows());
  ASSERT_EQ(bits.Next(bits.rows()), bits.rows());
}

TEST(RowBits, AllOrNone) {
  for (uint64_t n : {0, 1, 63, 64, 65, 127, 128, 1000}) {
    RowBits bits;
    std::set<uint64_t> rows;
    bits.Reset(n, false);
    EXPECT_EQ(bits.rows(), n);
    ExpectHolds(bits, rows);
    bits.Reset(n, true);
    EXPECT_EQ(bits.rows(), n);
    for (uint64_t row = 0; row < n; ++row) rows.insert(row);
    ExpectHolds(bits, rows);
    bits.Extend(n + 70);  // the new rows are not in the set
    EXPECT_EQ(bits.rows(), n + 70);
    ExpectHolds(bits, rows);
    bits.Extend(n);  // does not shrink
    EXPECT_EQ(bits.rows(), n + 70);
    bits.Reset(n, false);
    EXPECT_EQ(bits.rows(), n);
    EXPECT_EQ(bits.Count(), 0u);
  }
}

TEST(RowBits, RandomOperations) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    RowBits bits;
    std::set<uint64_t> rows;
    uint64_t n = 1 + random.Below(200);
    bits.Reset(n, false);
    for (int step = 0; step < 500; ++step) {
      const uint64_t row = random.Below(n);
      switch (random.Below(8)) {
        default:
          bits.Add(static_cast<RowId>(row));
          rows.insert(row);
          break;
        case 0:
        case 1:
        case 2:
          ASSERT_EQ(bits.Take(static_cast<RowId>(row)), rows.erase(row) == 1);
          break;
        case 3: {
          n += random.Below(3);
          bits.Extend(n);
          break;
        }
        case 4: {
          const uint64_t from = random.Below(n + 1);
          const auto at = rows.lower_bound(from);
          ASSERT_EQ(bits.Next(from), at == rows.end() ? n : *at);
          break;
        }
      }
    }
    ExpectHolds(bits, rows);
  }
}

// Rows of the other set that are out of range are not added, even if they are in the last word.
TEST(RowBits, AddAllAddsTheRowsInRange) {
  Random random(1);
  for (uint64_t n : {0, 1, 10, 63, 64, 65, 130}) {
    for (uint64_t m : {0, 1, 10, 63, 64, 65, 130, 300}) {
      SCOPED_TRACE(std::to_string(n) + " of " + std::to_string(m));
      RowBits bits, other;
      bits.Reset(n, false);
      other.Reset(m, false);
      std::set<uint64_t> rows;
      for (uint64_t i = 0; i < m; ++i) {
        if (random.Below(2) == 0) continue;
        other.Add(static_cast<RowId>(i));
        if (i < n) rows.insert(i);
      }
      for (uint64_t i = 0; i < n; i += 3) {
        bits.Add(static_cast<RowId>(i));
        rows.insert(i);
      }
      bits.AddAll(other);
      EXPECT_EQ(bits.rows(), n);
      ExpectHolds(bits, rows);
    }
  }
}

TEST(RowBits, EachRowIsTakenOnce) {
  constexpr uint64_t kRows = 5000;
  RowBits bits;
  bits.Reset(kRows, false);
  std::vector<std::atomic<int>> taken(kRows);
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (uint64_t row = id; row < kRows; row += 4) bits.Add(static_cast<RowId>(row));
    });
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  EXPECT_EQ(bits.Count(), kRows);
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&] {
      for (uint64_t row = 0; row < kRows; ++row) taken[row] += bits.Take(static_cast<RowId>(row));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& times : taken) ASSERT_EQ(times, 1);
  EXPECT_EQ(bits.Count(), 0u);
}

}  // namespace
}  // namespace dynemb
