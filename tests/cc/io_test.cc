// CRC32C and the index column of dumps (docs/file_format.md).
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cc/io/crc32c.h"
#include "cc/io/key_index.h"
#include "tests/cc/chosen_keys.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suite.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

using testing_table::Random;

// ---- CRC32C ----

// CRC32C bit by bit, from the polynomial.
uint32_t CrcByBits(uint32_t crc, const unsigned char* data, size_t n) {
  crc = ~crc;
  for (size_t i = 0; i < n; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

std::vector<unsigned char> RandomBytes(size_t n, uint64_t seed) {
  Random random(seed);
  std::vector<unsigned char> bytes(n);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.Below(256));
  return bytes;
}

TEST(Crc32c, VectorsOfTheRfc) {
  std::vector<unsigned char> rising(32), falling(32);
  for (unsigned char i = 0; i < 32; ++i) {
    rising[i] = i;
    falling[31 - i] = i;
  }
  for (const auto crc : {&Crc32c, &Crc32cByTables}) {
    EXPECT_EQ(crc(0, std::vector<unsigned char>(32, 0).data(), 32), 0x8A9136AAu);
    EXPECT_EQ(crc(0, std::vector<unsigned char>(32, 0xFF).data(), 32), 0x62A8AB43u);
    EXPECT_EQ(crc(0, rising.data(), 32), 0x46DD794Eu);
    EXPECT_EQ(crc(0, falling.data(), 32), 0x113FDB5Cu);
    EXPECT_EQ(crc(0, "123456789", 9), 0xE3069283u);
    EXPECT_EQ(crc(0, "", 0), 0u);
    EXPECT_EQ(crc(0x12345678u, "", 0), 0x12345678u);
    EXPECT_EQ(crc(0, nullptr, 0), 0u);
  }
}

TEST(Crc32c, AnyLengthAndAlignment) {
  const std::vector<unsigned char> bytes = RandomBytes(300, 1);
  for (size_t at = 0; at < 16; ++at) {
    for (size_t n = 0; n < 260; ++n) {
      const auto initial = static_cast<uint32_t>(n * 0x9E3779B9u * at);
      const uint32_t want = CrcByBits(initial, &bytes[at], n);
      ASSERT_EQ(Crc32c(initial, &bytes[at], n), want) << at << " " << n;
      ASSERT_EQ(Crc32cByTables(initial, &bytes[at], n), want) << at << " " << n;
      const size_t part = n / 3;
      ASSERT_EQ(Crc32c(Crc32c(initial, &bytes[at], part), &bytes[at] + part, n - part), want);
    }
  }
}

TEST(Crc32c, LargeBuffers) {
  const std::vector<unsigned char> bytes = RandomBytes((1 << 20) + 3, 2);
  EXPECT_EQ(Crc32c(5, bytes.data(), bytes.size()), Crc32cByTables(5, bytes.data(), bytes.size()));
}

// The checksums of a file's blocks, for a range of any length that begins anywhere in a block.
TEST(Crc32c, BlocksOfARange) {
  const std::vector<unsigned char> bytes = RandomBytes(5000, 3);
  SerialExec serial;
  ThreadsExec threads(3);
  Random random(4);
  for (int round = 0; round < 300; ++round) {
    Exec& exec = round % 2 == 0 ? static_cast<Exec&>(serial) : threads;
    const size_t n = random.Below(bytes.size());
    const size_t block = 1 + random.Below(random.Below(3) == 0 ? 6000 : 100);
    const size_t room = random.Below(4) == 0 ? 0 : random.Below(block + 1);
    const auto initial = static_cast<uint32_t>(random.Next());
    const std::vector<uint32_t> got = Crc32cBlocks(exec, bytes.data(), n, initial, room, block);
    std::vector<uint32_t> want{CrcByBits(initial, bytes.data(), std::min(room, n))};
    for (size_t at = std::min(room, n); at < n; at += block) {
      want.push_back(CrcByBits(0, &bytes[at], std::min(block, n - at)));
    }
    ASSERT_EQ(got, want) << "n " << n << " block " << block << " room " << room;
  }
}

// The calls of a writer: a block that is incomplete at the end of a range continues in the next.
TEST(Crc32c, BlocksOfAFile) {
  const std::vector<unsigned char> file = RandomBytes(20000, 5);
  SerialExec exec;
  Random random(6);
  for (size_t block : {1, 7, 512, 4096, 30000}) {
    std::vector<uint32_t> sums;
    uint32_t open = 0;
    size_t room = block;
    for (size_t at = 0; at < file.size();) {
      const size_t n = std::min<size_t>(file.size() - at, random.Below(3000));
      const std::vector<uint32_t> got = Crc32cBlocks(exec, &file[at], n, open, room, block);
      if (n < room) {
        ASSERT_EQ(got.size(), 1u);
        open = got[0];
        room -= n;
      } else {
        const size_t last = (n - room) % block;
        sums.insert(sums.end(), got.begin(), got.end() - (last != 0));
        open = last != 0 ? got.back() : 0;
        room = block - last;
      }
      at += n;
    }
    if (room != block) sums.push_back(open);
    std::vector<uint32_t> want;
    for (size_t at = 0; at < file.size(); at += block) {
      want.push_back(CrcByBits(0, &file[at], std::min(block, file.size() - at)));
    }
    EXPECT_EQ(sums, want) << block;
  }
}

// ---- the index ----

// The mix as docs/file_format.md defines it, independent of the library's code.
uint64_t Mix(uint64_t key) {
  uint64_t z = key + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

std::vector<uint64_t> DistinctKeys(size_t n, size_t key_bytes, uint64_t seed) {
  std::vector<uint64_t> keys = testing_table::Scattered(seed, n);
  for (uint64_t& key : keys) {
    if (key_bytes == 4) key = static_cast<uint32_t>(key);
  }
  return keys;
}

std::vector<char> Pack(const std::vector<uint64_t>& keys, size_t key_bytes) {
  std::vector<char> packed(keys.size() * key_bytes);
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(packed.data() + i * key_bytes, &keys[i], key_bytes);
  }
  return packed;
}

// Checks that a reader finds every key at its position, and finds no other key.
void ExpectIndex(const std::vector<uint64_t>& keys, uint32_t k, const uint32_t* index,
                 uint64_t salt) {
  const uint64_t slots = uint64_t{1} << k;
  size_t taken = 0;
  for (uint64_t s = 0; s < slots; ++s) {
    taken += index[s] != 0;
    ASSERT_LE(index[s], keys.size());
  }
  ASSERT_EQ(taken, keys.size());
  const auto find = [&](uint64_t key) -> uint64_t {
    for (uint64_t s = Mix(key ^ salt) >> (64 - k);; s = (s + 1) % slots) {
      if (index[s] == 0 || keys[index[s] - 1] == key) return index[s];
    }
  };
  for (size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(find(keys[i]), i + 1) << keys[i];
  for (uint64_t key : testing_table::Scattered(1000000, 50)) ASSERT_EQ(find(key), 0u);
}

TEST(KeyIndex, EveryKeyIsFound) {
  for (size_t key_bytes : {8, 4}) {
    for (size_t n : {0, 1, 2, 15, 31, 32, 33, 100, 1000, 4095, 5000}) {
      for (uint32_t more : {0, 1, 2}) {
        uint32_t k = 1;
        while ((size_t{1} << k) <= n) ++k;
        k += more;
        SCOPED_TRACE(std::to_string(n) + " keys, 2^" + std::to_string(k) + " slots");
        const std::vector<uint64_t> keys = DistinctKeys(n, key_bytes, n + more);
        std::vector<uint32_t> slots(size_t{1} << k, 0xABABABABu);  // old contents
        const uint64_t salt =
            BuildKeyIndex(Pack(keys, key_bytes).data(), n, key_bytes, k, slots.data());
        ExpectIndex(keys, k, slots.data(), salt);
      }
    }
  }
}

// The home of all keys is the last slot; their probes continue at the first slot.
TEST(KeyIndex, ProbesWrapAround) {
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < 10; ++i) {
    keys.push_back(testing_table::UnmixKey(~uint64_t{0} - i) ^ KeyIndexSalt(0));
  }
  std::vector<uint32_t> slots(16);
  EXPECT_EQ(BuildKeyIndex(keys.data(), keys.size(), 8, 4, slots.data()), KeyIndexSalt(0));
  EXPECT_EQ(slots, (std::vector<uint32_t>{2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0, 0, 0, 1}));
  // int32 keys are their bit patterns, zero-extended.
  const std::vector<uint32_t> narrow{0xFFFFFFFFu, 0x80000000u, 0, 7};
  const uint64_t salt = BuildKeyIndex(narrow.data(), 4, 4, 4, slots.data());
  ExpectIndex({0xFFFFFFFFu, 0x80000000u, 0, 7}, 4, slots.data(), salt);
}

// The number of slots that the probes of all keys pass, per key.
double Passed(const std::vector<uint64_t>& keys, uint32_t k, const uint32_t* index, uint64_t salt) {
  const uint64_t mask = (uint64_t{1} << k) - 1;
  uint64_t passed = 0;
  for (uint64_t s = 0; s <= mask; ++s) {
    if (index[s] != 0) passed += (s - (Mix(keys[index[s] - 1] ^ salt) >> (64 - k))) & mask;
  }
  return static_cast<double>(passed) / static_cast<double>(keys.size());
}

TEST(KeyIndex, IdsShardedByAnyHash) {
  SKIP_UNDER_SANITIZERS("statistics of an index that other tests build");
  constexpr uint32_t k = 16;
  std::vector<uint32_t> slots(size_t{1} << k);
  for (const testing_keys::Sharding& sharding : testing_keys::kShardings) {
    for (int b : {1, 4, 8, 10}) {
      const auto keys = testing_keys::IdsOfShard(sharding, b, size_t{1} << (k - 1));
      const uint64_t salt = BuildKeyIndex(keys.data(), keys.size(), 8, k, slots.data());
      EXPECT_EQ(salt, KeyIndexSalt(0)) << sharding.name << ", " << b << " bits";
      EXPECT_LT(Passed(keys, k, slots.data(), salt), 1);
    }
  }
}

TEST(KeyIndex, ChosenKeysGetAnotherSalt) {
  constexpr uint32_t k = 19;
  std::vector<uint32_t> slots(size_t{1} << k);
  for (int like_bits : {8, 20, 32}) {
    std::vector<uint64_t> keys(200000);
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint64_t hash =
          (uint64_t{5} << (64 - like_bits)) | ((i * 0x9E3779B97F4A7C15ull) >> like_bits);
      keys[i] = testing_table::UnmixKey(hash) ^ KeyIndexSalt(0);
    }
    const uint64_t salt = BuildKeyIndex(keys.data(), keys.size(), 8, k, slots.data());
    EXPECT_EQ(salt, KeyIndexSalt(1)) << like_bits;
    EXPECT_LT(Passed(keys, k, slots.data(), salt), 1) << like_bits;
    ExpectIndex(keys, k, slots.data(), salt);
  }
}

