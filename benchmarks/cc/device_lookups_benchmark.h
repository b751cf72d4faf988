// Training steps of ten tables in a device's memory, as published for dynamicemb: 1,048,570 ids in
// total, drawn by zipf(1.05) from the 2^21 keys of each table (or --keys; dynamicemb's have 25.6
// million). Rows have 8 to 128 float32, and the state of Adagrad; rows of 128 float32 also have the
// state of SGD or of Adam. Either all rows or a tenth of them are in the device's memory. With dim
// 128 there are three more cases: one row for each distinct key of a batch of one id in each bag
// (hbm-batch1.0), 0.8 of these rows, or none. A case is a choice of these, such as
// dim128/hbm0.10/adam, and has bags of one id and of ten.
//
// A line is one fused call (cc/lookup/lookups.h), of one id in each bag or the mean of ten:
//
//   pool      Pool, all keys present         backward   SumGradients
//   pool new  Pool, one id in 20 is new      apply      Apply, on the rows that Pool found
//   evaluate  Pool that inserts no keys      pooled     ApplyPooled: backward and apply in one call
//   step      pool, pooled
//   step of 3 pool, backward, apply
//
// A few batches are drawn ahead. A line processes them without waiting, and then others are drawn.
// Rows change tiers once per step: `pool` and the steps include that, `apply` and `pooled` do not,
// and evaluation only notes rows that would. A bag of one id is also a lookup without pooling.
//
// Mids/s counts input ids. MB is the minimum to move: for `pool` and `backward`, the key and row id
// of each id, and the pooled vector of each bag or its gradient; and once per distinct key
//
//   pool      a bucket of 64 bytes, the row's head (16 bytes) and vector; evaluate: the same
//   pool new  the same; for new keys also the bucket, written, and the state
//   backward  key, row id and sum, written
//   apply     the same, read, and the row, read and written
//   pooled    the row, read and written
//
// `pooled` has the other data of `backward`, too.
//
// The last column is its share of the bandwidth of a copy within the device's memory, counting
// reads and writes, wherever the rows are.
#ifndef DYNEMB_BENCHMARKS_CC_DEVICE_LOOKUPS_BENCHMARK_H_
#define DYNEMB_BENCHMARKS_CC_DEVICE_LOOKUPS_BENCHMARK_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "benchmarks/cc/device_benchmark.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/lookups.h"
#include "cc/table/optimizer.h"
#include "cc/table/row.h"
#include "cc/table/table.h"

namespace dynemb::benchmark_device {

struct Optimizer {
  const char* name;
  OptimizerKind kind;
  float init;  // of each state
};
constexpr Optimizer kOptimizers[] = {{"sgd", OptimizerKind::kSgd, 0.0f},
                                     {"adagrad", OptimizerKind::kAdagrad, 0.1f},
                                     {"adam", OptimizerKind::kAdam, 0.0f}};

constexpr uint64_t kKeysOfTable = uint64_t{1} << 21;  // if there is no --keys

// The rows that are in the device's memory.
struct HbmShare {
  const char* name;
  double share;
  bool of_batch;     // a share of the distinct keys of a batch, not of all keys
  bool only_widest;  // not for other dims than the widest
};
constexpr HbmShare kHbmShares[] = {{"1.00", 1.0, false, false},
                                   {"0.10", 0.1, false, false},
                                   {"-batch1.0", 1.0, true, true},
                                   {"-batch0.8", 0.8, true, true},
                                   {"0.00", 0.0, false, true}};

template <class Device>
class LookupsBenchmark {
 public:
  using MakeTable = std::function<Status(const TableOptions&, std::unique_ptr<Table>*)>;

