// Served tables: bases and deltas of every type and number of shards, compared with a model; rows
// whose checksums are right and whose index contradicts them.
#include "cc/serving/served_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc/serving/table_rows.h"
#include "tests/cc/served_rows.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

using namespace testing_served_rows;

TEST(ServedTable, RandomDeltasMatchTheModel) {
  std::mt19937_64 random(1);
  for (const KeyType key_type : {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      const bool verify = dtype != DType::kFloat16;
      World world(Shape(key_type, dtype, 1 + static_cast<int64_t>(random() % 9)), verify);
      const size_t rows = key_type == KeyType::kUint64 ? 0 : 150;
      ASSERT_TRUE(world.Apply(RandomRows(key_type, rows, &random), {}, 1 + random() % 4).ok());
      world.ExpectModel(&random);
      for (int step = 0; step < (kSanitized ? 6 : 25); ++step) {
        auto changed = RandomRows(key_type, random() % (step % 5 == 0 ? 100 : 5), &random);
        std::map<uint64_t, float> deleted = RandomRows(key_type, random() % 20, &random);
        std::vector<uint64_t> keys;  // some of which have no row
        for (const auto& [key, number] : deleted) {
          if (changed.count(key) == 0) keys.push_back(key);
        }
        const Status status = world.Apply(changed, keys, 1 + random() % 3);
        ASSERT_TRUE(status.ok()) << status.message();
        world.ExpectModel(&random);
      }
    }
  }
}

// Bases and deltas of different formats; levels of one format, and of several, are merged.
TEST(ServedTable, VectorFormats) {
  std::mt19937_64 random(11);
  const std::vector<std::vector<std::string>> turns = {
      {"int8"}, {"int4"}, {"int8", ""}, {"", "int4", "int8"}, {"int4", "int8", "int8", ""}};
  for (const auto& formats : turns) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      World world(Shape(KeyType::kInt64, dtype, 1 + static_cast<int64_t>(random() % 15)), true,
                  formats);
      ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 150, &random, 100), {}, 2).ok());
      world.ExpectModel(&random);
      for (int step = 0; step < (kSanitized ? 6 : 15); ++step) {
        const size_t rows = random() % (step % 5 == 0 ? 100 : 5);
        const auto changed = RandomRows(KeyType::kInt64, rows, &random, 100);
        const uint64_t gone = KeyAt(KeyType::kInt64, random() % kKeys);
        const std::vector<uint64_t> deleted(changed.count(gone) == 0 ? 1 : 0, gone);
        const Status status = world.Apply(changed, deleted, 1 + random() % 3);
        ASSERT_TRUE(status.ok()) << status.message();
        world.ExpectModel(&random);
      }
    }
  }
}

// A key passes through the first sources with others, and through the rest alone (FindRows).
TEST(ServedTable, ManyShards) {
  std::mt19937_64 random(3);
  World world(Shape(KeyType::kInt64, DType::kFloat32, 3));
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 300, &random), {}, 40).ok());
  world.ExpectModel(&random);
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 20, &random), {7}, 2).ok());
  world.ExpectModel(&random);
}

// States share what did not change, and older ones stay as they were.
TEST(ServedTable, OlderStatesStay) {
  World world(Shape(KeyType::kInt64, DType::kFloat32, 2));
  ASSERT_TRUE(world.Apply({{1, 1.0f}, {2, 2.0f}}, {}).ok());
  const std::shared_ptr<ServedTable> before = world.table_;
  ASSERT_TRUE(world.Apply({{1, 10.0f}, {3, 30.0f}}, {2}).ok());
  const int64_t keys[] = {1, 2, 3};
  float vectors[6];
  bool found[3];
  before->ReadRows(world.exec_, {keys, 3}, vectors, nullptr, found);
  EXPECT_TRUE(found[0] && found[1] && !found[2]);
  EXPECT_EQ(vectors[0], 1.0f);
  world.table_->ReadRows(world.exec_, {keys, 3}, vectors, nullptr, found);
  EXPECT_TRUE(found[0] && !found[1] && found[2]);
  EXPECT_EQ(vectors[0], 10.0f);
  EXPECT_EQ(before->size(), 2u);
  EXPECT_EQ(world.table_->size(), 2u);
}

// Levels are merged: with many deltas, their memory stays within a factor of the changes' memory.
TEST(ServedTable, MemoryOfManyDeltas) {
  World world(Shape(KeyType::kInt64, DType::kFloat32, 4));
  ASSERT_TRUE(world.Apply({{0, 1.0f}}, {}).ok());
  for (uint64_t step = 1; step <= 200; ++step) {
    ASSERT_TRUE(world.Apply({{step % 20, 2.0f}}, {1000 + step}).ok());
  }
  // 20 keys, each in at most a few levels; the deleted keys that no level has are not kept.
  EXPECT_LT(world.rows_->level_bytes(), 5000u);
  EXPECT_EQ(world.rows_->size(), 20u);
}

