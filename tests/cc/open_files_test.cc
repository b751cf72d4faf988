// OpenFiles: the budget of descriptors, who waits for it, and what closes files.
#include "cc/file/open_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/file/block_file.h"
#include "cc/file/block_reader.h"
#include "tests/cc/faulty_file_system.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

// Sets the limit of descriptors until it is destroyed.
class Limit {
 public:
  explicit Limit(rlim_t n) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit less{n, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &less), 0);
  }
  ~Limit() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_;
};

class OpenFilesTest : public ::testing::Test {
 protected:
  ~OpenFilesTest() override {
    all_.clear();
    EXPECT_EQ(OpenFiles::open(), 0u);
    EXPECT_EQ(files_.open_files(), 0);
  }
  // Files of which the block says the number.
  void Make(size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const std::string path = folder_ / std::to_string(i);
      testing_files::Write(path, std::string(kBlockBytes, static_cast<char>(i)));
      all_.push_back(std::make_unique<ReadFile>(&files_, path));
    }
  }
  static bool IsOf(const ReadFile::Use& use, size_t i) {
    AlignedBuffer block(kBlockBytes);
    return pread(use.fd(), block.data(), kBlockBytes, 0) == static_cast<ssize_t>(kBlockBytes) &&
           block.data()[7] == static_cast<char>(i);
  }

  testing_files::Folder folder_;
  FaultyFileSystem files_;
  std::vector<std::unique_ptr<ReadFile>> all_;
};

TEST_F(OpenFilesTest, StaysWithinTheBudget) {
  const Limit limit(100);
  ASSERT_EQ(OpenFiles::budget(), 25u);
  Make(200);
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const size_t i = random() % all_.size();
    ReadFile::Use use;
    ASSERT_TRUE(all_[i]->Open(ReadFile::Wait::kYes, &use).ok());
    ASSERT_TRUE(IsOf(use, i));
    ASSERT_LE(OpenFiles::open(), 25u);
    ASSERT_LE(files_.open_files(), 25);
  }
  EXPECT_EQ(OpenFiles::open(), 25u);
}

TEST_F(OpenFilesTest, TheLeastRecentlyUsedIsClosed) {
  const Limit limit(40);
  ASSERT_EQ(OpenFiles::budget(), 10u);
  Make(11);
  const auto opens = [&](size_t i) {
    const int64_t before = files_.calls(FaultyFileSystem::kOpen);
    ReadFile::Use use;
    EXPECT_TRUE(all_[i]->Open(ReadFile::Wait::kYes, &use).ok());
    return files_.calls(FaultyFileSystem::kOpen) != before;
  };
  for (size_t i = 0; i < 10; ++i) EXPECT_TRUE(opens(i));
  EXPECT_FALSE(opens(0));
  EXPECT_TRUE(opens(10));  // instead of 1
  EXPECT_FALSE(opens(0));
  EXPECT_TRUE(opens(1));  // instead of 2
  EXPECT_FALSE(opens(10));
  EXPECT_TRUE(opens(2));
}

TEST_F(OpenFilesTest, WhoUsesAFileDoesNotWait) {
  const Limit limit(40);
  Make(12);
  std::vector<ReadFile::Use> uses(10);
  for (size_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(all_[i]->Open(ReadFile::Wait::kNo, &uses[i]).ok());
    ASSERT_TRUE(uses[i]);
  }
  ReadFile::Use more;
  ASSERT_TRUE(all_[10]->Open(ReadFile::Wait::kNo, &more).ok());
  EXPECT_FALSE(more);
  // A file that is used can be used again.
  ASSERT_TRUE(all_[3]->Open(ReadFile::Wait::kNo, &more).ok());
  EXPECT_TRUE(more);
  more.End();
  // Another thread waits.
  std::atomic<bool> opened{false};
  std::thread waits([&] {
    ReadFile::Use use;
    EXPECT_TRUE(all_[11]->Open(ReadFile::Wait::kYes, &use).ok());
    EXPECT_TRUE(IsOf(use, 11));
    opened = true;
  });
  EXPECT_FALSE(opened);
  uses[5].End();
  waits.join();
  EXPECT_TRUE(opened);
}

