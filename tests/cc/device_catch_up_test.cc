// The contract suites of catch-up on device tables, whose device is simulated: rows in either tier
// and in both; kernels run by one thread for each key or row, and by emulated warps.
#include <memory>
#include <utility>

#include "tests/cc/device_config.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

const TableKind kDeviceTables[] = {
    QuickTable(-1, KeyType::kInt64, DType::kFloat32),
    QuickTable(7, KeyType::kInt32, DType::kFloat32),
    QuickTable(100, KeyType::kUint64, DType::kBfloat16),
    SimulatedTable<ThreadsDevice>(-1, KeyType::kInt64, DType::kFloat32, 1)};
// Threads divide the work in the same way for all types.
INSTANTIATE_CATCH_UP_SUITES(Device, OnlyIf(kUnderTsan, {0, 2}, kDeviceTables));

const TableKind kWarpTables[] = {
    SimulatedTable<NarrowTeamsDevice>(5, KeyType::kInt64, DType::kFloat32, SlownessOfTeams(4))};
// Under sanitizers, other tests run the kernels of saved rows. Under the thread sanitizer, all of
// catch-up is too slow for an emulated warp.
INSTANTIATE_TABLE_SUITE(DeviceWarp, TableCatchUp, OnlyIf(kUnderTsan, {}, kWarpTables));
INSTANTIATE_TABLE_SUITE(DeviceWarp, TableCatchUpSaved, OnlyIf(kSanitized, {}, kWarpTables));

constexpr int64_t kDim = 4;

// A table with the state of AdamW, on a device or, without one, in host memory.
class Stepped {
 public:
  Stepped(ThreadsDevice* device, Exec* exec, TableOptions options, int64_t width = kDim)
      : dim(width) {
    options.name = "stepped";
    options.dim = dim;
    std::unique_ptr<Table> made;
    const Status status = device != nullptr
                              ? DeviceTable<ThreadsDevice>::Make(options, device, &made)
                              : Table::Create(options, &made);
    EXPECT_TRUE(status.ok()) << status.message();
    t = std::make_unique<Subject>(std::move(made), exec);
    flags.catch_up = true;
    hyper.weight_decay = 0.01f;
    const std::vector<int64_t> widths = StateWidths(OptimizerKind::kAdam, flags, dim);
    EXPECT_TRUE((*t)->AttachState(*exec, {"adam catch_up", widths, {0.0f, 0.0f, 0.0f}}).ok());
  }
  Status Step(const Keys& keys) {
    RowIds rows;
    t->LookupOrInsert(keys, &rows);
    return Apply(keys, rows);
  }
  Status Apply(const Keys& keys, const RowIds& rows) {
    hyper.iteration = static_cast<float>(iteration + 1);
    DYNEMB_RETURN_IF_ERROR((*t)->BeginStep(t->exec(), flags, hyper, t->tick() + 1));
    const RowOptimizer adam(OptimizerKind::kAdam, flags, hyper, dim);
    t->Apply(adam, keys, rows, Floats(keys.size() * static_cast<size_t>(dim), 0.5f), ++iteration);
    DYNEMB_RETURN_IF_ERROR((*t)->Error());
    (*t)->EndStep(t->exec(), hyper, iteration, t->tick());
    return (*t)->Error();
  }

  const int64_t dim;
  std::unique_ptr<Subject> t;
  OptimizerFlags flags;
  Hyper hyper;
  uint64_t iteration = 0;
};

// A step with a new learning rate gives the device a run, an alpha and marks, and its lookup brings
// rows up to date. None of this waits.
TEST(DeviceCatchUp, StepsDoNotWait) {
  SKIP_UNDER_SANITIZERS("counts the waits of steps that other tests take");
  ThreadsDevice device;
  ThreadsExec exec(2);
  TableOptions options;
  options.tier = Tier::kHbm;
  options.init_capacity = 5000;
  Stepped s(&device, &exec, options);
  ASSERT_TRUE(s.Step(Progression(0, 1000)).ok());
  Random random(4);
  uint64_t waits = 0;
  for (int step = 0; step < 120; ++step) {
    if (step == 20) waits = device.waits();
    s.hyper.learning_rate *= 0.999f;
    ASSERT_TRUE(s.Step(Progression(random.Below(900), 100)).ok());
  }
  EXPECT_EQ(device.waits(), waits);
}

// Several threads bring the same row at the same time: only one of them gives it its steps.
TEST(DeviceCatchUp, RepeatedKeysGetTheirStepsOnce) {
  ThreadsDevice device;
  ThreadsExec threads(4);
  SerialExec serial;
  TableOptions options;
  options.tier = Tier::kHbm;
  // Wide rows that lack many steps keep a thread busy while the others begin.
  constexpr int64_t kWide = 256;
  Stepped s(&device, &threads, options, kWide), host(nullptr, &serial, TableOptions(), kWide);
  const Keys keys = Progression(0, 16);
  Keys repeated(1024);
  for (size_t i = 0; i < repeated.size(); ++i) repeated[i] = i % keys.size();
  for (Stepped* each : {&s, &host}) ASSERT_TRUE(each->Step(keys).ok());
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 100; ++i) {
      for (Stepped* each : {&s, &host}) ASSERT_TRUE(each->Step({99}).ok());
    }
    s.t->Lookup(repeated);
    ASSERT_EQ(s.t->Read(keys), host.t->Lookup(keys)) << round;
  }
}

