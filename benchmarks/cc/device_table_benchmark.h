// The cases that HierarchicalKV publishes, on a table in a device's memory: 2^20 keys per call,
// rows of 8 to 64 float32, at loads of one half to one.
//
// A line is one call, repeated on the same table without waiting between the repeats:
//
//   find*             row ids of present keys                find         and their vectors
//   contains          whether keys are present               assign       sets their vectors
//   find_or_insert    vectors of keys, a tenth of them new
//   insert_or_assign  sets vectors of new keys (at load 1 each evicts another)
//   insert_and_evict  inserts new keys; the rows that they evict are copied to host memory
//   zipf find         find, of keys drawn by zipf(1.05), after rows have moved between the tiers
//
// A case, for --case, is a table: dim64/hbm0.50/load0.75.
//
// Mkeys/s counts input keys. GB/s counts the bytes to move: keys and row ids once, a bucket of 64
// bytes per key, the head of a row (16 bytes), and vectors read and written. The last column is its
// share of the bandwidth of a copy within the device's memory, counting reads and writes.
#ifndef DYNEMB_BENCHMARKS_CC_DEVICE_TABLE_BENCHMARK_H_
#define DYNEMB_BENCHMARKS_CC_DEVICE_TABLE_BENCHMARK_H_

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>

#include "benchmarks/cc/device_benchmark.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/key.h"
#include "cc/table/row_columns.h"
#include "cc/table/table.h"

namespace dynemb::benchmark_device {

// Keys of numbers below `most`, drawn uniformly.
struct DrawKeys {
  uint64_t seed, most;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const { keys[i] = MixKey(MixKey(seed + i) % most); }
};

template <class Device>
class Benchmark {
 public:
  using MakeTable = std::function<Status(const TableOptions&, std::unique_ptr<Table>*)>;

  // `exec` represents the stream; make(options, &table) creates a table on `device`.
  Benchmark(Device* device, Exec* exec, MakeTable make, const Arguments& arguments)
      : device_(device),
        exec_(*exec),
        make_(std::move(make)),
        bench_(device, exec),
        arguments_(arguments),
        shrink_(arguments.shrink),
        n_(size_t{1} << (20 - shrink_)),
        keys_(bench_.template Array<uint64_t>(n_)),
        vectors_(bench_.template Array<float>(n_ * 64)),
        rows_(bench_.template Array<RowId>(n_)) {}

  void Run() {
    copy_ = bench_.CopyRate(size_t{1} << (30 - shrink_));
    std::printf("%-5s %-6s %-5s %-5s %-17s %12s %10s %8s\n", "dim", "rows", "HBM", "load", "call",
                "Mkeys/s", "GB/s", "of copy");
    struct Config {
      int64_t dim;
      int log_rows;
      double hbm_share;  // of the rows
    };
    for (const Config c : {Config{8, 27, 1.0}, Config{32, 27, 1.0}, Config{64, 26, 1.0},
                           Config{64, 27, 0.5}, Config{64, 27, 0.1}}) {
      for (const double load : {0.5, 0.75, 1.0}) {
        char name[64];
        std::snprintf(name, sizeof(name), "dim%d/hbm%.2f/load%.2f", static_cast<int>(c.dim),
                      c.hbm_share, load);
        if (arguments_.Runs(name)) RunOne(c.dim, c.log_rows, c.hbm_share, load);
      }
    }
    arguments_.RequireCase();
  }

