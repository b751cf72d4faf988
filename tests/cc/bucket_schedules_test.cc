// The bucket algorithm (cc/table/bucket_ops.h) under every schedule of two or three teams with a
// few deviations: no slot is lost, no row is taken twice, and the overflow counts agree with the
// keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cc/device/flat_index.h"
#include "cc/table/bucket_ops.h"
#include "tests/cc/schedules.h"

namespace dynemb {
namespace {

using testing_schedules::ExploredLane;
using testing_schedules::Schedules;

constexpr uint32_t kBuckets = 2, kSlots = kBuckets * kSlotsPerBucket;
constexpr RowId kRows = 32;

// An index of two buckets, as device tables have it, with rows that consist of keys only. Row r has
// the key of number r: `homes[r]` is its home bucket.
class Rows {
 public:
  explicit Rows(std::vector<uint32_t> homes) : homes_(std::move(homes)) {
    homes_.resize(kRows, 0);
    for (uint64_t key = 1; keys_.size() < kRows; ++key) {
      if (ProbeIn(ring, HashOf(key)).home == homes_[keys_.size()]) keys_.push_back(key);
    }
    Clear();
  }
  void Clear() {
    for (Bucket& bucket : buckets_) ClearBucket(&bucket);
    key_of_row_ = keys_;
    pins.assign(1, 0);
  }
  // Gives rows [first, last) slots, before the threads begin.
  void Hold(RowId first, RowId last, Score score) {
    OneLane lane;
    for (RowId row = first; row < last; ++row) {
      Claim(lane, ring, Probe(row), row, score + row);
    }
  }
  uint64_t HashOf(uint64_t key) const { return MixKey(key); }
  uint64_t KeyAt(RowId row) const { return key_of_row_[row]; }
  uint64_t key(RowId row) const { return keys_[row]; }
  FlatProbe Probe(RowId row) const { return ProbeIn(ring, HashOf(keys_[row])); }
  // The row that an evicted key had now has the key of number `number`.
  void Rename(RowId row, RowId number) { key_of_row_[row] = keys_[number]; }
  Bucket& bucket(uint32_t b) { return buckets_[b]; }
  // The score in the slot of a row.
  Score ScoreOf(RowId row) const {
    for (const Bucket& bucket : buckets_) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        if (bucket.row[s] == row) return bucket.score[s];
      }
    }
    return 0;
  }

  // Returns the fault of the index, if it is to have these rows, and one key more than these has
  // passed over bucket b `more[b]` times.
  std::string Check(std::vector<RowId> rows, const std::vector<uint32_t>& more = {0, 0}) const {
    std::vector<RowId> held;
    std::vector<uint32_t> passed = more;
    for (uint32_t b = 0; b < kBuckets; ++b) {
      for (uint32_t s = 0; s < kSlotsPerBucket; ++s) {
        const RowId row = buckets_[b].row[s];
        const uint8_t digest = buckets_[b].digests()[s];
        if (row == kNoRow) {
          if (digest != 0) return "an empty slot has a digest";
          continue;
        }
        held.push_back(row);
        const FlatProbe probe = ProbeIn(ring, HashOf(KeyAt(row)));
        if (digest != probe.digest) return "row " + std::to_string(row) + " has a wrong digest";
        for (uint32_t at = probe.home; at != b; at = (at + 1) % kBuckets) ++passed[at];
      }
    }
    std::sort(held.begin(), held.end());
    std::sort(rows.begin(), rows.end());
    if (held != rows) return std::to_string(held.size()) + " slots have rows, or other rows";
    for (uint32_t b = 0; b < kBuckets; ++b) {
      if (buckets_[b].overflow() != std::min<uint32_t>(passed[b], kOverflowSticky)) {
        return "bucket " + std::to_string(b) + " counts " + std::to_string(buckets_[b].overflow()) +
               " keys, not " + std::to_string(passed[b]);
      }
    }
    return "";
  }

 private:
  std::vector<Bucket> buckets_{kBuckets};

 public:
  const FlatRing ring{buckets_.data(), kBuckets, 0};
  std::vector<uint32_t> pins;

 private:
  std::vector<uint32_t> homes_;
  std::vector<uint64_t> keys_, key_of_row_;
};

std::vector<RowId> Range(RowId first, RowId last) {
  std::vector<RowId> rows;
  for (RowId row = first; row < last; ++row) rows.push_back(row);
  return rows;
}

// Runs fn(t) on `teams` teams.
template <class Fn>
std::vector<Schedules::Thread> Teams(size_t teams, const Fn& fn) {
  std::vector<Schedules::Thread> threads;
  for (size_t t = 0; t < teams; ++t) threads.push_back([fn, t] { fn(t); });
  return threads;
}

// The fault, or "". *runs: the number of schedules.
template <class Begin, class Check>
std::string Explore(const Begin& begin, const Check& check, size_t deviations, size_t* runs) {
  Schedules schedules(begin, check, deviations);
  std::string wrong = schedules.Explore();
  *runs = schedules.runs();
  return wrong;
}