  // `exec` represents the stream; make(options, &table) creates a table for `lookups`. All sizes
  // are divided by 2^arguments.shrink.
  LookupsBenchmark(Device* device, Exec* exec, Lookups* lookups, MakeTable make,
                   Arguments arguments)
      : exec_(*exec),
        lookups_(*lookups),
        make_(std::move(make)),
        bench_(device, exec),
        arguments_(std::move(arguments)),
        shrink_(arguments_.shrink),
        num_keys_(std::max<uint64_t>(1, arguments_.keys >> shrink_)),
        most_ids_(kTables * std::max(IdsOfTable(kHotnesses[0]), IdsOfTable(kHotnesses[1]))) {
    for (Batch& batch : batches_) {
      batch.keys = bench_.template Array<uint64_t>(most_ids_);
      batch.rows = bench_.template Array<RowId>(most_ids_);
      batch.unique_keys = bench_.template Array<uint64_t>(most_ids_);
      batch.unique_rows = bench_.template Array<RowId>(most_ids_);
    }
    pooled_ = bench_.template Array<float>(most_ids_ * kMostDim);
    upstream_ = bench_.template Array<float>(most_ids_ * kMostDim);
    sums_ = bench_.template Array<float>(most_ids_ * kMostDim);
    // All bytes are equal, and make a plausible gradient: 0.0115.
    for (float* gradients : {upstream_, sums_}) {
      bench_.Fill(gradients, 0x3C, most_ids_ * kMostDim * sizeof(float));
    }
  }

  void Run() {
    copy_ = bench_.CopyRate(size_t{1} << (30 - shrink_));
    batch_keys_ = DistinctKeys();
    std::printf("%-5s %-8s %-9s %-8s %-4s %-9s %9s %9s %9s %9s %8s\n", "dim", "keys", "HBM",
                "state", "bag", "call", "ms", "Mids/s", "MB", "GB/s", "of copy");
    for (const int64_t dim : {int64_t{8}, int64_t{32}, kMostDim}) {
      for (const HbmShare& hbm : kHbmShares) {
        if (hbm.only_widest && dim != kMostDim) continue;
        for (const Optimizer& optimizer : kOptimizers) {
          if (optimizer.kind != OptimizerKind::kAdagrad && dim != kMostDim) continue;
          char name[64];
          std::snprintf(name, sizeof(name), "dim%d/hbm%s/%s", static_cast<int>(dim), hbm.name,
                        optimizer.name);
          if (!arguments_.Runs(name)) continue;
          optimizer_ = &optimizer;
          RunTables(dim, hbm);
        }
      }
    }
    arguments_.RequireCase();
  }

 private:
  static constexpr size_t kTables = 10;
  static constexpr int64_t kMostDim = 128;
  static constexpr size_t kHotnesses[] = {1, 10};
  static constexpr uint32_t kOneNewIn = 20;
  // The reads of each key, on average, before a tier is measured. Promotion follows the reads: the
  // share of them that the device's memory answers rises until then.
  static constexpr size_t kWarmUp = 8;

  // Ids of all tables, one table after the other, and the results of the calls.
  struct Batch {
    uint64_t* keys = nullptr;
    RowId* rows = nullptr;
    uint64_t* unique_keys = nullptr;
    RowId* unique_rows = nullptr;
    std::vector<size_t> num_unique;  // of each table
  };

  // A multiple of `hotness`, not 0.
  size_t IdsOfTable(size_t hotness) const {
    return std::max<size_t>(1, (104857 >> shrink_) / hotness) * hotness;
  }
  size_t ids() const { return kTables * bags_[0].nnz(); }

  StateSpec Spec(int64_t dim) const {
    StateSpec spec;
    spec.optimizer = optimizer_->name;
    spec.widths = StateWidths(optimizer_->kind, {}, dim);
    spec.inits.assign(spec.widths.size(), optimizer_->init);
    return spec;
  }

  // The distinct keys of a table in a batch of one id in each bag.
  size_t DistinctKeys() {
    const size_t n = IdsOfTable(1);
    bench_.ForEach(n, DrawZipf{++draws_ << 32, num_keys_, batches_[0].keys});
    std::vector<uint64_t> keys(n);
    bench_.CopyToHost(keys.data(), batches_[0].keys, n * sizeof(uint64_t));
    std::sort(keys.begin(), keys.end());
    return static_cast<size_t>(std::unique(keys.begin(), keys.end()) - keys.begin());
  }

