// ProcessFolder: what is removed, and above all what is not.
#include "cc/file/process_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/faulty_file_system.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

const char kMarked[] = "tf_dynemb rows 0123456789abcdef0123456789abcdef\n";

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

class ProcessFolderTest : public ::testing::Test {
 protected:
  // A folder with a LOCK of this text, and a segment of a table.
  std::string Leave(const std::string& name, const std::string& marker) {
    const std::string path = folder_ / name;
    EXPECT_EQ(FileSystem::Posix().MakeDirectory(path + "/3"), 0);
    testing_files::Write(path + "/LOCK", marker);
    testing_files::Write(path + "/3/17.rows", "rows");
    return path;
  }
  bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }
  std::shared_ptr<ProcessFolder> Get(FileSystem* files = &FileSystem::Posix()) {
    std::shared_ptr<ProcessFolder> made;
    ExpectOk(ProcessFolder::Get(files, folder_.path(), &made));
    return made;
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    EXPECT_EQ(FileSystem::Posix().List(folder_.path(), &names), 0);
    return names;
  }

  testing_files::Folder folder_;
};

TEST_F(ProcessFolderTest, WhatACrashHasLeftIsRemoved) {
  const std::string dead = Leave("rows-1-0", kMarked);
  const auto made = Get();
  EXPECT_FALSE(Exists(dead));
  EXPECT_EQ(Names().size(), 1u);
}

TEST_F(ProcessFolderTest, WhatIsNotItsOwnStays) {
  const std::vector<std::string> others = {
      // Other names.
      Leave("rows-", kMarked), Leave("rows-1", kMarked), Leave("rows-1-", kMarked),
      Leave("rows-1-x", kMarked), Leave("rows-1-0-2", kMarked), Leave("rows-archive", kMarked),
      Leave("xrows-1-0", kMarked),
      // Locks of others: RocksDB's is empty.
      Leave("rows-2-0", ""), Leave("rows-2-1", "tf_dynemb rows "),
      Leave("rows-2-2", std::string(kMarked) + "x"), Leave("rows-2-3", std::string(49, 'x'))};
  const std::string without = folder_ / "rows-3-0";
  ASSERT_EQ(FileSystem::Posix().MakeDirectory(without + "/0"), 0);
  testing_files::Write(without + "/0/1.rows", "rows");
  Get().reset();
  for (const std::string& path : others) EXPECT_TRUE(Exists(path + "/3/17.rows")) << path;
  EXPECT_TRUE(Exists(without + "/0/1.rows"));
}

// Files that no table has made stay, and so do their folders and the marker.
TEST_F(ProcessFolderTest, OtherFilesInItStay) {
  const std::string dead = Leave("rows-1-0", kMarked);
  testing_files::Write(dead + "/notes.txt", "mine");
  testing_files::Write(dead + "/3/x.rows", "mine");
  Get().reset();
  EXPECT_TRUE(Exists(dead + "/notes.txt"));
  EXPECT_TRUE(Exists(dead + "/3/x.rows"));
  EXPECT_TRUE(Exists(dead + "/LOCK"));
  EXPECT_FALSE(Exists(dead + "/3/17.rows"));
}

TEST_F(ProcessFolderTest, FoldersOfLiveProcessesStay) {
  const std::string live = Leave("rows-1-0", kMarked);
  const int fd = open((live + "/LOCK").c_str(), O_RDWR);
  ASSERT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
  Get().reset();
  EXPECT_TRUE(Exists(live + "/3/17.rows"));
  close(fd);
  Get().reset();
  EXPECT_FALSE(Exists(live));
}

// A lock of a file that is not at its path anymore says nothing about the one that is.
TEST_F(ProcessFolderTest, ALockOfARemovedFileDoesNotCount) {
  struct Replacing : FileSystem {
    int Lock(int fd) override {
      if (before) std::exchange(before, nullptr)();
      return FileSystem::Lock(fd);
    }
    std::function<void()> before;
  } files;
  const std::string path = Leave("rows-1-0", kMarked);
  files.before = [&] {
    // Somebody removes the folder, and a new process makes one of this name, in this moment.
    unlink((path + "/LOCK").c_str());
    testing_files::Write(path + "/LOCK", kMarked);
  };
  const auto made = Get(&files);
  EXPECT_TRUE(Exists(path + "/3/17.rows"));
}

