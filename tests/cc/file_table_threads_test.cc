// Trainers, readers, snapshots and the background compaction of one file table, in host memory or
// on a device, at the same time, to find torn rows and, under the thread sanitizer, data races.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/table/clock.h"
#include "cc/table/exec.h"
#include "cc/table/snapshot.h"
#include "cc/table/table.h"
#include "tests/cc/device_file_kind.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

constexpr int64_t kDim = 4;
constexpr uint64_t kKeys = 3000;

// The parameter: whether the table is on a device.
class FileTableThreadsTest : public ::testing::TestWithParam<bool> {
 protected:
  FileTableThreadsTest() {
    options_.name = "shared";
    options_.dim = kDim;
    options_.initializer = {{InitKind::kConstant, 1.0f, 0.0f}};
    files_.folder = folder_ / "files";
    files_.segment_bytes = 4 * kBlockBytes;
    const RowLayout layout(8, DType::kFloat32, kDim, 0);
    const Status made =
        GetParam()
            ? testing_table::MakeDeviceFileTable(options_, files_, 150, 250, 0, &device_, &table_)
            : CreateFileTable(options_, files_, 400 * layout.stride, &table_);
    EXPECT_TRUE(made.ok()) << made.message();
  }

  // Distinct keys, from small random numbers.
  static std::vector<uint64_t> Keys(uint64_t* seed, size_t n) {
    std::set<uint64_t> keys;
    for (size_t i = 0; i < n; ++i) {
      *seed = *seed * 6364136223846793005u + 1442695040888963407u;
      keys.insert((*seed >> 33) % kKeys);
    }
    return {keys.begin(), keys.end()};
  }

  // All elements of a written vector are equal, so that a torn row is visible.
  static void ExpectWhole(const std::vector<float>& vectors) {
    for (size_t i = 0; i < vectors.size(); ++i) {
      ASSERT_EQ(vectors[i], vectors[i / kDim * kDim]) << i;
    }
  }
  void ExpectNoError() {
    const Status status = table_->Error();
    EXPECT_TRUE(status.ok()) << status.message();
  }

  void Train(uint64_t seed) {
    const std::vector<uint64_t> keys = Keys(&seed, 150);
    const KeySpan span(keys.data(), keys.size());
    std::vector<RowId> rows(keys.size());
    std::vector<float> vectors(keys.size() * kDim);
    TableLock lock({table_.get()}, TableLock::Mode::kExclusive);
    const Tick tick = clock_.Next();
    const bool erases = seed >> 60 == 0;
    Status status;
    switch ((seed >> 50) % 3) {
      case 0:
        status = table_->LookupOrInsert(exec_, span, tick, vectors.data(), rows.data());
        ExpectWhole(vectors);
        break;
      case 1:
        for (size_t i = 0; i < vectors.size(); ++i) {
          vectors[i] = static_cast<float>(tick + i / kDim);
        }
        status = table_->Upsert(exec_, span, vectors.data(), tick);
        break;
      default:
        if (erases) table_->Erase(exec_, span, tick, Removal::kWipe);
    }
    EXPECT_TRUE(status.ok()) << status.message();
    ExpectNoError();
  }

  void Read(uint64_t seed) {
    const std::vector<uint64_t> keys = Keys(&seed, 100);
    const KeySpan span(keys.data(), keys.size());
    std::vector<float> vectors(keys.size() * kDim);
    std::unique_ptr<bool[]> found(new bool[keys.size()]);
    if ((seed >> 50) % 3 == 0) {
      std::vector<RowId> rows(keys.size());
      TableLock lock({table_.get()}, TableLock::Mode::kRead);
      table_->Lookup(exec_, span, clock_.Next(), nullptr, vectors.data(), rows.data());
      ExpectWhole(vectors);
      ExpectNoError();
      return;
    }
    TableLock lock({table_.get()}, TableLock::Mode::kShared);
    std::vector<float> state(keys.size());
    table_->ReadRows(exec_, span, vectors.data(), state.data(), found.get());
    ExpectWhole(vectors);
    table_->Contains(exec_, span, found.get());
    std::vector<int64_t> scores(keys.size());
    table_->Scores(exec_, span, scores.data());
    for (size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(found[i], scores[i] != -1);
    std::vector<TableBatches::KeyState> states(keys.size());
    table_->Explain(exec_, span, states.data());
    const ExportPlan plan = table_->SelectRows(exec_, 0, 200, RowPredicate());
    std::vector<float> exported(plan.rows.size() * kDim);
    table_->Export(exec_, plan, {nullptr, exported.data(), nullptr, nullptr, nullptr});
    ExpectWhole(exported);
    (void)table_->stats();
    ExpectNoError();
  }

  void ReadAhead(uint64_t seed) {
    const std::vector<uint64_t> keys = Keys(&seed, 150);
    table_->ReadAhead(exec_, {keys.data(), keys.size()});
  }

  void Save() {
    std::unique_ptr<Snapshot> snapshot;
    const Status begun =
        Snapshot::Begin(exec_, {table_.get()}, {0}, CutOf::kRows, &clock_, &snapshot);
    ASSERT_TRUE(begun.ok()) << begun.message();
    std::set<uint64_t> saved;
    const uint64_t most = snapshot->most_rows(0);
    for (;;) {
      Snapshot::Block block;
      const Status next = snapshot->Next(100, &block);
      ASSERT_TRUE(next.ok()) << next.message();
      if (block.n == 0) break;
      std::vector<uint64_t> keys(block.n);
      std::vector<float> vectors(block.n * kDim);
      std::vector<CutTime> updates(block.n), scores(block.n);
      const size_t n = block.n;
      const Status read = snapshot->Read(
          exec_, &block, {keys.data(), vectors.data(), nullptr, updates.data(), scores.data()});
      ASSERT_TRUE(read.ok()) << read.message();
      ExpectWhole(vectors);
      for (size_t i = 0; i < n; ++i) {
        EXPECT_TRUE(saved.insert(keys[i]).second) << keys[i] << " twice";
        EXPECT_LE(snapshot->base(0) + static_cast<Tick>(updates[i]), snapshot->watermark());
        EXPECT_TRUE(vectors[i * kDim] == 1.0f ||
                    vectors[i * kDim] < static_cast<float>(snapshot->watermark() + 150));
      }
    }
    EXPECT_EQ(saved.size(), most);
  }

  testing_files::Folder folder_;
  TableOptions options_;
  FileOptions files_;
  SerialExec exec_;
  Clock clock_;
  ThreadsDevice device_;
  std::unique_ptr<Table> table_;
};
INSTANTIATE_TEST_SUITE_P(Places, FileTableThreadsTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Device" : "Host");
});

