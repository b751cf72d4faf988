// A file of random blocks, and reads of it that know what they must give.
#ifndef DYNEMB_TESTS_CC_BLOCK_FILES_H_
#define DYNEMB_TESTS_CC_BLOCK_FILES_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/file/block_file.h"
#include "cc/file/block_reader.h"
#include "cc/file/uring_block_reader.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace testing_blocks {

inline std::string RandomBytes(size_t n, uint64_t seed) {
  std::string bytes(n, '\0');
  std::mt19937_64 random(seed);
  for (size_t i = 0; i + 8 <= n; i += 8) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, 8);
  }
  return bytes;
}

// A file of `bytes` random bytes, open for reading.
class RandomFile {
 public:
  RandomFile(const std::string& path, size_t bytes, uint64_t seed = 1)
      : contents_(RandomBytes(bytes, seed)) {
    testing_files::Write(path, contents_);
    const Status status = OpenForReading(FileSystem::Posix(), path, &direct_, &fd_);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  ~RandomFile() { (void)FileSystem::Posix().Close(fd_); }
  RandomFile(const RandomFile&) = delete;
  RandomFile& operator=(const RandomFile&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  const std::string& contents() const { return contents_; }

 private:
  const std::string contents_;
  bool direct_ = false;
  int fd_ = -1;
};

// Reads of 1 to 3 blocks at random places of a file.
// Reads, and checks that the reader says of each read once, in this thread, that it has ended, and
// that its bytes are there then.
inline void ReadBlocks(BlockReader* reader, BlockRead* reads, size_t n) {
  std::vector<std::string> seen(n);
  std::vector<int> ended(n);
  const std::thread::id thread = std::this_thread::get_id();
  reader->Read(reads, n, [&](const BlockRead& read) {
    const auto i = static_cast<size_t>(&read - reads);
    ASSERT_LT(i, n);
    EXPECT_EQ(std::this_thread::get_id(), thread);
    ++ended[i];
    if (read.error == 0) seen[i].assign(read.to, read.bytes);
  });
  for (size_t i = 0; i < n; ++i) {
    EXPECT_EQ(ended[i], 1) << i;
    if (reads[i].error != 0) continue;
    EXPECT_TRUE(seen[i] == std::string(reads[i].to, reads[i].bytes)) << i;
  }
}

class RandomReads {
 public:
  RandomReads(const RandomFile& file, size_t n, uint64_t seed) : file_(file) {
    std::mt19937_64 random(seed);
    const size_t blocks = file.contents().size() / kBlockBytes;
    size_t total = 0;
    for (size_t i = 0; i < n; ++i) {
      const size_t first = random() % blocks;
      const size_t count = std::min<size_t>(1 + random() % 3, blocks - first);
      reads.push_back({file.fd(), first * kBlockBytes, count * kBlockBytes, nullptr, -2});
      total += count * kBlockBytes;
    }
    room_.Resize(total);
    std::memset(room_.data(), 0x55, total);
    char* to = room_.data();
    for (BlockRead& read : reads) {
      read.to = to;
      to += read.bytes;
    }
  }

  bool IsRight(size_t i) const {
    const BlockRead& read = reads[i];
    return read.error == 0 &&
           std::memcmp(read.to, file_.contents().data() + read.offset, read.bytes) == 0;
  }
  size_t NumWrong() const {
    size_t wrong = 0;
    for (size_t i = 0; i < reads.size(); ++i) wrong += !IsRight(i);
    return wrong;
  }

  std::vector<BlockRead> reads;

 private:
  const RandomFile& file_;
  AlignedBuffer room_;
};

// The kinds of reader. kVectored: io_uring with the operation of older kernels.
enum class Reader { kThreads, kUring, kVectored };

inline Status MakeReader(Reader kind, BlockReader::Options options,
                         std::unique_ptr<BlockReader>* reader) {
  if (kind == Reader::kVectored) return UringBlockReader::Create(options, true, reader);
  using Kind = BlockReader::Options::Kind;
  options.kind = kind == Reader::kThreads ? Kind::kThreads : Kind::kUring;
  return BlockReader::Create(options, reader);
}

// Whether this system has io_uring.
inline bool HasUring() {
  std::unique_ptr<BlockReader> reader;
  return MakeReader(Reader::kUring, {}, &reader).ok();
}

// A test of each kind of reader; skipped if the system refuses the kind.
class EachReader : public ::testing::TestWithParam<Reader> {
 protected:
  void SetUp() override {
    if (GetParam() != Reader::kThreads && !HasUring()) {
      GTEST_SKIP() << "this system forbids io_uring";
    }
  }
  std::unique_ptr<BlockReader> Make(const BlockReader::Options& options = {}) {
    std::unique_ptr<BlockReader> reader;
    const Status status = MakeReader(GetParam(), options, &reader);
    EXPECT_TRUE(status.ok()) << status.message();
    return reader;
  }
  const testing_files::Folder folder_;
};

inline std::string NameOf(const ::testing::TestParamInfo<Reader>& info) {
  return info.param == Reader::kThreads ? "Threads"
         : info.param == Reader::kUring ? "Uring"
                                        : "Vectored";
}

inline auto AllReaders() {
  return ::testing::Values(Reader::kThreads, Reader::kUring, Reader::kVectored);
}

}  // namespace testing_blocks
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_BLOCK_FILES_H_