TEST_F(ProcessFolderTest, ATableOfTheSameNameIsNotTakenOver) {
  const std::string name = "rows-" + std::to_string(getpid()) + "-";
  for (int n = 0; n < 40; ++n) {
    const std::string path = folder_ / (name + std::to_string(n));
    ASSERT_EQ(FileSystem::Posix().MakeDirectory(path + "/0"), 0);
    testing_files::Write(path + "/0/1.rows", "mine");
  }
  auto made = Get();
  std::string table;
  ExpectOk(made->MakeTableFolder(&table));
  made->RemoveTableFolder(table);
  made.reset();
  for (int n = 0; n < 40; ++n) {
    EXPECT_TRUE(Exists(folder_ / (name + std::to_string(n) + "/0/1.rows")));
    EXPECT_FALSE(Exists(folder_ / (name + std::to_string(n) + "/LOCK")));
  }
}

TEST_F(ProcessFolderTest, TablesOfAProcessShareOne) {
  FaultyFileSystem files;
  std::vector<std::shared_ptr<ProcessFolder>> all;
  std::set<std::string> tables;
  for (int i = 0; i < 300; ++i) {
    all.push_back(Get(&files));
    std::string table;
    ExpectOk(all.back()->MakeTableFolder(&table));
    tables.insert(table);
  }
  EXPECT_EQ(tables.size(), 300u);
  EXPECT_EQ(Names().size(), 1u);
  // Neither descriptors nor the work for a table grow with their number.
  EXPECT_EQ(files.open_files(), 1);
  EXPECT_LE(files.calls(FaultyFileSystem::kOpen), 2);
  for (const std::string& table : tables) all[0]->RemoveTableFolder(table);
  all.clear();
  EXPECT_TRUE(Names().empty());
  EXPECT_EQ(files.open_files(), 0);
}

// Processes that begin and end below one folder never lose what they have.
TEST_F(ProcessFolderTest, ManyProcessesAtOnce) {
  constexpr int kProcesses = 6;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    if (child == 0) {
      bool right = true;
      for (int i = 0; i < 60 && right; ++i) {
        std::shared_ptr<ProcessFolder> made;
        std::string table;
        right = ProcessFolder::Get(&FileSystem::Posix(), folder_.path(), &made).ok() &&
                made->MakeTableFolder(&table).ok();
        if (!right) break;
        const std::string file = table + "/1.rows";
        const int fd = open(file.c_str(), O_CREAT | O_WRONLY, 0644);
        right = fd >= 0;
        close(fd);
        for (int k = 0; k < 5; ++k) {
          std::this_thread::yield();
          right &= access(file.c_str(), F_OK) == 0;
        }
        // As after a crash: nothing is removed.
        if (i == 59 && p % 2 == 0) _exit(right ? 0 : 1);
      }
      _exit(right ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  Get().reset();
  EXPECT_TRUE(Names().empty());
}

TEST_F(ProcessFolderTest, AChildOfForkRemovesNothing) {
  FaultyFileSystem files;
  auto made = Get(&files);
  std::string table;
  ExpectOk(made->MakeTableFolder(&table));
  testing_files::Write(table + "/1.rows", "rows");
  files.Fork();
  EXPECT_FALSE(made->is_owner());
  made->RemoveTableFolder(table);
  auto of_child = Get(&files);
  EXPECT_NE(of_child, made);
  EXPECT_EQ(Names().size(), 2u);
  made.reset();
  EXPECT_TRUE(Exists(table + "/1.rows"));
  of_child.reset();
  EXPECT_EQ(Names().size(), 1u);
}

// Each call fails: an error, or another folder; nothing is removed that should stay.
TEST_F(ProcessFolderTest, EachCallFails) {
  const std::string live = Leave("rows-1-0", kMarked);
  const int fd = open((live + "/LOCK").c_str(), O_RDWR);
  ASSERT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
  for (int call = 0; call < FaultyFileSystem::kCalls; ++call) {
    for (const int error : {EIO, EMFILE, ESTALE, EWOULDBLOCK}) {
      for (const int64_t n : {1, 2, 3}) {
        FaultyFileSystem files;
        files.Fail(static_cast<FaultyFileSystem::Call>(call), n, error, 1);
        std::shared_ptr<ProcessFolder> made;
        const Status status = ProcessFolder::Get(&files, folder_.path(), &made);
        EXPECT_EQ(status.ok(), made != nullptr);
        if (!status.ok()) {
          EXPECT_NE(status.message().find(folder_.path()), std::string::npos) << status.message();
        }
        made.reset();
        EXPECT_EQ(files.open_files(), 0) << call << " " << error << " " << n;
        ASSERT_TRUE(Exists(live + "/3/17.rows"));
      }
    }
  }
  close(fd);
}

}  // namespace
}  // namespace dynemb
