// The contract suites of catch-up, for tables of which most rows are in files, in host memory and
// on a device, and sweeps over them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/device/device_lookups.h"
#include "cc/lookup/lookups.h"
#include "cc/table/cold_table.h"
#include "tests/cc/device_file_kind.h"
#include "tests/cc/file_table_kind.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kSmallFileTables[] = {
    FileTable(KeyType::kInt64, DType::kFloat32, 200),
    FileTable(KeyType::kInt32, DType::kBfloat16, 200),
    DeviceFileTable<ThreadsDevice>(70, 130, KeyType::kInt64, DType::kFloat32),
    DeviceFileTable<ThreadsDevice>(200, 0, KeyType::kInt32, DType::kBfloat16)};
INSTANTIATE_CATCH_UP_SUITES(SmallFile, kSmallFileTables);

// A sweep brings every row up to date before old steps are forgotten, wherever rows are when it
// comes by: among lookups that move rows, compactions, and tables that continue from a flush.
class FileCatchUpTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Places, FileCatchUpTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Device" : "Host");
});
TEST_P(FileCatchUpTest, SweepsReachRowsThatMove) {
  constexpr uint64_t kKeys = 3000, kBatch = 40;
  testing_files::Folder folder;
  TableOptions options;
  options.name = "t";
  options.dim = 1;
  options.initializer = {ColumnInit{InitKind::kConstant, 1.0f, 0.0f}};
  FileOptions files = TestFiles();
  files.folder = folder / "files";
  const bool on_device = GetParam();
  ThreadsDevice device;
  DeviceLookups<ThreadsDevice> device_lookups(&device);
  Lookups& lookups = on_device ? device_lookups : HostLookups();
  const auto make = [&] {
    std::unique_ptr<Table> table;
    const Status made = on_device
                            ? MakeDeviceFileTable(options, files, 100, 200, 1, &device, &table)
                            : MakeFileTable(options, files, 300, &table);
    EXPECT_TRUE(made.ok()) << made.message();
    return table;
  };
  std::unique_ptr<Table> table = make();
  SerialExec exec;
  Random random(4);
  const StateSpec spec{"sgd catch_up", {1}, {0.0f}};
  ASSERT_TRUE(table->AttachState(exec, spec).ok());
  Tick tick = 0;
  std::vector<RowId> rows(kBatch);
  const auto keys_from = [](uint64_t first) {
    std::vector<uint64_t> keys(kBatch);
    for (uint64_t i = 0; i < kBatch; ++i) keys[i] = (first + i) % kKeys;
    return keys;
  };
  const auto look_up = [&](uint64_t first) {
    const std::vector<uint64_t> keys = keys_from(first);
    std::vector<float> vectors(kBatch);
    const KeySpan span(keys.data(), kBatch);
    EXPECT_TRUE(table->LookupOrInsert(exec, span, ++tick, vectors.data(), rows.data()).ok());
    return vectors;
  };
  // Moves rows that are cold to memory, as they are.
  const auto find = [&](uint64_t first) {
    const std::vector<uint64_t> keys = keys_from(first);
    table->Find(exec, {keys.data(), kBatch}, ++tick, rows.data());
  };
  for (uint64_t key = 0; key < kKeys; key += kBatch) look_up(key);
  OptimizerStep step;
  step.flags.catch_up = true;
  step.state = spec.optimizer;
  step.inits = spec.inits;
  double expected = 1;
  int flushes = 0;
  for (uint64_t i = 1; i <= 80000; ++i) {
    step.iteration = i;
    step.hyper.learning_rate = i % 2 == 0 ? 0.01f : 0.02f;
    step.hyper.weight_decay = 1e-3f;
    expected *= 1 - static_cast<double>(step.hyper.learning_rate) * 1e-3;
    ApplyTask task;
    const uint64_t key = kKeys;  // a key that no other step uses
    const float gradient = 0;
    task.table = table.get();
    task.keys = &key;
    task.gradients = &gradient;
    task.n = 1;
    task.distinct = true;
    ASSERT_TRUE(lookups.Apply(exec, {task}, step, ++tick).ok());
    if (random.Below(200) == 0) {
      // Each row is used before a sweep, in one, after it, or never: from then on it has all steps.
      for (const float vector : look_up(random.Below(kKeys / 3))) {
        ASSERT_NEAR(vector, expected, 2e-3 * expected) << i;
      }
    }
    // Most moves are while a sweep runs: about 50 steps of 32,768.
    const bool sweeps = table->catch_up().NeedsSweep();
    if (random.Below(sweeps ? 2 : 50) == 0) find(random.Below(kKeys));
    if (sweeps) {
      ASSERT_TRUE(table->Promote(exec, ++tick).ok());
    }
    if (random.Below(sweeps ? 2 : 500) == 0) {
      ASSERT_TRUE(static_cast<ColdTable&>(*table).CompactFiles().ok());
    }
    if (i % 9000 == 0 || (sweeps && random.Below(40) == 0)) {
      const std::string flush = folder / ("flush-" + std::to_string(flushes++));
      ASSERT_EQ(FileSystem::Posix().MakeDirectory(flush), 0);
      ASSERT_TRUE(table->Flush(exec, flush, ++tick, 0).ok());
      table = make();
      FlushInfo info;
      const Status restored = table->Restore(exec, flush, &info);
      ASSERT_TRUE(restored.ok()) << restored.message();
      testing_files::RemoveAll(flush);
    }
  }
  EXPECT_GT(table->catch_up().forgotten(), 0u);
  EXPECT_GT(table->stats().cold.rows, kKeys / 2);
  for (uint64_t key = 0; key < kKeys; key += kBatch) {
    for (const float vector : look_up(key)) ASSERT_NEAR(vector, expected, 2e-3 * expected) << key;
  }
  table->CheckInvariants();
}

