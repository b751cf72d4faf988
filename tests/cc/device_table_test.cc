// The contract suite of Table on device tables, whose device is simulated: all rows in the device
// tier, all in the host tier, and both; kernels run by one thread for each key or row, and by
// emulated warps.
#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/device/device_table_members.h"
#include "cc/table/clock.h"
#include "cc/table/snapshot.h"
#include "tests/cc/device_config.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kDeviceTables[] = {QuickTable(-1, KeyType::kInt64, DType::kFloat32),
                                   QuickTable(-1, KeyType::kInt32, DType::kFloat16),
                                   QuickTable(0, KeyType::kUint64, DType::kBfloat16),
                                   QuickTable(7, KeyType::kInt64, DType::kFloat32),
                                   QuickTable(100, KeyType::kInt32, DType::kBfloat16)};
// Threads divide the work in the same way for all types.
INSTANTIATE_TABLE_SUITES(Device, OnlyIf(kUnderTsan, {0, 2}, kDeviceTables));

// Under sanitizers, teams of 32 find nothing that teams of 8 do not, and take minutes.
const TableKind kWarpTables[] = {
    SimulatedTable<NarrowTeamsDevice>(-1, KeyType::kInt64, DType::kFloat32, SlownessOfTeams(8)),
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    SimulatedTable<WideTeamsDevice>(20, KeyType::kInt32, DType::kFloat16, SlownessOfTeams(32)),
#endif
};
INSTANTIATE_TABLE_SUITES(DeviceWarp, kWarpTables);

// A training step does not wait for the work that it gives to the device. The tables have room, or
// are full and evict, with one tier or two. (A growing table waits occasionally.)
TEST(DeviceSteps, DoNotWait) {
  SKIP_UNDER_SANITIZERS("counts the waits of steps that other tests take");
  struct Case {
    int64_t max_capacity;
    uint64_t keys;  // the number of keys to draw from
    int hbm_rows;
  };
  for (const Case c :
       {Case{0, 6000, -1}, Case{0, 6000, 500}, Case{4000, 20000, -1}, Case{4000, 20000, 500}}) {
    SCOPED_TRACE(testing::Message() << c.max_capacity << " " << c.hbm_rows);
    ThreadsDevice device;
    ThreadsExec exec(2);
    TableOptions options;
    options.name = "steps";
    options.dim = 4;
    options.init_capacity = c.max_capacity != 0 ? c.max_capacity : 5600;
    options.max_capacity = c.max_capacity;
    options.tier = c.hbm_rows < 0 ? Tier::kHbm : Tier::kHybrid;
    options.max_hbm_bytes = static_cast<uint64_t>(std::max(c.hbm_rows, 0)) * 48;
    std::unique_ptr<Table> made;
    ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &made).ok());
    Subject t(std::move(made), &exec);
    const StateSpec spec{"adagrad", {4}, {0.0f}};
    ASSERT_TRUE(t->AttachState(exec, spec).ok());
    const RowOptimizer adagrad(OptimizerKind::kAdagrad, {}, Hyper(), 4);
    Random random(3);
    uint64_t waits = 0;
    for (int step = 0; step < 250; ++step) {
      if (step == 150) waits = device.waits();
      Keys keys;
      for (int i = 0; i < 300; ++i) keys.push_back(random.Below(c.keys));
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      RowIds rows;
      t.LookupOrInsert(keys, &rows);
      ASSERT_TRUE(t->Promote(exec, t.tick()).ok());
      t.Apply(adagrad, keys, rows, Floats(keys.size() * 4, 0.5f));
    }
    EXPECT_EQ(device.waits(), waits);
    EXPECT_EQ(t.stats().evictions != 0, c.max_capacity != 0);
    t.Check();
  }
}

// New keys get rows in the order of their first positions in the batch, for any schedule of
// threads.
TEST(DeviceInserts, RowIdsDoNotDependOnThreads) {
  ThreadsDevice device;
  SerialExec serial;
  ThreadsExec threads(4);
  TableOptions options;
  options.name = "order";
  options.dim = 1;
  options.tier = Tier::kHbm;
  Random random(17);
  Keys keys(20000);
  for (int round = 0; round < 5; ++round) {
    std::unique_ptr<Table> one, four;
    ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &one).ok());
    ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &four).ok());
    Subject t(std::move(one), &serial), u(std::move(four), &threads);
    for (int batch = 0; batch < 3; ++batch) {
      // Each key occurs about eight times, at random positions.
      for (uint64_t& key : keys) key = random.Below(2500) + 2000 * static_cast<uint64_t>(batch);
      const RowIds rows = t.FindOrInsert(keys);
      ASSERT_EQ(u.FindOrInsert(keys), rows);
      RowId next = 0;  // row ids below `next` have been assigned already, in order
      for (RowId row : rows) next = std::max(next, row);
      EXPECT_EQ(t.size(), next + 1u);
    }
  }
}

