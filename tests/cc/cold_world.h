// FileRows and a model of it, for random calls: what ColdRows (cold_rows.h) promises.
#ifndef DYNEMB_TESTS_CC_COLD_WORLD_H_
#define DYNEMB_TESTS_CC_COLD_WORLD_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/file/file_rows.h"
#include "cc/file/segment.h"
#include "tests/cc/faulty_file_system.h"
#include "tests/cc/test_files.h"

namespace dynemb {

struct ModelRow {
  std::string content;
  Stamp updated = 0;
  Score score = 0;
  Tick tick = 0;

  bool operator==(const ModelRow& other) const {
    return content == other.content && updated == other.updated && score == other.score &&
           tick == other.tick;
  }
};
using ModelRows = std::map<uint64_t, ModelRow>;

class ColdWorld {
 public:
  // Rows of `dim` floats; segments of this number of blocks.
  ColdWorld(int64_t dim, size_t blocks, uint64_t seed = 1,
            BlockReader::Options::Kind kind = BlockReader::Options::Kind::kThreads)
      : random(seed) {
    options.key_type = KeyType::kInt64;
    options.dtype = DType::kFloat32;
    options.dim = dim;
    layout = RowLayout(8, DType::kFloat32, dim, 0);
    file_options.folder = folder / "files";
    file_options.segment_bytes = blocks * kBlockBytes;
    file_options.files = &files;
    file_options.reader.kind = kind;
    file_options.reader.depth = 2;
    const Status made = FileRows::Create(file_options, options, &rows);
    EXPECT_TRUE(made.ok()) << made.message();
  }

  ModelRow RandomRow() {
    ModelRow row;
    std::vector<float> values(static_cast<size_t>(layout.dim + layout.state_width));
    for (float& value : values) value = static_cast<float>(random() % 1000);
    row.content.assign(reinterpret_cast<const char*>(values.data()), values.size() * 4);
    row.updated = static_cast<Stamp>(random() % 1000 + 1);
    row.score = static_cast<Score>(random() % 1000);
    row.tick = row.updated + 7;
    return row;
  }

  Status Add(const ModelRows& added) {
    const Status status = rows->Reserve(added.size());
    if (!status.ok()) return status;
    std::vector<char> bytes(layout.stride);
    for (const auto& [key, row] : added) {
      memcpy(bytes.data() + layout.vector_offset, row.content.data(), row.content.size());
      rows->Add(key, bytes.data(), {row.updated, row.score}, row.tick);
    }
    rows->Settle();
    model.insert(added.begin(), added.end());
    return Status();
  }

  ModelRows NewRows(size_t n, uint64_t keys) {
    ModelRows added;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t key = random() % keys;
      if (model.count(key) == 0) added[key] = RandomRow();
    }
    return added;
  }

  std::vector<uint64_t> SomeKeys(size_t n, uint64_t keys) {
    std::map<uint64_t, bool> chosen;
    for (size_t i = 0; i < n; ++i) chosen[random() % keys] = true;
    std::vector<uint64_t> list;
    for (const auto& [key, is_chosen] : chosen) list.push_back(key);
    std::shuffle(list.begin(), list.end(), random);
    return list;
  }

  // Finds keys; what is found must be right. `places`: of those that were found.
  Status Find(const std::vector<uint64_t>& keys, std::map<uint64_t, ColdPlace>* places) {
    const Status status = rows->Find(keys.data(), keys.size(), [&](size_t i, const ColdRow& row) {
      EXPECT_EQ(row.key, keys[i]);
      const auto at = model.find(keys[i]);
      ASSERT_NE(at, model.end()) << keys[i];
      EXPECT_TRUE(RowOf(row, layout.content_bytes()) == at->second) << keys[i];
      EXPECT_TRUE(places->insert({keys[i], row.place}).second) << keys[i] << " twice";
    });
    if (!status.ok()) return status;
    for (const uint64_t key : keys) EXPECT_EQ(places->count(key), model.count(key)) << key;
    return Status();
  }

