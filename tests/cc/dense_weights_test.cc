// Dense weights of snapshots: what is read, and files that lie about their arrays.
#include "cc/serving/dense_weights.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/io/manifest.h"
#include "tests/cc/snapshot_files.h"

namespace dynemb {
namespace {

using namespace testing_files;

class DenseWeightsTest : public ::testing::Test {
 protected:
  // Publishes a base with this file of weights, and reads it.
  Status Publish(const std::string& file) {
    Snapshot snapshot;
    snapshot.tables.push_back(RowsOf("user", 2, {{1, 1.0f}}));
    snapshot.dense = file;
    RemoveAll(folder_ / "chain");
    const std::string directory = snapshot.Publish(folder_ / "chain");
    path_ = directory + "/dense.r0.weights.safetensors";
    DYNEMB_RETURN_IF_ERROR(ReadManifest(directory, &manifest_));
    return Read();
  }
  Status Read() { return DenseWeights::Read(exec_, manifest_, &weights_); }
  void ExpectDamage(const std::string& file, const std::string& says) {
    const Status status = Publish(file);
    EXPECT_EQ(status.code(), Code::kDataLoss) << says;
    EXPECT_EQ(status.message(), path_ + " is damaged: " + says);
  }

  const Folder folder_;
  std::string path_;
  Manifest manifest_;
  SerialExec exec_;
  std::shared_ptr<const DenseWeights> weights_;
};

TEST_F(DenseWeightsTest, Arrays) {
  const std::string data = "0123456789abcdefghijklmnop";
  ASSERT_TRUE(Publish(Safetensors(Object({{"a/kernel", ArrayEntry("F32", "[2, 1]", 1, 9)},
                                          {"empty", ArrayEntry("F64", "[3, 0]", 9, 9)},
                                          {"flags", ArrayEntry("BOOL", "[15]", 9, 24)},
                                          {"scalar", ArrayEntry("I8", "[]", 0, 1)},
                                          {"\\u00e9", ArrayEntry("BF16", "[1]", 24, 26)},
                                          {"__metadata__", Object({{"by", Quoted("x")}})}}),
                                  data))
                  .ok());
  EXPECT_EQ(weights_->size(), 5u);
  EXPECT_EQ(weights_->Find("__metadata__"), nullptr);
  EXPECT_EQ(weights_->Find("kernel"), nullptr);
  const auto expect = [&](const char* name, const std::string& dtype,
                          const std::vector<int64_t>& shape, const std::string& bytes) {
    const DenseWeight* const weight = weights_->Find(name);
    ASSERT_NE(weight, nullptr) << name;
    EXPECT_EQ(weight->dtype, dtype);
    EXPECT_EQ(weight->shape, shape);
    EXPECT_EQ(std::string(weight->data, weight->bytes), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weight->data) % DenseWeights::kAlignment, 0u);
  };
  expect("a/kernel", "F32", {2, 1}, data.substr(1, 8));
  expect("empty", "F64", {3, 0}, "");
  expect("flags", "BOOL", {15}, data.substr(9, 15));
  expect("scalar", "I8", {}, "0");
  expect("\u00e9", "BF16", {1}, "op");
}

TEST_F(DenseWeightsTest, NoArrays) {
  ASSERT_TRUE(Publish(Safetensors("{}", "")).ok());
  EXPECT_EQ(weights_->size(), 0u);
}

TEST_F(DenseWeightsTest, FilesThatLie) {
  ExpectDamage("1234567", "it has no header");
  ExpectDamage(std::string("\x09\0\0\0\0\0\0\0{}      ", 16), "its header has 9 bytes");
  ExpectDamage(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10),
               "its header has 18446744073709551615 bytes");
  ExpectDamage(Safetensors("[]", ""), "its header is not an object");
  ExpectDamage(Safetensors("{}", "1"), "its arrays do not have the size of its data");
  const Status status = Publish(Safetensors("{", ""));
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_EQ(status.message().find(path_ + " is damaged: its header: "), 0u) << status.message();
  const std::string wrong = "its header is wrong about 'w'";
  for (const std::string& entry :
       {ArrayEntry("F31", "[1]", 0, 4), ArrayEntry("F32", "[2]", 0, 4),
        ArrayEntry("F32", "[-1]", 0, 4), ArrayEntry("F32", "[1.0]", 0, 4),
        ArrayEntry("F32", "1", 0, 4), ArrayEntry("F32", "[1]", 4, 0),
        ArrayEntry("F32", "[1]", 1, 5),
        // 2^32 * 2^32 * 4 bytes are 0.
        ArrayEntry("F32", "[4294967296, 4294967296]", 0, 0),
        ArrayEntry("F32", "[562949953421312, 0]", 0, 0), Object({}), std::string("3"),
        std::string(R"({"dtype": 3, "shape": [1], "data_offsets": [0, 4]})"),
        std::string(R"({"dtype": "F32", "shape": [1], "data_offsets": [0]})"),
        std::string(R"({"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]})"),
        std::string(R"({"dtype": "F32", "shape": [1]})")}) {
    ExpectDamage(Safetensors(Object({{"w", entry}}), "1234"), wrong);
  }
  // Two arrays in one place, and one in none.
  ExpectDamage(Safetensors(Object({{"v", ArrayEntry("I8", "[4]", 0, 4)},
                                   {"w", ArrayEntry("I8", "[4]", 0, 4)}}),
                           "1234"),
               "its arrays do not have the size of its data");
  ExpectDamage(Safetensors(Object({{"w", ArrayEntry("I8", "[3]", 0, 3)}}), "1234"),
               "its arrays do not have the size of its data");
}

