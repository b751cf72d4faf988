#include "cc/table/bucket_ops.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cc/device/flat_index.h"
#include "cc/table/lanes.h"

namespace dynemb {
namespace {

// One segment, and rows that consist of their keys only.
class BucketOps : public ::testing::Test {
 protected:
  BucketOps() : segment_(kBucketsPerSegment), keys_(1000) {
    for (Bucket& bucket : segment_) ClearBucket(&bucket);
    view_ = {segment_.data(), {&zero_, 0, 0}, nullptr, 0, reinterpret_cast<char*>(keys_.data()),
             sizeof(uint64_t)};
  }
  // The n-th key with this home bucket (and any digest), from 0.
  uint64_t KeyAtHome(uint32_t home, uint32_t n) {
    for (uint64_t key = 0;; ++key) {
      if (MakeProbe(MixKey(key)).home == home && n-- == 0) return key;
    }
  }
  static Probe ProbeOf(uint64_t key) { return MakeProbe(MixKey(key)); }
  SlotRef Put(uint64_t key, RowId row, Stamp now) {
    keys_[row] = key;
    return Claim(lane_, segment_.data(), ProbeOf(key), row, now);
  }
  SlotRef Get(uint64_t key) { return Find(lane_, view_, segment_.data(), ProbeOf(key), key); }
  // Evicts a row with an older stamp than `now` for the key.
  EvictedSlot EvictBefore(uint64_t key, Stamp now) {
    const StampOrder order;
    return Evict(lane_, view_, segment_.data(), ProbeOf(key), Evictable{order, order.Rank(now)},
                 now);
  }
  bool Remove(uint64_t key) {
    const SlotRef at = Get(key);
    return at.bucket != nullptr && Erase(lane_, segment_.data(), ProbeOf(key), at);
  }
  uint32_t Overflow(uint32_t bucket) const {
    return segment_[bucket % kBucketsPerSegment].overflow();
  }

