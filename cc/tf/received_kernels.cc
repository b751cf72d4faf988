// Kernels of received_ops.cc: unpack, call the library, pack.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/exchange.h"
#include "cc/table/scratch.h"
#include "cc/tf/exchange_counters.h"
#include "cc/tf/sparse_op.h"
#include "cc/tf/table_resource.h"
#include "cc/tf/wire_side.h"

namespace dynemb {
namespace {

// The base of DynembPoolRows and its weight gradient: the table that each feature reads, and the
// addresses of the received rows.
class ReceivedOp : public SparseOp {
 public:
  explicit ReceivedOp(tf::OpKernelConstruction* ctx) : SparseOp(ctx) {
    OP_REQUIRES_OK(ctx, side_.Init(ctx, "row_dtypes"));
    OP_REQUIRES_OK(
        ctx, GetInts(ctx, "tables", 0, static_cast<int64_t>(side_.num_tables()) - 1, &table_of_));
    OP_REQUIRES(ctx, static_cast<int>(table_of_.size()) == n_,
                absl::InvalidArgumentError(absl::StrCat("tables must have ", n_, " entries")));
    for (int i = 0; i < n_; ++i) {
      OP_REQUIRES(ctx, side_.dtype(TableOf(i)) == dtypes_[i],
                  absl::InvalidArgumentError(
                      absl::StrCat(Named("dtypes", i), " differs from the dtype of the rows")));
    }
  }

 protected:
  // Finds the received rows. The inputs are words (at `first`), held (one per table, after words),
  // and received and sent (at `counts`).
  absl::Status FindRows(tf::OpKernelContext* ctx, int first, int counts, WireLayout* layout,
                        Exchange::Received* received) const {
    const tf::Tensor& words = ctx->input(first);
    const tf::Tensor& received_counts = ctx->input(counts);
    const tf::Tensor& sent = ctx->input(counts + 1);
    const size_t num_tables = side_.num_tables();
    std::vector<int64_t> dims(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& held = ctx->input(first + 1 + static_cast<int>(t));
      TF_RETURN_IF_ERROR(WidthOf(held, "held", &dims[t]));
    }
    TF_RETURN_IF_ERROR(side_.MakeLayout(received_counts, dims, layout));
    TF_RETURN_IF_ERROR(CheckShape(sent, received_counts.shape(), "sent"));
    TF_RETURN_IF_ERROR(CheckShape(words, {static_cast<int64_t>(layout->num_words())}, "words"));
    received->layout = layout;
    received->words = Data<int32_t>(words);
    received->own.resize(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const tf::Tensor& held = ctx->input(first + 1 + static_cast<int>(t));
      TF_RETURN_IF_ERROR(side_.FindOwn(held, "held", sent, *layout, t, &received->own[t]));
    }
    return absl::OkStatus();
  }

  size_t TableOf(int i) const { return static_cast<size_t>(table_of_[static_cast<size_t>(i)]); }

  WireSide side_;
  std::vector<int64_t> table_of_;
  ScratchPool<std::vector<Bags>> bags_;
};

class PoolRowsOp : public ReceivedOp {
 public:
  explicit PoolRowsOp(tf::OpKernelConstruction* ctx) : ReceivedOp(ctx) {
    OP_REQUIRES_OK(ctx, HasLength(ctx, "T", side_.num_tables()));
    OP_REQUIRES_OK(ctx, HasLength(ctx, "Tkeys", side_.num_tables()));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const int num_tables = static_cast<int>(side_.num_tables());
    const int counts = 5 * n_ + 1 + 3 * num_tables;
    WireLayout layout;
    Exchange::Received received;
    TF_RETURN_IF_ERROR(FindRows(ctx, n_, counts, &layout, &received));
    PoolExec host = MakeHostExec(ctx);
    const auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<Exchange::PoolFeature> features(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeFeature(ctx, host, i, layout, &(*bags)[i], &features[i]));
    }
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return ToAbsl(exchange->PoolReceived(*exec, received, std::move(features)));
  }

