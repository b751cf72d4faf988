// Served tables on simulated devices: the suite (served_suite.h); memory is shared, bounded and
// given back; damaged files; the work of a call; states of a model.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/serving_device/device_served_lookups.h"
#include "tests/cc/served_suite.h"
#include "tests/cc/served_world.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

using namespace testing_served_rows;

template <class DeviceT>
struct Simulated {
  using Arrays = HostArrays;
  static std::string Missing() { return ""; }
  static Exec& exec() {
    static ThreadsExec exec(3);
    return exec;
  }
  static ServedPlace* place() {
    static DeviceT device;
    static DeviceServedPlace<DeviceT> place(&device);
    return &place;
  }
};
using AllDevices = ::testing::Types<Simulated<ThreadsDevice>, Simulated<NarrowTeamsDevice>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Simulated, DeviceServedSuite, AllDevices);

struct Devices {
  ThreadsDevice device;
  DeviceServedPlace<ThreadsDevice> place{&device};
};

// A place of calls on host arrays, for a table on any of them.
struct OnHost {
  using Arrays = HostArrays;
  static Exec& exec() { return Simulated<ThreadsDevice>::exec(); }
};

// A delta brings its own rows to the device, not those of the base again; older states stay.
TEST(DeviceServedTable, StatesShareMemory) {
  std::mt19937_64 random(2);
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 16);
  {
    ServedOptions options = Placed(OptionsOf(shape), &devices.place);
    World world(shape, true, {}, &options);
    ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 2000, &random), {}, 2).ok());
    const uint64_t base_bytes = devices.device.work().bytes;
    EXPECT_GT(base_bytes, world.table_->size() * 64);
    const std::shared_ptr<ServedTable> before = world.table_;
    const Asked asked(KeyType::kInt64, 200, &random);
    SerialExec exec;
    const Answers old = Answers::Of<HostArrays>(*before->placed(), exec, asked);
    const uint64_t bytes = devices.device.work().bytes;
    ASSERT_TRUE(world.Apply({{KeyAt(KeyType::kInt64, 1), 5.0f}}, {KeyAt(KeyType::kInt64, 2)}).ok());
    EXPECT_LT(devices.device.work().bytes - bytes, 1000u);
    ExpectSameAnswers<OnHost>(*world.table_, &random);
    Answers::Of<HostArrays>(*before->placed(), exec, asked).ExpectEqual(old);
    const std::shared_ptr<Table> placed = world.table_->placed();
    ASSERT_TRUE(world.Apply({}, {}).ok());
    EXPECT_EQ(world.table_->placed(), placed) << "a delta without changes of the table";
    // The counters are those of all states.
    EXPECT_GE(world.table_->placed()->stats().hits, 100u);
  }
  EXPECT_EQ(devices.device.used(), 0u);
}

TEST(DeviceServedTable, VectorsBeyondTheLimitAreInHostMemory) {
  std::mt19937_64 random(3);
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 16);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place, 64 * 80);
  World world(shape, true, {}, &options);
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 2000, &random), {}, 2).ok());
  const uint64_t rows = world.table_->size();
  ASSERT_GT(rows, 300u);
  uint64_t in_device = world.table_->placed()->stats().device_rows;
  EXPECT_GT(in_device, 60u);
  EXPECT_LE(in_device, 70u);
  ASSERT_TRUE(world.Apply({{KeyAt(KeyType::kInt64, 1), 5.0f}}, {}).ok());
  EXPECT_EQ(world.table_->placed()->stats().device_rows, in_device + 1);
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 2000, &random), {}).ok());
  EXPECT_LE(world.table_->placed()->stats().device_rows, 80u);
  EXPECT_GT(world.table_->placed()->stats().device_rows, in_device + 1);
  ExpectSameAnswers<OnHost>(*world.table_, &random);
}

TEST(DeviceServedTable, AMissingAmountOfMemoryIsNamed) {
  std::mt19937_64 random(4);
  Devices devices{ThreadsDevice(30000)};
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 16);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place);
  World world(shape, true, {}, &options);
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 50, &random), {}).ok());
  const std::shared_ptr<ServedTable> before = world.table_;
  const Status status = world.Apply(RandomRows(KeyType::kInt64, 2000, &random), {});
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("table 'user' take "), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("bytes left"), std::string::npos) << status.message();
  ExpectSameAnswers<OnHost>(*before, &random);
}

// A search on a GPU has no check of what it reads.
TEST(DeviceServedTable, IndexesThatNoWriterMakes) {
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 2);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place);
  for (const bool verify : {false, true}) {
    for (const uint32_t entry :
         {uint32_t{World::kRowsWithSlots + 1}, uint32_t{0xFFFFFFFF}, uint32_t{3}}) {
      World world(shape, verify, {}, &options);
      const Status status = world.ApplyWithSlots(std::vector<uint32_t>(64, entry));
      EXPECT_EQ(status.code(), Code::kDataLoss) << entry;
      EXPECT_NE(status.message().find("the index of table 'user' is damaged"), std::string::npos);
    }
    World world(shape, verify, {}, &options);
    EXPECT_TRUE(world.ApplyWithSlots(std::vector<uint32_t>(64, 0)).ok());
  }
}

