// The strategies by which a full table evicts rows (cc/table/score.h).
//
//   Lookup / keys / threads   batches of ids that all have rows, 5 million rows of dim 16:
//                             LookupOrInsert, and Pool in bags of 10. Counters give the time of
//                             each strategy as a multiple of the time of LRU: medians of several
//                             rounds, in each of which all strategies take turns.
//   HitRate / strategy / ids  a table of 100,000 rows, ids by Zipf's law (1.05) of a million. With
//                             drifting ids, a new id becomes the most popular one in every batch of
//                             4,096, and the others move down by one.
//                             Counters give the share of ids that had a row in the second half of
//                             the stream, and the same for an exact cache of the same strategy.
//   Full                      an LRU table of 2^18 rows of dim 4, 4,096 keys at a time: nanoseconds
//                             for a new key, and for a search of a key without a row, when the
//                             table is almost full, and after it has evicted five times its rows.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/lookup/pool.h"
#include "cc/table/table.h"

namespace dynemb {
namespace {

const std::pair<EvictStrategy, const char*> kStrategies[] = {
    {EvictStrategy::kLru, "lru"},
    {EvictStrategy::kLfu, "lfu"},
    {EvictStrategy::kEpochLfu, "epoch_lfu"},
    {EvictStrategy::kScore, "score"},
};

std::unique_ptr<Table> Make(EvictStrategy strategy, int64_t dim, int64_t max_capacity) {
  TableOptions options;
  options.name = "strategies";
  options.dim = dim;
  options.evict_strategy = strategy;
  options.max_capacity = max_capacity;
  std::unique_ptr<Table> table;
  Require(Table::Create(options, &table));
  return table;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Lookup(benchmark::State& state) {
  constexpr size_t kRows = 5'000'000, kBatch = 65536, kBatches = 16, kRounds = 15, kHotness = 10;
  constexpr int64_t kDim = 16;
  const auto kind = state.range(0) == 0 ? Keys::kUniform : Keys::kZipf;
  ThreadsExec exec(static_cast<size_t>(state.range(1)));
  std::vector<std::unique_ptr<Table>> tables;
  Tick tick = 0;
  std::vector<RowId> rows(kBatch);
  for (const auto& [strategy, name] : kStrategies) {
    tables.push_back(Make(strategy, kDim, kRows + kBatch));
    for (size_t first = 0; first < kRows; first += kBatch) {
      std::vector<uint64_t> keys;
      for (size_t i = first; i < std::min(kRows, first + kBatch); ++i) keys.push_back(KeyOfRow(i));
      Require(tables.back()->FindOrInsert(exec, {keys.data(), keys.size()}, ++tick, rows.data()));
    }
  }
  std::vector<std::vector<uint64_t>> batches;
  for (size_t b = 0; b < kBatches; ++b) {
    batches.push_back(KeysOf(DrawRows(kind, kBatch, kRows, b + 1)));
  }
  std::vector<float> vectors(kBatch * kDim);
  Bags bags;
  const auto n = static_cast<int64_t>(kBatch / kHotness * kHotness);
  Require(bags.InitUniform(kHotness, n, n / kHotness));
  const auto lookup = [&](Table* table, const uint64_t* keys) {
    Require(table->LookupOrInsert(exec, {keys, kBatch}, ++tick, vectors.data(), rows.data()));
  };
  const auto pool = [&](Table* table, const uint64_t* keys) {
    PoolTask task;
    task.bags = &bags;
    task.table = table;
    task.keys = keys;
    task.rows = rows.data();
    task.pooled = vectors.data();
    Require(Pool(exec, {task}, ++tick, /*insert=*/true));
  };
  const auto seconds = [&](Table* table, const auto& call) {
    const auto begin = std::chrono::steady_clock::now();
    for (const std::vector<uint64_t>& keys : batches) call(table, keys.data());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  for (auto _ : state) {
    std::vector<double> lookups[4], pools[4];
    double lru = 0;
    for (size_t round = 0; round < kRounds; ++round) {
      double first_lookup = 0, first_pool = 0;
      for (size_t s = 0; s < tables.size(); ++s) {
        const double a = seconds(tables[s].get(), lookup), b = seconds(tables[s].get(), pool);
        if (s == 0) first_lookup = a, first_pool = b, lru += a;
        lookups[s].push_back(a / first_lookup);
        pools[s].push_back(b / first_pool);
      }
    }
    state.counters["lru, million ids/s"] = kRounds * kBatches * kBatch / lru / 1e6;
    for (size_t s = 1; s < tables.size(); ++s) {
      const std::string name = kStrategies[s].second;
      state.counters["lookup, " + name] = Median(lookups[s]);
      state.counters["pool, " + name] = Median(pools[s]);
    }
  }
}
BENCHMARK(Lookup)->ArgsProduct({{0, 1}, {1, 2}})->Iterations(1)->Unit(benchmark::kSecond);

// A cache that evicts exactly the row with the lowest score of those that the batch does not use;
// of equal scores, the one that was used least recently.
class ExactCache {
 public:
  ExactCache(EvictStrategy strategy, size_t capacity, uint64_t epoch_batches)
      : strategy_(strategy), capacity_(capacity), epoch_batches_(epoch_batches) {}

  // Returns the number of ids that had a row.
  size_t Use(const std::vector<uint64_t>& keys) {
    ++batch_;
    size_t hits = 0;
    for (uint64_t key : keys) hits += entries_.count(key);
    for (uint64_t key : keys) {
      const auto [at, is_new] = entries_.try_emplace(key);
      Entry& entry = at->second;
      if (!is_new) order_.erase({entry.score, entry.used, key});
      entry.used = batch_;
      ++entry.count;
      const uint64_t epoch = epoch_batches_ == 0 ? 0 : (batch_ - 1) / epoch_batches_;
      entry.score = strategy_ == EvictStrategy::kLru ? batch_ : epoch << 32 | entry.count;
      order_.insert({entry.score, entry.used, key});
    }
    for (auto at = order_.begin(); entries_.size() > capacity_;) {
      const auto [score, used, key] = *at;
      if (used == batch_) {
        ++at;
        continue;
      }
      at = order_.erase(at);
      entries_.erase(key);
    }
    return hits;
  }

 private:
  struct Entry {
    uint64_t score = 0, used = 0, count = 0;
  };
  const EvictStrategy strategy_;
  const size_t capacity_;
  const uint64_t epoch_batches_;
  uint64_t batch_ = 0;
  std::unordered_map<uint64_t, Entry> entries_;
  std::set<std::tuple<uint64_t, uint64_t, uint64_t>> order_;
};

void HitRate(benchmark::State& state) {
  constexpr size_t kIds = 1'000'000, kCapacity = 100'000, kBatch = 4096, kBatches = 3000;
  constexpr uint64_t kEpochBatches = 100;
  const auto& [strategy, name] = kStrategies[state.range(0)];
  const bool drifts = state.range(1) != 0;
  const uint64_t epoch_batches = strategy == EvictStrategy::kEpochLfu ? kEpochBatches : 0;
  state.SetLabel(std::string(name) + (drifts ? ", drifting" : ", static"));
  for (auto _ : state) {
    TableOptions options;
    options.name = "strategies";
    options.dim = 1;
    options.evict_strategy = strategy;
    options.max_capacity = kCapacity;
    options.epoch_steps = static_cast<int64_t>(epoch_batches);
    std::unique_ptr<Table> table;
    Require(Table::Create(options, &table));
    ExactCache exact(strategy, kCapacity, epoch_batches);
    ThreadsExec exec(2);
    std::vector<RowId> rows(kBatch);
    size_t hits = 0, exact_hits = 0;
    const std::vector<uint64_t> drawn = DrawRows(Keys::kZipf, kBatch * kBatches, kIds, 1);
    for (size_t b = 0; b < kBatches; ++b) {
      std::vector<uint64_t> keys;
      for (size_t i = 0; i < kBatch; ++i) {
        // An id's popularity is its distance from the front, which moves.
        const uint64_t front = drifts ? b : 0;
        keys.push_back(KeyOfRow((drawn[b * kBatch + i] + kIds - front % kIds) % kIds));
      }
      const uint64_t before = table->stats().hits;
      Require(table->FindOrInsert(exec, {keys.data(), kBatch}, b + 1, rows.data()));
      const size_t exactly = exact.Use(keys);
      if (b < kBatches / 2) continue;
      hits += table->stats().hits - before;
      exact_hits += exactly;
    }
    const double asked = static_cast<double>(kBatch * (kBatches - kBatches / 2));
    state.counters["hit rate, %"] = 100 * static_cast<double>(hits) / asked;
    state.counters["exact, %"] = 100 * static_cast<double>(exact_hits) / asked;
  }
}
BENCHMARK(HitRate)->ArgsProduct({{0, 1, 2}, {0, 1}})->Iterations(1)->Unit(benchmark::kSecond);

void Full(benchmark::State& state) {
  constexpr size_t kBatch = 4096, kMedianOf = 15;
  constexpr uint64_t kRows = uint64_t{1} << 18;
  const std::unique_ptr<Table> table = Make(EvictStrategy::kLru, 4, kRows);
  SerialExec exec;
  uint64_t next = 0;
  Tick tick = 0;
  std::vector<uint64_t> keys(kBatch);
  std::vector<RowId> rows(kBatch);
  const auto found = std::make_unique<bool[]>(kBatch);
  const KeySpan span(keys.data(), kBatch);
  // Nanoseconds per key of fn() for keys of which none has been used.
  const auto time = [&](const auto& fn) {
    for (uint64_t& key : keys) key = MixKey(next++);
    const auto begin = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    return took.count() / static_cast<double>(kBatch);
  };
  const auto insert = [&] { Require(table->FindOrInsert(exec, span, ++tick, rows.data())); };
  const auto search = [&] { table->Contains(exec, span, found.get()); };
  const auto measure = [&](const std::string& when) {
    std::vector<double> inserts, searches;
    for (size_t i = 0; i < kMedianOf; ++i) {
      inserts.push_back(time(insert));
      searches.push_back(time(search));
    }
    state.counters["insert_" + when] = Median(inserts);
    state.counters["search_" + when] = Median(searches);
  };
  for (auto _ : state) {
    while (table->size() < kRows * 9 / 10 - kMedianOf * kBatch) (void)time(insert);
    measure("before");
    while (tick * kBatch < 6 * kRows) (void)time(insert);
    measure("after");
  }
}
BENCHMARK(Full)->Iterations(1)->Unit(benchmark::kSecond);

}  // namespace
}  // namespace dynemb
