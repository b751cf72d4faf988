// Operators of a group of ranks (cc/ranks). docs/operators.md is the contract.
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

absl::Status IsVector(InferenceContext* c, int index) {
  ShapeHandle shape;
  return c->WithRank(c->input(index), 1, &shape);
}

// The same rows, of a number that only the ranks know.
absl::Status OtherRows(InferenceContext* c) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &shape));
  TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

REGISTER_OP("DynembRanksListen")
    .Input("host: string")
    .Input("rank: int32")
    .Input("size: int32")
    .Input("timeout: double")
    .Input("tls: string")
    .Output("group: resource")
    .Output("addresses: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 4));
      TF_RETURN_IF_ERROR(IsVector(c, 4));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

REGISTER_OP("DynembRanksConnect")
    .Input("group: resource")
    .Input("addresses: string")
    .Input("hosts: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(IsVector(c, 1));
      return IsVector(c, 2);
    });

REGISTER_OP("DynembRanksLeave")
    .Input("group: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalar(c, 0); });

REGISTER_OP("DynembRanksJoinMpi")
    .Input("library: string")
    .Input("timeout: double")
    .Output("group: resource")
    .Output("rank: int32")
    .Output("size: int32")
    .Output("version: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembRanksUseNccl")
    .Input("group: resource")
    .Input("library: string")
    .Input("device: string")
    .Output("group_on_device: resource")
    .Output("version: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 3));
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembRanksAlltoall")
    .Input("group: resource")
    .Input("data: T")
    .Input("splits: int32")
    .Output("received: T")
    .Output("received_splits: int32")
    .Attr("T: type")
    .Attr("operation: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(IsVector(c, 2));
      c->set_output(1, c->input(2));
      return OtherRows(c);
    });

REGISTER_OP("DynembRanksAllgather")
    .Input("group: resource")
    .Input("data: T")
    .Output("gathered: T")
    .Attr("T: type")
    .Attr("operation: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      return OtherRows(c);
    });

REGISTER_OP("DynembRanksBroadcast")
    .Input("group: resource")
    .Input("data: T")
    .Output("of_root: T")
    .Attr("T: type")
    .Attr("root: int >= 0")
    .Attr("operation: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("DynembRanksAllreduce")
    .Input("group: resource")
    .Input("data: N * T")
    .Output("sums: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {int32, int64, half, bfloat16, float, double}")
    .Attr("operation: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(1 + i));
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