// The files of a base that is too large to be verified on the host are verified on the way.
TEST(DeviceServedTable, DamagedFiles) {
  std::mt19937_64 random(8);
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 8);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place);
  for (const char* column : {"keys", "index", "vectors"}) {
    World world(shape, /*verify=*/false, {}, &options);
    ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 200, &random), {}).ok());
    const std::string file = world.directory_ + "/000.r0." + column + ".npy";
    std::string bytes = Read(file);
    bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 1);
    Write(file, bytes);
    world.table_.reset();
    const Status status = world.Open();
    EXPECT_EQ(status.code(), Code::kDataLoss) << column;
    EXPECT_NE(status.message().find(column), std::string::npos) << status.message();
  }
}

// The work that a call gives to a GPU. A pool waits for nothing.
TEST(DeviceServedTable, TheWorkOfACall) {
  std::mt19937_64 random(6);
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 16);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place);
  World world(shape, true, {}, &options);
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 200, &random), {}).ok());
  Table& table = *world.table_->placed();
  SerialExec exec;
  std::vector<std::vector<int64_t>> keys(10, std::vector<int64_t>(64));
  std::vector<Bags> bags(10);
  std::vector<std::vector<float>> pooled(10, std::vector<float>(64 * 16));
  std::vector<std::vector<RowId>> rows(10, std::vector<RowId>(64));
  std::vector<PoolTask> tasks(10);
  for (size_t t = 0; t < tasks.size(); ++t) {
    ASSERT_TRUE(bags[t].InitUniform(1, 64, 64).ok());
    tasks[t].bags = &bags[t];
    tasks[t].pooled = pooled[t].data();
    tasks[t].table = &table;
    tasks[t].keys = keys[t].data();
    tasks[t].rows = rows[t].data();
  }
  const auto work_of = [&](const auto& call) {
    const DeviceWork before = devices.device.work();
    call();
    return devices.device.work() - before;
  };
  const DeviceWork pool =
      work_of([&] { ASSERT_TRUE(devices.place.lookups().Pool(exec, tasks, 1, false).ok()); });
  EXPECT_EQ(pool.launches, 2u);
  EXPECT_EQ(pool.copies, 2u);
  EXPECT_EQ(pool.ordinary + pool.fills + pool.waits + pool.drains, 0u);
  const DeviceWork lookup = work_of([&] {
    table.Lookup(exec, {keys[0].data(), 64}, 1, nullptr, pooled[0].data(), rows[0].data());
  });
  EXPECT_EQ(lookup.launches, 2u);
  EXPECT_EQ(lookup.copies, 1u);
  EXPECT_EQ(lookup.ordinary + lookup.fills + lookup.waits + lookup.drains, 0u);
}

TEST(DeviceServedTable, NoMemoryForTheWorkOfACall) {
  std::mt19937_64 random(7);
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 4);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place);
  World world(shape, true, {}, &options);
  ASSERT_TRUE(world.Apply(RandomRows(KeyType::kInt64, 50, &random), {}).ok());
  Table& table = *world.table_->placed();
  SerialExec exec;
  const int64_t keys[] = {1, 2};
  float vectors[8];
  RowId rows[2];
  for (uint64_t take = 0;; ++take) {
    devices.device.FailTake(take);
    table.Lookup(exec, {keys, 2}, 1, nullptr, vectors, rows);
    if (devices.device.FailTake(ThreadsDevice::kNever)) break;
    EXPECT_EQ(table.Error().code(), Code::kResourceExhausted) << take;
    EXPECT_TRUE(table.Error().ok()) << "an error is reported once";
    ASSERT_LT(take, 10u);
  }
  ExpectSameAnswers<OnHost>(*world.table_, &random);
}

// A lookup that fails does not make one of another thread fail, whose error is asked for first.
TEST(DeviceServedTable, AnErrorIsOfTheThreadThatCalled) {
  Devices devices;
  const TestTable shape = Shape(KeyType::kInt64, DType::kFloat32, 4);
  ServedOptions options = Placed(OptionsOf(shape), &devices.place);
  World world(shape, true, {}, &options);
  ASSERT_TRUE(world.Apply({{1, 1.0f}}, {}).ok());
  Table& table = *world.table_->placed();
  const int64_t key = 1;
  float vector[4];
  RowId row;
  SerialExec exec;
  devices.device.FailTake(0);
  table.Lookup(exec, {&key, 1}, 1, nullptr, vector, &row);
  std::thread other([&] {
    table.Lookup(exec, {&key, 1}, 1, nullptr, vector, &row);
    EXPECT_TRUE(table.Error().ok());
  });
  other.join();
  EXPECT_EQ(table.Error().code(), Code::kResourceExhausted);
  EXPECT_TRUE(table.Error().ok());
}

