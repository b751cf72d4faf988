#include "cc/table/staged.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace dynemb {
namespace {

struct Call {
  size_t stage, i;
  bool operator==(const Call& o) const { return stage == o.stage && i == o.i; }
};

std::vector<Call> Calls(size_t n, size_t block) {
  std::vector<Call> calls;
  RunStaged(
      n, block,
      [&](size_t i) {
        calls.push_back({0, i});
      },
      [&](size_t i) {
        calls.push_back({1, i});
      },
      [&](size_t i) {
        calls.push_back({2, i});
      });
  return calls;
}

TEST(StagedTest, BlocksOfOneInOrder) {
  const std::vector<Call> expected = {{0, 0}, {0, 1}, {1, 0}, {0, 2}, {1, 1},
                                      {2, 0}, {1, 2}, {2, 1}, {2, 2}};
  EXPECT_EQ(Calls(3, 1), expected);
}

TEST(StagedTest, BlocksOfTwoInOrder) {
  const std::vector<Call> expected = {{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1},
                                      {1, 2}, {2, 0}, {2, 1}, {2, 2}};
  EXPECT_EQ(Calls(3, 2), expected);
}

// Each stage gets each item once and in order, a turn after the stage before it. What a stage
// writes to the ring is there until the last stage has read it.
TEST(StagedTest, EveryItemPassesThroughAllStages) {
  for (size_t lines = 0; lines <= 64; ++lines) {
    const size_t block = StagedBlock(lines);
    ASSERT_LE(block, kMostStaged);
    for (size_t n = 0; n <= 5 * block + 1; ++n) {
      StagedRing<size_t, 3> ring;
      size_t next[3] = {};
      const auto stage = [&](size_t s) {
        return [&ring, &next, block, s](size_t i) {
          ASSERT_EQ(i, next[s]++);
          if (s == 0) {
            ring[i] = i;
          } else {
            ASSERT_EQ(ring[i], i);
            // The stage before is done with this block, and the last item may be in it.
            ASSERT_GE(next[s - 1], std::min(i / block * block + block, next[0]));
          }
        };
      };
      RunStaged(n, block, stage(0), stage(1), stage(2));
      for (const size_t items : next) ASSERT_EQ(items, n);
    }
  }
}

TEST(StagedTest, LongRowsHaveSmallBlocks) {
  EXPECT_EQ(StagedBlock(0), kMostStaged);
  EXPECT_EQ(StagedBlock(1), 32u);
  EXPECT_EQ(StagedBlock(2), 32u);
  EXPECT_EQ(StagedBlock(4), 16u);
  EXPECT_EQ(StagedBlock(100), 8u);
}

}  // namespace
}  // namespace dynemb
