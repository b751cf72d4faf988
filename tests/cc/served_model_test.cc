// Models: descriptors, the states that requests read, deltas and bases that are applied, polling.
#include "cc/serving/served_model.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/served_world.h"
#include "tests/cc/snapshot_files.h"
#include "tests/cc/test_files.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

using namespace testing_files;
using namespace testing_served;

TEST_F(ServedModelTest, OpensTheChain) {
  Of("delta", 2, 2.0f).Publish(tables_);
  Of("delta", 3, 3.0f).Publish(tables_);
  MustOpen();
  EXPECT_EQ(Value(0), 3.0f);
  EXPECT_EQ(Value(1), 3.0f);
  EXPECT_EQ(model_->state()->last.id, IdOf(3));
  EXPECT_EQ(model_->state()->last.watermark, 30u);
  EXPECT_TRUE(model_->follow_error().ok());
}

TEST_F(ServedModelTest, RelativePathsAreThoseOfTheDescriptor) {
  ASSERT_EQ(mkdir((folder_ / "assets").c_str(), 0755), 0);
  Write(folder_ / "assets/served.json", Object({{"format", Quoted("tf_dynemb.served_tables")},
                                                {"version", "1"},
                                                {"tables", Quoted("../tables")}}));
  EXPECT_TRUE(ServedModel::Open(exec_, folder_ / "assets/served.json", "t", &model_).ok());
  Write(folder_ / "served.json", Object({{"format", Quoted("tf_dynemb.served_tables")},
                                         {"version", "1"},
                                         {"tables", Quoted("tables")}}));
  std::shared_ptr<ServedModel> other;
  EXPECT_TRUE(ServedModel::Open(exec_, folder_ / "served.json", "t", &other).ok());
  EXPECT_NE(other, model_);  // another model with the same tables
  EXPECT_EQ(other->state()->last.id, model_->state()->last.id);
}

TEST_F(ServedModelTest, TheTablesOfALoadingHaveOneModel) {
  const std::string descriptor = Describe();
  const auto open = [&](const std::string& table) {
    std::shared_ptr<ServedModel> model;
    const Status status = ServedModel::Open(exec_, descriptor, table, &model);
    EXPECT_TRUE(status.ok()) << status.message();
    return model;
  };
  const std::shared_ptr<ServedModel> first = open("a");
  EXPECT_EQ(open("b"), first);
  EXPECT_EQ(open("a"), first);  // loaded again: nothing is newer
  // The chain grows while the first model is loaded. All of its tables have the older state.
  Of("delta", 2, 2.0f).Publish(tables_);
  EXPECT_EQ(open("c"), first);
  // A model that is loaded then has the newer one.
  const std::shared_ptr<ServedModel> second = open("a");
  EXPECT_NE(second, first);
  EXPECT_EQ(open("b"), second);
  EXPECT_EQ(open("c"), second);
  EXPECT_EQ(open("a"), second);
  EXPECT_EQ(first->state()->last.id, IdOf(1));
  EXPECT_EQ(second->state()->last.id, IdOf(2));
  Of("base", 3, 3.0f).Publish(tables_);
  EXPECT_EQ(open("a")->state()->last.id, IdOf(3));
}

TEST_F(ServedModelTest, AnotherDescriptorIsAnotherModel) {
  MustOpen();
  const std::shared_ptr<ServedModel> first = std::move(model_);
  ASSERT_TRUE(Open({{"follow", Quoted(folder_ / "other")}}).ok());
  EXPECT_NE(model_, first);
}

TEST_F(ServedModelTest, Descriptors) {
  ExpectError(Open({{"format", "1"}}), Code::kDataLoss, "served.json is not the description");
  ExpectError(Open({{"version", "\"1\""}}), Code::kDataLoss, "it has no version");
  ExpectError(Open({{"version", "2"}}), Code::kInvalidArgument, "of version 2");
  ExpectError(Open({{"tables", "3"}}), Code::kDataLoss, "it names no tables");
  ExpectError(Open({{"tables", Quoted(folder_ / "x")}}), Code::kDataLoss,
              "holds no snapshot: it is missing; " + folder_.path() + "/served.json names it");
  for (const char* wrong : {"0", "-1", "\"1\"", "null", "[]"}) {
    ExpectError(Open({{"follow_seconds", wrong}}), Code::kDataLoss, "follow_seconds is wrong");
  }
  for (const char* wrong : {"-1", "1.5", "\"1\"", "null"}) {
    ExpectError(Open({{"verify_bytes", wrong}}), Code::kDataLoss, "verify_bytes is wrong");
  }
  std::shared_ptr<ServedModel> model;
  ExpectError(ServedModel::Open(exec_, folder_ / "none", "t", &model), Code::kDataLoss,
              "none is missing");
  Write(folder_ / "large", std::string(70000, ' '));
  ExpectError(ServedModel::Open(exec_, folder_ / "large", "t", &model), Code::kDataLoss,
              "large has more");
}

