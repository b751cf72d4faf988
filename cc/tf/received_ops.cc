// Operators on rows that other ranks have sent. See docs/operators.md and docs/design.md, "Many
// ranks".
#include <string>
#include <vector>

#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

// Checks the inputs that contain received rows, as for DynembUnpackRows: input `words`, a matrix
// for each table after it, and the counts received and sent, [tables, ranks], at `counts`.
absl::Status ReceivedRows(InferenceContext* c, int words, int num_tables, int counts) {
  ShapeHandle unused;
  DimensionHandle ranks, same;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(words), 1, &unused));
  for (int t = 0; t < num_tables; ++t) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(words + 1 + t), 2, &unused));
  }
  TF_RETURN_IF_ERROR(CountsOfRanks(c, counts, num_tables, &ranks));
  TF_RETURN_IF_ERROR(CountsOfRanks(c, counts + 1, num_tables, &same));
  return c->Merge(ranks, same, &ranks);
}

// Gets attribute `tables`. Fails unless it is n numbers below `num_tables`.
absl::Status TableNumbers(InferenceContext* c, int n, int num_tables,
                          std::vector<int64_t>* tables) {
  TF_RETURN_IF_ERROR(c->GetAttr("tables", tables));
  for (int64_t table : *tables) {
    if (table < 0 || table >= num_tables) {
      return absl::InvalidArgumentError("tables must be in [0, " + std::to_string(num_tables) +
                                        "), got " + std::to_string(table));
    }
  }
  return HaveSize(c, {"tables"}, static_cast<size_t>(n));
}

// Inputs handles, owned_keys, owned_rows, asked and served are for the gradient.
REGISTER_OP("DynembPoolRows")
    .Input("handles: N * resource")
    .Input("words: int32")
    .Input("held: row_dtypes")
    .Input("index: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("num_bags: N * int64")
    .Input("owned_keys: Tkeys")
    .Input("owned_rows: T * uint32")
    .Input("received: int64")
    .Input("sent: int64")
    .Input("asked: int64")
    .Input("served: int64")
    .Output("outputs: dtypes")
    .Output("argmax: N * int32")
    .Attr("N: int >= 1")
    .Attr("T: int >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("row_dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("rank: int >= 0")
    .Attr("dynamic: list(bool) >= 1")
    .Attr("in_order: bool")
    .SetShapeFn([](InferenceContext* c) {
      int n, t;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dtypes", "combiners"}, static_cast<size_t>(n)));
      TF_RETURN_IF_ERROR(
          HaveSize(c, {"Tkeys", "row_dtypes", "names", "wire", "dynamic"}, static_cast<size_t>(t)));
      std::vector<std::string> combiners;
      std::vector<int64_t> tables;
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      TF_RETURN_IF_ERROR(TableNumbers(c, n, t, &tables));
      const int held = n + 1, index_at = held + t, owned = index_at + 4 * n, counts = owned + 2 * t;
      TF_RETURN_IF_ERROR(Scalars(c, 0, n));
      TF_RETURN_IF_ERROR(ReceivedRows(c, n, t, counts));
      TF_RETURN_IF_ERROR(Scalars(c, index_at + 3 * n, n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle index;
        const int at = index_at + i;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(at), 1, &index));
        const DimensionHandle dim = c->Dim(c->input(held + static_cast<int>(tables[i])), 1);
        DimensionHandle num_bags;
        TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(at + 3 * n, &num_bags));
        TF_RETURN_IF_ERROR(BagsOfKeys(c, at, at + n, &num_bags));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, at + 2 * n, c->Dim(index, 0)));
        c->set_output(i, c->Matrix(num_bags, dim));
        c->set_output(n + i, c->Matrix(combiners[i] == "max" ? num_bags : c->MakeDim(0), dim));
      }
      for (int i = 0; i < t; ++i) {
        ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(owned + i), 1, &keys));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, owned + t + i, c->Dim(keys, 0)));
      }
      DimensionHandle ranks;
      TF_RETURN_IF_ERROR(CountsOfRanks(c, counts + 2, t, &ranks));
      return CountsOfRanks(c, counts + 3, t, &ranks);
    });

