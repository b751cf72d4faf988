// The operator that completes a lookup that was read ahead. docs/design.md, "Many ranks".
#include <string>
#include <vector>

#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

REGISTER_OP("DynembReadAgain")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Input("rows_before: N * uint32")
    .Input("served: int64")
    .Input("since: int64")
    .Output("rows: N * uint32")
    .Output("places: N * int32")
    .Output("vectors: dtypes")
    .Output("counts: int64")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("insert: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      std::vector<tf::DataType> dtypes;
      TF_RETURN_IF_ERROR(c->GetAttr("dtypes", &dtypes));
      if (c->num_inputs() != 3 * n + 2 || static_cast<int>(dtypes.size()) != n) {
        return absl::InvalidArgumentError("every list must have " + std::to_string(n) + " entries");
      }
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &keys));
        TF_RETURN_IF_ERROR(c->Merge(keys, c->input(2 * n + i), &keys));
        const DimensionHandle changed = c->UnknownDim();
        c->set_output(i, keys);
        c->set_output(n + i, c->Matrix(changed, 1));
        c->set_output(2 * n + i, c->Matrix(changed, TableDim(c, i)));
      }
      ShapeHandle served;
      DimensionHandle tables;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3 * n), 2, &served));
      TF_RETURN_IF_ERROR(c->WithValue(c->Dim(served, 0), n, &tables));
      TF_RETURN_IF_ERROR(Scalar(c, 3 * n + 1));
      c->set_output(3 * n, served);
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
