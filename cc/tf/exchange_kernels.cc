// Kernels of exchange_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/backward.h"
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
    OP_REQUIRES(ctx, rank < ranks,
                absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", ranks)));
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
      TF_RETURN_IF_ERROR(Output(ctx, 4 + static_cast<int>(i), keys.shape(), &ids.index));
      tasks[static_cast<size_t>(table_of_[i])].features.push_back(ids);
    }
    PoolExec exec = MakeExec(ctx);
    auto route = routes_.Take();
    DYNEMB_RETURN_IF_LIBRARY_ERROR(route->Prepare(exec, tasks, ranks_, rank_));
    int32_t* words;
    int32_t* own;
    int64_t* counts;
    TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(route->num_words())}, &words));
    TF_RETURN_IF_ERROR(Output(ctx, 2, {static_cast<int64_t>(route->num_own_words())}, &own));
    std::vector<size_t> splits;
    for (uint32_t rank = 0; rank < ranks_; ++rank) splits.push_back(route->num_words(rank));
    TF_RETURN_IF_ERROR(OutputSplits(ctx, 1, splits));
    TF_RETURN_IF_ERROR(
        Output(ctx, 3, {static_cast<int64_t>(num_tables), static_cast<int64_t>(ranks_)}, &counts));
    for (size_t t = 0; t < num_tables; ++t) {
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        const size_t keys = route->count(t, rank);
        counts[t * ranks_ + rank] = static_cast<int64_t>(keys);
        if (rank == rank_) continue;
        Count(&counters_[t]->keys, keys);
        Count(&counters_[t]->key_bytes, sizeof(int32_t) + keys * SizeOf(tasks[t].key_type));
      }
    }
    route->Write(exec, words, own);
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
    int64_t rank;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank));
    rank_ = static_cast<uint32_t>(rank);
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& words = ctx->input(0);
    const tf::Tensor& splits = ctx->input(1);
    const tf::Tensor& own = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckShape(words, {words.NumElements()}, "words"));
    TF_RETURN_IF_ERROR(CheckShape(splits, {splits.NumElements()}, "splits"));
    TF_RETURN_IF_ERROR(CheckShape(own, {own.NumElements()}, "own"));
    const int64_t ranks = splits.NumElements();
    if (rank_ >= ranks) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank_, " of ", ranks));
    }
    const auto num_tables = static_cast<int64_t>(key_types_.size());
    Requests::Received received;
    received.words = Data<int32_t>(words);
    received.num_words = words.NumElements();
    received.splits = Data<int32_t>(splits);
    received.ranks = static_cast<uint32_t>(ranks);
    received.self = rank_;
    received.own = Data<int32_t>(own);
    received.num_own_words = own.NumElements();
    Requests requests;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(requests.Init(received, key_types_));
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
  uint32_t rank_;
};

