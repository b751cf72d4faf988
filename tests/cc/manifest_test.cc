// Manifests: each member that is missing or wrong, damage of every byte; the chains of a path.
#include "cc/io/manifest.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cc/json_text.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace {

using namespace testing_files;

// A manifest in levels, each of which a test may change before it is written.
struct Parts {
  Members root, table, shard, files, keys, vectors, third;  // the index, or the deleted keys

  explicit Parts(const std::string& kind = "base", uint64_t rows = 3) {
    Snapshot snapshot;
    snapshot.kind = kind;
    root = snapshot.Root();
    const bool is_base = kind == "base";
    const uint64_t deleted = is_base ? 0 : 2;
    shard = {{"rows", std::to_string(rows)},
             {"deleted", std::to_string(deleted)},
             {"index_salt", "18446744073709551615"}};
    table = {{"name", Quoted("user")},
             {"dimension", "4"},
             {"key_type", Quoted("int64")},
             {"dtype", Quoted("float32")}};
    keys = Column("k.npy", 128 + 8 * rows);
    vectors = Column("v.npy", 128 + 16 * rows);
    third = is_base ? Column("i.npy", 128 + 4 * 8) : Column("d.npy", 128 + 8 * deleted);
  }

  static Members Column(const std::string& file, uint64_t bytes) {
    std::string digits;
    for (uint64_t at = 0; at < bytes; at += 256) digits += "0123abcd";
    return {{"file", Quoted(file)}, {"bytes", std::to_string(bytes)}, {"crc32c", Quoted(digits)}};
  }

  std::string Text() const {
    Parts all = *this;
    const bool is_base = root.count("kind") == 0 || root.at("kind") != Quoted("delta");
    all.files.insert({"keys", Object(keys)});
    all.files.insert({"vectors", Object(vectors)});
    all.files.insert({is_base ? "index" : "deleted", Object(third)});
    all.shard.insert({"files", Object(all.files)});
    all.table.insert({"shards", Array({Object(all.shard)})});
    all.root.insert({"tables", Array({Object(all.table)})});
    return Sealed(all.root);
  }
};

class ManifestTest : public ::testing::Test {
 protected:
  Status Read(const std::string& text) {
    Write(file_, text);
    return ReadManifest(folder_.path(), &manifest_);
  }
  void ExpectRead(const std::string& text) {
    const Status status = Read(text);
    EXPECT_TRUE(status.ok()) << status.message() << "\n" << text;
  }
  // DataLoss that names the file, and says this.
  void ExpectDamage(const std::string& text, const std::string& says) {
    const Status status = Read(text);
    EXPECT_EQ(status.code(), Code::kDataLoss) << says << "\n" << text;
    EXPECT_EQ(status.message().compare(0, file_.size(), file_), 0) << status.message();
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message() << "\n" << says;
  }

  const Folder folder_;
  const std::string file_ = folder_ / "MANIFEST.json";
  Manifest manifest_;
};

TEST_F(ManifestTest, ABase) {
  Parts parts;
  parts.root["continues"] = Array({Quoted(IdOf(7)), Quoted(IdOf(8))});
  parts.root["later"] = "[1]";  // unknown members are ignored
  parts.shard["later"] = "{}";
  ExpectRead(parts.Text());
  EXPECT_EQ(manifest_.directory, folder_.path());
  EXPECT_TRUE(manifest_.is_base);
  EXPECT_EQ(manifest_.id, IdOf(1));
  EXPECT_EQ(manifest_.parent, "");
  EXPECT_EQ(manifest_.continues, (std::vector<std::string>{IdOf(7), IdOf(8)}));
  EXPECT_EQ(manifest_.watermark, 10u);
  EXPECT_EQ(manifest_.watermark_utc_ns, 10000000000u);
  EXPECT_EQ(manifest_.block_bytes, 256u);
  ASSERT_EQ(manifest_.tables.size(), 1u);
  const TableEntry& table = manifest_.tables[0];
  EXPECT_EQ(table.name, "user");
  EXPECT_EQ(table.dim, 4);
  EXPECT_EQ(table.key_type, KeyType::kInt64);
  EXPECT_EQ(table.dtype, DType::kFloat32);
  ASSERT_EQ(table.shards.size(), 1u);
  const ShardEntry& shard = table.shards[0];
  EXPECT_EQ(shard.rows, 3u);
  EXPECT_EQ(shard.index_salt, ~uint64_t{0});
  EXPECT_EQ(shard.log_slots, 3u);
  ASSERT_EQ(shard.columns.size(), 3u);
  EXPECT_EQ(shard.columns.at("vectors").file, "v.npy");
  EXPECT_EQ(shard.columns.at("vectors").bytes, 176u);
  EXPECT_EQ(shard.columns.at("vectors").header, Npy("<f4", "3, 4", ""));
  EXPECT_EQ(shard.columns.at("keys").header, Npy("<i8", "3,", ""));
  EXPECT_EQ(shard.columns.at("index").header, Npy("<u4", "8,", ""));
  EXPECT_EQ(shard.columns.at("index").crcs, std::vector<uint32_t>{0x0123abcdu});
}

