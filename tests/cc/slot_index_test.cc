// SlotIndex against std::multimap.
#include "cc/file/slot_index.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cc/failing_allocations.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

// The order of the entries: partition and fingerprint.
uint64_t PositionOf(uint64_t hash) { return hash >> 22; }

class SlotIndexTest : public ::testing::Test {
 protected:
  using Listed = std::tuple<uint64_t, ColdPlace, Stamp, Score>;

  // Adds a hash of this position: each key has another one.
  void Add(uint64_t like) {
    const auto place = next_place_++;
    const uint64_t hash = PositionOf(like) << 22 | (place % 4000000 + 1);
    const RowTimes times{static_cast<Stamp>(random_()), static_cast<Score>(random_() % 1000)};
    index_.Add(hash, place, times);
    index_.EndAdding();
    model_.insert({PositionOf(hash), {place, times}});
    hashes_.push_back({hash, place});
  }

  void RemoveAny() {
    const size_t i = random_() % hashes_.size();
    const auto [hash, place] = hashes_[i];
    hashes_[i] = hashes_.back();
    hashes_.pop_back();
    const auto [begin, end] = model_.equal_range(PositionOf(hash));
    for (auto at = begin; at != end; ++at) {
      if (at->second.first != place) continue;
      model_.erase(at);
      break;
    }
    ASSERT_TRUE(index_.Remove(hash, place));
    ASSERT_FALSE(index_.Remove(hash, place));
  }

  // Each entry at a position is found by its hash, and few others with it.
  void ExpectFound(uint64_t like) const {
    std::multiset<Listed> expected;
    const auto [begin, end] = model_.equal_range(PositionOf(like));
    for (auto at = begin; at != end; ++at) expected.insert(AsListed(*at));
    for (const auto& [hash, place] : hashes_) {
      if (PositionOf(hash) != PositionOf(like)) continue;
      size_t found = 0;
      bool is_found = false;
      index_.ForEach(hash, [&, place = place](const SlotIndex::Entry* e) {
        is_found |= e->place == place;
        ++found;
        ASSERT_EQ(expected.count({PositionOf(like), e->place, e->times.updated, e->times.score}),
                  1u);
      });
      ASSERT_TRUE(is_found);
      ASSERT_LE(found, 5u);
    }
    index_.ForEach(PositionOf(like) << 22, [&](const SlotIndex::Entry* e) {
      ASSERT_EQ(expected.count({PositionOf(like), e->place, e->times.updated, e->times.score}), 1u);
    });
  }

  void ExpectListed(uint64_t from) const {
    std::multiset<Listed> found, expected;
    uint64_t last = 0;
    index_.ForFrom(from, [&](uint64_t position, const SlotIndex::Entry* e) {
      EXPECT_LE(last, position);
      last = position;
      found.insert({position, e->place, e->times.updated, e->times.score});
      return true;
    });
    for (auto at = model_.lower_bound(from); at != model_.end(); ++at) {
      expected.insert(AsListed(*at));
    }
    ASSERT_EQ(found, expected);
  }

  void ExpectEqual() const {
    index_.CheckInvariants();
    ASSERT_EQ(index_.size(), model_.size());
    ExpectListed(0);
  }

  std::mt19937_64 random_{1};
  SlotIndex index_;
  std::multimap<uint64_t, std::pair<ColdPlace, RowTimes>> model_;
  std::vector<std::pair<uint64_t, ColdPlace>> hashes_;
  ColdPlace next_place_ = 0;

 private:
  static Listed AsListed(const std::pair<const uint64_t, std::pair<ColdPlace, RowTimes>>& entry) {
    const auto& [place, times] = entry.second;
    return {entry.first, place, times.updated, times.score};
  }
};

TEST_F(SlotIndexTest, EmptyHasNothing) {
  EXPECT_FALSE(index_.Remove(random_(), 0));
  ExpectFound(random_());
  ExpectEqual();
  EXPECT_EQ(index_.bytes(), 0u);
}