TEST_F(ServedModelTest, VerifyBytes) {
  const std::string file = tables_ + "/" + Of("base", 1, 0).Name() + "/000.r0.vectors.npy";
  Flip(file, 200);
  ExpectError(Open({{"verify_bytes", "1000000"}}), Code::kDataLoss, file + " is damaged");
  ExpectError(Open(), Code::kDataLoss, file + " is damaged");
  MustOpen({{"verify_bytes", "0"}});
  EXPECT_EQ(Value(0), -3.0f);
  ExpectError(model_->state()->tables[0]->Error(), Code::kDataLoss, file + " is damaged");
  EXPECT_EQ(Value(1), 1.0f);
}

TEST_F(ServedModelTest, AttachAndDetach) {
  MustOpen();
  size_t number = 0;
  ExpectError(model_->Attach(OptionsOf("none"), &number), Code::kDataLoss, "has no table 'none'");
  ServedOptions options = OptionsOf("user");
  options.dim = 3;
  ExpectError(model_->Attach(options, &number), Code::kDataLoss, "table 'user' on disk");
  const std::shared_ptr<const ServedState> before = model_->state();
  model_->Detach(0);
  uint64_t count = 0;
  Of("delta", 2, 2.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_EQ(model_->state()->tables[0], nullptr);
  EXPECT_EQ(Value(1), 2.0f);
  EXPECT_EQ(ValueIn(*before, 0), 1.0f);
  ASSERT_TRUE(model_->Attach(OptionsOf("user"), &number).ok());
  EXPECT_EQ(number, 0u);  // free numbers are used again
  EXPECT_EQ(Value(0), 2.0f);
}

TEST_F(ServedModelTest, DeltasBecomeVisibleInAllTables) {
  MustOpen();
  uint64_t count = 9;
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_EQ(count, 0u);
  Of("delta", 2, 2.0f).Publish(folder_ / "deltas");
  Of("delta", 3, 3.0f).Publish(folder_ / "deltas");
  ASSERT_TRUE(Apply(folder_ / "deltas", &count).ok());
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(Value(0), 3.0f);
  EXPECT_EQ(Value(1), 3.0f);
  ASSERT_TRUE(Apply(folder_ / "deltas", &count).ok());
  EXPECT_EQ(count, 0u);
  const std::string one = Of("delta", 4, 4.0f).Publish(folder_ / "one");
  ASSERT_TRUE(Apply(one, &count).ok());  // a snapshot itself
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(Value(0), 4.0f);
}

TEST_F(ServedModelTest, GapsAndDamageLeaveTheState) {
  MustOpen();
  uint64_t count = 0;
  const auto refused = [&](const Snapshot& snapshot, const std::string& says) {
    const std::string path = folder_ / "refused";
    snapshot.Publish(path);
    const std::shared_ptr<const ServedState> before = model_->state();
    ExpectError(Apply(path, &count), Code::kDataLoss, says);
    EXPECT_EQ(model_->state(), before) << says;
    RemoveAll(path);
  };
  refused(Of("delta", 3, 3.0f), "a gap before");
  Snapshot late = Of("delta", 2, 2.0f);
  late.since = 11;
  refused(late, "it has the changes since 11, but only changes up to 10");
  Snapshot other = Of("delta", 2, 2.0f);
  other.tables[1].name = "none";
  refused(other, "has table 'none', but its base does not");
  other = Of("delta", 2, 2.0f);
  other.tables[1].dim = 3;
  refused(other, "table 'user' has other types than in its base");
  for (const char* column : {"keys", "vectors", "deleted"}) {
    const std::string directory = Of("delta", 2, 2.0f).Publish(folder_ / "deltas");
    const std::string file = directory + "/001.r0." + column + ".npy";
    Flip(file, 127);
    ExpectError(Apply(folder_ / "deltas", &count), Code::kDataLoss, file + " is damaged");
    unlink(file.c_str());
    ExpectError(Apply(folder_ / "deltas", &count), Code::kDataLoss, file + " is missing");
    RemoveAll(directory);
    EXPECT_EQ(Value(0), 1.0f);  // the first table of the delta was sound
  }
  Of("delta", 2, 2.0f).Publish(folder_ / "deltas");
  EXPECT_TRUE(Apply(folder_ / "deltas", &count).ok());
  EXPECT_EQ(count, 1u);
}

// A snapshot with rows and a dense weight of this number.
Snapshot WithWeight(const std::string& kind, uint64_t number, float value,
                    const std::string& shape = "[1]") {
  Snapshot snapshot = Of(kind, number, value);
  const std::string data(reinterpret_cast<const char*>(&value), sizeof(value));
  snapshot.dense = Safetensors(Object({{"w", ArrayEntry("F32", shape, 0, 4)}}), data);
  return snapshot;
}

float WeightIn(const ServedState& state) {
  float value = 0;
  memcpy(&value, state.dense->Find("w")->data, sizeof(value));
  return value;
}

TEST_F(ServedModelTest, WeightsFollowTheRows) {
  RemoveAll(tables_);
  WithWeight("base", 1, 1.0f).Publish(tables_);
  WithWeight("delta", 2, 2.0f).Publish(tables_);
  Of("delta", 3, 3.0f).Publish(tables_);
  MustOpen({{"dense", "true"}});
  uint64_t count = 0;
  const auto expect = [this](float rows, float weight) {
    EXPECT_EQ(Value(0), rows);
    EXPECT_EQ(WeightIn(*model_->state()), weight);
  };
  expect(3.0f, 2.0f);
  const std::shared_ptr<const ServedState> before = model_->StateOf(7);
  WithWeight("delta", 4, 4.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  expect(4.0f, 4.0f);
  EXPECT_EQ(WeightIn(*model_->StateOf(7)), 2.0f);
  // A base without weights leaves them.
  Of("base", 5, 5.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  expect(5.0f, 4.0f);
  ASSERT_NE(model_->state()->dense_source, nullptr);
  EXPECT_EQ(model_->state()->dense_source->watermark, 40u);
  // Of a base and what follows it, only the last weights are read.
  const std::string unread = WithWeight("base", 6, 6.0f, "[1, 1]").Publish(tables_);
  Flip(unread + "/dense.r0.weights.safetensors", 20);
  WithWeight("delta", 7, 7.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  expect(7.0f, 7.0f);
}

TEST_F(ServedModelTest, WeightsOfAnotherModelLeaveTheState) {
  RemoveAll(tables_);
  WithWeight("base", 1, 1.0f).Publish(tables_);
  MustOpen({{"dense", "true"}});
  const std::shared_ptr<const ServedState> before = model_->state();
  uint64_t count = 9;
  for (const char* kind : {"delta", "base"}) {
    const std::string path = folder_ / kind;
    const std::string directory = WithWeight(kind, 2, 2.0f, "[1, 1]").Publish(path);
    ExpectError(Apply(path, &count), Code::kFailedPrecondition,
                directory +
                    " has other dense weights than the model that is served: 'w' is F32 [1, 1] "
                    "instead of F32 [1]. Export");
    EXPECT_EQ(model_->state(), before);
    EXPECT_EQ(count, 0u);
    const std::string damaged = WithWeight(kind, 2, 2.0f).Publish(folder_ / "damaged");
    Flip(damaged + "/dense.r0.weights.safetensors", 20);
    ExpectError(Apply(folder_ / "damaged", &count), Code::kDataLoss, damaged);
    EXPECT_EQ(model_->state(), before);
    RemoveAll(folder_ / "damaged");
  }
  WithWeight("delta", 2, 2.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_EQ(WeightIn(*model_->state()), 2.0f);
}

TEST_F(ServedModelTest, ModelsThatDoNotReadWeights) {
  RemoveAll(tables_);
  const std::string directory = WithWeight("base", 1, 1.0f).Publish(tables_);
  unlink((directory + "/dense.r0.weights.safetensors").c_str());
  MustOpen();
  EXPECT_EQ(model_->state()->dense, nullptr);
  ExpectError(Open({{"dense", "true"}}), Code::kDataLoss, "weights.safetensors is missing");
  ExpectError(Open({{"dense", "1"}}), Code::kDataLoss, "dense is wrong");
  ExpectError(Open({{"unrelated", "0"}}), Code::kDataLoss, "unrelated is wrong");
  RemoveAll(tables_);
  Of("base", 1, 1.0f).Publish(tables_);
  ExpectError(Open({{"dense", "true"}}), Code::kFailedPrecondition,
              tables_ + " has no dense weights, which the model reads");
}

TEST_F(ServedModelTest, ARequestReadsOneState) {
  MustOpen();
  uint64_t count = 0;
  EXPECT_EQ(ValueIn(*model_->StateOf(5), 0), 1.0f);
  Of("delta", 2, 2.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  EXPECT_EQ(ValueIn(*model_->StateOf(6), 0), 2.0f);
  Of("delta", 3, 3.0f).Publish(tables_);
  ASSERT_TRUE(Apply(tables_, &count).ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ValueIn(*model_->StateOf(5), 1), 1.0f);
    EXPECT_EQ(ValueIn(*model_->StateOf(6), 1), 2.0f);
    EXPECT_EQ(ValueIn(*model_->StateOf(7), 1), 3.0f);
    EXPECT_EQ(ValueIn(*model_->StateOf(0), 1), 3.0f);  // calls on their own read the newest
  }
}

// Requests in two threads while deltas are applied: a request reads one number in both tables, and
// a later request never an older one.
TEST_F(ServedModelTest, RequestsWhileDeltasAreApplied) {
  MustOpen();
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::atomic<uint64_t> steps{0}, asked[2];
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    asked[t] = 0;
    threads.emplace_back([&, t] {
      for (float last = 0; !stop; ++asked[t]) {
        const uint64_t step = ++steps;
        const float first = ValueIn(*model_->StateOf(step), 0);
        std::this_thread::yield();
        const float second = ValueIn(*model_->StateOf(step), 1);
        wrong += first != second || first < last;
        last = first;
      }
    });
  }
  const int deltas = kSanitized ? 20 : 50;  // fewer than the states that a model remembers
  for (int step = 2; step < 2 + deltas; ++step) {
    uint64_t count = 0;
    const auto number = static_cast<uint64_t>(step);
    const std::string delta = Of("delta", number, static_cast<float>(step)).Publish(tables_);
    const Status status = Apply(delta, &count);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(count, 1u);
  }
  while (asked[0] < 5 || asked[1] < 5) std::this_thread::yield();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(Value(1), static_cast<float>(1 + deltas));
}

TEST_F(ServedModelTest, Follow) {
  const std::string path = folder_ / "published";
  MustOpen({{"follow", Quoted(path)}, {"follow_seconds", "0.001"}});
  // Its error is the error of the last poll.
  WaitFor([this] { return !model_->follow_error().ok(); });
  ExpectError(model_->follow_error(), Code::kDataLoss, path + " holds no snapshot");
  Of("delta", 2, 2.0f).Publish(path);
  WaitFor([this] { return Value(0) == 2.0f && Value(1) == 2.0f; });
  WaitFor([this] { return model_->follow_error().ok(); });
  Of("base", 3, 3.0f).Publish(path);
  WaitFor([this] { return Value(0) == 3.0f && Value(1) == 3.0f; });
  // A model that is polling ends with its last user.
  const std::weak_ptr<ServedModel> weak = model_;
  model_.reset();
  EXPECT_TRUE(weak.expired());
}

TEST(RecentSteps, RemembersTheLastSteps) {
  RecentSteps steps;
  EXPECT_FALSE(steps.Has(1));
  for (uint64_t step = 1; step <= 4000; ++step) {
    steps.Add(step);
    steps.Add(step);
  }
  // 4,000 steps in 16,384 places: hardly any is forgotten.
  int forgotten = 0;
  for (uint64_t step = 1; step <= 4000; ++step) forgotten += !steps.Has(step);
  EXPECT_LT(forgotten, 40);
  EXPECT_FALSE(steps.Has(4001));
  for (uint64_t step = 4001; step <= 100000; ++step) steps.Add(step);
  int remembered = 0;
  for (uint64_t step = 1; step <= 4000; ++step) remembered += steps.Has(step);
  EXPECT_EQ(remembered, 0);
  EXPECT_TRUE(steps.Has(100000));
}

}  // namespace
}  // namespace dynemb
