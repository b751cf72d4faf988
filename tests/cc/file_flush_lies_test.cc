// Flushes whose checksums are right and whose contents are not: Restore returns an error, or a
// table that satisfies its invariants. Under sanitizers, nothing reads or writes outside its
// memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/file/flush_manifest.h"
#include "cc/file/segment.h"
#include "cc/io/crc32c.h"
#include "cc/table/exec.h"
#include "cc/table/table.h"
#include "tests/cc/faulty_file_system.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

constexpr int64_t kDim = 4;

class FileFlushLiesTest : public ::testing::Test {
 protected:
  FileFlushLiesTest() {
    options_.name = "t";
    options_.dim = kDim;
    options_.ttl = 100000;
    files_.folder = folder_ / "files";
    files_.segment_bytes = 4 * kBlockBytes;
    files_.compact_in_background = false;
    flush_ = folder_ / "flush";
    auto table = Make();
    EXPECT_TRUE(table->AttachState(exec_, StateSpec{"adagrad", {kDim}, {0.5f}}).ok());
    std::vector<float> vectors(50 * kDim);
    for (uint64_t first = 0; first < 600; first += 50) {
      std::vector<uint64_t> keys(50);
      for (size_t i = 0; i < 50; ++i) {
        keys[i] = first + i;
        std::fill_n(vectors.begin() + static_cast<int64_t>(i) * kDim, kDim, float(first + i));
      }
      EXPECT_TRUE(table->Upsert(exec_, {keys.data(), 50}, vectors.data(), ++tick_).ok());
    }
    EXPECT_EQ(FileSystem::Posix().MakeDirectory(flush_), 0);
    EXPECT_TRUE(table->Flush(exec_, flush_, ++tick_, 0).ok());
    std::vector<std::string> names;
    FileSystem::Posix().List(flush_, &names);
    for (const std::string& name : names) good_[name] = testing_files::Read(flush_ + "/" + name);
  }

  std::unique_ptr<Table> Make() {
    std::unique_ptr<Table> table;
    const RowLayout layout(8, DType::kFloat32, kDim, kDim);
    const Status made = CreateFileTable(options_, files_, 100 * layout.stride, &table);
    EXPECT_TRUE(made.ok()) << made.message();
    return table;
  }

  // Files of the flush, changed or not. Others may have links to the old ones.
  void Write(const std::string& name, const std::string& bytes) {
    FileSystem::Posix().Unlink(flush_ + "/" + name);
    testing_files::Write(flush_ + "/" + name, bytes);
  }
  // The manifest with other bytes before its checksum.
  void WriteManifest(std::string bytes) {
    bytes.resize(bytes.size() - 4);
    const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
    bytes.append(reinterpret_cast<const char*>(&crc), 4);
    Write("manifest", bytes);
  }

  // Returns whether the flush could be restored. What is there can be used.
  bool Use() {
    auto table = Make();
    FlushInfo info;
    const Status status = table->Restore(exec_, flush_, &info);
    if (!status.ok()) return false;
    for (uint64_t first = 0; first < 600; first += 50) {
      std::vector<uint64_t> keys(50);
      for (size_t i = 0; i < 50; ++i) keys[i] = first + i;
      std::vector<float> vectors(50 * kDim);
      RowId found[50];
      table->Lookup(exec_, {keys.data(), 50}, ++tick_, nullptr, vectors.data(), found);
      (void)table->Error();
      (void)table->Erase(exec_, {keys.data(), 7}, ++tick_, Removal::kErase);
      (void)table->Error();
    }
    for (int64_t cursor = 0; cursor >= 0;) {
      const ExportPlan plan =
          table->SelectRows(exec_, static_cast<uint64_t>(cursor), 100, RowPredicate());
      std::vector<uint64_t> keys(plan.rows.size());
      std::vector<float> vectors(plan.rows.size() * kDim);
      table->Export(exec_, plan, {keys.data(), vectors.data(), nullptr, nullptr, nullptr});
      (void)table->Error();
      cursor = plan.next_cursor;
    }
    const std::string again = folder_ / "again";
    EXPECT_EQ(FileSystem::Posix().MakeDirectory(again), 0);
    (void)table->Flush(exec_, again, ++tick_, 0);
    testing_files::RemoveAll(again);
    return true;
  }

