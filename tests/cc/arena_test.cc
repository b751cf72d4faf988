#include "cc/table/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/memory_limit.h"

namespace dynemb {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// The expected byte at b.
char At(size_t b) { return static_cast<char>(b * 31 + b / 4096); }

void Fill(const Arena& arena, size_t begin, size_t end) {
  for (size_t b = begin; b < end; b += 509) arena.data()[b] = At(b);
}
::testing::AssertionResult Holds(const Arena& arena, size_t end) {
  for (size_t b = 0; b < end; b += 509) {
    if (arena.data()[b] != At(b)) return ::testing::AssertionFailure() << "byte " << b;
  }
  return ::testing::AssertionSuccess();
}

TEST(Arena, GrowthKeepsContentsAndAddsZeros) {
  ThreadsExec exec(2);
  Arena arena;
  size_t filled = 0;
  for (size_t bytes = 1; bytes < 100 * kMiB; bytes += bytes / 3 + 1) {
    ASSERT_TRUE(arena.Commit(bytes).ok());
    ASSERT_GE(arena.committed(), bytes);
    ASSERT_TRUE(Holds(arena, filled)) << bytes;
    for (size_t b = filled - filled % 509 + 509; b < arena.committed(); b += 509) {
      ASSERT_EQ(arena.data()[b], 0) << bytes;
    }
    arena.Prefault(exec, bytes);
    filled = bytes / 509 * 509 + 1;
    Fill(arena, 0, filled);
  }
}

// An arena reserves about twice the committed size plus a constant, and one page for a single byte.
TEST(Arena, ReservesFewAddresses) {
  for (const size_t bytes : {size_t{1}, size_t{5000}, 3 * kMiB, 5 * kMiB, 70 * kMiB}) {
    Arena arena;
    for (size_t b = 1; b < bytes; b += b / 8 + 1) ASSERT_TRUE(arena.Commit(b).ok());
    ASSERT_TRUE(arena.Commit(bytes).ok());
    EXPECT_LE(arena.reserved(), 2 * (bytes + bytes / 8) + 4 * kMiB) << bytes;
    if (bytes <= 4096) {
      EXPECT_LE(arena.reserved(), 4096u);
    }
  }
}

TEST(Arena, DiscardedBytesAreZero) {
  for (const size_t kept : {size_t{0}, size_t{1}, size_t{4096}, size_t{100000}, 9 * kMiB}) {
    Arena arena;
    ASSERT_TRUE(arena.Commit(10 * kMiB).ok());
    memset(arena.data(), 1, 10 * kMiB);
    const size_t committed = arena.committed();
    arena.Discard(kept);
    EXPECT_EQ(arena.committed(), committed);
    for (size_t b = 0; b < 10 * kMiB; ++b) ASSERT_EQ(arena.data()[b], b < kept) << kept << " " << b;
  }
}

TEST(Arena, ReservedArenaNeverMoves) {
  Arena arena;
  ASSERT_TRUE(arena.Reserve(64 * kMiB, 1).ok());
  const char* const at = arena.data();
  for (size_t bytes = 1; bytes <= 64 * kMiB; bytes *= 2) {
    ASSERT_TRUE(arena.Commit(bytes).ok());
    Fill(arena, 0, bytes);
    EXPECT_EQ(arena.data(), at);
  }
  EXPECT_EQ(arena.Commit(65 * kMiB).code(), Code::kResourceExhausted);
  EXPECT_TRUE(Holds(arena, 64 * kMiB));
}

size_t charges_left = 0;
bool MayCharge(size_t) { return charges_left != 0 && charges_left-- != 0; }

// A refused Commit leaves the arena unchanged. A freed arena has returned all charges.
TEST(Arena, FailedCommitChangesNothing) {
  const size_t before = ChargedMemory();
  for (const bool reserved : {false, true}) {
    Arena arena;
    if (reserved) {
      ASSERT_TRUE(arena.Reserve(64 * kMiB, 1).ok());
    }
    ASSERT_TRUE(arena.Commit(5 * kMiB).ok());
    Fill(arena, 0, 5 * kMiB);
    EXPECT_EQ(ChargedMemory() - before, arena.committed());
    const char* const at = arena.data();
    const size_t committed = arena.committed();
    SetMemoryFault(MayCharge);
    EXPECT_EQ(arena.Commit(20 * kMiB).code(), Code::kResourceExhausted);
    SetMemoryFault(nullptr);
    EXPECT_EQ(arena.data(), at);
    EXPECT_EQ(arena.committed(), committed);
    EXPECT_TRUE(Holds(arena, 5 * kMiB));
    EXPECT_TRUE(arena.Commit(20 * kMiB).ok());
    EXPECT_TRUE(Holds(arena, 5 * kMiB));
    Arena moved = std::move(arena);
    EXPECT_TRUE(Holds(moved, 5 * kMiB));
    moved = Arena();
    EXPECT_EQ(ChargedMemory(), before);
  }
}

// Commit refuses more memory than the process may use, even if the system would grant it.
TEST(Arena, CommitBeyondTheProcessLimitFails) {
  Arena arena;
  ASSERT_TRUE(arena.Commit(1000).ok());
  Fill(arena, 0, 1000);
  const Status status = arena.Commit(size_t{1} << 46);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("may use"), std::string::npos) << status.message();
  EXPECT_TRUE(Holds(arena, 1000));
}

}  // namespace
}  // namespace dynemb
