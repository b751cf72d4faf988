// Kernels of exchange_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/gather.h"
#include "cc/lookup/route.h"
#include "cc/lookup/wire.h"
#include "cc/table/scratch.h"
#include "cc/tf/exchange_counters.h"
#include "cc/tf/sparse_op.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

absl::Status GetInts(tf::OpKernelConstruction* ctx, const char* name, int64_t least, int64_t most,
                     std::vector<int64_t>* values) {
  TF_RETURN_IF_ERROR(ctx->GetAttr(name, values));
  for (int64_t value : *values) {
    if (value < least || value > most) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " must be in [", least, ", ", most, "], got ", value));
    }
  }
  return absl::OkStatus();
}

absl::Status GetCounters(tf::OpKernelConstruction* ctx, std::vector<ExchangeCounters*>* counters) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(ctx->GetAttr("names", &names));
  for (const std::string& name : names) counters->push_back(ExchangeCounters::Of(name));
  return absl::OkStatus();
}

void Count(std::atomic<int64_t>* counter, size_t amount) {
  counter->fetch_add(static_cast<int64_t>(amount), std::memory_order_relaxed);
}

// Fails unless `counts` is [tables, ranks].
absl::Status CheckCounts(const tf::Tensor& counts, size_t tables) {
  const int64_t ranks = counts.dims() == 2 ? counts.dim_size(1) : 0;
  TF_RETURN_IF_ERROR(CheckShape(counts, {static_cast<int64_t>(tables), ranks}, "counts"));
  if (ranks >= 1 && ranks <= int64_t{Owners::kMaxRanks}) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("counts is of ", ranks, " ranks"));
}

absl::Status OutputSplits(tf::OpKernelContext* ctx, int index, const std::vector<size_t>& words) {
  int32_t* splits;
  TF_RETURN_IF_ERROR(Output(ctx, index, {static_cast<int64_t>(words.size())}, &splits));
  for (size_t rank = 0; rank < words.size(); ++rank) {
    splits[rank] = static_cast<int32_t>(words[rank]);
  }
  return absl::OkStatus();
}

class RouteOp : public DynembOp {
 public:
  // Attribute `owners`: -1, -2, or the rank that holds the table.
  static constexpr int64_t kHash = -1, kModulo = -2;

  explicit RouteOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    int64_t ranks;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &ranks));
    OP_REQUIRES(ctx, ranks <= int64_t{Owners::kMaxRanks},
                absl::InvalidArgumentError(absl::StrCat("num_ranks is ", ranks)));
    ranks_ = static_cast<uint32_t>(ranks);
    int64_t rank;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank));
    rank_ = static_cast<uint32_t>(rank);
    std::vector<int64_t> owners;
    OP_REQUIRES_OK(ctx, GetInts(ctx, "owners", kModulo, ranks - 1, &owners));
    for (int64_t owner : owners) {
      Owners o;
      o.ranks = ranks_;
      o.rule = owner == kHash     ? Owners::Rule::kHash
               : owner == kModulo ? Owners::Rule::kModulo
                                  : Owners::Rule::kOne;
      o.one = owner < 0 ? 0 : static_cast<uint32_t>(owner);
      owners_.push_back(o);
    }
    OP_REQUIRES_OK(ctx,
                   GetInts(ctx, "tables", 0, static_cast<int64_t>(owners.size()) - 1, &table_of_));
    OP_REQUIRES_OK(ctx, GetCounters(ctx, &counters_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &key_types_));
    key_type_of_table_.assign(owners_.size(), tf::DT_INVALID);
    OP_REQUIRES(ctx, table_of_.size() == key_types_.size() && counters_.size() == owners_.size(),
                absl::InvalidArgumentError("tables, Tkeys, owners, names: lengths differ"));
    for (size_t i = 0; i < table_of_.size(); ++i) {
      tf::DataType& type = key_type_of_table_[static_cast<size_t>(table_of_[i])];
      OP_REQUIRES(ctx, type == tf::DT_INVALID || type == key_types_[i],
                  absl::InvalidArgumentError("keys of one table are of two types"));
      type = key_types_[i];
    }
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const size_t num_tables = owners_.size();
    std::vector<RouteTask> tasks(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      tasks[t].key_type = ToKeyType(key_type_of_table_[t]);
      tasks[t].owners = owners_[t];
    }
    for (size_t i = 0; i < table_of_.size(); ++i) {
      const tf::Tensor& keys = ctx->input(static_cast<int>(i));
      TF_RETURN_IF_ERROR(CheckShape(keys, {keys.NumElements()}, "keys"));
      RouteIds ids;
      ids.keys = keys.data();
      ids.n = static_cast<size_t>(keys.NumElements());
      TF_RETURN_IF_ERROR(Output(ctx, 3 + static_cast<int>(i), keys.shape(), &ids.index));
      tasks[static_cast<size_t>(table_of_[i])].features.push_back(ids);
    }
    PoolExec exec = MakeExec(ctx);
    auto route = routes_.Take();
    DYNEMB_RETURN_IF_LIBRARY_ERROR(route->Prepare(exec, tasks, ranks_));
    int32_t* words;
    int64_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(route->num_words())}, &words));
    std::vector<size_t> splits;
    for (uint32_t rank = 0; rank < ranks_; ++rank) splits.push_back(route->num_words(rank));
    TF_RETURN_IF_ERROR(OutputSplits(ctx, 1, splits));
    TF_RETURN_IF_ERROR(
        Output(ctx, 2, {static_cast<int64_t>(num_tables), static_cast<int64_t>(ranks_)}, &counts));
    for (size_t t = 0; t < num_tables; ++t) {
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        const size_t keys = route->count(t, rank);
        counts[t * ranks_ + rank] = static_cast<int64_t>(keys);
        if (rank == rank_) continue;
        Count(&counters_[t]->keys, keys);
        Count(&counters_[t]->key_bytes, sizeof(int32_t) + keys * SizeOf(tasks[t].key_type));
      }
    }
    route->Write(exec, words);
    return absl::OkStatus();
  }

 private:
  uint32_t ranks_;
  uint32_t rank_;
  std::vector<Owners> owners_;
  std::vector<int64_t> table_of_;
  std::vector<tf::DataType> key_types_;
  std::vector<tf::DataType> key_type_of_table_;
  std::vector<ExchangeCounters*> counters_;
  ScratchPool<Route> routes_;
};

