// What kernels do without reading the contents of rows, which may be in host memory: the view has
// heads, and no memory for contents.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cc/device/flat_index.h"
#include "cc/device/kernels.h"
#include "cc/device/kernels_catch_up.h"
#include "cc/device/kernels_insert.h"
#include "cc/device/kernels_rows.h"
#include "cc/device/thread_lane.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/key.h"
#include "cc/table/row.h"
#include "cc/table/stamps.h"

namespace dynemb::device {
namespace {

class DeviceHeadsTest : public testing::Test {
 protected:
  static constexpr size_t kRows = 300;
  static constexpr Stamp kUpdated = 5, kNow = 9;

  DeviceHeadsTest()
      : buckets_(BucketsFor(kRows, 0.7)), heads_(kRows), keys_(kRows), rows_(kRows, kNoRow) {
    for (Bucket& bucket : buckets_) ClearBucket(&bucket);
    counters_.high_water = kRows;
    view_.ring = {buckets_.data(), static_cast<uint32_t>(buckets_.size()), 77};
    view_.heads = heads_.data();
    view_.layout = RowLayout(8, DType::kFloat32, 16, 16, 16);
    view_.rows = {nullptr, nullptr, kRows / 3, view_.layout.content_bytes()};
    for (RowId row = 0; row < kRows; ++row) {
      keys_[row] = uint64_t{row} * row + 1;
      heads_[row] = {keys_[row], kUpdated, kNoRow};
      Claim(lane_, view_.ring, ProbeIn(view_.ring, view_.HashOf(keys_[row])), row, kUpdated);
    }
  }

  TableViews Views() {
    TableViews views;
    static_cast<DeviceView&>(views.one) = view_;
    views.one.counters = &counters_;
    views.one.now = kNow;
    views.one.touch = {Touch::Kind::kSet, kNow};
    views.items = kRows;
    return views;
  }
  template <class Body>
  void ForKeys(const Body& body, size_t n = kRows) {
    for (size_t i = 0; i < n; ++i) body(lane_, i);
  }
  template <class Body>
  void ForEach(const Body& body, size_t n = kRows) {
    for (size_t i = 0; i < n; ++i) body(i);
  }
  KeyArray keys() const { return {keys_.data(), 8}; }
  Score ScoreOf(uint64_t key) {
    const SlotRef at = view_.Find(lane_, key);
    return at.bucket->score[at.slot];
  }

