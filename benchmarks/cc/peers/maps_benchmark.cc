// The table beside maps of other libraries: boost::unordered_flat_map and absl::flat_hash_map, from
// the key to the number of a row, with rows of float32 in one array. A map cannot be changed by two
// threads, so each thread has a map, for the keys that a hash gives to it.
//
//   Lookup, UpsertPresent <table> / dim / threads     random keys of 10 million rows
//   InsertGrowing         <table> / dim / threads     10 million new keys
//
// Keys per second, in batches of 65,536. <table>: Ours, Minimal (minimal_table.h), Boost, Abseil.
// The maps have no update times, and store no access. A call has two passes: it finds the rows of
// the batch, with a prefetch if the map has one, and then copies vectors, with a prefetch of each.
//
//   bazel build -c opt //benchmarks/cc/peers:maps_benchmark
//   export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
//   maps_benchmark --benchmark_filter=dim:16 --benchmark_enable_random_interleaving=true
//
// The tunable gives huge pages to the maps. The other tables request them.
#include <absl/container/flat_hash_map.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdlib>
#include <memory>
#include <vector>

#include "benchmarks/cc/minimal_table.h"
#include "benchmarks/cc/workload.h"
#include "cc/table/copy_vector.h"
#include "cc/table/exec.h"
#include "cc/table/hash.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

constexpr size_t kBatch = 65536;
constexpr size_t kRows = 10'000'000 / kBatch * kBatch;
constexpr size_t kBatches = 32;
constexpr size_t kAhead = 16;

const std::vector<uint64_t>& AllKeys() {
  static const std::vector<uint64_t> keys = ShuffledKeys(kRows);
  return keys;
}

const std::vector<std::vector<uint64_t>>& Batches() {
  static const std::vector<std::vector<uint64_t>> batches = [] {
    std::vector<std::vector<uint64_t>> drawn(kBatches);
    for (size_t b = 0; b < kBatches; ++b) {
      drawn[b] = KeysOf(DrawRows(Keys::kUniform, kBatch, kRows, b));
    }
    return drawn;
  }();
  return batches;
}

class Ours {
 public:
  Ours(size_t dim, size_t) : table_(MakeTable(static_cast<int64_t>(dim), 1024)), rows_(kBatch) {}
  void Lookup(Exec& exec, const uint64_t* keys, float* vectors) {
    table_->Lookup(exec, {keys, kBatch}, ++tick_, nullptr, vectors, rows_.data());
  }
  void Upsert(Exec& exec, const uint64_t* keys, const float* vectors) {
    Require(table_->Upsert(exec, {keys, kBatch}, vectors, ++tick_));
  }

 private:
  std::unique_ptr<Table> table_;
  std::vector<RowId> rows_;
  Tick tick_ = 0;
};

class Minimal {
 public:
  Minimal(size_t dim, size_t) : table_(kRows, dim) {}
  void Lookup(Exec& exec, const uint64_t* keys, float* vectors) {
    table_.Lookup(exec, keys, kBatch, vectors);
  }
  void Upsert(Exec& exec, const uint64_t* keys, const float* vectors) {
    table_.Upsert(exec, keys, kBatch, vectors);
  }

 private:
  MinimalTable table_;
};

struct BoostMap : boost::unordered_flat_map<uint64_t, uint32_t> {
  void Prefetch(uint64_t) const {}
};
struct AbseilMap : absl::flat_hash_map<uint64_t, uint32_t> {
  void Prefetch(uint64_t key) const { prefetch(key); }
};

template <class Map>
class Maps {
 public:
  Maps(size_t dim, size_t threads) : dim_(dim), parts_(threads) {
    for (Part& part : parts_)
      part.rows.reset(static_cast<float*>(AllocateHugePages(kRows * dim * sizeof(float))));
  }

  // vectors [n, dim]: zeros for keys without a row.
  void Lookup(Exec& exec, const uint64_t* keys, float* vectors) {
    ForParts(exec, keys, [&](Part& part) {
      for (size_t j = 0; j < part.mine.size(); ++j) {
        if (j + kAhead < part.mine.size()) part.map.Prefetch(keys[part.mine[j + kAhead]]);
        const auto at = part.map.find(keys[part.mine[j]]);
        part.found[j] = at == part.map.end() ? kNone : at->second;
      }
      ForVectors(part, [&](size_t i, float* row) {
        if (row != nullptr) {
          CopyVector(vectors + i * dim_, row, dim_ * sizeof(float));
        } else {
          std::fill_n(vectors + i * dim_, dim_, 0.0f);
        }
      });
    });
  }

  void Upsert(Exec& exec, const uint64_t* keys, const float* vectors) {
    ForParts(exec, keys, [&](Part& part) {
      for (size_t j = 0; j < part.mine.size(); ++j) {
        if (j + kAhead < part.mine.size()) part.map.Prefetch(keys[part.mine[j + kAhead]]);
        const auto next = static_cast<uint32_t>(part.map.size());
        part.found[j] = part.map.try_emplace(keys[part.mine[j]], next).first->second;
      }
      ForVectors(part, [&](size_t i, float* row) {
        CopyVector(row, vectors + i * dim_, dim_ * sizeof(float));
      });
    });
  }