class KeyIndexFile : public ::testing::Test {
 protected:
  KeyIndexFile() {
    std::string folder = ::testing::TempDir() + "/key_index_XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    keys_path_ = folder + "/keys";
    index_path_ = folder + "/index";
  }
  ~KeyIndexFile() override {
    unlink(keys_path_.c_str());
    unlink(index_path_.c_str());
    rmdir(folder_.c_str());
  }
  static void Write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  void WriteKeys(const std::vector<uint64_t>& keys, size_t key_bytes, size_t offset,
                 size_t trailing = 0) {
    const std::vector<char> packed = Pack(keys, key_bytes);
    Write(keys_path_, std::string(offset, 'h') + std::string(packed.data(), packed.size()) +
                          std::string(trailing, 't'));
  }
  void WriteHole(size_t header, size_t bytes) {
    Write(index_path_, std::string(header, 'h'));
    EXPECT_EQ(truncate(index_path_.c_str(), static_cast<off_t>(header + bytes)), 0);
  }
  Status Build(size_t n, uint32_t k, size_t keys_offset = 128, size_t index_offset = 128,
               size_t key_bytes = 8) {
    return BuildKeyIndexFile(keys_path_, keys_offset, n, key_bytes, index_path_, index_offset, k,
                             &salt_);
  }
  std::string folder_, keys_path_, index_path_;
  uint64_t salt_ = 0;
};

