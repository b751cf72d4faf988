// The contract of every kind of block reader: the bytes of the file, from any number of threads;
// and the errors of single reads.
#include "cc/file/block_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/block_files.h"

namespace dynemb {
namespace testing_blocks {
namespace {

constexpr size_t kBlocks = 100;

size_t EntriesOf(const std::string& path) {
  std::vector<std::string> names;
  EXPECT_EQ(FileSystem::Posix().List(path, &names), 0);
  return names.size();
}

class BlockReaderTest : public EachReader {};
INSTANTIATE_TEST_SUITE_P(Each, BlockReaderTest, AllReaders(), NameOf);

TEST_P(BlockReaderTest, GivesTheContents) {
  const RandomFile file(folder_ / "a", kBlocks * kBlockBytes);
  for (unsigned depth : {1, 3, 64, 5000}) {
    BlockReader::Options options;
    options.depth = depth;
    const std::unique_ptr<BlockReader> reader = Make(options);
    for (size_t n : {0, 1, 2, 63, 64, 65, 300}) {
      RandomReads random(file, n, depth * 1000 + n);
      ReadBlocks(reader.get(), random.reads.data(), n);
      EXPECT_EQ(random.NumWrong(), 0u) << depth << " " << n;
    }
  }
}

TEST_P(BlockReaderTest, ManyThreadsAtOnce) {
  const RandomFile file(folder_ / "a", kBlocks * kBlockBytes);
  for (int num_threads : {4, 24}) {  // fewer and more than there are rings
    BlockReader::Options options;
    options.depth = 8;
    const std::unique_ptr<BlockReader> reader = Make(options);
    std::atomic<size_t> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 120 / num_threads; ++i) {
          RandomReads random(file, 1 + static_cast<size_t>(t + 7 * i) % 50, t * 1000 + i);
          ReadBlocks(reader.get(), random.reads.data(), random.reads.size());
          wrong += random.NumWrong();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0u);
  }
}

TEST_P(BlockReaderTest, ReadersComeAndGo) {
  const RandomFile file(folder_ / "a", kBlocks * kBlockBytes);
  const size_t files = EntriesOf("/proc/self/fd"), threads = EntriesOf("/proc/self/task");
  for (int i = 0; i < 20; ++i) {
    const std::unique_ptr<BlockReader> reader = Make();
    RandomReads random(file, 10, i);
    if (i % 2 == 0) continue;  // without a read
    ReadBlocks(reader.get(), random.reads.data(), 10);
    EXPECT_EQ(random.NumWrong(), 0u);
  }
  EXPECT_EQ(EntriesOf("/proc/self/fd"), files);
  // A thread is in the list for a moment after it has been joined.
  for (int i = 0; i < 100 && EntriesOf("/proc/self/task") > threads; ++i) usleep(10000);
  EXPECT_EQ(EntriesOf("/proc/self/task"), threads);
}

TEST_P(BlockReaderTest, TheEndOfAFile) {
  for (size_t extra : {0, 1, 512, 1000, 4095}) {
    const RandomFile file(folder_ / std::to_string(extra), 3 * kBlockBytes + extra);
    AlignedBuffer room(8 * kBlockBytes);
    const auto to = [&](size_t block) { return room.data() + block * kBlockBytes; };
    BlockRead reads[] = {{file.fd(), 2 * kBlockBytes, kBlockBytes, to(0), -2},
                         {file.fd(), 3 * kBlockBytes, kBlockBytes, to(1), -2},
                         {file.fd(), 4 * kBlockBytes, kBlockBytes, to(2), -2},
                         {file.fd(), 2 * kBlockBytes, 3 * kBlockBytes, to(3), -2},
                         {file.fd(), 1 * kBlockBytes, 2 * kBlockBytes, to(6), -2}};
    ReadBlocks(Make().get(), reads, 5);
    for (size_t i : {1, 2, 3}) EXPECT_EQ(reads[i].error, BlockRead::kShort) << i << " " << extra;
    for (size_t i : {0, 4}) EXPECT_EQ(reads[i].error, 0) << i << " " << extra;
    EXPECT_EQ(std::string(to(0), kBlockBytes),
              file.contents().substr(2 * kBlockBytes, kBlockBytes));
  }
}

TEST_P(BlockReaderTest, AnErrorIsOfOneRead) {
  const RandomFile file(folder_ / "a", kBlocks * kBlockBytes);
  const int directory = open(folder_.path().c_str(), O_RDONLY | O_CLOEXEC);
  RandomReads random(file, 40, 1);
  std::vector<BlockRead>& reads = random.reads;
  reads[3].fd = -1;
  reads[7].offset += 512;
  reads[11].bytes -= 1;
  reads[15].to += 8;
  reads[19].bytes = 0;
  reads[23].fd = directory;
  ReadBlocks(Make().get(), reads.data(), reads.size());
  EXPECT_EQ(reads[3].error, EBADF);
  for (size_t i : {7, 11, 15}) EXPECT_EQ(reads[i].error, EINVAL);
  EXPECT_EQ(reads[19].error, 0);
  EXPECT_EQ(reads[23].error, EISDIR);
  for (size_t i = 0; i < reads.size(); ++i) {
    EXPECT_TRUE((i % 4 == 3 && i <= 23) || random.IsRight(i)) << i;
  }
  close(directory);
}

TEST_P(BlockReaderTest, BufferedFilesToo) {
  const RandomFile file(folder_ / "a", kBlocks * kBlockBytes);
  const int fd = open((folder_ / "a").c_str(), O_RDONLY | O_CLOEXEC);
  RandomReads random(file, 100, 1);
  for (BlockRead& read : random.reads) read.fd = fd;
  ReadBlocks(Make().get(), random.reads.data(), random.reads.size());
  EXPECT_EQ(random.NumWrong(), 0u);
  close(fd);
}

TEST_P(BlockReaderTest, LargeReads) {
  const RandomFile file(folder_ / "a", kBlocks * kBlockBytes);
  AlignedBuffer room(kBlocks * kBlockBytes);
  BlockRead read = {file.fd(), 0, kBlocks * kBlockBytes, room.data(), -2};
  ReadBlocks(Make().get(), &read, 1);
  EXPECT_EQ(read.error, 0);
  EXPECT_EQ(std::string(room.data(), room.size()), file.contents());
}

TEST_P(BlockReaderTest, Kind) {
  EXPECT_STREQ(Make()->kind(), GetParam() == Reader::kThreads ? "threads" : "io_uring");
}

TEST(BlockReader, AutoIsUringWhereThereIsOne) {
  std::unique_ptr<BlockReader> reader;
  ASSERT_TRUE(BlockReader::Create({}, &reader).ok());
  EXPECT_STREQ(reader->kind(), HasUring() ? "io_uring" : "threads");
}

TEST(BlockReader, NoDepth) {
  BlockReader::Options options;
  options.depth = 0;
  std::unique_ptr<BlockReader> reader;
  EXPECT_EQ(BlockReader::Create(options, &reader).code(), Code::kInvalidArgument);
  EXPECT_EQ(reader, nullptr);
}

}  // namespace
}  // namespace testing_blocks
}  // namespace dynemb
