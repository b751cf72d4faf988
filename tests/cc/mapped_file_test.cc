// Whole files, mapped or read: one shared mapping per file, errors that name the file.
#include "cc/io/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

using testing_files::Folder;
using testing_files::Read;
using testing_files::Write;
using Mapping = std::shared_ptr<const MappedFile>;

std::string Contents(const MappedFile& file) { return std::string(file.data(), file.size()); }

Mapping Shared(const std::string& path) {
  Mapping file;
  const Status status = MappedFile::OpenShared(path, &file);
  EXPECT_TRUE(status.ok()) << status.message();
  return file;
}

void ExpectError(const Status& status, Code code, const std::string& path) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(status.message().compare(0, path.size(), path), 0) << status.message();
}

// Whether the process has a mapping of a file with this path.
bool IsMapped(const std::string& path) {
  return Read("/proc/self/maps").find(path) != std::string::npos;
}

TEST(MappedFile, OneSharedMappingForEachFile) {
  const Folder folder;
  Write(folder / "a", "contents");
  Write(folder / "b", "contents");
  ASSERT_EQ(link((folder / "a").c_str(), (folder / "link").c_str()), 0);
  ASSERT_EQ(symlink("a", (folder / "symlink").c_str()), 0);
  const Mapping a = Shared(folder / "a");
  EXPECT_EQ(Contents(*a), "contents");
  EXPECT_EQ(Shared(folder / "a"), a);
  EXPECT_EQ(Shared(folder / "link"), a);
  EXPECT_EQ(Shared(folder / "symlink"), a);
  EXPECT_EQ(Shared(folder.path() + "/./a"), a);
  const Mapping b = Shared(folder / "b");
  EXPECT_NE(b, a);
  EXPECT_NE(b->data(), a->data());
}

TEST(MappedFile, TheLastUserUnmaps) {
  const Folder folder;
  Write(folder / "a", "contents");
  Mapping one = Shared(folder / "a"), other = Shared(folder / "a");
  one.reset();
  EXPECT_TRUE(IsMapped(folder / "a"));
  EXPECT_EQ(Contents(*other), "contents");
  other.reset();
  EXPECT_FALSE(IsMapped(folder / "a"));
  EXPECT_EQ(Contents(*Shared(folder / "a")), "contents");
}

// A file that was replaced or changed is another one; the old mapping stays readable.
TEST(MappedFile, AnotherFileOfTheSameName) {
  const Folder folder;
  Write(folder / "a", "first");
  const Mapping first = Shared(folder / "a");
  Write(folder / "next", "other");
  ASSERT_EQ(rename((folder / "next").c_str(), (folder / "a").c_str()), 0);
  const Mapping other = Shared(folder / "a");
  EXPECT_EQ(Contents(*first), "first");
  EXPECT_EQ(Contents(*other), "other");
  Write(folder / "a", "longer than before");
  EXPECT_EQ(Contents(*Shared(folder / "a")), "longer than before");
  ASSERT_EQ(unlink((folder / "a").c_str()), 0);
  EXPECT_EQ(Contents(*first), "first");
}

// Size and times alone do not make two files the same, and neither do names and sizes.
TEST(MappedFile, EachPartOfAnIdentityCounts) {
  const Folder folder;
  Write(folder / "a", "contents");
  Write(folder / "b", "CONTENTS");
  const struct timespec times[2] = {{1000, 5}, {1000, 5}};
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(utimensat(AT_FDCWD, (folder / name).c_str(), times, 0), 0);
  }
  const Mapping a = Shared(folder / "a");
  EXPECT_EQ(Contents(*a), "contents");
  EXPECT_EQ(Contents(*Shared(folder / "b")), "CONTENTS");
  for (const struct timespec time : {timespec{1000, 6}, timespec{1001, 5}}) {
    const struct timespec later[2] = {time, time};
    ASSERT_EQ(utimensat(AT_FDCWD, (folder / "a").c_str(), later, 0), 0);
    EXPECT_NE(Shared(folder / "a"), a);
  }
}

TEST(MappedFile, EmptyFiles) {
  const Folder folder;
  Write(folder / "a", "");
  EXPECT_EQ(Shared(folder / "a")->size(), 0u);
  MappedFile file;
  EXPECT_TRUE(file.Open(folder / "a", /*write=*/true, 0).ok());
  EXPECT_EQ(file.size(), 0u);
}

TEST(MappedFile, Errors) {
  const Folder folder;
  Write(folder / "a", "contents");
  Mapping shared;
  ExpectError(MappedFile::OpenShared(folder / "b", &shared), Code::kDataLoss, folder / "b");
  ExpectError(MappedFile::OpenShared(folder / "a/b", &shared), Code::kDataLoss, folder / "a/b");
  EXPECT_FALSE(MappedFile::OpenShared(folder.path(), &shared).ok());
  const std::string long_name = folder / std::string(300, 'x');
  ExpectError(MappedFile::OpenShared(long_name, &shared), Code::kResourceExhausted, long_name);
  for (const bool write : {false, true}) {
    MappedFile file;
    ExpectError(file.Open(folder / "b", write, 0), Code::kDataLoss, folder / "b");
    ExpectError(file.Open(folder / "a", write, 9), Code::kInvalidArgument, folder / "a");
    EXPECT_EQ(file.data(), nullptr);
    EXPECT_TRUE(file.Open(folder / "a", write, 8).ok());
    EXPECT_EQ(Contents(file), "contents");
  }
}

TEST(MappedFile, WritesReachTheFile) {
  const Folder folder;
  Write(folder / "a", "contents");
  {
    MappedFile file;
    ASSERT_TRUE(file.Open(folder / "a", /*write=*/true, 8).ok());
    std::memcpy(file.data(), "CON", 3);
  }
  EXPECT_EQ(Read(folder / "a"), "CONtents");
}

TEST(MappedFile, ThreadsOpenAndCloseTheSameFiles) {
  const Folder folder;
  for (const char* name : {"0", "1", "2"}) Write(folder / name, std::string("file ") + name);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&folder, &wrong, t] {
      for (int i = 0; i < 300; ++i) {
        const std::string name = std::to_string((i + t) % 3);
        Mapping one, other;
        wrong += !MappedFile::OpenShared(folder / name, &one).ok();
        wrong += !MappedFile::OpenShared(folder / name, &other).ok();
        wrong += one != other || Contents(*one) != "file " + name;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ReadFile, WholeFiles) {
  const Folder folder;
  for (size_t n : {0, 1, 65535, 65536, 65537, 200000}) {
    std::string written(n, '\0'), read = "old";
    for (size_t i = 0; i < n; ++i) written[i] = static_cast<char>(i * 31);
    Write(folder / "a", written);
    EXPECT_TRUE(ReadFile(folder / "a", n, &read).ok());
    EXPECT_EQ(read, written);
    if (n != 0) ExpectError(ReadFile(folder / "a", n - 1, &read), Code::kDataLoss, folder / "a");
  }
  std::string bytes;
  ExpectError(ReadFile(folder / "b", 9, &bytes), Code::kDataLoss, folder / "b");
  ExpectError(ReadFile(folder.path(), 9, &bytes), Code::kResourceExhausted, folder.path());
}

}  // namespace
}  // namespace dynemb
