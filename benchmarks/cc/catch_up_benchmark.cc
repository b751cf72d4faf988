// The cost of a lookup of rows that make up for missed steps (cc/table/catch_up.h), without
// TensorFlow, in ns per row. All 65,536 rows of a table; each has missed `gap` steps, 0 for a
// lookup of rows that are up to date.
//
//   <optimizer> / dim, gap, threads
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/table/exec.h"
#include "cc/table/optimizer.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

constexpr size_t kRows = 65536;

void RunLookup(benchmark::State& state, OptimizerKind kind, OptimizerFlags flags,
               const std::string& name, float weight_decay) {
  const int64_t dim = state.range(0);
  const auto gap = static_cast<uint64_t>(state.range(1));
  ThreadsExec exec(static_cast<size_t>(state.range(2)));
  flags.catch_up = true;
  Hyper hyper;
  hyper.momentum = 0.9f;
  hyper.weight_decay = weight_decay;
  const std::unique_ptr<Table> table = MakeTable(dim, kRows);
  StateSpec spec;
  spec.optimizer = name;
  spec.widths = StateWidths(kind, flags, dim);
  spec.inits.assign(spec.widths.size(), 0.0f);
  Require(table->AttachState(exec, spec));

  std::vector<uint64_t> keys(kRows);
  for (size_t i = 0; i < kRows; ++i) keys[i] = KeyOfRow(i);
  const std::vector<float> gradients(kRows * static_cast<size_t>(dim), 1e-3f);
  std::vector<float> vectors(gradients.size());
  std::vector<RowId> rows(kRows);
  Tick tick = 1;
  uint64_t iteration = 0;
  const auto step = [&](size_t n) {
    hyper.iteration = static_cast<float>(++iteration);
    Require(table->BeginStep(exec, flags, hyper, ++tick));
    const RowOptimizer optimizer(kind, flags, hyper, dim);
    table->BeginBatch(exec, tick, n);
    table->ApplyRange(exec, optimizer, {keys.data(), n}, rows.data(), gradients.data(), 0, n,
                      iteration, tick);
    table->EndStep(exec, hyper, iteration, tick);
  };
  Require(table->FindOrInsert(exec, {keys.data(), kRows}, tick, rows.data()));
  step(kRows);
  for (auto _ : state) {
    state.PauseTiming();
    step(kRows);  // otherwise moments become subnormal numbers, which are slow
    for (uint64_t i = 0; i < gap; ++i) step(0);
    state.ResumeTiming();
    table->Lookup(exec, {keys.data(), kRows}, ++tick, nullptr, vectors.data(), rows.data());
  }
  state.counters["ns_per_row"] = benchmark::Counter(
      static_cast<double>(kRows) * 1e-9,
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void Cases(benchmark::internal::Benchmark* cases) {
  for (const int64_t dim : {16, 64}) {
    for (const int64_t gap : {0, 1, 10, 100, 1000}) cases->Args({dim, gap, 2});
  }
  cases->Unit(benchmark::kMillisecond)->UseRealTime();
}

const OptimizerFlags kMomentum = [] {
  OptimizerFlags flags;
  flags.momentum = true;
  return flags;
}();
BENCHMARK_CAPTURE(RunLookup, SgdWithWeightDecay, OptimizerKind::kSgd, {}, "sgd catch_up", 1e-3f)
    ->Apply(Cases);
BENCHMARK_CAPTURE(RunLookup, SgdWithMomentum, OptimizerKind::kSgd, kMomentum,
                  "sgd momentum catch_up", 0.0f)
    ->Apply(Cases);
BENCHMARK_CAPTURE(RunLookup, Adam, OptimizerKind::kAdam, {}, "adam catch_up", 0.0f)->Apply(Cases);
BENCHMARK_CAPTURE(RunLookup, AdamW, OptimizerKind::kAdam, {}, "adam catch_up", 1e-3f)->Apply(Cases);

}  // namespace
}  // namespace dynemb