// Rows do not change places while a sweep is on its way: it would miss those that go back.
TEST(DeviceCatchUpTest, NoPromotionDuringASweep) {
  constexpr uint64_t kKeys = 1000;
  ThreadsDevice device;
  TableOptions options;
  options.name = "t";
  options.dim = 1;
  options.initializer = {ColumnInit{InitKind::kConstant, 1.0f, 0.0f}};
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = uint64_t{300} * 48;
  std::unique_ptr<Table> table;
  ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &table).ok());
  SerialExec exec;
  ASSERT_TRUE(table->AttachState(exec, {"sgd catch_up", {1}, {0.0f}}).ok());
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t i = 0; i < kKeys; ++i) keys[i] = i;
  std::vector<RowId> rows(kKeys);
  Tick tick = 1;
  ASSERT_TRUE(table->FindOrInsert(exec, {keys.data(), kKeys}, tick, rows.data()).ok());
  OptimizerFlags flags{};
  flags.catch_up = true;
  Hyper hyper;
  hyper.weight_decay = 1e-3f;
  double expected = 1;
  uint64_t i = 0;
  for (bool sweeps = false; i < 32000 || sweeps || table->catch_up().forgotten() == 0;) {
    ++i;
    hyper.learning_rate = i % 2 == 0 ? 0.01f : 0.02f;
    hyper.iteration = static_cast<float>(i);
    sweeps = table->catch_up().NeedsSweep();
    ASSERT_TRUE(table->BeginStep(exec, flags, hyper, ++tick).ok());
    table->EndStep(exec, hyper, i, tick);
    expected *= 1 - static_cast<double>(hyper.learning_rate) * 1e-3;
    for (int again = 0; sweeps && again < 2; ++again) {
      table->Find(exec, {keys.data() + 600, 400}, ++tick, rows.data());
    }
    if (sweeps) {
      ASSERT_TRUE(table->Promote(exec, ++tick).ok());
    }
  }
  std::vector<float> vectors(kKeys);
  ASSERT_TRUE(
      table->LookupOrInsert(exec, {keys.data(), kKeys}, ++tick, vectors.data(), rows.data()).ok());
  for (const float vector : vectors) ASSERT_NEAR(vector, expected, 2e-3 * expected);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
