// The cost of each batch operation of the table, without TensorFlow.
//
//   Find, Lookup, LookupOrInsert, UpsertPresent / dim / threads     random keys of 10 million rows
//   InsertGrowing, InsertSized / dim / threads                      10 million new keys; counters
//                                                                   give the seconds per phase
//   MinimalLookup, MinimalUpsertPresent, MinimalInsertSized        the same in a MinimalTable
//
// Keys per second, in batches of 65,536. memory_benchmark gives the ceilings.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "benchmarks/cc/minimal_table.h"
#include "benchmarks/cc/workload.h"
#include "cc/table/exec.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

constexpr size_t kBatch = 65536;
constexpr size_t kRows = 10'000'000 / kBatch * kBatch;
constexpr size_t kBatches = 32;

void InsertAll(Exec& exec, Table* table, const std::vector<uint64_t>& keys, Tick* tick) {
  const std::vector<float> vectors(kBatch * static_cast<size_t>(table->options().dim), 1.0f);
  for (size_t first = 0; first < kRows; first += kBatch) {
    Require(table->Upsert(exec, {&keys[first], kBatch}, vectors.data(), ++*tick));
  }
}

const std::vector<uint64_t>& AllKeys() {
  static const std::vector<uint64_t> keys = ShuffledKeys(kRows);
  return keys;
}

// A table of kRows rows, and random batches of its keys. Memory permits one at a time.
struct Filled {
  explicit Filled(int64_t dim) : table(MakeTable(dim, 1024)) {
    ThreadsExec exec(2);
    InsertAll(exec, table.get(), AllKeys(), &tick);
    std::mt19937_64 random(2);
    for (std::vector<uint64_t>& batch : batches) {
      batch.resize(kBatch);
      for (uint64_t& key : batch) key = KeyOfRow(random() % kRows);
    }
    vectors.resize(kBatch * static_cast<size_t>(dim));
    rows.resize(kBatch);
  }
  static Filled& Of(int64_t dim) {
    static std::map<int64_t, std::unique_ptr<Filled>> tables;
    if (tables.count(dim) == 0) {
      tables.clear();
      tables[dim] = std::make_unique<Filled>(dim);
    }
    return *tables[dim];
  }

  std::unique_ptr<Table> table;
  Tick tick = 0;
  std::vector<std::vector<uint64_t>> batches{kBatches};
  std::vector<float> vectors;
  std::vector<RowId> rows;
};

// The same rows in a MinimalTable, if a case asked for it.
struct MinimalFilled {
  explicit MinimalFilled(size_t dim) : table(kRows, dim) {
    ThreadsExec exec(2);
    InsertAll(exec, &table, dim);
  }
  static void InsertAll(Exec& exec, MinimalTable* table, size_t dim) {
    const std::vector<uint64_t>& keys = AllKeys();
    const std::vector<float> vectors(kBatch * dim, 1.0f);
    for (size_t first = 0; first < kRows; first += kBatch) {
      table->Upsert(exec, &keys[first], kBatch, vectors.data());
    }
  }
  static MinimalTable& Of(int64_t dim) {
    static std::map<int64_t, std::unique_ptr<MinimalFilled>> tables;
    if (tables.count(dim) == 0) {
      tables.clear();
      tables[dim] = std::make_unique<MinimalFilled>(static_cast<size_t>(dim));
    }
    return tables[dim]->table;
  }

  MinimalTable table;
};

// Calls call(filled, exec, keys) for one batch after the other.
template <class Call>
void RunBatches(benchmark::State& state, const Call& call) {
  Filled& filled = Filled::Of(state.range(0));
  ThreadsExec exec(static_cast<size_t>(state.range(1)));
  size_t next = 0;
  for (auto _ : state) call(filled, exec, filled.batches[next++ % kBatches].data());
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kBatch));
}

