#include "cc/table/changes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "tests/cc/failing_allocations.h"
#include "tests/cc/numbered_rows.h"

namespace dynemb {
namespace {

// The score of a row for which it does not matter.
CutTime NoScore(const Cut&) { return 0; }

using failing::WithAllocations;

TEST(Cut, TimesAreRelativeToTheBaseAndEndAtTheWatermark) {
  Cut cut;
  cut.base = 100;
  cut.watermark = 200;
  EXPECT_EQ(cut.Time(99), 0u);
  EXPECT_EQ(cut.Time(100), 0u);
  EXPECT_EQ(cut.Time(101), 1u);
  EXPECT_EQ(cut.Time(200), 100u);
  EXPECT_EQ(cut.Time(201), 100u);
}

// Todo returns the rows that a cut examines: if the sets reach back to `since`, the updated rows;
// otherwise all rows.
class ChangesTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kRows = 100;
  ChangesTest() : layout_(8, DType::kFloat32, 1, 0), updated_(kRows, 1) {
    changes_.Start(1, 0, kRows);
  }
  void Write(RowId row, Tick tick) {
    changes_.BeforeWrite(row, RowOf(layout_, row).data(), updated_[row], NoScore);
    updated_[row] = tick;
  }
  std::set<uint64_t> Todo(Tick watermark, Tick since) {
    auto cut = std::make_unique<Cut>();
    cut->saved = &saved_;
    cut->layout = layout_;
    cut->watermark = watermark;
    cut->since = since;
    changes_.BeginCut(std::move(cut), kRows);
    std::set<uint64_t> todo;
    const RowBits& bits = changes_.cut()->todo;
    for (uint64_t r = bits.Next(0); r < bits.rows(); r = bits.Next(r + 1)) todo.insert(r);
    changes_.EndCut();
    EXPECT_EQ(changes_.cut(), nullptr);
    return todo;
  }
  const RowLayout layout_;
  std::vector<Tick> updated_;
  SavedRows saved_{1 << 20};
  Changes changes_;
};

TEST_F(ChangesTest, SetsReachBackTwoCuts) {
  using Set = std::set<uint64_t>;
  Write(3, 5);
  EXPECT_EQ(Todo(10, 1), (Set{3}));
  Write(3, 11);
  Write(4, 12);
  EXPECT_EQ(Todo(20, 10), (Set{3, 4}));
  Write(5, 21);
  EXPECT_EQ(Todo(30, 10), (Set{3, 4, 5}));  // since the cut before the last
  Write(6, 31);
  EXPECT_EQ(Todo(40, 30), (Set{6}));
  EXPECT_EQ(Todo(50, 35), (Set{6}));      // since a tick between two cuts
  EXPECT_EQ(Todo(60, 29).size(), kRows);  // before the time that the sets cover
  EXPECT_EQ(Todo(70, 0).size(), kRows);
  EXPECT_EQ(Todo(80, 70), Set{});
  changes_.AddAllRows(kRows);
  EXPECT_EQ(Todo(90, 80).size(), kRows);
}

TEST_F(ChangesTest, SavesEachNeededRowOnce) {
  for (RowId row = 0; row < 10; ++row) Write(row, 5);
  auto cut = std::make_unique<Cut>();
  cut->saved = &saved_;
  cut->table = 7;
  cut->layout = layout_;
  cut->watermark = 9;
  cut->since = 4;
  cut->base = 2;
  changes_.BeginCut(std::move(cut), kRows);
  changes_.Extend(kRows + 50);
  Write(3, 10);
  Write(3, 11);
  Write(20, 12);                                                      // updated before `since`
  changes_.BeforeWrite(7, RowOf(layout_, 7).data(), 0, NoScore);      // free
  changes_.BeforeWrite(130, RowOf(layout_, 130).data(), 0, NoScore);  // did not exist
  SavedRows::Chunk chunk;
  ASSERT_TRUE(saved_.Pop(&chunk));
  EXPECT_EQ(chunk.n, 1u);
  EXPECT_EQ(chunk.table, 7u);
  EXPECT_EQ(NumberOf(chunk, 0, layout_), 3u);
  CutTime updated;
  std::memcpy(&updated, layout_.update(chunk.rows.data()), sizeof(updated));
  EXPECT_EQ(updated, 3u);
  EXPECT_FALSE(saved_.Pop(&chunk));
}

// If memory for a set runs out, the set is given up. Cuts then examine all rows until new sets
// reach back far enough.
TEST_F(ChangesTest, ExaminesAllRowsIfASetIsGivenUp) {
  using Set = std::set<uint64_t>;
  Write(3, 5);
  EXPECT_EQ(Todo(10, 1), (Set{3}));
  EXPECT_EQ(Todo(20, 10), Set{});
  WithAllocations(0, [&] { changes_.Extend(100 * kRows); });
  Write(4, 21);
  changes_.BeforeWrite(50 * kRows, RowOf(layout_, 1).data(), 0, NoScore);  // not in the set
  EXPECT_EQ(Todo(30, 20).size(), kRows);
  Write(5, 31);
  EXPECT_EQ(Todo(40, 30), (Set{5}));
  WithAllocations(0, [&] { changes_.AddAllRows(1000 * kRows); });
  EXPECT_EQ(Todo(50, 40).size(), kRows);
  EXPECT_EQ(Todo(60, 40).size(), kRows);  // the set before the last was given up
  EXPECT_EQ(Todo(70, 60), Set{});
  Changes other;
  WithAllocations(0, [&] { other.Start(1, 0, kRows); });
  EXPECT_TRUE(other.tracking());
  other.BeforeWrite(7, RowOf(layout_, 7).data(), 1, NoScore);
}

TEST_F(ChangesTest, FailedBeginCutChangesNothing) {
  Write(3, 5);
  EXPECT_EQ(Todo(10, 1), (std::set<uint64_t>{3}));
  Write(4, 11);
  size_t failed = 0;
  for (size_t allocations = 0;; ++allocations) {
    auto cut = std::make_unique<Cut>();
    cut->saved = &saved_;
    cut->layout = layout_;
    cut->watermark = 20;
    cut->since = 1;
    try {
      WithAllocations(allocations, [&] { changes_.BeginCut(std::move(cut), kRows); });
      break;
    } catch (const std::bad_alloc&) {
      ++failed;
      ASSERT_EQ(changes_.cut(), nullptr);
    }
  }
  EXPECT_EQ(failed, 2u);
  EXPECT_EQ(changes_.cut()->todo.Count(), 2u);
  changes_.EndCut();
  EXPECT_EQ(Todo(30, 10), (std::set<uint64_t>{4}));
}

}  // namespace
}  // namespace dynemb
