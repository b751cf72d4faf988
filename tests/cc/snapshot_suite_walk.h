// Random walks: snapshots and chains of deltas of tables that are trained in the meantime.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_SUITE_WALK_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_SUITE_WALK_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/snapshot_model.h"
#include "tests/cc/snapshot_trained.h"

namespace dynemb {
namespace testing_table {
namespace {

// A running snapshot of some tables, with its expected contents.
class Expected {
 public:
  Expected(std::vector<Trained*> tables, std::vector<Tick> since, CutOf of, Clock* clock,
           Exec* exec)
      : tables_(std::move(tables)), since_(std::move(since)), of_(of), exec_(exec) {
    std::vector<Table*> raw;
    for (Trained* t : tables_) raw.push_back(t->table());
    for (Trained* t : tables_) {
      images_.push_back(t->Now());
      accesses_.push_back(t->accesses());
      specs_.push_back(t->table()->state_spec());
    }
    const Tick last = clock->last();
    const Status status = Snapshot::Begin(*exec, raw, since_, of, clock, &snapshot_);
    EXPECT_EQ(clock->last(), last + 1);
    bool possible = true;
    for (size_t t = 0; t < tables_.size() && possible; ++t) {
      possible = tables_[t]->BeginCut(clock->last(), since_[t], of);
    }
    EXPECT_EQ(status.ok(), possible) << status.message();
    if (!status.ok()) {
      EXPECT_EQ(status.code(), Code::kFailedPrecondition);
      EXPECT_EQ(snapshot_, nullptr);
      for (Table* table : raw) EXPECT_EQ(table->cut(), nullptr);
      return;
    }
    EXPECT_EQ(snapshot_->watermark(), clock->last());
    for (size_t t = 0; t < tables_.size(); ++t) {
      EXPECT_TRUE(snapshot_->state_spec(t) == specs_[t]);
      uint64_t rows = 0;
      for (const auto& row : images_[t]) rows += row.second.update > since_[t];
      EXPECT_GE(snapshot_->most_rows(t), rows);
      if (since_[t] == 0) {
        EXPECT_EQ(snapshot_->most_rows(t), rows);
      }
      const std::vector<uint64_t>& deleted = snapshot_->deleted(t);
      const std::set<uint64_t> distinct(deleted.begin(), deleted.end());
      EXPECT_EQ(distinct.size(), deleted.size());
      EXPECT_EQ(distinct, of == CutOf::kRows ? std::set<uint64_t>()
                                             : tables_[t]->DeletedSince(since_[t], images_[t]));
    }
    delivered_.resize(tables_.size());
  }

  Snapshot* snapshot() const { return snapshot_.get(); }
  // Reads one block. Returns false at the end.
  bool Read(size_t limit) { return ReadBlock(snapshot_.get(), *exec_, limit, &delivered_); }
  const Delivery& delivered(size_t t) const { return delivered_[t]; }
  const Image& image(size_t t) const { return images_[t]; }

  void Check() {
    for (size_t t = 0; t < tables_.size(); ++t) {
      size_t expected = 0;
      for (const auto& row : images_[t]) {
        const auto access = accesses_[t].at(row.first);
        const auto at = delivered_[t].find(row.first);
        if (row.second.update <= since_[t]) {
          if (of_ != CutOf::kDeltaAndUsed) continue;
          // Whether it was used is not known exactly, nor whether it has been since.
          if (at == delivered_[t].end()) {
            ASSERT_LE(access.first, since_[t]) << "not delivered: " << row.first;
            continue;
          }
          if (tables_[t]->Untouched(row.first)) {
            ASSERT_GT(access.second, since_[t]) << row.first;
          }
        }
        ++expected;
        ASSERT_NE(at, delivered_[t].end()) << "not delivered: " << row.first << ", updated at "
                                           << row.second.update << " since " << since_[t];
        const Delivered& got = at->second;
        ASSERT_EQ(got.held.vector, row.second.vector) << row.first;
        ASSERT_EQ(got.held.state, row.second.state) << row.first;
        ASSERT_EQ(got.held.update, row.second.update) << row.first;
        ASSERT_GE(got.access, access.first) << row.first;
        ASSERT_LE(got.access, snapshot_->watermark()) << row.first;
        if (tables_[t]->Untouched(row.first)) {
          ASSERT_LE(got.access, access.second) << row.first;
        }
      }
      ASSERT_EQ(delivered_[t].size(), expected) << "since " << since_[t];
    }
  }