TEST_F(ManifestTest, ADelta) {
  Parts parts("delta");
  parts.root["parent"] = Quoted(IdOf(5));
  parts.root["since"] = "4";
  ExpectRead(parts.Text());
  EXPECT_FALSE(manifest_.is_base);
  EXPECT_EQ(manifest_.parent, IdOf(5));
  EXPECT_EQ(manifest_.since, 4u);
  EXPECT_EQ(manifest_.tables[0].shards[0].deleted, 2u);
  EXPECT_EQ(manifest_.tables[0].shards[0].columns.at("deleted").header, Npy("<i8", "2,", ""));
  EXPECT_EQ(manifest_.tables[0].shards[0].columns.count("index"), 0u);
}

TEST_F(ManifestTest, TypesOfTables) {
  for (const auto& [name, descr, bytes] :
       {std::tuple<const char*, const char*, uint64_t>{"int32", "<i4", 4},
        {"int64", "<i8", 8},
        {"uint64", "<u8", 8}}) {
    Parts parts;
    parts.table["key_type"] = Quoted(name);
    parts.keys = Parts::Column("k.npy", 128 + 3 * bytes);
    ExpectRead(parts.Text());
    EXPECT_EQ(manifest_.tables[0].shards[0].columns.at("keys").header, Npy(descr, "3,", ""));
  }
  for (const auto& [name, descr] :
       {std::pair<const char*, const char*>{"float16", "<f2"}, {"bfloat16", "<u2"}}) {
    Parts parts;
    parts.table["dtype"] = Quoted(name);
    parts.vectors = Parts::Column("v.npy", 128 + 2 * 12);
    ExpectRead(parts.Text());
    EXPECT_EQ(manifest_.tables[0].shards[0].columns.at("vectors").header, Npy(descr, "3, 4", ""));
  }
}

// An index has at least 4 slots, and is at most half full.
TEST_F(ManifestTest, SizesOfIndexes) {
  for (const auto& [rows, log_slots] : {std::pair<uint64_t, uint32_t>{0, 2},
                                        {2, 2},
                                        {3, 3},
                                        {4, 3},
                                        {5, 4},
                                        {1000, 11},
                                        {1025, 12}}) {
    Parts parts("base", rows);
    parts.third = Parts::Column("i.npy", 128 + (uint64_t{4} << log_slots));
    ExpectRead(parts.Text());
    EXPECT_EQ(manifest_.tables[0].shards[0].log_slots, log_slots);
    parts.third = Parts::Column("i.npy", 128 + (uint64_t{8} << log_slots));
    ExpectDamage(parts.Text(), "its member bytes is wrong");
  }
}

// The members that a level of a manifest needs, and values that are wrong there.
using Wrong = std::vector<std::pair<std::string, std::vector<std::string>>>;

void ForEachWrong(const std::string& kind, Members Parts::*level, const Wrong& wrong,
                  const std::function<void(const std::string& text, const std::string& name)>& fn) {
  for (const auto& [name, values] : wrong) {
    Parts without(kind);
    (without.*level)[name] = "";
    (without.*level).erase(name);
    fn(without.Text(), name);
    for (const std::string& value : values) {
      Parts parts(kind);
      (parts.*level)[name] = value;
      fn(parts.Text(), name);
    }
  }
}

