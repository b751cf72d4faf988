// The cost of admission (cc/table/admission.h) for a lookup that inserts, without TensorFlow.
//
//   Pool / hotness, unknown, threads   batches of 65,536 ids, of which `unknown` percent were never
//                                      seen before and the others have rows, uniformly drawn from 2
//                                      million rows of dim 16. Two tables take turns: one without
//                                      admission, in which the unknown ids get rows, and one with
//                                      Frequency(2), which counts and refuses them. The counters
//                                      give the median time of a batch without admission, and the
//                                      median of the ratios.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/pool.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

constexpr size_t kBatch = 65536;
constexpr uint64_t kRows = 2'000'000;
constexpr int64_t kDim = 16;

class Subject {
 public:
  Subject(Exec& exec, bool admission) : exec_(exec) {
    TableOptions options;
    options.name = "admission";
    options.dim = kDim;
    options.init_capacity = 8 * kRows;
    if (admission) {
      options.admission.rule = Admit::kFrequency;
      options.admission.times = 2;
      // A counter for each row that the table has room for, 23 to a line.
      options.admission.lines = options.admission.num_lines = options.init_capacity / 23;
    }
    Require(Table::Create(options, &table_));
    for (uint64_t begin = 0; begin < kRows; begin += kBatch) {
      std::vector<uint64_t> keys;
      for (uint64_t i = begin; i < std::min(kRows, begin + kBatch); ++i)
        keys.push_back(KeyOfRow(i));
      const std::vector<float> vectors(keys.size() * kDim, 0.0f);
      Require(table_->Upsert(exec, {keys.data(), keys.size()}, vectors.data(), ++tick_));
    }
  }

  // The seconds that a batch takes.
  double Pool(const std::vector<uint64_t>& keys, const Bags& bags) {
    PoolTask task;
    task.table = table_.get();
    task.keys = keys.data();
    task.rows = rows_.data();
    task.bags = &bags;
    task.pooled = out_.data();
    const auto begin = std::chrono::steady_clock::now();
    Require(dynemb::Pool(exec_, {task}, ++tick_, /*insert=*/true));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  Exec& exec_;
  std::unique_ptr<Table> table_;
  Tick tick_ = 0;
  std::vector<RowId> rows_ = std::vector<RowId>(kBatch);
  std::vector<float> out_ = std::vector<float>(kBatch * kDim);
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Pool(benchmark::State& state) {
  constexpr size_t kSteps = 120, kWarmUp = 20;
  const auto hotness = state.range(0);
  ThreadsExec exec(static_cast<size_t>(state.range(2)));
  const int64_t nnz = static_cast<int64_t>(kBatch) / hotness * hotness;
  Bags bags;
  Require(bags.InitUniform(hotness, nnz, nnz / hotness));
  Subject plain(exec, false), counting(exec, true);
  for (auto _ : state) {
    uint64_t next = kRows;
    std::vector<double> times, ratios;
    for (size_t step = 0; step < kSteps; ++step) {
      std::vector<uint64_t> rows = DrawRows(Keys::kUniform, bags.nnz(), kRows, step + 1);
      const std::vector<uint64_t> chances =
          DrawRows(Keys::kUniform, bags.nnz(), 100, kSteps + step);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (chances[i] < static_cast<uint64_t>(state.range(1))) rows[i] = next++;
      }
      const std::vector<uint64_t> keys = KeysOf(rows);
      double seconds[2];
      for (const bool admission : {step % 2 == 0, step % 2 != 0}) {
        seconds[admission] = (admission ? counting : plain).Pool(keys, bags);
      }
      if (step < kWarmUp) continue;
      times.push_back(seconds[0]);
      ratios.push_back(seconds[1] / seconds[0]);
    }
    state.counters["without, ms"] = 1e3 * Median(times);
    state.counters["Frequency(2)"] = Median(ratios);
  }
}
BENCHMARK(Pool)
    ->ArgNames({"hotness", "unknown", "threads"})
    ->ArgsProduct({{1, 10}, {0, 5, 20}, {1, 2}})
    ->Iterations(1)
    ->Unit(benchmark::kSecond);

}  // namespace
}  // namespace dynemb
