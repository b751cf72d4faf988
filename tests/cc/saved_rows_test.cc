#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cc/table/changes.h"
#include "tests/cc/failing_allocations.h"
#include "tests/cc/numbered_rows.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using failing::WithAllocations;
using testing_table::Random;

TEST(SavedRows, PopReturnsRowsInOrder) {
  const RowLayout layouts[2] = {RowLayout(8, DType::kFloat32, 5, 2),
                                RowLayout(4, DType::kBfloat16, 3, 0)};
  SavedRows saved(size_t{64} << 20);
  SavedRows::Chunk chunk;
  EXPECT_FALSE(saved.Pop(&chunk));
  Random random(1);
  std::vector<std::pair<size_t, uint64_t>> pushed;
  for (uint64_t i = 0; i < 40000; ++i) {
    const size_t table = i < 30000 ? 0 : random.Below(2);
    saved.Push(table, layouts[table], RowOf(layouts[table], i).data(), static_cast<CutTime>(~i),
               static_cast<CutTime>(3 * i));
    pushed.emplace_back(table, i);
  }
  size_t at = 0;
  while (saved.Pop(&chunk)) {
    ASSERT_GT(chunk.n, 0u);
    const RowLayout& layout = layouts[chunk.table];
    ASSERT_EQ(chunk.stride, SavedRows::Stride(layout));
    ASSERT_EQ(chunk.rows.size(), chunk.n * chunk.stride);
    for (size_t i = 0; i < chunk.n; ++i, ++at) {
      ASSERT_LT(at, pushed.size());
      ASSERT_EQ(pushed[at].first, chunk.table);
      std::vector<char> row = RowOf(layout, pushed[at].second);
      const auto updated = static_cast<CutTime>(~pushed[at].second);
      std::memcpy(row.data() + layout.key_size, &updated, sizeof(updated));
      const auto score = static_cast<CutTime>(3 * pushed[at].second);
      const auto* bytes = reinterpret_cast<const char*>(&score);
      row.insert(row.end(), bytes, bytes + sizeof(score));
      ASSERT_EQ(row.size(), chunk.stride);
      ASSERT_EQ(std::memcmp(row.data(), chunk.rows.data() + i * chunk.stride, row.size()), 0);
    }
  }
  EXPECT_EQ(at, pushed.size());
}

// At most the rows that fit the bound wait, but one row always may.
TEST(SavedRows, Bound) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  for (size_t most_rows : {0, 1, 3, 10}) {
    SCOPED_TRACE(most_rows);
    SavedRows saved(most_rows * SavedRows::Stride(layout) + layout.stride / 2);
    const uint64_t fit = std::max<size_t>(1, most_rows);
    constexpr uint64_t kRows = 100;
    std::atomic<uint64_t> pushed{0};
    std::vector<std::thread> threads;
    for (uint64_t id = 0; id < 2; ++id) {
      threads.emplace_back([&, id] {
        for (uint64_t i = id; i < kRows; i += 2) {
          saved.Push(0, layout, RowOf(layout, i).data(), 1, 1);
          ++pushed;
        }
      });
    }
    std::set<uint64_t> seen;
    uint64_t popped = 0;
    SavedRows::Chunk chunk;
    while (popped < kRows) {
      if (popped < 20) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ASSERT_LE(pushed, popped + fit);
      if (!saved.Pop(&chunk)) {
        std::this_thread::yield();
        continue;
      }
      ASSERT_LE(chunk.n, fit);
      for (size_t i = 0; i < chunk.n; ++i) seen.insert(NumberOf(chunk, i, layout));
      popped += chunk.n;
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(seen.size(), kRows);
    EXPECT_FALSE(saved.Pop(&chunk));
  }
}

// Three threads that wait, because they push rows to SavedRows without room for them.
class Waiting {
 public:
  explicit Waiting(SavedRows* saved) {
    for (uint64_t id = 0; id < 3; ++id) {
      threads_.emplace_back([this, saved, id] {
        for (uint64_t i = 0; i < 100; ++i) saved->Push(id, layout_, RowOf(layout_, i).data(), 1, 1);
        ++done_;
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(done_, 0);
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  const RowLayout layout_{8, DType::kFloat32, 4, 0};
  std::atomic<int> done_{0};
  std::vector<std::thread> threads_;
};

TEST(SavedRows, CloseWakesWaitingThreads) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  SavedRows saved(SavedRows::Stride(layout));
  Waiting waiting(&saved);
  saved.Close();
  waiting.Join();
  SavedRows::Chunk chunk;
  EXPECT_FALSE(saved.Pop(&chunk));
  saved.Push(0, layout, RowOf(layout, 1).data(), 1, 1);
  EXPECT_FALSE(saved.Pop(&chunk));
}

TEST(SavedRows, CutFailsIfMemoryRunsOut) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  for (size_t allocations : {0, 1}) {
    SavedRows saved(size_t{1} << 20);
    for (uint64_t i = 0; i < 100; ++i) saved.Push(0, layout, RowOf(layout, i).data(), 1, 1);
    EXPECT_TRUE(saved.Error().ok());
    const std::vector<char> row = RowOf(layout, 100);
    // The rows exceed the bound, but after the failure the thread does not wait.
    WithAllocations(allocations, [&] {
      for (uint64_t i = 0; i < 100000; ++i) saved.Push(1, layout, row.data(), 1, 1);
    });
    EXPECT_EQ(saved.Error().code(), Code::kResourceExhausted);
    SavedRows::Chunk chunk;
    EXPECT_FALSE(saved.Pop(&chunk));
    saved.WaitForRoom(size_t{1} << 30);
    saved.PushAtOnce(0, layout, row.data(), 1, 1);
    EXPECT_FALSE(saved.Pop(&chunk));
    EXPECT_EQ(saved.Error().code(), Code::kResourceExhausted);
  }
}

TEST(SavedRows, WaitingThreadsContinueIfTheCutFails) {
  const RowLayout layout(8, DType::kFloat32, 4, 0);
  SavedRows saved(SavedRows::Stride(layout));
  Waiting waiting(&saved);
  const std::vector<char> row = RowOf(layout, 1);
  WithAllocations(0, [&] { saved.PushAtOnce(0, layout, row.data(), 1, 1); });
  waiting.Join();
  EXPECT_FALSE(saved.Error().ok());
}

}  // namespace
}  // namespace dynemb
