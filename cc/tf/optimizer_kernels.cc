// The kernel of optimizer_ops.cc: unpack, call the library, pack.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/lookups.h"
#include "cc/tf/table_resource.h"

namespace dynemb {
namespace {

class ApplyGradientsOp : public DynembOp {
 public:
  explicit ApplyGradientsOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::string optimizer;
    std::vector<std::string> flags;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("optimizer", &optimizer));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("flags", &flags));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("distinct", &distinct_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("state", &step_.state));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("inits", &step_.inits));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owner", &step_.owner));
    OP_REQUIRES_OK(ctx, ToAbsl(ParseOptimizer(optimizer, flags, &step_.kind, &step_.flags)));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* ctx) override {
    if (ctx->num_inputs() != 4 * n_ + 2) {
      return absl::InvalidArgumentError(absl::StrCat("every list must have ", n_, " entries"));
    }
    const tf::Tensor& hyper_tensor = ctx->input(4 * n_);
    TF_RETURN_IF_ERROR(CheckShape(hyper_tensor, {kHyperSize}, "hyper"));
    TF_RETURN_IF_ERROR(CheckScalar(ctx->input(4 * n_ + 1), "step"));
    OptimizerStep step = step_;
    step.iteration = static_cast<uint64_t>(ctx->input(4 * n_ + 1).scalar<int64_t>()());
    memcpy(&step.hyper, hyper_tensor.data(), sizeof(step.hyper));

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
    TableLock lock(tables, TableLock::Mode::kExclusive);
    const Tick tick = ProcessClock().Next();
    DYNEMB_RETURN_IF_LIBRARY_ERROR(lookups->Apply(*exec, tasks, step, tick));
    // The step ends here: the row ids that its lookups found are no longer needed.
    for (Table* table : tables) DYNEMB_RETURN_IF_LIBRARY_ERROR(table->PromoteIfDue(*exec, tick));
    return absl::OkStatus();
  }

 private:
  int n_;
  bool distinct_;
  OptimizerStep step_;  // without hyper and iteration, which are inputs
};

REGISTER_KERNEL_BUILDER(Name("DynembApplyGradients").Device(tensorflow::DEVICE_CPU),
                        ApplyGradientsOp);
DYNEMB_REGISTER_GPU_KERNEL(Name("DynembApplyGradients")
                               .Device(tensorflow::DEVICE_GPU)
                               .HostMemory("handles")
                               .HostMemory("hyper")
                               .HostMemory("step"),
                           ApplyGradientsOp);

}  // namespace
}  // namespace dynemb