class ReceiveKeysOp : public DynembOp {
 public:
  explicit ReceiveKeysOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::vector<tf::DataType> types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &types));
    for (tf::DataType type : types) key_types_.push_back(ToKeyType(type));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& words = ctx->input(0);
    const tf::Tensor& splits = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckShape(words, {words.NumElements()}, "words"));
    TF_RETURN_IF_ERROR(CheckShape(splits, {splits.NumElements()}, "splits"));
    const int64_t ranks = splits.NumElements();
    const auto num_tables = static_cast<int64_t>(key_types_.size());
    Requests requests;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(requests.Init(Data<int32_t>(words), Data<int32_t>(splits),
                                                 static_cast<uint32_t>(ranks), words.NumElements(),
                                                 key_types_));
    int64_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(num_tables), {num_tables, ranks}, &counts));
    for (int64_t t = 0; t < num_tables; ++t) {
      const auto table = static_cast<size_t>(t);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        counts[t * ranks + rank] = requests.count(table, static_cast<uint32_t>(rank));
      }
      void* keys;
      TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(t), {requests.num_keys(table)}, &keys));
      requests.CopyKeys(table, keys);
    }
    return absl::OkStatus();
  }

 private:
  std::vector<KeyType> key_types_;
};

// The types and the wire of PackRows and UnpackRows.
class WireOp : public DynembOp {
 public:
  explicit WireOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::vector<std::string> wires;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("wire", &wires));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES(ctx, wires.size() == dtypes_.size(),
                absl::InvalidArgumentError("wire, dtypes: lengths differ"));
    for (size_t t = 0; t < dtypes_.size(); ++t) {
      WireType wire;
      OP_REQUIRES_OK(ctx, ToAbsl(ParseWireType(wires[t], &wire)));
      // As bits, int32 is float32.
      OP_REQUIRES(ctx, dtypes_[t] != tf::DT_INT32 || wire == WireType::kSame,
                  absl::InvalidArgumentError(absl::StrCat("int32 cannot travel as ", wires[t])));
      wires_.push_back(wire);
    }
  }

 protected:
  WireTable TableOf(size_t t, int64_t dim) const {
    WireTable table;
    table.dtype = ToDType(dtypes_[t]);
    table.dim = dim;
    table.wire = wires_[t];
    return table;
  }

  std::vector<WireType> wires_;
  std::vector<tf::DataType> dtypes_;
};

