// Kernels of lookup_ops.cc: unpack, call the library, pack.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/lookups.h"
#include "cc/table/scratch.h"
#include "cc/tf/sparse_op.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

class LookupOp : public OneTableOp {
 public:
  explicit LookupOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& default_value = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckDType(table, dtype_, "default_value"));
    const int64_t dim = table.options().dim;
    if (default_value.NumElements() != 0) {
      TF_RETURN_IF_ERROR(CheckShape(default_value, {dim}, "default_value"));
    }
    void* values;
    RowId* rows;
    tf::TensorShape values_shape = keys.shape();
    TF_RETURN_IF_ERROR(values_shape.AddDimWithStatus(dim));
    TF_RETURN_IF_ERROR(Output(ctx, 0, values_shape, &values));
    TF_RETURN_IF_ERROR(Output(ctx, 1, keys.shape(), &rows));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    if (insert_) {
      TableLock lock({&table}, TableLock::Mode::kExclusive);
      return ToAbsl(table.LookupOrInsert(*exec, KeysOf(keys), ProcessClock().Next(), values, rows));
    }
    TableLock lock({&table}, TableLock::Mode::kRead);
    table.Lookup(*exec, KeysOf(keys), ProcessClock().Next(),
                 default_value.NumElements() != 0 ? default_value.data() : nullptr, values, rows);
    return absl::OkStatus();
  }

 private:
  bool insert_;
  tf::DataType dtype_;
};

class LookupCountedOp : public OneTableOp {
 public:
  explicit LookupCountedOp(tf::OpKernelConstruction* ctx) : OneTableOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtype", &dtype_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx, Table& table) override {
    const tf::Tensor& keys = ctx->input(1);
    const tf::Tensor& counts = ctx->input(2);
    TF_RETURN_IF_ERROR(CheckKeys(table, keys, "keys"));
    TF_RETURN_IF_ERROR(CheckShape(counts, keys.shape(), "counts"));
    TF_RETURN_IF_ERROR(CheckDType(table, dtype_, "values"));
    const auto* times = Data<int32_t>(counts);
    if (std::any_of(times, times + counts.NumElements(), [](int32_t n) { return n < 1; })) {
      return absl::InvalidArgumentError("counts has a number below 1");
    }
    void* values;
    RowId* rows;
    tf::TensorShape values_shape = keys.shape();
    TF_RETURN_IF_ERROR(values_shape.AddDimWithStatus(table.options().dim));
    TF_RETURN_IF_ERROR(Output(ctx, 0, values_shape, &values));
    TF_RETURN_IF_ERROR(Output(ctx, 1, keys.shape(), &rows));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    TableLock lock({&table}, TableLock::Mode::kExclusive);
    return ToAbsl(table.LookupCounted(*exec, KeysOf(keys), reinterpret_cast<const uint32_t*>(times),
                                      ProcessClock().Next(), values, rows));
  }

 private:
  tf::DataType dtype_;
};

// The base of operators over lists of lookups in tables, which the first list of inputs names.
// `Task` describes a lookup to the library.
template <class Task>
class TablesOp : public SparseOp {
 public:
  TablesOp(tf::OpKernelConstruction* ctx, int lists) : SparseOp(ctx), lists_(lists) {}

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) final {
    TF_RETURN_IF_ERROR(CheckInputs(ctx, lists_));
    PoolExec host = MakeHostExec(ctx);
    auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<TableRef> refs;
    std::vector<Table*> tables;
    std::vector<Task> tasks(n_);
    Lookups* lookups;
    TF_RETURN_IF_ERROR(GetTables(ctx, 0, n_, &refs, &tables));
    TF_RETURN_IF_ERROR(CommonLookups(refs, &lookups));
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeTask(ctx, host, i, tables[i], &(*bags)[i], &tasks[i]));
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    DYNEMB_RETURN_IF_LIBRARY_ERROR(Call(lookups, *exec, tables, tasks));
    return ErrorOf(tables);
  }
  // Checks the inputs of lookup i, allocates its outputs, and describes it.
  virtual absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Table* table,
                                Bags* bags, Task* task) const = 0;
  virtual Status Call(Lookups* lookups, Exec& exec, const std::vector<Table*>& tables,
                      const std::vector<Task>& tasks) = 0;

 private:
  int lists_;
  ScratchPool<std::vector<Bags>> bags_;
};