// Input `counts` is the number of rows of each table's request that each rank holds.
REGISTER_OP("DynembPoolRowsGrad")
    .Input("index: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("grads: dtypes")
    .Input("counts: int64")
    .Output("words: int32")
    .Output("splits: int32")
    .Output("own: T * float")
    .Attr("N: int >= 1")
    .Attr("T: int >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      int n, t;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dtypes", "combiners"}, static_cast<size_t>(n)));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dims", "wire", "names"}, static_cast<size_t>(t)));
      std::vector<int64_t> dims, tables;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      TF_RETURN_IF_ERROR(TableNumbers(c, n, t, &tables));
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
      DimensionHandle ranks;
      TF_RETURN_IF_ERROR(CountsOfRanks(c, 5 * n, t, &ranks));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(ranks));
      for (int i = 0; i < t; ++i) {
        if (dims[i] <= 0) {
          return absl::InvalidArgumentError("dims must be positive, got " +
                                            std::to_string(dims[i]));
        }
        c->set_output(2 + i, c->Matrix(c->UnknownDim(), dims[i]));
      }
      return absl::OkStatus();
    });

// Input `own` holds the rows that this rank sends to itself, which are in no message.
REGISTER_OP("DynembSumReceived")
    .Input("keys: Tkeys")
    .Input("rows: T * uint32")
    .Input("words: int32")
    .Input("own: T * float")
    .Input("counts: int64")
    .Output("unique_keys: Tkeys")
    .Output("sums: T * float")
    .Output("unique_rows: T * uint32")
    .Attr("T: int >= 1")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      int t;
      ShapeHandle words;
      DimensionHandle ranks;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &t));
      TF_RETURN_IF_ERROR(HaveSize(c, {"Tkeys", "wire"}, static_cast<size_t>(t)));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * t), 1, &words));
      TF_RETURN_IF_ERROR(CountsOfRanks(c, 3 * t + 1, t, &ranks));
      for (int i = 0; i < t; ++i) {
        ShapeHandle keys, own;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &keys));
        TF_RETURN_IF_ERROR(VectorOrEmpty(c, t + i, c->Dim(keys, 0)));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * t + 1 + i), 2, &own));
        c->set_output(i, c->Vector(c->UnknownDim()));
        c->set_output(t + i, c->Matrix(c->UnknownDim(), c->Dim(own, 1)));
        c->set_output(2 * t + i, c->Vector(c->UnknownDim()));
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembPoolRowsWeightGrad")
    .Input("words: int32")
    .Input("held: row_dtypes")
    .Input("index: N * uint32")
    .Input("bags: N * int64")
    .Input("weights: N * float")
    .Input("argmax: N * int32")
    .Input("outputs: dtypes")
    .Input("grads: dtypes")
    .Input("received: int64")
    .Input("sent: int64")
    .Output("weight_grads: N * float")
    .Attr("N: int >= 1")
    .Attr("dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("row_dtypes: list({float, half, bfloat16}) >= 1")
    .Attr("tables: list(int) >= 1")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'max'}) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      int n;
      size_t num_tables;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dtypes", "combiners"}, static_cast<size_t>(n)));
      TF_RETURN_IF_ERROR(AttrSize(c, "row_dtypes", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"wire"}, num_tables));
      const int t = static_cast<int>(num_tables), first = 1 + t;
      std::vector<int64_t> tables;
      TF_RETURN_IF_ERROR(TableNumbers(c, n, t, &tables));
      TF_RETURN_IF_ERROR(ReceivedRows(c, 0, t, first + 6 * n));
      for (int i = 0; i < n; ++i) {
        ShapeHandle weights, grads;
        DimensionHandle dim = c->Dim(c->input(1 + static_cast<int>(tables[i])), 1);
        const int at = first + i;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(at), 1, &weights));
        TF_RETURN_IF_ERROR(c->Merge(weights, c->input(at + 2 * n), &weights));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(at + 5 * n), 2, &grads));
        TF_RETURN_IF_ERROR(c->Merge(grads, c->input(at + 4 * n), &grads));
        TF_RETURN_IF_ERROR(c->Merge(dim, c->Dim(grads, 1), &dim));
        DimensionHandle num_bags = c->Dim(grads, 0);
        TF_RETURN_IF_ERROR(BagsOfKeys(c, at, at + n, &num_bags));
        c->set_output(i, weights);
      }
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
