// Operators of the tables of exported models. docs/operators.md is the contract.
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

REGISTER_OP("DynembServedTable")
    .Output("handle: resource")
    // Not shared_name, which TensorFlow changes when it loads a function: to one name for all
    // tables.
    .Attr("resource_name: string = ''")
    .Attr("table: string")
    .Attr("key_dtype: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .Attr("dim: int")
    .Attr("seed: int = 0")
    .Attr("initializers: list({'constant', 'uniform', 'normal', 'truncated_normal'}) >= 1")
    .Attr("initializer_args: list(float) >= 2")
    .Attr("default_vector: list(float) = []")
    .Attr("absent: {'initial', 'zeros', 'skip'} = 'initial'")
    .Attr("max_hbm_bytes: int >= 0 = 17179869184")
    .SetIsStateful()
    .SetShapeFn(NewTable);

REGISTER_OP("DynembOpenServedTable")
    .Input("handle: resource")
    .Input("descriptor: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalars(c, 0, 2); });

REGISTER_OP("DynembApplySnapshots")
    .Input("handle: resource")
    .Input("path: string")
    .Output("applied: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembServedState")
    .Input("handle: resource")
    .Output("id: string")
    .Output("watermark: int64")
    .Output("watermark_utc_ns: int64")
    .Output("follow_error: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembServedStats")
    .Input("handle: resource")
    .Output("names: string")
    .Output("values: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      for (int i = 0; i < 2; ++i) c->set_output(i, c->Vector(3));
      return absl::OkStatus();
    });

REGISTER_OP("DynembServedWeights")
    .Input("handle: resource")
    .Output("weights: dtypes")
    .Attr("names: list(string) >= 1")
    .Attr(
        "dtypes: list({bool, int8, uint8, int16, uint16, half, bfloat16, int32, uint32, float, "
        "int64, uint64, double}) >= 1")
    .Attr("shapes: list(shape) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      // The kernel refuses another number of them.
      for (int i = 0; i < c->num_outputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle shape = c->UnknownShape();
        if (static_cast<size_t>(i) < shapes.size()) {
          TF_RETURN_IF_ERROR(
              c->MakeShapeFromPartialTensorShape(shapes[static_cast<size_t>(i)], &shape));
        }
        c->set_output(i, shape);
      }
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