// What operators with rows on the wire have in common: the types of the tables' rows, how they
// travel, and which of the ranks is this one.
class WireSide {
 public:
  // Attributes: wire, rank, and a list of dtypes.
  absl::Status Init(tf::OpKernelConstruction* ctx, const std::vector<tf::DataType>& dtypes) {
    std::vector<std::string> wires;
    int64_t rank;
    TF_RETURN_IF_ERROR(ctx->GetAttr("wire", &wires));
    TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &rank));
    rank_ = static_cast<uint32_t>(rank);
    dtypes_ = dtypes;
    if (wires.size() != dtypes.size()) {
      return absl::InvalidArgumentError("wire and the types of rows: lengths differ");
    }
    for (size_t t = 0; t < dtypes.size(); ++t) {
      WireType wire;
      TF_RETURN_IF_ERROR(ToAbsl(ParseWireType(wires[t], &wire)));
      // As bits, int32 is float32.
      if (dtypes[t] == tf::DT_INT32 && wire != WireType::kSame) {
        return absl::InvalidArgumentError(absl::StrCat("int32 cannot travel as ", wires[t]));
      }
      wires_.push_back(wire);
    }
    return absl::OkStatus();
  }
  absl::Status Init(tf::OpKernelConstruction* ctx, const char* dtypes_attr) {
    std::vector<tf::DataType> dtypes;
    TF_RETURN_IF_ERROR(ctx->GetAttr(dtypes_attr, &dtypes));
    return Init(ctx, dtypes);
  }

  size_t num_tables() const { return dtypes_.size(); }
  uint32_t rank() const { return rank_; }

  // Of rows of these widths, of which counts [tables, ranks] travel.
  absl::Status MakeLayout(const tf::Tensor& counts, const std::vector<int64_t>& dims,
                          WireLayout* layout) const {
    const auto tables = static_cast<int64_t>(num_tables());
    const int64_t ranks = counts.dims() == 2 ? counts.dim_size(1) : 0;
    TF_RETURN_IF_ERROR(CheckShape(counts, {tables, ranks}, "counts"));
    if (rank_ >= ranks || ranks > int64_t{Owners::kMaxRanks}) {
      return absl::InvalidArgumentError(
          absl::StrCat("counts of ", ranks, " ranks, on rank ", rank_));
    }
    std::vector<WireTable> of_tables(num_tables());
    for (size_t t = 0; t < num_tables(); ++t) {
      of_tables[t].dtype = ToDType(dtypes_[t]);
      of_tables[t].dim = dims[t];
      of_tables[t].wire = wires_[t];
    }
    return ToAbsl(
        layout->Init(of_tables, Data<int64_t>(counts), static_cast<uint32_t>(ranks), rank_));
  }

  // Finds the rows of this rank for itself among `rows`: all that it sends of table t, in the order
  // of the ranks, with the counts `sent`.
  absl::Status FindOwn(const tf::Tensor& rows, const tf::Tensor& sent, const WireLayout& layout,
                       size_t t, const void** own) const {
    const int64_t* const counts = Data<int64_t>(sent) + t * layout.ranks();
    const WireTable& table = layout.tables()[t];
    int64_t n = 0, before = 0;
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      if (counts[rank] < 0 || counts[rank] > Bags::kMaxSize) {
        return absl::InvalidArgumentError(absl::StrCat("sent holds ", counts[rank]));
      }
      if (rank == rank_) before = n;
      n += counts[rank];
    }
    TF_RETURN_IF_ERROR(CheckShape(rows, {n, table.dim}, "own"));
    if (static_cast<size_t>(counts[rank_]) != layout.segment(t, rank_).rows) {
      return absl::InvalidArgumentError(absl::StrCat("this rank sends itself ", counts[rank_],
                                                     " rows of table ", t, ", but receives ",
                                                     layout.segment(t, rank_).rows));
    }
    const size_t row_bytes = static_cast<size_t>(table.dim) * SizeOf(table.dtype);
    *own = static_cast<const char*>(rows.data()) + static_cast<size_t>(before) * row_bytes;
    return absl::OkStatus();
  }

 private:
  std::vector<tf::DataType> dtypes_;
  std::vector<WireType> wires_;
  uint32_t rank_ = 0;
};

absl::Status OutputWords(tf::OpKernelContext* ctx, const WireLayout& layout, int32_t** words) {
  TF_RETURN_IF_ERROR(Output(ctx, 0, {static_cast<int64_t>(layout.num_words())}, words));
  std::vector<size_t> splits;
  for (uint32_t rank = 0; rank < layout.ranks(); ++rank) splits.push_back(layout.num_words(rank));
  return OutputSplits(ctx, 1, splits);
}

// Adds to the counters of each table the bytes that leave this rank.
void CountBytes(const WireLayout& layout, std::atomic<int64_t> ExchangeCounters::*counter,
                const std::vector<ExchangeCounters*>& counters) {
  for (size_t t = 0; t < counters.size(); ++t) {
    size_t words = 0;
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      if (rank == layout.self()) continue;
      words += WireLayout::Words(layout.tables()[t], layout.segment(t, rank).rows);
    }
    Count(&(counters[t]->*counter), words * sizeof(int32_t));
  }
}

// The width of rows, a matrix.
absl::Status WidthOf(const tf::Tensor& rows, const char* name, int64_t* dim) {
  *dim = rows.dims() == 2 ? rows.dim_size(1) : 0;
  return CheckWidth(*dim, name);
}

