// The cases that HierarchicalKV publishes, on a table in a device's memory: 2^20 keys per call,
// rows of 8 to 64 float32, at loads of one half to one.
//
// A line is one call, repeated on the same table without waiting between the repeats:
//
//   find*             row ids of keys that are there         find         and their vectors
//   contains          whether they are there                 assign       sets their vectors
//   find_or_insert    vectors of keys of which a tenth is new
//   insert_or_assign  sets vectors of keys that are new (at load 1 each evicts another)
//   zipf find         find, of keys drawn by zipf(1.05), after rows have moved between the tiers
//
// Mkeys/s counts keys given. GB/s counts what has to move: keys and row ids once, a bucket of 64
// bytes for each key, a row's head (16 bytes), vectors read and written; the last column is its
// share of what copying within the device's memory reaches, reads and writes counted.
#ifndef DYNEMB_BENCHMARKS_CC_DEVICE_TABLE_BENCHMARK_H_
#define DYNEMB_BENCHMARKS_CC_DEVICE_TABLE_BENCHMARK_H_

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "cc/device/device_table.h"
#include "cc/table/key.h"

namespace dynemb::benchmark_device {

// keys[i] = the key of number first + i: distinct, and nothing alike.
struct MakeKeys {
  uint64_t first;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const { keys[i] = MixKey(first + i); }
};

// Keys of numbers below `most`, drawn alike.
struct DrawKeys {
  uint64_t seed, most;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const { keys[i] = MixKey(MixKey(seed + i) % most); }
};

// Keys of numbers below `most`, by zipf(1.05), whose sum over ranks is taken for its integral. How
// frequent a key is has nothing to do with its number.
struct DrawZipf {
  uint64_t seed, most;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const {
    const double u = static_cast<double>(MixKey(seed + i) >> 11) * 0x1p-53;
    const double last = pow(static_cast<double>(most), -0.05);
    const double rank = pow(1.0 - u * (1.0 - last), -1.0 / 0.05);
    keys[i] = MixKey(MixKey(static_cast<uint64_t>(rank)) % most);
  }
};

// One in `each` is replaced by a key of number first + i.
struct ReplaceSome {
  uint64_t first;
  uint32_t each;
  uint64_t* keys;
  DYNEMB_HD void operator()(size_t i) const {
    if (i % each == 0) keys[i] = MixKey(first + i);
  }
};

inline void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

template <class Device>
class Benchmark {
 public:
  // `exec` stands for the stream. All sizes are divided by 2^shrink.
  Benchmark(Device* device, Exec* exec, int shrink)
      : device_(*device), exec_(*exec), shrink_(shrink), n_(size_t{1} << (20 - shrink)) {
    Array(&keys_, n_ * sizeof(uint64_t));
    Array(&vectors_, n_ * 64 * sizeof(float));
    Array(&rows_, n_ * sizeof(RowId));
  }

  void Run() {
    MeasureCopy();
    struct Config {
      int64_t dim;
      int log_rows;
      double hbm_share;  // of the rows
    };
    for (const Config c : {Config{8, 27, 1.0}, Config{32, 27, 1.0}, Config{64, 26, 1.0},
                           Config{64, 27, 0.5}, Config{64, 27, 0.1}}) {
      for (const double load : {0.5, 0.75, 1.0}) RunOne(c.dim, c.log_rows, c.hbm_share, load);
    }
  }

 private:
  using Session = typename Device::Session;
  using Range = typename Device::Range;

  void Array(Range* range, size_t bytes) {
    Require(range->Reserve(device_, bytes));
    Require(range->Commit(bytes));
  }
  uint64_t* keys() const { return reinterpret_cast<uint64_t*>(keys_.data()); }
  RowId* rows() const { return reinterpret_cast<RowId*>(rows_.data()); }

