// Operators of tables with rows in files (cc/table/cold_rows.h). docs/operators.md is the contract.
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

REGISTER_OP("DynembFlush")
    .Input("handle: resource")
    .Input("folder: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalars(c, 0, 2); });

REGISTER_OP("DynembKeepFlush")
    .Input("handle: resource")
    .Input("folder: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalars(c, 0, 2); });

REGISTER_OP("DynembRestore")
    .Input("handle: resource")
    .Input("folder: string")
    .Output("optimizer: string")
    .Output("widths: int64")
    .Output("inits: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      c->set_output(0, c->Scalar());
      for (int i : {1, 2}) c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

REGISTER_OP("DynembReadAhead")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Attr("key_type: {int64, int32, uint64}")
    .SetIsStateful()
    .SetShapeFn(TableAndKeys);

}  // namespace
}  // namespace dynemb
