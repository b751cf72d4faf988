// Operators around the exchange between ranks. docs/design.md, "Many ranks" and "Operators".
#include <string>
#include <vector>

#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

absl::Status Size(InferenceContext* c, const char* attr, size_t* size) {
  const tf::AttrValue* value = c->GetAttr(attr);
  if (value == nullptr) return absl::InvalidArgumentError(std::string("no attribute ") + attr);
  const auto& list = value->list();
  *size = static_cast<size_t>(list.i_size() + list.type_size() + list.s_size() + list.b_size());
  return absl::OkStatus();
}

absl::Status HaveSize(InferenceContext* c, const std::vector<const char*>& attrs, size_t size) {
  for (const char* attr : attrs) {
    size_t have;
    TF_RETURN_IF_ERROR(Size(c, attr, &have));
    if (have != size) {
      return absl::InvalidArgumentError(std::string(attr) + " must have " + std::to_string(size) +
                                        " entries, got " + std::to_string(have));
    }
  }
  return absl::OkStatus();
}

// Input `index` is [tables, ranks].
absl::Status Counts(InferenceContext* c, int index, int64_t tables, DimensionHandle* ranks) {
  ShapeHandle counts;
  DimensionHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 2, &counts));
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(counts, 0), tables, &unused));
  *ranks = c->Dim(counts, 1);
  return absl::OkStatus();
}

// Stateful, though it is not: an operator on constant ids would be folded, and the collective that
// sends its output with it.
REGISTER_OP("DynembRoute")
    .Input("keys: Tkeys")
    .Output("words: int32")
    .Output("splits: int32")
    .Output("counts: int64")
    .Output("index: N * uint32")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("owners: list(int) >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("num_ranks: int >= 1")
    .Attr("rank: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n;
      size_t num_tables;
      int64_t ranks;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("num_ranks", &ranks));
      TF_RETURN_IF_ERROR(HaveSize(c, {"Tkeys", "tables"}, static_cast<size_t>(n)));
      TF_RETURN_IF_ERROR(Size(c, "owners", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"names"}, num_tables));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(ranks));
      c->set_output(2, c->Matrix(static_cast<int64_t>(num_tables), ranks));
      for (int i = 0; i < n; ++i) {
        ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &keys));
        c->set_output(3 + i, keys);
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembReceiveKeys")
    .Input("words: int32")
    .Input("splits: int32")
    .Output("keys: Tkeys")
    .Output("counts: int64")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      size_t num_tables;
      ShapeHandle words, splits;
      TF_RETURN_IF_ERROR(Size(c, "Tkeys", &num_tables));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &words));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
      for (size_t t = 0; t < num_tables; ++t) {
        c->set_output(static_cast<int>(t), c->Vector(c->UnknownDim()));
      }
      c->set_output(static_cast<int>(num_tables),
                    c->Matrix(static_cast<int64_t>(num_tables), c->Dim(splits, 0)));
      return absl::OkStatus();
    });

REGISTER_OP("DynembPackRows")
    .Input("rows: dtypes")
    .Input("counts: int64")
    .Output("words: int32")
    .Output("splits: int32")
    .Attr("dtypes: list({float, half, bfloat16, int32}) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("what: {'vectors', 'gradients', 'other'}")
    .Attr("rank: int >= 0")
    .Attr("names: list(string) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      size_t num_tables;
      DimensionHandle ranks;
      TF_RETURN_IF_ERROR(Size(c, "dtypes", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"names", "wire"}, num_tables));
      for (size_t t = 0; t < num_tables; ++t) {
        ShapeHandle rows;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(t)), 2, &rows));
      }
      TF_RETURN_IF_ERROR(
          Counts(c, static_cast<int>(num_tables), static_cast<int64_t>(num_tables), &ranks));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(ranks));
      return absl::OkStatus();
    });

