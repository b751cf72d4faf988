// How block files are opened: directly, or buffered where the file system refuses direct reads; and
// buffers for blocks.
#include "cc/file/block_file.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "cc/table/memory_limit.h"
#include "tests/cc/block_files.h"
#include "tests/cc/faulty_file_system.h"

namespace dynemb {
namespace testing_blocks {
namespace {

using testing_files::Folder;
using testing_files::Write;

bool IsDirect(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

// Opens a file, expects to find its contents, and returns whether it was opened directly.
bool OpenAndRead(FileSystem& files, const std::string& path, const std::string& contents) {
  bool direct = false;
  int fd = -1;
  const Status status = OpenForReading(files, path, &direct, &fd);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(IsDirect(fd), direct);
  AlignedBuffer room(contents.size());
  for (size_t at = 0; at + kBlockBytes <= contents.size(); at += kBlockBytes) {
    EXPECT_TRUE(
        ReadAll(files, fd, room.data() + at, kBlockBytes, static_cast<int64_t>(at), path).ok());
  }
  const size_t whole = contents.size() / kBlockBytes * kBlockBytes;
  EXPECT_EQ(std::string(room.data(), whole), contents.substr(0, whole));
  EXPECT_EQ(files.Close(fd), 0);
  return direct;
}

class OpenTest : public ::testing::Test {
 protected:
  OpenTest() : path_(folder_ / "a"), contents_(RandomBytes(3 * kBlockBytes, 1)) {
    Write(path_, contents_);
  }
  ~OpenTest() override { EXPECT_EQ(files_.open_files(), 0); }
  // Whether this folder's file system can read directly, as the system says.
  bool CanBeDirect() const {
    const int fd = open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    AlignedBuffer block(kBlockBytes);
    const bool can = fd >= 0 && pread(fd, block.data(), kBlockBytes, 0) == kBlockBytes;
    if (fd >= 0) close(fd);
    return can;
  }

  const Folder folder_;
  FaultyFileSystem files_;
  const std::string path_, contents_;
};

TEST_F(OpenTest, DirectWhereThatIsPossible) {
  EXPECT_EQ(OpenAndRead(files_, path_, contents_), CanBeDirect());
}

TEST_F(OpenTest, RefusedAtOpen) {
  for (int error : {EINVAL, EOPNOTSUPP}) {
    files_.Fail(FaultyFileSystem::kOpen, 1, error);
    EXPECT_FALSE(OpenAndRead(files_, path_, contents_));
  }
}

TEST_F(OpenTest, RefusedAtTheFirstRead) {
  for (int error : {EINVAL, EOPNOTSUPP}) {
    files_.Fail(FaultyFileSystem::kPread, 1, error);
    EXPECT_FALSE(OpenAndRead(files_, path_, contents_));
  }
}

// An error that is not about O_DIRECT is for the reads that meet it.
TEST_F(OpenTest, AFaultOfTheFirstBlock) {
  if (!CanBeDirect()) GTEST_SKIP() << "no direct reads in " << folder_.path();
  files_.Fail(FaultyFileSystem::kPread, 1, EIO);
  EXPECT_TRUE(OpenAndRead(files_, path_, contents_));
}

TEST_F(OpenTest, SmallFiles) {
  for (size_t n : {0, 1, 511, 512, 4095, 4097, 5000}) {
    const std::string contents = RandomBytes(n, n);
    Write(path_, contents);
    OpenAndRead(files_, path_, contents);
  }
}

TEST_F(OpenTest, Errors) {
  bool direct = false;
  int fd = -5;
  Status status = OpenForReading(files_, folder_ / "none", &direct, &fd);
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_EQ(status.message(), (folder_ / "none") + ": No such file or directory");
  files_.Fail(FaultyFileSystem::kOpen, 1, EMFILE);
  status = OpenForReading(files_, path_, &direct, &fd);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.message(), path_ + ": Too many open files");
  // Refused, and the second open fails.
  files_.Fail(FaultyFileSystem::kPread, 1, EINVAL);
  files_.Fail(FaultyFileSystem::kOpen, 2, EMFILE);
  EXPECT_EQ(OpenForReading(files_, path_, &direct, &fd).code(), Code::kResourceExhausted);
  EXPECT_EQ(fd, -5);
}

// The files of /proc cannot be read directly, on any kernel.
TEST_F(OpenTest, RefusedByARealFileSystem) {
  const int refused = open("/proc/version", O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (refused >= 0) close(refused);
  if (refused >= 0 || errno != EINVAL) GTEST_SKIP() << "no /proc that refuses direct reads";
  EXPECT_FALSE(OpenAndRead(files_, "/proc/version", ""));
}

// tmpfs refuses direct reads on kernels before 6.6, and takes them on later ones.
TEST_F(OpenTest, MemoryFileSystem) {
  char path[] = "/dev/shm/dynemb_XXXXXX";
  const int made = mkstemp(path);
  if (made < 0) GTEST_SKIP() << "no /dev/shm to write to";
  close(made);
  Write(path, contents_);
  const bool direct = OpenAndRead(files_, path, contents_);
  unlink(path);
  RecordProperty("direct", direct);
}

TEST(AlignedBuffer, AlignedAndKeepsContents) {
  const size_t before = ChargedMemory();
  {
    AlignedBuffer buffer;
    EXPECT_EQ(buffer.size(), 0u);
    std::string expected;
    for (size_t n : {1, 4096, 4097, 100000, 5, 0, 50000}) {
      const size_t capacity = buffer.capacity();
      buffer.Resize(n);
      EXPECT_EQ(buffer.size(), n);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kBlockBytes, 0u);
      EXPECT_EQ(buffer.capacity(),
                std::max(capacity, (n + kBlockBytes - 1) / kBlockBytes * kBlockBytes));
      EXPECT_EQ(ChargedMemory() - before, buffer.capacity());
      const size_t kept = std::min(n, expected.size());
      EXPECT_EQ(std::string(buffer.data(), kept), expected.substr(0, kept));
      expected = RandomBytes(n, n);
      std::memcpy(buffer.data(), expected.data(), n);
    }
    AlignedBuffer moved(std::move(buffer));
    EXPECT_EQ(std::string(moved.data(), moved.size()), expected);
    AlignedBuffer assigned(10);
    assigned = std::move(moved);
    EXPECT_EQ(std::string(assigned.data(), assigned.size()), expected);
    EXPECT_EQ(ChargedMemory() - before, assigned.capacity());
  }
  EXPECT_EQ(ChargedMemory(), before);
}

TEST(AlignedBuffer, NoMemoryLeavesItUnchanged) {
  const size_t before = ChargedMemory();
  AlignedBuffer buffer(10);
  std::memcpy(buffer.data(), "contents", 9);
  SetMemoryFault([](size_t) { return false; });
  EXPECT_THROW(buffer.Resize(2 * kBlockBytes), std::bad_alloc);
  SetMemoryFault(nullptr);
  EXPECT_THROW(buffer.Resize(std::numeric_limits<size_t>::max()), std::bad_alloc);
  EXPECT_THROW(buffer.Resize(std::numeric_limits<size_t>::max() / 4), std::bad_alloc);
  EXPECT_EQ(buffer.size(), 10u);
  EXPECT_STREQ(buffer.data(), "contents");
  EXPECT_EQ(ChargedMemory() - before, kBlockBytes);
}

}  // namespace
}  // namespace testing_blocks
}  // namespace dynemb