TEST_F(DenseWeightsTest, DamagedBytes) {
  const std::string file =
      Safetensors(Object({{"w", ArrayEntry("F32", "[100]", 0, 400)}}), std::string(400, 'x'));
  ASSERT_TRUE(Publish(file).ok());
  for (size_t at = 0; at < file.size(); at += 7) {
    Flip(path_, at);
    EXPECT_EQ(Read().code(), Code::kDataLoss) << at;
    Flip(path_, at);
  }
  EXPECT_TRUE(Read().ok());
  Write(path_, file + "x");
  EXPECT_EQ(Read().code(), Code::kDataLoss);
  Write(path_, file.substr(0, file.size() - 1));
  EXPECT_EQ(Read().code(), Code::kDataLoss);
}

// It fails by what a sanitizer finds: a read outside of the file.
TEST_F(DenseWeightsTest, HeadersOfRandomBytes) {
  std::mt19937_64 random(1);
  const std::string sound =
      Object({{"a", ArrayEntry("F32", "[2, 3]", 0, 24)}, {"b", ArrayEntry("I64", "[2]", 24, 40)}});
  for (int i = 0; i < 2000; ++i) {
    std::string header = sound;
    for (int change = 0; change < 1 + i % 4; ++change) {
      header[random() % header.size()] = "0123456789[]{},:\"-F"[random() % 19];
    }
    if (!Publish(Safetensors(header, std::string(40, 'x'))).ok()) continue;
    EXPECT_LE(weights_->size(), 2u);
  }
}

TEST_F(DenseWeightsTest, Differences) {
  using Weights = std::shared_ptr<const DenseWeights>;
  const auto read = [&](const Members& entries, size_t bytes) -> Weights {
    EXPECT_TRUE(Publish(Safetensors(Object(entries), std::string(bytes, 'x'))).ok());
    return weights_;
  };
  const Weights weights = read({{"a", ArrayEntry("F32", "[2]", 0, 8)}}, 8);
  const auto difference = [&](const Members& entries, size_t bytes) {
    return read(entries, bytes)->DifferenceFrom(*weights);
  };
  EXPECT_EQ(difference({{"a", ArrayEntry("F32", "[2]", 0, 8)}}, 8), "");
  EXPECT_EQ(difference({{"a", ArrayEntry("F32", "[2, 1]", 0, 8)}}, 8),
            "'a' is F32 [2, 1] instead of F32 [2]");
  EXPECT_EQ(difference({{"a", ArrayEntry("I32", "[2]", 0, 8)}}, 8),
            "'a' is I32 [2] instead of F32 [2]");
  EXPECT_EQ(
      difference({{"a", ArrayEntry("F32", "[2]", 0, 8)}, {"b", ArrayEntry("I8", "[]", 8, 9)}}, 9),
      "'b' is new");
  EXPECT_EQ(difference({}, 0), "'a' is missing");
}

}  // namespace
}  // namespace dynemb