class PackRowsOp : public WireOp {
 public:
  explicit PackRowsOp(tf::OpKernelConstruction* ctx) : WireOp(ctx) {
    std::string what;
    int64_t rank;
    OP_REQUIRES_OK(ctx, GetCounters(ctx, &counters_));
    OP_REQUIRES(ctx, counters_.size() == dtypes_.size(),
                absl::InvalidArgumentError("names, dtypes: lengths differ"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("what", &what));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank));
    rank_ = static_cast<uint32_t>(rank);
    counter_ = what == "vectors"     ? &ExchangeCounters::vector_bytes
               : what == "gradients" ? &ExchangeCounters::gradient_bytes
                                     : &ExchangeCounters::other_bytes;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const size_t num_tables = dtypes_.size();
    const tf::Tensor& counts = ctx->input(static_cast<int>(num_tables));
    TF_RETURN_IF_ERROR(CheckCounts(counts, num_tables));
    const auto ranks = static_cast<uint32_t>(counts.dim_size(1));
    std::vector<WireTable> tables;
    std::vector<const void*> rows;
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& of_table = ctx->input(static_cast<int>(t));
      const int64_t dim = of_table.dims() == 2 ? of_table.dim_size(1) : 0;
      TF_RETURN_IF_ERROR(CheckWidth(dim, "rows"));
      tables.push_back(TableOf(t, dim));
      rows.push_back(of_table.data());
    }
    WireLayout layout;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(layout.Init(tables, Data<int64_t>(counts), ranks));
    for (size_t t = 0; t < num_tables; ++t) {
      const auto n = static_cast<int64_t>(layout.num_rows(t));
      TF_RETURN_IF_ERROR(CheckShape(ctx->input(static_cast<int>(t)), {n, tables[t].dim}, "rows"));
    }
    int32_t* words;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(layout.num_words())}, &words));
    std::vector<size_t> splits;
    for (uint32_t rank = 0; rank < ranks; ++rank) splits.push_back(layout.num_words(rank));
    TF_RETURN_IF_ERROR(OutputSplits(ctx, 1, splits));
    PoolExec exec = MakeExec(ctx);
    Pack(exec, layout, rows, words);
    CountBytes(layout);
    return absl::OkStatus();
  }

 private:
  void CountBytes(const WireLayout& layout) const {
    for (size_t t = 0; t < counters_.size(); ++t) {
      size_t words = 0;
      for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
        if (rank == rank_) continue;
        words += WireLayout::Words(layout.tables()[t], layout.segment(t, rank).rows);
      }
      Count(&(counters_[t]->*counter_), words * sizeof(int32_t));
    }
  }

  uint32_t rank_;
  std::atomic<int64_t> ExchangeCounters::*counter_;
  std::vector<ExchangeCounters*> counters_;
};

class UnpackRowsOp : public WireOp {
 public:
  explicit UnpackRowsOp(tf::OpKernelConstruction* ctx) : WireOp(ctx) {
    OP_REQUIRES_OK(ctx, GetInts(ctx, "dims", 1, int64_t{1} << 20, &dims_));
    OP_REQUIRES(ctx, dims_.size() == dtypes_.size(),
                absl::InvalidArgumentError("dims, dtypes: lengths differ"));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& words = ctx->input(0);
    const tf::Tensor& counts = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckCounts(counts, dims_.size()));
    std::vector<WireTable> tables;
    for (size_t t = 0; t < dims_.size(); ++t) tables.push_back(TableOf(t, dims_[t]));
    WireLayout layout;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        layout.Init(tables, Data<int64_t>(counts), static_cast<uint32_t>(counts.dim_size(1))));
    TF_RETURN_IF_ERROR(CheckShape(words, {static_cast<int64_t>(layout.num_words())}, "words"));
    std::vector<void*> rows(dims_.size());
    for (size_t t = 0; t < dims_.size(); ++t) {
      const auto n = static_cast<int64_t>(layout.num_rows(t));
      TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(t), {n, dims_[t]}, &rows[t]));
    }
    PoolExec exec = MakeExec(ctx);
    Unpack(exec, layout, Data<int32_t>(words), rows);
    return absl::OkStatus();
  }

 private:
  std::vector<int64_t> dims_;
};