TEST_F(KeyIndexFile, FromFileToFile) {
  for (size_t key_bytes : {8, 4}) {
    for (size_t n : {0, 1, 1000, 30000}) {
      for (size_t offset : {4, 128, 4096, 5000}) {
        uint32_t k = 4;
        while ((size_t{1} << k) < 2 * n) ++k;
        const std::vector<uint64_t> keys = DistinctKeys(n, key_bytes, n);
        WriteKeys(keys, key_bytes, offset, 5);
        WriteHole(offset, sizeof(uint32_t) << k);
        Status status = Build(n, k, offset, offset, key_bytes);
        if (n % 2 == 0) status = Build(n, k, offset, offset, key_bytes);  // once more
        ASSERT_TRUE(status.ok()) << status.message();
        const std::string file = Read(index_path_);
        ASSERT_EQ(file.size(), offset + (sizeof(uint32_t) << k));
        EXPECT_EQ(file.substr(0, offset), std::string(offset, 'h'));
        std::vector<uint32_t> slots(size_t{1} << k);
        std::memcpy(slots.data(), file.data() + offset, file.size() - offset);
        ExpectIndex(keys, k, slots.data(), salt_);
      }
    }
  }
}

// Without keys, their file may be empty.
TEST_F(KeyIndexFile, NoKeysInAnEmptyFile) {
  Write(keys_path_, "");
  WriteHole(0, 64);
  const Status status = Build(0, 4, 0, 0);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(Read(index_path_), std::string(64, '\0'));
}