const std::vector<std::string> kNoText = {"null", "1", "true", "[]", "{}"};
const std::vector<std::string> kNoNumber = {
    "null", "\"1\"", "true", "[]", "{}", "-1", "1.5", "1e2", "-0", "4.0", "18446744073709551616"};

std::vector<std::string> And(std::vector<std::string> some, const std::vector<std::string>& more) {
  some.insert(some.end(), more.begin(), more.end());
  return some;
}

TEST_F(ManifestTest, MissingAndWrongMembers) {
  const std::string big = "4611686018427387905";  // 2^62 + 1
  const auto damaged = [this](const std::string& text, const std::string& name) {
    ExpectDamage(text, "its member " + name + " is wrong");
  };
  const Wrong root = {
      {"format", And(kNoText, {"\"\"", "\"tf_dynemb.snapshots\""})},
      {"version", kNoNumber},
      {"kind", And(kNoText, {"\"\"", "\"Base\"", "\"deltas\""})},
      {"id", And(kNoText, {"\"\"", Quoted(IdOf(1) + "0"), Quoted(std::string(32, 'g')),
                           Quoted(std::string(32, 'A'))})},
      {"since", And(kNoNumber, {big})},
      {"watermark", And(kNoNumber, {big})},
      {"watermark_utc_ns", kNoNumber},
      {"block_bytes", And(kNoNumber, {"0", "127", "1073741825"})},
  };
  const Wrong table = {
      {"name", kNoText},
      {"dimension", And(kNoNumber, {"0", "2147483649"})},
      {"key_type", And(kNoText, {"\"int16\"", "\"uint32\"", "\"\""})},
      {"dtype", And(kNoText, {"\"float64\"", "\"half\"", "\"\""})},
  };
  const Wrong shard = {
      {"rows", And(kNoNumber, {"1099511627777"})},
      {"deleted", And(kNoNumber, {"1099511627777"})},
      {"index_salt", kNoNumber},
  };
  const Wrong column = {
      {"file", And(kNoText, {"\"\"", "\".\"", "\"..\"", "\"a/b\"", "\"/\"", "\"../k\"",
                             "\"a\\\\b\"", "\"a\\u0000\""})},
      {"bytes", And(kNoNumber, {"0", "128", "151", "153", big})},
      {"crc32c", And(kNoText, {"\"\"", "\"0123abc\"", "\"0123abcd0\"", "\"0123abcd0123abcd\"",
                               "\"0123abcg\"", "\"-123abcd\"", "\" 123abcd\""})},
  };
  for (const char* kind : {"base", "delta"}) {
    ForEachWrong(kind, &Parts::root, root, damaged);
    ForEachWrong(kind, &Parts::table, table, damaged);
    ForEachWrong(kind, &Parts::shard, shard, damaged);
    for (Members Parts::*level : {&Parts::keys, &Parts::vectors, &Parts::third}) {
      // Only the sizes 128 and 151 to 153 could be right for one of the columns.
      ForEachWrong(kind, level, column, damaged);
    }
  }
}

