// Flushes whose syncs fail, on a disk that then loses what was to be synced.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"
#include "tests/cc/cold_world.h"
#include "tests/cc/flush_fixture.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

// As Linux: what was written since the last sync that succeeded is lost if a sync fails, and the
// next sync of the file succeeds.
class LossyDisk : public FaultyFileSystem {
 public:
  int Open(const std::string& path, int flags, unsigned mode) override {
    const int fd = FaultyFileSystem::Open(path, flags, mode);
    if (fd >= 0) path_of_[fd] = path;
    return fd;
  }
  int64_t Pwrite(int fd, const void* from, size_t n, int64_t offset) override {
    const int64_t written = FaultyFileSystem::Pwrite(fd, from, n, offset);
    if (written > 0) dirty_[path_of_[fd]].push_back({offset, static_cast<size_t>(written)});
    return written;
  }
  int Fsync(int fd) override {
    auto& dirty = dirty_[path_of_[fd]];
    const int result = FaultyFileSystem::Fsync(fd);
    if (result < 0) {
      for (const auto& range : dirty) lost_.emplace_back(path_of_[fd], range);
    }
    dirty.clear();
    return result;
  }
  // Loses power: what a failed sync has dropped from the cache is not on the disk.
  void LosePower() {
    for (const auto& [path, range] : lost_) {
      const int fd = FileSystem::Open(path, O_WRONLY, 0);
      if (fd < 0) continue;  // removed since
      const std::string zeros(range.second, '\0');
      EXPECT_EQ(FileSystem::Pwrite(fd, zeros.data(), zeros.size(), range.first),
                static_cast<int64_t>(zeros.size()));
      FileSystem::Close(fd);
    }
    lost_.clear();
  }

 private:
  using Range = std::pair<int64_t, size_t>;
  std::map<int, std::string> path_of_;
  std::map<std::string, std::vector<Range>> dirty_;
  std::vector<std::pair<std::string, Range>> lost_;
};

// Each sync fails once, or from then on for a while. A flush that is tried again has all rows.
TEST_F(FileFlushTest, AFailedSyncIsNotTrusted) {
  for (const int64_t times : {1, 3}) {
    for (int64_t n = 1;; ++n) {
      SCOPED_TRACE(::testing::Message() << n << " " << times);
      LossyDisk disk;
      ColdWorld world(16, 4, 5);
      world.file_options.files = &disk;
      world.rows.reset();
      ExpectOk(FileRows::Create(world.file_options, world.options, &world.rows));
      ExpectOk(world.Add(world.NewRows(400, 1000)));
      disk.Fail(FaultyFileSystem::kFsync, n, EIO, times);
      const ModelRows hot = HotRows(&world, 200);
      bool failed = false;
      std::string folder;
      for (int tries = 0; tries < 20; ++tries) {
        folder = NewFolder(&world);
        if (Flush(&world, folder, hot).ok()) break;
        failed = true;
        testing_files::RemoveAll(folder);
      }
      disk.LosePower();
      ExpectRestores(&world, folder, Union(world.model, hot));
      world.rows.reset();  // before the disk
      if (!failed) {
        EXPECT_GT(n, 4);
        break;
      }
      ASSERT_FALSE(HasFailure());
    }
  }
}

// As long as syncs fail, so do flushes; nothing else does, and no row is lost.
TEST_F(FileFlushTest, SyncsThatAlwaysFail) {
  for (const auto call : {FaultyFileSystem::kFsync, FaultyFileSystem::kSyncDirectory}) {
    ColdWorld world(16, 4, 5);
    ExpectOk(world.Add(world.NewRows(400, 1000)));
    const std::string before = NewFolder(&world);
    ExpectOk(Flush(&world, before, {}));
    const ModelRows of_before = world.model;
    world.files.Fail(call, 1, EIO, FaultyFileSystem::kForever);
    for (size_t round = 0; round < Longer(8); ++round) {
      ExpectOk(world.Remove(world.SomeKeys(100, 1000)));
      ExpectOk(world.Add(world.NewRows(200, 1000)));
      ExpectOk(world.Compact());
      const std::string folder = NewFolder(&world);
      EXPECT_FALSE(Flush(&world, folder, HotRows(&world, 50)).ok());
      EXPECT_FALSE(world.rows->NoteForgotten(folder, {1}).ok());
      testing_files::RemoveAll(folder);
      world.ExpectEqual();
    }
    world.files.Heal();
    ExpectRestores(&world, before, of_before);
    const std::string after = NewFolder(&world);
    ExpectOk(Flush(&world, after, {}));
    ExpectRestores(&world, after, world.model);
  }
}

}  // namespace
}  // namespace dynemb
