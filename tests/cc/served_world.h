// A served model of two tables, and the snapshots that are published for it.
#ifndef DYNEMB_TESTS_CC_SERVED_WORLD_H_
#define DYNEMB_TESTS_CC_SERVED_WORLD_H_

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/serving/served_model.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"

namespace dynemb {
namespace testing_served {

using namespace testing_files;

constexpr int64_t kDim = 2;
inline const std::vector<std::string> kTables = {"item", "user"};

// A snapshot in which each of the keys [0, 50) of both tables has this number.
inline Snapshot Of(const std::string& kind, uint64_t number, float value) {
  Snapshot snapshot;
  snapshot.kind = kind;
  snapshot.number = snapshot.id = number;
  snapshot.watermark = 10 * number;
  if (kind == "delta") {
    snapshot.parent = number - 1;
    snapshot.since = 10 * (number - 1);
  }
  for (const std::string& name : kTables) {
    std::map<uint64_t, float> rows;
    for (uint64_t key = 0; key < 50; ++key) rows[key] = value;
    snapshot.tables.push_back(RowsOf(name, kDim, rows));
  }
  return snapshot;
}

inline void WaitFor(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_TRUE(condition());
}

class ServedModelTest : public ::testing::Test {
 protected:
  ServedModelTest() : tables_(folder_ / "tables") { Of("base", 1, 1.0f).Publish(tables_); }

  // Writes a descriptor; the members are added to those that it needs.
  std::string Describe(Members members = {}) {
    members.insert({"format", Quoted("tf_dynemb.served_tables")});
    members.insert({"version", "1"});
    members.insert({"tables", Quoted(tables_)});
    const std::string file = folder_ / "served.json";
    Write(file, Object(members));
    return file;
  }
  Status Open(const Members& members = {}) {
    return ServedModel::Open(exec_, Describe(members), kTables[0], &model_);
  }
  // Opens the model, and attaches its tables.
  void MustOpen(const Members& members = {}) {
    const Status status = Open(members);
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t t = 0; t < 2; ++t) {
      size_t number = 9;
      ASSERT_TRUE(model_->Attach(OptionsOf(kTables[t]), &number).ok());
      ASSERT_EQ(number, t);
    }
  }
  static ServedOptions OptionsOf(const std::string& name) {
    ServedOptions options;
    options.name = name;
    options.dim = kDim;
    options.initializer = {{InitKind::kConstant, -1.0f, 0.0f}};
    return options;
  }
  Status Apply(const std::string& path, uint64_t* count) {
    return model_->Apply(exec_, path, count);
  }

  // The number that all keys of a table have in a state; -2 if they differ.
  static float ValueIn(const ServedState& state, size_t number) {
    SerialExec exec;
    int64_t keys[50];
    float vectors[50 * kDim];
    RowId rows[50];
    for (int i = 0; i < 50; ++i) keys[i] = i;
    state.tables[number]->Lookup(exec, {keys, 50}, 1, nullptr, vectors, rows);
    if (!state.tables[number]->Error().ok()) return -3;
    for (int i = 0; i < 50; ++i) {
      if (vectors[i * kDim] != vectors[0]) return -2;
    }
    return vectors[0];
  }
  float Value(size_t number = 0) { return ValueIn(*model_->state(), number); }

  void ExpectError(const Status& status, Code code, const std::string& says) {
    EXPECT_EQ(status.code(), code) << says;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message() << "\n" << says;
  }

  const Folder folder_;
  const std::string tables_;
  SerialExec exec_;
  std::shared_ptr<ServedModel> model_;
};

}  // namespace testing_served
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SERVED_WORLD_H_