// Hashes of a few values, so that many have equal fingerprints, at both ends of a partition too.
TEST_F(SlotIndexTest, RandomOperations) {
  const uint64_t kinds[] = {~uint64_t{0}, 0, 0xFFFFull << 38, ~uint64_t{0} << 44, 0xFFFull << 22};
  const size_t rounds = Longer(kSanitized ? 3000 : 20000);
  for (size_t round = 0; round < rounds; ++round) {
    const bool grows = round / 2000 % 2 == 0;
    const uint64_t mask = kinds[random_() % 5];
    const uint64_t fill = random_() % 2 == 0 ? 0 : ~mask;
    const uint64_t hash = (random_() & mask) | fill;
    const bool many_equal = mask == 0 && model_.count(PositionOf(hash)) > 40;
    if (!many_equal && (hashes_.empty() || random_() % 10 < (grows ? 7 : 3))) {
      Add(hash);
    } else {
      RemoveAny();
    }
    ASSERT_NO_FATAL_FAILURE(ExpectFound(hash));
    ASSERT_FALSE(index_.Remove(hash, kNoPlace - 1));
    if (round % 500 == 0) {
      ASSERT_NO_FATAL_FAILURE(ExpectEqual());
      ASSERT_NO_FATAL_FAILURE(ExpectListed(PositionOf(hash)));
    }
    if (round % 7001 == 7000) {
      index_.Clear();
      model_.clear();
      hashes_.clear();
      ASSERT_NO_FATAL_FAILURE(ExpectEqual());
    }
  }
}

// All hashes in one partition, and of them all at its end: entries past the last home.
TEST_F(SlotIndexTest, CrowdedEnds) {
  for (int i = 0; i < 600; ++i) {
    Add(~uint64_t{0} - (random_() % 4 << 22));
    Add(random_() % 4 << 22);
  }
  ExpectEqual();
  EXPECT_GT(index_.crowded(), 1000u);
  while (!hashes_.empty()) {
    RemoveAny();
    if (hashes_.size() % 100 != 0) continue;
    ASSERT_NO_FATAL_FAILURE(ExpectEqual());
  }
}

// Partitions whose arrays are mapped.
TEST_F(SlotIndexTest, LargePartitions) {
  const auto hash = [this](uint64_t partition) { return partition << 54 | random_() >> 10; };
  for (uint64_t i = 0; i < 30000; ++i) Add(hash(i % 3));
  ASSERT_NO_FATAL_FAILURE(ExpectEqual());
  for (int i = 0; i < 15000; ++i) {
    ASSERT_NO_FATAL_FAILURE(RemoveAny());
    Add(hash(random_() % 3));
  }
  ASSERT_NO_FATAL_FAILURE(ExpectEqual());
  SlotIndex moved = std::move(index_);
  index_ = SlotIndex();
  EXPECT_EQ(index_.size(), 0u);
  index_ = std::move(moved);
  ASSERT_NO_FATAL_FAILURE(ExpectEqual());
}

// The arrays that grow leave no holes.
TEST_F(SlotIndexTest, MemoryIsThatOfTheEntries) {
  if (kSanitized) GTEST_SKIP() << "memory of a sanitizer";
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    size_t size, pages;
    statm >> size >> pages;
    return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE));
  };
  malloc_trim(0);  // earlier tests
  const double before = resident();
  constexpr size_t kBatch = 20000;
  for (int batch = 0; batch < 300; ++batch) {
    index_.Reserve(kBatch);
    for (size_t i = 0; i < kBatch; ++i) index_.Add(random_(), static_cast<ColdPlace>(i), {1, 1});
    index_.EndAdding();
  }
  index_.Reserve(3 * kBatch);  // all arrays get more room
  EXPECT_LT(resident() - before, 1.1 * static_cast<double>(index_.bytes()));
}

// A walk that continues at positions lists what stays, once, though the arrays grow and shrink.
TEST_F(SlotIndexTest, WalkAcrossGrowth) {
  for (int i = 0; i < 3000; ++i) Add(random_() & ~(uint64_t{0x3F} << 58));
  std::map<ColdPlace, int> stays;
  for (const auto& [hash, place] : hashes_) stays[place] = 0;
  uint64_t cursor = 0;
  while (cursor != SlotIndex::kEnd) {
    uint64_t next = SlotIndex::kEnd, last = SlotIndex::kEnd;
    int listed = 0;
    index_.ForFrom(cursor, [&](uint64_t position, const SlotIndex::Entry* e) {
      if (position != last && listed >= 100) {
        next = position;
        return false;
      }
      last = position;
      ++listed;
      const auto at = stays.find(e->place);
      if (at != stays.end()) ++at->second;
      return true;
    });
    cursor = next;
    for (int i = 0; i < 60; ++i) Add(random_());
    for (int i = 0; i < 20; ++i) RemoveAny();
  }
  std::set<ColdPlace> left;
  for (const auto& [hash, place] : hashes_) left.insert(place);
  for (auto at = stays.begin(); at != stays.end();) {
    at = left.count(at->first) == 0 ? stays.erase(at) : std::next(at);
  }
  for (const auto& [place, times] : stays) ASSERT_EQ(times, 1) << place;
  EXPECT_GT(stays.size(), 100u);
  ExpectEqual();
}