class PackRowsOp : public DynembOp {
 public:
  explicit PackRowsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::string what;
    OP_REQUIRES_OK(ctx, side_.Init(ctx, "dtypes"));
    OP_REQUIRES_OK(ctx, GetCounters(ctx, &counters_));
    OP_REQUIRES(ctx, counters_.size() == side_.num_tables(),
                absl::InvalidArgumentError("names, dtypes: lengths differ"));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("what", &what));
    counter_ = what == "vectors"     ? &ExchangeCounters::vector_bytes
               : what == "gradients" ? &ExchangeCounters::gradient_bytes
                                     : &ExchangeCounters::other_bytes;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const size_t num_tables = side_.num_tables();
    std::vector<int64_t> dims(num_tables);
    std::vector<const void*> rows;
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& of_table = ctx->input(static_cast<int>(t));
      TF_RETURN_IF_ERROR(WidthOf(of_table, "rows", &dims[t]));
      rows.push_back(of_table.data());
    }
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(ctx->input(static_cast<int>(num_tables)), dims, &layout));
    for (size_t t = 0; t < num_tables; ++t) {
      const auto n = static_cast<int64_t>(layout.num_rows(t));
      TF_RETURN_IF_ERROR(CheckShape(ctx->input(static_cast<int>(t)), {n, dims[t]}, "rows"));
      // Not to be taken for a table that is left out.
      if (rows[t] == nullptr) rows[t] = &layout;
    }
    int32_t* words;
    TF_RETURN_IF_ERROR(OutputWords(ctx, layout, &words));
    PoolExec exec = MakeExec(ctx);
    Pack(exec, layout, rows, words);
    CountBytes(layout, counter_, counters_);
    return absl::OkStatus();
  }

 private:
  WireSide side_;
  std::atomic<int64_t> ExchangeCounters::*counter_;
  std::vector<ExchangeCounters*> counters_;
};

class UnpackRowsOp : public DynembOp {
 public:
  explicit UnpackRowsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, side_.Init(ctx, "dtypes"));
    OP_REQUIRES_OK(ctx, GetInts(ctx, "dims", 1, int64_t{1} << 20, &dims_));
    OP_REQUIRES(ctx, dims_.size() == side_.num_tables(),
                absl::InvalidArgumentError("dims, dtypes: lengths differ"));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& words = ctx->input(0);
    const tf::Tensor& counts = ctx->input(1);
    const size_t num_tables = side_.num_tables();
    const tf::Tensor& sent = ctx->input(2 + static_cast<int>(num_tables));
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(counts, dims_, &layout));
    TF_RETURN_IF_ERROR(CheckShape(sent, counts.shape(), "sent"));
    TF_RETURN_IF_ERROR(CheckShape(words, {static_cast<int64_t>(layout.num_words())}, "words"));
    std::vector<const void*> own(num_tables);
    std::vector<void*> rows(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& packed = ctx->input(2 + static_cast<int>(t));
      TF_RETURN_IF_ERROR(side_.FindOwn(packed, sent, layout, t, &own[t]));
      const auto n = static_cast<int64_t>(layout.num_rows(t));
      TF_RETURN_IF_ERROR(Output(ctx, static_cast<int>(t), {n, dims_[t]}, &rows[t]));
    }
    PoolExec exec = MakeExec(ctx);
    Unpack(exec, layout, Data<int32_t>(words), own, rows);
    return absl::OkStatus();
  }

 private:
  WireSide side_;
  std::vector<int64_t> dims_;
};

// Operators that pool received rows, or have pooled them: which table each feature reads, and
// where its rows are.
class ReceivedOp : public SparseOp {
 public:
  explicit ReceivedOp(tf::OpKernelConstruction* ctx) : SparseOp(ctx) {
    OP_REQUIRES_OK(ctx, side_.Init(ctx, "row_dtypes"));
    OP_REQUIRES_OK(
        ctx, GetInts(ctx, "tables", 0, static_cast<int64_t>(side_.num_tables()) - 1, &table_of_));
    OP_REQUIRES(ctx, static_cast<int>(table_of_.size()) == n_,
                absl::InvalidArgumentError(absl::StrCat("tables must have ", n_, " entries")));
    std::vector<tf::DataType> row_dtypes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_dtypes", &row_dtypes));
    for (int i = 0; i < n_; ++i) {
      OP_REQUIRES(
          ctx, row_dtypes[static_cast<size_t>(table_of_[i])] == dtypes_[i],
          absl::InvalidArgumentError(absl::StrCat(Named("dtypes", i), " is not that of the rows")));
    }
  }

 protected:
  struct Scratch {
    std::vector<Bags> bags;
    WireRows rows;
    WireLayout layout;
  };

