// The operator that applies an optimizer to the rows of tables. docs/operators.md.
#include "cc/table/optimizer.h"
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

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
      TF_RETURN_IF_ERROR(Scalar(c, 4 * n + 1));
      ShapeHandle hyper;
      DimensionHandle size;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4 * n), 1, &hyper));
      return c->WithValue(c->Dim(hyper, 0), kHyperSize, &size);
    });

}  // namespace
}  // namespace dynemb
