#include "cc/table/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cc/table/bucket_ops.h"
#include "cc/table/lanes.h"
#include "tests/cc/rows_are_keys.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using testing_table::Random;

// An index in which row r has key r.
class IndexTest : public ::testing::Test {
 protected:
  void Init(uint64_t expected, double max_load = 0.85) {
    ASSERT_TRUE(index_.Init(expected, max_load, /*salt=*/0).ok());
  }
  Status Add(size_t n) {
    std::vector<uint64_t> hashes(n);
    std::vector<uint32_t> segment_of(n);
    for (size_t i = 0; i < n; ++i) {
      hashes[i] = index_.HashOf(next_ + i);
      segment_of[i] = index_.SegmentOf(hashes[i]);
    }
    const Status status =
        index_.Grow(exec_, hashes.data(), n, RowsAreKeys(),
                    OwnersOf(exec_, index_, segment_of.data(), n), segment_of.data());
    if (!status.ok()) return status;
    OneLane lane;
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(segment_of[i], index_.SegmentOf(hashes[i]));
      const SlotRef at = Claim(lane, index_.SegmentBuckets(segment_of[i]), MakeProbe(hashes[i]),
                               static_cast<RowId>(next_ + i), 1);
      EXPECT_NE(at.bucket, nullptr);
    }
    next_ += n;
    return status;
  }
  // Checks that every row is in its key's segment, once, and counted.
  void Check() const {
    std::vector<bool> seen(next_);
    for (uint32_t s = 0; s < index_.segments(); ++s) {
      uint32_t count = 0;
      for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
        for (RowId row : index_.SegmentBuckets(s)[b].row) {
          if (row == kNoRow) continue;
          ++count;
          ASSERT_FALSE(seen[row]);
          seen[row] = true;
          ASSERT_EQ(index_.SegmentOf(MixKey(row)), s);
        }
      }
      ASSERT_EQ(index_.count(s), count);
      ASSERT_LE(count, static_cast<uint32_t>(0.95 * kSlotsPerSegment));
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), true), static_cast<int64_t>(next_));
  }

  SerialExec exec_;
  Index index_;
  size_t next_ = 0;
};

TEST_F(IndexTest, GrowsFromOneSegment) {
  Init(1);
  EXPECT_EQ(index_.segments(), 1u);
  EXPECT_EQ(index_.View<uint64_t>(nullptr, 0).directory.depth, 0u);
  while (next_ < 100000) {
    ASSERT_TRUE(Add(1 + next_ / 2).ok());
    Check();
  }
}

TEST_F(IndexTest, DirectoryCoversEverySegmentOnce) {
  Init(50000);
  ASSERT_TRUE(Add(80000).ok());
  std::vector<uint32_t> entries(index_.segments());
  uint32_t last = ~0u;
  std::vector<bool> closed(index_.segments());
  const Directory directory = index_.View<uint64_t>(nullptr, 0).directory;
  for (uint64_t i = 0; i < uint64_t{1} << directory.depth; ++i) {
    const uint32_t s = directory.entries[i];
    ASSERT_LT(s, index_.segments());
    ++entries[s];
    if (s != last && last != ~0u) closed[last] = true;
    ASSERT_FALSE(closed[s]) << "the entries of segment " << s << " are not consecutive";
    last = s;
  }
  for (uint32_t n : entries) {
    EXPECT_GT(n, 0u);
    EXPECT_EQ(n & (n - 1), 0u);
  }
}

TEST_F(IndexTest, PresizeMatchesGrowth) {
  for (const uint64_t n : {100u, 1000u, 20000u, 300000u}) {
    Index presized;
    ASSERT_TRUE(presized.Init(n, 0.85, /*salt=*/0).ok());
    index_ = Index();
    next_ = 0;
    Init(1);
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(Add(n / 10).ok());
    const double ratio = static_cast<double>(presized.segments()) / index_.segments();
    EXPECT_GE(presized.slots() * 0.85, static_cast<double>(n));
    EXPECT_GE(ratio, 0.95) << n;
    EXPECT_LE(ratio, 2.01) << n;
    if (n >= 20000) {
      EXPECT_LE(ratio, 1.2) << n;
    }
  }
}