  // From the inputs words (the `first`), held (one for each table), and came, sent (at `counts`).
  absl::Status FindRows(tf::OpKernelContext* ctx, Exec& exec, int first, int counts,
                        Scratch* scratch) const {
    const tf::Tensor& words = ctx->input(first);
    const tf::Tensor& came = ctx->input(counts);
    const tf::Tensor& sent = ctx->input(counts + 1);
    const size_t num_tables = side_.num_tables();
    std::vector<int64_t> dims(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& held = ctx->input(first + 1 + static_cast<int>(t));
      TF_RETURN_IF_ERROR(WidthOf(held, "held", &dims[t]));
    }
    TF_RETURN_IF_ERROR(side_.MakeLayout(came, dims, &scratch->layout));
    TF_RETURN_IF_ERROR(CheckShape(sent, came.shape(), "sent"));
    TF_RETURN_IF_ERROR(
        CheckShape(words, {static_cast<int64_t>(scratch->layout.num_words())}, "words"));
    std::vector<const void*> own(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& held = ctx->input(first + 1 + static_cast<int>(t));
      TF_RETURN_IF_ERROR(side_.FindOwn(held, sent, scratch->layout, t, &own[t]));
    }
    scratch->rows.Init(exec, scratch->layout, Data<int32_t>(words), own);
    return absl::OkStatus();
  }

  size_t TableOf(int i) const { return static_cast<size_t>(table_of_[static_cast<size_t>(i)]); }

  WireSide side_;
  std::vector<int64_t> table_of_;
  ScratchPool<Scratch> scratch_;
};

class PoolRowsOp : public ReceivedOp {
 public:
  using ReceivedOp::ReceivedOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(n_);
    const int num_tables = static_cast<int>(side_.num_tables());
    const int came = 5 * n_ + 1 + 3 * num_tables;
    TF_RETURN_IF_ERROR(FindRows(ctx, exec, n_, came, scratch.get()));
    std::vector<GatherTask> tasks(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, exec, i, scratch.get(), &tasks[i]));
    }
    GatherPool(exec, tasks);
    return absl::OkStatus();
  }

 private:
  absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Scratch* scratch,
                        GatherTask* task) const {
    const int first = n_ + 1 + static_cast<int>(side_.num_tables());
    const auto input = [&](int list) -> const tf::Tensor& {
      return ctx->input(first + list * n_ + i);
    };
    const tf::Tensor& index = input(0);
    TF_RETURN_IF_ERROR(CheckScalar(input(3), Named("num_bags", i).c_str()));
    const int64_t num_bags = input(3).scalar<int64_t>()();
    Bags* const bags = &scratch->bags[static_cast<size_t>(i)];
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(1), num_bags, bags));
    const size_t table = TableOf(i);
    const int64_t dim = scratch->layout.tables()[table].dim;
    task->rows = scratch->rows.of(table);
    task->n = scratch->layout.num_rows(table);
    task->index = Data<uint32_t>(index);
    task->dtype = ToDType(dtypes_[i]);
    task->dim = dim;
    task->bags = bags;
    task->combiner = combiners_[i];
    DYNEMB_RETURN_IF_LIBRARY_ERROR(CheckIndex(exec, task->index, bags->nnz(), task->n));
    TF_RETURN_IF_ERROR(GetWeights(i, index, input(2), &task->weights));
    const int64_t argmax_bags = combiners_[i] == Combiner::kMax ? num_bags : 0;
    TF_RETURN_IF_ERROR(Output(ctx, i, {num_bags, dim}, &task->pooled));
    return Output(ctx, n_ + i, {argmax_bags, dim}, &task->argmax);
  }
};

class PoolRowsGradOp : public SparseOp {
 public:
  explicit PoolRowsGradOp(tf::OpKernelConstruction* ctx) : SparseOp(ctx) {
    OP_REQUIRES_OK(ctx, GetInts(ctx, "dims", 1, int64_t{1} << 20, &dims_));
    OP_REQUIRES_OK(ctx, side_.Init(ctx, std::vector<tf::DataType>(dims_.size(), tf::DT_FLOAT)));
    OP_REQUIRES_OK(ctx, GetCounters(ctx, &counters_));
    OP_REQUIRES(ctx, counters_.size() == dims_.size(),
                absl::InvalidArgumentError("names, dims: lengths differ"));
    OP_REQUIRES_OK(ctx,
                   GetInts(ctx, "tables", 0, static_cast<int64_t>(dims_.size()) - 1, &table_of_));
    OP_REQUIRES(ctx, static_cast<int>(table_of_.size()) == n_,
                absl::InvalidArgumentError(absl::StrCat("tables must have ", n_, " entries")));
  }

