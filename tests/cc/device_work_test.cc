// The work that the calls of a training step give to a device, as a table of budgets: ten tables of
// dim 128 with one id in each bag, as published for dynamicemb. On a GPU, a launch or a copy takes
// some microseconds of the host's time, and a copy from or to ordinary memory waits for all work
// before it.
//
// The numbers are compared for equality: they may fall, and are then changed here and in
// docs/gpu.md. They must not rise.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/device_lookups.h"
#include "cc/lookup/bags.h"
#include "cc/table/changes.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/exec.h"
#include "cc/table/hash.h"
#include "cc/table/optimizer.h"
#include "tests/cc/device_file_kind.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

using Device = ThreadsDevice;

constexpr size_t kTables = 10, kIds = 300;  // ids of each table in a batch
constexpr int64_t kDim = 128;
constexpr uint64_t kKeys = 4000;  // of each table

void Require(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// The most work that a call may give.
struct Budget {
  const char* call;
  uint64_t launches, copies, ordinary, fills, waits;
  uint64_t drains = 0;
};

class DeviceWorkTest : public ::testing::Test {
 protected:
  // As TensorFlow's tensors, the arrays of a batch are in the device's memory.
  DeviceWorkTest() {
    constexpr size_t kBytes = size_t{64} << 20;
    Require(tensors_.Reserve(device_, kBytes));
    Require(tensors_.Commit(kBytes));
    keys_ = Array<uint64_t>(kTables * kIds);
    unique_keys_ = Array<uint64_t>(kTables * kIds);
    rows_ = Array<RowId>(kTables * kIds);
    unique_rows_ = Array<RowId>(kTables * kIds);
    pooled_ = Array<float>(kTables * kIds * kDim);
    sums_ = Array<float>(kTables * kIds * kDim);
    std::fill_n(pooled_, kTables * kIds * kDim, 0.25f);
    Require(bags_.InitUniform(1, kIds, kIds));
  }

  template <class T>
  T* Array(size_t n) {
    char* const p = tensors_.data() + used_;
    used_ += (n * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(p);
  }

  // Tables that have the rows of about kKeys keys each. Memory for `init_capacity` rows is there
  // from the beginning; the most rows are `max_capacity`.
  // hot_rows: the rows that memory holds, half of them in the device tier; the others are in files.
  // 0: no row is in a file. device_rows: the rows of the device tier without files; 0: all.
  void MakeTables(OptimizerKind kind, uint64_t init_capacity, uint64_t max_capacity,
                  uint64_t hot_rows = 0, uint64_t device_rows = 0) {
    kind_ = kind;
    tables_.clear();
    for (size_t t = 0; t < kTables; ++t) {
      TableOptions options;
      options.name = "table_" + std::to_string(t);
      options.dim = kDim;
      options.init_capacity = static_cast<int64_t>(init_capacity);
      options.max_capacity = static_cast<int64_t>(max_capacity);
      options.tier = Tier::kHbm;
      const int64_t width = static_cast<int64_t>(StateWidths(kind, {}, kDim).size()) * kDim;
      if (device_rows != 0) {
        options.tier = Tier::kHybrid;
        options.max_hbm_bytes =
            device_rows * RowLayout(sizeof(uint64_t), options.dtype, kDim, width, 16).stride;
      }
      std::unique_ptr<Table> table;
      if (hot_rows == 0) {
        Require(DeviceTable<Device>::Make(options, &device_, &table));
      } else {
        Require(testing_table::MakeDeviceFileTable(options, testing_table::TestFiles(),
                                                   hot_rows / 2, hot_rows - hot_rows / 2, width,
                                                   &device_, &table));
      }
      Require(table->AttachState(exec_, {"state", StateWidths(kind, {}, kDim), Inits()}));
      for (uint64_t first = 0; first < kKeys; first += kIds) {
        for (uint64_t i = 0; i < kIds; ++i) keys_[i] = MixKey(first + i);
        Require(table->FindOrInsert(exec_, {keys_, kIds}, ++tick_, rows_));
      }
      tables_.push_back(std::move(table));
    }
    next_new_ = kKeys + kIds;
  }
  std::vector<float> Inits() const {
    return std::vector<float>(StateWidths(kind_, {}, kDim).size(), 0.1f);
  }

  // Draws the ids of a batch, of which one in `one_new_in` is new.
  void Draw(uint64_t one_new_in = 0) {
    for (size_t i = 0; i < kTables * kIds; ++i) {
      const uint64_t number = Remix(MixKey(++draws_), 7) % kKeys;
      keys_[i] = MixKey(one_new_in != 0 && i % one_new_in == 0 ? next_new_++ : number);
    }
  }

  void Pool(bool insert = true) {
    std::vector<PoolTask> tasks(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      tasks[t].table = tables_[t].get();
      tasks[t].keys = keys_ + t * kIds;
      tasks[t].rows = rows_ + t * kIds;
      tasks[t].bags = &bags_;
      tasks[t].pooled = pooled_ + t * kIds * kDim;
    }
    Require(lookups_.Pool(exec_, tasks, ++tick_, insert));
  }
  BackwardTask GradientOf(size_t t) {
    BackwardTask task;
    task.keys = keys_ + t * kIds;
    task.rows = rows_ + t * kIds;
    task.bags = &bags_;
    task.upstream = pooled_ + t * kIds * kDim;
    task.dim = kDim;
    return task;
  }
  void Backward() {
    std::vector<BackwardTask> tasks;
    for (size_t t = 0; t < kTables; ++t) tasks.push_back(GradientOf(t));
    num_unique_.clear();
    size_t first = 0;
    const auto allocate = [&](size_t, size_t n, BackwardOutput* out) {
      out->keys = unique_keys_ + first;
      out->rows = unique_rows_ + first;
      out->sums = sums_ + first * kDim;
      num_unique_.push_back(n);
      first += n;
      return Status();
    };
    Require(lookups_.SumGradients(exec_, tasks, allocate));
  }
  // Backward and Apply in one call.
  void ApplyPooled() {
    std::vector<ApplyPooledTask> tasks(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      static_cast<BackwardTask&>(tasks[t]) = GradientOf(t);
      tasks[t].table = tables_[t].get();
    }
    Require(lookups_.ApplyPooled(exec_, tasks, {kind_, {}, {}, 1, "state", Inits()}, ++tick_));
  }
  void Apply() {
    std::vector<ApplyTask> tasks(kTables);
    size_t first = 0;
    for (size_t t = 0; t < kTables; ++t) {
      tasks[t].table = tables_[t].get();
      tasks[t].keys = unique_keys_ + first;
      tasks[t].rows = unique_rows_ + first;
      tasks[t].gradients = sums_ + first * kDim;
      tasks[t].n = num_unique_[t];
      first += tasks[t].n;
    }
    Require(lookups_.Apply(exec_, tasks, {kind_, {}, {}, 1, "state", Inits()}, ++tick_));
  }

  template <class Call>
  DeviceWork WorkOf(const Call& call) {
    const DeviceWork before = device_.work();
    call();
    return device_.work() - before;
  }
  static void Check(const Budget& budget, const DeviceWork& work) {
    std::printf("%-34s %8ju %8ju %12ju %8ju %8ju %8ju %8ju\n", budget.call,
                uintmax_t{work.launches}, uintmax_t{work.copies}, uintmax_t{work.bytes},
                uintmax_t{work.ordinary}, uintmax_t{work.fills}, uintmax_t{work.waits},
                uintmax_t{work.drains});
    EXPECT_EQ(work.launches, budget.launches) << budget.call;
    EXPECT_EQ(work.copies, budget.copies) << budget.call;
    EXPECT_EQ(work.ordinary, budget.ordinary) << budget.call;
    EXPECT_EQ(work.fills, budget.fills) << budget.call;
    EXPECT_EQ(work.waits, budget.waits) << budget.call;
    EXPECT_EQ(work.drains, budget.drains) << budget.call;
  }
  static void PrintHead() {
    std::printf("%-34s %8s %8s %12s %8s %8s %8s %8s\n", "call", "launches", "copies", "their bytes",
                "ordinary", "fills", "waits", "drains");
  }

  Device device_;
  SerialExec exec_;
  DeviceLookups<Device> lookups_{&device_};
  Device::Range tensors_;
  size_t used_ = 0;
  uint64_t *keys_, *unique_keys_;
  RowId *rows_, *unique_rows_;
  float *pooled_, *sums_;
  Bags bags_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<size_t> num_unique_;
  OptimizerKind kind_ = OptimizerKind::kSgd;
  uint64_t next_new_ = 0, draws_ = 0;
  Tick tick_ = 0;
};

// The first batches of a table take other paths, so that some are not counted.
TEST_F(DeviceWorkTest, OfAStep) {
  PrintHead();
  for (const auto& [kind, name] : {std::pair{OptimizerKind::kSgd, "SGD"},
                                   {OptimizerKind::kAdagrad, "Adagrad"},
                                   {OptimizerKind::kAdam, "Adam"}}) {
    MakeTables(kind, 2 * kKeys, 2 * kKeys);
    for (int warm_up = 0; warm_up < 3; ++warm_up) {
      Draw(20);
      Pool();
      Backward();
      Apply();
    }
    Draw();
    Check({"pool", 12, 3, 0, 1, 0}, WorkOf([&] { Pool(); }));
    Check({"sum gradients", 8, 4, 0, 1, 1}, WorkOf([&] { Backward(); }));
    Check({name, 4, 2, 0, 1, 0}, WorkOf([&] { Apply(); }));
    const std::string in_one = std::string("sum gradients and ") + name;
    Check({in_one.c_str(), 10, 4, 0, 3, 0}, WorkOf([&] { ApplyPooled(); }));
  }
  Draw(20);
  Check({"pool, an id in 20 is new", 12, 3, 0, 1, 0}, WorkOf([&] { Pool(); }));
}

TEST_F(DeviceWorkTest, OfTablesThatAreFull) {
  PrintHead();
  MakeTables(OptimizerKind::kAdagrad, kKeys, kKeys);
  for (int warm_up = 0; warm_up < 3; ++warm_up) {
    Draw(20);
    Pool();
  }
  Draw(20);
  Check({"pool, evicting", 13, 3, 0, 1, 0}, WorkOf([&] { Pool(); }));
  // As the outputs of an operator: in page-locked memory, or in that of the device.
  constexpr size_t kBytes = kIds * 2 * kDim * sizeof(float);
  Device::HostRange columns[4];
  for (Device::HostRange& column : columns) {
    Require(column.Reserve(device_, kBytes));
    Require(column.Commit(kBytes));
  }
  const auto insert = [&](EvictedRows::Memory memory) {
    const auto allocate = [&](size_t) {
      return TickColumns{columns[0].data(), columns[1].data(),
                         reinterpret_cast<float*>(columns[2].data()), nullptr,
                         reinterpret_cast<int64_t*>(columns[3].data())};
    };
    EvictedRows evicted(tables_[0]->layout(), allocate, memory);
    Draw(20);
    return WorkOf([&] {
      Require(tables_[0]->InsertAndEvict(exec_, {keys_, kIds}, ++tick_, rows_, &evicted));
    });
  };
  using Memory = EvictedRows::Memory;
  Check({"insert_and_evict, of one table", 17, 5, 0, 2, 2}, insert(Memory::kHost));
  // Nothing but their number is copied to the host.
  Check({"the same, on the device", 17, 1, 0, 2, 1}, insert(Memory::kDevice));
  for (const auto& table : tables_) table->Track(tick_);
  Draw(20);
  Check({"pool, evicting, after a cut", 18, 5, 0, 2, 2}, WorkOf([&] { Pool(); }));
  Check({"insert_and_evict, after a cut", 17, 5, 0, 2, 2}, insert(Memory::kHost));
  // The keys, too.
  Check({"the same, on the device", 17, 2, 1, 2, 2}, insert(Memory::kDevice));
}

TEST_F(DeviceWorkTest, WhileACutIsRead) {
  PrintHead();
  MakeTables(OptimizerKind::kAdagrad, kKeys, kKeys);
  Draw();
  Pool();
  Backward();
  Apply();
  SavedRows saved(size_t{1} << 30);
  for (size_t t = 0; t < kTables; ++t) {
    Require(tables_[t]->BeginCut(exec_, ++tick_, 0, CutOf::kRows, &saved, t));
  }
  Check({"Adagrad, while a cut is read", 14, 5, 3, 1, 2}, WorkOf([&] { Apply(); }));
  // The rows have been saved.
  Check({"the same again", 4, 3, 1, 1, 1}, WorkOf([&] { Apply(); }));
  for (const auto& table : tables_) table->EndCut();
}

TEST_F(DeviceWorkTest, OfTablesThatGrow) {
  PrintHead();
  MakeTables(OptimizerKind::kAdagrad, kKeys, 0);
  // The batches in which all tables grow have the most work.
  DeviceWork most;
  for (int batch = 0; batch < 40; ++batch) {
    Draw(1);
    const DeviceWork work = WorkOf([&] { Pool(); });
    if (work.launches > most.launches) most = work;
  }
  Check({"pool, of tables that grow", 33, 5, 0, 1, 1}, most);
}

TEST_F(DeviceWorkTest, OfTablesWithTwoTiers) {
  PrintHead();
  MakeTables(OptimizerKind::kAdagrad, kKeys, kKeys, 0, kKeys / 2);
  std::vector<Table*> tables;
  for (const auto& table : tables_) tables.push_back(table.get());
  const auto promote = [&] { Require(lookups_.PromoteIfDue(exec_, tables, ++tick_)); };
  Draw();
  Pool();
  Draw();
  Check({"pool that promotes rows", 24, 6, 0, 1, 0}, WorkOf([&] { Pool(); }));
  for (const Table* table : tables) EXPECT_GT(table->stats().promotions, 0u);
  for (int batch = 0; batch < 8; ++batch) {
    Draw();
    Pool(/*insert=*/false);
  }
  Check({"promotion", 8, 1, 0, 0, 0}, WorkOf(promote));
}

// A call waits for the number of its keys that are not in memory.
TEST_F(DeviceWorkTest, OfTablesWithFiles) {
  PrintHead();
  MakeTables(OptimizerKind::kAdagrad, kKeys, 0, kKeys / 2);
  for (int warm_up = 0; warm_up < 3; ++warm_up) {
    Draw();
    Pool();
  }
  uint64_t before = 0, after = 0;
  for (const auto& table : tables_) before += table->stats().cold.hits;
  Draw();
  Check({"pool, half of the rows in files", 31, 31, 1, 3, 4}, WorkOf([&] { Pool(); }));
  for (const auto& table : tables_) after += table->stats().cold.hits;
  EXPECT_GT(after - before, kTables * kIds / 4);
  Check({"pool, all rows in memory", 10, 4, 0, 1, 1}, WorkOf([&] { Pool(); }));
  Backward();
  Check({"Adagrad", 12, 5, 0, 2, 1}, WorkOf([&] { Apply(); }));
  Draw(20);
  Check({"pool, an id in 20 is new", 51, 54, 1, 5, 6}, WorkOf([&] { Pool(); }));
}

}  // namespace
}  // namespace dynemb
