// The cost of finding the distinct keys of a batch, and of summing gradients per distinct key.
//
//   RunDedup/<distribution>/n/threads         ns per key; 128 keys: the overhead of a call
//   RunBackward/<case>/hotness/dim/threads    26 tables of 1 million keys, batch 8,192; counts the
//                                             bytes of upstream rows read and sums written
//
// Only the sums are large, so Backward's bytes_per_second is comparable with Copy's.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/dedup.h"
#include "cc/table/exec.h"

namespace dynemb {
namespace {

constexpr size_t kTables = 26, kBatch = 8192;
constexpr uint64_t kVocabulary = 1000000;

void RunDedup(benchmark::State& state, Keys kind) {
  const size_t n = state.range(0);
  ThreadsExec exec(state.range(1));
  const std::vector<uint64_t> keys = KeysOf(DrawRows(kind, n, kVocabulary, 1));
  Dedup<uint64_t> dedup;
  for (auto _ : state) {
    if (!dedup.Run(exec, keys.data(), n).ok()) state.SkipWithError("Run failed");
    benchmark::DoNotOptimize(dedup.num_unique());
  }
  state.counters["ns_per_key"] = benchmark::Counter(
      n * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  state.counters["unique"] = dedup.num_unique();
}

void DedupArgs(benchmark::internal::Benchmark* b) {
  b->ArgNames({"n", "threads"})->UseRealTime();
  for (int n : {128, 2048, 65536, 212992, 2129920}) {
    for (int threads : {1, 2}) b->Args({n, threads});
  }
}
BENCHMARK_CAPTURE(RunDedup, uniform, Keys::kUniform)->Apply(DedupArgs);
BENCHMARK_CAPTURE(RunDedup, zipf, Keys::kZipf)->Apply(DedupArgs);
BENCHMARK_CAPTURE(RunDedup, equal, Keys::kEqual)->Args({65536, 2})->UseRealTime();

enum class Form { kUniform, kSplits, kIndices };

void RunBackward(benchmark::State& state, Keys kind, Form form, Combiner combiner, bool weighted,
                 DType dtype = DType::kFloat32) {
  const size_t hotness = state.range(0), dim = state.range(1), nnz = kBatch * hotness;
  ThreadsExec exec(state.range(2));
  const std::vector<float> upstream(kBatch * dim, 0.5f), weights(nnz, 0.25f);
  const std::vector<RowId> rows(nnz, 1);
  const std::vector<int32_t> argmax(kBatch * dim, -1);
  std::vector<int64_t> splits(kBatch + 1), indices(2 * nnz);
  for (size_t b = 0; b <= kBatch; ++b) splits[b] = b * hotness;
  for (size_t i = 0; i < nnz; ++i) indices[2 * i] = i / hotness;
  std::vector<std::vector<uint64_t>> keys;
  std::vector<Bags> bags(kTables);
  std::vector<BackwardTask> tasks(kTables);
  for (size_t t = 0; t < kTables; ++t) {
    keys.push_back(KeysOf(DrawRows(kind, nnz, kVocabulary, t)));
    BackwardTask& task = tasks[t];
    task.key_type = KeyType::kUint64;
    task.keys = keys[t].data();
    task.rows = rows.data();
    task.bags = &bags[t];
    task.weights = weighted ? weights.data() : nullptr;
    task.combiner = combiner;
    task.argmax = argmax.data();
    task.dtype = dtype;
    task.upstream = upstream.data();
    task.dim = static_cast<int64_t>(dim);
  }
  Backward backward;
  std::vector<std::unique_ptr<float[]>> sums(kTables);
  std::vector<std::vector<uint64_t>> unique(kTables, std::vector<uint64_t>(nnz));
  std::vector<std::vector<RowId>> unique_rows(kTables, std::vector<RowId>(nnz));
  std::vector<BackwardOutput> outputs(kTables);
  for (size_t t = 0; t < kTables; ++t) {
    sums[t] = std::make_unique<float[]>(nnz * dim);
    outputs[t] = {unique[t].data(), unique_rows[t].data(), sums[t].get()};
  }
  size_t num_unique = 0;
  for (auto _ : state) {
    bool ok = true;
    for (Bags& b : bags) {
      ok &= (form == Form::kUniform  ? b.InitUniform(hotness, nnz, kBatch)
             : form == Form::kSplits ? b.InitSplits(exec, splits.data(), kBatch + 1, nnz, kBatch)
                                     : b.InitIndices(exec, indices.data(), 2, nnz, kBatch))
                .ok();
    }
    ok &= backward.Prepare(exec, tasks.data(), kTables).ok();
    if (!ok) state.SkipWithError("Prepare failed");
    num_unique = 0;
    for (size_t t = 0; t < kTables; ++t) num_unique += backward.num_unique(t);
    backward.Write(exec, outputs.data());
  }
  const size_t ids = kTables * nnz;
  state.SetBytesProcessed(state.iterations() *
                          (ids * dim * SizeOf(dtype) + num_unique * dim * sizeof(float)));
  state.counters["ns_per_id"] = benchmark::Counter(
      ids * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  state.counters["unique"] = num_unique;
}

void BackwardArgs(benchmark::internal::Benchmark* b) {
  b->ArgNames({"hotness", "dim", "threads"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (int threads : {1, 2}) b->Args({1, 16, threads})->Args({10, 16, threads});
}
BENCHMARK_CAPTURE(RunBackward, uniform_sum, Keys::kUniform, Form::kUniform, Combiner::kSum, false)
    ->Apply(BackwardArgs)
    ->Args({10, 8, 2})
    ->Args({10, 20, 2})
    ->Args({10, 64, 2});
BENCHMARK_CAPTURE(RunBackward, zipf_sum, Keys::kZipf, Form::kUniform, Combiner::kSum, false)
    ->Apply(BackwardArgs);
BENCHMARK_CAPTURE(RunBackward, splits_mean_weighted, Keys::kUniform, Form::kSplits, Combiner::kMean,
                  true)
    ->Apply(BackwardArgs);
BENCHMARK_CAPTURE(RunBackward, indices_sum, Keys::kUniform, Form::kIndices, Combiner::kSum, false)
    ->Apply(BackwardArgs);
BENCHMARK_CAPTURE(RunBackward, uniform_max, Keys::kUniform, Form::kUniform, Combiner::kMax, false)
    ->Apply(BackwardArgs);
BENCHMARK_CAPTURE(RunBackward, uniform_sum_bf16, Keys::kUniform, Form::kUniform, Combiner::kSum,
                  false, DType::kBfloat16)
    ->Apply(BackwardArgs);

void Copy(benchmark::State& state) {
  constexpr size_t kBytes = 128 << 20, kRange = 1 << 20;
  ThreadsExec exec(state.range(0));
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  for (auto _ : state) {
    exec.ParallelFor(kBytes, kRange, [&](size_t begin, size_t end) {
      std::memcpy(to.data() + begin, from.data() + begin, end - begin);
    });
  }
  state.SetBytesProcessed(state.iterations() * 2 * kBytes);
}
BENCHMARK(Copy)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace dynemb
