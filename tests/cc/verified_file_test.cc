// Files that are verified as a whole or block by block: no damaged byte is ever readable.
#include "cc/serving/verified_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/io/manifest.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

using namespace testing_files;

constexpr size_t kBlock = 256;

// A base of 100 rows of 4 floats: their file has 128 + 1600 bytes, 6 blocks and three quarters.
class VerifiedFileTest : public ::testing::Test {
 protected:
  VerifiedFileTest() {
    Snapshot snapshot;
    snapshot.block_bytes = kBlock;
    TestTable table = RowsOf("user", 4, {});
    for (uint64_t key = 0; key < 100; ++key) {
      table.shards[0].rows[key] = 100.0f * static_cast<float>(key);
    }
    snapshot.tables.push_back(table);
    const std::string directory = snapshot.Publish(folder_.path());
    EXPECT_TRUE(ReadManifest(directory, &manifest_).ok());
    path_ = directory + "/" + column().file;
    sound_ = Read(path_);
    EXPECT_EQ(sound_.size(), 1728u);
  }
  const ColumnEntry& column() const { return manifest_.tables[0].shards[0].columns.at("vectors"); }
  Status Open() { return VerifiedFile::Open(manifest_, column(), &file_); }
  bool Ensure(size_t offset, size_t n) { return file_->Ensure(file_->data() + offset, n); }
  void ExpectDamageAt(const Status& status, size_t offset) {
    EXPECT_EQ(status.code(), Code::kDataLoss);
    const std::string at = " at byte offset " + std::to_string(offset) + " differs";
    EXPECT_EQ(status.message().find(path_ + " is damaged: "), 0u) << status.message();
    EXPECT_NE(status.message().find(at), std::string::npos) << status.message();
  }

  const Folder folder_;
  Manifest manifest_;
  std::string path_, sound_;
  std::unique_ptr<VerifiedFile> file_;
  SerialExec exec_;
};

TEST_F(VerifiedFileTest, ASoundFile) {
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(file_->bytes(), sound_.size());
  EXPECT_EQ(std::memcmp(file_->data(), sound_.data() + 128, sound_.size() - 128), 0);
  EXPECT_TRUE(Ensure(0, 1600));
  EXPECT_TRUE(file_->VerifyAll(exec_).ok());
  EXPECT_TRUE(Ensure(1599, 1));
  EXPECT_TRUE(file_->damage().ok());
}

TEST_F(VerifiedFileTest, EveryFlippedByteIsFound) {
  for (size_t at = 0; at < sound_.size(); at += at < 128 ? 1 : 5) {
    Flip(path_, at, static_cast<int>(at % 8));
    const Status opened = Open();
    if (at < 128) {
      EXPECT_EQ(opened.code(), Code::kDataLoss) << at;
      EXPECT_EQ(opened.message().find(path_ + " is damaged at byte offset 0: its header is not "
                                              "{'descr': '<f4'"),
                0u)
          << opened.message();
    } else {
      ASSERT_TRUE(opened.ok()) << opened.message();
      const size_t block = at / kBlock * kBlock;
      EXPECT_FALSE(Ensure(at - 128, 1)) << at;
      ExpectDamageAt(file_->damage(), block);
      ExpectDamageAt(file_->VerifyAll(exec_), block);
      EXPECT_FALSE(Ensure(at - 128, 1)) << at;
    }
    Write(path_, sound_);
  }
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(file_->VerifyAll(exec_).ok());
}

// Only the blocks of the range count: the first block has the header and 128 bytes of data.
TEST_F(VerifiedFileTest, OnlyBlocksThatAreReadAreVerified) {
  Flip(path_, 2 * kBlock + 7);
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(Ensure(0, 128 + kBlock));
  EXPECT_TRUE(Ensure(128 + 2 * kBlock, 1600 - 128 - 2 * kBlock));
  EXPECT_TRUE(file_->damage().ok());
  EXPECT_FALSE(Ensure(128 + kBlock - 1, 2));
  ExpectDamageAt(file_->damage(), 2 * kBlock);
  EXPECT_TRUE(Ensure(0, 128));
  ASSERT_TRUE(Open().ok());
  EXPECT_FALSE(Ensure(0, 1600));
}

TEST_F(VerifiedFileTest, OtherSizes) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{1727}}) {
    Write(path_, sound_.substr(0, n));
    EXPECT_EQ(Open().message(),
              path_ + " has " + std::to_string(n) + " bytes; MANIFEST.json says 1728");
  }
  Write(path_, sound_ + "x");
  EXPECT_EQ(Open().code(), Code::kDataLoss);
  unlink(path_.c_str());
  EXPECT_EQ(Open().message(), path_ + " is missing");
}

// A newer base may remove the files of an open one.
TEST_F(VerifiedFileTest, AFileWithoutAName) {
  ASSERT_TRUE(Open().ok());
  unlink(path_.c_str());
  EXPECT_TRUE(Ensure(500, 600));
  EXPECT_TRUE(file_->VerifyAll(exec_).ok());
  EXPECT_EQ(std::memcmp(file_->data(), sound_.data() + 128, 1600), 0);
}

TEST_F(VerifiedFileTest, ThreadsFindTheSame) {
  Flip(path_, 5 * kBlock);
  ASSERT_TRUE(Open().ok());
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, &wrong] {
      for (size_t at = 0; at < 1600; at += 16) {
        const bool sound = (at + 128) / kBlock != 5;
        wrong += Ensure(at, 16) != sound;
      }
      wrong += file_->damage().ok();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  ThreadsExec exec(3);
  ExpectDamageAt(file_->VerifyAll(exec), 5 * kBlock);
}

}  // namespace
}  // namespace dynemb