  std::mt19937_64 random_{1};
  testing_files::Folder folder_;
  TableOptions options_;
  FileOptions files_;
  std::string flush_;
  SerialExec exec_;
  Tick tick_ = 0;
  std::map<std::string, std::string> good_;
};

TEST_F(FileFlushLiesTest, TheFlushItselfIsRight) { EXPECT_TRUE(Use()); }

// Numbers of the manifest, each replaced by others that hurt.
TEST_F(FileFlushLiesTest, Numbers) {
  const std::string good = good_["manifest"];
  const uint64_t kNumbers[] = {0,
                               1,
                               2,
                               3,
                               255,
                               4096,
                               0x7FFFFFFF,
                               0x80000000,
                               0xFFFFFFFE,
                               0xFFFFFFFF,
                               uint64_t{1} << 40,
                               ~uint64_t{0} >> 1,
                               ~uint64_t{0}};
  size_t restored = 0, refused = 0;
  const size_t step = kSanitized ? 3 : 1;
  for (size_t at = 0; at + 8 < good.size() - 4; at += 4) {
    for (size_t n = at / 4 % step; n < std::size(kNumbers); n += step) {
      for (const size_t bytes : {4, 8}) {
        std::string lying = good;
        memcpy(lying.data() + at, &kNumbers[n], bytes);
        if (lying == good) continue;
        WriteManifest(lying);
        Use() ? ++restored : ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100u);
  EXPECT_GT(restored, 20u);
}

TEST_F(FileFlushLiesTest, AnyBytes) {
  const size_t trials = Longer(kSanitized ? 150 : 400);
  size_t refused = 0;
  for (size_t trial = 0; trial < trials; ++trial) {
    SCOPED_TRACE(trial);
    // Bytes of the manifest, or of the index or a unit, with the checksum that these then have.
    auto chosen = good_.begin();
    std::advance(chosen, random_() % good_.size());
    std::string name = trial % 3 == 0 ? "manifest" : trial % 3 == 1 ? "index" : chosen->first;
    std::string lying = good_[name];
    for (size_t k = random_() % 4 + 1; k != 0; --k) {
      const size_t at = random_() % lying.size();
      lying[at] = static_cast<char>(random_() % 3 == 0 ? 0xFF : random_());
    }
    if (name == "manifest") {
      WriteManifest(lying);
    } else if (name == "index") {
      Write(name, lying);
      FlushManifest manifest;
      ASSERT_TRUE(FlushManifest::Read(FileSystem::Posix(), flush_, &manifest).ok());
      manifest.index_crc = Crc32c(0, lying.data(), lying.size());
      ASSERT_TRUE(manifest.Write(FileSystem::Posix(), flush_).ok());
    } else {
      for (size_t unit = 0; unit < lying.size() / kBlockBytes; ++unit) {
        char* const bytes = lying.data() + unit * kBlockBytes;
        const uint32_t crc = Crc32c(0, bytes + 4, kBlockBytes - 4);
        memcpy(bytes, &crc, 4);
      }
      Write(name, lying);
    }
    refused += !Use();
    for (const auto& [file, bytes] : good_) Write(file, bytes);
  }
  EXPECT_GT(refused, 10u);
  EXPECT_TRUE(Use());
}

// The index has a row under the hash of another key: no search finds it, and it cannot move.
TEST_F(FileFlushLiesTest, ARowThatCannotMove) {
  std::string lying = good_["index"];
  lying[1] = static_cast<char>(lying[1] ^ 1);  // a bit of the first hash
  lying[4] = static_cast<char>(lying[4] ^ 1);
  Write("index", lying);
  FlushManifest manifest;
  ASSERT_TRUE(FlushManifest::Read(FileSystem::Posix(), flush_, &manifest).ok());
  manifest.index_crc = Crc32c(0, lying.data(), lying.size());
  ASSERT_TRUE(manifest.Write(FileSystem::Posix(), flush_).ok());
  auto table = Make();
  FlushInfo info;
  ASSERT_TRUE(table->Restore(exec_, flush_, &info).ok());
  std::vector<uint64_t> keys(600);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table->Erase(exec_, {keys.data(), keys.size()}, ++tick_, Removal::kWipe);
  EXPECT_EQ(table->Error().code(), Code::kDataLoss);
  EXPECT_EQ(table->size(), 1u);
  const std::string again = folder_ / "again";
  EXPECT_EQ(FileSystem::Posix().MakeDirectory(again), 0);
  EXPECT_EQ(table->Flush(exec_, again, ++tick_, 0).code(), Code::kDataLoss);
}

// No row in use is lost, so a file can be rewritten.
TEST_F(FileFlushLiesTest, DamageOfRowsThatAreNotInUse) {
  auto table = Make();
  FlushInfo info;
  ASSERT_TRUE(table->Restore(exec_, flush_, &info).ok());
  const auto keys_of_unit = [](const std::string& bytes, size_t unit) {
    const RowFormat format(2 * kDim * sizeof(float));
    UnitHeader header;
    memcpy(&header, bytes.data() + unit * format.unit_bytes, sizeof(header));
    std::vector<uint64_t> keys(header.rows);
    for (size_t row = 0; row < keys.size(); ++row) {
      memcpy(&keys[row],
             bytes.data() + unit * format.unit_bytes + sizeof(header) + row * format.row_bytes, 8);
    }
    return keys;
  };
  const auto file = std::find_if(good_.begin(), good_.end(), [](const auto& named) {
    return named.first.find(".rows") != std::string::npos && named.second.size() > kBlockBytes;
  });
  ASSERT_NE(file, good_.end());
  const std::vector<uint64_t> moved = keys_of_unit(file->second, 0);
  const std::vector<uint64_t> other = keys_of_unit(file->second, 1);
  std::vector<float> vectors(moved.size() * kDim);
  std::vector<RowId> found(moved.size());
  table->Lookup(exec_, {moved.data(), moved.size()}, ++tick_, nullptr, vectors.data(),
                found.data());
  ASSERT_TRUE(table->Error().ok());
  testing_files::Flip(flush_ + "/" + file->first, 100);  // the table has a link to it
  EXPECT_EQ(table->Erase(exec_, {other.data(), 1}, ++tick_, Removal::kWipe), 1u);
  EXPECT_TRUE(table->Error().ok());
  const std::string again = folder_ / "again";
  EXPECT_EQ(FileSystem::Posix().MakeDirectory(again), 0);
  EXPECT_TRUE(table->Flush(exec_, again, ++tick_, 0).ok());
}

// The manifest is there, and the call fails: a restart may find it.
TEST_F(FileFlushLiesTest, AFlushOfWhichTheLastSyncFails) {
  FaultyFileSystem faulty;
  files_.files = &faulty;
  auto table = Make();
  FlushInfo info;
  ASSERT_TRUE(table->Restore(exec_, flush_, &info).ok());
  const std::string failed = folder_ / "failed";
  EXPECT_EQ(FileSystem::Posix().MakeDirectory(failed), 0);
  faulty.Fail(FaultyFileSystem::kSyncDirectory, 2, EIO);
  ASSERT_FALSE(table->Flush(exec_, failed, ++tick_, 0).ok());
  const uint64_t key = 7;
  EXPECT_EQ(table->Erase(exec_, {&key, 1}, ++tick_, Removal::kWipe), 1u);
  EXPECT_TRUE(table->Error().ok());
  for (const std::string& folder : {flush_, failed}) {
    auto again = Make();
    ASSERT_TRUE(again->Restore(exec_, folder, &info).ok());
    EXPECT_EQ(again->size(), 599u);
  }
}

}  // namespace
}  // namespace dynemb
