// Rows in files that make up for missed steps (cc/table/catch_up.h), when the file system or the
// memory fails in the middle: after any failure, each row has each step once.
#include <gtest/gtest.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/table/cold_table.h"
#include "tests/cc/device_file_kind.h"
#include "tests/cc/failing_allocations.h"
#include "tests/cc/faulty_file_system.h"
#include "tests/cc/table_suite.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

constexpr int64_t kDim = 5;
constexpr uint64_t kRows = 1000, kBatch = 100;
const StateSpec kSgd{"sgd catch_up", {1}, {0.0f}};

// A table of equal rows, of which memory holds a fifth. Weight decay shrinks them.
struct World {
  explicit World(bool on_device) {
    TableOptions options;
    options.name = "t";
    options.dim = kDim;
    options.initializer = {ColumnInit{InitKind::kConstant, 1.0f, 0.0f}};
    FileOptions file_options;
    file_options.folder = folder / "files";
    file_options.segment_bytes = 4 * kBlockBytes;
    file_options.files = &files;
    file_options.reader.kind = BlockReader::Options::Kind::kThreads;
    file_options.reader.depth = 1;
    file_options.compact_in_background = false;
    const RowLayout layout(8, DType::kFloat32, kDim, 1);
    const Status made =
        on_device
            ? MakeDeviceFileTable(options, file_options, kRows / 10, kRows / 10, 1, &device, &table)
            : CreateFileTable(options, file_options, kRows / 5 * layout.stride, &table);
    EXPECT_TRUE(made.ok()) << made.message();
    EXPECT_TRUE(table->AttachState(exec, kSgd).ok());
    for (uint64_t first = 0; first < kRows; first += kBatch) EXPECT_TRUE(LookUp(first));
    flags.catch_up = true;
    hyper.weight_decay = 0.5f;
    hyper.learning_rate = 0.1f;
  }

  bool LookUp(uint64_t first) {
    std::vector<uint64_t> keys(kBatch);
    for (uint64_t i = 0; i < kBatch; ++i) keys[i] = (first + i) % kRows;
    std::vector<RowId> rows(kBatch);
    const Status status = table->FindOrInsert(exec, {keys.data(), kBatch}, ++tick, rows.data());
    return table->Error().ok() && status.ok();
  }
  // A step in which no row has a gradient.
  bool Step() {
    hyper.iteration = static_cast<float>(iteration + 1);
    if (!table->BeginStep(exec, flags, hyper, ++tick).ok()) return false;
    table->EndStep(exec, hyper, ++iteration, tick);
    expected *= 1 - static_cast<double>(hyper.learning_rate) * hyper.weight_decay;
    return true;
  }
  void ExpectEqual() {
    uint64_t rows = 0;
    for (int64_t cursor = 0; cursor >= 0;) {
      const ExportPlan plan =
          table->SelectRows(exec, static_cast<uint64_t>(cursor), 500, RowPredicate());
      std::vector<float> vectors(plan.rows.size() * kDim);
      table->Export(exec, plan, {nullptr, vectors.data(), nullptr, nullptr, nullptr});
      for (const float value : vectors) ASSERT_NEAR(value, expected, 1e-4);
      rows += plan.rows.size();
      cursor = plan.next_cursor;
    }
    EXPECT_EQ(rows, kRows);
    EXPECT_TRUE(table->Error().ok());
    table->CheckInvariants();
  }

  testing_files::Folder folder;
  FaultyFileSystem files;
  ThreadsDevice device;
  std::unique_ptr<Table> table;
  SerialExec exec;
  OptimizerFlags flags{};
  Hyper hyper;
  Tick tick = 5000;
  uint64_t iteration = 0;
  double expected = 1;
};

// The parameter: whether the table is on a device.
class FileCatchUpFaultsTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Places, FileCatchUpFaultsTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Device" : "Host");
});