// A device that posts its counters one batch late, as a GPU may.
class LateDevice : public ThreadsDevice {
 public:
  class Session : public ThreadsDevice::Session {
   public:
    Session(LateDevice& device, Stream stream)
        : ThreadsDevice::Session(device, stream), device_(device) {}
    template <class Body>
    void ForEach(size_t n, const Body& body) {
      if constexpr (std::is_same_v<Body, device::SpreadRows>) {
        if (device_.to_ != nullptr) *device_.to_ = device_.posted_;
        device::SpreadRows now = body;
        now.added.tables.one.mailbox = &device_.posted_;
        ThreadsDevice::Session::ForEach(n, now);
        device_.to_ = body.added.tables.one.mailbox;
      } else {
        ThreadsDevice::Session::ForEach(n, body);
      }
    }

   private:
    LateDevice& device_;
  };

 private:
  device::Mailbox posted_ = {};
  device::Mailbox* to_ = nullptr;
};

// Check() verifies the bounds.
TEST(DeviceInserts, LateCountersAreBounds) {
  for (const int64_t init_capacity : {20000, 16}) {  // the index never grows, or often
    SCOPED_TRACE(init_capacity);
    LateDevice device;
    SerialExec exec;
    TableOptions options;
    options.name = "late";
    options.dim = 1;
    options.init_capacity = init_capacity;
    options.tier = Tier::kHbm;
    std::unique_ptr<Table> made;
    ASSERT_TRUE(DeviceTable<LateDevice>::Make(options, &device, &made).ok());
    Subject t(std::move(made), &exec);
    Random random(23);
    for (int step = 0; step < 60; ++step) {
      t.FindOrInsert(Scattered(random.Below(10000), 100 + random.Below(300)));
      if (step % 5 == 4) t.Erase(Scattered(random.Below(10000), 400));
      t.Check();
    }
    EXPECT_EQ(t.CountContained(Scattered(0, 10400)), t.size());
  }
}

// The contents of a table, without row ids.
std::vector<Exported> ByKey(const Subject& t) {
  std::vector<Exported> rows = t.Export();
  std::sort(rows.begin(), rows.end(),
            [](const Exported& a, const Exported& b) { return a.key < b.key; });
  for (Exported& row : rows) row.row = 0;
  return rows;
}

// Searches stay short while keys come and leave (bucket_ops_test.cc).
TEST(DeviceTableMemory, AFullTableHasEmptySlots) {
  for (const EvictStrategy strategy : {EvictStrategy::kLru, EvictStrategy::kNone}) {
    for (const int64_t init : {int64_t{100}, int64_t{4000}}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(strategy) << " " << init);
      ThreadsDevice device;
      ThreadsExec exec(2);
      TableOptions options;
      options.name = "full";
      options.dim = 4;
      options.init_capacity = init;
      options.max_capacity = 4000;
      options.evict_strategy = strategy;
      options.tier = Tier::kHbm;
      std::unique_ptr<Table> made;
      ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &made).ok());
      Subject t(std::move(made), &exec);
      const uint64_t keys = strategy == EvictStrategy::kNone ? 4000 : 20000;
      for (uint64_t first = 0; first < keys; first += 500) t.FindOrInsert(Progression(first, 500));
      const TableStats s = t.stats();
      EXPECT_EQ(s.size, 4000u);
      const double load = static_cast<double>(s.size) / static_cast<double>(s.slots);
      EXPECT_NEAR(load, strategy == EvictStrategy::kNone ? 0.88 : 0.7, 0.01);
      t.Check();
    }
  }
}

// The index grows ahead for the next batch only if there is memory for that.
TEST(DeviceTableMemory, NearlyFullIndexCannotGrow) {
  constexpr size_t kMemory = size_t{1} << 20;
  SerialExec exec;
  ThreadsDevice device(kMemory);
  TableOptions options;
  options.name = "crowded";
  options.dim = 16;
  options.init_capacity = 1000;
  options.max_load_factor = 0.9f;
  options.tier = Tier::kHybrid;
  options.max_hbm_bytes = size_t{1} << 20;
  std::unique_ptr<Table> made;
  ASSERT_EQ(DeviceTable<ThreadsDevice>::Make(options, &device, &made).message(), "");
  Subject t(std::move(made), &exec);
  const Floats vectors(50 * 16, 3.0f);
  for (uint64_t k = 0; k < 950; k += 50) t.Upsert(Progression(k, 50), vectors);
  ThreadsDevice::Range others;
  const size_t free = kMemory - device.used();
  ASSERT_TRUE(others.Reserve(device, free).ok());
  ASSERT_TRUE(others.Commit(free).ok());
  for (int again = 0; again < 2; ++again) {
    for (uint64_t k = 0; k < 1000; k += 50) t.Upsert(Progression(k, 50), vectors);
    EXPECT_EQ(t.size(), 1000u);
  }
  const Status status = t.TryUpsert(Progression(5000, 50), vectors);
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
  t.Check();
  EXPECT_EQ(t.size(), 1000u);
}

