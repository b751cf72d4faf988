// Operators that look up vectors, pool them, and take gradients back to keys. docs/operators.md.
#include <algorithm>
#include <string>
#include <vector>

#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

// Gets N and combiners. Fails unless combiners and the list attributes `names` have N entries each.
absl::Status GetN(InferenceContext* c, const std::vector<const char*>& names, int* n,
                  std::vector<std::string>* combiners) {
  TF_RETURN_IF_ERROR(c->GetAttr("N", n));
  const auto check = [&](const char* name, size_t size) -> absl::Status {
    if (static_cast<int>(size) == *n) return absl::OkStatus();
    return absl::InvalidArgumentError(std::string(name) + " must have one entry for each of the " +
                                      std::to_string(*n) + " lookups, got " + std::to_string(size));
  };
  for (const char* name : names) {
    const tf::AttrValue* value = c->GetAttr(name);
    if (value == nullptr) return absl::InvalidArgumentError(std::string("no attribute ") + name);
    TF_RETURN_IF_ERROR(check(
        name, static_cast<size_t>(std::max(value->list().i_size(), value->list().type_size()))));
  }
  combiners->clear();  // GetAttr appends
  TF_RETURN_IF_ERROR(c->GetAttr("combiners", combiners));
  return check("combiners", combiners->size());
}

REGISTER_OP("DynembLookup")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("default_value: dtype")
    .Output("values: dtype")
    .Output("rows: uint32")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .Attr("insert: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(VectorOrEmpty(c, 2, TableDim(c, 0)));
      ShapeHandle values;
      TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(TableDim(c, 0)), &values));
      c->set_output(0, values);
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("DynembLookupCounted")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("counts: int32")
    .Output("values: dtype")
    .Output("rows: uint32")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys, values;
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->input(2), &keys));
      TF_RETURN_IF_ERROR(c->Concatenate(keys, c->Vector(TableDim(c, 0)), &values));
      c->set_output(0, values);
      c->set_output(1, keys);
      return absl::OkStatus();
    });

REGISTER_OP("DynembLookupSparse")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("num_bags: N * int64")
    .Output("outputs: dtypes")
    .Output("rows: N * uint32")
    .Output("argmax: N * int32")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .Attr("insert: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(GetN(c, {"Tkeys", "dtypes", "dims"}, &n, &combiners));
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      TF_RETURN_IF_ERROR(Scalars(c, 4 * n, n));
      for (int i = 0; i < n; ++i) {
        if (dims[i] <= 0) {
          return absl::InvalidArgumentError("dims must be positive, got " +
                                            std::to_string(dims[i]));
        }
        TF_RETURN_IF_ERROR(HasDim(c, i, c->MakeDim(dims[i])));
        ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &keys));
        DimensionHandle num_bags;
        TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(4 * n + i, &num_bags));
        TF_RETURN_IF_ERROR(BagsOfKeys(c, n + i, 2 * n + i, &num_bags));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, 3 * n + i, c->Dim(keys, 0)));
        c->set_output(i, c->Matrix(num_bags, dims[i]));
        c->set_output(n + i, keys);
        c->set_output(2 * n + i,
                      combiners[i] == "max" ? c->Matrix(num_bags, dims[i]) : c->Matrix(0, dims[i]));
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembLookupSparseGrad")
    .Input("keys: Tkeys")
    .Input("rows: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("grads: dtypes")
    .Output("unique_keys: Tkeys")
    .Output("sums: N * float")
    .Output("unique_rows: N * uint32")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int n;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(GetN(c, {"Tkeys", "dtypes"}, &n, &combiners));
      for (int i = 0; i < n; ++i) {
        TF_RETURN_IF_ERROR(GradientOfBags(c, 0, n, i, combiners[i]));
        const DimensionHandle unique = c->UnknownDim();
        c->set_output(i, c->Vector(unique));
        c->set_output(n + i, c->Matrix(unique, c->Dim(c->input(5 * n + i), 1)));
        c->set_output(2 * n + i, c->Vector(unique));
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembLookupSparseWeightGrad")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Input("rows: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("outputs: dtypes")
    .Input("grads: dtypes")
    .Output("weight_grads: N * float")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(GetN(c, {"Tkeys", "dtypes"}, &n, &combiners));
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle keys, weights, grads, unused;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &keys));
        TF_RETURN_IF_ERROR(c->Merge(keys, c->input(2 * n + i), &unused));
        TF_RETURN_IF_ERROR(c->Merge(keys, c->input(4 * n + i), &weights));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(7 * n + i), 2, &grads));
        TF_RETURN_IF_ERROR(HasDim(c, i, c->Dim(grads, 1)));
        TF_RETURN_IF_ERROR(c->Merge(grads, c->input(6 * n + i), &unused));
        if (combiners[i] == "max") {
          TF_RETURN_IF_ERROR(c->Merge(grads, c->input(5 * n + i), &unused));
        }
        DimensionHandle num_bags = c->Dim(grads, 0);
        TF_RETURN_IF_ERROR(BagsOfKeys(c, n + i, 3 * n + i, &num_bags));
        c->set_output(i, weights);
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembDedupSum")
    .Input("keys: key_type")
    .Input("values: dtype")
    .Output("unique_keys: key_type")
    .Output("sums: float")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle dim;
      TF_RETURN_IF_ERROR(VectorsOfKeys(c, 0, 1, &dim));
      const DimensionHandle unique = c->UnknownDim();
      c->set_output(0, c->Vector(unique));
      c->set_output(1, c->Matrix(unique, dim));
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
