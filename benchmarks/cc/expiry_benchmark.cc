// Tables whose rows expire (cc/table/expiry.h).
//
//   Lookup / keys / threads  batches of ids that all have rows, 5 million rows of dim 16:
//                            LookupOrInsert. Counters give the time with a time to live, since the
//                            last update or the last access, as a multiple of the time without:
//                            medians of several rounds, in each of which all tables take turns.
//   Steps / expired          10 million rows of dim 16, of which a million expire at once, or none;
//                            batches of 65,536 ids that have rows. Counters give the longest step
//                            and the 99th percentile as multiples of the median, until all expired
//                            rows have been removed, and the number of steps that this takes. The
//                            time of a step is the median of its times in several runs, which do
//                            the same: a step in which the machine did something else is not long.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

constexpr size_t kBatch = 65536;
constexpr int64_t kDim = 16;

std::unique_ptr<Table> Make(int64_t ttl, bool since_access) {
  TableOptions options;
  options.name = "expiry";
  options.dim = kDim;
  options.ttl = ttl;
  options.ttl_clock = TtlClock::kData;
  options.ttl_since_access = since_access;
  std::unique_ptr<Table> table;
  Require(Table::Create(options, &table));
  return table;
}

// Inserts rows [first, last).
void Insert(Exec& exec, Table* table, size_t first, size_t last, Tick* tick) {
  std::vector<RowId> rows(kBatch);
  for (size_t begin = first; begin < last; begin += kBatch) {
    std::vector<uint64_t> keys;
    for (size_t i = begin; i < std::min(last, begin + kBatch); ++i) keys.push_back(KeyOfRow(i));
    Require(table->FindOrInsert(exec, {keys.data(), keys.size()}, ++*tick, rows.data()));
  }
}

double Seconds(Exec& exec, Table* table, const std::vector<uint64_t>& keys, Tick* tick,
               std::vector<float>* vectors, std::vector<RowId>* rows) {
  const auto begin = std::chrono::steady_clock::now();
  Require(table->LookupOrInsert(exec, {keys.data(), keys.size()}, ++*tick, vectors->data(),
                                rows->data()));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

void Lookup(benchmark::State& state) {
  constexpr size_t kRows = 5'000'000, kBatches = 16, kRounds = 15;
  const auto kind = state.range(0) == 0 ? Keys::kUniform : Keys::kZipf;
  ThreadsExec exec(static_cast<size_t>(state.range(1)));
  std::unique_ptr<Table> tables[] = {Make(0, false), Make(10, false), Make(10, true)};
  Tick tick = 0;
  for (auto& table : tables) {
    if (table->options().ttl != 0) Require(table->SetDataTime(0, ++tick));
    Insert(exec, table.get(), kRows, kRows + kBatch, &tick);
    // Some rows have expired, so that each row is compared with a time.
    if (table->options().ttl != 0) Require(table->SetDataTime(10, ++tick));
    Insert(exec, table.get(), 0, kRows, &tick);
  }
  std::vector<float> vectors(kBatch * kDim);
  std::vector<RowId> rows(kBatch);
  std::vector<std::vector<uint64_t>> batches;
  for (size_t b = 0; b < kBatches; ++b) {
    batches.push_back(KeysOf(DrawRows(kind, kBatch, kRows, b + 1)));
  }
  for (auto _ : state) {
    std::vector<double> ratios[3];
    double plain = 0;
    for (size_t round = 0; round < kRounds; ++round) {
      double first = 0;
      for (size_t t = 0; t < 3; ++t) {
        double seconds = 0;
        for (const auto& keys : batches) {
          seconds += Seconds(exec, tables[t].get(), keys, &tick, &vectors, &rows);
        }
        if (t == 0) first = seconds, plain += seconds;
        ratios[t].push_back(seconds / first);
      }
    }
    state.counters["without ttl, million ids/s"] = kRounds * kBatches * kBatch / plain / 1e6;
    state.counters["since update"] = Percentile(ratios[1], 0.5);
    state.counters["since access"] = Percentile(ratios[2], 0.5);
  }
}
BENCHMARK(Lookup)->ArgsProduct({{0, 1}, {1, 2}})->Iterations(1)->Unit(benchmark::kSecond);

// The seconds of the steps of one run.
std::vector<double> RunSteps(bool expire) {
  constexpr size_t kRows = 10'000'000, kExpired = 1'000'000, kSteps = 500;
  ThreadsExec exec(2);
  std::unique_ptr<Table> table = Make(10, false);
  Tick tick = 0;
  Require(table->SetDataTime(0, ++tick));
  Insert(exec, table.get(), 0, kExpired, &tick);
  Require(table->SetDataTime(5, ++tick));
  Insert(exec, table.get(), kExpired, kRows, &tick);
  std::vector<std::vector<uint64_t>> batches;
  for (size_t b = 0; b < 16; ++b) {
    std::vector<uint64_t> drawn = DrawRows(Keys::kUniform, kBatch, kRows - kExpired, b + 1);
    for (uint64_t& row : drawn) row += kExpired;
    batches.push_back(KeysOf(drawn));
  }
  std::vector<float> vectors(kBatch * kDim);
  std::vector<RowId> rows(kBatch);
  for (size_t s = 0; s < 50; ++s) {
    Seconds(exec, table.get(), batches[s % 16], &tick, &vectors, &rows);
  }
  Require(table->SetDataTime(expire ? 10 : 6, ++tick));
  std::vector<double> seconds;
  while (expire ? table->size() > kRows - kExpired : seconds.size() < kSteps) {
    seconds.push_back(
        Seconds(exec, table.get(), batches[seconds.size() % 16], &tick, &vectors, &rows));
  }
  return seconds;
}

void Steps(benchmark::State& state) {
  constexpr size_t kRuns = 9;
  for (auto _ : state) {
    std::vector<std::vector<double>> runs;
    for (size_t r = 0; r < kRuns; ++r) runs.push_back(RunSteps(state.range(0) != 0));
    std::vector<double> seconds;
    for (size_t s = 0; s < runs[0].size(); ++s) {
      std::vector<double> times;
      for (const std::vector<double>& run : runs) times.push_back(run[s]);
      seconds.push_back(Percentile(times, 0.5));
    }
    const double median = Percentile(seconds, 0.5);
    state.counters["median step, ms"] = 1e3 * median;
    state.counters["99% / median"] = Percentile(seconds, 0.99) / median;
    state.counters["longest / median"] = Percentile(seconds, 1) / median;
    state.counters["steps"] = static_cast<double>(seconds.size());
  }
}
BENCHMARK(Steps)->Arg(0)->Arg(1)->Iterations(1)->Unit(benchmark::kSecond);

}  // namespace
}  // namespace dynemb
