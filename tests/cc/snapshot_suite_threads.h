// Threads that overwrite everything while a snapshot is read.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_SUITE_THREADS_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_SUITE_THREADS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/snapshot_model.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {
namespace {

// Ends a test that hangs.
class Watchdog {
 public:
  Watchdog()
      : thread_([this] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (!ended_.wait_for(lock, std::chrono::seconds(120), [this] { return done_; })) {
            fprintf(stderr, "the test hangs\n");
            std::abort();
          }
        }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;
};

// Two tables whose rows all have the same version, in the vector and in the state.
class Versions {
 public:
  static constexpr size_t kRows = 2500;
  explicit Versions(Clock* clock) : clock_(clock), keys_(Scattered(1, kRows)) {
    for (int i = 0; i < 2; ++i) {
      Kind kind = kPlain;
      kind.key_type = i == 0 ? KeyType::kInt64 : KeyType::kInt32;
      tables_.push_back(MakeSubject(kind, &serial_));
      EXPECT_TRUE(tables_[i]->AttachState(serial_, SpecOf(1)).ok());
    }
    Write(serial_, 2);
  }
  std::vector<Table*> tables() const { return {&tables_[0].table(), &tables_[1].table()}; }

  // Batches that give every row the next version, in one of four ways.
  void Write(Exec& exec, uint64_t how) {
    TableLock lock(tables(), TableLock::Mode::kExclusive);
    const uint64_t version = ++version_;
    const Tick first = clock_->Next(), tick = clock_->Next();
    history_[tick] = {version, first};
    const Floats vectors(kRows * kDim, static_cast<float>(version));
    const Floats ones(kRows * kDim, 1.0f);
    for (Subject& t : tables_) {
      const PackedKeys keys = t.Pack(keys_);
      switch (how % 4) {
        case 0: {
          RowIds rows(kRows);
          t->Find(exec, keys, first, rows.data());
          Hyper hyper;
          hyper.learning_rate = -1.0f;  // vectors grow by 1
          const RowOptimizer sgd(OptimizerKind::kSgd, {}, hyper, kDim);
          t->BeginBatch(exec, tick, kRows);
          exec.ParallelFor(kRows, 100, [&](size_t begin, size_t end) {
            t->ApplyRange(exec, sgd, keys, rows.data(), ones.data(), begin, end, tick, tick);
          });
          break;
        }
        case 1:
          EXPECT_TRUE(t->Accumulate(exec, keys, ones.data(), tick).ok());
          break;
        case 2:
          EXPECT_TRUE(t->Upsert(exec, keys, vectors.data(), tick).ok());
          break;
        case 3:
          EXPECT_EQ(
              t->Erase(exec, keys, first, version % 2 == 0 ? Removal::kWipe : Removal::kErase),
              kRows);
          EXPECT_TRUE(
              t->WriteRows(exec, keys, vectors.data(), vectors.data(), true, tick, tick).ok());
          break;
      }
    }
  }
  // The number of batches that have begun.
  uint64_t begun() const { return version_; }
  void Look(Exec& exec) {
    TableLock lock(tables(), TableLock::Mode::kShared);
    const Tick tick = clock_->Next();
    for (Subject& t : tables_) {
      RowIds rows(kRows);
      Floats vectors(kRows * kDim);
      t->Lookup(exec, t.Pack(keys_), tick, nullptr, vectors.data(), rows.data());
      for (float value : vectors) ASSERT_EQ(value, vectors[0]);
    }
  }
  // Checks the delivered rows. Call while no batch runs.
  void Check(const Snapshot& snapshot, const std::vector<Delivery>& delivered) const {
    const auto at = std::prev(history_.lower_bound(snapshot.watermark()));
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(delivered[i].size(), kRows);
      for (const auto& row : delivered[i]) {
        const auto* vector = reinterpret_cast<const float*>(row.second.held.vector.data());
        for (int64_t c = 0; c < kDim; ++c) {
          ASSERT_EQ(vector[c], static_cast<float>(at->second.version));
        }
        ASSERT_EQ(row.second.held.update, at->first);
        ASSERT_LE(row.second.access, snapshot.watermark());
        ASSERT_GE(row.second.access, at->second.first);
      }
    }
  }

 private:
  struct Batch {
    uint64_t version;
    Tick first;
  };
  Clock* const clock_;
  SerialExec serial_;
  const Keys keys_;
  std::vector<Subject> tables_;
  std::atomic<uint64_t> version_{0};
  std::map<Tick, Batch> history_;  // protected by the tables' locks
};

struct Load {
  size_t threads;  // of each exec
  size_t trainers;
  size_t most_saved;  // bytes
  size_t limit;
  int rounds;  // every fourth is abandoned
};