  ThreadLane lane_;
  std::vector<Bucket> buckets_;
  std::vector<RowHead> heads_;
  std::vector<uint64_t> keys_;
  std::vector<RowId> rows_;
  Counters counters_{};
  DeviceView view_;
};

TEST_F(DeviceHeadsTest, Find) {
  ForKeys(FindKeys{Views(), keys(), rows_.data(), nullptr});
  for (RowId row = 0; row < kRows; ++row) EXPECT_EQ(rows_[row], row);
  EXPECT_EQ(ScoreOf(keys_[7]), kNow);
  ForEach(CountFound{Views(), rows_.data()}, TallyItems(kRows));
  EXPECT_EQ(counters_.device_hits, kRows / 3);
  EXPECT_EQ(counters_.host_hits, kRows - kRows / 3);
  EXPECT_EQ(counters_.misses, 0u);
  ForEach(CountFound{Views(), std::vector<RowId>(kRows, kNoRow).data()}, TallyItems(kRows));
  EXPECT_EQ(counters_.misses, kRows);
}

TEST_F(DeviceHeadsTest, FindsNoKeyOfAnotherRow) {
  const std::vector<uint64_t> absent{0, 3, 4, 1u << 30};
  std::vector<RowId> found(absent.size(), 0);
  ForKeys(FindKeys{Views(), {absent.data(), 8}, found.data(), nullptr}, absent.size());
  EXPECT_EQ(found, std::vector<RowId>(absent.size(), kNoRow));
}

TEST_F(DeviceHeadsTest, Resolve) {
  std::vector<RowId> before(kRows);
  std::iota(before.begin(), before.end(), RowId{0});
  heads_[10].update = 0;           // free
  heads_[20].key = keys_[20] + 1;  // given to another key
  ForKeys(ResolveRows{Views(), keys(), before.data(), rows_.data()});
  for (RowId row = 0; row < kRows; ++row) {
    EXPECT_EQ(rows_[row], row == 10 || row == 20 ? kNoRow : row);
  }
}

TEST_F(DeviceHeadsTest, EraseAndFree) {
  std::vector<RowId> gone(kRows);
  std::vector<Score> scores(kRows);
  ForKeys(EraseKeys{view_, keys(), Expired(), gone.data(), scores.data()}, 100);
  std::vector<uint32_t> sums(101);
  ForEach(FlagRows{gone.data(), 100, sums.data()}, 101);
  std::exclusive_scan(sums.begin(), sums.end(), sums.begin(), 0u);
  ForKeys(FreeRows{view_, gone.data(), sums.data(), &counters_, /*wipe=*/false}, 100);
  CountFreed{sums.data(), 100, &counters_, nullptr}(0);
  EXPECT_EQ(counters_.free_count, 100u);
  std::vector<RowId> live(kRows);
  ForEach(ListLive{view_, &counters_, 0, live.data()});
  for (RowId row = 0; row < kRows; ++row) {
    EXPECT_EQ(scores[row], row < 100 ? kUpdated : 0);
    EXPECT_EQ(live[row], row < 100 ? kNoRow : row);
    EXPECT_EQ(view_.Find(lane_, keys_[row]).row, row < 100 ? kNoRow : row);
    if (row < 100) {
      EXPECT_EQ(*view_.FreeRow(row), row);
    }
  }
}

TEST_F(DeviceHeadsTest, WipeLeavesNothingOfTheRow) {
  const size_t words = view_.layout.content_bytes() / sizeof(uint32_t);
  std::vector<uint32_t> device(kRows / 3 * words, 7), host((kRows - kRows / 3) * words, 7);
  view_.rows.device = reinterpret_cast<char*>(device.data());
  view_.rows.host = reinterpret_cast<char*>(host.data());
  const std::vector<RowId> gone{5, kRows - 1};
  const std::vector<uint32_t> sums{0, 1};
  ForKeys(FreeRows{view_, gone.data(), sums.data(), &counters_, /*wipe=*/true}, gone.size());
  for (size_t i = 0; i < gone.size(); ++i) {
    EXPECT_EQ(view_.KeyAt(gone[i]), 0u);
    EXPECT_EQ(*view_.UpdateAt(gone[i]), 0u);
    EXPECT_EQ(*view_.FreeRow(i), gone[i]);
  }
  for (const auto* of : {&device, &host}) {
    EXPECT_EQ(std::count(of->begin(), of->end(), 0u), static_cast<ptrdiff_t>(words));
  }
}

TEST_F(DeviceHeadsTest, RebuildTheIndex) {
  const FlatRing before = view_.ring;
  std::vector<Bucket> larger(2 * buckets_.size());
  for (Bucket& bucket : larger) ClearBucket(&bucket);
  view_.ring.buckets = larger.data();
  view_.ring.count = static_cast<uint32_t>(larger.size());
  ForKeys(MoveSlots{view_, before}, before.count);
  for (RowId row = 0; row < kRows; ++row) EXPECT_EQ(view_.Find(lane_, keys_[row]).row, row);
}

TEST_F(DeviceHeadsTest, SelectAndTime) {
  heads_[5].update = heads_[6].update = kNow;
  const Stamps stamps;
  const auto selected = [&](Tick since) {
    std::vector<uint32_t> flags(kRows + 1);
    ForKeys(FlagSelected{view_, KeyType::kInt64, stamps, stamps.After(since), RowPredicate(), true,
                         nullptr, 0, kRows, flags.data()},
            kRows + 1);
    return std::accumulate(flags.begin(), flags.end(), 0u);
  };
  EXPECT_EQ(selected(stamps.Decode(kUpdated) - 1), kRows);
  EXPECT_EQ(selected(stamps.Decode(kUpdated)), 2u);
  std::vector<RowId> all(kRows);
  std::iota(all.begin(), all.end(), RowId{0});
  std::vector<Score> scores(kRows, 33);
  std::vector<uint32_t> places(kRows), of(kRows);
  std::iota(places.begin(), places.end(), 0u);
  std::iota(of.begin(), of.end(), 0u);
  ForKeys(WriteScores{view_, all.data(), scores.data(), places.data(), of.data()});
  EXPECT_EQ(ScoreOf(keys_[200]), 33u);
  std::vector<uint64_t> listed(kRows);
  std::vector<uint32_t> sums(kRows);
  std::iota(sums.begin(), sums.end(), 0u);
  ForEach(ListLost{Views(), all.data(), sums.data(), listed.data()});
  EXPECT_EQ(listed, keys_);
}

}  // namespace
}  // namespace dynemb::device