  template <class Body>
  void Do(const Body& body) {
    Session session(device_, Device::StreamOf(exec_));
    session.ForEach(n_, body);
    Require(session.status());
  }
  void Wait() {
    Session session(device_, Device::StreamOf(exec_));
    Require(session.Synchronize());
  }
  // Seconds of one call of fn(repeat), the median of a few times several.
  double Time(const std::function<void(int)>& fn) {
    constexpr int kTimes = 5, kRepeats = 8;
    std::vector<double> seconds;
    int repeat = 0;
    fn(repeat++);
    for (int t = 0; t < kTimes; ++t) {
      Wait();
      const auto begin = std::chrono::steady_clock::now();
      for (int r = 0; r < kRepeats; ++r) fn(repeat++);
      Wait();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      seconds.push_back(took.count() / kRepeats);
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[kTimes / 2];
  }

  void MeasureCopy() {
    const size_t bytes = size_t{1} << (30 - shrink_);
    Range from, to;
    Array(&from, bytes);
    Array(&to, bytes);
    copy_ = 2.0 * static_cast<double>(bytes) / Time([&](int) {
              Session session(device_, Device::StreamOf(exec_));
              session.Copy(to.data(), from.data(), bytes);
            });
    std::printf("copy within the device: %.0f GB/s, reads and writes counted\n", copy_ / 1e9);
    std::printf("%-5s %-6s %-5s %-5s %-17s %12s %10s %8s\n", "dim", "rows", "HBM", "load", "call",
                "Mkeys/s", "GB/s", "of copy");
  }

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
    Require(DeviceTable<Device>::Make(options, &device_, &table));
    const auto fill = static_cast<uint64_t>(load * static_cast<double>(capacity));
    uint64_t next = 0;  // number of the next new key
    for (; next < fill; next += n_) {
      Do(MakeKeys{next, keys()});
      Require(table->Upsert(exec_, keys(), n_, vectors_.data(), ++tick_));
    }
    Wait();

    const auto print = [&](const char* call, double seconds, double bytes) {
      const double rate = bytes * static_cast<double>(n_) / seconds;
      std::printf("%-5lld 2^%-4d %-5.2f %-5.2f %-17s %12.1f %10.1f %7.1f%%\n",
                  static_cast<long long>(dim), log_rows - shrink_, hbm_share, load, call,
                  static_cast<double>(n_) / seconds / 1e6, rate / 1e9, 100 * rate / copy_);
      std::fflush(stdout);
    };
    const double vector = 4.0 * static_cast<double>(dim);
    constexpr double kProbe = 8 + 64 + 16;  // key, bucket, the row's head
    const auto draw = [&](int r) {
      Do(DrawKeys{static_cast<uint64_t>(r) << 32, std::min(next, fill), keys()});
    };
    // What is drawn is not part of what is measured: few keys are enough to miss every cache.
    draw(0);
    print("find*", Time([&](int) { table->Find(exec_, keys(), n_, ++tick_, rows()); }), kProbe + 4);
    print("find", Time([&](int) {
            table->Lookup(exec_, keys(), n_, ++tick_, nullptr, vectors_.data(), rows());
          }),
          kProbe + 4 + 2 * vector);
    print("contains", Time([&](int) {
            table->Contains(exec_, keys(), n_, reinterpret_cast<bool*>(rows_.data()));
          }),
          kProbe + 1);
    print("assign",
          Time([&](int) { Require(table->Upsert(exec_, keys(), n_, vectors_.data(), ++tick_)); }),
          kProbe + 4 + 2 * vector);
    print("find_or_insert", Time([&](int) {
            Do(ReplaceSome{next, 10, keys()});
            next += n_;
            Require(table->LookupOrInsert(exec_, keys(), n_, ++tick_, vectors_.data(), rows()));
          }),
          kProbe + 4 + 2.1 * vector);
    print("insert_or_assign", Time([&](int) {
            Do(MakeKeys{next, keys()});
            next += n_;
            Require(table->Upsert(exec_, keys(), n_, vectors_.data(), ++tick_));
          }),
          kProbe + 4 + 2 * vector);
    if (hbm_share < 1.0)
      RunZipf(table.get(), fill,
              [&](double seconds) { print("zipf find", seconds, kProbe + 4 + 2 * vector); });
  }

  void RunZipf(Table* table, uint64_t ranks, const std::function<void(double)>& print) {
    const auto draw = [&](int r) { Do(DrawZipf{static_cast<uint64_t>(r) << 32, ranks, keys()}); };
    // Until one and a half times as many were read as there are rows.
    int rounds = 0;
    for (; rounds * n_ < ranks + ranks / 2; ++rounds) {
      draw(rounds);
      table->Find(exec_, keys(), n_, ++tick_, rows());
      Require(table->Promote(exec_, tick_));
    }
    const TableStats before = table->stats();
    print(Time([&](int r) {
      draw(rounds + r);
      table->Lookup(exec_, keys(), n_, ++tick_, nullptr, vectors_.data(), rows());
    }));
    const TableStats after = table->stats();
    std::printf("      %.1f %% of these reads hit the device tier; %llu rows had moved there\n",
                100.0 * static_cast<double>(after.device_hits - before.device_hits) /
                    static_cast<double>(after.hits - before.hits),
                static_cast<unsigned long long>(before.promotions));
  }

  Device& device_;
  Exec& exec_;
  const int shrink_;
  const size_t n_;
  Range keys_, vectors_, rows_;
  Tick tick_ = 0;
  double copy_ = 0;  // bytes a second
};

}  // namespace dynemb::benchmark_device

#endif  // DYNEMB_BENCHMARKS_CC_DEVICE_TABLE_BENCHMARK_H_
