// A served table with the rows of snapshots, and a model of them.
#ifndef DYNEMB_TESTS_CC_SERVED_ROWS_H_
#define DYNEMB_TESTS_CC_SERVED_ROWS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/io/manifest.h"
#include "cc/serving/served_table.h"
#include "cc/serving/table_rows.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace testing_served_rows {

using namespace testing_files;
using Rows = std::shared_ptr<const TableRows>;

constexpr uint64_t kKeys = 400;  // the keys of the model, spread over the type's range

inline uint64_t KeyAt(KeyType type, uint64_t i) {
  const uint64_t key = i < 8 ? ~uint64_t{0} - i : i * 0x9E3779B97F4A7C15u;
  return type == KeyType::kInt32 ? static_cast<uint32_t>(i < 8 ? ~i : i * 0x9E3779B9u) : key;
}

inline ServedOptions OptionsOf(const TestTable& table) {
  ServedOptions options;
  options.name = table.name;
  options.key_type = table.key_type;
  options.dtype = table.dtype;
  options.dim = table.dim;
  options.seed = 7;
  options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
  return options;
}

// A table with the rows of snapshots, and a model of them: the number of each key.
class World {
 public:
  // `formats`: those of the snapshots, in turns. `options`: instead of OptionsOf(shape).
  explicit World(TestTable shape, bool verify = true, std::vector<std::string> formats = {},
                 const ServedOptions* options = nullptr)
      : shape_(std::move(shape)), verify_(verify), formats_(std::move(formats)) {
    const Status status =
        ServedTable::Create(options != nullptr ? *options : OptionsOf(shape_), &options_);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  // Publishes changes as a base, the first time, or as a delta, and applies them.
  Status Apply(const std::map<uint64_t, float>& rows, const std::vector<uint64_t>& deleted,
               size_t shards = 1) {
    Snapshot snapshot;
    snapshot.kind = rows_ == nullptr ? "base" : "delta";
    snapshot.number = snapshot.id = ++number_;
    TestTable table = shape_;
    table.shards.resize(shards);
    for (const auto& [key, number] : rows) table.shards[key % shards].rows[key] = number;
    for (const uint64_t key : deleted) table.shards[key % shards].deleted.push_back(key);
    if (!formats_.empty()) table.format = formats_[number_ % formats_.size()];
    snapshot.tables.push_back(table);
    directory_ = snapshot.Publish(folder_.path());
    for (const auto& [key, number] : rows) model_[key] = number;
    for (const uint64_t key : deleted) model_.erase(key);
    return Open();
  }

  // Applies a base with rows of the first kRowsWithSlots keys, whose index has these slots and the
  // right checksums.
  static constexpr uint64_t kRowsWithSlots = 20;
  Status ApplyWithSlots(const std::vector<uint32_t>& slots) {
    Snapshot snapshot;
    TestTable table = shape_;
    table.shards.resize(1);
    for (uint64_t i = 0; i < kRowsWithSlots; ++i) {
      table.shards[0].rows[KeyAt(shape_.key_type, i)] = 1.0f;
    }
    snapshot.tables.push_back(table);
    directory_ = snapshot.Publish(folder_.path());
    const std::string manifest = directory_ + "/MANIFEST.json", file = "000.r0.index.npy";
    const std::string index(reinterpret_cast<const char*>(slots.data()), 4 * slots.size());
    const std::string before = Read(manifest);
    const std::string entry =
        snapshot.Column(directory_, file, Npy("<u4", std::to_string(slots.size()) + ",", index));
    const size_t at = before.find("{\"bytes\":", before.find("\"index\":"));
    std::string text = before;
    text.replace(at, before.find('}', at) + 1 - at, entry);
    const size_t crc = text.find("\"crc32c\":\"", text.find("block_bytes"));
    text.erase(crc, 20);  // with the comma
    const std::string sum = Hex(Crc32c(0, text.data(), text.size()));
    text.insert(crc, "\"crc32c\":\"" + sum + "\",");
    Write(manifest, text);
    return Open();
  }

  // Reads the last snapshot, and gives its rows to the table.
  Status Open() {
    Manifest manifest;
    DYNEMB_RETURN_IF_ERROR(ReadManifest(directory_, &manifest));
    Rows next;
    if (manifest.is_base) {
      DYNEMB_RETURN_IF_ERROR(
          TableRows::OfBase(exec_, manifest, manifest.tables[0], verify_, &next));
    } else {
      DYNEMB_RETURN_IF_ERROR(rows_->WithDelta(exec_, manifest, manifest.tables[0], &next));
    }
    rows_ = std::move(next);
    const std::shared_ptr<ServedTable> before = table_;
    return options_->WithRows(rows_, before.get(), &table_);
  }

  // Compares every call that reads with the model, for all keys in random order, some twice.
  void ExpectModel(std::mt19937_64* random) {
    const size_t n = kKeys + 37, bytes = table_->layout().vector_bytes();
    const auto dim = static_cast<size_t>(shape_.dim);
    const bool narrow = shape_.key_type == KeyType::kInt32;
    std::vector<uint64_t> asked(n);
    std::vector<uint32_t> asked32(n);
    for (size_t i = 0; i < n; ++i) {
      asked[i] = KeyAt(shape_.key_type, i < kKeys ? i : (*random)() % kKeys);
    }
    std::shuffle(asked.begin(), asked.end(), *random);
    for (size_t i = 0; i < n; ++i) asked32[i] = static_cast<uint32_t>(asked[i]);
    const KeySpan keys(shape_.key_type,
                       narrow ? static_cast<const void*>(asked32.data()) : asked.data(), n);
    std::vector<char> vectors(n * bytes), expected(bytes);
    std::vector<RowId> rows(n), found_rows(n);
    std::vector<float> floats(n * dim), row(dim);
    const std::unique_ptr<bool[]> contains(new bool[n]), found(new bool[n]);
    table_->Lookup(exec_, keys, 1, nullptr, vectors.data(), rows.data());
    table_->Find(exec_, keys, 1, found_rows.data());
    table_->Contains(exec_, keys, contains.get());
    table_->ReadRows(exec_, keys, floats.data(), nullptr, found.get());
    ASSERT_TRUE(table_->Error().ok()) << table_->Error().message();
    ASSERT_EQ(table_->size(), model_.size());
    for (size_t i = 0; i < n; ++i) {
      const auto it = model_.find(asked[i]);
      const bool has = it != model_.end();
      ASSERT_EQ(contains[i], has) << asked[i];
      ASSERT_EQ(found[i], has);
      ASSERT_EQ(rows[i], has ? 0 : kNoRow);
      ASSERT_EQ(found_rows[i], rows[i]);
      if (has) {
        for (size_t d = 0; d < dim; ++d) row[d] = it->second + static_cast<float>(d);
        StoreVector(shape_.dtype, row.data(), shape_.dim, expected.data());
        LoadVector(shape_.dtype, expected.data(), shape_.dim, row.data());
        ASSERT_EQ(std::memcmp(row.data(), &floats[i * dim], dim * sizeof(float)), 0);
      } else {
        table_->AbsentVector(asked[i], expected.data());
        ASSERT_EQ(floats[i * dim], 0.0f);
      }
      ASSERT_EQ(std::memcmp(expected.data(), &vectors[i * bytes], bytes), 0) << asked[i];
    }
  }

  const Folder folder_;
  TestTable shape_;
  bool verify_;
  std::vector<std::string> formats_;
  std::string directory_;
  Rows rows_;
  std::shared_ptr<ServedTable> options_, table_;
  std::map<uint64_t, float> model_;
  SerialExec exec_;
  uint64_t number_ = 0;
};

inline TestTable Shape(KeyType key_type, DType dtype, int64_t dim) {
  TestTable shape = RowsOf("user", dim, {});
  shape.key_type = key_type;
  shape.dtype = dtype;
  return shape;
}

inline std::map<uint64_t, float> RandomRows(KeyType type, size_t n, std::mt19937_64* random,
                                            uint64_t most = 1000) {
  std::map<uint64_t, float> rows;
  for (size_t i = 0; i < n; ++i) {
    // Integers that float16 has, too.
    rows[KeyAt(type, (*random)() % kKeys)] = static_cast<float>((*random)() % most);
  }
  return rows;
}

}  // namespace testing_served_rows
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SERVED_ROWS_H_