class PoolRowsOp : public SparseOp {
 public:
  using SparseOp::SparseOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeExec(ctx);
    auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<GatherTask> tasks(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, exec, i, &(*bags)[i], &tasks[i]));
    }
    GatherPool(exec, tasks);
    return absl::OkStatus();
  }

 private:
  absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Bags* bags,
                        GatherTask* task) const {
    const auto input = [&](int list) -> const tf::Tensor& { return ctx->input(list * n_ + i); };
    const tf::Tensor& vectors = input(1);
    const tf::Tensor& index = input(2);
    TF_RETURN_IF_ERROR(CheckScalar(input(5), Named("num_bags", i).c_str()));
    const int64_t num_bags = input(5).scalar<int64_t>()();
    const int64_t dim = vectors.dims() == 2 ? vectors.dim_size(1) : 0;
    TF_RETURN_IF_ERROR(CheckWidth(dim, Named("vectors", i).c_str()));
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(3), num_bags, bags));
    task->vectors = vectors.data();
    task->n = static_cast<size_t>(vectors.dim_size(0));
    task->index = Data<uint32_t>(index);
    task->dtype = ToDType(dtypes_[i]);
    task->dim = dim;
    task->bags = bags;
    task->combiner = combiners_[i];
    DYNEMB_RETURN_IF_LIBRARY_ERROR(CheckIndex(exec, task->index, bags->nnz(), task->n));
    TF_RETURN_IF_ERROR(GetWeights(i, index, input(4), &task->weights));
    const int64_t argmax_bags = combiners_[i] == Combiner::kMax ? num_bags : 0;
    TF_RETURN_IF_ERROR(Output(ctx, i, {num_bags, dim}, &task->pooled));
    return Output(ctx, n_ + i, {argmax_bags, dim}, &task->argmax);
  }

  ScratchPool<std::vector<Bags>> bags_;
};

class PoolRowsGradOp : public SparseOp {
 public:
  explicit PoolRowsGradOp(tf::OpKernelConstruction* ctx) : SparseOp(ctx) {
    OP_REQUIRES_OK(ctx, GetInts(ctx, "dims", 1, int64_t{1} << 20, &dims_));
    OP_REQUIRES_OK(ctx,
                   GetInts(ctx, "tables", 0, static_cast<int64_t>(dims_.size()) - 1, &table_of_));
    OP_REQUIRES(ctx, static_cast<int>(table_of_.size()) == n_,
                absl::InvalidArgumentError(absl::StrCat("tables must have ", n_, " entries")));
  }

 protected:
  struct Scratch {
    std::vector<Bags> bags;
    GatherGradient gradient;
  };

  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(n_);
    std::vector<GatherGradient::Task> tasks(dims_.size());
    for (int i = 0; i < n_; ++i) {
      GatherGradient::Task& task = tasks[static_cast<size_t>(table_of_[i])];
      task.features.emplace_back();
      TF_RETURN_IF_ERROR(MakeFeature(ctx, exec, i, &scratch->bags[i], &task.features.back()));
    }
    for (size_t t = 0; t < dims_.size(); ++t) {
      const tf::Tensor& rows = ctx->input(5 * n_ + static_cast<int>(t));
      TF_RETURN_IF_ERROR(CheckScalar(rows, "num_rows"));
      const int64_t n = rows.scalar<int64_t>()();
      if (n < 0 || n > Bags::kMaxSize) {
        return absl::InvalidArgumentError(absl::StrCat("num_rows is ", n));
      }
      tasks[t].n = static_cast<size_t>(n);
      tasks[t].dim = dims_[t];
      TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(t), {n, dims_[t]}, &tasks[t].sums));
    }
    return ToAbsl(scratch->gradient.Run(exec, tasks));
  }

 private:
  absl::Status MakeFeature(tf::OpKernelContext* ctx, Exec& exec, int i, Bags* bags,
                           GatherGradient::Feature* feature) const {
    const auto input = [&](int list) -> const tf::Tensor& { return ctx->input(list * n_ + i); };
    const tf::Tensor& index = input(0);
    const tf::Tensor& grads = input(4);
    const int64_t num_bags = grads.dims() == 2 ? grads.dim_size(0) : 0;
    const int64_t dim = dims_[static_cast<size_t>(table_of_[i])];
    TF_RETURN_IF_ERROR(CheckShape(grads, {num_bags, dim}, Named("grads", i).c_str()));
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(1), num_bags, bags));
    TF_RETURN_IF_ERROR(GetWeights(i, index, input(2), &feature->weights));
    if (combiners_[i] == Combiner::kMax) {
      TF_RETURN_IF_ERROR(CheckShape(input(3), grads.shape(), Named("argmax", i).c_str()));
      feature->argmax = Data<int32_t>(input(3));
    }
    feature->index = Data<uint32_t>(index);
    feature->bags = bags;
    feature->combiner = combiners_[i];
    feature->dtype = ToDType(grads.dtype());
    feature->upstream = grads.data();
    feature->dim = dim;
    return absl::OkStatus();
  }

  std::vector<int64_t> dims_;
  std::vector<int64_t> table_of_;
  ScratchPool<Scratch> scratch_;
};