TEST(DeviceTableMemory, DeviceTierRunsOut) {
  SerialExec exec;
  ThreadsDevice device(size_t{64} << 10);
  TableOptions options;
  options.name = "crowded";
  options.dim = 16;
  options.init_capacity = 10;
  options.tier = Tier::kHbm;
  std::unique_ptr<Table> made;
  ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &made).ok());
  Subject t(std::move(made), &exec);
  Status status;
  for (uint64_t k = 0; status.ok() && k < 2000; k += 50) {
    status = t.TryUpsert(Progression(k, 50), Floats(50 * 16, 3.0f));
    t.Check();
  }
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
}

// A table in the memory of a device, with rows of the keys from 0 on.
Subject WithRows(ThreadsDevice* device, Exec* exec, uint64_t rows) {
  TableOptions options;
  options.name = "failing";
  options.dim = 4;
  options.tier = Tier::kHbm;
  std::unique_ptr<Table> made;
  EXPECT_TRUE(DeviceTable<ThreadsDevice>::Make(options, device, &made).ok());
  Subject t(std::move(made), exec);
  t.FindOrInsert(Progression(0, rows));
  return t;
}

// A failed read of a snapshot returns an error, and its rows can be read again.
TEST(DeviceFailures, SnapshotReadsReportFailures) {
  ThreadsDevice device;
  SerialExec exec;
  Subject t = WithRows(&device, &exec, 100);
  Clock clock;
  clock.Advance(t.tick(), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Snapshot::Begin(exec, {&t.table()}, {0}, CutOf::kRows, &clock, &snapshot).ok());
  size_t failed = 0;
  Keys read;
  for (;;) {
    device.FailTake(failed);
    Snapshot::Block block;
    ASSERT_TRUE(snapshot->Next(1000, &block).ok());
    if (block.n == 0) break;
    Keys keys(block.n);
    const Status status = snapshot->Read(exec, &block, CutColumns::Keys(keys.data()));
    if (device.FailTake(ThreadsDevice::kNever)) {
      ASSERT_TRUE(status.ok()) << status.message();
      read.insert(read.end(), keys.begin(), keys.end());
    } else {
      ASSERT_EQ(status.code(), Code::kResourceExhausted);
      ++failed;
    }
  }
  device.FailTake(ThreadsDevice::kNever);
  EXPECT_GE(failed, 2u);
  std::sort(read.begin(), read.end());
  EXPECT_EQ(read, Progression(0, 100));
}

