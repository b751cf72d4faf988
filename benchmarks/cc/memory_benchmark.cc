// The limits of this machine's memory: the ceilings for the figures of the table.
//
//   Gather/bytes/threads    random rows of `bytes`, prefetched and summed; rows per second
//   Update/bytes/threads    the same, read and written
//   Read, Copy /threads     sequential; bytes per second
//
// Rows are drawn from an array of 4 GiB in huge pages, far larger than the caches.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "cc/table/exec.h"
#include "cc/table/hash.h"

namespace dynemb {
namespace {

constexpr size_t kBytes = size_t{4} << 30;
constexpr size_t kRows = 1 << 20;  // drawn in an iteration
constexpr size_t kAhead = 32;      // prefetch distance, in rows

char* Memory() {
  static char* const memory = [] {
    void* p = std::aligned_alloc(size_t{2} << 20, kBytes);
    madvise(p, kBytes, MADV_HUGEPAGE);
    memset(p, 1, kBytes);
    return static_cast<char*>(p);
  }();
  return memory;
}

// Calls use(row) for random rows of `bytes`. Each is drawn once: the rows of one iteration fit some
// caches.
template <class Use>
void RunRows(benchmark::State& state, const Use& use) {
  const auto bytes = static_cast<size_t>(state.range(0));
  ThreadsExec exec(static_cast<size_t>(state.range(1)));
  char* const memory = Memory();
  static uint64_t drawn = 0;
  for (auto _ : state) {
    const auto row = [&](size_t i) { return memory + MixKey(drawn + i) % kBytes / bytes * bytes; };
    exec.ParallelFor(kRows, 4096, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        if (i + kAhead < end) {
          const char* const ahead = row(i + kAhead);
          for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(ahead + b);
        }
        use(row(i), bytes);
      }
    });
    drawn += kRows;
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kRows));
}

void Gather(benchmark::State& state) {
  RunRows(state, [](const char* row, size_t bytes) {
    uint64_t sum = 0;
    for (size_t b = 0; b < bytes; b += 64) sum += static_cast<uint64_t>(row[b]);
    benchmark::DoNotOptimize(sum);
  });
}

void Update(benchmark::State& state) {
  RunRows(state, [](char* row, size_t bytes) {
    for (size_t b = 0; b < bytes; b += 64) ++row[b];
  });
}

void RowArgs(benchmark::internal::Benchmark* b) {
  b->ArgNames({"bytes", "threads"})->UseRealTime();
  for (int bytes : {64, 128, 256}) {
    for (int threads : {1, 2}) b->Args({bytes, threads});
  }
}
BENCHMARK(Gather)->Apply(RowArgs);
BENCHMARK(Update)->Apply(RowArgs);

constexpr size_t kRange = size_t{1} << 20;

void Read(benchmark::State& state) {
  ThreadsExec exec(static_cast<size_t>(state.range(0)));
  const char* memory = Memory();
  for (auto _ : state) {
    exec.ParallelFor(kBytes / 4, kRange, [&](size_t begin, size_t end) {
      uint64_t sum[8] = {};
      for (size_t b = begin; b < end; b += 64) {
        for (size_t i = 0; i < 8; ++i) {
          uint64_t word;
          memcpy(&word, memory + b + 8 * i, sizeof(word));
          sum[i] += word;
        }
      }
      benchmark::DoNotOptimize(sum);
    });
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * (kBytes / 4)));
}
BENCHMARK(Read)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();

void Copy(benchmark::State& state) {
  ThreadsExec exec(static_cast<size_t>(state.range(0)));
  char* memory = Memory();
  for (auto _ : state) {
    exec.ParallelFor(kBytes / 4, kRange, [&](size_t begin, size_t end) {
      memcpy(memory + kBytes / 2 + begin, memory + begin, end - begin);
    });
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * (kBytes / 4)));
}
BENCHMARK(Copy)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace dynemb