TEST_F(ManifestTest, DenseWeights) {
  const Members sound = {{"file", Quoted("w")},
                         {"bytes", "300"},
                         {"crc32c", Quoted("0123abcd89abcdef")},
                         {"part", Quoted("weights")},
                         {"rank", "0"}};
  const auto text = [](const std::vector<Members>& entries) {
    std::vector<std::string> objects;
    for (const Members& entry : entries) objects.push_back(Object(entry));
    Parts parts;
    parts.root["dense"] = Array(objects);
    return parts.Text();
  };
  const auto with = [&](const char* name, const std::string& value) {
    Members entry = sound;
    entry[name] = value;
    return entry;
  };
  ASSERT_TRUE(Read(text({sound})).ok());
  ASSERT_TRUE(manifest_.dense.has_value());
  EXPECT_EQ(manifest_.dense->file, "w");
  EXPECT_EQ(manifest_.dense->header, "");
  EXPECT_EQ(manifest_.dense->bytes, 300u);
  EXPECT_EQ(manifest_.dense->crcs, (std::vector<uint32_t>{0x0123abcd, 0x89abcdef}));
  // Those of other ranks, and what only training needs, are not read.
  Members other = with("rank", "1");
  other["file"] = Quoted("other");
  Members training = with("part", Quoted("training"));
  training["file"] = Quoted("training");
  ASSERT_TRUE(Read(text({training, other, sound})).ok());
  EXPECT_EQ(manifest_.dense->file, "w");
  for (const std::vector<Members>& entries : {std::vector<Members>{training}, {}}) {
    ASSERT_TRUE(Read(text(entries)).ok());
    EXPECT_FALSE(manifest_.dense.has_value());
  }
  Parts parts;
  parts.root["dense"] = "null";
  EXPECT_TRUE(Read(parts.Text()).ok());
  ExpectDamage(text({other}), "its member dense is wrong");
  ExpectDamage(text({sound, sound}), "its member part is wrong");
  ExpectDamage(text({with("file", Quoted("k.npy"))}), "its member tables is wrong");
  const Wrong wrong = {{"part", And(kNoText, {"\"\"", "\"weight\""})},
                       {"rank", kNoNumber},
                       {"bytes", And(kNoNumber, {"0", "256", "513", "4611686018427387905"})},
                       {"file", And(kNoText, {"\"\"", "\"..\"", "\"a/b\""})},
                       {"crc32c", And(kNoText, {"\"\"", "\"0123abcd\""})}};
  for (const auto& [name, values] : wrong) {
    for (const std::string& value : values) {
      const Members entry = with(name.c_str(), value);
      // Sizes of another number of blocks have other checksums.
      const bool is_size = name == "bytes" && value.find_first_not_of("0123456789") == value.npos &&
                           value.size() < 19;
      ExpectDamage(text({entry}), "its member " + (is_size ? "crc32c" : name) + " is wrong");
    }
  }
  for (const char* each : {"1", "\"x\"", "{}"}) {
    parts.root["dense"] = each;
    ExpectDamage(parts.Text(), "its member dense is wrong");
  }
}

TEST_F(ManifestTest, MissingAndWrongContainers) {
  for (const char* wrong : {"null", "1", "\"x\"", "{}"}) {
    Parts parts;
    parts.root["tables"] = wrong;
    ExpectDamage(parts.Text(), "its member tables is wrong");
    parts = Parts();
    parts.table["shards"] = wrong;
    ExpectDamage(parts.Text(), "its member shards is wrong");
    parts = Parts();
    parts.root["continues"] = wrong;
    ExpectDamage(parts.Text(), "its member continues is wrong");
  }
  for (const char* wrong : {"null", "1", "\"x\"", "[]"}) {
    Parts parts;
    parts.shard["files"] = wrong;
    ExpectDamage(parts.Text(), "its member files is wrong");
    for (const char* name : {"keys", "vectors", "index"}) {
      parts = Parts();
      parts.files[name] = wrong;
      ExpectDamage(parts.Text(), std::string("its member ") + name + " is wrong");
    }
  }
  Parts parts;
  parts.shard["files"] = Object({{"keys", Object(parts.keys)}, {"vectors", Object(parts.vectors)}});
  ExpectDamage(parts.Text(), "its member index is wrong");
  parts = Parts("delta");
  parts.shard["files"] = Object({{"keys", Object(parts.keys)}, {"vectors", Object(parts.vectors)}});
  ExpectDamage(parts.Text(), "its member deleted is wrong");
  parts = Parts();
  parts.shard["deleted"] = "1";  // a base has no deletions
  ExpectDamage(parts.Text(), "its member deleted is wrong");
  parts = Parts();
  parts.root["parent"] = "3";
  ExpectDamage(parts.Text(), "its member parent is wrong");
  // Entries of tables and shards that are no objects.
  for (const char* wrong : {"[null]", "[1]", "[\"x\"]", "[[]]", "[{}]"}) {
    parts = Parts();
    parts.root["tables"] = wrong;
    ExpectDamage(parts.Text(), "its member name is wrong");
    parts = Parts();
    parts.table["shards"] = wrong;
    ExpectDamage(parts.Text(), "its member rows is wrong");
  }
}

TEST_F(ManifestTest, Versions) {
  Parts parts;
  parts.root["version"] = "1";
  parts.shard.erase("index_salt");  // version 1 has none
  ExpectRead(parts.Text());
  EXPECT_EQ(manifest_.tables[0].shards[0].index_salt, 0u);
  for (const char* version : {"0", "3", "5", "6", "1000"}) {
    parts.root["version"] = version;
    const Status status = Read(parts.Text());
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message().find(file_ + " is of version " + version), 0u) << status.message();
  }
}