class LookupSparseOp : public TablesOp<PoolTask> {
 public:
  explicit LookupSparseOp(tf::OpKernelConstruction* ctx) : TablesOp(ctx, 5) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
    OP_REQUIRES(ctx, static_cast<int>(dims_.size()) == n_,
                absl::InvalidArgumentError(absl::StrCat("dims must have ", n_, " entries")));
  }

 protected:
  Status Call(Lookups* lookups, Exec& exec, const std::vector<Table*>& tables,
              const std::vector<PoolTask>& tasks) override {
    TableLock lock(tables, insert_ ? TableLock::Mode::kExclusive : TableLock::Mode::kRead);
    return lookups->Pool(exec, tasks, ProcessClock().Next(), insert_);
  }
  absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Table* table, Bags* bags,
                        PoolTask* task) const override {
    const tf::Tensor& keys = ctx->input(n_ + i);
    const tf::Tensor& num_bags_tensor = ctx->input(4 * n_ + i);
    TF_RETURN_IF_ERROR(CheckKeys(*table, keys, Named("keys", i).c_str()));
    TF_RETURN_IF_ERROR(CheckDType(*table, dtypes_[i], Named("outputs", i).c_str()));
    TF_RETURN_IF_ERROR(CheckScalar(num_bags_tensor, Named("num_bags", i).c_str()));
    if (table->options().dim != dims_[i]) {
      return absl::InvalidArgumentError(absl::StrCat(
          Named("dims", i), " is ", dims_[i], ", but the table's dim is ", table->options().dim));
    }
    const int64_t num_bags = num_bags_tensor.scalar<int64_t>()();
    TF_RETURN_IF_ERROR(MakeBags(exec, i, keys, ctx->input(2 * n_ + i), num_bags, bags));
    task->table = table;
    task->keys = keys.data();
    task->bags = bags;
    task->combiner = combiners_[i];
    TF_RETURN_IF_ERROR(GetWeights(i, keys, ctx->input(3 * n_ + i), &task->weights));
    const int64_t argmax_bags = combiners_[i] == Combiner::kMax ? num_bags : 0;
    TF_RETURN_IF_ERROR(Output(ctx, i, {num_bags, dims_[i]}, &task->pooled));
    TF_RETURN_IF_ERROR(Output(ctx, n_ + i, keys.shape(), &task->rows));
    return Output(ctx, 2 * n_ + i, {argmax_bags, dims_[i]}, &task->argmax);
  }

 private:
  std::vector<int64_t> dims_;
  bool insert_;
};

class LookupSparseGradOp : public SparseOp {
 public:
  using SparseOp::SparseOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    TF_RETURN_IF_ERROR(CheckInputs(ctx, 6));
    PoolExec host = MakeHostExec(ctx);
    auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<BackwardTask> tasks(n_);
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(MakeGradient(ctx, host, 0, i, &(*bags)[i], &tasks[i]));
    }
    const auto allocate = [&](size_t task, int64_t unique, BackwardOutput* out) -> absl::Status {
      const int i = static_cast<int>(task);
      TF_RETURN_IF_ERROR(Output(ctx, i, {unique}, &out->keys));
      TF_RETURN_IF_ERROR(Output(ctx, n_ + i, {unique, tasks[task].dim}, &out->sums));
      return Output(ctx, 2 * n_ + i, {unique}, &out->rows);
    };
    Lookups* lookups;
    TF_RETURN_IF_ERROR(GetLookups(ctx, &lookups));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return SumGradients(lookups, *exec, tasks, allocate);
  }

 private:
  ScratchPool<std::vector<Bags>> bags_;
};

class LookupSparseWeightGradOp : public TablesOp<WeightGradientTask> {
 public:
  explicit LookupSparseWeightGradOp(tf::OpKernelConstruction* ctx) : TablesOp(ctx, 8) {}