  // Tables with num_keys_ keys each, and room for the new keys of all lines.
  void Fill(int64_t dim, const HbmShare& hbm) {
    const StateSpec spec = Spec(dim);
    const auto state = std::accumulate(spec.widths.begin(), spec.widths.end(), int64_t{0});
    const RowLayout row(8, DType::kFloat32, dim, state, 16);
    tables_.clear();
    for (size_t t = 0; t < kTables; ++t) {
      TableOptions options;
      options.name = "benchmark";
      options.dim = dim;
      options.init_capacity = options.max_capacity =
          static_cast<int64_t>(num_keys_ + std::min(num_keys_, uint64_t{1} << (21 - shrink_)));
      options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
      const auto of = static_cast<double>(hbm.of_batch ? batch_keys_ : num_keys_);
      options.tier = IsTiered(hbm) ? Tier::kHybrid : Tier::kHbm;
      options.max_hbm_bytes = static_cast<uint64_t>(hbm.share * of) * row.stride;
      std::unique_ptr<Table> table;
      Require(make_(options, &table));
      Require(table->AttachState(exec_, spec));
      for (uint64_t first = 0; first < num_keys_; first += most_ids_) {
        const size_t n = std::min<uint64_t>(most_ids_, num_keys_ - first);
        bench_.ForEach(n, MakeKeys{first, batches_[0].keys});
        Require(
            table->FindOrInsert(exec_, KeySpan(batches_[0].keys, n), ++tick_, batches_[0].rows));
      }
      tables_.push_back(std::move(table));
    }
    next_new_ = num_keys_;
  }

  void Draw() {
    for (Batch& batch : batches_) {
      bench_.ForEach(ids(), DrawZipf{++draws_ << 32, num_keys_, batch.keys});
    }
  }
  void DrawSomeNew() {
    Draw();
    for (Batch& batch : batches_) {
      bench_.ForEach(ids(), ReplaceSome{next_new_, kOneNewIn, batch.keys});
      next_new_ += ids();
    }
  }

  void Pool(Batch* batch, bool insert = true) {
    std::vector<PoolTask> tasks(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      const size_t first_id = t * bags_[t].nnz(), first_bag = t * bags_[t].num_bags();
      tasks[t].table = tables_[t].get();
      tasks[t].keys = batch->keys + first_id;
      tasks[t].rows = batch->rows + first_id;
      tasks[t].bags = &bags_[t];
      tasks[t].combiner = combiner_;
      tasks[t].pooled = pooled_ + first_bag * dim();
    }
    Require(lookups_.Pool(exec_, tasks, ++tick_, insert));
  }

  // The gradient of the pooled vectors of a table.
  BackwardTask GradientOf(const Batch& batch, size_t t) {
    const size_t first_id = t * bags_[t].nnz(), first_bag = t * bags_[t].num_bags();
    BackwardTask task;
    task.keys = batch.keys + first_id;
    task.rows = batch.rows + first_id;
    task.bags = &bags_[t];
    task.combiner = combiner_;
    task.upstream = upstream_ + first_bag * dim();
    task.dim = static_cast<int64_t>(dim());
    return task;
  }

  void Backward(Batch* batch) {
    std::vector<BackwardTask> tasks;
    for (size_t t = 0; t < kTables; ++t) tasks.push_back(GradientOf(*batch, t));
    batch->num_unique.clear();
    size_t first = 0;
    const auto allocate = [&](size_t, size_t num_unique, BackwardOutput* out) {
      out->keys = batch->unique_keys + first;
      out->rows = batch->unique_rows + first;
      out->sums = sums_ + first * dim();
      batch->num_unique.push_back(num_unique);
      first += num_unique;
      return Status();
    };
    Require(lookups_.SumGradients(exec_, tasks, allocate));
  }

