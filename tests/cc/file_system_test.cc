// The calls on files, their results and errors; whole transfers over partial ones; and the faults
// that other tests inject.
#include "cc/file/file_system.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/faulty_file_system.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

using testing_files::Folder;
using testing_files::Read;
using testing_files::Write;

FileSystem& posix = FileSystem::Posix();

// The contents of a file of n bytes.
std::string Pattern(size_t n) {
  std::string bytes(n, '\0');
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<char>(i * 131 + i / 251);
  return bytes;
}

void ExpectError(const Status& status, Code code, const std::string& message) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(status.message(), message);
}

TEST(FileSystem, TransfersAtOffsets) {
  const Folder folder;
  const int fd = posix.Open(folder / "a", O_RDWR | O_CREAT | O_EXCL, 0600);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(posix.Open(folder / "a", O_RDWR | O_CREAT | O_EXCL, 0600), -EEXIST);
  EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(posix.Size(fd), 0);
  EXPECT_EQ(posix.Pwrite(fd, "contents", 8, 4), 8);
  EXPECT_EQ(posix.Size(fd), 12);
  char bytes[8] = {};
  EXPECT_EQ(posix.Pread(fd, bytes, 8, 6), 6);
  EXPECT_STREQ(bytes, "ntents");
  EXPECT_EQ(posix.Pread(fd, bytes, 8, 12), 0);
  EXPECT_EQ(posix.Fsync(fd), 0);
  EXPECT_EQ(posix.Truncate(fd, 7), 0);
  EXPECT_EQ(posix.Size(fd), 7);
  EXPECT_EQ(posix.Close(fd), 0);
  EXPECT_EQ(Read(folder / "a"), std::string("\0\0\0\0con", 7));
  struct stat found;
  ASSERT_EQ(stat((folder / "a").c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
}

TEST(FileSystem, ErrorsOfDescriptors) {
  char byte = 0;
  EXPECT_EQ(posix.Close(-1), -EBADF);
  EXPECT_EQ(posix.Pread(-1, &byte, 1, 0), -EBADF);
  EXPECT_EQ(posix.Pwrite(-1, &byte, 1, 0), -EBADF);
  EXPECT_EQ(posix.Fsync(-1), -EBADF);
  EXPECT_EQ(posix.Truncate(-1, 0), -EBADF);
  EXPECT_EQ(posix.Size(-1), -EBADF);
}

TEST(FileSystem, Names) {
  const Folder folder;
  Write(folder / "a", "contents");
  EXPECT_EQ(posix.Rename(folder / "a", folder / "b"), 0);
  EXPECT_EQ(posix.Rename(folder / "a", folder / "b"), -ENOENT);
  EXPECT_EQ(posix.Link(folder / "b", folder / "c"), 0);
  EXPECT_EQ(posix.Link(folder / "b", folder / "c"), -EEXIST);
  EXPECT_EQ(posix.SyncDirectory(folder.path()), 0);
  EXPECT_EQ(posix.SyncDirectory(folder / "none"), -ENOENT);
  EXPECT_EQ(posix.SyncDirectory(folder / "b"), -ENOTDIR);
  std::vector<std::string> names;
  EXPECT_EQ(posix.List(folder.path(), &names), 0);
  EXPECT_EQ(names, (std::vector<std::string>{"b", "c"}));
  EXPECT_EQ(posix.Unlink(folder / "b"), 0);
  EXPECT_EQ(posix.Unlink(folder / "b"), -ENOENT);
  EXPECT_EQ(Read(folder / "c"), "contents");
  EXPECT_EQ(posix.List(folder / "b", &names), -ENOENT);
  EXPECT_EQ(names.size(), 2u);
  EXPECT_EQ(posix.Open(folder / "b", O_RDONLY, 0), -ENOENT);
}

TEST(FileSystem, ListIsSortedAndHasHiddenFiles) {
  const Folder folder;
  std::vector<std::string> names{".hidden", "0", "1", "10", "2"};
  for (const char* name : {"10", "2", ".hidden", "1", "0"}) Write(folder / name, "");
  std::vector<std::string> found{"old"};
  EXPECT_EQ(posix.List(folder.path(), &found), 0);
  EXPECT_EQ(found, names);
}

TEST(FileSystem, MakesParents) {
  const Folder folder;
  EXPECT_EQ(posix.MakeDirectory(folder / "a/b/c"), 0);
  EXPECT_EQ(posix.MakeDirectory(folder / "a/b/c"), 0);
  EXPECT_EQ(posix.MakeDirectory(folder / "a/b/d/"), 0);
  EXPECT_EQ(posix.MakeDirectory(folder / "a//e"), 0);
  std::vector<std::string> names;
  EXPECT_EQ(posix.List(folder / "a", &names), 0);
  EXPECT_EQ(names, (std::vector<std::string>{"b", "e"}));
  Write(folder / "file", "");
  EXPECT_EQ(posix.MakeDirectory(folder / "file"), -ENOTDIR);
  EXPECT_EQ(posix.MakeDirectory(folder / "file/a"), -ENOTDIR);
  EXPECT_EQ(posix.MakeDirectory(""), -ENOENT);
  ASSERT_EQ(symlink("a", (folder / "link").c_str()), 0);
  EXPECT_EQ(posix.MakeDirectory(folder / "link"), 0);
}

// A signal interrupts an open, which is repeated. A pipe without a writer takes the place of a slow
// file.
TEST(FileSystem, ContinuesAfterASignal) {
  const Folder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  struct sigaction action = {}, before;
  action.sa_handler = [](int) {};  // without SA_RESTART
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  const pthread_t opener = pthread_self();
  int writer = -1;
  std::thread other([&] {
    for (int i = 0; i < 5; ++i) {
      usleep(20000);
      pthread_kill(opener, SIGUSR1);
    }
    writer = open((folder / "pipe").c_str(), O_RDWR | O_CLOEXEC);  // which does not block
  });
  const int fd = posix.Open(folder / "pipe", O_RDONLY, 0);  // blocks until there is a writer
  other.join();
  EXPECT_GE(fd, 0);
  EXPECT_EQ(posix.Close(fd), 0);
  close(writer);
  sigaction(SIGUSR1, &before, nullptr);
}

TEST(FileSystem, LimitOfDescriptors) {
  const Folder folder;
  Write(folder / "a", "");
  struct rlimit before, few;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  few = before;
  few.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const int opened = posix.Open(folder / "a", O_RDONLY, 0);
  std::vector<std::string> names;
  const int listed = posix.List(folder.path(), &names);
  const int synced = posix.SyncDirectory(folder.path());
  const int made = posix.MakeDirectory(folder.path());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(opened, -EMFILE);
  EXPECT_EQ(listed, -EMFILE);
  EXPECT_EQ(synced, -EMFILE);
  EXPECT_EQ(made, -EMFILE);
}

TEST(FileError, NamesAndCodes) {
  ExpectError(FileError("a", ENOENT), Code::kDataLoss, "a: No such file or directory");
  ExpectError(FileError("a", EIO), Code::kDataLoss, "a: Input/output error");
  ExpectError(FileError("a", ENOSPC), Code::kResourceExhausted, "a: No space left on device");
  ExpectError(FileError("a", EMFILE), Code::kResourceExhausted, "a: Too many open files");
  ExpectError(FileError("a", EACCES), Code::kFailedPrecondition, "a: Permission denied");
  ExpectError(FileError("a", EBADF), Code::kInternal, "a: Bad file descriptor");
}

class TransferTest : public ::testing::Test {
 protected:
  TransferTest() : path_(folder_ / "a"), fd_(files_.Open(path_, O_RDWR | O_CREAT, 0600)) {}
  ~TransferTest() override {
    EXPECT_EQ(files_.Close(fd_), 0);
    EXPECT_EQ(files_.open_files(), 0);
  }
  Status WriteAt(const std::string& bytes, int64_t offset) {
    return WriteAll(files_, fd_, bytes.data(), bytes.size(), offset, path_);
  }

  const Folder folder_;
  FaultyFileSystem files_;
  const std::string path_;
  const int fd_;
  const std::string pattern_ = Pattern(10000);
};

TEST_F(TransferTest, ContinuesPartialTransfers) {
  for (size_t part : {1, 7, 4096, 9999}) {
    files_.Shorten(FaultyFileSystem::kPwrite, 1, part, FaultyFileSystem::kForever);
    files_.Shorten(FaultyFileSystem::kPread, 2, part, FaultyFileSystem::kForever);
    EXPECT_TRUE(WriteAt(pattern_, 0).ok());
    EXPECT_EQ(Read(path_), pattern_);
    std::string read(9000, '\0');
    EXPECT_TRUE(ReadAll(files_, fd_, read.data(), read.size(), 1000, path_).ok());
    EXPECT_EQ(read, pattern_.substr(1000));
    files_.Heal();
  }
  EXPECT_TRUE(WriteAll(files_, fd_, nullptr, 0, 0, path_).ok());
  EXPECT_TRUE(ReadAll(files_, fd_, nullptr, 0, 0, path_).ok());
}

TEST_F(TransferTest, NoSpaceAtEachWrite) {
  static constexpr size_t kPart = 1000;
  for (int64_t n = 1; n <= 10; ++n) {
    // The n-th Pwrite fails, and earlier calls transfer only a part.
    struct ShortWrites : FaultyFileSystem {
      int64_t Pwrite(int fd, const void* from, size_t n, int64_t offset) override {
        return FaultyFileSystem::Pwrite(fd, from, std::min(n, kPart), offset);
      }
    } files;
    files.Fail(FaultyFileSystem::kPwrite, n, ENOSPC);
    const Status status = WriteAll(files, fd_, pattern_.data(), pattern_.size(), 0, path_);
    ExpectError(
        status, Code::kResourceExhausted,
        path_ + " at byte offset " + std::to_string((n - 1) * 1000) + ": No space left on device");
    EXPECT_EQ(files.calls(FaultyFileSystem::kPwrite), n);
    EXPECT_EQ(Read(path_), pattern_.substr(0, static_cast<size_t>(n - 1) * kPart));
    EXPECT_TRUE(WriteAll(files, fd_, pattern_.data(), pattern_.size(), 0, path_).ok());
    EXPECT_EQ(posix.Truncate(fd_, 0), 0);
  }
}

TEST_F(TransferTest, Errors) {
  ASSERT_TRUE(WriteAt(pattern_, 0).ok());
  std::string read(8192, '\0');
  files_.Fail(FaultyFileSystem::kPread, 1, EIO);
  ExpectError(ReadAll(files_, fd_, read.data(), read.size(), 5, path_), Code::kDataLoss,
              path_ + " at byte offset 5: Input/output error");
  ExpectError(ReadAll(files_, fd_, read.data(), read.size(), 4096, path_), Code::kDataLoss,
              path_ + " ends at byte offset 10000, where 2288 more bytes are expected");
  files_.Shorten(FaultyFileSystem::kPwrite, 1, 0);
  ExpectError(WriteAt(pattern_, 3), Code::kDataLoss,
              path_ + " at byte offset 3: Input/output error");
}

TEST(FaultyFileSystem, EachCallFailsWithoutEffect) {
  using Files = FaultyFileSystem;
  const Folder folder;
  Files files;
  Write(folder / "a", "contents");
  const int fd = files.Open(folder / "a", O_RDWR, 0);
  ASSERT_GE(fd, 0);
  for (int call = 0; call < Files::kCalls; ++call) {
    if (call != Files::kClose) files.Fail(static_cast<Files::Call>(call), 1, EIO);
  }
  char bytes[8];
  std::vector<std::string> names;
  EXPECT_EQ(files.Open(folder / "b", O_WRONLY | O_CREAT, 0600), -EIO);
  EXPECT_EQ(files.Pread(fd, bytes, 8, 0), -EIO);
  EXPECT_EQ(files.Pwrite(fd, "CONTENTS", 8, 0), -EIO);
  EXPECT_EQ(files.Fsync(fd), -EIO);
  EXPECT_EQ(files.SyncDirectory(folder.path()), -EIO);
  EXPECT_EQ(files.Rename(folder / "a", folder / "b"), -EIO);
  EXPECT_EQ(files.Unlink(folder / "a"), -EIO);
  EXPECT_EQ(files.Link(folder / "a", folder / "b"), -EIO);
  EXPECT_EQ(files.MakeDirectory(folder / "b"), -EIO);
  EXPECT_EQ(files.Truncate(fd, 0), -EIO);
  EXPECT_EQ(files.Size(fd), -EIO);
  EXPECT_EQ(files.List(folder.path(), &names), -EIO);
  EXPECT_EQ(files.changes(), 10);
  EXPECT_EQ(files.List(folder.path(), &names), 0);
  EXPECT_EQ(names, std::vector<std::string>{"a"});
  EXPECT_EQ(Read(folder / "a"), "contents");
  EXPECT_EQ(files.open_files(), 1);
  files.Fail(Files::kClose, 1, EIO);
  EXPECT_EQ(files.Close(fd), -EIO);
  EXPECT_EQ(files.open_files(), 0);
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(FaultyFileSystem, ACrashTearsAWriteAndEndsAll) {
  using Files = FaultyFileSystem;
  const Folder folder;
  Files files;
  const int fd = files.Open(folder / "a", O_RDWR | O_CREAT, 0600);
  files.Crash(2, 3);
  EXPECT_EQ(files.Pwrite(fd, "contents", 8, 0), 8);
  char bytes[8];
  EXPECT_EQ(files.Pread(fd, bytes, 8, 0), 8);
  EXPECT_EQ(files.Pwrite(fd, "CONTENTS", 8, 0), -EIO);
  EXPECT_EQ(files.Pread(fd, bytes, 8, 0), -EIO);
  EXPECT_EQ(files.Rename(folder / "a", folder / "b"), -EIO);
  EXPECT_EQ(files.Close(fd), 0);
  EXPECT_EQ(Read(folder / "a"), "CONtents");
  files.Heal();
  EXPECT_EQ(files.Rename(folder / "a", folder / "b"), 0);
}

TEST(FaultyFileSystem, ExactlyOneOfManyThreadsFails) {
  const Folder folder;
  Write(folder / "a", "contents");
  FaultyFileSystem files;
  const int fd = files.Open(folder / "a", O_RDONLY, 0);
  files.Fail(FaultyFileSystem::kSize, 150, EIO);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) failed += files.Size(fd) == -EIO;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(files.calls(FaultyFileSystem::kSize), 400);
  EXPECT_EQ(files.Close(fd), 0);
}

}  // namespace
}  // namespace dynemb