// Teams claim slots for new keys. `held`: the rows that have slots before.
template <class Lane>
std::string ClaimTogether(std::vector<uint32_t> homes, RowId held, size_t teams, size_t deviations,
                          size_t* runs) {
  Rows rows(std::move(homes));
  std::vector<SlotRef> at;
  return Explore(
      [&] {
        rows.Clear();
        rows.Hold(0, held, 1);
        at.assign(teams, {});
        return Teams(teams, [&](size_t t) {
          Lane lane;
          const auto row = static_cast<RowId>(held + t);
          at[t] = Claim(lane, rows.ring, rows.Probe(row), row, /*score=*/100);
        });
      },
      [&]() -> std::string {
        for (size_t t = 0; t < teams; ++t) {
          if (at[t].bucket == nullptr) return "a key has no slot";
          if (at[t].bucket->row[at[t].slot] != held + t) return "a slot was taken twice";
          if (at[t].bucket->score[at[t].slot] != 100) return "a slot has another score";
        }
        return rows.Check(Range(0, static_cast<RowId>(held + teams)));
      },
      deviations, runs);
}

// Teams give new keys, whose home bucket is 0, the rows of evicted ones. `pinned`: scores are no
// stamps. Bucket 0 has `held` rows, bucket 1 is full. If it has older rows, the new keys move to
// the empty slots of bucket 0.
template <class Lane>
std::string EvictTogether(std::vector<uint32_t> homes, size_t teams, bool pinned, size_t deviations,
                          size_t* runs, RowId held = kSlotsPerBucket) {
  Rows rows(std::move(homes));
  const RowId all = held + kSlotsPerBucket;
  std::vector<RowId> evicted;
  return Explore(
      [&] {
        rows.Clear();
        rows.Hold(0, held, held == kSlotsPerBucket ? 1 : 50);
        rows.Hold(held, all, 1);
        // An erased key has left the oldest score in each empty slot.
        for (uint32_t slot = held; slot < kSlotsPerBucket; ++slot) rows.bucket(0).score[slot] = 1;
        evicted.assign(teams, kNoRow);
        return Teams(teams, [&](size_t t) {
          Lane lane;
          const StampOrder order;
          Evictable evictable{order, order.Rank(100), pinned ? rows.pins.data() : nullptr};
          const auto number = static_cast<RowId>(all + t);
          const EvictedSlot at = Evict(lane, rows, rows.ring, rows.Probe(number), evictable, 100);
          if (at.bucket == nullptr) return;
          evicted[t] = at.row;
          rows.Rename(at.row, number);
        });
      },
      [&]() -> std::string {
        std::vector<RowId> each = evicted;
        std::sort(each.begin(), each.end());
        if (each.back() == kNoRow) return "a key has no row";
        if (std::unique(each.begin(), each.end()) != each.end()) return "a row was taken twice";
        for (RowId row : each) {
          if (rows.ScoreOf(row) != 100) return "a slot has another score";
        }
        return rows.Check(Range(0, all));
      },
      deviations, runs);
}

// Teams erase keys, some of them the same one.
template <class Lane>
std::string EraseTogether(std::vector<uint32_t> homes, const std::vector<RowId>& of_teams,
                          size_t deviations, size_t* runs) {
  Rows rows(std::move(homes));
  std::vector<uint32_t> erased;
  return Explore(
      [&] {
        rows.Clear();
        rows.Hold(0, kSlots, 1);
        erased.assign(kRows, 0);
        return Teams(of_teams.size(), [&](size_t t) {
          Lane lane;
          const RowId row = of_teams[t];
          const SlotRef at = Find(lane, rows, rows.ring, rows.Probe(row), rows.key(row));
          if (at.bucket != nullptr && Erase(lane, rows.ring, rows.Probe(row), at)) ++erased[row];
        });
      },
      [&]() -> std::string {
        std::vector<RowId> left;
        for (RowId row = 0; row < kSlots; ++row) {
          const bool is_erased = std::count(of_teams.begin(), of_teams.end(), row) != 0;
          if (erased[row] != (is_erased ? 1 : 0)) return "a key was not erased once";
          if (!is_erased) left.push_back(row);
        }
        return rows.Check(left);
      },
      deviations, runs);
}

// Homes of rows: `zeros` times bucket 0, then bucket 1 up to `all`, then bucket 0.
std::vector<uint32_t> Homes(size_t zeros, size_t all) {
  std::vector<uint32_t> homes(zeros, 0);
  homes.resize(all, 1);
  return homes;
}

TEST(BucketSchedules, TwoTeamsClaim) {
  size_t runs;
  // One slot of bucket 0 is free: one of the keys passes over it.
  EXPECT_EQ(ClaimTogether<ExploredLane>(Homes(6, 6), 6, 2, 6, &runs), "");
  EXPECT_GT(runs, 100000u);
  // Both buckets have a free slot. Both keys have the home bucket 0.
  EXPECT_EQ(ClaimTogether<ExploredLane>(Homes(6, 12), 12, 2, 6, &runs), "");
  EXPECT_GT(runs, 100000u);
}