 private:
  static constexpr uint32_t kNone = ~0u;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  struct Part {
    Map map;
    std::unique_ptr<float[], Free> rows;
    std::vector<uint32_t> mine, found;  // positions of a batch, and their rows
  };

  template <class Fn>
  void ForParts(Exec& exec, const uint64_t* keys, const Fn& fn) {
    exec.ParallelFor(parts_.size(), 1, [&](size_t begin, size_t end) {
      for (size_t p = begin; p < end; ++p) {
        Part& part = parts_[p];
        part.mine.clear();
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (parts_.size() == 1 || (MixKey(keys[i]) >> 32) % parts_.size() == p) {
            part.mine.push_back(i);
          }
        }
        part.found.resize(part.mine.size());
        fn(part);
      }
    });
  }

  // visit(i, row) for the positions of a part; null: it has no row.
  template <class Fn>
  void ForVectors(Part& part, const Fn& visit) {
    const auto row = [&](size_t j) { return part.rows.get() + part.found[j] * dim_; };
    for (size_t j = 0; j < part.mine.size(); ++j) {
      if (j + kAhead < part.mine.size() && part.found[j + kAhead] != kNone) {
        for (size_t c = 0; c < dim_; c += 16) __builtin_prefetch(row(j + kAhead) + c);
      }
      visit(part.mine[j], part.found[j] == kNone ? nullptr : row(j));
    }
  }

  size_t dim_;
  std::vector<Part> parts_;
};

template <class Table>
void InsertAll(Exec& exec, Table* table, size_t dim) {
  const std::vector<float> vectors(kBatch * dim, 1.0f);
  for (size_t first = 0; first < kRows; first += kBatch) {
    table->Upsert(exec, &AllKeys()[first], vectors.data());
  }
}

// A table with all rows, for one dim and number of threads; the last one is kept.
template <class Table>
Table& Filled(size_t dim, size_t threads) {
  static std::unique_ptr<Table> table;
  static size_t its_dim, its_threads;
  if (table == nullptr || its_dim != dim || its_threads != threads) {
    table.reset();
    table = std::make_unique<Table>(dim, threads);
    ThreadsExec exec(2);
    InsertAll(exec, table.get(), dim);
    its_dim = dim;
    its_threads = threads;
  }
  return *table;
}

template <class Table, class Call>
void RunBatches(benchmark::State& state, const Call& call) {
  const auto dim = static_cast<size_t>(state.range(0));
  const auto threads = static_cast<size_t>(state.range(1));
  Table& table = Filled<Table>(dim, threads);
  ThreadsExec exec(threads);
  std::vector<float> vectors(kBatch * dim, 1.0f);
  size_t next = 0;
  for (auto _ : state) {
    call(table, exec, Batches()[next++ % kBatches].data(), vectors.data());
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kBatch));
}

template <class Table>
void Lookup(benchmark::State& state) {
  RunBatches<Table>(state, [](Table& table, Exec& exec, const uint64_t* keys, float* vectors) {
    table.Lookup(exec, keys, vectors);
  });
}
// A batch may repeat a key, whose vector then is either one: all vectors are equal here.
template <class Table>
void UpsertPresent(benchmark::State& state) {
  RunBatches<Table>(state, [](Table& table, Exec& exec, const uint64_t* keys, float* vectors) {
    table.Upsert(exec, keys, vectors);
  });
}
template <class Table>
void InsertGrowing(benchmark::State& state) {
  const auto dim = static_cast<size_t>(state.range(0));
  const auto threads = static_cast<size_t>(state.range(1));
  ThreadsExec exec(threads);
  AllKeys();
  for (auto _ : state) {
    state.PauseTiming();
    auto table = std::make_unique<Table>(dim, threads);
    state.ResumeTiming();
    InsertAll(exec, table.get(), dim);
    state.PauseTiming();
    table.reset();
    state.ResumeTiming();
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kRows));
}

void Args(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dim", "threads"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (int dim : {16, 64}) b->Args({dim, 2});
}
using Boost = Maps<BoostMap>;
using Abseil = Maps<AbseilMap>;
BENCHMARK_TEMPLATE(Lookup, Ours)->Apply(Args);
BENCHMARK_TEMPLATE(Lookup, Minimal)->Apply(Args);
BENCHMARK_TEMPLATE(Lookup, Boost)->Apply(Args);
BENCHMARK_TEMPLATE(Lookup, Abseil)->Apply(Args);
BENCHMARK_TEMPLATE(UpsertPresent, Ours)->Apply(Args);
BENCHMARK_TEMPLATE(UpsertPresent, Minimal)->Apply(Args);
BENCHMARK_TEMPLATE(UpsertPresent, Boost)->Apply(Args);
BENCHMARK_TEMPLATE(UpsertPresent, Abseil)->Apply(Args);
BENCHMARK_TEMPLATE(InsertGrowing, Ours)->Apply(Args)->Iterations(1);
BENCHMARK_TEMPLATE(InsertGrowing, Boost)->Apply(Args)->Iterations(1);
BENCHMARK_TEMPLATE(InsertGrowing, Abseil)->Apply(Args)->Iterations(1);

}  // namespace
}  // namespace dynemb
