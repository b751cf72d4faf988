// The cases of device_table_benchmark.h on NVIDIA's HierarchicalKV, on GPU 0: the same keys, sizes,
// loads and repeats, with its rows in GPU memory. tools/bench_hierarchical_kv.sh builds it.
//
// Both tables evict by least recent use. The calls differ in these points:
//
//   find*             HierarchicalKV returns addresses of values, and this project row ids
//   insert_and_evict  both leave the evicted rows in GPU memory; this project's are in the order of
//                     their keys
//
// Arguments: [--case TEXT], as in device_benchmark.h.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/key.h"
#include "merlin_hashtable.cuh"

namespace {

using Table = nv::merlin::HashTable<uint64_t, float, uint64_t, nv::merlin::EvictStrategy::kLru>;

constexpr int kRepeats = 8, kTimes = 5;
constexpr size_t kKeys = size_t{1} << 20;

void Require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* Array(size_t n) {
  void* p = nullptr;
  Require(cudaMalloc(&p, n * sizeof(T)));
  return static_cast<T*>(p);
}

// The keys of device_benchmark.h and device_table_benchmark.h.
__global__ void MakeKeys(uint64_t first, uint64_t* keys) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  keys[i] = dynemb::MixKey(first + i);
}
__global__ void DrawKeys(uint64_t seed, uint64_t most, uint64_t* keys) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  keys[i] = dynemb::MixKey(dynemb::MixKey(seed + i) % most);
}
__global__ void ReplaceSome(uint64_t first, uint32_t each, uint64_t* keys) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i % each == 0) keys[i] = dynemb::MixKey(first + i);
}
constexpr int kThreads = 256;
constexpr int kBlocks = kKeys / kThreads;

// As Bench::Seconds.
double Seconds(const std::function<void()>& fn) {
  std::vector<double> seconds;
  fn();
  for (int t = 0; t < kTimes; ++t) {
    Require(cudaDeviceSynchronize());
    const auto begin = std::chrono::steady_clock::now();
    for (int r = 0; r < kRepeats; ++r) fn();
    Require(cudaDeviceSynchronize());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    seconds.push_back(took.count() / kRepeats);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kTimes / 2];
}

class Benchmark {
 public:
  explicit Benchmark(std::string only) : only_(std::move(only)) {}

  void Run() {
    std::printf("%-5s %-6s %-5s %-5s %-17s %12s\n", "dim", "rows", "HBM", "load", "call",
                "Mkeys/s");
    struct Config {
      size_t dim;
      int log_rows;
    };
    for (const Config c : {Config{8, 27}, Config{32, 27}, Config{64, 26}}) {
      for (const double load : {0.5, 0.75, 1.0}) {
        char name[64];
        std::snprintf(name, sizeof(name), "dim%zu/hbm1.00/load%.2f", c.dim, load);
        if (std::strstr(name, only_.c_str()) != nullptr) RunOne(c.dim, c.log_rows, load);
      }
    }
  }

 private:
  void RunOne(size_t dim, int log_rows, double load) {
    const size_t capacity = size_t{1} << log_rows;
    nv::merlin::HashTableOptions options;
    options.init_capacity = options.max_capacity = capacity;
    options.dim = dim;
    options.max_hbm_for_vectors = capacity * dim * sizeof(float);
    options.device_id = 0;
    Table table;
    table.init(options);
    const auto fill = static_cast<uint64_t>(load * static_cast<double>(capacity));
    uint64_t next = 0;
    const auto begin = std::chrono::steady_clock::now();
    for (; next < fill; next += kKeys) {
      MakeKeys<<<kBlocks, kThreads>>>(next, keys_);
      table.insert_or_assign(kKeys, keys_, values_);
    }
    Require(cudaDeviceSynchronize());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("      filled with %llu keys in %.1f s\n", static_cast<unsigned long long>(next),
                took.count());
    std::fflush(stdout);
    const auto measure = [&](const char* call, const std::function<void()>& fn) {
      std::printf("%-5zu 2^%-4d %-5.2f %-5.2f %-17s %12.1f\n", dim, log_rows, 1.0, load, call,
                  static_cast<double>(kKeys) / Seconds(fn) / 1e6);
      std::fflush(stdout);
    };
    DrawKeys<<<kBlocks, kThreads>>>(0, std::min(next, fill), keys_);
    measure("find*", [&] { table.find(kKeys, keys_, addresses_, found_); });
    measure("find", [&] { table.find(kKeys, keys_, values_, found_); });
    measure("contains", [&] { table.contains(kKeys, keys_, found_); });
    measure("assign", [&] { table.assign(kKeys, keys_, values_); });
    measure("find_or_insert", [&] {
      ReplaceSome<<<kBlocks, kThreads>>>(next, 10, keys_);
      next += kKeys;
      table.find_or_insert(kKeys, keys_, values_);
    });
    measure("insert_or_assign", [&] {
      MakeKeys<<<kBlocks, kThreads>>>(next, keys_);
      next += kKeys;
      table.insert_or_assign(kKeys, keys_, values_);
    });
    measure("insert_and_evict", [&] {
      MakeKeys<<<kBlocks, kThreads>>>(next, keys_);
      next += kKeys;
      Require(cudaMemsetAsync(evicted_, 0, sizeof(*evicted_)));
      table.insert_and_evict(kKeys, keys_, values_, nullptr, evicted_keys_, evicted_values_,
                             evicted_scores_, evicted_);
    });
  }

  const std::string only_;
  uint64_t* const keys_ = Array<uint64_t>(kKeys);
  float* const values_ = Array<float>(kKeys * 64);
  float** const addresses_ = Array<float*>(kKeys);
  bool* const found_ = Array<bool>(kKeys);
  uint64_t* const evicted_keys_ = Array<uint64_t>(kKeys);
  float* const evicted_values_ = Array<float>(kKeys * 64);
  uint64_t* const evicted_scores_ = Array<uint64_t>(kKeys);
  size_t* const evicted_ = Array<size_t>(1);
};

}  // namespace

int main(int argc, char** argv) {
  std::string only;
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) {
    only = argv[2];
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: %s [--case TEXT]\n", argv[0]);
    return 2;
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("skipped: no GPU\n");
    return 0;
  }
  cudaDeviceProp properties{};
  Require(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, HierarchicalKV\n", properties.name);
  Benchmark(only).Run();
  return 0;
}