TEST(BucketSchedules, ThreeTeamsClaim) {
  size_t runs;
  EXPECT_EQ(ClaimTogether<ExploredLane>(Homes(5, 5), 5, 3, 3, &runs), "");
  EXPECT_GT(runs, 10000u);
}

TEST(BucketSchedules, TeamsEvict) {
  size_t runs;
  for (const bool pinned : {false, true}) {
    SCOPED_TRACE(pinned);
    EXPECT_EQ(EvictTogether<ExploredLane>(Homes(9, 14), 2, pinned, 3, &runs), "");
    EXPECT_GT(runs, 10000u);
  }
}

TEST(BucketSchedules, TeamsEvictAndMove) {
  size_t runs;
  for (const bool pinned : {false, true}) {
    SCOPED_TRACE(pinned);
    // One empty slot for two keys, and two for three.
    EXPECT_EQ(EvictTogether<ExploredLane>(Homes(6, 13), 2, pinned, 3, &runs, 6), "");
    EXPECT_GT(runs, 10000u);
    EXPECT_EQ(EvictTogether<ExploredLane>(Homes(5, 12), 3, pinned, 2, &runs, 5), "");
    EXPECT_GT(runs, 10000u);
  }
}

TEST(BucketSchedules, TeamsErase) {
  size_t runs;
  // Rows 7 and 8 have passed over bucket 0.
  EXPECT_EQ(EraseTogether<ExploredLane>(Homes(9, 14), {8, 8}, 6, &runs), "");
  EXPECT_EQ(EraseTogether<ExploredLane>(Homes(9, 14), {7, 8}, 6, &runs), "");
  EXPECT_EQ(EraseTogether<ExploredLane>(Homes(9, 14), {0, 8, 8}, 4, &runs), "");
  EXPECT_GT(runs, 10000u);
}

// A message whose flag may be seen before its text.
TEST(Schedules, DelayWrites) {
  uint32_t text = 0, flag = 0, seen = 0;
  const auto begin = [&] {
    text = flag = seen = 0;
    return std::vector<Schedules::Thread>{[&] {
                                            ExploredLane::Store(&text, 7);
                                            ExploredLane::Store(&flag, 1);
                                          },
                                          [&] {
                                            if (ExploredLane::Load(&flag) == 0) return;
                                            seen = 1;
                                            if (ExploredLane::Load(&text) != 7) seen = 2;
                                          }};
  };
  const auto check = [&] { return std::string(seen == 2 ? "no text" : ""); };
  EXPECT_EQ(Schedules(begin, check, 1).Explore(), "");
  EXPECT_NE(Schedules(begin, check, 2).Explore(), "");
}

// Mistakes that the algorithm could have: each is seen.

// Changes a digest by a load and a store of its word.
struct UnlockedDigests : ExploredLane {
  static void ChangeDigest(Bucket* bucket, uint32_t slot, uint8_t was, uint8_t is) {
    uint32_t* const word = &bucket->head[slot / 4];
    const uint32_t now = Load(word) ^ uint32_t { static_cast<uint8_t>(was ^ is) } << slot % 4 * 8;
    Store(word, now);
  }
};
// Counts by a load and a store.
struct UnlockedCounts : ExploredLane {
  static void IncrementSaturating(Bucket* bucket) { Add(bucket, 1u << 24); }
  static void DecrementUnlessSticky(Bucket* bucket) { Add(bucket, ~0u << 24); }
  static void Add(Bucket* bucket, uint32_t by) {
    const uint32_t was = Load(&bucket->head[1]);
    Store(&bucket->head[1], was + by);
  }
};
// Takes a word by a load, a comparison and a store.
struct UnlockedExchange : ExploredLane {
  static uint32_t CompareExchange(uint32_t* p, uint32_t expected, uint32_t desired) {
    const uint32_t was = Load(p);
    if (was == expected) Store(p, desired);
    return was;
  }
};
TEST(BucketSchedules, SeesMistakes) {
  size_t runs;
  EXPECT_NE(ClaimTogether<UnlockedDigests>(Homes(0, 0), 0, 2, 2, &runs), "");
  EXPECT_NE(ClaimTogether<UnlockedCounts>(Homes(7, 7), 7, 2, 2, &runs), "");
  EXPECT_NE(ClaimTogether<UnlockedExchange>(Homes(6, 6), 6, 2, 2, &runs), "");
  for (const bool pinned : {false, true}) {
    SCOPED_TRACE(pinned);
    EXPECT_NE(EvictTogether<UnlockedExchange>(Homes(9, 14), 2, pinned, 2, &runs), "");
    EXPECT_NE(EvictTogether<UnlockedDigests>(Homes(14, 14), 2, pinned, 2, &runs), "");
  }
  EXPECT_NE(EraseTogether<UnlockedExchange>(Homes(9, 14), {8, 8}, 2, &runs), "");
  EXPECT_NE(EraseTogether<UnlockedCounts>(Homes(9, 14), {7, 8}, 2, &runs), "");
}

}  // namespace
}  // namespace dynemb
