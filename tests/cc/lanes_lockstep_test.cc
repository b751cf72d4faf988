// LockstepLanes: its collectives return the same results as one lane's, and teams that contend for
// a few buckets give every key a separate slot.
#include "tests/simulated/lanes_lockstep.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <vector>

#include "cc/table/bucket_ops.h"
#include "cc/table/lanes.h"
#include "tests/simulated/lane_turns.h"

namespace dynemb {
namespace {

template <class Lanes>
class LanesLockstep : public ::testing::Test {
 protected:
  SerialExec exec_;
};
using Widths = ::testing::Types<LockstepLanes<4>, LockstepLanes<32>>;
TYPED_TEST_SUITE(LanesLockstep, Widths);

TYPED_TEST(LanesLockstep, CollectivesAgreeWithOneLane) {
  using Lanes = TypeParam;
  std::mt19937 random(3);
  std::vector<Bucket> buckets(50);
  for (Bucket& bucket : buckets) {
    for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
      bucket.digests()[s] = static_cast<uint8_t>(random() % 3);
      bucket.score[s] = random() % 1000;
      bucket.row[s] = random() % 2 == 0 ? kNoRow : s;
    }
  }
  std::atomic<int> wrong{0};
  std::atomic<uint32_t> calls{0};
  Lanes::Launch(this->exec_, buckets.size(), 1, [&](Lanes& lanes, size_t begin, size_t) {
    const Bucket& bucket = buckets[begin];
    const auto old = [&](uint32_t s) { return bucket.score[s] < 500; };
    const auto value = [&](uint32_t s) { return uint64_t{bucket.score[s]} << 8 | s; };
    const auto no_row = [&](uint32_t s) { return bucket.row[s] == kNoRow; };
    wrong += lanes.Match(bucket, 1) != OneLane::Match(bucket, 1);
    wrong += lanes.Mask(old) != OneLane::Mask(old);
    wrong += lanes.Min(value) != OneLane::Min(value);
    wrong += lanes.Empty(bucket) != OneLane::Mask(no_row);
    wrong += lanes.FromLeader(lanes.rank() + 7) != 7;
    // The maximum is in another lane each time, and exceeds 2^31.
    const auto greatest = static_cast<uint32_t>(begin % Lanes::width());
    wrong += lanes.Max(~((lanes.rank() - greatest) % Lanes::width())) != ~0u;
    ++calls;
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(calls, buckets.size() * Lanes::width()) << "every lane runs every range";
}

// A segment, and rows that consist of keys only. All keys have the same home bucket.
class Crowd {
 public:
  static constexpr uint32_t kHome = 8;
  static constexpr RowId kKeys = 60;

  Crowd() : segment_(kBucketsPerSegment), key_of_row_(kKeys) {
    for (Bucket& bucket : segment_) ClearBucket(&bucket);
    for (uint64_t key = 0; keys_.size() < 2 * kKeys; ++key) {
      if (ProbeOf(key).home == kHome) keys_.push_back(key);
    }
    view_ = {
        segment_.data(), {&zero_, 0, 0}, nullptr, 0, reinterpret_cast<char*>(key_of_row_.data()),
        sizeof(uint64_t)};
  }

  static Probe ProbeOf(uint64_t key) { return MakeProbe(MixKey(key)); }

  // Checks that each held row is found at its slot, and that the overflow counts agree with the
  // held keys. Returns the number of held rows.
  uint32_t Check() {
    OneLane lane;
    std::vector<uint32_t> passed(kBucketsPerSegment);
    uint32_t held = 0;
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        const RowId row = segment_[b].row[s];
        if (row == kNoRow) continue;
        ++held;
        const uint64_t key = key_of_row_[row];
        const SlotRef at = Find(lane, view_, segment_.data(), ProbeOf(key), key);
        EXPECT_TRUE(at.bucket == &segment_[b] && at.slot == s) << "row " << row;
        for (uint32_t i = ProbeOf(key).home; i != b; i = (i + 1) % kBucketsPerSegment) ++passed[i];
      }
    }
    for (uint32_t b = 0; b < kBucketsPerSegment; ++b) {
      EXPECT_EQ(segment_[b].overflow(), passed[b]) << "bucket " << b;
    }
    return held;
  }

