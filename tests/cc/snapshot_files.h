// Snapshots on disk, in the form of docs/file_format.md, for tests of their readers. The code
// shares nothing with the readers, apart from the checksum and the index, which io_test tests.
//
//   Snapshot base;
//   base.tables.push_back(RowsOf("user", 4, {{1, 0.5f}, {2, -1.0f}}));
//   const std::string directory = base.Publish(folder.path());
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_FILES_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_FILES_H_

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cc/io/crc32c.h"
#include "cc/io/key_index.h"
#include "cc/table/codec.h"
#include "cc/table/types.h"
#include "tests/cc/json_text.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace testing_files {

using testing_json::Array;
using testing_json::Members;
using testing_json::Object;
using testing_json::Quoted;

// Keys as bit patterns, and one number for each: element d of the vector is the number plus d.
struct TestShard {
  std::map<uint64_t, float> rows;
  std::vector<uint64_t> deleted;  // of a delta
};

struct TestTable {
  std::string name = "user";
  int64_t dim = 4;
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;
  // "int8" or "int4" of dim 15 and less, and numbers below 100: the vectors are in this format,
  // with the scale 1. Otherwise in the dtype.
  std::string format;
  uint16_t scale = 0x3C00;  // instead of 1, as float16
  std::vector<TestShard> shards;
  uint64_t history = 0;  // 0: none
};

inline TestTable RowsOf(const std::string& name, int64_t dim, std::map<uint64_t, float> rows,
                        std::vector<uint64_t> deleted = {}) {
  TestTable table;
  table.name = name;
  table.dim = dim;
  table.shards.push_back({std::move(rows), std::move(deleted)});
  return table;
}

inline std::string Hex(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

// An id of 32 hexadecimal digits.
inline std::string IdOf(uint64_t number) {
  char text[33];
  std::snprintf(text, sizeof(text), "%032llx", static_cast<unsigned long long>(number));
  return text;
}

// The bytes of an .npy file.
inline std::string Npy(const std::string& descr, const std::string& shape,
                       const std::string& data) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize(128 - 11, ' ');
  return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + "\n" + data;
}

// The bytes of a file of arrays: a header, which is padded, and their data.
inline std::string Safetensors(std::string header, const std::string& data) {
  header.resize((header.size() + 8 + 63) / 64 * 64 - 8, ' ');
  const uint64_t bytes = header.size();
  return std::string(reinterpret_cast<const char*>(&bytes), sizeof(bytes)) + header + data;
}

// The entry of an array in that header.
inline std::string ArrayEntry(const std::string& dtype, const std::string& shape, size_t begin,
                              size_t end) {
  return Object({{"dtype", Quoted(dtype)},
                 {"shape", shape},
                 {"data_offsets", "[" + std::to_string(begin) + ", " + std::to_string(end) + "]"}});
}

// The text of a manifest with its checksum.
inline std::string Sealed(Members root) {
  root.erase("crc32c");
  const std::string text = Object(root);
  root["crc32c"] = Quoted(Hex(Crc32c(0, text.data(), text.size())));
  return Object(root);
}

// A row of integers in a format; see TestTable.
inline std::string Quantized(const std::string& format, const std::vector<float>& vector,
                             uint16_t scale) {
  std::string row;
  if (format == "int8") {
    for (const float value : vector) row += static_cast<char>(value);
  } else {
    row.resize((vector.size() + 1) / 2);
    for (size_t d = 0; d < vector.size(); ++d) {
      row[d / 2] = static_cast<char>(row[d / 2] | static_cast<int>(d) << (d % 2 * 4));
    }
  }
  row.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
  if (format == "int8") return row;
  uint16_t bias;
  StoreVector(DType::kFloat16, vector.data(), 1, &bias);
  return row.append(reinterpret_cast<const char*>(&bias), sizeof(bias));
}

struct Snapshot {
  std::string kind = "base";
  uint64_t number = 1;  // of the directory; also in the id
  uint64_t id = 1;
  uint64_t parent = 0;  // 0: none
  uint64_t since = 0;
  uint64_t watermark = 10;
  uint64_t utc_ns = 0;  // 0: a second per tick
  uint64_t block_bytes = 256;
  std::vector<uint64_t> continues, after;
  std::vector<TestTable> tables;
  std::string dense;  // the file of dense weights; empty: none

  static std::string Ids(const std::vector<uint64_t>& numbers) {
    std::vector<std::string> ids;
    for (const uint64_t number : numbers) ids.push_back(Quoted(IdOf(number)));
    return Array(ids);
  }

  // The members of the manifest that do not depend on the tables.
  Members Root() const {
    return {{"format", Quoted("tf_dynemb.snapshot")},
            {"version", "2"},
            {"kind", Quoted(kind)},
            {"id", Quoted(IdOf(id))},
            {"parent", parent == 0 ? "null" : Quoted(IdOf(parent))},
            {"since", std::to_string(since)},
            {"watermark", std::to_string(watermark)},
            {"watermark_utc_ns", std::to_string(utc_ns == 0 ? watermark * 1000000000 : utc_ns)},
            {"continues", Ids(continues)},
            {"after", Ids(after)},
            {"block_bytes", std::to_string(block_bytes)},
            {"optimizer", "null"}};
  }

  // Writes a file; returns the members of its entry.
  Members File(const std::string& directory, const std::string& file,
               const std::string& bytes) const {
    Write(directory + "/" + file, bytes);
    std::string digits;
    for (size_t at = 0; at < bytes.size(); at += block_bytes) {
      digits += Hex(Crc32c(0, &bytes[at], std::min<size_t>(block_bytes, bytes.size() - at)));
    }
    return {{"file", Quoted(file)},
            {"bytes", std::to_string(bytes.size())},
            {"crc32c", Quoted(digits)}};
  }