  Status Remove(const std::vector<uint64_t>& keys, bool wipe = false) {
    std::map<uint64_t, ColdPlace> places;
    const Status status = Find(keys, &places);
    if (!status.ok()) return status;
    std::vector<uint64_t> found;
    std::vector<ColdPlace> at;
    for (const auto& [key, place] : places) {
      found.push_back(key);
      at.push_back(place);
      model.erase(key);
    }
    rows->Remove(found.data(), at.data(), found.size());
    if (!wipe) return Status();
    rows->Condemn(at.data(), at.size());
    return Rewrite();
  }

  // Rewrites condemned files, as a table does.
  Status Rewrite() {
    bool any = false;
    DYNEMB_RETURN_IF_ERROR(rows->PrepareRewrite(&any));
    std::unique_ptr<ColdRows::Compaction> step;
    while (any) {
      DYNEMB_RETURN_IF_ERROR(rows->PlanCompaction(&step));
      if (step == nullptr || !step->rewrites) break;
      const Status read = step->Read();
      DYNEMB_RETURN_IF_ERROR(rows->Compact(step.get(), nullptr));
      DYNEMB_RETURN_IF_ERROR(read);
    }
    DYNEMB_RETURN_IF_ERROR(rows->PrepareRewrite(&any));
    return any ? Internal("a file is still condemned") : Status();
  }

  // Moves rows until no space has to be given back.
  Status Compact(const ContentChange* change = nullptr) {
    std::unique_ptr<ColdRows::Compaction> step;
    for (;;) {
      DYNEMB_RETURN_IF_ERROR(rows->PlanCompaction(&step));
      if (step == nullptr) return Status();
      const Status read = step->Read();
      DYNEMB_RETURN_IF_ERROR(rows->Compact(step.get(), change));
      DYNEMB_RETURN_IF_ERROR(read);
    }
  }

  // A change that applies to each row once: RandomRow has numbers below 1000.
  class Lift final : public ContentChange {
   public:
    explicit Lift(const RowLayout& layout)
        : floats_(static_cast<size_t>(layout.dim + layout.state_width)) {}
    bool Applies(const char* content) const override {
      return *reinterpret_cast<const float*>(content) < 1000;
    }
    void Apply(uint64_t key, char* content) const override {
      auto* const values = reinterpret_cast<float*>(content);
      for (size_t i = 0; i < floats_; ++i) values[i] += static_cast<float>(1000 + key % 7);
    }

   private:
    const size_t floats_;
  };
  void LiftModel() {
    const Lift lift(layout);
    for (auto& [key, row] : model) {
      if (lift.Applies(row.content.data())) lift.Apply(key, row.content.data());
    }
  }

  static ModelRow RowOf(const ColdRow& row, size_t content_bytes) {
    return {std::string(row.content, content_bytes), row.times.updated, row.times.score,
            row.updated};
  }

  // Everything is as the model says.
  void ExpectEqual() {
    rows->CheckInvariants();
    ASSERT_EQ(rows->size(), model.size());
    std::vector<uint64_t> keys;
    for (const auto& [key, row] : model) keys.push_back(key);
    std::map<uint64_t, ColdPlace> places;
    const Status status = Find(keys, &places);
    ASSERT_TRUE(status.ok()) << status.message();
    const auto any = [](const RowTimes&) { return true; };
    const ColdRows::Scanned all = rows->Scan(0, ~uint64_t{0}, ~uint64_t{0}, any);
    ASSERT_EQ(all.places.size(), model.size());
    EXPECT_EQ(all.next, ColdRows::kEnd);
  }

  testing_files::Folder folder;
  FaultyFileSystem files;
  FileOptions file_options;
  TableOptions options;
  RowLayout layout;
  std::mt19937_64 random;
  std::unique_ptr<ColdRows> rows;
  ModelRows model;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_COLD_WORLD_H_
