// Ids that an upstream system has sharded by a hash, compared with random ids. Counters give the
// ratio of the times of insert, find, dump, erase, dedup and the key index of a dump: medians of
// several pairs.
//
//   Shard / hash and bits / number of bits      200,000 consecutive ids of one of 2^bits
//                                               shards; fewer from 13 bits on
//   OnePrefix                                   a million keys whose hashes in the table itself
//                                               agree in 32 bits
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/io/key_index.h"
#include "cc/lookup/dedup.h"
#include "cc/table/clock.h"
#include "cc/table/snapshot.h"
#include "cc/table/table.h"
#include "tests/cc/chosen_keys.h"

namespace dynemb {
namespace {

using testing_keys::IdsOfShard;
using testing_keys::kShardings;

constexpr int kPairs = 5;
using Seconds = std::map<std::string, double>;

template <class Call>
double Time(const Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void DumpAll(Exec& exec, Table* table, Clock* clock) {
  std::unique_ptr<Snapshot> snapshot;
  Require(Snapshot::Begin(exec, {table}, {0}, CutOf::kRows, clock, &snapshot));
  std::vector<uint64_t> keys(65536);
  for (;;) {
    Snapshot::Block block;
    Require(snapshot->Next(keys.size(), &block));
    if (block.n == 0) return;
    Require(snapshot->Read(exec, &block, CutColumns::Keys(keys.data())));
  }
}

Seconds TimeAll(const std::vector<uint64_t>& keys) {
  constexpr size_t kBatch = 65536;
  ThreadsExec exec(2);
  Clock clock;
  const std::unique_ptr<Table> table = MakeTable(4, 1024);
  std::vector<RowId> rows(kBatch);
  const auto for_batches = [&](const auto& call) {
    return Time([&] {
      for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
        call(&keys[begin], std::min(kBatch, keys.size() - begin));
      }
    });
  };
  Seconds seconds;
  seconds["insert"] = for_batches([&](const uint64_t* k, size_t n) {
    Require(table->FindOrInsert(exec, {k, n}, clock.Next(), rows.data()));
  });
  seconds["find"] = for_batches([&](const uint64_t* k, size_t n) {
    table->Find(exec, {k, n}, clock.Next(), rows.data());
  });
  seconds["dump"] = Time([&] { DumpAll(exec, table.get(), &clock); });
  seconds["erase"] = for_batches([&](const uint64_t* k, size_t n) {
    table->Erase(exec, {k, n}, clock.Next());
  });
  Dedup<uint64_t> dedup;
  seconds["dedup"] =
      for_batches([&](const uint64_t* k, size_t n) { Require(dedup.Run(exec, k, n)); });
  uint32_t log_slots = 1;
  while (size_t{1} << log_slots < 2 * keys.size()) ++log_slots;
  std::vector<uint32_t> slots(size_t{1} << log_slots);
  seconds["key_index"] = Time(
      [&] { BuildKeyIndex(keys.data(), keys.size(), sizeof(keys[0]), log_slots, slots.data()); });
  return seconds;
}

void Compare(benchmark::State& state, std::vector<uint64_t> keys) {
  std::shuffle(keys.begin(), keys.end(), std::mt19937_64(1));
  std::vector<uint64_t> random_keys(keys.size());
  std::mt19937_64 random(2);
  for (uint64_t& key : random_keys) key = random();
  for (auto _ : state) {
    std::map<std::string, std::vector<double>> ratios;
    for (int pair = 0; pair < kPairs; ++pair) {
      const Seconds usual = TimeAll(random_keys);
      for (const auto& [name, seconds] : TimeAll(keys)) {
        ratios[name].push_back(seconds / usual.at(name));
      }
    }
    for (auto& [name, ratio] : ratios) {
      std::sort(ratio.begin(), ratio.end());
      state.counters[name] = ratio[kPairs / 2];
    }
  }
}

void Shard(benchmark::State& state) {
  const testing_keys::Sharding& sharding = kShardings[state.range(0)];
  state.SetLabel(sharding.name);
  const auto bits = static_cast<int>(state.range(1));
  // Scans all ids for the ids of one shard.
  Compare(state, IdsOfShard(sharding, bits, bits <= 12 ? 200000 : 200000 >> (bits - 12)));
}
BENCHMARK(Shard)
    ->ArgNames({"hash", "bits"})
    ->ArgsProduct({{0, 1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

void OnePrefix(benchmark::State& state) {
  const uint64_t salt = Table::SaltOf(MakeTable(4, 1024)->options());
  Compare(state, testing_keys::SamePrefix(salt, 0xDEADBEEF, 1000000, false));
}
BENCHMARK(OnePrefix)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace dynemb
