// Descriptors and threads of tables in files, of which a process may have few.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/file/open_files.h"
#include "cc/table/exec.h"
#include "cc/table/table.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

size_t Count(const char* folder) {
  size_t n = 0;
  DIR* const opened = opendir(folder);
  while (readdir(opened) != nullptr) ++n;
  closedir(opened);
  return n - 2;
}

// Syncs take a while for each file, and nothing is lost here.
struct QuickDisk : FileSystem {
  int Fsync(int) override { return 0; }
  int SyncDirectory(const std::string&) override { return 0; }
};

class FileLimitsTest : public ::testing::Test {
 protected:
  FileLimitsTest() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few{256, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    options_.name = "t";
    files_.folder = folder_ / "files";
    files_.files = &disk_;
    files_.segment_bytes = kBlockBytes;
  }
  ~FileLimitsTest() override { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }

  QuickDisk disk_;
  testing_files::Folder folder_;
  TableOptions options_;
  FileOptions files_;
  rlimit before_;
};

TEST_F(FileLimitsTest, ManySegments) {
  const size_t n = kSanitized ? 3000 : 100000;
  options_.dim = 400;  // two rows in a unit
  files_.compact_in_background = false;
  std::unique_ptr<ColdRows> rows;
  ExpectOk(FileRows::Create(files_, options_, &rows));
  const RowLayout layout(8, DType::kFloat32, options_.dim, 0);
  std::vector<char> row(layout.stride);
  for (uint64_t first = 0; first < 2 * n; first += 1000) {
    ExpectOk(rows->Reserve(1000));
    for (uint64_t key = first; key < first + 1000; ++key) {
      memcpy(row.data() + layout.vector_offset, &key, sizeof(key));
      rows->Add(key, row.data(), {1, 1}, 8);
    }
    rows->Settle();
  }
  ExpectOk(rows->Reserve(0));
  EXPECT_EQ(rows->size(), 2 * n);
  EXPECT_LT(Count("/proc/self/fd"), 128u);
  // A batch of rows in thousands of segments, in several threads.
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<uint64_t> keys;
      for (uint64_t key = t; key < 2 * n; key += 2 * n / 4000) keys.push_back(key);
      size_t found = 0;
      const Status status =
          rows->Find(keys.data(), keys.size(), [&](size_t i, const ColdRow& cold) {
            found += memcmp(cold.content, &keys[i], sizeof(keys[i])) == 0;
          });
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(found, keys.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(Count("/proc/self/fd"), 128u);
  // All of them are linked by a flush, and opened by a restart.
  const std::string flush = folder_ / "flush";
  ASSERT_EQ(disk_.MakeDirectory(flush), 0);
  ExpectOk(rows->Flush(flush, "", [](const ColdRows::AddHotFn&) { return Status(); }));
  std::unique_ptr<ColdRows> restored;
  ExpectOk(FileRows::Create(files_, options_, &restored));
  std::vector<uint64_t> forgotten;
  ExpectOk(restored->Restore(flush, &forgotten));
  EXPECT_EQ(restored->size(), 2 * n);
  EXPECT_LT(Count("/proc/self/fd"), 128u);
}

TEST_F(FileLimitsTest, ManyTables) {
  const size_t n = kSanitized ? 300 : 5000;
  options_.dim = 4;
  files_.reader.kind = BlockReader::Options::Kind::kThreads;  // the kind that has threads
  files_.segment_bytes = 4 * kBlockBytes;
  SerialExec exec;
  std::vector<std::unique_ptr<Table>> tables;
  Tick tick = 0;
  const RowLayout layout(8, DType::kFloat32, options_.dim, 0);
  const auto look_up = [&](Table* table, uint64_t first) {
    std::vector<uint64_t> keys(64);
    for (size_t i = 0; i < 64; ++i) keys[i] = first + i;
    std::vector<RowId> found(64);
    ExpectOk(table->FindOrInsert(exec, {keys.data(), 64}, ++tick, found.data()));
  };
  for (size_t t = 0; t < n; ++t) {
    tables.emplace_back();
    ExpectOk(CreateFileTable(options_, files_, 100 * layout.stride, &tables.back()));
    if (t % 20 != 0) continue;  // most stay empty
    for (uint64_t first = 0; first < 1280; first += 64) {
      std::unique_lock<SharedMutex> lock(tables.back()->mutex());
      look_up(tables.back().get(), first);
    }
  }
  EXPECT_LT(Count("/proc/self/fd"), 128u);
  for (size_t t = 0; t < n; t += 20) {
    std::unique_lock<SharedMutex> lock(tables[t]->mutex());
    for (uint64_t first = 0; first < 640; first += 64) look_up(tables[t].get(), first);
    EXPECT_EQ(tables[t]->size(), 1280u);
  }
  EXPECT_LT(Count("/proc/self/fd"), 128u);
  EXPECT_LT(Count("/proc/self/task"), 80u);
  tables.clear();
  EXPECT_LT(Count("/proc/self/task"), 10u);
}

}  // namespace
}  // namespace dynemb