// The purpose of the spiral: at any size, the load is steady and growth is spread evenly.
TEST_F(IndexTest, LoadIsSteadyAndGrowthIsSmooth) {
  Init(1);
  ASSERT_TRUE(Add(60000).ok());
  double sum = 0;
  int n = 0;
  uint32_t most = 0;
  while (next_ < 500000) {
    const uint32_t before = index_.segments();
    ASSERT_TRUE(Add(1024).ok());
    most = std::max(most, index_.segments() - before);
    const double load = static_cast<double>(next_) / static_cast<double>(index_.slots());
    ASSERT_GT(load, 0.53) << next_;
    ASSERT_LT(load, 0.65) << next_;
    sum += load;
    ++n;
  }
  EXPECT_NEAR(sum / n, 0.69 * 0.85, 0.02);
  // 1024 keys need 3.9 segments of average load; plain extendible hashing would split hundreds at
  // once.
  EXPECT_LE(most, 16u);
  RecordProperty("most_segments_split_by_1024_keys", static_cast<int>(most));
}

TEST_F(IndexTest, LoadFactorIsKept) {
  for (const double load : {0.1, 0.5, 0.95}) {
    index_ = Index();
    next_ = 0;
    Init(1, load);
    ASSERT_TRUE(Add(20000).ok());
    for (uint32_t s = 0; s < index_.segments(); ++s) {
      ASSERT_LE(index_.count(s), load * kSlotsPerSegment);
    }
    Check();
  }
}

// Rows whose keys have the given hashes.
class GivenHashes final : public Index::RowHashes {
 public:
  explicit GivenHashes(const std::vector<uint64_t>& hashes) : hashes_(hashes) {}
  void Read(const RowId* rows, size_t n, uint64_t* hashes) const override {
    for (size_t i = 0; i < n; ++i) hashes[i] = hashes_[rows[i]];
  }

 private:
  const std::vector<uint64_t>& hashes_;
};

// Adds keys with these hashes in batches. Checks that each is in its segment, once, and counted.
void AddHashes(Index* index, const std::vector<uint64_t>& hashes, size_t batch) {
  SerialExec exec;
  OneLane lane;
  const GivenHashes rows(hashes);
  for (size_t begin = 0; begin < hashes.size(); begin += batch) {
    const size_t n = std::min(batch, hashes.size() - begin);
    std::vector<uint32_t> segment_of(n);
    for (size_t i = 0; i < n; ++i) segment_of[i] = index->SegmentOf(hashes[begin + i]);
    const OwnedItems owned = OwnersOf(exec, *index, segment_of.data(), n);
    ASSERT_TRUE(index->Grow(exec, hashes.data() + begin, n, rows, owned, segment_of.data()).ok());
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(segment_of[i], index->SegmentOf(hashes[begin + i]));
      const SlotRef at = Claim(lane, index->SegmentBuckets(segment_of[i]),
                               MakeProbe(hashes[begin + i]), static_cast<RowId>(begin + i), 1);
      ASSERT_NE(at.bucket, nullptr);
    }
  }
  std::vector<int> seen(hashes.size());
  for (uint32_t s = 0; s < index->segments(); ++s) {
    uint32_t count = 0;
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      for (RowId row : index->SegmentBuckets(s)[b].row) {
        if (row == kNoRow) continue;
        ++count;
        ++seen[row];
        ASSERT_EQ(index->SegmentOf(hashes[row]), s);
      }
    }
    ASSERT_EQ(index->count(s), count);
  }
  EXPECT_EQ(seen, std::vector<int>(hashes.size(), 1));
}

TEST_F(IndexTest, KeysOfOnePrefixGetAnInnerDirectory) {
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0; i < 200000; ++i) hashes.push_back(0x2468ACEull << 32 | i * 20000);
  for (const size_t batch : {size_t{300}, size_t{5000}, hashes.size()}) {
    index_ = Index();
    next_ = 0;
    Init(1);
    AddHashes(&index_, hashes, batch);
    EXPECT_EQ(index_.inner_directories(), 1u);
    EXPECT_GT(static_cast<double>(hashes.size()), 0.5 * static_cast<double>(index_.slots()));
    EXPECT_LT(index_.bytes(), 24 * hashes.size());
  }
  ASSERT_TRUE(index_.Clear([] {}).ok());
  EXPECT_EQ(index_.inner_directories(), 0u);
}