REGISTER_OP("DynembUnpackRows")
    .Input("words: int32")
    .Input("counts: int64")
    .Output("rows: dtypes")
    .Attr("dtypes: list({float, half, bfloat16, int32}) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      size_t num_tables;
      ShapeHandle words;
      DimensionHandle ranks;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(Size(c, "dtypes", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dims", "wire"}, num_tables));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &words));
      TF_RETURN_IF_ERROR(Counts(c, 1, static_cast<int64_t>(num_tables), &ranks));
      for (size_t t = 0; t < num_tables; ++t) {
        if (dims[t] <= 0) {
          return absl::InvalidArgumentError("dims must be positive, got " +
                                            std::to_string(dims[t]));
        }
        c->set_output(static_cast<int>(t), c->Matrix(c->UnknownDim(), dims[t]));
      }
      return absl::OkStatus();
    });

// Inputs handles, owned_keys, owned_rows, asked and served are for the gradient.
REGISTER_OP("DynembPoolRows")
    .Input("handles: N * resource")
    .Input("vectors: dtypes")
    .Input("index: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("num_bags: N * int64")
    .Input("owned_keys: Tkeys")
    .Input("owned_rows: T * uint32")
    .Input("asked: int64")
    .Input("served: int64")
    .Output("outputs: dtypes")
    .Output("argmax: N * int32")
    .Attr("N: int >= 1")
    .Attr("T: int >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("dynamic: list(bool) >= 1")
    .Attr("in_order: bool")
    .SetShapeFn([](InferenceContext* c) {
      int n, t;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dtypes", "tables", "combiners"}, static_cast<size_t>(n)));
      TF_RETURN_IF_ERROR(
          HaveSize(c, {"Tkeys", "names", "wire", "dynamic"}, static_cast<size_t>(t)));
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      TF_RETURN_IF_ERROR(Scalars(c, 5 * n, n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle vectors, index;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 2, &vectors));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * n + i), 1, &index));
        const DimensionHandle dim = c->Dim(vectors, 1);
        DimensionHandle num_bags;
        TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(5 * n + i, &num_bags));
        TF_RETURN_IF_ERROR(BagsOfKeys(c, 2 * n + i, 3 * n + i, &num_bags));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, 4 * n + i, c->Dim(index, 0)));
        c->set_output(i, c->Matrix(num_bags, dim));
        c->set_output(n + i, c->Matrix(combiners[i] == "max" ? num_bags : c->MakeDim(0), dim));
      }
      for (int i = 0; i < t; ++i) {
        ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(6 * n + i), 1, &keys));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, 6 * n + t + i, c->Dim(keys, 0)));
      }
      DimensionHandle ranks;
      TF_RETURN_IF_ERROR(Counts(c, 6 * n + 2 * t, t, &ranks));
      return Counts(c, 6 * n + 2 * t + 1, t, &ranks);
    });

REGISTER_OP("DynembPoolRowsGrad")
    .Input("index: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("grads: dtypes")
    .Input("num_rows: T * int64")
    .Output("sums: T * float")
    .Attr("N: int >= 1")
    .Attr("T: int >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int n, t;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dtypes", "tables", "combiners"}, static_cast<size_t>(n)));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dims"}, static_cast<size_t>(t)));
      std::vector<int64_t> dims;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      for (int i = 0; i < n; ++i) {
        ShapeHandle index, grads;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &index));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(4 * n + i), 2, &grads));
        DimensionHandle num_bags = c->Dim(grads, 0);
        TF_RETURN_IF_ERROR(BagsOfKeys(c, i, n + i, &num_bags));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, 2 * n + i, c->Dim(index, 0)));
        if (combiners[i] == "max") {
          TF_RETURN_IF_ERROR(c->Merge(grads, c->input(3 * n + i), &grads));
        }
      }
      TF_RETURN_IF_ERROR(Scalars(c, 5 * n, t));
      for (int i = 0; i < t; ++i) {
        DimensionHandle rows;
        TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(5 * n + i, &rows));
        c->set_output(i, c->Matrix(rows, dims[i]));
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembPoolRowsWeightGrad")
    .Input("vectors: dtypes")
    .Input("index: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("outputs: dtypes")
    .Input("grads: dtypes")
    .Output("weight_grads: N * float")
    .Attr("N: int >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dtypes", "combiners"}, static_cast<size_t>(n)));
      for (int i = 0; i < n; ++i) {
        ShapeHandle vectors, weights, grads, unused;
        DimensionHandle dim;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 2, &vectors));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &weights));
        TF_RETURN_IF_ERROR(c->Merge(weights, c->input(3 * n + i), &weights));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(6 * n + i), 2, &grads));
        TF_RETURN_IF_ERROR(c->Merge(grads, c->input(5 * n + i), &grads));
        TF_RETURN_IF_ERROR(c->Merge(c->Dim(vectors, 1), c->Dim(grads, 1), &dim));
        DimensionHandle num_bags = c->Dim(grads, 0);
        TF_RETURN_IF_ERROR(BagsOfKeys(c, n + i, 2 * n + i, &num_bags));
        c->set_output(i, weights);
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembOwners")
    .Input("keys: key_type")
    .Output("owners: int32")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("num_ranks: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

REGISTER_OP("DynembExchangeStats")
    .Output("names: string")
    .Output("values: int64")
    .Attr("table: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