  // Writes a column; returns its entry.
  std::string Column(const std::string& directory, const std::string& file,
                     const std::string& bytes) const {
    return Object(File(directory, file, bytes));
  }

  // Writes the columns of a shard; returns its entry.
  std::string Shard(const std::string& directory, const std::string& prefix, const TestTable& table,
                    const TestShard& shard) const {
    const std::string descr = table.key_type == KeyType::kInt32    ? "<i4"
                              : table.key_type == KeyType::kUint64 ? "<u8"
                                                                   : "<i8";
    const size_t key_bytes = SizeOf(table.key_type), n = shard.rows.size();
    std::string keys, vectors, deleted;
    std::vector<float> vector(static_cast<size_t>(table.dim));
    std::string row(vector.size() * SizeOf(table.dtype), '\0');
    for (const auto& [key, number] : shard.rows) {
      keys.append(reinterpret_cast<const char*>(&key), key_bytes);
      for (size_t d = 0; d < vector.size(); ++d) vector[d] = number + static_cast<float>(d);
      if (table.format.empty()) {
        StoreVector(table.dtype, vector.data(), table.dim, row.data());
        vectors += row;
      } else {
        vectors += Quantized(table.format, vector, table.scale);
      }
    }
    for (const uint64_t key : shard.deleted) {
      deleted.append(reinterpret_cast<const char*>(&key), key_bytes);
    }
    const std::string elements = table.format == "int8"           ? "|i1"
                                 : table.format == "int4"         ? "|u1"
                                 : table.dtype == DType::kFloat32 ? "<f4"
                                 : table.dtype == DType::kFloat16 ? "<f2"
                                                                  : "<u2";
    const int64_t width = table.format == "int8"   ? table.dim + 2
                          : table.format == "int4" ? (table.dim + 1) / 2 + 4
                                                   : table.dim;
    Members files = {
        {"keys",
         Column(directory, prefix + ".keys.npy", Npy(descr, std::to_string(n) + ",", keys))},
        {"vectors",
         Column(directory, prefix + ".vectors.npy",
                Npy(elements, std::to_string(n) + ", " + std::to_string(width), vectors))}};
    Members members = {{"rows", std::to_string(n)},
                       {"deleted", std::to_string(shard.deleted.size())},
                       {"index_salt", "0"}};
    if (kind == "delta") {
      files["deleted"] = Column(directory, prefix + ".deleted.npy",
                                Npy(descr, std::to_string(shard.deleted.size()) + ",", deleted));
    } else {
      uint32_t log_slots = 2;
      while ((size_t{1} << log_slots) < 2 * n) ++log_slots;
      std::vector<uint32_t> slots(size_t{1} << log_slots);
      const uint64_t salt = BuildKeyIndex(keys.data(), n, key_bytes, log_slots, slots.data());
      members["index_salt"] = std::to_string(salt);
      const std::string bytes(reinterpret_cast<const char*>(slots.data()), 4 * slots.size());
      files["index"] = Column(directory, prefix + ".index.npy",
                              Npy("<u4", std::to_string(slots.size()) + ",", bytes));
    }
    members["files"] = Object(files);
    return Object(members);
  }

  std::string Name() const {
    char text[80];
    std::snprintf(text, sizeof(text), "%08llu-%s-%s", static_cast<unsigned long long>(number),
                  kind.c_str(), IdOf(id).c_str());
    return text;
  }

  // Writes the snapshot into a folder, and its manifest last; returns its directory.
  std::string Publish(const std::string& folder) const {
    // Renamed when it is complete: a model may be following the folder.
    const std::string published = folder + "/" + Name();
    const std::string directory = folder + "/.partial-" + Name();
    mkdir(folder.c_str(), 0755);
    EXPECT_EQ(mkdir(directory.c_str(), 0755), 0) << directory;
    std::vector<std::string> entries;
    for (size_t t = 0; t < tables.size(); ++t) {
      const TestTable& table = tables[t];
      std::vector<std::string> shards;
      for (size_t r = 0; r < table.shards.size(); ++r) {
        const std::string prefix = "00" + std::to_string(t) + ".r" + std::to_string(r);
        shards.push_back(Shard(directory, prefix, table, table.shards[r]));
      }
      const char* const key_type = table.key_type == KeyType::kInt32    ? "int32"
                                   : table.key_type == KeyType::kUint64 ? "uint64"
                                                                        : "int64";
      const char* const dtype = table.dtype == DType::kFloat32   ? "float32"
                                : table.dtype == DType::kFloat16 ? "float16"
                                                                 : "bfloat16";
      entries.push_back(
          Object({{"name", Quoted(table.name)},
                  {"dimension", std::to_string(table.dim)},
                  {"key_type", Quoted(key_type)},
                  {"dtype", Quoted(dtype)},
                  {"vector_format", table.format.empty() ? "null" : Quoted(table.format)},
                  {"history", table.history == 0 ? "null" : Quoted(IdOf(table.history))},
                  {"shards", Array(shards)}}));
    }
    Members root = Root();
    const bool quantized = std::any_of(
        tables.begin(), tables.end(), [](const TestTable& table) { return !table.format.empty(); });
    if (quantized) root["version"] = "4";
    root["tables"] = Array(entries);
    if (!dense.empty()) {
      Members file = File(directory, "dense.r0.weights.safetensors", dense);
      file.insert({{"part", Quoted("weights")}, {"rank", "0"}});
      root["dense"] = Array({Object(file)});
    }
    Write(directory + "/MANIFEST.json", Sealed(root));
    EXPECT_EQ(std::rename(directory.c_str(), published.c_str()), 0) << published;
    return published;
  }
};

}  // namespace testing_files
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_FILES_H_