  const uint32_t zero_ = 0;
  std::vector<Bucket> segment_;
  std::vector<uint64_t> keys_;
  TableView<uint64_t> view_;
  OneLane lane_;
};

TEST_F(BucketOps, ClaimFillsTheHomeBucketFirst) {
  for (uint32_t i = 0; i < 16; ++i) {
    const SlotRef at = Put(KeyAtHome(62, i), i, 5);
    EXPECT_EQ(at.bucket, &segment_[(62 + i / 7) % 64]);
    EXPECT_EQ(at.row, i);
    EXPECT_EQ(at.bucket->score[at.slot], 5u);
  }
  EXPECT_EQ(Overflow(62), 9u);  // 7 in the next bucket and 2 in the one after, cyclic
  EXPECT_EQ(Overflow(63), 2u);
  EXPECT_EQ(Overflow(0), 0u);
  for (uint32_t i = 0; i < 16; ++i) EXPECT_EQ(Get(KeyAtHome(62, i)).row, i);
  EXPECT_EQ(Get(KeyAtHome(62, 16)).bucket, nullptr);
}

TEST_F(BucketOps, EraseDecrementsOverflowOnThePath) {
  for (uint32_t i = 0; i < 16; ++i) Put(KeyAtHome(62, i), i, 1);
  EXPECT_TRUE(Remove(KeyAtHome(62, 15)));
  EXPECT_EQ(Overflow(62), 8u);
  EXPECT_EQ(Overflow(63), 1u);
  EXPECT_TRUE(Remove(KeyAtHome(62, 0)));  // in its home bucket: passed over no bucket
  EXPECT_EQ(Overflow(62), 8u);
  for (uint32_t i = 1; i < 15; ++i) EXPECT_EQ(Get(KeyAtHome(62, i)).row, i);
  // The next claim takes the empty slot of the home bucket, and counts no overflow.
  EXPECT_EQ(Put(KeyAtHome(62, 16), 16, 1).bucket, &segment_[62]);
  EXPECT_EQ(Overflow(62), 8u);
}

TEST_F(BucketOps, SecondEraseFails) {
  Put(KeyAtHome(3, 0), 0, 1);
  const SlotRef at = Get(KeyAtHome(3, 0));
  const Probe probe = ProbeOf(KeyAtHome(3, 0));
  EXPECT_TRUE(Erase(lane_, segment_.data(), probe, at));
  EXPECT_FALSE(Erase(lane_, segment_.data(), probe, at));
  EXPECT_EQ(segment_[3].digests()[at.slot], 0);
  EXPECT_EQ(segment_[3].row[at.slot], kNoRow);
}

TEST_F(BucketOps, SaturatedOverflowIsSticky) {
  // Of 300 keys with one home bucket, 293 pass over it.
  for (uint32_t i = 0; i < 300; ++i) Put(KeyAtHome(10, i), i, 1);
  EXPECT_EQ(Overflow(10), 255u);
  EXPECT_EQ(Overflow(11), 255u);
  EXPECT_EQ(Overflow(16), 300u - 49u);
  for (uint32_t i = 0; i < 300; ++i) ASSERT_EQ(Get(KeyAtHome(10, i)).row, i);
  for (uint32_t i = 299; i >= 1; --i) ASSERT_TRUE(Remove(KeyAtHome(10, i)));
  EXPECT_EQ(Overflow(10), 255u);  // sticky
  EXPECT_EQ(Overflow(16), 0u);
  EXPECT_EQ(Get(KeyAtHome(10, 0)).row, 0u);
}

TEST_F(BucketOps, ClaimInAFullSegmentFails) {
  uint32_t n = 0;
  for (uint64_t key = 0; n < kSlotsPerSegment; ++key) {
    ASSERT_NE(Put(key, n++, 1).bucket, nullptr);
  }
  EXPECT_EQ(Put(12345678, 999, 1).bucket, nullptr);
  for (uint64_t key = 0; key < kSlotsPerSegment; ++key) ASSERT_EQ(Get(key).row, key);
  EXPECT_EQ(Get(12345678).bucket, nullptr);  // a probe ends after the whole ring
}

TEST_F(BucketOps, EvictTakesTheOldestNearbyRow) {
  for (uint32_t i = 0; i < 7; ++i) Put(KeyAtHome(20, i), i, 10 + (i + 4) % 7);  // oldest: i = 3
  const uint64_t fresh = KeyAtHome(20, 7);
  const SlotRef at = EvictBefore(fresh, 100);
  ASSERT_NE(at.bucket, nullptr);
  EXPECT_EQ(at.row, 3u);
  EXPECT_EQ(at.bucket->score[at.slot], 100u);
  EXPECT_EQ(at.bucket->digests()[at.slot], ProbeOf(fresh).digest);
  keys_[3] = fresh;
  EXPECT_EQ(Get(fresh).row, 3u);
}

TEST_F(BucketOps, EvictUpdatesOverflow) {
  // Of 8 keys with home bucket 30, the last is in bucket 31 and is the oldest. Bucket 29 is full. A
  // new key with home bucket 29 takes its slot.
  for (uint32_t i = 0; i < 8; ++i) Put(KeyAtHome(30, i), i, i == 7 ? 1 : 50);
  for (uint32_t i = 0; i < 7; ++i) Put(KeyAtHome(29, i), 10 + i, 50);
  EXPECT_EQ(Overflow(30), 1u);
  const uint64_t fresh = KeyAtHome(29, 7);
  const SlotRef at = EvictBefore(fresh, 60);
  ASSERT_EQ(at.row, 7u);
  EXPECT_EQ(at.bucket, &segment_[31]);
  keys_[7] = fresh;
  EXPECT_EQ(Overflow(29), 1u);
  EXPECT_EQ(Overflow(30), 1u);  // one less for the old key, one more for the new
  EXPECT_EQ(Overflow(31), 0u);
  EXPECT_EQ(Get(fresh).row, 7u);
}

// The new key gets the row of the evicted key, but an empty slot of a bucket before it.
TEST_F(BucketOps, EvictedKeysLeaveTheirSlots) {
  for (uint32_t i = 0; i < 8; ++i) Put(KeyAtHome(30, i), i, i == 7 ? 1 : 50);
  for (uint32_t i = 0; i < 6; ++i) Put(KeyAtHome(29, i), 10 + i, 50);
  const uint64_t fresh = KeyAtHome(29, 6);
  const EvictedSlot at = EvictBefore(fresh, 60);
  ASSERT_EQ(at.row, 7u);
  EXPECT_EQ(at.bucket, &segment_[29]);
  EXPECT_EQ(at.score, 1u);
  EXPECT_EQ(at.bucket->score[at.slot], 60u);
  keys_[7] = fresh;
  for (uint32_t bucket = 28; bucket < 33; ++bucket) EXPECT_EQ(Overflow(bucket), 0u) << bucket;
  EXPECT_EQ(Get(fresh).row, 7u);
  EXPECT_EQ(Get(KeyAtHome(30, 7)).bucket, nullptr);
  for (uint32_t slot = 0; slot < kSlotsPerBucket; ++slot) {
    EXPECT_EQ(segment_[31].row[slot], kNoRow);
    EXPECT_EQ(segment_[31].digests()[slot], 0u);
  }
}

// However many keys have been evicted, searches for absent keys end after few buckets. (They read
// 2.3 buckets before, as keys have passed over full buckets, and 7.4 afterwards, as such keys stay
// where they are when a slot of that bucket becomes empty.)
TEST_F(BucketOps, SearchesStayShort) {
  constexpr RowId kRows = 380;  // 85% of the slots
  const auto buckets_read = [&](uint64_t first) {
    double read = 0;
    for (uint64_t key = first; key < first + 1000; ++key) {
      for (uint32_t i = 0; i < kBucketsPerSegment; ++i) {
        ++read;
        if (Overflow(ProbeOf(key).home + i) == 0) break;
      }
    }
    return read / 1000;
  };
  Stamp now = 1;
  uint64_t next = 0;
  for (RowId row = 0; row < kRows; ++row) Put(next++, row, now++);
  const double claimed = buckets_read(1000000);
  for (int i = 0; i < 20000; ++i) {
    const SlotRef at = EvictBefore(next, now++);
    ASSERT_NE(at.bucket, nullptr);
    keys_[at.row] = next++;
  }
  for (RowId row = 0; row < kRows; ++row) ASSERT_EQ(Get(keys_[row]).row, row);
  EXPECT_LT(claimed, 4);
  EXPECT_LT(buckets_read(2000000), 10);
}

// The same in an index that is one ring, as of a device table: with the load of a full table, a
// search for an absent key reads 2.1 buckets, and one for a present key 1.2. (With a load of
// 0.85: 8.2 and 1.6.)
TEST(FlatRingOps, SearchesStayShort) {
  constexpr uint32_t kBuckets = 1024;
  constexpr auto kRows = static_cast<RowId>(0.7 * kBuckets * kSlotsPerBucket);
  struct KeysOnly {
    std::vector<uint64_t> keys;
    uint64_t KeyAt(RowId row) const { return keys[row]; }
    uint64_t HashOf(uint64_t key) const { return HashKey(key, 0); }
  };
  std::vector<Bucket> buckets(kBuckets);
  for (Bucket& bucket : buckets) ClearBucket(&bucket);
  const FlatRing ring{buckets.data(), kBuckets, 0};
  OneLane lane;
  KeysOnly view{std::vector<uint64_t>(kRows)};
  const auto probe = [&](uint64_t key) { return ProbeIn(ring, view.HashOf(key)); };
  Stamp now = 1;
  uint64_t next = 0;
  for (RowId row = 0; row < kRows; ++row) {
    view.keys[row] = next;
    ASSERT_NE(Claim(lane, ring, probe(next++), row, now++).bucket, nullptr);
  }
  const StampOrder order;
  for (RowId i = 0; i < 20 * kRows; ++i) {
    const EvictedSlot at =
        Evict(lane, view, ring, probe(next), Evictable{order, order.Rank(now)}, now);
    ASSERT_NE(at.bucket, nullptr);
    view.keys[at.row] = next++;
    ++now;
  }
  const auto read = [&](uint64_t key, const Bucket* found) {
    uint32_t i = 0;
    for (; OnPath(ring, probe(key).home, i) != found; ++i) {
      if (OnPath(ring, probe(key).home, i)->overflow() == 0) break;
    }
    return i + 1;
  };
  uint64_t absent = 0, present = 0;
  for (uint64_t key = next; key < next + 10000; ++key) absent += read(key, nullptr);
  for (const uint64_t key : view.keys) {
    const SlotRef at = Find(lane, view, ring, probe(key), key);
    ASSERT_NE(at.bucket, nullptr);
    present += read(key, at.bucket);
  }
  EXPECT_LT(static_cast<double>(absent) / 10000, 3);
  EXPECT_LT(static_cast<double>(present) / kRows, 1.5);
}

TEST_F(BucketOps, EvictSparesRecentRows) {
  for (uint32_t i = 0; i < 5; ++i) Put(KeyAtHome(40, i), i, 100);
  EXPECT_EQ(EvictBefore(KeyAtHome(40, 9), 100).bucket, nullptr);
  EXPECT_EQ(EvictBefore(KeyAtHome(40, 9), 99).bucket, nullptr);
  // An older key farther along the path is evicted.
  Put(KeyAtHome(39, 0), 7, 99);
  EXPECT_EQ(EvictBefore(KeyAtHome(40, 9), 100).row, 7u);
  EXPECT_EQ(EvictBefore(KeyAtHome(40, 9), 100).bucket, nullptr);
}

TEST_F(BucketOps, EvictFromAnEmptySegment) { EXPECT_EQ(EvictBefore(1, 100).bucket, nullptr); }

TEST_F(BucketOps, MatchComparesOnlySlots) {
  alignas(64) Bucket bucket;
  ClearBucket(&bucket);
  bucket.overflow() = 9;
  for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
    bucket.digests()[s] = 9;
    EXPECT_EQ(OneLane::Match(bucket, 9), 1u << s);
    bucket.digests()[s] = static_cast<uint8_t>(200 + s);
  }
  EXPECT_EQ(OneLane::Match(bucket, 9), 0u);  // the overflow count is not a digest
  for (uint32_t s = 0; s < kSlotsPerBucket; ++s) bucket.digests()[s] = 255;
  EXPECT_EQ(OneLane::Match(bucket, 255), 127u);
  EXPECT_EQ(OneLane::Match(bucket, 0), 0u);
}

}  // namespace
}  // namespace dynemb