class SnapshotThreads : public ::testing::TestWithParam<Load> {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
};

TEST_P(SnapshotThreads, EveryRowHasTheVersionOfTheWatermark) {
  const Watchdog watchdog;
  Clock clock;
  Versions versions(&clock);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < GetParam().trainers; ++id) {
    threads.emplace_back([&, id] {
      SmallRanges exec(GetParam().threads);
      for (uint64_t i = id; !stop; ++i) {
        versions.Write(exec, i);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  threads.emplace_back([&] {
    SmallRanges exec(GetParam().threads);
    while (!stop) {
      versions.Look(exec);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  SmallRanges exec(GetParam().threads);
  for (int round = 0; round < std::max(1, GetParam().rounds / static_cast<int>(kFewer)); ++round) {
    std::unique_ptr<Snapshot> snapshot;
    const Status status = Snapshot::Begin(exec, versions.tables(), {0, 0}, CutOf::kRows, &clock,
                                          &snapshot, GetParam().most_saved);
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<Delivery> got(2);
    const uint64_t begun = versions.begun();
    bool more = true;
    for (int blocks = 0; more; ++blocks) {
      more = ReadBlock(snapshot.get(), exec, GetParam().limit, &got);
      if (round % 4 == 3 && blocks == 2) break;  // abandoned
      if (blocks != round % 4) continue;
      // From here on rows are saved and read in turns. The wait is limited, because the batch may
      // already have begun, and may be waiting for the reader.
      for (int i = 0; i < 50 && versions.begun() == begun; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
    if (more) continue;
    TableLock lock(versions.tables(), TableLock::Mode::kShared);
    versions.Check(*snapshot, got);
    if (HasFatalFailure()) break;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  for (Table* table : versions.tables()) table->CheckInvariants();
}

// With a bound of a few rows, each poll of the reader delivers no more than these.
INSTANTIATE_TEST_SUITE_P(Loads, SnapshotThreads,
                         ::testing::Values(Load{1, 1, size_t{64} << 20, 500, 40},
                                           Load{3, 1, size_t{64} << 20, 50, 40},
                                           Load{1, 1, 100, 100, 2}, Load{3, 1, 300, 100, 12},
                                           Load{3, 2, 20000, 100, 24}, Load{1, 2, 1, 500, 1}));

class SnapshotWaits : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
};

// A batch that runs while the reader waits for the lock saves the rows that it overwrites.
TEST_F(SnapshotWaits, BatchSavesRowsWhileTheReaderWaits) {
  const Watchdog watchdog;
  Clock clock;
  SerialExec serial;
  Subject t = MakeSubject(kPlain, &serial);
  const Keys keys = Progression(0, 50);
  const Floats vectors(keys.size() * kDim, 1.0f);
  t.Upsert(keys, vectors);
  clock.Advance(t.tick(), 0);
  for (int round = 0; round < 30; ++round) {
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(Snapshot::Begin(serial, {&t.table()}, {0}, CutOf::kRows, &clock, &snapshot).ok());
    std::vector<Delivery> got;
    std::thread reader;
    {
      TableLock lock({&t.table()}, TableLock::Mode::kExclusive);
      std::atomic<bool> started{false};
      reader = std::thread([&] {
        started = true;
        SerialExec own;
        got = ReadAll(snapshot.get(), own, 1);
      });
      while (!started) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::microseconds(100 + 50 * round));
      t.set_tick(clock.Next() - 1);
      t.Upsert(keys, vectors);
    }
    reader.join();
    ASSERT_EQ(got[0].size(), keys.size());
  }
}

TEST_F(SnapshotWaits, DestroyedWhileABatchWaits) {
  const Watchdog watchdog;
  for (size_t num_threads : {1, 3}) {
    Clock clock;
    Versions versions(&clock);
    SerialExec serial;
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(
        Snapshot::Begin(serial, versions.tables(), {0, 0}, CutOf::kRows, &clock, &snapshot, 200)
            .ok());
    std::atomic<bool> done{false};
    std::thread trainer([&] {
      SmallRanges exec(num_threads);
      versions.Write(exec, 2);
      versions.Write(exec, 3);
      done = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(done);  // 200 bytes are a few rows
    snapshot.reset();
    trainer.join();
    for (Table* table : versions.tables()) EXPECT_EQ(table->cut(), nullptr);
    ASSERT_TRUE(
        Snapshot::Begin(serial, versions.tables(), {0, 0}, CutOf::kRows, &clock, &snapshot).ok());
    versions.Check(*snapshot, ReadAll(snapshot.get(), serial, 2));
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_SUITE_THREADS_H_