 protected:
  Status Call(Lookups* lookups, Exec& exec, const std::vector<Table*>& tables,
              const std::vector<WeightGradientTask>& tasks) override {
    TableLock lock(tables, TableLock::Mode::kRead);
    return lookups->WeightGradient(exec, tasks);
  }
  absl::Status MakeTask(tf::OpKernelContext* ctx, Exec& exec, int i, Table* table, Bags* bags,
                        WeightGradientTask* task) const override {
    const auto input = [&](int list) -> const tf::Tensor& { return ctx->input(list * n_ + i); };
    const tf::Tensor& keys = input(1);
    const tf::Tensor& grads = input(7);
    const int64_t dim = table->options().dim;
    TF_RETURN_IF_ERROR(CheckKeys(*table, keys, Named("keys", i).c_str()));
    TF_RETURN_IF_ERROR(CheckDType(*table, dtypes_[i], Named("grads", i).c_str()));
    const int64_t num_bags = grads.dims() == 2 ? grads.dim_size(0) : 0;
    TF_RETURN_IF_ERROR(CheckShape(grads, {num_bags, dim}, Named("grads", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(6), {num_bags, dim}, Named("outputs", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(2), keys.shape(), Named("rows", i).c_str()));
    TF_RETURN_IF_ERROR(CheckShape(input(4), keys.shape(), Named("weights", i).c_str()));
    TF_RETURN_IF_ERROR(MakeBags(exec, i, keys, input(3), num_bags, bags));
    if (combiners_[i] == Combiner::kMax) {
      TF_RETURN_IF_ERROR(CheckShape(input(5), {num_bags, dim}, Named("argmax", i).c_str()));
    }
    task->table = table;
    task->keys = keys.data();
    task->rows = Data<RowId>(input(2));
    task->bags = bags;
    task->weights = Data<float>(input(4));
    task->combiner = combiners_[i];
    task->argmax = Data<int32_t>(input(5));
    task->pooled = input(6).data();
    task->upstream = grads.data();
    return Output(ctx, i, keys.shape(), &task->gradient);
  }
};

class DedupSumOp : public DynembOp {
 public:
  using DynembOp::DynembOp;

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    const tf::Tensor& keys = ctx->input(0);
    const tf::Tensor& values = ctx->input(1);
    if (values.dims() == 0) {
      return absl::InvalidArgumentError(absl::StrCat("values has shape ",
                                                     values.shape().DebugString(),
                                                     ", expected the keys' with a width appended"));
    }
    const int64_t dim = values.dim_size(values.dims() - 1);
    TF_RETURN_IF_ERROR(CheckWidth(dim, "values"));
    TF_RETURN_IF_ERROR(CheckVectors(keys, values, dim, "values"));
    const int64_t n = keys.NumElements();
    Bags bags;
    DYNEMB_RETURN_IF_LIBRARY_ERROR(bags.InitUniform(1, n, n));
    BackwardTask task;
    task.key_type = ToKeyType(keys.dtype());
    task.keys = keys.data();
    task.bags = &bags;
    task.dtype = ToDType(values.dtype());
    task.upstream = values.data();
    task.dim = dim;
    const auto allocate = [&](size_t, int64_t unique, BackwardOutput* out) -> absl::Status {
      TF_RETURN_IF_ERROR(Output(ctx, 0, {unique}, &out->keys));
      return Output(ctx, 1, {unique, dim}, &out->sums);
    };
    Lookups* lookups;
    TF_RETURN_IF_ERROR(GetLookups(ctx, &lookups));
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return SumGradients(lookups, *exec, {task}, allocate);
  }
};

#define REGISTER(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER("DynembLookup", LookupOp);
REGISTER("DynembLookupCounted", LookupCountedOp);
REGISTER("DynembLookupSparse", LookupSparseOp);
REGISTER("DynembLookupSparseGrad", LookupSparseGradOp);
REGISTER("DynembLookupSparseWeightGrad", LookupSparseWeightGradOp);
REGISTER("DynembDedupSum", DedupSumOp);
#undef REGISTER

#define GPU(name) Name(name).Device(tensorflow::DEVICE_GPU)
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembLookup").HostMemory("handle"), LookupOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembLookupCounted").HostMemory("handle").HostMemory("counts"),
                           LookupCountedOp);
DYNEMB_REGISTER_GPU_KERNEL(
    GPU("DynembLookupSparse").HostMemory("handles").HostMemory("bags").HostMemory("num_bags"),
    LookupSparseOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembLookupSparseGrad").HostMemory("bags"), LookupSparseGradOp);
DYNEMB_REGISTER_GPU_KERNEL(
    GPU("DynembLookupSparseWeightGrad").HostMemory("handles").HostMemory("bags"),
    LookupSparseWeightGradOp);
DYNEMB_REGISTER_GPU_KERNEL(GPU("DynembDedupSum"), DedupSumOp);
#undef GPU

}  // namespace
}  // namespace dynemb
