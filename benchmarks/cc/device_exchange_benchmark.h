// The work of one of eight ranks on the messages of a step, on a device. There are ten tables and
// 1,048,570 ids in total, drawn by zipf(1.05) from the 2^21 keys of each table; dims 8 to 128; wire
// types float32 and int8. The ranks are alike: each other rank sends the words that this rank would
// send to itself.
//
// A line is one call (cc/lookup/exchange.h):
//
//   request   RequestKeys: distinct keys, by owner          receive   ReceiveKeys
//   pack      PackRows, of the vectors that others ask for  pool      PoolReceived, one id a bag
//   sum       SumRequested: gradients of requested rows     arrived   SumReceived
//
// Mids/s counts input ids. MB is the minimum to move: keys and vectors, once where they are read
// and once where they are written; an index of 4 bytes per id; distinct keys once. The last column
// is its share of the bandwidth of a copy within the device's memory, counting reads and writes.
//
// A case, for --case, is the calls that move vectors of a dim: dim128/int8.
#ifndef DYNEMB_BENCHMARKS_CC_DEVICE_EXCHANGE_BENCHMARK_H_
#define DYNEMB_BENCHMARKS_CC_DEVICE_EXCHANGE_BENCHMARK_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "benchmarks/cc/device_benchmark.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/exchange.h"

namespace dynemb::benchmark_device {

struct CopyWords {
  const int32_t* from;
  int32_t* to;
  DYNEMB_HD void operator()(size_t i) const { to[i] = from[i]; }
};

template <class Device>
class ExchangeBenchmark {
 public:
  // `exec` represents the stream.
  ExchangeBenchmark(Device* device, Exec* exec, Exchange* exchange, const Arguments& arguments)
      : exec_(*exec),
        exchange_(*exchange),
        bench_(device, exec),
        arguments_(arguments),
        shrink_(arguments.shrink),
        num_keys_(uint64_t{1} << (21 - shrink_)),
        ids_(std::max<size_t>(1, 104857 >> shrink_)) {
    const size_t all = kTables * ids_;
    keys_ = bench_.template Array<uint64_t>(all);
    index_ = bench_.template Array<uint32_t>(all);
    request_ = bench_.template Array<int32_t>(2 * all + kTables * kRanks);
    own_request_ = bench_.template Array<int32_t>(2 * all + kTables);
    upstream_ = bench_.template Array<float>(all * kMostDim);
    pooled_ = bench_.template Array<float>(all * kMostDim);
    // All bytes are equal, and make a plausible gradient: 0.0115.
    bench_.Fill(upstream_, 0x3C, all * kMostDim * sizeof(float));
  }

  void Run() {
    copy_ = bench_.CopyRate(size_t{1} << (30 - shrink_));
    bench_.ForEach(kTables * ids_, DrawZipf{0, num_keys_, keys_});
    Request();
    std::printf("%-5s %-8s %-8s %9s %9s %9s %9s %8s\n", "dim", "wire", "call", "ms", "Mids/s", "MB",
                "GB/s", "of copy");
    const double keys = 8.0 * static_cast<double>(Sum(asked_));
    const double ids = static_cast<double>(kTables * ids_);
    Print("-", "-", "request", bench_.Seconds([&](int) { Request(); }), 12 * ids + keys);
    Receive();
    Print("-", "-", "receive", bench_.Seconds([&](int) { Receive(); }),
          16.0 * static_cast<double>(Sum(served_)));
    struct Case {
      int64_t dim;
      WireType wire;
      const char* wire_name;
    };
    for (const Case& c :
         {Case{8, WireType::kSame, "same"}, Case{32, WireType::kSame, "same"},
          Case{kMostDim, WireType::kSame, "same"}, Case{kMostDim, WireType::kInt8, "int8"}}) {
      const std::string name = "dim" + std::to_string(c.dim) + "/" + c.wire_name;
      if (arguments_.Runs(name)) RunRows(c.dim, c.wire, c.wire_name);
    }
    arguments_.RequireCase();
    std::printf("      %.0f ids; %zu keys asked for, %zu served\n", ids, Sum(asked_), Sum(served_));
  }

 private:
  static constexpr size_t kTables = 10;
  static constexpr uint32_t kRanks = 8;
  static constexpr int64_t kMostDim = 128;