void Find(benchmark::State& state) {
  RunBatches(state, [](Filled& f, Exec& exec, const uint64_t* keys) {
    f.table->Find(exec, {keys, kBatch}, ++f.tick, f.rows.data());
  });
}
void Lookup(benchmark::State& state) {
  RunBatches(state, [](Filled& f, Exec& exec, const uint64_t* keys) {
    f.table->Lookup(exec, {keys, kBatch}, ++f.tick, nullptr, f.vectors.data(), f.rows.data());
  });
}
void LookupOrInsert(benchmark::State& state) {
  RunBatches(state, [](Filled& f, Exec& exec, const uint64_t* keys) {
    Require(
        f.table->LookupOrInsert(exec, {keys, kBatch}, ++f.tick, f.vectors.data(), f.rows.data()));
  });
}
// A new output each time, as in an operator: its pages are faulted in every time.
void LookupIntoNewMemory(benchmark::State& state) {
  RunBatches(state, [](Filled& f, Exec& exec, const uint64_t* keys) {
    void* vectors = std::malloc(f.vectors.size() * sizeof(float));
    Require(f.table->LookupOrInsert(exec, {keys, kBatch}, ++f.tick, vectors, f.rows.data()));
    std::free(vectors);
  });
}
void UpsertPresent(benchmark::State& state) {
  RunBatches(state, [](Filled& f, Exec& exec, const uint64_t* keys) {
    Require(f.table->Upsert(exec, {keys, kBatch}, f.vectors.data(), ++f.tick));
  });
}

void MinimalLookup(benchmark::State& state) {
  MinimalTable& table = MinimalFilled::Of(state.range(0));
  RunBatches(state, [&](Filled& f, Exec& exec, const uint64_t* keys) {
    table.Lookup(exec, keys, kBatch, f.vectors.data());
  });
}
// A batch may repeat a key, whose vector then is either one: all vectors are equal here.
void MinimalUpsertPresent(benchmark::State& state) {
  MinimalTable& table = MinimalFilled::Of(state.range(0));
  RunBatches(state, [&](Filled& f, Exec& exec, const uint64_t* keys) {
    table.Upsert(exec, keys, kBatch, f.vectors.data());
  });
}

void MinimalInsertSized(benchmark::State& state) {
  ThreadsExec exec(static_cast<size_t>(state.range(1)));
  const auto dim = static_cast<size_t>(state.range(0));
  AllKeys();
  for (auto _ : state) {
    state.PauseTiming();
    MinimalTable table(kRows, dim);
    state.ResumeTiming();
    MinimalFilled::InsertAll(exec, &table, dim);
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kRows));
}

void RunInsert(benchmark::State& state, int64_t init_capacity) {
  ThreadsExec exec(static_cast<size_t>(state.range(1)));
  const std::vector<uint64_t>& keys = AllKeys();
  PhaseTimes phases;
  for (auto _ : state) {
    state.PauseTiming();
    Tick tick = 0;
    std::unique_ptr<Table> table = MakeTable(state.range(0), init_capacity);
    state.ResumeTiming();
    InsertAll(exec, table.get(), keys, &tick);
    state.PauseTiming();
    table.reset();
    state.ResumeTiming();
  }
  phases.Report(&state);
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kRows));
}
void InsertGrowing(benchmark::State& state) { RunInsert(state, 1024); }
void InsertSized(benchmark::State& state) { RunInsert(state, kRows); }

void Args(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dim", "threads"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (int dim : {16, 64}) {
    for (int threads : {1, 2}) b->Args({dim, threads});
  }
}
BENCHMARK(InsertGrowing)->Apply(Args)->Iterations(2);
BENCHMARK(InsertSized)->Apply(Args)->Iterations(2);
BENCHMARK(MinimalInsertSized)->Apply(Args)->Iterations(2);
// The cases of one dim are consecutive, so that a table is filled once per pair of lines.
BENCHMARK(Find)->Apply(Args);
BENCHMARK(Lookup)->Apply(Args);
BENCHMARK(LookupOrInsert)->Apply(Args);
BENCHMARK(LookupIntoNewMemory)->Apply(Args);
BENCHMARK(UpsertPresent)->Apply(Args);
BENCHMARK(MinimalLookup)->Apply(Args);
BENCHMARK(MinimalUpsertPresent)->Apply(Args);

}  // namespace
}  // namespace dynemb
