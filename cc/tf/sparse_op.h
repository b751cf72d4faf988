// SparseOp: the base of the kernels over a list of lookups.
#ifndef DYNEMB_TF_SPARSE_OP_H_
#define DYNEMB_TF_SPARSE_OP_H_

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/bags.h"
#include "cc/lookup/combiner.h"
#include "cc/tf/table_resource.h"

namespace dynemb {

// Reads the attributes N, combiners and dtypes, and the inputs that describe the bags of lookup i.
class SparseOp : public DynembOp {
 public:
  explicit SparseOp(tf::OpKernelConstruction* ctx) : DynembOp(ctx) {
    std::vector<std::string> combiners;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &n_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("combiners", &combiners));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes_));
    OP_REQUIRES(ctx,
                static_cast<int>(combiners.size()) == n_ && static_cast<int>(dtypes_.size()) == n_,
                absl::InvalidArgumentError(
                    absl::StrCat("combiners and dtypes must have ", n_, " entries each")));
    for (const std::string& name : combiners) {
      Combiner combiner;
      OP_REQUIRES_OK(ctx, ToAbsl(ParseCombiner(name, &combiner)));
      combiners_.push_back(combiner);
    }
  }

 protected:
  // Fails unless all lists of inputs have N entries. TensorFlow does not ensure this, because the
  // keys and some other lists have separate lists of types.
  absl::Status CheckInputs(tf::OpKernelContext* ctx, int lists) const {
    if (ctx->num_inputs() == lists * n_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("every list must have ", n_, " entries"));
  }

  absl::Status MakeBags(Exec& exec, int i, const tf::Tensor& keys, const tf::Tensor& bags,
                        int64_t num_bags, Bags* out) const {
    TF_RETURN_IF_ERROR(CheckShape(keys, {keys.NumElements()}, Named("keys", i).c_str()));
    const int64_t nnz = keys.NumElements();
    const auto* form = Data<int64_t>(bags);
    Status status;
    if (bags.dims() == 0) {
      status = out->InitUniform(form[0], nnz, num_bags);
    } else if (bags.dims() == 1) {
      status = out->InitSplits(exec, form, bags.dim_size(0), nnz, num_bags);
    } else if (bags.dims() == 2 && bags.dim_size(0) == nnz && (nnz == 0 || bags.dim_size(1) > 0)) {
      status = out->InitIndices(exec, form, bags.dim_size(1), nnz, num_bags);
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat(Named("bags", i), " has shape ", bags.shape().DebugString(),
                       ", expected [], [num_bags + 1] or [", nnz, ", >= 1]"));
    }
    if (status.ok()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(Named("bags", i), ": ", status.message()));
  }

  // Sets `out` to the weights, or to null for [0], which means no weights.
  absl::Status GetWeights(int i, const tf::Tensor& keys, const tf::Tensor& weights,
                          const float** out) const {
    *out = nullptr;
    if (weights.dims() == 1 && weights.NumElements() == 0) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CheckShape(weights, keys.shape(), Named("weights", i).c_str()));
    *out = Data<float>(weights);
    return absl::OkStatus();
  }

  // Describes the gradient of the pooled vectors of lookup i. The lists of inputs from number
  // `first` on are keys, rows, bags, weights, argmax and grads.
  absl::Status MakeGradient(tf::OpKernelContext* ctx, Exec& exec, int first, int i, Bags* bags,
                            BackwardTask* task) const {
    const auto input = [&](int list) -> const tf::Tensor& {
      return ctx->input((first + list) * n_ + i);
    };
    const tf::Tensor& keys = input(0);
    const tf::Tensor& rows = input(1);
    const tf::Tensor& argmax = input(4);
    const tf::Tensor& grads = input(5);
    if (grads.dims() != 2) {
      return absl::InvalidArgumentError(absl::StrCat(
          Named("grads", i), " has shape ", grads.shape().DebugString(), ", expected a matrix"));
    }
    const int64_t num_bags = grads.dim_size(0);
    TF_RETURN_IF_ERROR(CheckWidth(grads.dim_size(1), Named("grads", i).c_str()));
    TF_RETURN_IF_ERROR(MakeBags(exec, i, keys, input(2), num_bags, bags));
    TF_RETURN_IF_ERROR(CheckShape(rows, keys.shape(), Named("rows", i).c_str()));
    task->key_type = ToKeyType(keys.dtype());
    task->keys = keys.data();
    task->rows = Data<RowId>(rows);
    task->bags = bags;
    TF_RETURN_IF_ERROR(GetWeights(i, keys, input(3), &task->weights));
    task->combiner = combiners_[i];
    if (combiners_[i] == Combiner::kMax) {
      TF_RETURN_IF_ERROR(CheckShape(argmax, grads.shape(), Named("argmax", i).c_str()));
      task->argmax = Data<int32_t>(argmax);
    }
    task->dtype = ToDType(grads.dtype());
    task->upstream = grads.data();
    task->dim = grads.dim_size(1);
    return absl::OkStatus();
  }

  static std::string Named(const char* list, int i) { return absl::StrCat(list, "[", i, "]"); }

  int n_;
  std::vector<Combiner> combiners_;
  std::vector<tf::DataType> dtypes_;
};

}  // namespace dynemb

#endif  // DYNEMB_TF_SPARSE_OP_H_
