// Operators that dump and load tables. docs/operators.md is the contract.
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

REGISTER_OP("DynembSnapshot")
    .Input("handles: N * resource")
    .Input("since: int64")
    .Output("snapshot: resource")
    .Output("watermark: int64")
    .Output("utc_ns: int64")
    .Attr("N: int >= 1")
    .Attr("with_deleted: bool = false")
    .Attr("with_used: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 1, &unused));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembSnapshotInfo")
    .Input("snapshot: resource")
    .Input("table: int64")
    .Output("most_rows: int64")
    .Output("base: int64")
    .Output("optimizer: string")
    .Output("widths: int64")
    .Output("inits: float")
    .Output("deleted: uint64")
    .Output("expiry_marks: int64")
    .Output("steps: double")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Scalar());
      for (int i = 3; i < 8; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

REGISTER_OP("DynembSnapshotAdmission")
    .Input("snapshot: resource")
    .Input("table: int64")
    .Output("lines: uint64")
    .Output("first_line: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      c->set_output(0, c->Matrix(c->UnknownDim(), 8));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembSnapshotNext")
    .Input("snapshot: resource")
    .Input("limit_bytes: int64")
    .Output("table: int64")
    .Output("keys: uint8")
    .Output("vectors: uint8")
    .Output("state: float")
    .Output("updates: uint32")
    .Output("accesses: uint32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Scalar());
      for (int i = 1; i < 4; ++i) c->set_output(i, c->Matrix(n, c->UnknownDim()));
      for (int i = 4; i < 6; ++i) c->set_output(i, c->Vector(n));
      return absl::OkStatus();
    });

REGISTER_OP("DynembSnapshotEnd")
    .Input("snapshot: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalar(c, 0); });

REGISTER_OP("DynembLoadRows")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("vectors: dtype")
    .Input("state: float")
    .Input("updates: uint32")
    .Input("accesses: uint32")
    .Input("base: int64")
    .Input("tick: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      DimensionHandle dim;
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      TF_RETURN_IF_ERROR(VectorsOfKeys(c, 1, 2, &dim));
      TF_RETURN_IF_ERROR(c->Merge(dim, TableDim(c, 0), &dim));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &keys));
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->input(4), &keys));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(5), 1, &keys));  // it may be empty
      return Scalars(c, 6, 2);
    });

REGISTER_OP("DynembSetExpiryMarks")
    .Input("handle: resource")
    .Input("marks: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      return c->WithRank(c->input(1), 1, &unused);
    });

REGISTER_OP("DynembLoadSteps")
    .Input("handle: resource")
    .Input("steps: double")
    .Input("tick: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      return Scalar(c, 2);
    });

REGISTER_OP("DynembSwapRows")
    .Input("handles: N * resource")
    .Input("others: N * resource")
    .Input("tick: int64")
    .Input("utc_ns: int64")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalars(c, 0, c->num_inputs()); });

REGISTER_OP("DynembAdvanceClock")
    .Input("tick: int64")
    .Input("utc_ns: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalars(c, 0, 2); });

REGISTER_OP("DynembTickBefore")
    .Input("utc_ns: int64")
    .Output("tick: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembCrc32c")
    .Input("data: uint8")
    .Input("initial: uint32")
    .Input("room: int64")
    .Input("block_bytes: int64")
    .Output("checksums: uint32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle data;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &data));
      TF_RETURN_IF_ERROR(Scalars(c, 1, 3));
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

REGISTER_OP("DynembBuildKeyIndex")
    .Input("keys_path: string")
    .Input("keys_offset: int64")
    .Input("num_keys: int64")
    .Input("key_bytes: int64")
    .Input("index_path: string")
    .Input("index_offset: int64")
    .Input("log_slots: int64")
    .Output("salt: uint64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return Scalars(c, 0, 7);
    });

}  // namespace
}  // namespace dynemb