// Keys that agree at two levels. Only a search for such keys finds them.
TEST_F(IndexTest, KeysOfOnePrefixAtTwoLevels) {
  std::vector<uint64_t> hashes;
  for (uint64_t low = 0; hashes.size() < 3000; ++low) {
    const uint64_t hash = 0x2468ACEull << 32 | low;
    if (PrefixOf(hash, 1) >> 20 == 0x5A5) hashes.push_back(hash);
  }
  Init(1);
  AddHashes(&index_, hashes, 700);
  EXPECT_EQ(index_.inner_directories(), 2u);
  EXPECT_LT(index_.bytes(), size_t{1} << 20);
}

// The new keys fit into their segments, beside the held keys that do not leave.
TEST_F(IndexTest, MakeSlotsForKeysThatAreNotCounted) {
  Init(1);
  ASSERT_TRUE(Add(5000).ok());
  std::vector<uint64_t> hashes;
  for (uint64_t i = 0; i < 1000; ++i) hashes.push_back(0x2468ACEull << 32 | i * 4000000);
  for (const uint32_t leave : {0u, 100u}) {
    std::vector<uint32_t> segment_of;
    for (uint64_t h : hashes) segment_of.push_back(index_.SegmentOf(h));
    ASSERT_TRUE(index_
                    .MakeSlots(
                        exec_, hashes.data(), hashes.size(), RowsAreKeys(),
                        OwnersOf(exec_, index_, segment_of.data(), hashes.size()),
                        [leave](uint32_t) { return leave; }, segment_of.data())
                    .ok());
    std::vector<uint32_t> wanted(index_.segments());
    for (size_t i = 0; i < hashes.size(); ++i) {
      ASSERT_EQ(segment_of[i], index_.SegmentOf(hashes[i]));
      ++wanted[segment_of[i]];
    }
    for (uint32_t s = 0; s < index_.segments(); ++s) {
      if (wanted[s] == 0) continue;
      ASSERT_LE(index_.count(s) + wanted[s], kSlotsPerSegment + leave);
    }
    Check();
  }
}

// The segments are the same for any number of workers. Batches grow the index many times over, and
// most of their keys are in few segments.
TEST(IndexWorkersTest, GrowthDoesNotDependOnWorkers) {
  std::vector<uint64_t> hashes;
  std::mt19937_64 random(3);
  for (size_t i = 0; i < 300000; ++i) hashes.push_back(i % 3 == 0 ? random() : random() >> 9);
  const GivenHashes rows(hashes);
  std::vector<uint32_t> expected;
  for (const size_t workers : {1, 2, 7}) {
    ThreadsExec exec(workers);
    Index index;
    ASSERT_TRUE(index.Init(1, 0.85, /*salt=*/0).ok());
    std::vector<uint32_t> segments;
    for (size_t begin = 0, n = 100; begin < hashes.size(); begin += n, n *= 4) {
      n = std::min(n, hashes.size() - begin);
      const uint64_t* const batch = hashes.data() + begin;
      std::vector<uint32_t> segment_of(n);
      for (size_t i = 0; i < n; ++i) segment_of[i] = index.SegmentOf(batch[i]);
      const OwnedItems owned = OwnersOf(exec, index, segment_of.data(), n);
      ASSERT_TRUE(index.Grow(exec, batch, n, rows, owned, segment_of.data()).ok());
      OneLane lane;
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(segment_of[i], index.SegmentOf(batch[i]));
        Claim(lane, index.SegmentBuckets(segment_of[i]), MakeProbe(batch[i]),
              static_cast<RowId>(begin + i), 1);
      }
      segments.insert(segments.end(), segment_of.begin(), segment_of.end());
    }
    if (expected.empty()) expected = segments;
    EXPECT_EQ(segments, expected) << workers << " workers";
  }
}

TEST_F(IndexTest, ClearRestoresTheInitialState) {
  Init(5000);
  const uint32_t segments = index_.segments();
  ASSERT_TRUE(Add(50000).ok());
  ASSERT_TRUE(index_.Clear([] {}).ok());
  next_ = 0;
  EXPECT_EQ(index_.segments(), segments);
  Check();
  ASSERT_TRUE(Add(50000).ok());
  Check();
}

}  // namespace
}  // namespace dynemb