  // Applies the sums of the last Backward, of any batch.
  void Apply(const Batch& batch) {
    std::vector<ApplyTask> tasks(kTables);
    size_t first = 0;
    for (size_t t = 0; t < kTables; ++t) {
      tasks[t].table = tables_[t].get();
      tasks[t].keys = batch.unique_keys + first;
      tasks[t].rows = batch.unique_rows + first;
      tasks[t].gradients = sums_ + first * dim();
      tasks[t].n = batch.num_unique[t];
      first += tasks[t].n;
    }
    const StateSpec spec = Spec(static_cast<int64_t>(dim()));
    Require(lookups_.Apply(exec_, tasks, {optimizer_->kind, {}, {}, 1, spec.optimizer, spec.inits},
                           ++tick_));
  }

  // After a round of batches.
  void Promote() {
    std::vector<Table*> tables;
    for (const auto& table : tables_) tables.push_back(table.get());
    Require(lookups_.PromoteIfDue(exec_, tables, tick_));
  }

  void ApplyPooled(const Batch& batch) {
    std::vector<ApplyPooledTask> tasks(kTables);
    for (size_t t = 0; t < kTables; ++t) {
      static_cast<BackwardTask&>(tasks[t]) = GradientOf(batch, t);
      tasks[t].table = tables_[t].get();
    }
    const StateSpec spec = Spec(static_cast<int64_t>(dim()));
    Require(lookups_.ApplyPooled(
        exec_, tasks, {optimizer_->kind, {}, {}, 1, spec.optimizer, spec.inits}, ++tick_));
  }

  // Distinct keys of a batch, on average, by the last Backward of each.
  double MeanUnique() const {
    size_t sum = 0;
    for (const Batch& batch : batches_) {
      sum = std::accumulate(batch.num_unique.begin(), batch.num_unique.end(), sum);
    }
    return static_cast<double>(sum) / kBatches;
  }
  TableStats Stats() const {
    TableStats all;
    for (const auto& table : tables_) {
      const TableStats stats = table->stats();
      all.hits += stats.hits;
      all.device_hits += stats.device_hits;
      all.promotions += stats.promotions;
    }
    return all;
  }

  static bool IsTiered(const HbmShare& hbm) { return hbm.of_batch || hbm.share < 1.0; }

  void RunTables(int64_t dim, const HbmShare& hbm) {
    Fill(dim, hbm);
    for (const size_t hotness : kHotnesses) {
      const size_t n = IdsOfTable(hotness);
      for (Bags& bags : bags_) {
        Require(bags.InitUniform(static_cast<int64_t>(hotness), static_cast<int64_t>(n),
                                 static_cast<int64_t>(n / hotness)));
      }
      combiner_ = hotness == 1 ? Combiner::kSum : Combiner::kMean;
      RunBags(hbm);
    }
  }