TEST_F(SlotIndexTest, BytesOfAnEntry) {
  const size_t most = kSanitized ? 200'000 : Longer(1'000'000);
  double worst = 0, worst_large = 0;
  for (size_t n = 1; n <= most; ++n) {
    if (n % 512 == 1) index_.Reserve(512);
    index_.Add(random_(), static_cast<ColdPlace>(n), {});
    index_.EndAdding();
    if (n < 100'000 || n % 10'000 != 0) continue;
    double* const bytes = n < 200'000 ? &worst : &worst_large;
    *bytes = std::max(*bytes, static_cast<double>(index_.bytes()) / static_cast<double>(n));
  }
  EXPECT_LE(worst, 25);  // what Reserve makes room for counts, too
  EXPECT_LE(worst_large, 24);
  EXPECT_EQ(index_.crowded(), 0u);
  index_.CheckInvariants();
}

// After Reserve, entries need no memory, however full the index is.
TEST_F(SlotIndexTest, AddNeedsNoMemoryAfterReserve) {
  for (const size_t batch : {1, 7, 100, 5000}) {
    SCOPED_TRACE(batch);
    SlotIndex index;
    std::vector<uint64_t> hashes(batch);
    const size_t n = kSanitized ? 40'000 : 200'000;
    ColdPlace place = 0;
    // Small batches from a full index on; Reserve looks at each partition.
    const size_t begin = batch < 100 ? n - 5000 : 0;
    for (size_t i = 0; i < begin; ++i) index.Add(random_(), place++, {});
    index.EndAdding();
    for (size_t i = begin; i < n; i += batch) {
      for (uint64_t& hash : hashes) hash = random_();
      index.Reserve(batch);
      failing::WithAllocations(0, [&] {
        for (const uint64_t hash : hashes) index.Add(hash, place++, {});
        index.EndAdding();
      });
    }
    index.CheckInvariants();
  }
}

// Hashes that were chosen to be equal in all that the index has of them, or to be neighbours.
class SlotIndexChosenTest : public SlotIndexTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(LowBits, SlotIndexChosenTest, ::testing::Values(22, 26, 32, 44));

TEST_P(SlotIndexChosenTest, CostLittle) {
  const int bits = GetParam();
  const size_t n = kSanitized ? 3000 : 20000;
  std::set<uint64_t> chosen;
  while (chosen.size() < n)
    chosen.insert(uint64_t{0x155} << 54 | (random_() & ((1ull << bits) - 1)));
  std::vector<uint64_t> hashes(chosen.begin(), chosen.end());
  std::shuffle(hashes.begin(), hashes.end(), random_);
  ColdPlace place = 0;
  for (size_t i = 0; i < n; i += 500) {
    index_.Reserve(500);
    failing::WithAllocations(0, [&] {
      for (size_t j = i; j < std::min(n, i + 500); ++j) index_.Add(hashes[j], place++, {});
      index_.EndAdding();
    });
  }
  index_.CheckInvariants();
  ASSERT_EQ(index_.size(), n);
  size_t candidates = 0;
  for (size_t i = 0; i < n; ++i) {
    size_t found = 0;
    index_.ForEach(hashes[i], [&](const SlotIndex::Entry* e) {
      found += e->place == i;
      ++candidates;
    });
    ASSERT_EQ(found, 1u);
  }
  EXPECT_LE(candidates, 5 * n);
  // A copy by ForHashes has the same entries.
  SlotIndex copy;
  copy.ReserveEvenly(n);
  index_.ForHashes([&](uint64_t hash, const SlotIndex::Entry* e) {
    copy.AddAgain(hash, e->place, e->times);
    return true;
  });
  copy.EndAdding();
  copy.CheckInvariants();
  for (size_t i = 0; i < n; ++i) {
    size_t found = 0;
    copy.ForEach(hashes[i], [&](const SlotIndex::Entry* e) { found += e->place == i; });
    ASSERT_EQ(found, 1u);
  }
  for (size_t i = 0; i < n; ++i) {
    ASSERT_TRUE(index_.Remove(hashes[i], static_cast<ColdPlace>(i)));
    ASSERT_FALSE(index_.Remove(hashes[i], static_cast<ColdPlace>(i)));
  }
  EXPECT_EQ(index_.size(), 0u);
  EXPECT_EQ(index_.crowded(), 0u);
  index_.CheckInvariants();
}

TEST_F(SlotIndexTest, FailedReserveChangesNothing) {
  for (int i = 0; i < 3000; ++i) Add(random_());
  for (size_t allocations = 0;; allocations += 97) {
    bool failed = false;
    failing::WithAllocations(allocations, [&] {
      try {
        index_.Reserve(4000);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    });
    ASSERT_NO_FATAL_FAILURE(ExpectEqual());
    if (!failed) break;
  }
}

}  // namespace
}  // namespace dynemb