// Its record of steps grows in the device's memory. A step for which there is none fails before it
// begins.
TEST(DeviceCatchUp, MemoryForStepsRunsOut) {
  constexpr size_t kMemory = size_t{4} << 20;
  ThreadsDevice device(kMemory);
  SerialExec exec;
  TableOptions options;
  options.tier = Tier::kHbm;
  options.init_capacity = 100;
  Stepped s(&device, &exec, options), host(nullptr, &exec, TableOptions());
  const Keys keys = Progression(0, 50);
  ThreadsDevice::Range others;
  bool failed = false;
  for (int step = 0; step < 3000; ++step) {
    if (step == 1000) {
      const size_t free = kMemory - device.used();
      ASSERT_TRUE(others.Reserve(device, free).ok());
      ASSERT_TRUE(others.Commit(free).ok());
    }
    for (Stepped* each : {&s, &host}) each->hyper.learning_rate = step % 2 == 0 ? 0.01f : 0.02f;
    const Keys some = step == 0 ? keys : Progression(static_cast<uint64_t>(step % 7), 1);
    Status status = s.Step(some);
    if (!status.ok()) {
      EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.message();
      EXPECT_FALSE(failed);
      failed = true;
      EXPECT_EQ((*s.t)->catch_up().step(), (*host.t)->catch_up().step());
      others = ThreadsDevice::Range();
      status = s.Step(some);
    }
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(host.Step(some).ok());
  }
  EXPECT_TRUE(failed);
  Floats state, host_state;
  EXPECT_EQ(s.t->Read(keys, &state), host.t->Read(keys, &host_state));
  EXPECT_EQ(s.t->Lookup(keys), host.t->Lookup(keys));
  s.t->Check();
}

// Workspace runs out at every point of calls that bring rows up to date. The table then has not
// changed, or reports that it is inconsistent.
TEST(DeviceCatchUp, CallsReportFailures) {
  using Call = Status (*)(Stepped&);
  const std::pair<const char*, Call> calls[] = {
      {"BringKeys",
       [](Stepped& s) {
         (*s.t)->BringKeys(s.t->exec(), s.t->Pack(Progression(0, 20)));
         return (*s.t)->Error();
       }},
      {"ReadRows",
       [](Stepped& s) {
         Floats state;
         s.t->Read(Progression(0, 20), &state);
         return (*s.t)->Error();
       }},
      {"SelectRows",
       [](Stepped& s) {
         RowPredicate where;
         where.has_norms = true;
         where.norm_from = 0;
         (void)(*s.t)->SelectRows(s.t->exec(), 0, 100, where);
         return (*s.t)->Error();
       }},
      {"Apply",
       [](Stepped& s) {
         return s.Apply({1, 2}, s.t->Find({1, 2}));
       }},
      {"OtherHyperparameters",
       [](Stepped& s) {
         s.hyper.beta_1 = 0.5f;
         return s.Apply({1, 2}, s.t->Find({1, 2}));
       }},
      {"AttachState",
       [](Stepped& s) {
         return (*s.t)->AttachState(s.t->exec(), {"adagrad", {kDim}, {0.0f}});
       }},
  };
  size_t failures = 0;
  for (const auto& [name, call] : calls) {
    bool failed = true;
    for (uint64_t k = 0; failed; ++k) {
      SCOPED_TRACE(testing::Message() << name << " fails at " << k);
      ASSERT_LT(k, 100u);
      ThreadsDevice device;
      SerialExec exec;
      TableOptions options;
      options.tier = Tier::kHybrid;
      options.max_hbm_bytes = 10 * 48;
      Stepped s(&device, &exec, options);
      const Keys keys = Progression(0, 40);
      ASSERT_TRUE(s.Step(keys).ok());
      for (int i = 0; i < 5; ++i) ASSERT_TRUE(s.Step({3}).ok());
      Floats state;
      const Floats before = s.t->Read(keys, &state);
      device.FailTake(k);
      const Status status = call(s);
      failed = !device.FailTake(ThreadsDevice::kNever);
      if (!failed) {
        EXPECT_TRUE(status.ok()) << status.message();
        continue;
      }
      ++failures;
      EXPECT_FALSE(status.ok());
      if ((*s.t)->Promote(exec, s.t->tick()).ok()) {
        EXPECT_EQ(s.t->Read(keys, &state), before);
        s.t->Check();
      } else {
        EXPECT_FALSE(s.t->TryUpsert({1}, Floats(kDim, 1.0f)).ok());
      }
    }
  }
  EXPECT_GT(failures, 10u);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
