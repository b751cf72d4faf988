// The length of probes: the mean number of buckets that a probe inspects, and the longest probe,
// for present and for absent keys, by the load of the index.
//
//   Probe / rows, load in %     ns per probe of a present key: bucket only, no row
//
// `load` is the split load of the segments, `filled` their average load.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "benchmarks/cc/workload.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/index.h"
#include "cc/table/lanes.h"
#include "cc/table/owned_items.h"

namespace dynemb {
namespace {

// The key of row r is r.
class RowsAreKeys final : public Index::RowHashes {
 public:
  void Read(const RowId* rows, size_t n, uint64_t* hashes) const override {
    for (size_t i = 0; i < n; ++i) hashes[i] = MixKey(rows[i]);
  }
};

std::unique_ptr<Index> Filled(uint32_t rows, double load) {
  constexpr uint32_t kBatch = 65536;
  auto index = std::make_unique<Index>();
  Require(index->Init(1024, load, /*salt=*/0));
  ThreadsExec exec(2);
  OneLane lane;
  std::vector<uint64_t> hashes(kBatch);
  std::vector<uint32_t> segment_of(kBatch);
  OwnedItems owned;
  for (uint32_t first = 0; first < rows; first += kBatch) {
    const uint32_t n = std::min(kBatch, rows - first);
    for (uint32_t i = 0; i < n; ++i) {
      hashes[i] = MixKey(first + i);
      segment_of[i] = index->SegmentOf(hashes[i]);
    }
    owned.Build(exec, n,
                [&, shift = index->OwnerShift()](size_t i) { return segment_of[i] >> shift; });
    Require(index->Grow(exec, hashes.data(), n, RowsAreKeys(), owned, segment_of.data()));
    for (uint32_t i = 0; i < n; ++i) {
      Claim(lane, index->SegmentBuckets(segment_of[i]), MakeProbe(hashes[i]), first + i, 1);
    }
  }
  return index;
}

// The number of buckets that a probe for `key` inspects.
uint32_t Length(const Index& index, uint64_t key, bool* found) {
  OneLane lane;
  const uint64_t hash = index.HashOf(key);
  const Probe probe = MakeProbe(hash);
  Bucket* const segment = index.SegmentBuckets(index.SegmentOf(hash));
  *found = false;
  uint32_t step = 0;
  while (step < kBucketsPerSegment) {
    const Bucket& bucket = *OnPath(segment, probe.home, step++);
    for (uint32_t mask = lane.Match(bucket, probe.digest); mask != 0; mask &= mask - 1) {
      *found |= bucket.row[LowestBit(mask)] == key;
    }
    if (*found || bucket.overflow() == 0) break;
  }
  return step;
}

void Probe(benchmark::State& state) {
  const auto rows = static_cast<uint32_t>(state.range(0));
  const std::unique_ptr<Index> index = Filled(rows, static_cast<double>(state.range(1)) / 100);
  const std::vector<uint64_t> keys = DrawRows(Keys::kUniform, 65536, rows, 1);
  for (auto _ : state) {
    uint64_t sum = 0;
    for (uint64_t key : keys) {
      bool found;
      sum += Length(*index, key, &found);
    }
    benchmark::DoNotOptimize(sum);
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * keys.size()));
  const auto measure = [&](uint64_t first, const char* mean, const char* longest) {
    uint64_t sum = 0;
    uint32_t most = 0;
    for (uint64_t key = first; key < first + rows; ++key) {
      bool found;
      const uint32_t length = Length(*index, key, &found);
      if (found != (first == 0)) state.SkipWithError("a key is not where it belongs");
      sum += length;
      most = std::max(most, length);
    }
    state.counters[mean] = static_cast<double>(sum) / rows;
    state.counters[longest] = most;
  };
  measure(0, "present", "longest");
  measure(rows, "absent", "longest_absent");
  state.counters["filled"] = static_cast<double>(rows) / static_cast<double>(index->slots());
}
BENCHMARK(Probe)
    ->ArgNames({"rows", "load"})
    ->ArgsProduct({{1'000'000, 10'000'000}, {50, 70, 85, 95}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace dynemb
