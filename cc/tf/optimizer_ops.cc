// The operators that apply an optimizer to the rows of tables. docs/operators.md.
#include "cc/table/optimizer.h"
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

// Checks the inputs `hyper`, of number `first`, and `step`, the next.
absl::Status HyperAndStep(InferenceContext* c, int first) {
  TF_RETURN_IF_ERROR(Scalar(c, first + 1));
  ShapeHandle hyper;
  DimensionHandle size;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(first), 1, &hyper));
  return c->WithValue(c->Dim(hyper, 0), kHyperSize, &size);
}

REGISTER_OP("DynembApplyGradients")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Input("rows: N * uint32")
    .Input("grads: N * float")
    .Input("hyper: float")
    .Input("step: int64")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("optimizer: string")
    .Attr("flags: list(string) = []")
    .Attr("state: string = ''")
    .Attr("inits: list(float) = []")
    .Attr("owner: string = ''")
    .Attr("distinct: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      if (c->num_inputs() != 4 * n + 2) {
        return absl::InvalidArgumentError("keys must have one entry for each table");
      }
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle keys;
        DimensionHandle dim;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &keys));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, 2 * n + i, c->Dim(keys, 0)));
        TF_RETURN_IF_ERROR(VectorsOfKeys(c, n + i, 3 * n + i, &dim));
        TF_RETURN_IF_ERROR(c->Merge(dim, TableDim(c, i), &dim));
      }
      return HyperAndStep(c, 4 * n);
    });

REGISTER_OP("DynembApplyPooledGradients")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Input("rows: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("grads: dtypes")
    .Input("hyper: float")
    .Input("step: int64")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .Attr("optimizer: string")
    .Attr("flags: list(string) = []")
    .Attr("state: string = ''")
    .Attr("inits: list(float) = []")
    .Attr("owner: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      if (c->num_inputs() != 7 * n + 2 || static_cast<int>(combiners.size()) != n) {
        return absl::InvalidArgumentError(
            "keys, grads and combiners must have one entry for each table");
      }
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      for (int i = 0; i < n; ++i) {
        TF_RETURN_IF_ERROR(GradientOfBags(c, n, n, i, combiners[i]));
        TF_RETURN_IF_ERROR(HasDim(c, i, c->Dim(c->input(6 * n + i), 1)));
      }
      return HyperAndStep(c, 7 * n);
    });

}  // namespace
}  // namespace dynemb
