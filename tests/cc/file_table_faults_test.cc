// Calls of a file table, in host memory or on a device, of which one allocation, or one call of the
// file system, fails: the contents of the table are the same as before the call. A table on a
// device may also report that it is inconsistent.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/table/exec.h"
#include "cc/table/table.h"
#include "tests/cc/device_file_kind.h"
#include "tests/cc/failing_allocations.h"
#include "tests/cc/faulty_file_system.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

constexpr int64_t kDim = 4;
constexpr uint64_t kHot = 200;

// The parameter: whether the table is on a device.
class FileTableFaultsTest : public ::testing::TestWithParam<bool> {
 protected:
  FileTableFaultsTest() {
    options_.name = "t";
    options_.dim = kDim;
    options_.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
    file_options_.folder = folder_ / "files";
    file_options_.segment_bytes = 4 * kBlockBytes;
    file_options_.files = &files_;
    file_options_.reader.kind = BlockReader::Options::Kind::kThreads;
    file_options_.reader.depth = 1;
    file_options_.compact_in_background = false;
    Make();
  }

  void Make() {
    const RowLayout layout(8, DType::kFloat32, kDim, kDim);
    const Status made =
        on_device() ? testing_table::MakeDeviceFileTable(options_, file_options_, kHot / 3,
                                                         kHot - kHot / 3, kDim, &device_, &table_)
                    : CreateFileTable(options_, file_options_, kHot * layout.stride, &table_);
    EXPECT_TRUE(made.ok()) << made.message();
    for (uint64_t first = 0; first < 1000; first += 100) {
      std::vector<uint64_t> keys = Keys(first, 100);
      std::vector<RowId> rows(keys.size());
      EXPECT_TRUE(
          table_->FindOrInsert(exec_, {keys.data(), keys.size()}, ++tick_, rows.data()).ok());
    }
  }

  static bool on_device() { return GetParam(); }
  // Whether the table is unchanged by the call that has failed. An inconsistent table says so in
  // every call, and is replaced.
  bool IsUnchanged(const std::map<uint64_t, std::vector<float>>& before) {
    if (!on_device()) return Contents() == before;
    const Status status = table_->Error();
    if (status.ok()) return Contents() == before;
    EXPECT_NE(status.message().find("inconsistent"), std::string::npos) << status.message();
    ++inconsistent_;
    Make();
    return true;
  }

  static std::vector<uint64_t> Keys(uint64_t first, size_t n, uint64_t step = 1) {
    std::vector<uint64_t> keys(n);
    for (size_t i = 0; i < n; ++i) keys[i] = first + i * step;
    return keys;
  }

  // The vectors by key.
  std::map<uint64_t, std::vector<float>> Contents() {
    std::map<uint64_t, std::vector<float>> contents;
    for (int64_t cursor = 0; cursor >= 0;) {
      const ExportPlan plan =
          table_->SelectRows(exec_, static_cast<uint64_t>(cursor), 500, RowPredicate());
      std::vector<uint64_t> keys(plan.rows.size());
      std::vector<float> vectors(plan.rows.size() * kDim);
      table_->Export(exec_, plan, {keys.data(), vectors.data(), nullptr, nullptr, nullptr});
      for (size_t i = 0; i < keys.size(); ++i) {
        const float* const vector = vectors.data() + i * kDim;
        EXPECT_TRUE(contents.insert({keys[i], {vector, vector + kDim}}).second) << keys[i];
      }
      cursor = plan.next_cursor;
    }
    const Status status = table_->Error();
    EXPECT_TRUE(status.ok()) << status.message();
    return contents;
  }

  // The calls, which all need rows that are cold. They return whether they succeeded.
  std::vector<std::pair<std::string, std::function<bool()>>> Calls() {
    std::vector<std::pair<std::string, std::function<bool()>>> calls;
    const auto add = [&](const char* name, auto call) { calls.emplace_back(name, call); };
    add("FindOrInsert",
        [this] { return table_->FindOrInsert(exec_, span(), tick_, rows_.data()).ok(); });
    add("Upsert", [this] { return table_->Upsert(exec_, span(), values_.data(), tick_).ok(); });
    add("Accumulate",
        [this] { return table_->Accumulate(exec_, span(), values_.data(), tick_).ok(); });
    add("WriteRows", [this] {
      return table_->WriteRows(exec_, span(), values_.data(), values_.data(), false, tick_, tick_)
          .ok();
    });
    add("Find", [this] {
      table_->Find(exec_, span(), tick_, rows_.data());
      return table_->Error().ok();
    });
    add("Erase", [this] {
      table_->Erase(exec_, span(), tick_);
      return table_->Error().ok();
    });
    add("ReadAhead", [this] {
      table_->ReadAhead(exec_, span());
      return true;
    });
    add("ResetState", [this] { return table_->ResetState(exec_, {"s", {kDim}, {0.5f}}).ok(); });
    return calls;
  }
  KeySpan span() const { return {keys_.data(), keys_.size()}; }

  void Prepare(int64_t n) {
    // A third of the keys is new.
    keys_ = Keys(static_cast<uint64_t>(n) * 37 % 900, 120, 3);
    for (size_t i = 0; i < keys_.size(); i += 3) keys_[i] += 5000 + static_cast<uint64_t>(n) * 1000;
    rows_.resize(keys_.size());
    values_.assign(keys_.size() * kDim, static_cast<float>(n));
    ++tick_;
  }