 private:
  absl::Status MakeFeature(tf::OpKernelContext* ctx, Exec& exec, int i, const WireLayout& layout,
                           Bags* bags, Exchange::PoolFeature* feature) const {
    const int first = n_ + 1 + static_cast<int>(side_.num_tables());
    const auto input = [&](int list) -> const tf::Tensor& {
      return ctx->input(first + list * n_ + i);
    };
    const tf::Tensor& index = input(0);
    TF_RETURN_IF_ERROR(CheckScalar(input(3), Named("num_bags", i).c_str()));
    const int64_t num_bags = input(3).scalar<int64_t>()();
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(1), num_bags, bags));
    TF_RETURN_IF_ERROR(GetWeights(i, index, input(2), &feature->weights));
    feature->table = TableOf(i);
    feature->index = Data<uint32_t>(index);
    feature->bags = bags;
    feature->combiner = combiners_[i];
    const int64_t dim = layout.tables()[feature->table].dim;
    const int64_t argmax_bags = combiners_[i] == Combiner::kMax ? num_bags : 0;
    TF_RETURN_IF_ERROR(Output(ctx, i, {num_bags, dim}, &feature->pooled));
    return Output(ctx, n_ + i, {argmax_bags, dim}, &feature->argmax);
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
  absl::Status Run(tf::OpKernelContext* ctx) override {
    PoolExec host = MakeHostExec(ctx);
    const auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<GatherGradient::Task> tasks(dims_.size());
    for (int i = 0; i < n_; ++i) {
      GatherGradient::Task& task = tasks[static_cast<size_t>(table_of_[i])];
      task.features.emplace_back();
      TF_RETURN_IF_ERROR(MakeFeature(ctx, host, i, &(*bags)[i], &task.features.back()));
    }
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(ctx->input(5 * n_), dims_, &layout));
    int32_t* words;
    TF_RETURN_IF_ERROR(OutputWords(ctx, layout, &words));
    std::vector<float*> own(dims_.size());
    for (size_t t = 0; t < dims_.size(); ++t) {
      const auto own_rows = static_cast<int64_t>(layout.section(t, side_.rank()).rows);
      TF_RETURN_IF_ERROR(Output(ctx, 2 + static_cast<int>(t), {own_rows, dims_[t]}, &own[t]));
    }
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    DYNEMB_RETURN_IF_LIBRARY_ERROR(
        exchange->SumRequested(*exec, layout, std::move(tasks), words, own));
    CountBytes(layout, &ExchangeCounters::gradient_bytes, counters_);
    return absl::OkStatus();
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

  WireSide side_;
  std::vector<ExchangeCounters*> counters_;
  std::vector<int64_t> dims_;
  std::vector<int64_t> table_of_;
  ScratchPool<std::vector<Bags>> bags_;
};