// The system has no descriptor left before the budget is used up: others have them.
TEST_F(OpenFilesTest, ClosesFilesIfTheSystemRefuses) {
  Make(6);
  for (size_t i = 0; i < 5; ++i) {
    ReadFile::Use use;
    ASSERT_TRUE(all_[i]->Open(ReadFile::Wait::kYes, &use).ok());
  }
  ASSERT_EQ(OpenFiles::open(), 5u);
  files_.Fail(FaultyFileSystem::kOpen, 1, EMFILE, 2);
  ReadFile::Use use;
  ASSERT_TRUE(all_[5]->Open(ReadFile::Wait::kYes, &use).ok());
  EXPECT_EQ(OpenFiles::open(), 4u);
  // For other purposes, too; in the end, the error is the caller's.
  files_.Fail(FaultyFileSystem::kOpen, 1, EMFILE, 3);
  const int fd = OpenFiles::Open(files_, folder_ / "0", O_RDONLY, 0);
  ASSERT_GE(fd, 0);
  files_.Close(fd);
  EXPECT_EQ(OpenFiles::open(), 1u);
  files_.Fail(FaultyFileSystem::kOpen, 1, EMFILE, FaultyFileSystem::kForever);
  EXPECT_EQ(OpenFiles::Open(files_, folder_ / "0", O_RDONLY, 0), -EMFILE);
  use.End();
  ReadFile::Use other;
  EXPECT_EQ(all_[0]->Open(ReadFile::Wait::kYes, &other).code(), Code::kResourceExhausted);
  files_.Heal();
}

TEST_F(OpenFilesTest, ErrorsNameTheFile) {
  ReadFile missing(&files_, folder_ / "missing");
  ReadFile::Use use;
  const Status status = missing.Open(ReadFile::Wait::kYes, &use);
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_NE(status.message().find("missing"), std::string::npos);
  EXPECT_FALSE(use);
}

TEST_F(OpenFilesTest, ThePageCacheIsUsedFromTheNextOpeningOn) {
  Make(1);
  ReadFile::Use first;
  ASSERT_TRUE(all_[0]->Open(ReadFile::Wait::kYes, &first).ok());
  all_[0]->UsePageCache();
  ASSERT_TRUE(IsOf(first, 0));
  first.End();
  EXPECT_EQ(OpenFiles::open(), 0u);
  ReadFile::Use second;
  ASSERT_TRUE(all_[0]->Open(ReadFile::Wait::kYes, &second).ok());
  EXPECT_EQ(fcntl(second.fd(), F_GETFL) & O_DIRECT, 0);
}

TEST_F(OpenFilesTest, ManyThreads) {
  const Limit limit(64);
  Make(60);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937 random(t);
      for (int round = 0; round < 300; ++round) {
        // As a window of a batch: some files at once, the first of which may be waited for.
        std::vector<ReadFile::Use> uses;
        for (int k = 0; k < 6; ++k) {
          const size_t i = random() % all_.size();
          ReadFile::Use use;
          ASSERT_TRUE(
              all_[i]->Open(uses.empty() ? ReadFile::Wait::kYes : ReadFile::Wait::kNo, &use).ok());
          if (!use) break;
          ASSERT_TRUE(IsOf(use, i));
          uses.push_back(std::move(use));
        }
        ASSERT_FALSE(uses.empty());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(OpenFiles::open(), OpenFiles::budget());
}

// A child that begins while other threads open, use and wait for files can use its own copies.
TEST_F(OpenFilesTest, Fork) {
  const Limit limit(64);
  Make(40);
  std::atomic<bool> stops{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      while (!stops) {
        ReadFile::Use use;
        (void)all_[random() % 20]->Open(ReadFile::Wait::kYes, &use);
      }
    });
  }
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      bool right = true;
      for (size_t i = 20; i < 40; ++i) {
        ReadFile::Use use;
        right &= all_[i]->Open(ReadFile::Wait::kYes, &use).ok() && IsOf(use, i);
      }
      _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stops = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace dynemb
