// Block readers when something fails: each single read, the system's io_uring, descriptors, a fork.
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/block_files.h"
#include "tests/cc/faulty_file_system.h"

namespace dynemb {
namespace testing_blocks {
namespace {

using Kind = BlockReader::Options::Kind;

constexpr long kSetup = 425, kEnter = 426;  // the system calls of io_uring
constexpr int kForever = INT_MAX;

// The plan for completions of io_uring. `num_faults` of them, from number `first_fault` on, have
// another result: -errno, or the most bytes that it may return.
std::atomic<int> completions{0};
int first_fault = 0, num_faults = 0, fault = 0;

int Inject(const BlockRead&, int result) {
  const int n = ++completions;
  if (n < first_fault || n - first_fault >= num_faults) return result;
  return fault < 0 ? fault : std::min(fault, result);
}

class BlockReaderFaultsTest : public EachReader {
 protected:
  BlockReaderFaultsTest() : file_(folder_ / "a", 80 * kBlockBytes) {}

  // The n-th transfer of the next Read, and the times - 1 after it, give -errno or at most `bytes`
  // bytes.
  void Fail(int n, int error, int times = 1) { Plan(n, -error, times); }
  void Shorten(int n, int bytes, int times = 1) { Plan(n, bytes, times); }

  std::unique_ptr<BlockReader> MakeFaulty(unsigned depth) {
    BlockReader::Options options;
    options.depth = depth;
    options.files = &files_;
    options.inject = Inject;
    return Make(options);
  }

  const RandomFile file_;
  FaultyFileSystem files_;

