// Admission in device tables: fused lookups on simulated devices, waiting, and memory that runs
// out. table_suite_admission.cc has the calls of one table (device_table_test.cc).
#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/cc/lookups_suite_admission.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/simulated_lookups.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {
namespace {

template <class Device, size_t kThreads>
struct Simulated : SimulatedLookups<Device, kThreads> {
  static constexpr Tick kSteps = 25;
  static constexpr uint64_t kMostIds = std::is_same_v<Device, ThreadsDevice> ? 6000 : 1000;
};

// Under sanitizers, four threads run all that one would.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
template <class Device>
using OneThread = Simulated<Device, 1>;
INSTANTIATE_TYPED_TEST_SUITE_P(OneThread, LookupsAdmissionTest, ForSimulatedDevices<OneThread>);
#endif
template <class Device>
using FourThreads = Simulated<Device, 4>;
INSTANTIATE_TYPED_TEST_SUITE_P(FourThreads, LookupsAdmissionTest, ForSimulatedDevices<FourThreads>);

TableOptions Options(Tier tier) {
  TableOptions options;
  options.name = "admits";
  options.dim = 4;
  options.tier = tier;
  options.max_hbm_bytes = 10 * 48;
  options.admission.rule = Admit::kFrequency;
  options.admission.times = 3;
  options.admission.lines = options.admission.num_lines = 100;
  return options;
}

std::unique_ptr<Table> Make(const TableOptions& options, ThreadsDevice* device) {
  std::unique_ptr<Table> table;
  const Status status = DeviceTable<ThreadsDevice>::Make(options, device, &table);
  EXPECT_TRUE(status.ok()) << status.message();
  return table;
}

// Lookups with admission do not wait for the work that they give to the device, in tables that have
// room, and in full ones that evict.
TEST(DeviceAdmission, LookupsDoNotWait) {
  SKIP_UNDER_SANITIZERS("counts the waits of calls that other tests make");
  for (const Admit rule : {Admit::kFrequency, Admit::kProbability}) {
    for (const int64_t max_capacity : {0, 3000}) {
      ThreadsDevice device;
      ThreadsExec exec(2);
      TableOptions options = Options(Tier::kHbm);
      options.init_capacity = max_capacity != 0 ? max_capacity : 9000;
      options.max_capacity = max_capacity;
      options.admission.rule = rule;
      options.admission.probability = 0.3;
      Subject t(Make(options, &device), &exec);
      Random random(3);
      uint64_t waits = 0;
      for (int step = 0; step < 250; ++step) {
        if (step == 150) waits = device.waits();
        Keys keys(300);
        for (uint64_t& key : keys) key = random.Below(8000);
        std::vector<char> vectors(keys.size() * 16);
        RowIds rows(keys.size());
        const std::vector<uint32_t> times(keys.size(), 2);
        t.set_tick(t.tick() + 1);
        ASSERT_TRUE(t->LookupCounted(exec, t.Pack(keys), step % 2 == 0 ? times.data() : nullptr,
                                     t.tick(), vectors.data(), rows.data())
                        .ok());
      }
      EXPECT_EQ(device.waits(), waits);
      EXPECT_GT(t.stats().unadmitted, 0u);
      EXPECT_EQ(t.stats().evictions != 0, max_capacity != 0);
      t.Check();
    }
  }
}

// The memory of the counters is part of the table's. Without it there is no table, and nothing else
// has changed.
TEST(DeviceAdmission, CountersThatDoNotFitAreAnError) {
  constexpr size_t kMemory = size_t{1} << 20;
  ThreadsDevice device(kMemory);
  SerialExec exec;
  Subject t(Make(Options(Tier::kHbm), &device), &exec);
  t.FindOrInsert({1, 1, 1, 2});
  const size_t used = device.used();
  TableOptions large = Options(Tier::kHbm);
  large.admission.lines = large.admission.num_lines = 20000;
  std::unique_ptr<Table> none;
  const Status status = DeviceTable<ThreadsDevice>::Make(large, &device, &none);
  EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(device.used(), used);
  EXPECT_EQ(t.FindOrInsert({1, 2, 2, 3}), (RowIds{0, 1, 1, kUnadmittedRow}));
  t.Check();
}

// Memory runs out at every point of a call. The call fails, and has changed nothing except
// counters; or it reports that the table is inconsistent, as without admission. A lookup that lacks
// memory for a promotion leaves rows where they are.
TEST(DeviceAdmission, MemoryThatRunsOutIsAnError) {
  for (const int call : {0, 1, 2, 3, 4}) {
    size_t usable = 0, unpromoted = 0;
    bool failed = true;
    for (uint64_t k = 0; failed; ++k) {
      ASSERT_LT(k, 200u);
      SCOPED_TRACE(testing::Message() << "call " << call << " fails at " << k);
      ThreadsDevice device;
      SerialExec exec;
      TableOptions options = Options(Tier::kHybrid);
      options.init_capacity = 8;
      options.max_capacity = 40;
      Subject t(Make(options, &device), &exec);
      t->Track(1);
      t.Upsert(Progression(0, 30), Floats(120, 3.0f));
      t.FindOrInsert(Progression(100, 20));
      const Keys all = Progression(0, 200);
      const std::vector<char> before = t.Contains(all);
      const Keys keys = Progression(90, 30);
      const std::vector<uint32_t> times(keys.size(), 2);
      std::vector<char> vectors(keys.size() * 16);
      RowIds rows(keys.size());
      SavedRows saved(size_t{1} << 20);
      std::vector<Table::KeyState> states(keys.size());
      const Tick tick = t.tick() + 1;
      t.set_tick(tick);
      device.FailTake(k);
      Status status;
      switch (call) {
        case 0:
          status =
              t->LookupCounted(exec, t.Pack(keys), times.data(), tick, vectors.data(), rows.data());
          break;
        case 1:
          status = t->FindOrInsert(exec, t.Pack(keys), tick, rows.data());
          break;
        case 2:
          t->Erase(exec, t.Pack(keys), tick, Removal::kWipe);
          break;
        case 3:
          t->Explain(exec, t.Pack(keys), states.data());
          break;
        default:
          status = t->BeginCut(exec, tick, 0, CutOf::kDelta, &saved, 0);
          t->EndCut();
      }
      failed = !device.FailTake(ThreadsDevice::kNever);
      if (!failed) {
        EXPECT_TRUE(status.ok()) << status.message();
        continue;
      }
      if (call == 0 && status.ok()) {
        ++unpromoted;
        EXPECT_EQ(t.stats().promotions, 0u);
        t.Check();
        continue;
      }
      if (status.ok()) status = t->Promote(exec, tick);
      EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
      const Status next = t->Promote(exec, tick);
      if (!next.ok()) {
        EXPECT_NE(next.message().find("inconsistent"), std::string::npos) << next.message();
        continue;
      }
      ++usable;
      EXPECT_EQ(t.Contains(all), before);
      t.Check();
      RowIds again;
      EXPECT_TRUE(t.TryFindOrInsert(Progression(100, 9), &again).ok());
      t.Check();
    }
    EXPECT_GT(usable, 1u) << call;
    EXPECT_EQ(unpromoted != 0, call == 0) << unpromoted;
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