 private:
  void RunOne(int64_t dim, int log_rows, double hbm_share, double load) {
    const auto capacity = int64_t{1} << (log_rows - shrink_);
    TableOptions options;
    options.name = "benchmark";
    options.dim = dim;
    options.init_capacity = options.max_capacity = capacity;
    options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
    options.tier = hbm_share == 1.0 ? Tier::kHbm : Tier::kHybrid;
    const RowLayout row(8, DType::kFloat32, dim, 0, 16);
    options.max_hbm_bytes =
        static_cast<uint64_t>(hbm_share * static_cast<double>(capacity)) * row.stride;
    std::unique_ptr<Table> table;
    Require(make_(options, &table));
    const auto fill = static_cast<uint64_t>(load * static_cast<double>(capacity));
    uint64_t next = 0;  // number of the next new key
    for (; next < fill; next += n_) {
      bench_.ForEach(n_, MakeKeys{next, keys_});
      Require(table->Upsert(exec_, KeySpan(keys_, n_), vectors_, ++tick_));
    }
    bench_.Wait();

    // Prints a line of the table; `bytes` are per key.
    const auto measure = [&](const char* call, double bytes, const std::function<void(int)>& fn) {
      const double keys_a_second = static_cast<double>(n_) / bench_.Seconds(fn);
      const double rate = bytes * keys_a_second;
      std::printf("%-5lld 2^%-4d %-5.2f %-5.2f %-17s %12.1f %10.1f %7.1f%%\n",
                  static_cast<long long>(dim), log_rows - shrink_, hbm_share, load, call,
                  keys_a_second / 1e6, rate / 1e9, 100 * rate / copy_);
      std::fflush(stdout);
    };
    const double vector = 4.0 * static_cast<double>(dim);
    constexpr double kProbe = 8 + kBucketBytes + kHeadBytes;
    const auto draw = [&](int r) {
      bench_.ForEach(n_, DrawKeys{static_cast<uint64_t>(r) << 32, std::min(next, fill), keys_});
    };
    // Drawing keys is not measured. Few keys are enough to miss every cache.
    draw(0);
    measure("find*", kProbe + 4,
            [&](int) { table->Find(exec_, KeySpan(keys_, n_), ++tick_, rows_); });
    measure("find", kProbe + 4 + 2 * vector, [&](int) {
      table->Lookup(exec_, KeySpan(keys_, n_), ++tick_, nullptr, vectors_, rows_);
    });
    measure("contains", kProbe + 1, [&](int) {
      table->Contains(exec_, KeySpan(keys_, n_), reinterpret_cast<bool*>(rows_));
    });
    measure("assign", kProbe + 4 + 2 * vector,
            [&](int) { Require(table->Upsert(exec_, KeySpan(keys_, n_), vectors_, ++tick_)); });
    measure("find_or_insert", kProbe + 4 + 2.1 * vector, [&](int) {
      bench_.ForEach(n_, ReplaceSome{next, 10, keys_});
      next += n_;
      Require(table->LookupOrInsert(exec_, KeySpan(keys_, n_), ++tick_, vectors_, rows_));
    });
    measure("insert_or_assign", kProbe + 4 + 2 * vector, [&](int) {
      bench_.ForEach(n_, MakeKeys{next, keys_});
      next += n_;
      Require(table->Upsert(exec_, KeySpan(keys_, n_), vectors_, ++tick_));
    });
    // As the outputs of an operator: in the device's memory.
    typename Device::Range keys_out, vectors_out, scores_out;
    for (const auto& [range, bytes] :
         {std::pair{&keys_out, 8.0}, {&vectors_out, vector}, {&scores_out, 8.0}}) {
      const size_t all = n_ * static_cast<size_t>(bytes);
      Require(range->Reserve(*device_, all));
      Require(range->Commit(all));
    }
    const auto columns = [&](size_t) {
      return TickColumns{keys_out.data(), vectors_out.data(), nullptr, nullptr,
                         reinterpret_cast<int64_t*>(scores_out.data())};
    };
    measure("insert_and_evict", kProbe + 4 + vector, [&](int) {
      bench_.ForEach(n_, MakeKeys{next, keys_});
      next += n_;
      EvictedRows evicted(row, columns, EvictedRows::Memory::kDevice);
      Require(table->InsertAndEvict(exec_, KeySpan(keys_, n_), ++tick_, rows_, &evicted));
    });
    if (hbm_share < 1.0) {
      RunZipf(table.get(), fill, [&](const std::function<void(int)>& fn) {
        measure("zipf find", kProbe + 4 + 2 * vector, fn);
      });
    }
  }

  void RunZipf(Table* table, uint64_t ranks,
               const std::function<void(const std::function<void(int)>&)>& measure) {
    const auto draw = [&](int r) {
      bench_.ForEach(n_, DrawZipf{static_cast<uint64_t>(r) << 32, ranks, keys_});
    };
    // Until the number of reads is 1.5 times the number of rows.
    int rounds = 0;
    for (; rounds * n_ < ranks + ranks / 2; ++rounds) {
      draw(rounds);
      table->Find(exec_, KeySpan(keys_, n_), ++tick_, rows_);
      Require(table->Promote(exec_, tick_));
    }
    const TableStats before = table->stats();
    measure([&](int r) {
      draw(rounds + r);
      table->Lookup(exec_, KeySpan(keys_, n_), ++tick_, nullptr, vectors_, rows_);
    });
    const TableStats after = table->stats();
    std::printf("      %.1f %% of these reads hit the device tier; %llu rows had moved there\n",
                100.0 * static_cast<double>(after.device_hits - before.device_hits) /
                    static_cast<double>(after.hits - before.hits),
                static_cast<unsigned long long>(before.promotions));
  }

  Device* const device_;
  Exec& exec_;
  const MakeTable make_;
  Bench<Device> bench_;
  Arguments arguments_;
  const int shrink_;
  const size_t n_;
  uint64_t* const keys_;
  float* const vectors_;
  RowId* const rows_;
  Tick tick_ = 0;
  double copy_ = 0;  // bytes per second
};

}  // namespace dynemb::benchmark_device

#endif  // DYNEMB_BENCHMARKS_CC_DEVICE_TABLE_BENCHMARK_H_
