// The checksums of the files of an exported model: every damage is found, and named.
#include "cc/serving/model_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "cc/io/crc32c.h"
#include "tests/cc/json_text.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

using namespace testing_files;

// A model of two files, of which one is large enough for several reads.
class ModelFilesTest : public ::testing::Test {
 protected:
  ModelFilesTest() {
    for (const char* name : {"assets", "assets.extra", "variables"}) {
      EXPECT_EQ(mkdir((folder_ / name).c_str(), 0755), 0);
    }
    graph_.resize(600001);
    for (size_t i = 0; i < graph_.size(); ++i) graph_[i] = static_cast<char>(i * i >> 3);
    Write(folder_ / "saved_model.pb", graph_);
    Write(folder_ / "variables/variables.index", "index");
    Write(folder_ / "assets/tf_dynemb.json", "{}");
    Write(checksums_, Text(Files()));
  }
  std::string Entry(const std::string& file) const {
    const std::string bytes = Read(folder_ / file);
    return Object({{"file", Quoted(file)},
                   {"bytes", std::to_string(bytes.size())},
                   {"crc32c", Quoted(Hex(Crc32c(0, bytes.data(), bytes.size())))}});
  }
  std::string Files() const {
    return Array({Entry("saved_model.pb"), Entry("variables/variables.index")});
  }
  static std::string Text(const std::string& files, const std::string& version = "1") {
    return Sealed(
        {{"format", Quoted("tf_dynemb.model_files")}, {"version", version}, {"files", files}});
  }
  Status Verify() const { return VerifyModelFiles(folder_ / "assets/tf_dynemb.json"); }
  void ExpectDamage(const std::string& file, const std::string& says) const {
    const Status status = Verify();
    EXPECT_EQ(status.code(), Code::kDataLoss) << file;
    EXPECT_EQ(status.message().find(folder_ / file), 0u) << status.message();
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  }

  const Folder folder_;
  const std::string checksums_ = folder_ / "assets.extra/tf_dynemb.checksums.json";
  std::string graph_;
};

TEST_F(ModelFilesTest, SoundModels) {
  EXPECT_TRUE(Verify().ok()) << Verify().message();
  Write(folder_ / "assets.extra/other", "x");  // files without an entry are not compared
  EXPECT_TRUE(Verify().ok());
  // A descriptor that is in no model, or in one without checksums.
  EXPECT_TRUE(VerifyModelFiles(folder_ / "tf_dynemb.json").ok());
  EXPECT_TRUE(VerifyModelFiles("tf_dynemb.json").ok());
  EXPECT_TRUE(VerifyModelFiles("").ok());
  EXPECT_TRUE(VerifyModelFiles(folder_ / "myassets/tf_dynemb.json").ok());
  unlink(checksums_.c_str());
  Flip(folder_ / "saved_model.pb", 5);
  EXPECT_TRUE(Verify().ok());
}

TEST_F(ModelFilesTest, DamagedFiles) {
  ASSERT_TRUE(Verify().ok());
  for (const size_t at : {0, 1, 300000, 600000}) {
    Flip(folder_ / "saved_model.pb", at);
    ExpectDamage("saved_model.pb", "its CRC32C is ");
    ExpectDamage("saved_model.pb", "remove that file");
    Write(folder_ / "saved_model.pb", graph_);
    ASSERT_TRUE(Verify().ok());
  }
  Write(folder_ / "variables/variables.index", "indey");
  ExpectDamage("variables/variables.index", "is damaged: its CRC32C");
  Write(folder_ / "variables/variables.index", "inde");
  ExpectDamage("variables/variables.index", "it has 4 bytes, and " + checksums_ + " says 5");
  unlink((folder_ / "variables/variables.index").c_str());
  ExpectDamage("variables/variables.index", " is missing");
  Write(folder_ / "variables/variables.index", "index");
  EXPECT_TRUE(Verify().ok());
}

TEST_F(ModelFilesTest, DamagedChecksums) {
  const std::string file = "assets.extra/tf_dynemb.checksums.json", text = Text(Files());
  for (size_t at = 0; at < text.size(); ++at) {
    Flip(checksums_, at, static_cast<int>(at % 5));
    ExpectDamage(file, "is damaged");
    Write(checksums_, text);
  }
  for (size_t n = 0; n < text.size(); ++n) {
    Write(checksums_, text.substr(0, n));
    ExpectDamage(file, "is damaged");
  }
  for (const char* files : {"null", "[1]", "[{}]", "[{\"file\":\"saved_model.pb\"}]",
                            "[{\"bytes\":1,\"file\":\"\"}]", "[{\"bytes\":-1,\"file\":\"x\"}]"}) {
    Write(checksums_, Text(files));
    ExpectDamage(file, "its member files is wrong");
  }
  Write(checksums_, Text(Files(), "\"1\""));
  ExpectDamage(file, "its member version is wrong");
  Write(checksums_, Sealed({{"format", "1"}}));
  ExpectDamage(file, "its member format is wrong");
  Write(checksums_, Sealed({{"format", Quoted("tf_dynemb.model_files")}, {"version", "1"}}));
  ExpectDamage(file, "its member files is wrong");
  Write(checksums_, Text(Files(), "2"));
  EXPECT_EQ(Verify().code(), Code::kInvalidArgument);
  Write(checksums_, text);
  EXPECT_TRUE(Verify().ok());
  // A wrong checksum of a file that was verified before; the list has the same size.
  std::string other = Files();
  other.replace(other.find("\"crc32c\":\"") + 10, 8, "01234567");
  Write(checksums_, Text(other));
  ExpectDamage("saved_model.pb", "its CRC32C is ");
}

}  // namespace
}  // namespace dynemb
