// The kernels of optimizer_ops.cc: unpack, call the library, pack.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/lookups.h"
#include "cc/table/scratch.h"
#include "cc/tf/sparse_op.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

// Reads the attributes of an optimizer's step.
absl::Status GetStep(tf::OpKernelConstruction* ctx, OptimizerStep* step) {
  std::string optimizer;
  std::vector<std::string> flags;
  TF_RETURN_IF_ERROR(ctx->GetAttr("optimizer", &optimizer));
  TF_RETURN_IF_ERROR(ctx->GetAttr("flags", &flags));
  TF_RETURN_IF_ERROR(ctx->GetAttr("state", &step->state));
  TF_RETURN_IF_ERROR(ctx->GetAttr("inits", &step->inits));
  TF_RETURN_IF_ERROR(ctx->GetAttr("owner", &step->owner));
  return ToAbsl(ParseOptimizer(optimizer, flags, &step->kind, &step->flags));
}

// Reads the inputs of an optimizer's step: `hyper`, the input `first`, and `step`, the next.
absl::Status GetHyper(tf::OpKernelContext* ctx, int first, OptimizerStep* step) {
  const tf::Tensor& hyper = ctx->input(first);
  TF_RETURN_IF_ERROR(CheckShape(hyper, {kHyperSize}, "hyper"));
  TF_RETURN_IF_ERROR(CheckScalar(ctx->input(first + 1), "step"));
  step->iteration = static_cast<uint64_t>(ctx->input(first + 1).scalar<int64_t>()());
  memcpy(&step->hyper, hyper.data(), sizeof(step->hyper));
  return absl::OkStatus();
}

// Calls apply(tick) under the locks of the tables, and promotes rows: the step ends here, so that
// the row ids that its lookups found are no longer needed.
template <class Apply>
absl::Status ApplyAndPromote(Exec& exec, Lookups* lookups, const std::vector<Table*>& tables,
                             const Apply& apply) {
  TableLock lock(tables, TableLock::Mode::kExclusive);
  const Tick tick = ProcessClock().Next();
  DYNEMB_RETURN_IF_LIBRARY_ERROR(apply(tick));
  DYNEMB_RETURN_IF_LIBRARY_ERROR(lookups->PromoteIfDue(exec, tables, tick));
  return ErrorOf(tables);
}

class ApplyGradientsOp : public DynembOp {
 public:
  explicit ApplyGradientsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distinct", &distinct_));
    OP_REQUIRES_OK(ctx, GetStep(ctx, &step_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    if (ctx->num_inputs() != 4 * n_ + 2) {
      return absl::InvalidArgumentError(absl::StrCat("every list must have ", n_, " entries"));
    }
    OptimizerStep step = step_;
    TF_RETURN_IF_ERROR(GetHyper(ctx, 4 * n_, &step));
    std::vector<TableRef> refs;
    std::vector<Table*> tables;
    std::vector<ApplyTask> tasks(n_);
    Lookups* lookups;
    TF_RETURN_IF_ERROR(GetTables(ctx, 0, n_, &refs, &tables));
    TF_RETURN_IF_ERROR(CommonLookups(refs, &lookups));
    for (int i = 0; i < n_; ++i) {
      const tf::Tensor& keys = ctx->input(n_ + i);
      const tf::Tensor& rows = ctx->input(2 * n_ + i);
      const tf::Tensor& grads = ctx->input(3 * n_ + i);
      TF_RETURN_IF_ERROR(CheckKeys(*tables[i], keys, "keys"));
      TF_RETURN_IF_ERROR(CheckShape(keys, {keys.NumElements()}, "keys"));
      TF_RETURN_IF_ERROR(CheckVectors(keys, grads, tables[i]->options().dim, "grads"));
      tasks[i].table = tables[i];
      tasks[i].keys = keys.data();
      tasks[i].gradients = Data<float>(grads);
      tasks[i].n = static_cast<size_t>(keys.NumElements());
      tasks[i].distinct = distinct_;
      if (rows.NumElements() != 0) {
        TF_RETURN_IF_ERROR(CheckShape(rows, keys.shape(), "rows"));
        tasks[i].rows = Data<RowId>(rows);
      }
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return ApplyAndPromote(*exec, lookups, tables,
                           [&](Tick tick) { return lookups->Apply(*exec, tasks, step, tick); });
  }

 private:
  int n_;
  bool distinct_;
  OptimizerStep step_;  // without hyper and iteration, which are inputs
};

class ApplyPooledGradientsOp : public SparseOp {
 public:
  explicit ApplyPooledGradientsOp(tf::OpKernelConstruction* ctx) : SparseOp(ctx) {
    OP_REQUIRES_OK(ctx, GetStep(ctx, &step_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    if (ctx->num_inputs() != 7 * n_ + 2) {
      return absl::InvalidArgumentError(absl::StrCat("every list must have ", n_, " entries"));
    }
    OptimizerStep step = step_;
    TF_RETURN_IF_ERROR(GetHyper(ctx, 7 * n_, &step));
    PoolExec host = MakeHostExec(ctx);
    auto bags = bags_.Take();
    bags->resize(n_);
    std::vector<TableRef> refs;
    std::vector<Table*> tables;
    std::vector<ApplyPooledTask> tasks(n_);
    Lookups* lookups;
    TF_RETURN_IF_ERROR(GetTables(ctx, 0, n_, &refs, &tables));
    TF_RETURN_IF_ERROR(CommonLookups(refs, &lookups));
    for (int i = 0; i < n_; ++i) {
      TF_RETURN_IF_ERROR(CheckKeys(*tables[i], ctx->input(n_ + i), Named("keys", i).c_str()));
      TF_RETURN_IF_ERROR(MakeGradient(ctx, host, 1, i, &(*bags)[i], &tasks[i]));
      tasks[i].table = tables[i];
    }
    std::unique_ptr<Exec> exec;
    TF_RETURN_IF_ERROR(MakeExec(ctx, &exec));
    return ApplyAndPromote(*exec, lookups, tables, [&](Tick tick) {
      return lookups->ApplyPooled(*exec, tasks, step, tick);
    });
  }

 private:
  OptimizerStep step_;  // without hyper and iteration, which are inputs
  ScratchPool<std::vector<Bags>> bags_;
};

REGISTER_KERNEL_BUILDER(Name("DynembApplyGradients").Device(tensorflow::DEVICE_CPU),
                        ApplyGradientsOp);
REGISTER_KERNEL_BUILDER(Name("DynembApplyPooledGradients").Device(tensorflow::DEVICE_CPU),
                        ApplyPooledGradientsOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembApplyGradients")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handles")
                               .HostMemory("hyper")
                               .HostMemory("step"),
                           ApplyGradientsOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembApplyPooledGradients")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handles")
                               .HostMemory("bags")
                               .HostMemory("hyper")
                               .HostMemory("step"),
                           ApplyPooledGradientsOp);

}  // namespace
}  // namespace dynemb