class PoolRowsWeightGradOp : public SparseOp {
 public:
  using SparseOp::SparseOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeExec(ctx);
    auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<GatherWeightTask> tasks(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, exec, i, &(*bags)[i], &tasks[i]));
    }
    GatherWeightGradient(exec, tasks);
    return absl::OkStatus();
  }

 private:
  absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Bags* bags,
                        GatherWeightTask* task) const {
    const auto input = [&](int list) -> const tf::Tensor& { return ctx->input(list * n_ + i); };
    const tf::Tensor& vectors = input(0);
    const tf::Tensor& index = input(1);
    const tf::Tensor& grads = input(6);
    const int64_t dim = vectors.dims() == 2 ? vectors.dim_size(1) : 0;
    TF_RETURN_IF_ERROR(CheckWidth(dim, Named("vectors", i).c_str()));
    const int64_t num_bags = grads.dims() == 2 ? grads.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(CheckShape(grads, {num_bags, dim}, Named("grads", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(5), {num_bags, dim}, Named("outputs", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(3), index.shape(), Named("weights", i).c_str()));
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(2), num_bags, bags));
    if (combiners_[i] == Combiner::kMax) {
      TF_RETURN_IF_ERROR(CheckShape(input(4), {num_bags, dim}, Named("argmax", i).c_str()));
    }
    task->vectors = vectors.data();
    task->index = Data<uint32_t>(index);
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        CheckIndex(exec, task->index, bags->nnz(), static_cast<size_t>(vectors.dim_size(0))));
    task->dtype = ToDType(dtypes_[i]);
    task->dim = dim;
    task->bags = bags;
    task->weights = Data<float>(input(3));
    task->combiner = combiners_[i];
    task->argmax = Data<int32_t>(input(4));
    task->pooled = input(5).data();
    task->upstream = grads.data();
    return Output(ctx, i, index.shape(), &task->gradient);
  }

  ScratchPool<std::vector<Bags>> bags_;
};

class OwnersOp : public DynembOp {
 public:
  explicit OwnersOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    int64_t ranks;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_ranks", &ranks));
    OP_REQUIRES(ctx, ranks <= int64_t{Owners::kMaxRanks},
                absl::InvalidArgumentError(absl::StrCat("num_ranks is ", ranks)));
    owners_.rule = Owners::Rule::kHash;
    owners_.ranks = static_cast<uint32_t>(ranks);
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    constexpr size_t kGrain = 65536;
    const tf::Tensor& keys = ctx->input(0);
    int32_t* ranks;
    TF_RETURN_IF_ERROR(Output(ctx, 0, keys.shape(), &ranks));
    PoolExec exec = MakeExec(ctx);
    const auto n = static_cast<size_t>(keys.NumElements());
    const auto fill = [&](const auto* bits) {
      exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) ranks[i] = static_cast<int32_t>(owners_.Of(bits[i]));
      });
    };
    if (keys.dtype() == tf::DT_INT32) {
      fill(Data<uint32_t>(keys));
    } else {
      fill(Data<uint64_t>(keys));
    }
    return absl::OkStatus();
  }

 private:
  Owners owners_;
};

class ExchangeStatsOp : public DynembOp {
 public:
  explicit ExchangeStatsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table", &name));
    counters_ = ExchangeCounters::Of(name);
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const std::vector<std::pair<const char*, const std::atomic<int64_t>*>> counters = {
        {"keys_asked_of_other_ranks", &counters_->keys},
        {"key_bytes_sent", &counters_->key_bytes},
        {"vector_bytes_sent", &counters_->vector_bytes},
        {"gradient_bytes_sent", &counters_->gradient_bytes},
        {"other_bytes_sent", &counters_->other_bytes},
    };
    const auto n = static_cast<int64_t>(counters.size());
    tf::Tensor* names;
    int64_t* values;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, {n}, &names));
    TF_RETURN_IF_ERROR(Output(ctx, 1, {n}, &values));
    for (size_t i = 0; i < counters.size(); ++i) {
      names->flat<tf::tstring>()(static_cast<int64_t>(i)) = counters[i].first;
      values[i] = counters[i].second->load(std::memory_order_relaxed);
    }
    return absl::OkStatus();
  }

 private:
  const ExchangeCounters* counters_;
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembRoute", RouteOp);
REGISTER("DynembReceiveKeys", ReceiveKeysOp);
REGISTER("DynembPackRows", PackRowsOp);
REGISTER("DynembUnpackRows", UnpackRowsOp);
REGISTER("DynembPoolRows", PoolRowsOp);
REGISTER("DynembPoolRowsGrad", PoolRowsGradOp);
REGISTER("DynembPoolRowsWeightGrad", PoolRowsWeightGradOp);
REGISTER("DynembOwners", OwnersOp);
REGISTER("DynembExchangeStats", ExchangeStatsOp);
#undef REGISTER

}  // namespace
}  // namespace dynemb