TEST(ServedTable, VectorsOfAbsentKeys) {
  TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 3);
  World world(shape);
  ASSERT_TRUE(world.Apply({{1, 1.0f}}, {}).ok());
  const int64_t keys[] = {1, 2};
  const auto lookup = [&](const ServedOptions& options, const float* given = nullptr) {
    std::shared_ptr<ServedTable> made, table;
    EXPECT_TRUE(ServedTable::Create(options, &made).ok());
    EXPECT_TRUE(made->WithRows(world.rows_, nullptr, &table).ok());
    std::vector<float> vectors(6);
    RowId rows[2];
    table->Lookup(world.exec_, {keys, 2}, 1, given, vectors.data(), rows);
    EXPECT_EQ(vectors[0], 1.0f);
    EXPECT_EQ(rows[0], 0u);
    const TableStats stats = table->stats();
    EXPECT_EQ(stats.hits, 1u);
    EXPECT_EQ(stats.misses, 1u);
    vectors.push_back(static_cast<float>(rows[1] == kSkippedRow));
    return std::vector<float>(vectors.begin() + 3, vectors.end());
  };
  ServedOptions options = OptionsOf(shape);
  options.default_vector = {7, 8, 9};
  EXPECT_EQ(lookup(options), (std::vector<float>{7, 8, 9, 0}));
  const float given[] = {4, 5, 6};
  EXPECT_EQ(lookup(options, given), (std::vector<float>{4, 5, 6, 0}));
  options.default_vector.clear();
  options.absent = Unadmitted::kZeros;
  EXPECT_EQ(lookup(options), (std::vector<float>{0, 0, 0, 0}));
  options.absent = Unadmitted::kSkip;
  EXPECT_EQ(lookup(options), (std::vector<float>{0, 0, 0, 1}));
}

TEST(ServedTable, OptionsThatDoNotFit) {
  World world(Shape(KeyType::kInt64, DType::kFloat32, 3));
  ASSERT_TRUE(world.Apply({{1, 1.0f}}, {}).ok());
  std::shared_ptr<ServedTable> made, table;
  for (const TestTable& other :
       {Shape(KeyType::kInt32, DType::kFloat32, 3), Shape(KeyType::kUint64, DType::kFloat32, 3),
        Shape(KeyType::kInt64, DType::kFloat16, 3), Shape(KeyType::kInt64, DType::kFloat32, 4)}) {
    ASSERT_TRUE(ServedTable::Create(OptionsOf(other), &made).ok());
    EXPECT_EQ(made->WithRows(world.rows_, nullptr, &table).code(), Code::kDataLoss);
  }
  ServedOptions options = OptionsOf(world.shape_);
  options.default_vector = {1, 2};
  EXPECT_EQ(ServedTable::Create(options, &made).code(), Code::kInvalidArgument);
}

TEST(ServedTable, ChangesAreRefused) {
  World world(Shape(KeyType::kInt64, DType::kFloat32, 2));
  ASSERT_TRUE(world.Apply({{1, 1.0f}}, {}).ok());
  Table& table = *world.table_;
  const int64_t key = 1;
  const float vector[] = {5, 5};
  EXPECT_TRUE(table.read_only());
  EXPECT_EQ(table.Upsert(world.exec_, {&key, 1}, vector, 2).code(), Code::kFailedPrecondition);
  EXPECT_EQ(table.Accumulate(world.exec_, {&key, 1}, vector, 2).code(), Code::kFailedPrecondition);
  EXPECT_EQ(table.Clear(world.exec_, 2).code(), Code::kFailedPrecondition);
  EXPECT_EQ(table.Erase(world.exec_, {&key, 1}, 2, Removal::kErase), 0u);
  EXPECT_EQ(table.size(), 1u);
  std::mt19937_64 random(3);
  world.ExpectModel(&random);
}

TEST(ServedTable, IndexesThatNoWriterMakes) {
  const auto lookup = [](const std::vector<uint32_t>& slots, bool verify) {
    World world(Shape(KeyType::kInt64, DType::kFloat32, 2), verify);
    DYNEMB_RETURN_IF_ERROR(world.ApplyWithSlots(slots));
    std::vector<uint64_t> keys(kKeys);
    for (uint64_t i = 0; i < kKeys; ++i) keys[i] = KeyAt(KeyType::kInt64, i);
    std::vector<RowId> rows(kKeys);
    world.table_->Find(world.exec_, {keys.data(), kKeys}, 1, rows.data());
    return world.table_->Error();
  };
  for (const bool verify : {false, true}) {
    // Positions beyond the keys; no empty slot, so that a search would not end.
    for (const uint32_t entry :
         {uint32_t{World::kRowsWithSlots + 1}, uint32_t{0xFFFFFFFF}, uint32_t{3}}) {
      const Status status = lookup(std::vector<uint32_t>(64, entry), verify);
      EXPECT_EQ(status.code(), Code::kDataLoss) << entry;
      EXPECT_EQ(status.message(), "the index of table 'user' is damaged");
    }
    EXPECT_TRUE(lookup(std::vector<uint32_t>(64, 0), verify).ok());
  }
}

}  // namespace
}  // namespace dynemb