// States of a model: lookups while snapshots are applied, and tables that come and go.
class DeviceServedModelTest : public testing_served::ServedModelTest {
 protected:
  // Its tables are on devices_.
  ~DeviceServedModelTest() override { model_.reset(); }
  ServedOptions OptionsFor(const std::string& name) {
    return Placed(OptionsOf(name), &devices_.place);
  }
  float PlacedValue(const ServedState& state, size_t number) {
    SerialExec exec;
    int64_t keys[50];
    float vectors[50 * testing_served::kDim];
    RowId rows[50];
    for (int i = 0; i < 50; ++i) keys[i] = i;
    Table& table = *state.tables[number]->placed();
    table.Lookup(exec, {keys, 50}, 1, nullptr, vectors, rows);
    EXPECT_TRUE(table.Error().ok());
    for (int i = 0; i < 50; ++i) {
      if (vectors[i * testing_served::kDim] != vectors[0]) return -2;
    }
    return vectors[0];
  }
  Devices devices_;
};

TEST_F(DeviceServedModelTest, LookupsWhileDeltasAreApplied) {
  const Status status = Open();
  ASSERT_TRUE(status.ok()) << status.message();
  size_t numbers[2];
  for (size_t t = 0; t < 2; ++t) {
    const auto before = model_->state();
    ASSERT_TRUE(model_->Attach(OptionsFor(testing_served::kTables[t]), &numbers[t]).ok());
    // The rows of the other table are not brought again.
    if (t == 1) {
      EXPECT_EQ(model_->state()->tables[0]->placed(), before->tables[0]->placed());
    }
  }
  std::atomic<bool> done{false};
  std::atomic<int> mixed{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) {
    readers.emplace_back([&] {
      while (!done) {
        const auto state = model_->state();
        const float item = PlacedValue(*state, numbers[0]);
        mixed += item < 1.0f || item != PlacedValue(*state, numbers[1]);
      }
    });
  }
  for (uint64_t delta = 2; delta <= 20; ++delta) {
    testing_served::Of("delta", delta, static_cast<float>(delta)).Publish(tables_);
    uint64_t count = 0;
    const Status applied = Apply(tables_, &count);
    EXPECT_TRUE(applied.ok()) << applied.message();
    EXPECT_EQ(count, 1u);
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(mixed, 0);
  EXPECT_EQ(PlacedValue(*model_->state(), numbers[0]), 20.0f);
}

// A model that is loaded twice shares its files, and frees the tables of the load that ends.
TEST_F(DeviceServedModelTest, TablesThatAreDetachedFreeTheirMemory) {
  ASSERT_TRUE(Open().ok());
  size_t first[2], second[2];
  for (size_t t = 0; t < 2; ++t) {
    ASSERT_TRUE(model_->Attach(OptionsFor(testing_served::kTables[t]), &first[t]).ok());
  }
  const size_t used = devices_.device.used();
  ASSERT_GT(used, 0u);
  for (size_t t = 0; t < 2; ++t) {
    ASSERT_TRUE(model_->Attach(OptionsFor(testing_served::kTables[t]), &second[t]).ok());
  }
  EXPECT_GT(devices_.device.used(), used);
  for (const size_t number : first) model_->Detach(number);
  EXPECT_EQ(devices_.device.used(), used);
  EXPECT_EQ(PlacedValue(*model_->state(), second[1]), 1.0f);
  for (const size_t number : second) model_->Detach(number);
  EXPECT_EQ(devices_.device.used(), 0u);
}

// A snapshot that does not fit changes nothing.
TEST_F(DeviceServedModelTest, ASnapshotThatDoesNotFit) {
  Devices small{ThreadsDevice(3000)};
  ASSERT_TRUE(Open().ok());
  size_t number = 9;
  ServedOptions options = Placed(OptionsOf(testing_served::kTables[0]), &small.place);
  ASSERT_TRUE(model_->Attach(options, &number).ok());
  testing_served::Snapshot delta = testing_served::Of("delta", 2, 2.0f);
  for (uint64_t key = 50; key < 1000; ++key) delta.tables[0].shards[0].rows[key] = 2.0f;
  delta.Publish(tables_);
  uint64_t count = 9;
  const Status status = Apply(tables_, &count);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_NE(status.message().find("table 'item' take "), std::string::npos) << status.message();
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(PlacedValue(*model_->state(), number), 1.0f);
  model_.reset();
}

// A number that is given to a table with other options shares nothing with the table before.
TEST_F(DeviceServedModelTest, ATableOfOtherOptionsTakesTheNumber) {
  ASSERT_TRUE(Open().ok());
  size_t number = 9, other = 9;
  ServedOptions options = OptionsFor(testing_served::kTables[0]);
  ASSERT_TRUE(model_->Attach(options, &number).ok());
  model_->Detach(number);
  options.initializer = {{InitKind::kConstant, 3.0f, 0.0f}};
  ASSERT_TRUE(model_->Attach(options, &other).ok());
  ASSERT_EQ(number, other);
  SerialExec exec;
  const int64_t key = 1000;
  float vector[testing_served::kDim];
  RowId row;
  model_->state()->tables[other]->placed()->Lookup(exec, {&key, 1}, 1, nullptr, vector, &row);
  EXPECT_EQ(vector[0], 3.0f);
}

}  // namespace
}  // namespace dynemb
