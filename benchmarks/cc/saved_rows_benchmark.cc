// The cost of each row that a batch saves for a running cut, with several threads at once.
//
//   SaveRows/threads    ns over all threads per row of 144 bytes, while a reader takes the rows
#include <benchmark/benchmark.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "cc/table/changes.h"

namespace dynemb {
namespace {

void SaveRows(benchmark::State& state) {
  constexpr size_t kRows = 200000;
  const size_t threads = static_cast<size_t>(state.range(0));
  const RowLayout layout(8, DType::kFloat32, 16, 16);
  const std::vector<char> row(layout.stride, 1);
  for (auto _ : state) {
    SavedRows saved(size_t{64} << 20);
    std::atomic<size_t> running{threads};
    std::vector<std::thread> savers;
    for (size_t t = 0; t < threads; ++t) {
      savers.emplace_back([&] {
        for (size_t i = 0; i < kRows / threads; ++i) saved.Push(0, layout, row.data(), 1, 1);
        --running;
      });
    }
    SavedRows::Chunk chunk;
    size_t taken = 0;
    while (running != 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // a write to the disk
      for (int i = 0; i < 64 && saved.Pop(&chunk); ++i) taken += chunk.n;
    }
    for (std::thread& saver : savers) saver.join();
    while (saved.Pop(&chunk)) taken += chunk.n;
    if (taken != kRows / threads * threads) state.SkipWithError("rows were lost");
  }
  state.counters["ns_per_row"] = benchmark::Counter(
      kRows * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(SaveRows)->ArgName("threads")->Arg(1)->Arg(2)->Arg(4)->Arg(8)->UseRealTime();

}  // namespace
}  // namespace dynemb