TEST_P(FileTableThreadsTest, TrainReadAndSave) {
  const size_t rounds = kSanitized ? 60 : Longer(250);
  std::atomic<int> training{2};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < rounds; ++i) Train((i << 8 | t) * 0x9E3779B97F4A7C15u);
      --training;
    });
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; training != 0 && i < rounds; ++i) {
        Read((i << 8 | t) * 0xBF58476D1CE4E5B9u);
      }
    });
  }
  threads.emplace_back([&] {
    // Batches of Train, while they are trained on.
    for (uint64_t i = 0; training != 0; i = (i + 1) % rounds) {
      ReadAhead((i << 8 | 1) * 0x9E3779B97F4A7C15u);
    }
  });
  threads.emplace_back([&] {
    do {
      Save();
    } while (training != 0 && !HasFailure());
  });
  for (std::thread& thread : threads) thread.join();
  TableLock lock({table_.get()}, TableLock::Mode::kShared);  // the compaction still runs
  table_->CheckInvariants();
  EXPECT_GT(table_->stats().cold.rows_added, 0u);
  EXPECT_GT(table_->stats().cold.found_ahead, 0u);
}

// The sweep that brings rows up to date, while a thread compacts, and others read and save.
TEST_P(FileTableThreadsTest, SweepsAmongOtherThreads) {
  ASSERT_TRUE(table_->AttachState(exec_, {"sgd catch_up", {1}, {0.0f}}).ok());
  OptimizerFlags flags{};
  flags.catch_up = true;
  Hyper hyper;
  hyper.weight_decay = 1e-3f;
  uint64_t iteration = 0;
  // A step of the table in which no row has a gradient.
  const auto step = [&] {
    TableLock lock({table_.get()}, TableLock::Mode::kExclusive);
    const Tick tick = clock_.Next();
    hyper.learning_rate = ++iteration % 2 == 0 ? 0.01f : 0.02f;
    hyper.iteration = static_cast<float>(iteration);
    ASSERT_TRUE(table_->BeginStep(exec_, flags, hyper, tick).ok());
    table_->EndStep(exec_, hyper, iteration, tick);
  };
  for (uint64_t i = 0; i < 30; ++i) Train(i * 0x9E3779B97F4A7C15u);
  while (!table_->catch_up().NeedsSweep()) step();
  EXPECT_EQ(table_->catch_up().forgotten(), 0u);
  std::atomic<bool> training{true};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (uint64_t i = 0; table_->catch_up().NeedsSweep() && !HasFailure(); ++i) {
      step();
      Train(i * 0x9E3779B97F4A7C15u);
    }
    training = false;
  });
  threads.emplace_back([&] {
    for (uint64_t i = 0; training; ++i) Read(i * 0xBF58476D1CE4E5B9u);
  });
  threads.emplace_back([&] {
    do {
      Save();
    } while (training && !HasFailure());
  });
  for (std::thread& thread : threads) thread.join();
  TableLock lock({table_.get()}, TableLock::Mode::kShared);
  table_->CheckInvariants();
  EXPECT_GT(table_->catch_up().forgotten(), 0u);
  EXPECT_GT(table_->stats().cold.rows_added, 0u);
}

}  // namespace
}  // namespace dynemb