  testing_files::Folder folder_;
  FaultyFileSystem files_;
  ThreadsDevice device_;
  int inconsistent_ = 0;
  FileOptions file_options_;
  TableOptions options_;
  SerialExec exec_;
  Tick tick_ = 0;
  std::unique_ptr<Table> table_;
  std::vector<uint64_t> keys_;
  std::vector<RowId> rows_;
  std::vector<float> values_;
};

INSTANTIATE_TEST_SUITE_P(Places, FileTableFaultsTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "Device" : "Host");
});

TEST_P(FileTableFaultsTest, EachAllocationFails) {
  for (const auto& [name, call] : Calls()) {
    SCOPED_TRACE(name);
    int64_t failures = 0;
    for (int64_t n = 1; n < 400; n += kSanitized ? 7 : 1) {
      SCOPED_TRACE(n);
      Prepare(n);
      const auto before = Contents();
      bool failed = false, ok = false;
      try {
        failing::WithFailure(n, &failed, [&, &call = call] { ok = call(); });
      } catch (const std::bad_alloc&) {
        ok = false;
      }
      if (!ok) {
        ++failures;
        ASSERT_TRUE(IsUnchanged(before));
      }
      (void)table_->Error();
      table_->CheckInvariants();
      if (!failed) break;
    }
    EXPECT_EQ(failures == 0, name == "ReadAhead");  // which does without
  }
  EXPECT_EQ(inconsistent_, 0);
}

// Rows are forgotten, all of them or none, also if their files cannot be rewritten.
TEST_P(FileTableFaultsTest, ForgettingIsWhole) {
  int64_t refused = 0, not_rewritten = 0;
  for (int64_t n = 1; n < 400; n += kSanitized ? 7 : 1) {
    SCOPED_TRACE(n);
    Prepare(n);
    ASSERT_TRUE(table_->Upsert(exec_, span(), values_.data(), tick_).ok());
    for (uint64_t first = 1000000; first < 1000000 + 5 * kHot; first += 50) {
      const std::vector<uint64_t> others = Keys(first, 50);
      std::vector<RowId> rows(others.size());
      const KeySpan keys(others.data(), others.size());
      ASSERT_TRUE(table_->FindOrInsert(exec_, keys, ++tick_, rows.data()).ok());
    }
    auto expected = Contents();
    bool failed = false, thrown = false;
    size_t erased = 0;
    try {
      failing::WithFailure(n, &failed,
                           [&] { erased = table_->Erase(exec_, span(), tick_, Removal::kWipe); });
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    const bool ok = table_->Error().ok() && !thrown;
    if (!ok && Contents() == expected) {
      ++refused;
    } else {
      not_rewritten += !ok;
      for (const uint64_t key : keys_) expected.erase(key);
      ASSERT_TRUE(Contents() == expected);
      ASSERT_EQ(erased, keys_.size());
    }
    table_->CheckInvariants();
    if (!failed) break;
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(not_rewritten, 0);
}

// The memory of the device runs out.
TEST_P(FileTableFaultsTest, EachAllocationOnTheDeviceFails) {
  if (!on_device()) GTEST_SKIP() << "the table is in host memory";
  for (const auto& [name, call] : Calls()) {
    SCOPED_TRACE(name);
    int64_t failures = 0;
    for (int64_t n = 1; n < 400; n += kSanitized ? 7 : 1) {
      SCOPED_TRACE(n);
      Prepare(n);
      const auto before = Contents();
      device_.FailTake(static_cast<size_t>(n - 1));
      const bool ok = call();
      const bool failed = !device_.FailTake(ThreadsDevice::kNever);
      if (!ok) {
        ++failures;
        ASSERT_TRUE(IsUnchanged(before));
      }
      (void)table_->Error();
      table_->CheckInvariants();
      if (!failed) break;
    }
    EXPECT_EQ(failures == 0, name == "ReadAhead");
  }
  EXPECT_LE(inconsistent_, 2);  // sums of Erase and ResetState need workspace
}

TEST_P(FileTableFaultsTest, EachCallOfTheFileSystemFails) {
  const std::pair<FaultyFileSystem::Call, int> faults[] = {{FaultyFileSystem::kPread, EIO},
                                                           {FaultyFileSystem::kPwrite, ENOSPC},
                                                           {FaultyFileSystem::kOpen, EMFILE}};
  for (const auto& [name, call] : Calls()) {
    for (const auto& [kind, error] : faults) {
      for (int64_t n = 1; n < 6; ++n) {
        SCOPED_TRACE(name + " " + std::to_string(kind) + " " + std::to_string(n));
        Prepare(n);
        const auto before = Contents();
        files_.Fail(kind, n, error);
        const bool ok = call();
        files_.Heal();
        if (!ok) {
          ASSERT_TRUE(IsUnchanged(before));
        }
        (void)table_->Error();
        table_->CheckInvariants();
      }
    }
  }
  EXPECT_EQ(inconsistent_, 0);
}

// More keys than memory holds: refused, and nothing has changed.
TEST_P(FileTableFaultsTest, BatchesThatMemoryCannotHold) {
  for (const auto& [name, call] : Calls()) {
    if (name == "Erase" || name == "ReadAhead" || name == "ResetState") continue;
    SCOPED_TRACE(name);
    keys_ = Keys(0, 900);
    rows_.resize(keys_.size());
    values_.assign(keys_.size() * kDim, 9.0f);
    ++tick_;
    const auto before = Contents();
    EXPECT_FALSE(call());
    table_->CheckInvariants();
    EXPECT_TRUE(Contents() == before);
  }
}

}  // namespace
}  // namespace dynemb