// A hyperparameter changes, so that all rows are brought up to date, and the n-th call fails. Then
// the step is made again, or one with the hyperparameters of before.
TEST_P(FileCatchUpFaultsTest, ChangesOfHyperparameters) {
  int failed = 0;
  for (const auto call : {FaultyFileSystem::kPwrite, FaultyFileSystem::kPread}) {
    for (int n = 1; n < 20; ++n) {
      SCOPED_TRACE(::testing::Message() << call << " " << n);
      World w(GetParam());
      for (int i = 0; i < 5; ++i) ASSERT_TRUE(w.Step());
      w.hyper.weight_decay = 0.25f;
      w.files.Fail(call, n, EIO);
      const bool ok = w.Step();
      w.files.Heal();
      failed += !ok;
      w.ExpectEqual();
      if (!ok && n % 2 == 0) {
        w.hyper.weight_decay = 0.5f;
        ASSERT_TRUE(w.Step());
        ASSERT_TRUE(w.LookUp(300));
        w.ExpectEqual();
        w.hyper.weight_decay = 0.25f;
      }
      ASSERT_TRUE(w.Step());
      ASSERT_TRUE(w.LookUp(500));
      w.ExpectEqual();
      ASSERT_FALSE(::testing::Test::HasFailure());
    }
  }
  EXPECT_GT(failed, 2);
}

TEST_P(FileCatchUpFaultsTest, Sweeps) {
  int failed = 0;
  for (uint64_t seed = 1; seed < Longer(kSanitized ? 4 : 20); ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    World w(GetParam());
    w.hyper.weight_decay = 1e-4f;
    for (int i = 0; i < 33200; ++i) {
      w.hyper.learning_rate = i % 2 == 0 ? 0.1f : 0.2f;
      const bool sweeps = w.table->catch_up().NeedsSweep();
      const uint64_t event = sweeps ? random.Below(8) : 7;
      if (event == 0) w.files.Fail(FaultyFileSystem::kPread, 1, EIO, 2);
      if (event == 1) w.files.Fail(FaultyFileSystem::kPwrite, 1, EIO, 2);
      if (event == 2) (void)w.LookUp(random.Below(kRows));
      if (event == 3) (void)static_cast<ColdTable&>(*w.table).CompactFiles();
      if (event == 6) w.device.FailTake(random.Below(5));  // if the table is there
      bool ok = false;
      if (event == 4) {
        failing::WithAllocations(random.Below(8), [&] {
          try {
            ok = w.Step();
          } catch (const std::bad_alloc&) {
          }
        });
      } else {
        ok = w.Step();
      }
      w.files.Heal();
      w.device.FailTake(ThreadsDevice::kNever);
      failed += !ok;
      if (event == 5) w.ExpectEqual();
      ASSERT_FALSE(::testing::Test::HasFailure()) << i;
    }
    w.ExpectEqual();
    EXPECT_GT(w.table->catch_up().forgotten(), 0u);
  }
  EXPECT_GT(failed, 5);
}

// The record of steps of another table is loaded, for which all rows get other marks.
TEST_P(FileCatchUpFaultsTest, LoadedSteps) {
  Hyper hyper;
  hyper.weight_decay = 0.5f;
  hyper.learning_rate = 0.1f;
  CatchUp other(kSgd, kDim);
  int failed = 0;
  for (const Tick start : {Tick{100}, Tick{9000}}) {  // lesser and greater numbers than the table's
    other = CatchUp(kSgd, kDim);
    other.Start(start);
    other.Restart(hyper, false);
    other.NoteCut(start);
    for (uint64_t i = 1; i <= 10; ++i) {
      other.Reserve();
      other.Record(hyper, i, start + i);
    }
    for (const auto call : {FaultyFileSystem::kPwrite, FaultyFileSystem::kPread}) {
      for (int n = 1; n < 40; n += kSanitized ? 4 : 1) {
        SCOPED_TRACE(::testing::Message() << start << " " << call << " " << n);
        World w(GetParam());
        for (int i = 0; i < 10; ++i) ASSERT_TRUE(w.Step());
        w.files.Fail(call, n, EIO);
        const Status loaded = w.table->LoadSteps(w.exec, other.Save(start), ++w.tick);
        w.files.Heal();
        if (loaded.ok()) {
          w.expected *= std::pow(0.95, 10);
        } else {
          ++failed;
          w.ExpectEqual();
          ASSERT_TRUE(w.Step());
          ASSERT_TRUE(w.LookUp(300));
        }
        w.ExpectEqual();
        ASSERT_TRUE(w.Step());
        w.ExpectEqual();
        ASSERT_FALSE(::testing::Test::HasFailure());
      }
    }
  }
  EXPECT_GT(failed, kSanitized ? 2 : 10);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