// One bit of each byte, and all bits of some.
TEST_F(ManifestTest, EveryFlippedBitIsFound) {
  const std::string text = Parts().Text();
  const size_t crc = text.find("\"crc32c\":\"", text.find("block_bytes"));
  for (size_t at = 0; at < text.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      if (at % 16 != 0 && bit != static_cast<int>(at % 5)) continue;
      // An upper case digit of the manifest's own checksum has the same meaning.
      if (bit == 5 && at > crc && at < crc + 18) continue;
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      const Status status = Read(damaged);
      ASSERT_FALSE(status.ok()) << damaged;
      ASSERT_EQ(status.message().find(file_), 0u) << status.message();
    }
  }
}

TEST_F(ManifestTest, EveryTruncationIsFound) {
  const std::string text = Parts("delta").Text();
  for (size_t n = 0; n < text.size(); ++n) ExpectDamage(text.substr(0, n), "damaged");
  ExpectDamage(text + "x", "not JSON");
  ExpectRead(text + "\n");
}

TEST_F(ManifestTest, Checksums) {
  const std::string text = Parts().Text();
  const size_t at = text.find("\"crc32c\":\"", text.find("block_bytes")) + 10;
  for (const std::string digits : {"", "0", "00000000", "123456789"}) {
    ExpectDamage(text.substr(0, at) + digits + text.substr(at + 8), "its CRC32C is not " + digits);
  }
  ExpectDamage(Object(Parts().root), "its CRC32C is not ");
}

TEST_F(ManifestTest, TheNameOfTheDirectory) {
  Snapshot snapshot;
  snapshot.tables.push_back(RowsOf("user", 4, {{1, 0.5f}}));
  const std::string directory = snapshot.Publish(folder_.path());
  EXPECT_TRUE(ReadManifest(directory, &manifest_).ok());
  EXPECT_TRUE(ReadManifest(directory + "/", &manifest_).ok());
  const std::string other = folder_ / ("00000001-base-" + IdOf(2));
  ASSERT_EQ(rename(directory.c_str(), other.c_str()), 0);
  const Status status = ReadManifest(other, &manifest_);
  EXPECT_EQ(status.code(), Code::kDataLoss);
  EXPECT_EQ(status.message(), other + "/MANIFEST.json is of another snapshot: " + IdOf(1));
  // A name that is not of this form does not matter.
  ASSERT_EQ(rename(other.c_str(), (folder_ / "copy").c_str()), 0);
  EXPECT_TRUE(ReadManifest(folder_ / "copy", &manifest_).ok());
  EXPECT_EQ(ReadManifest(folder_ / "nowhere", &manifest_).code(), Code::kDataLoss);
}

// The size of 2^31 rows of 2^31 floats is 128 bytes modulo 2^64.
TEST_F(ManifestTest, SizesThatOverflow) {
  Parts parts("base", 1);
  parts.root["block_bytes"] = std::to_string(1 << 30);
  const auto column = [](const std::string& file, uint64_t bytes) {
    Members members = Parts::Column(file, 128);
    std::string digits;
    for (uint64_t at = 0; at < bytes; at += 1 << 30) digits += "0123abcd";
    members["bytes"] = std::to_string(bytes);
    members["crc32c"] = Quoted(digits);
    return members;
  };
  constexpr uint64_t kRows = uint64_t{1} << 31;
  parts.shard["rows"] = std::to_string(kRows);
  parts.table["dimension"] = std::to_string(kRows);
  parts.keys = column("k.npy", 128 + 8 * kRows);
  parts.third = column("i.npy", 128 + 4 * 2 * kRows);
  parts.vectors = column("v.npy", 128);
  ExpectDamage(parts.Text(), "its member dimension is wrong");
}

TEST_F(ManifestTest, Contradictions) {
  Parts parts;
  parts.root["parent"] = Quoted(IdOf(3));
  ExpectDamage(parts.Text(), "its member parent is wrong");
  parts = Parts();
  parts.root["since"] = "1";
  ExpectDamage(parts.Text(), "its member since is wrong");
  parts = Parts();
  parts.vectors["file"] = parts.keys["file"];
  ExpectDamage(parts.Text(), "its member tables is wrong");
  parts = Parts("delta");
  for (const char* name : {"continues", "after"}) {
    Parts wrong = parts;
    wrong.root[name] = Array({Quoted(IdOf(3))});
    ExpectDamage(wrong.Text(), std::string("its member ") + name + " is wrong");
  }
  parts.root["parent"] = Quoted("no id");
  ExpectDamage(parts.Text(), "its member parent is wrong");
}