 protected:
  struct Scratch {
    std::vector<Bags> bags;
    GatherGradient gradient;
    std::vector<std::vector<float>> sums;  // of tables whose rows are converted to travel
  };

  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(n_);
    scratch->sums.resize(dims_.size());
    std::vector<GatherGradient::Task> tasks(dims_.size());
    for (int i = 0; i < n_; ++i) {
      GatherGradient::Task& task = tasks[static_cast<size_t>(table_of_[i])];
      task.features.emplace_back();
      TF_RETURN_IF_ERROR(MakeFeature(ctx, exec, i, &scratch->bags[i], &task.features.back()));
    }
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(ctx->input(5 * n_), dims_, &layout));
    int32_t* words;
    TF_RETURN_IF_ERROR(OutputWords(ctx, layout, &words));
    std::vector<const void*> to_pack(dims_.size(), nullptr);
    for (size_t t = 0; t < dims_.size(); ++t) {
      const auto own_rows = static_cast<int64_t>(layout.segment(t, side_.rank()).rows);
      float* own;
      TF_RETURN_IF_ERROR(Output(ctx, 2 + static_cast<int>(t), {own_rows, dims_[t]}, &own));
      tasks[t].n = layout.num_rows(t);
      tasks[t].dim = dims_[t];
      to_pack[t] = PlacePieces(layout, t, words, own, &scratch->sums[t], &tasks[t]);
    }
    DYNEMB_RETURN_IF_LIBRARY_ERROR(scratch->gradient.Run(exec, tasks));
    Pack(exec, layout, to_pack, words);
    CountBytes(layout, &ExchangeCounters::gradient_bytes, counters_);
    return absl::OkStatus();
  }

 private:
  // Says where the sums of table t go. Returns them where they are still to be packed, else null.
  const void* PlacePieces(const WireLayout& layout, size_t t, int32_t* words, float* own,
                          std::vector<float>* sums, GatherGradient::Task* task) const {
    const bool as_they_are = WireLayout::AsTheyAre(layout.tables()[t]);
    const size_t floats = layout.num_rows(t) * static_cast<size_t>(dims_[t]);
    if (!as_they_are && sums->size() < floats) sums->resize(floats);
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      const WireLayout::Segment& s = layout.segment(t, rank);
      float* const to = rank == side_.rank() ? own
                        : as_they_are        ? reinterpret_cast<float*>(words + s.word)
                                      : sums->data() + s.first_row * static_cast<size_t>(dims_[t]);
      task->pieces.push_back({s.rows, to});
    }
    return as_they_are ? nullptr : sums->data();
  }

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

  WireSide side_;
  std::vector<ExchangeCounters*> counters_;
  std::vector<int64_t> dims_;
  std::vector<int64_t> table_of_;
  ScratchPool<Scratch> scratch_;
};

class PoolRowsWeightGradOp : public ReceivedOp {
 public:
  using ReceivedOp::ReceivedOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(n_);
    const int came = 1 + static_cast<int>(side_.num_tables()) + 6 * n_;
    TF_RETURN_IF_ERROR(FindRows(ctx, exec, 0, came, scratch.get()));
    std::vector<GatherWeightTask> tasks(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, exec, i, scratch.get(), &tasks[i]));
    }
    GatherWeightGradient(exec, tasks);
    return absl::OkStatus();
  }

 private:
  absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Scratch* scratch,
                        GatherWeightTask* task) const {
    const int first = 1 + static_cast<int>(side_.num_tables());
    const auto input = [&](int list) -> const tf::Tensor& {
      return ctx->input(first + list * n_ + i);
    };
    const tf::Tensor& index = input(0);
    const tf::Tensor& grads = input(5);
    const size_t table = TableOf(i);
    const int64_t dim = scratch->layout.tables()[table].dim;
    const int64_t num_bags = grads.dims() == 2 ? grads.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(CheckShape(grads, {num_bags, dim}, Named("grads", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(4), {num_bags, dim}, Named("outputs", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(2), index.shape(), Named("weights", i).c_str()));
    Bags* const bags = &scratch->bags[static_cast<size_t>(i)];
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(1), num_bags, bags));
    if (combiners_[i] == Combiner::kMax) {
      TF_RETURN_IF_ERROR(CheckShape(input(3), {num_bags, dim}, Named("argmax", i).c_str()));
    }
    task->rows = scratch->rows.of(table);
    task->index = Data<uint32_t>(index);
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        CheckIndex(exec, task->index, bags->nnz(), scratch->layout.num_rows(table)));
    task->dtype = ToDType(dtypes_[i]);
    task->dim = dim;
    task->bags = bags;
    task->weights = Data<float>(input(2));
    task->combiner = combiners_[i];
    task->argmax = Data<int32_t>(input(3));
    task->pooled = input(4).data();
    task->upstream = grads.data();
    return Output(ctx, i, index.shape(), &task->gradient);
  }
};

