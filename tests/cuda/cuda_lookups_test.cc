// Lookups over tables in a GPU's memory.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cc/device/cuda_device.h"
#include "cc/device/cuda_table.h"
#include "cc/device/stream_exec.h"
#include "tests/cc/lookups_suite.h"
#include "tests/cc/lookups_suite_admission.h"
#include "tests/cc/lookups_suite_pooled.h"
#include "tests/cuda/cuda_place.h"

namespace dynemb {
namespace testing_table {
namespace {

struct Cuda : CudaPlace {
  static constexpr Tick kSteps = 30;
  static constexpr uint64_t kMostIds = 6000;

  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    return MakeCudaTable(options, /*ordinal=*/0, table);
  }
  static Lookups& lookups() {
    Lookups* lookups = nullptr;
    const Status status = CudaLookups(/*ordinal=*/0, &lookups);
    if (!status.ok()) std::abort();
    return *lookups;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, LookupsTest, Cuda);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, LookupsAdmissionTest, Cuda);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, ApplyPooledTest, Cuda);

// A step of lookups and updates returns before its work is done, even while the GPU is busy. (The
// test leaves out SumGradients, which waits for the number of unique keys. ApplyPooled does not.)
TEST(CudaLookupsTest, StepsDoNotWait) {
  if (!Cuda::Missing().empty()) GTEST_SKIP() << Cuda::Missing();
  World<Cuda> world;
  std::vector<TableOptions> options = FourTables(24);
  for (TableOptions& o : options) {
    o.init_capacity = 50000;
    ASSERT_TRUE(world.AddForAdagrad(o).ok());
  }
  Random random(9);
  std::vector<Ask> asks = SevenAsks(random, 3000);
  World<Cuda>::Step step;
  world.Prepare(asks, &step);
  std::vector<ApplyTask> applies;
  for (size_t a : {1, 2, 6}) {
    ApplyTask apply;
    apply.table = step.pools[a].table;
    apply.keys = step.pools[a].keys;
    apply.rows = step.pools[a].rows;
    apply.gradients = step.arrays.Up(
        Floats(asks[a].keys.size() * static_cast<size_t>(apply.table->options().dim), 0.1f));
    apply.n = asks[a].keys.size();
    applies.push_back(apply);
  }
  ApplyPooledTask pooled;
  ASSERT_EQ(asks[1].table, 0u);  // whose rows are whole
  static_cast<BackwardTask&>(pooled) =
      world.Gradients(asks, Upstreams(random, asks, options), &step)[1];
  pooled.table = step.pools[1].table;
  const auto stream = static_cast<StreamExec&>(Cuda::exec()).stream();
  Tick tick = 0;
  const auto run = [&] {
    ASSERT_TRUE(Cuda::lookups().Pool(Cuda::exec(), step.pools, ++tick, true).ok());
    ASSERT_TRUE(Cuda::lookups()
                    .Apply(Cuda::exec(), applies,
                           {OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}}, ++tick)
                    .ok());
    ASSERT_TRUE(Cuda::lookups()
                    .ApplyPooled(Cuda::exec(), {pooled},
                                 {OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}}, ++tick)
                    .ok());
  };
  for (int i = 0; i < 8; ++i) run();  // allocates the memory that later steps use
  Succeeds(cudaStreamSynchronize(stream));
  cudaEvent_t begun = nullptr;
  Succeeds(cudaEventCreate(&begun));
  // Copies that keep the GPU busy for much longer than the host takes to give it the steps.
  size_t left = 0, total = 0;
  Succeeds(cudaMemGetInfo(&left, &total));
  const size_t bytes = std::min(size_t{1} << 30, total / 8);
  char* busy = nullptr;
  Succeeds(cudaMalloc(reinterpret_cast<void**>(&busy), 2 * bytes));
  for (int i = 0; i < 100; ++i) {
    Succeeds(cudaMemcpyAsync(busy, busy + bytes, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  Succeeds(cudaEventRecord(begun, stream));
  for (int i = 0; i < 2; ++i) run();  // more than eight sessions wait for pinned memory
  EXPECT_EQ(cudaEventQuery(begun), cudaErrorNotReady);
  Succeeds(cudaStreamSynchronize(stream));
  Succeeds(cudaFree(busy));
  Succeeds(cudaEventDestroy(begun));
}

// A table waits for the stream of its last use, even if that has been destroyed.
TEST(CudaLookupsTest, TablesOutliveTheirStreams) {
  if (!Cuda::Missing().empty()) GTEST_SKIP() << Cuda::Missing();
  std::unique_ptr<Table> table;
  ASSERT_TRUE(Cuda::Make(FourTables(24)[0], &table).ok());
  std::vector<int64_t> keys(100);
  for (Tick tick = 1; tick <= 5; ++tick) {
    std::iota(keys.begin(), keys.end(), static_cast<int64_t>(tick * keys.size()));
    cudaStream_t stream = nullptr;
    Succeeds(cudaStreamCreate(&stream));
    StreamExec exec(stream);
    Cuda::Arrays arrays;
    RowId* const rows = arrays.Up(std::vector<RowId>(keys.size()));
    ASSERT_EQ(table->FindOrInsert(exec, {arrays.Up(keys), keys.size()}, tick, rows).message(), "");
    Succeeds(cudaStreamDestroy(stream));
    EXPECT_EQ(table->size(), tick * keys.size());
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