class PoolRowsWeightGradOp : public ReceivedOp {
 public:
  using ReceivedOp::ReceivedOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const int counts = 1 + static_cast<int>(side_.num_tables()) + 6 * n_;
    WireLayout layout;
    Exchange::Received received;
    TF_RETURN_IF_ERROR(FindRows(ctx, 0, counts, &layout, &received));
    PoolExec host = MakeHostExec(ctx);
    const auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<Exchange::WeightFeature> features(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeFeature(ctx, host, i, layout, &(*bags)[i], &features[i]));
    }
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return ToAbsl(exchange->WeightGradient(*exec, received, std::move(features)));
  }

 private:
  absl::Status MakeFeature(tf::OpKernelContext* ctx, Exec& exec, int i, const WireLayout& layout,
                           Bags* bags, Exchange::WeightFeature* feature) const {
    const int first = 1 + static_cast<int>(side_.num_tables());
    const auto input = [&](int list) -> const tf::Tensor& {
      return ctx->input(first + list * n_ + i);
    };
    const tf::Tensor& index = input(0);
    const tf::Tensor& grads = input(5);
    feature->table = TableOf(i);
    const int64_t dim = layout.tables()[feature->table].dim;
    const int64_t num_bags = grads.dims() == 2 ? grads.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(CheckShape(grads, {num_bags, dim}, Named("grads", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(4), {num_bags, dim}, Named("outputs", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(2), index.shape(), Named("weights", i).c_str()));
    TF_RETURN_IF_ERROR(MakeBags(exec, i, index, input(1), num_bags, bags));
    if (combiners_[i] == Combiner::kMax) {
      TF_RETURN_IF_ERROR(CheckShape(input(3), {num_bags, dim}, Named("argmax", i).c_str()));
    }
    feature->index = Data<uint32_t>(index);
    feature->bags = bags;
    feature->weights = Data<float>(input(2));
    feature->combiner = combiners_[i];
    feature->argmax = Data<int32_t>(input(3));
    feature->pooled = input(4).data();
    feature->upstream = grads.data();
    return Output(ctx, i, index.shape(), &feature->gradient);
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
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const int n = static_cast<int>(key_types_.size());
    const tf::Tensor& words = ctx->input(2 * n);
    std::vector<int64_t> dims(key_types_.size());
    Exchange::Received received;
    for (int t = 0; t < n; ++t) {
      const tf::Tensor& rows = ctx->input(2 * n + 1 + t);
      TF_RETURN_IF_ERROR(WidthOf(rows, "own", &dims[static_cast<size_t>(t)]));
      received.own.push_back(rows.data());
    }
    WireLayout layout;
    TF_RETURN_IF_ERROR(side_.MakeLayout(ctx->input(3 * n + 1), dims, &layout));
    TF_RETURN_IF_ERROR(CheckShape(words, {static_cast<int64_t>(layout.num_words())}, "words"));
    received.layout = &layout;
    received.words = Data<int32_t>(words);
    const auto bags = bags_.Take();
    bags->resize(key_types_.size());
    std::vector<BackwardTask> tasks(key_types_.size());
    std::vector<bool> has_rows;
    for (size_t t = 0; t < tasks.size(); ++t) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, static_cast<int>(t), layout, &(*bags)[t], &tasks[t]));
      has_rows.push_back(tasks[t].rows != nullptr);
    }
    Exchange* exchange;
    TF_RETURN_IF_ERROR(GetExchange(ctx, &exchange));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    Placing placing;
    return placing.Result(
        exchange->SumReceived(*exec, received, std::move(tasks),
                              [&](size_t t, size_t num_unique, BackwardOutput* output) {
                                const auto unique = static_cast<int64_t>(num_unique);
                                return placing.Keep(Place(ctx, static_cast<int>(t), unique, dims[t],
                                                          has_rows[t] ? unique : 0, output));
                              }));
  }

 private:
  absl::Status Place(tf::OpKernelContext* ctx, int t, int64_t unique, int64_t dim, int64_t rows,
                     BackwardOutput* output) const {
    const int n = static_cast<int>(key_types_.size());
    TF_RETURN_IF_ERROR(Output(ctx, t, {unique}, &output->keys));
    TF_RETURN_IF_ERROR(Output(ctx, n + t, {unique, dim}, &output->sums));
    return Output(ctx, 2 * n + t, {rows}, &output->rows);
  }

  absl::Status MakeTask(tf::OpKernelContext* ctx, int t, const WireLayout& layout, Bags* bags,
                        BackwardTask* task) const {
    const int n = static_cast<int>(key_types_.size());
    const auto table = static_cast<size_t>(t);
    const tf::Tensor& keys = ctx->input(t);
    const tf::Tensor& rows = ctx->input(n + t);
    const auto count = static_cast<int64_t>(layout.num_rows(table));
    const int64_t dim = layout.tables()[table].dim;
    const auto own_rows = static_cast<int64_t>(layout.section(table, side_.rank()).rows);
    TF_RETURN_IF_ERROR(CheckShape(keys, {count}, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(ctx->input(2 * n + 1 + t), {own_rows, dim}, "own"));
    if (rows.NumElements() > 0) {
      TF_RETURN_IF_ERROR(CheckShape(rows, {count}, "rows"));
      task->rows = Data<RowId>(rows);
    }
    DYNEMB_RETURN_IF_LIBRARY_ERROR(bags->InitUniform(1, count, count));
    task->key_type = key_types_[table];
    task->keys = keys.data();
    task->bags = bags;
    task->dim = dim;
    return absl::OkStatus();
  }

  WireSide side_;
  std::vector<KeyType> key_types_;
  ScratchPool<std::vector<Bags>> bags_;
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembPoolRows", PoolRowsOp);
REGISTER("DynembPoolRowsGrad", PoolRowsGradOp);
REGISTER("DynembPoolRowsWeightGrad", PoolRowsWeightGradOp);
REGISTER("DynembSumReceived", SumReceivedOp);
#undef REGISTER

#define GPU(name) Name(name).Device(tensorflow::DEVICE_GPU)
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembPoolRows")
                               .HostMemory("handles")
                               .HostMemory("bags")
                               .HostMemory("num_bags")
                               .HostMemory("received")
                               .HostMemory("sent")
                               .HostMemory("asked")
                               .HostMemory("served"),
                           PoolRowsOp);
DYNEMB_REGISTER_GPU_KERNEL(
    GPU("DynembPoolRowsGrad").HostMemory("bags").HostMemory("counts").HostMemory("splits"),
    PoolRowsGradOp);
DYNEMB_REGISTER_GPU_KERNEL(
    GPU("DynembPoolRowsWeightGrad").HostMemory("bags").HostMemory("received").HostMemory("sent"),
    PoolRowsWeightGradOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembSumReceived").HostMemory("counts"), SumReceivedOp);
#undef GPU

}  // namespace
}  // namespace dynemb