TEST_F(KeyIndexFile, Errors) {
  const std::vector<uint64_t> keys = DistinctKeys(10, 8, 1);
  const auto expect = [&](const Status& status, const std::string& word) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  WriteHole(128, 64 * 4);
  expect(Build(10, 6), keys_path_);  // there is no such file
  WriteKeys(keys, 8, 128);
  EXPECT_TRUE(Build(10, 6).ok());
  unlink(index_path_.c_str());
  expect(Build(10, 6), index_path_);
  WriteHole(128, 64 * 4 - 1);
  expect(Build(10, 6), index_path_);  // one byte too short
  EXPECT_EQ(Build(10, 6).code(), Code::kInvalidArgument);
  WriteHole(128, 64 * 4);
  expect(Build(11, 6), keys_path_);
  EXPECT_EQ(Build(11, 6).code(), Code::kInvalidArgument);
  expect(Build(10, 6, 129), keys_path_);
  WriteKeys(keys, 8, 128);
  for (uint32_t k : {0u, 1u, 3u, 41u, 64u, 1000u, ~0u}) {
    EXPECT_EQ(Build(10, k).code(), Code::kInvalidArgument) << k;
  }
  EXPECT_EQ(Build(16, 4).code(), Code::kInvalidArgument);                // no slot would be empty
  EXPECT_EQ(Build(size_t{1} << 33, 40).code(), Code::kInvalidArgument);  // positions have 32 bits
  EXPECT_EQ(Build(10, 6, 128, 126).code(), Code::kInvalidArgument);
  EXPECT_EQ(Build(10, 6, 128, 128, 5).code(), Code::kInvalidArgument);
  EXPECT_EQ(Read(index_path_), std::string(128, 'h') + std::string(64 * 4, '\0'));
}

}  // namespace
}  // namespace dynemb