 private:
  std::vector<Trained*> tables_;
  std::vector<Tick> since_;
  CutOf of_;
  Exec* exec_;
  std::vector<Image> images_;
  std::vector<Trained::Accesses> accesses_;
  std::vector<StateSpec> specs_;
  std::unique_ptr<Snapshot> snapshot_;
  std::vector<Delivery> delivered_;
};

class SnapshotWalk : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
  SnapshotWalk() : exec_(GetParam().threads) {}
  // The `since` of a cut: 0, at or near one of the last watermarks, or any tick.
  static Tick Since(const std::vector<Tick>& watermarks, Clock& clock, Random& random) {
    if (watermarks.empty() || random.Below(4) == 0) {
      return random.Below(3) == 0 ? random.Below(clock.last() + 3) : 0;
    }
    const size_t back = std::min(watermarks.size(), 1 + static_cast<size_t>(random.Below(4)));
    const Tick since = watermarks[watermarks.size() - back];
    return random.Below(3) == 0 ? since - 1 + random.Below(3) : since;
  }
  SmallRanges exec_;
  Clock clock_;
};

TEST_P(SnapshotWalk, DeliversTheRowsOfTheWatermark) {
  const bool large = GetParam().batch > 1000;
  for (uint64_t seed = 1; seed <= (large ? 1 : 3 / kFewer) && !HasFailure(); ++seed) {
    Random random(seed);
    Clock clock;
    Trained a(GetParam(), Trained::Uses::kAll, &clock, &exec_, 10 * seed);
    Trained b(GetParam(), Trained::Uses::kAll, &clock, &exec_, 10 * seed + 1);
    std::vector<Tick> watermarks;
    for (size_t round = 0; round < (large ? 15 / kFewer : 60) && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
      for (uint64_t n = random.Below(8); n > 0; --n) (random.Below(2) == 0 ? a : b).Step();
      std::vector<Trained*> tables{&a};
      if (random.Below(2) == 0) tables.insert(tables.begin() + random.Below(2), &b);
      std::vector<Tick> since;
      for (size_t t = 0; t < tables.size(); ++t) since.push_back(Since(watermarks, clock, random));
      const CutOf of =
          std::array{CutOf::kRows, CutOf::kDelta, CutOf::kDeltaAndUsed}[random.Below(3)];
      // Mostly since a tick after which all deletions are known.
      if (of != CutOf::kRows && random.Below(4) != 0) {
        for (size_t t = 0; t < tables.size(); ++t) {
          since[t] = std::max(since[t], tables[t]->known_since());
        }
      }
      Expected running(tables, since, of, &clock, &exec_);
      if (running.snapshot() == nullptr) continue;
      watermarks.push_back(running.snapshot()->watermark());
      const size_t limit = 1 + random.Below(GetParam().key_space / 2);
      const uint64_t steps = random.Below(3) * random.Below(4);
      const uint64_t stop = random.Below(4) == 0 ? random.Below(10) : ~uint64_t{0};
      uint64_t blocks = 0;
      for (bool more = true; more && blocks < stop && !HasFailure(); ++blocks) {
        for (uint64_t n = random.Below(steps + 1); n > 0; --n) {
          Trained& t = random.Below(2) == 0 ? a : b;
          random.Below(5) == 0 ? t.Look() : t.Step();
        }
        more = running.Read(limit);
      }
      if (blocks < stop) {
        running.Check();
        EXPECT_FALSE(running.Read(limit));  // still the end
      }
      a.subject().Check();
      b.subject().Check();
    }
  }
}

// A copy to which each delta is applied equals the table at the watermark.
TEST_P(SnapshotWalk, DeltasReproduceTheTable) {
  const bool large = GetParam().batch > 1000;
  for (uint64_t seed = 1; seed <= (kFewer > 1 || large ? 1 : 2) && !HasFailure(); ++seed) {
    Random random(seed);
    Clock clock;
    Trained t(GetParam(), Trained::Uses::kChain, &clock, &exec_, seed);
    Image follower;
    bool whole = false;  // whether there is a base
    Tick last = 0;
    for (size_t round = 0; round < (large ? 15 / kFewer : 80) && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
      for (uint64_t n = random.Below(6); n > 0; --n) t.Step();
      if (t.TakeSwapped()) whole = false;
      const CutOf delta = random.Below(2) == 0 ? CutOf::kDelta : CutOf::kDeltaAndUsed;
      Expected running({&t}, {whole ? last : 0}, whole ? delta : CutOf::kRows, &clock, &exec_);
      ASSERT_NE(running.snapshot(), nullptr);
      const uint64_t steps = random.Below(4);
      const uint64_t stop = random.Below(3) == 0 ? random.Below(6) : ~uint64_t{0};
      uint64_t blocks = 0;
      for (bool more = true; more && blocks < stop; ++blocks) {
        for (uint64_t n = random.Below(steps + 1); n > 0; --n) t.Step();
        more = running.Read(1 + random.Below(GetParam().key_space));
      }
      if (blocks >= stop) continue;  // abandoned: the next delta continues the last complete one
      running.Check();
      if (!whole) follower.clear();
      for (uint64_t key : running.snapshot()->deleted(0)) follower.erase(key);
      for (const auto& row : running.delivered(0)) follower[row.first] = row.second.held;
      ASSERT_TRUE(follower == running.image(0));
      last = running.snapshot()->watermark();
      whole = true;
      if (t.TakeSwapped()) whole = false;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, SnapshotWalk,
    ::testing::Values(
        Kind{"Int64Float32", KeyType::kInt64, DType::kFloat32, 0, 0, EvictStrategy::kLru, 400, 60,
             1},
        Kind{"Int32Bfloat16State", KeyType::kInt32, DType::kBfloat16, 1, 0, EvictStrategy::kLru,
             400, 60, 3},
        Kind{"Uint64Float16State", KeyType::kUint64, DType::kFloat16, 2, 0, EvictStrategy::kLru,
             3000, 20, 1},
        Kind{"Evicting", KeyType::kInt64, DType::kFloat32, 2, 100, EvictStrategy::kLru, 300, 60, 3},
        Kind{"EvictingInt32", KeyType::kInt32, DType::kBfloat16, 0, 60, EvictStrategy::kLru, 300,
             60, 1},
        Kind{"EvictNone", KeyType::kInt64, DType::kFloat32, 1, 100, EvictStrategy::kNone, 200, 30,
             1},
        Kind{"Tiny", KeyType::kInt64, DType::kFloat32, 1, 3, EvictStrategy::kLru, 9, 3, 1},
        Kind{"LargeBatches", KeyType::kInt64, DType::kFloat32, 1, 0, EvictStrategy::kLru, 8000,
             5000, 3},
        Kind{"LargeEvicting", KeyType::kInt32, DType::kFloat32, 0, 5000, EvictStrategy::kLru, 12000,
             5000, 3}),
    NameOf);

}  // namespace
}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_SUITE_WALK_H_