  static size_t Sum(const std::vector<int64_t>& counts) {
    return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  }

  void Request() {
    std::vector<RouteTask> tasks(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      tasks[t].owners.rule = Owners::Rule::kHash;
      tasks[t].owners.ranks = kRanks;
      tasks[t].features = {{keys_ + t * ids_, ids_, index_ + t * ids_}};
    }
    Require(exchange_.RequestKeys(exec_, tasks, kRanks, /*self=*/0,
                                  [&](const RouteSizes& sizes, int32_t** words, int32_t** own) {
                                    asked_ = sizes.counts;
                                    num_own_words_ = sizes.num_own_words;
                                    *words = request_;
                                    *own = own_request_;
                                    return Status();
                                  }));
  }

  // Each other rank sends the number of words that this rank keeps.
  void Receive() {
    if (arrived_ == nullptr) {
      arrived_ = bench_.template Array<int32_t>((kRanks - 1) * num_own_words_);
      for (uint32_t r = 1; r < kRanks; ++r) {
        bench_.ForEach(num_own_words_,
                       CopyWords{own_request_, arrived_ + (r - 1) * num_own_words_});
      }
      arrived_keys_ = bench_.template Array<uint64_t>(kRanks * num_own_words_ / 2);
    }
    std::vector<int32_t> splits(kRanks, static_cast<int32_t>(num_own_words_));
    splits[0] = 0;
    Requests::Received received;
    received.words = arrived_;
    received.num_words = static_cast<int64_t>((kRanks - 1) * num_own_words_);
    received.splits = splits.data();
    received.ranks = kRanks;
    received.self = 0;
    received.own = own_request_;
    received.num_own_words = static_cast<int64_t>(num_own_words_);
    served_.clear();
    Require(exchange_.ReceiveKeys(exec_, received, std::vector<KeyType>(kTables, KeyType::kInt64),
                                  [&](size_t, const int64_t* counts, void** keys) {
                                    *keys = arrived_keys_ + Sum(served_);
                                    served_.insert(served_.end(), counts, counts + kRanks);
                                    return Status();
                                  }));
  }

  void RunRows(int64_t dim, WireType wire, const char* name) {
    WireLayout of_asked, of_served;
    const std::vector<WireTable> tables(kTables, {DType::kFloat32, dim, wire});
    Require(of_asked.Init(tables, asked_.data(), kRanks, 0));
    Require(of_served.Init(tables, served_.data(), kRanks, 0));
    const size_t floats = static_cast<size_t>(dim);
    auto* const held = bench_.template Array<float>(Sum(served_) * floats);
    auto* const sums = bench_.template Array<float>(Sum(served_) * floats);
    auto* const words =
        bench_.template Array<int32_t>(std::max(of_asked.num_words(), of_served.num_words()));
    bench_.Fill(held, 0x3C, Sum(served_) * floats * sizeof(float));
    std::vector<const void*> rows, own_rows;
    std::vector<float*> own_sums;
    size_t first = 0;
    for (size_t t = 0; t < kTables; ++t) {
      rows.push_back(held + first * floats);
      own_rows.push_back(held + first * floats);  // rank 0 is the first
      own_sums.push_back(sums + first * floats);
      first += of_served.num_rows(t);
    }
    const auto n = static_cast<double>(kTables * ids_);
    const double vector = 4.0 * static_cast<double>(dim);
    const double asked = static_cast<double>(Sum(asked_)) * vector;
    const double served = static_cast<double>(Sum(served_)) * vector;
    const double asked_words = 4.0 * static_cast<double>(of_asked.num_words());
    const double served_words = 4.0 * static_cast<double>(of_served.num_words());
    const auto print = [&](const char* call, double seconds, double bytes) {
      char text[16];
      std::snprintf(text, sizeof(text), "%d", static_cast<int>(dim));
      Print(text, name, call, seconds, bytes);
    };

    print("pack",
          bench_.Seconds([&](int) { Require(exchange_.PackRows(exec_, of_served, rows, words)); }),
          served * (kRanks - 1) / kRanks + served_words);
    const Exchange::Received received{&of_asked, words, own_rows};
    print("pool", bench_.Seconds([&](int) { Pool(received, dim); }),
          4 * n + asked / kRanks + asked_words + n * vector);
    print("sum", bench_.Seconds([&](int) { SumAsked(of_asked, words, own_sums); }),
          4 * n + n * vector + asked / kRanks + asked_words);
    const Exchange::Received gradients{&of_served, words, {own_sums.begin(), own_sums.end()}};
    size_t unique = 0;
    const double seconds = bench_.Seconds([&](int) { unique = SumArrived(gradients, dim); });
    print("arrived", seconds,
          8.0 * static_cast<double>(Sum(served_)) + served / kRanks + served_words +
              static_cast<double>(unique) * (8 + vector));
  }