  const uint32_t zero_ = 0;
  std::vector<uint64_t> keys_;  // kKeys keys, and kKeys more that replace them
  std::vector<Bucket> segment_;
  std::vector<uint64_t> key_of_row_;
  TableView<uint64_t> view_;
};

TYPED_TEST(LanesLockstep, TeamsContend) {
  using Team = TypeParam;
  constexpr RowId kKeys = Crowd::kKeys;
  const int rounds = !LaneTurns::kThreads ? 100 : Team::width() > 4 ? 2 : 10;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    Crowd crowd;
    std::copy_n(crowd.keys_.begin(), kKeys, crowd.key_of_row_.begin());
    Team::Launch(this->exec_, kKeys, 1, [&](Team& team, size_t i, size_t) {
      Claim(team, crowd.segment_.data(), crowd.ProbeOf(crowd.keys_[i]), static_cast<RowId>(i), 1);
    });
    EXPECT_EQ(crowd.Check(), kKeys) << "claimed";

    std::vector<RowId> evicted(kKeys, kNoRow);
    Team::Launch(this->exec_, kKeys, 1, [&](Team& team, size_t i, size_t) {
      const uint64_t key = crowd.keys_[kKeys + i];
      const SlotRef at = Evict(team, crowd.view_, crowd.segment_.data(), crowd.ProbeOf(key),
                               Evictable{StampOrder(), StampOrder().Rank(2)}, /*next=*/2);
      if (team.rank() == 0 && at.bucket != nullptr) {
        evicted[i] = at.row;
        crowd.key_of_row_[at.row] = key;
      }
    });
    std::sort(evicted.begin(), evicted.end());
    std::vector<RowId> every(kKeys);
    std::iota(every.begin(), every.end(), RowId{0});
    EXPECT_EQ(evicted, every) << "each old row is evicted once";
    EXPECT_EQ(crowd.Check(), kKeys) << "evicted";

    std::atomic<uint32_t> erased{0};
    Team::Launch(this->exec_, 2 * kKeys, 1, [&](Team& team, size_t i, size_t) {  // each key twice
      const uint64_t key = crowd.keys_[kKeys + i / 2];
      const Probe probe = crowd.ProbeOf(key);
      const SlotRef at = Find(team, crowd.view_, crowd.segment_.data(), probe, key);
      if (at.bucket == nullptr) return;
      if (Erase(team, crowd.segment_.data(), probe, at) && team.rank() == 0) ++erased;
    });
    EXPECT_EQ(erased, kKeys);
    EXPECT_EQ(crowd.Check(), 0u) << "erased";
  }
}

// Lanes wait for each other in any order, and end in any order.
TEST(LaneTurns, LanesThatWaitForOneAnother) {
  constexpr uint32_t kLanes = 5;
  LaneTurns turns;
  std::atomic<uint32_t> done{0};
  std::vector<uint32_t> order;
  for (int run = 0; run < 3; ++run) {
    done = 0;
    order.clear();
    turns.Run(kLanes, [&](uint32_t rank) {
      while (done != kLanes - 1 - rank) turns.Yield();  // the last lane ends first
      order.push_back(rank);
      ++done;
    });
    EXPECT_EQ(order, (std::vector<uint32_t>{4, 3, 2, 1, 0}));
  }
}

TEST(LaneTurns, ADeepStackIsSeen) {
  if (LaneTurns::kThreads) GTEST_SKIP() << "threads have stacks of megabytes";
  const auto overflow = [] {
    LaneTurns turns;
    turns.Run(2, [](uint32_t rank) {
      volatile char large[70 << 10];
      for (uint32_t i = 0; rank == 1 && i < sizeof large; ++i) large[i] = 1;
    });
  };
  EXPECT_DEATH(overflow(), "a lane needs a stack of more than 65536 bytes|AddressSanitizer");
}

}  // namespace
}  // namespace dynemb