class SumReceivedOp : public DynembOp {
 public:
  explicit SumReceivedOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::vector<tf::DataType> key_types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tkeys", &key_types));
    for (tf::DataType type : key_types) key_types_.push_back(ToKeyType(type));
    OP_REQUIRES_OK(ctx, side_.Init(ctx, std::vector<tf::DataType>(key_types.size(), tf::DT_FLOAT)));
  }

 protected:
  struct Scratch {
    std::vector<Bags> bags;
    WireRows rows;
    Backward backward;
  };

  absl::Status Run(tf::OpKernelContext* ctx) override {
    const int n = static_cast<int>(key_types_.size());
    const tf::Tensor& words = ctx->input(2 * n);
    std::vector<int64_t> dims(key_types_.size());
    std::vector<const void*> own(key_types_.size());
    for (int t = 0; t < n; ++t) {
      const tf::Tensor& rows = ctx->input(2 * n + 1 + t);
      TF_RETURN_IF_ERROR(WidthOf(rows, "own", &dims[static_cast<size_t>(t)]));
      own[static_cast<size_t>(t)] = rows.data();
    }
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(ctx->input(3 * n + 1), dims, &layout));
    TF_RETURN_IF_ERROR(CheckShape(words, {static_cast<int64_t>(layout.num_words())}, "words"));
    PoolExec exec = MakeExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(key_types_.size());
    scratch->rows.Init(exec, layout, Data<int32_t>(words), own);
    std::vector<BackwardTask> tasks(key_types_.size());
    for (int t = 0; t < n; ++t) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, t, layout, scratch.get(), &tasks[static_cast<size_t>(t)]));
    }
    DYNEMB_RETURN_IF_LIBRARY_ERROR(scratch->backward.Prepare(exec, tasks.data(), tasks.size()));
    std::vector<BackwardOutput> outputs(tasks.size());
    for (int t = 0; t < n; ++t) {
      const auto table = static_cast<size_t>(t);
      const auto unique = static_cast<int64_t>(scratch->backward.num_unique(table));
      const bool has_rows = tasks[table].rows != nullptr;
      TF_RETURN_IF_ERROR(Output(ctx, t, {unique}, &outputs[table].keys));
      TF_RETURN_IF_ERROR(Output(ctx, n + t, {unique, dims[table]}, &outputs[table].sums));
      TF_RETURN_IF_ERROR(Output(ctx, 2 * n + t, {has_rows ? unique : 0}, &outputs[table].rows));
    }
    scratch->backward.Write(exec, outputs.data());
    return absl::OkStatus();
  }

 private:
  absl::Status MakeTask(tf::OpKernelContext* ctx, int t, const WireLayout& layout, Scratch* scratch,
                        BackwardTask* task) const {
    const int n = static_cast<int>(key_types_.size());
    const auto table = static_cast<size_t>(t);
    const tf::Tensor& keys = ctx->input(t);
    const tf::Tensor& rows = ctx->input(n + t);
    const auto count = static_cast<int64_t>(layout.num_rows(table));
    const int64_t dim = layout.tables()[table].dim;
    const auto own_rows = static_cast<int64_t>(layout.segment(table, side_.rank()).rows);
    TF_RETURN_IF_ERROR(CheckShape(keys, {count}, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(ctx->input(2 * n + 1 + t), {own_rows, dim}, "own"));
    if (rows.NumElements() > 0) {
      TF_RETURN_IF_ERROR(CheckShape(rows, {count}, "rows"));
      task->rows = Data<RowId>(rows);
    }
    Bags* const bags = &scratch->bags[table];
    DYNEMB_RETURN_IF_LIBRARY_ERROR(bags->InitUniform(1, count, count));
    task->key_type = key_types_[table];
    task->keys = keys.data();
    task->bags = bags;
    task->upstream_rows = scratch->rows.of(table);
    task->dim = dim;
    return absl::OkStatus();
  }

  WireSide side_;
  std::vector<KeyType> key_types_;
  ScratchPool<Scratch> scratch_;
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
REGISTER("DynembSumReceived", SumReceivedOp);
REGISTER("DynembOwners", OwnersOp);
REGISTER("DynembExchangeStats", ExchangeStatsOp);
#undef REGISTER

}  // namespace
}  // namespace dynemb