TEST(IdOfDirectory, Names) {
  const std::string id = IdOf(0xabc);
  EXPECT_EQ(IdOfDirectory("00000012-base-" + id), id);
  EXPECT_EQ(IdOfDirectory("/a/b/123456789-delta-" + id + "//"), id);
  for (const std::string name :
       {"", "/", "MANIFEST.json", "0000012-base-", "00000012-bases-", "00000012-", "-base-",
        "x0000012-base-", "00000012_base_", "99999999999999999999999-base-"}) {
    EXPECT_EQ(IdOfDirectory(name + id), "") << name;
  }
  EXPECT_EQ(IdOfDirectory("00000012-base-" + id + "0"), "");
  EXPECT_EQ(IdOfDirectory("00000012-base-" + id.substr(1)), "");
  EXPECT_EQ(IdOfDirectory("00000012-base-" + std::string(32, 'A')), "");
}

TEST(ListChain, TheLastBaseAndWhatFollows) {
  const Folder folder;
  std::vector<std::string> found;
  const auto list = [&] {
    const Status status = ListChain(folder.path(), "", &found);
    EXPECT_TRUE(status.ok()) << status.message();
    return found;
  };
  const auto name = [](const std::string& number, const std::string& kind, uint64_t id) {
    return number + "-" + kind + "-" + IdOf(id);
  };
  const auto add = [&](const std::string& text) {
    EXPECT_EQ(mkdir((folder / text).c_str(), 0755), 0);
    return folder / text;
  };
  EXPECT_EQ(ListChain(folder.path(), "", &found).message(), folder.path() + " holds no snapshot");
  for (const char* other : {"tmp", "00000009-base-x", ".00000009-base-"}) add(other);
  EXPECT_EQ(ListChain(folder.path(), "", &found).code(), Code::kDataLoss);
  // Deltas without a base, in the order of their numbers, not of their texts.
  const std::string ninth = add(name("100000000", "delta", 9));
  const std::string third = add(name("00000003", "delta", 3));
  EXPECT_EQ(list(), (std::vector<std::string>{third, ninth}));
  const std::string first = add(name("00000001", "base", 1));
  EXPECT_EQ(list(), (std::vector<std::string>{first, third, ninth}));
  const std::string fourth = add(name("00000004", "base", 4));
  EXPECT_EQ(list(), (std::vector<std::string>{fourth, ninth}));
  // From a snapshot on, if it is in the chain.
  const auto list_from = [&](const std::string& from) {
    EXPECT_TRUE(ListChain(folder.path(), from, &found).ok());
    return found;
  };
  const std::string fifth = add(name("00000005", "delta", 5));
  EXPECT_EQ(list_from(fifth), (std::vector<std::string>{fifth, ninth}));
  EXPECT_EQ(list_from("/other/" + name("100000000", "delta", 9)), std::vector<std::string>{ninth});
  for (const std::string& other : {name("00000005", "delta", 6), name("00000003", "delta", 3)}) {
    EXPECT_EQ(list_from(other), (std::vector<std::string>{fourth, fifth, ninth})) << other;
  }
  const std::string tenth = add(name("100000001", "base", 10));
  EXPECT_EQ(list_from(fifth), std::vector<std::string>{tenth});
  EXPECT_EQ(list(), std::vector<std::string>{tenth});
  // A snapshot is a chain of itself.
  Write(third + "/MANIFEST.json", "{}");
  EXPECT_TRUE(ListChain(third, "", &found).ok());
  EXPECT_EQ(found, std::vector<std::string>{third});
  EXPECT_EQ(ListChain(folder / "nowhere", "", &found).message(),
            folder / "nowhere" + " holds no snapshot: it is missing");
  EXPECT_EQ(ListChain(third + "/MANIFEST.json", "", &found).code(), Code::kDataLoss);
}

}  // namespace
}  // namespace dynemb