 private:
  void Plan(int n, int result, int times) {
    files_.Heal();
    completions = 0;
    first_fault = n;
    num_faults = times;
    fault = result;
    if (GetParam() != Reader::kThreads) return;
    const int64_t calls = times == kForever ? FaultyFileSystem::kForever : times;
    if (result < 0) {
      files_.Fail(FaultyFileSystem::kPread, n, -result, calls);
    } else {
      files_.Shorten(FaultyFileSystem::kPread, n, static_cast<size_t>(result), calls);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Each, BlockReaderFaultsTest, AllReaders(), NameOf);

TEST_P(BlockReaderFaultsTest, AnErrorOfEachTransfer) {
  for (unsigned depth : {1, 4, 64}) {
    const auto reader = MakeFaulty(depth);
    for (int n = 1; n <= 20; ++n) {
      RandomReads random(file_, 20, n);
      Fail(n, EIO);
      ReadBlocks(reader.get(), random.reads.data(), 20);
      size_t failed = 0;
      for (const BlockRead& read : random.reads) failed += read.error == EIO;
      EXPECT_EQ(failed, 1u);
      EXPECT_EQ(random.NumWrong(), 1u);
    }
  }
}

TEST_P(BlockReaderFaultsTest, AnInterruptionOfEachTransferIsNoError) {
  const auto reader = MakeFaulty(4);
  for (int error : {EINTR, EAGAIN}) {
    for (int n = 1; n <= 20; ++n) {
      RandomReads random(file_, 20, n);
      Fail(n, error, 3);
      ReadBlocks(reader.get(), random.reads.data(), 20);
      EXPECT_EQ(random.NumWrong(), 0u) << error << " " << n;
    }
  }
}

TEST_P(BlockReaderFaultsTest, ASystemThatStaysBusy) {
  const auto reader = MakeFaulty(4);
  RandomReads random(file_, 20, 1);
  Fail(1, EAGAIN, kForever);
  ReadBlocks(reader.get(), random.reads.data(), 20);
  for (size_t i = 0; i < 20; ++i) {
    if (GetParam() == Reader::kThreads) {
      EXPECT_EQ(random.reads[i].error, EAGAIN);
    } else {
      EXPECT_TRUE(random.IsRight(i));  // read by the caller
    }
  }
  Fail(1, ENOMEM, kForever);
  RandomReads others(file_, 20, 2);
  ReadBlocks(reader.get(), others.reads.data(), 20);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(others.reads[i].error, GetParam() == Reader::kThreads ? ENOMEM : 0);
  }
}

TEST_P(BlockReaderFaultsTest, PartsAreContinued) {
  const auto reader = MakeFaulty(4);
  // Not direct, as parts end inside blocks.
  const int fd = FileSystem::Posix().Open(folder_ / "a", O_RDONLY, 0);
  for (int bytes : {512, 1000, 4096, 5000}) {
    RandomReads random(file_, 30, static_cast<uint64_t>(bytes));
    for (BlockRead& read : random.reads) read.fd = fd;
    Shorten(1, bytes, kForever);
    ReadBlocks(reader.get(), random.reads.data(), 30);
    EXPECT_EQ(random.NumWrong(), 0u) << bytes;
  }
  RandomReads random(file_, 30, 1);
  Shorten(5, 0);
  ReadBlocks(reader.get(), random.reads.data(), 30);
  EXPECT_EQ(random.NumWrong(), 1u);
  size_t ended = 0;
  for (const BlockRead& read : random.reads) ended += read.error == BlockRead::kShort;
  EXPECT_EQ(ended, 1u);
  EXPECT_EQ(FileSystem::Posix().Close(fd), 0);
}

// Some file systems refuse a direct read from inside a block at the end of a file, which must not
// hide that the file ends there.
TEST_P(BlockReaderFaultsTest, NothingIsReadAfterTheEnd) {
  const RandomFile file(folder_ / "b", 3 * kBlockBytes + 512);
  AlignedBuffer room(4 * kBlockBytes);
  for (size_t first : {1, 3}) {
    // Two, as a single one is not read by io_uring.
    BlockRead reads[2] = {
        {file.fd(), first * kBlockBytes, (4 - first) * kBlockBytes, room.data(), -2},
        {file.fd(), 0, 0, room.data(), -2}};
    Fail(2, EINVAL);
    ReadBlocks(MakeFaulty(4).get(), reads, 2);
    EXPECT_EQ(reads[0].error, BlockRead::kShort);
    EXPECT_EQ(reads[1].error, 0);
  }
}

// The result of `call` in a child of fork: its first wrong check, 0 if all are right.
template <class Call>
int InChild(const Call& call) {
  const pid_t child = fork();
  if (child == 0) _exit(call());
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -status;
}

bool GivesTheContents(BlockReader* reader, const RandomFile& file) {
  RandomReads random(file, 100, 1);
  ReadBlocks(reader, random.reads.data(), random.reads.size());
  return random.NumWrong() == 0;
}

size_t NumThreads() {
  std::vector<std::string> names;
  EXPECT_EQ(FileSystem::Posix().List("/proc/self/task", &names), 0);
  return names.size();
}

TEST_P(BlockReaderFaultsTest, AForkUsesAndDestroysItsCopy) {
  for (const bool used : {false, true}) {
    auto reader = Make();
    EXPECT_TRUE(!used || GivesTheContents(reader.get(), file_));
    EXPECT_EQ(InChild([&] {
                const size_t threads = NumThreads();
                if (!GivesTheContents(reader.get(), file_)) return 1;
                if (NumThreads() != threads) return 2;
                reader.reset();
                return 0;
              }),
              0);
    EXPECT_TRUE(GivesTheContents(reader.get(), file_));
    EXPECT_TRUE(GivesTheContents(reader.get(), file_));
  }
}

// Without descriptors for more rings, calls share those that there are.
TEST_P(BlockReaderFaultsTest, NoMoreDescriptors) {
  const auto reader = Make();
  struct rlimit before, few;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  few = before;
  few.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) wrong += !GivesTheContents(reader.get(), file_);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::unique_ptr<BlockReader> uring, automatic;
  const Status status = MakeReader(Reader::kUring, {}, &uring);
  const Status fallen_back = BlockReader::Create({}, &automatic);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(wrong, 0);
  ASSERT_TRUE(fallen_back.ok());
  EXPECT_STREQ(automatic->kind(), "threads");
  if (HasUring()) {
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(status.message(), "io_uring: io_uring_setup: Too many open files");
  }
}

// From now on, a system call of this thread fails with EPERM, as in many containers. False if the
// process may not have filters.
bool Forbid(long call) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof(code) / sizeof(code[0]), code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

constexpr int kNoFilters = 99;

class ForbiddenTest : public ::testing::TestWithParam<long> {
 protected:
  ForbiddenTest() : file_(folder_ / "a", 80 * kBlockBytes) {}
  const testing_files::Folder folder_;
  const RandomFile file_;
};
INSTANTIATE_TEST_SUITE_P(Uring, ForbiddenTest, ::testing::Values(kSetup, kEnter));

TEST_P(ForbiddenTest, AutoFallsBack) {
  const int wrong = InChild([&] {
    if (!Forbid(GetParam())) return kNoFilters;
    std::unique_ptr<BlockReader> reader;
    const Status status = MakeReader(Reader::kUring, {}, &reader);
    const std::string call = GetParam() == kSetup ? "io_uring_setup" : "io_uring_enter";
    // A system without io_uring may have another error.
    if (HasUring() || status.code() != Code::kFailedPrecondition) return 1;
    if (status.message() != "io_uring: " + call + ": Operation not permitted") return 2;
    if (!BlockReader::Create({}, &reader).ok()) return 3;
    if (reader->kind() != std::string("threads")) return 4;
    return GivesTheContents(reader.get(), file_) ? 0 : 5;
  });
  if (wrong == kNoFilters) GTEST_SKIP() << "this process may not have filters of system calls";
  if (!HasUring()) GTEST_SKIP() << "this system forbids io_uring without a filter";
  EXPECT_EQ(wrong, 0);
}

// A reader that has a ring when the calls become forbidden.
TEST_P(ForbiddenTest, LaterReadsAreOfTheCaller) {
  if (!HasUring()) GTEST_SKIP() << "this system forbids io_uring without a filter";
  const int wrong = InChild([&] {
    std::unique_ptr<BlockReader> reader;
    if (!MakeReader(Reader::kUring, {}, &reader).ok()) return 1;
    if (!GivesTheContents(reader.get(), file_)) return 2;
    if (!Forbid(GetParam())) return kNoFilters;
    for (int i = 0; i < 3; ++i) {
      if (!GivesTheContents(reader.get(), file_)) return 3;
    }
    reader.reset();
    return 0;
  });
  if (wrong == kNoFilters) GTEST_SKIP() << "this process may not have filters of system calls";
  EXPECT_EQ(wrong, 0);
}

// io_uring_enter becomes forbidden while reads are in flight: they end before Read returns.
TEST(Forbidden, InTheMiddleOfARead) {
  if (!HasUring()) GTEST_SKIP() << "this system forbids io_uring without a filter";
  const testing_files::Folder folder;
  const RandomFile file(folder / "a", 80 * kBlockBytes);
  for (const size_t n : {9, 10, 11, 12, 20, 100}) {
    const int wrong = InChild([&] {
      FaultyFileSystem files;  // counts
      BlockReader::Options options;
      options.depth = 8;
      options.files = &files;
      static bool permitted;
      permitted = true;
      completions = 0;
      options.inject = [](const BlockRead&, int result) {
        if (++completions == 1) permitted = Forbid(kEnter);
        return result;
      };
      std::unique_ptr<BlockReader> reader;
      if (!MakeReader(Reader::kUring, options, &reader).ok()) return 1;
      RandomReads random(file, n, n);
      ReadBlocks(reader.get(), random.reads.data(), n);
      if (!permitted) return kNoFilters;
      if (random.NumWrong() != 0) return 2;
      // None is left in the ring.
      const size_t ended = static_cast<size_t>(completions + files.calls(FaultyFileSystem::kPread));
      if (ended != n) return 3;
      return GivesTheContents(reader.get(), file) ? 0 : 4;
    });
    if (wrong == kNoFilters) GTEST_SKIP() << "this process may not have filters of system calls";
    EXPECT_EQ(wrong, 0) << n;
  }
}

// Threads wait for the only ring, which turns out to be useless.
TEST(Forbidden, WhileOthersWait) {
  if (!HasUring()) GTEST_SKIP() << "this system forbids io_uring without a filter";
  const testing_files::Folder folder;
  const RandomFile file(folder / "a", 80 * kBlockBytes);
  const int wrong = InChild([&] {
    std::unique_ptr<BlockReader> reader;
    if (!MakeReader(Reader::kUring, {}, &reader).ok()) return 1;
    const struct rlimit none = {0, 0};
    if (setrlimit(RLIMIT_NOFILE, &none) != 0) return 2;
    if (!Forbid(kEnter)) return kNoFilters;  // also of the threads that start later
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&] { failed += !GivesTheContents(reader.get(), file); });
    }
    for (std::thread& thread : threads) thread.join();
    return failed == 0 ? 0 : 3;
  });
  if (wrong == kNoFilters) GTEST_SKIP() << "this process may not have filters of system calls";
  EXPECT_EQ(wrong, 0);
}

// Limits of threads: the caller reads alone.
TEST(ThreadReader, NoThreads) {
  const testing_files::Folder folder;
  const RandomFile file(folder / "a", 80 * kBlockBytes);
  const int wrong = InChild([&] {
    if (!Forbid(SYS_clone) || !Forbid(SYS_clone3)) return kNoFilters;
    std::unique_ptr<BlockReader> reader;
    if (!MakeReader(Reader::kThreads, {}, &reader).ok()) return 1;
    if (!GivesTheContents(reader.get(), file)) return 2;
    return GivesTheContents(reader.get(), file) ? 0 : 3;
  });
  if (wrong == kNoFilters) GTEST_SKIP() << "this process may not have filters of system calls";
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace testing_blocks
}  // namespace dynemb