// Memory runs out at every point of every operation. A failed operation either has changed nothing,
// or reports that the table is inconsistent; the table then refuses all later operations.
TEST(DeviceFailures, OperationsReportFailures) {
  using Operation = Status (*)(Subject&);
  const std::pair<const char*, Operation> operations[] = {
      {"FindOrInsert",
       [](Subject& t) {
         RowIds rows;
         return t.TryFindOrInsert(Progression(20, 35), &rows);
       }},
      {"InsertAndEvict",
       [](Subject& t) {
         RowIds rows(35);
         EvictedRows evicted(t->layout());
         const Tick tick = t.tick() + 1;
         t.set_tick(tick);
         return t->InsertAndEvict(t.exec(), t.Pack(Progression(20, 35)), tick, rows.data(),
                                  &evicted);
       }},
      {"Upsert", [](Subject& t) { return t.TryUpsert(Progression(20, 35), Floats(140, 7.0f)); }},
      {"Accumulate",
       [](Subject& t) { return t.TryAccumulate(Progression(20, 35), Floats(140, 7.0f)); }},
      {"WriteRows",
       [](Subject& t) {
         return t.TryWriteRows(Progression(20, 35), Floats(140, 7.0f), Floats(140, 1.0f), true);
       }},
      {"Erase",
       [](Subject& t) {
         t.Erase(Progression(5, 20));
         return Status();
       }},
      {"EvictTo",
       [](Subject& t) {
         uint64_t evicted = 0;
         t.set_tick(t.tick() + 1);
         return t->EvictTo(t.exec(), 20, t.tick(), &evicted);
       }},
      {"Scores",
       [](Subject& t) {
         t.Scores(Progression(5, 20));
         return Status();
       }},
      {"SetScores",
       [](Subject& t) {
         if (t->options().evict_strategy == EvictStrategy::kLru) return Status();
         DYNEMB_RETURN_IF_ERROR(t.SetScores(Progression(5, 20), std::vector<Score>(20, 9)));
         return t.AddCounts(Progression(5, 20), std::vector<uint32_t>(20, 9));
       }},
      {"Explain",
       [](Subject& t) {
         std::vector<Table::KeyState> states(20);
         t->Explain(t.exec(), t.Pack(Progression(5, 20)), states.data());
         return Status();
       }},
      {"Apply",
       [](Subject& t) {
         const Keys keys = Progression(0, 20);
         t.Apply(RowOptimizer(OptimizerKind::kAdagrad, {}, Hyper(), 4), keys, t.Find(keys),
                 Floats(80, 1.0f));
         return Status();
       }},
      {"Promote", [](Subject& t) { return t->Promote(t.exec(), t.tick()); }},
      {"AttachState",
       [](Subject& t) {
         return t->AttachState(t.exec(), {"adam", {4, 4}, {0.0f, 0.0f}});
       }},
      {"Clear", [](Subject& t) { return t.Clear(); }},
  };
  size_t unchanged = 0, inconsistencies = 0;
  for (const auto& [name, operation] : operations) {
    bool failed = true;
    // Even k: an LRU table; odd k: one that counts keys, and pins rows.
    for (uint64_t k = 0; failed || k % 2 == 1; ++k) {
      ASSERT_LT(k, 400u) << name;
      SCOPED_TRACE(testing::Message() << name << " fails at " << k / 2);
      ThreadsDevice device;
      SerialExec exec;
      TableOptions options;
      options.name = "failing";
      options.dim = 4;
      options.init_capacity = 8;
      options.max_capacity = 40;
      options.tier = Tier::kHybrid;
      options.max_hbm_bytes = 10 * 48;
      options.evict_strategy = k % 2 == 0 ? EvictStrategy::kLru : EvictStrategy::kLfu;
      std::unique_ptr<Table> made;
      ASSERT_TRUE(DeviceTable<ThreadsDevice>::Make(options, &device, &made).ok());
      Subject t(std::move(made), &exec);
      ASSERT_TRUE(t->AttachState(exec, {"adagrad", {4}, {0.5f}}).ok());
      t->Track(1);
      t.Upsert(Progression(0, 40), Floats(160, 3.0f));  // the index has its final size
      t.Erase(Progression(0, 10));
      for (int i = 0; i < 6; ++i) t.Find(Progression(15, 15));
      const std::vector<Exported> before = ByKey(t);
      device.FailTake(k / 2);
      Status status = operation(t);
      const bool this_failed = !device.FailTake(ThreadsDevice::kNever);
      failed = this_failed || (k % 2 == 1 && failed);
      if (!this_failed) continue;
      // A failure that a call could not return is reported by the next one.
      if (status.ok()) status = t->Promote(exec, t.tick());
      EXPECT_FALSE(status.ok());
      const Status next = t->Promote(exec, t.tick());
      if (next.ok()) {
        ++unchanged;
        t.Check();
        EXPECT_TRUE(ByKey(t) == before);
      } else {
        ++inconsistencies;
        EXPECT_NE(next.message().find("inconsistent"), std::string::npos) << next.message();
        EXPECT_NE(next.message().find("failing"), std::string::npos) << next.message();
        EXPECT_FALSE(t.TryUpsert({1}, Floats(4, 1.0f)).ok());
      }
    }
  }
  EXPECT_GT(unchanged, 30u);
  EXPECT_GT(inconsistencies, 5u);
}

// If a batch cannot save the rows that a cut still needs, the cut says so.
TEST(DeviceCuts, RowsThatCannotBeSavedAreMissed) {
  constexpr uint64_t kRows = 100;
  size_t incomplete = 0;
  for (uint64_t n = 0;; ++n) {
    SCOPED_TRACE(n);
    ThreadsDevice device;
    SerialExec exec;
    Subject table = WithRows(&device, &exec, kRows);
    SavedRows saved(size_t{1} << 20);
    ASSERT_TRUE(table->BeginCut(exec, 2, 0, CutOf::kRows, &saved, 0).ok());
    device.FailTake(n);
    const Status cleared = table->Clear(exec, 3);
    const bool has_failed = !device.FailTake(ThreadsDevice::kNever);
    EXPECT_TRUE(has_failed || cleared.ok()) << cleared.message();
    size_t rows = 0;
    SavedRows::Chunk chunk;
    while (saved.Pop(&chunk)) rows += chunk.n;
    rows += table->PlanCut(1000).size();  // those that are still to be read
    EXPECT_TRUE(rows == kRows || !saved.Error().ok()) << rows;
    incomplete += saved.Error().ok() ? 0 : 1;
    table->EndCut();
    if (!has_failed) break;
  }
  EXPECT_GT(incomplete, 0u);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
