// Kernels of received_ops.cc: unpack, call the library, pack.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/gather.h"
#include "cc/lookup/wire.h"
#include "cc/table/scratch.h"
#include "cc/tf/exchange_counters.h"
#include "cc/tf/sparse_op.h"
#include "cc/tf/table_resource.h"
#include "cc/tf/wire_side.h"

namespace dynemb {
namespace {

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
    for (int i = 0; i < n_; ++i) {
      OP_REQUIRES(
          ctx, side_.dtype(TableOf(i)) == dtypes_[i],
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
      TF_RETURN_IF_ERROR(side_.FindOwn(held, "held", sent, scratch->layout, t, &own[t]));
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
  explicit PoolRowsOp(tf::OpKernelConstruction* ctx) : ReceivedOp(ctx) {
    OP_REQUIRES_OK(ctx, HasLength(ctx, "T", side_.num_tables()));
    OP_REQUIRES_OK(ctx, HasLength(ctx, "Tkeys", side_.num_tables()));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeHostExec(ctx);
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
    scratch->rows.Shrink();
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
    OP_REQUIRES_OK(ctx, HasLength(ctx, "T", dims_.size()));
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
    std::vector<Buffer<float>> sums;  // of tables whose rows are converted to travel
  };

  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec exec = MakeHostExec(ctx);
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
    for (Buffer<float>& sums : scratch->sums) sums.Shrink();
    CountBytes(layout, &ExchangeCounters::gradient_bytes, counters_);
    return absl::OkStatus();
  }

 private:
  // Says where the sums of table t go. Returns them where they are still to be packed, else null.
  const void* PlacePieces(const WireLayout& layout, size_t t, int32_t* words, float* own,
                          Buffer<float>* sums, GatherGradient::Task* task) const {
    const bool as_they_are = WireLayout::AsTheyAre(layout.tables()[t]);
    const size_t floats = layout.num_rows(t) * static_cast<size_t>(dims_[t]);
    if (!as_they_are) sums->Resize(floats);
    for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
      const WireLayout::Segment& s = layout.segment(t, rank);
      float* const to = rank == side_.rank() ? own
                        : as_they_are        ? reinterpret_cast<float*>(words + s.word)
                                      : sums->get() + s.first_row * static_cast<size_t>(dims_[t]);
      task->pieces.push_back({s.rows, to});
    }
    return as_they_are ? nullptr : sums->get();
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
    PoolExec exec = MakeHostExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(n_);
    const int came = 1 + static_cast<int>(side_.num_tables()) + 6 * n_;
    TF_RETURN_IF_ERROR(FindRows(ctx, exec, 0, came, scratch.get()));
    std::vector<GatherWeightTask> tasks(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, exec, i, scratch.get(), &tasks[i]));
    }
    GatherWeightGradient(exec, tasks);
    scratch->rows.Shrink();
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
    OP_REQUIRES_OK(ctx, HasLength(ctx, "T", key_types_.size()));
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
    PoolExec exec = MakeHostExec(ctx);
    auto scratch = scratch_.Take();
    scratch->bags.resize(key_types_.size());
    std::vector<BackwardTask> tasks(key_types_.size());
    for (int t = 0; t < n; ++t) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, t, layout, scratch.get(), &tasks[static_cast<size_t>(t)]));
    }
    scratch->rows.Init(exec, layout, Data<int32_t>(words), own);
    for (size_t t = 0; t < tasks.size(); ++t) tasks[t].upstream_rows = scratch->rows.of(t);
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
    scratch->rows.Shrink();
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
    task->dim = dim;
    return absl::OkStatus();
  }

  WireSide side_;
  std::vector<KeyType> key_types_;
  ScratchPool<Scratch> scratch_;
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembPoolRows", PoolRowsOp);
REGISTER("DynembPoolRowsGrad", PoolRowsGradOp);
REGISTER("DynembPoolRowsWeightGrad", PoolRowsWeightGradOp);
REGISTER("DynembSumReceived", SumReceivedOp);
#undef REGISTER

}  // namespace
}  // namespace dynemb
