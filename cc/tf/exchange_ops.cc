// Operators around the exchange between ranks. See docs/operators.md and docs/design.md, "Many
// ranks".
#include <string>
#include <vector>

#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

// Registered as stateful, although it has no state: otherwise TensorFlow would fold it for constant
// ids, and with it the collective that sends its output.
REGISTER_OP("DynembRoute")
    .Input("keys: Tkeys")
    .Output("words: int32")
    .Output("splits: int32")
    .Output("own: int32")
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
      TF_RETURN_IF_ERROR(AttrSize(c, "owners", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"names"}, num_tables));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(ranks));
      c->set_output(2, c->Vector(c->UnknownDim()));
      c->set_output(3, c->Matrix(static_cast<int64_t>(num_tables), ranks));
      for (int i = 0; i < n; ++i) {
        ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &keys));
        c->set_output(4 + i, keys);
      }
      return absl::OkStatus();
    });

REGISTER_OP("DynembReceiveKeys")
    .Input("words: int32")
    .Input("splits: int32")
    .Input("own: int32")
    .Output("keys: Tkeys")
    .Output("counts: int64")
    .Attr("Tkeys: list({int64, int32, uint64}) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      size_t num_tables;
      ShapeHandle words, splits, own;
      TF_RETURN_IF_ERROR(AttrSize(c, "Tkeys", &num_tables));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &words));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &own));
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
      TF_RETURN_IF_ERROR(AttrSize(c, "dtypes", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"names", "wire"}, num_tables));
      for (size_t t = 0; t < num_tables; ++t) {
        ShapeHandle rows;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(t)), 2, &rows));
      }
      TF_RETURN_IF_ERROR(
          CountsOfRanks(c, static_cast<int>(num_tables), static_cast<int64_t>(num_tables), &ranks));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(ranks));
      return absl::OkStatus();
    });

// Input `own` holds the rows that this rank gave to DynembPackRows with the counts `sent`. The rows
// that it sends to itself are in no message: they are taken from `own`.
REGISTER_OP("DynembUnpackRows")
    .Input("words: int32")
    .Input("counts: int64")
    .Input("own: dtypes")
    .Input("sent: int64")
    .Output("rows: dtypes")
    .Attr("dtypes: list({float, half, bfloat16, int32}) >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("wire: list({'same', 'float16', 'bfloat16', 'int8'}) >= 1")
    .Attr("rank: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      size_t num_tables;
      ShapeHandle words;
      DimensionHandle ranks;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(AttrSize(c, "dtypes", &num_tables));
      TF_RETURN_IF_ERROR(HaveSize(c, {"dims", "wire"}, num_tables));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &words));
      TF_RETURN_IF_ERROR(CountsOfRanks(c, 1, static_cast<int64_t>(num_tables), &ranks));
      TF_RETURN_IF_ERROR(CountsOfRanks(c, 2 + static_cast<int>(num_tables),
                                       static_cast<int64_t>(num_tables), &ranks));
      for (size_t t = 0; t < num_tables; ++t) {
        if (dims[t] <= 0) {
          return absl::InvalidArgumentError("dims must be positive, got " +
                                            std::to_string(dims[t]));
        }
        ShapeHandle own;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 + static_cast<int>(t)), 2, &own));
        c->set_output(static_cast<int>(t), c->Matrix(c->UnknownDim(), dims[t]));
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