  void RunBags(const HbmShare& hbm) {
    if (IsTiered(hbm)) {
      for (size_t read = 0; read < kTables * kWarmUp * num_keys_;) {
        Draw();
        for (Batch& batch : batches_) {
          Pool(&batch);
          read += ids();
        }
      }
    }
    const auto each = [&](auto fn) {
      return [this, fn](int repeat) { fn(&batches_[repeat % kBatches]); };
    };
    const auto pool = [&](Batch* batch) { Pool(batch); };
    const auto backward = [&](Batch* batch) { Backward(batch); };
    const auto apply = [&](Batch* batch) { Apply(*batch); };
    const auto all = [&](auto fn) {
      for (Batch& batch : batches_) fn(&batch);
    };
    const TableStats before = Stats();
    const double pool_seconds = bench_.Seconds(each(pool), [&] { Draw(); });
    const TableStats after = Stats();
    const double evaluate_seconds =
        bench_.Seconds(each([&](Batch* batch) { Pool(batch, /*insert=*/false); }), [&] { Draw(); });
    const double backward_seconds = bench_.Seconds(each(backward), [&] {
      Draw();
      all(pool);
    });
    const double apply_seconds = bench_.Seconds(each(apply), [&] {
      Draw();
      all(pool);
      all(backward);
      Promote();
    });
    const double pooled_seconds =
        bench_.Seconds(each([&](Batch* batch) { ApplyPooled(*batch); }), [&] {
          Draw();
          all(pool);
          Promote();
        });
    const double step_seconds = bench_.Seconds(each([&](Batch* batch) {
                                                 Pool(batch);
                                                 ApplyPooled(*batch);
                                               }),
                                               [&] { Draw(); });
    const double step_of_3_seconds = bench_.Seconds(each([&](Batch* batch) {
                                                      Pool(batch);
                                                      Backward(batch);
                                                      Apply(*batch);
                                                    }),
                                                    [&] { Draw(); });
    const double unique = MeanUnique();
    const double new_seconds = bench_.Seconds(each(pool), [&] { DrawSomeNew(); });
    all(backward);
    const double unique_with_new = MeanUnique();

    constexpr double kId = sizeof(uint64_t) + sizeof(RowId);
    const RowLayout& row = tables_[0]->layout();
    const auto n = static_cast<double>(ids());
    const auto vector = static_cast<double>(row.vector_bytes());
    const double of_bags = n * kId + static_cast<double>(kTables * bags_[0].num_bags()) * vector;
    const double found = kBucketBytes + kHeadBytes + vector;
    const double pool_bytes = of_bags + unique * found;
    const double backward_bytes = of_bags + unique * (kId + vector);
    const double apply_bytes = unique * (kId + vector + 2 * static_cast<double>(row.stride));
    const double pooled_bytes = of_bags + unique * 2 * static_cast<double>(row.stride);
    const double new_bytes =
        of_bags + unique_with_new * found +
        n / kOneNewIn * (kBucketBytes + static_cast<double>(row.state_bytes()));
    const auto print = [&](const char* call, double seconds, double bytes) {
      std::printf("%-5zu %zux%-6.3g %-9s %-8s %-4zu %-9s %9.3f %9.1f %9.2f %9.1f %7.1f%%\n", dim(),
                  kTables, static_cast<double>(num_keys_), hbm.name + (*hbm.name == '-'),
                  optimizer_->name, bags_[0].hotness(), call, seconds * 1e3, n / seconds / 1e6,
                  bytes / 1e6, bytes / seconds / 1e9, 100 * bytes / seconds / copy_);
    };
    print("pool", pool_seconds, pool_bytes);
    print("pool new", new_seconds, new_bytes);
    print("evaluate", evaluate_seconds, pool_bytes);
    print("backward", backward_seconds, backward_bytes);
    print("apply", apply_seconds, apply_bytes);
    print("pooled", pooled_seconds, pooled_bytes);
    print("step", step_seconds, pool_bytes + pooled_bytes);
    print("step of 3", step_of_3_seconds, pool_bytes + backward_bytes + apply_bytes);
    std::printf("      %.0f ids, %.0f keys", n, unique);
    if (IsTiered(hbm)) {
      std::printf("; %.1f %% of pool's reads hit the device tier; %llu rows had moved there",
                  100.0 * static_cast<double>(after.device_hits - before.device_hits) /
                      static_cast<double>(after.hits - before.hits),
                  static_cast<unsigned long long>(before.promotions));
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  static constexpr int kBatches = Bench<Device>::kRepeats;

  size_t dim() const { return static_cast<size_t>(tables_[0]->layout().dim); }

  Exec& exec_;
  Lookups& lookups_;
  const MakeTable make_;
  Bench<Device> bench_;
  Arguments arguments_;
  const int shrink_;
  const Optimizer* optimizer_ = nullptr;  // of the tables
  const uint64_t num_keys_;               // per table
  const size_t most_ids_;
  size_t batch_keys_ = 0;  // DistinctKeys
  Batch batches_[kBatches];
  float *pooled_, *upstream_, *sums_;  // of any batch
  std::vector<std::unique_ptr<Table>> tables_;
  Bags bags_[kTables];
  Combiner combiner_ = Combiner::kSum;
  uint64_t draws_ = 0;
  uint64_t next_new_ = 0;  // number of the next new key
  Tick tick_ = 0;
  double copy_ = 0;  // bytes per second
};

}  // namespace dynemb::benchmark_device

#endif  // DYNEMB_BENCHMARKS_CC_DEVICE_LOOKUPS_BENCHMARK_H_