  void Pool(const Exchange::Received& received, int64_t dim) {
    std::vector<Exchange::PoolFeature> features(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      features[t].table = t;
      features[t].index = index_ + t * ids_;
      features[t].bags = OneEach(t);
      features[t].pooled = pooled_ + t * ids_ * static_cast<size_t>(dim);
    }
    Require(exchange_.PoolReceived(exec_, received, features));
  }

  void SumAsked(const WireLayout& layout, int32_t* words, const std::vector<float*>& own) {
    std::vector<GatherGradient::Task> tasks(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      GatherGradient::Feature feature;
      feature.bags = OneEach(t);
      feature.dim = layout.tables()[t].dim;
      feature.upstream = upstream_ + t * ids_ * static_cast<size_t>(feature.dim);
      feature.index = index_ + t * ids_;
      tasks[t].features.push_back(feature);
    }
    Require(exchange_.SumRequested(exec_, layout, tasks, words, own));
  }

  // Returns the number of keys.
  size_t SumArrived(const Exchange::Received& received, int64_t dim) {
    std::vector<BackwardTask> tasks(kTables);
    std::vector<Bags> bags(kTables);
    size_t first = 0, unique = 0;
    for (size_t t = 0; t < kTables; ++t) {
      const auto n = static_cast<int64_t>(received.layout->num_rows(t));
      Require(bags[t].InitUniform(1, n, n));
      tasks[t].keys = arrived_keys_ + first;
      tasks[t].bags = &bags[t];
      tasks[t].dim = dim;
      first += static_cast<size_t>(n);
    }
    if (unique_keys_ == nullptr) {
      unique_keys_ = bench_.template Array<uint64_t>(first);
      unique_sums_ = bench_.template Array<float>(first * kMostDim);
    }
    Require(exchange_.SumReceived(exec_, received, tasks,
                                  [&](size_t, size_t n, BackwardOutput* output) {
                                    output->keys = unique_keys_ + unique;
                                    output->sums = unique_sums_ + unique * static_cast<size_t>(dim);
                                    unique += n;
                                    return Status();
                                  }));
    return unique;
  }

  Bags* OneEach(size_t t) {
    const auto n = static_cast<int64_t>(ids_);
    Require(bags_[t].InitUniform(1, n, n));
    return &bags_[t];
  }

  void Print(const char* dim, const char* wire, const char* call, double seconds, double bytes) {
    const auto ids = static_cast<double>(kTables * ids_);
    std::printf("%-5s %-8s %-8s %9.3f %9.1f %9.2f %9.1f %7.1f%%\n", dim, wire, call, seconds * 1e3,
                ids / seconds / 1e6, bytes / 1e6, bytes / seconds / 1e9,
                100 * bytes / seconds / copy_);
    std::fflush(stdout);
  }

  Exec& exec_;
  Exchange& exchange_;
  Bench<Device> bench_;
  Arguments arguments_;
  const int shrink_;
  const uint64_t num_keys_;  // per table
  const size_t ids_;         // per table
  uint64_t* keys_;           // of all tables, as are the next members
  uint32_t* index_;
  int32_t *request_, *own_request_;
  float *upstream_, *pooled_;
  size_t num_own_words_ = 0;
  std::vector<int64_t> asked_, served_;
  int32_t* arrived_ = nullptr;
  uint64_t *arrived_keys_ = nullptr, *unique_keys_ = nullptr;
  float* unique_sums_ = nullptr;
  Bags bags_[kTables];
  double copy_ = 0;  // bytes per second
};

}  // namespace dynemb::benchmark_device

#endif  // DYNEMB_BENCHMARKS_CC_DEVICE_EXCHANGE_BENCHMARK_H_
