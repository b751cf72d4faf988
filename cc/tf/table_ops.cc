// Operators that create, read and write one table. docs/operators.md is the contract.
#include "cc/tf/shapes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace dynemb {
namespace {

REGISTER_OP("DynembTable")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("key_dtype: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .Attr("dim: int")
    .Attr("init_capacity: int = 1024")
    .Attr("max_capacity: int = 0")
    .Attr("max_load_factor: float = 0.88")
    .Attr("evict_strategy: {'lru', 'lfu', 'epoch_lru', 'epoch_lfu', 'score', 'none'} = 'lru'")
    .Attr("epoch_steps: int = 0")
    .Attr("ttl: int = 0")
    .Attr("ttl_clock: {'steps', 'wall', 'data'} = 'steps'")
    .Attr("ttl_since: {'update', 'access'} = 'update'")
    .Attr("ttl_min_rows: int = 0")
    .Attr("admission: {'all', 'frequency', 'probability'} = 'all'")
    .Attr("unadmitted: {'zeros', 'initial', 'skip'} = 'zeros'")
    .Attr("admission_times: int = 0")
    .Attr("admission_probability: float = 1.0")
    .Attr("admission_lines: int = 0")
    .Attr("admission_first_line: int = 0")
    .Attr("admission_num_lines: int = 0")
    .Attr("tier: {'host', 'hbm', 'hybrid'} = 'host'")
    .Attr("max_hbm_bytes: int = 0")
    .Attr("file_path: string = ''")
    .Attr("max_dram_bytes: int = 0")
    .Attr("seed: int = 0")
    .Attr("stochastic_rounding: bool = true")
    .Attr("initializers: list({'constant', 'uniform', 'normal', 'truncated_normal'}) >= 1")
    .Attr("initializer_args: list(float) >= 2")
    .SetIsStateful()
    .SetShapeFn(NewTable);

REGISTER_OP("DynembAttachState")
    .Input("handle: resource")
    .Output("was_reset: bool")
    .Attr("optimizer: string")
    .Attr("widths: list(int)")
    .Attr("inits: list(float)")
    .Attr("owner: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembUpsert")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("values: dtype")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn(TableKeysAndVectors);

REGISTER_OP("DynembAccumulate")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("deltas: dtype")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn(TableKeysAndVectors);

REGISTER_OP("DynembReadRows")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Output("values: float")
    .Output("state: float")
    .Output("found: bool")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("optimizer: string = ''")
    .Attr("widths: list(int) = []")
    .Attr("inits: list(float) = []")
    .Attr("owner: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      const DimensionHandle n = c->Dim(keys, 0);
      c->set_output(0, c->Matrix(n, TableDim(c, 0)));
      c->set_output(1, c->Matrix(n, c->UnknownDim()));
      c->set_output(2, keys);
      return absl::OkStatus();
    });

REGISTER_OP("DynembWriteRows")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("values: float")
    .Input("state: float")
    .Input("step: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("insert: bool")
    .Attr("what: {'step', 'constraint'} = 'step'")
    .Attr("optimizer: string = ''")
    .Attr("widths: list(int) = []")
    .Attr("inits: list(float) = []")
    .Attr("owner: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys, matrix;
      DimensionHandle n;
      TF_RETURN_IF_ERROR(TableKeysAndVectors(c));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      TF_RETURN_IF_ERROR(Scalar(c, 4));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &matrix));
      return c->Merge(c->Dim(matrix, 0), c->Dim(keys, 0), &n);
    });

REGISTER_OP("DynembErase")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Output("erased: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("wipe: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembInsertAndEvict")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Output("evicted_keys: key_type")
    .Output("evicted_values: dtype")
    .Output("evicted_state: float")
    .Output("evicted_scores: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      const DimensionHandle evicted = c->UnknownDim();
      c->set_output(0, c->Vector(evicted));
      c->set_output(1, c->Matrix(evicted, TableDim(c, 0)));
      c->set_output(2, c->Matrix(evicted, c->UnknownDim()));
      c->set_output(3, c->Vector(evicted));
      return absl::OkStatus();
    });

REGISTER_OP("DynembScores")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Output("scores: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("DynembSetScores")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("scores: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      return c->Merge(c->input(1), c->input(2), &unused);
    });

REGISTER_OP("DynembExplain")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Output("tiers: int32")
    .Output("updates: int64")
    .Output("update_times: int64")
    .Output("scores: int64")
    .Output("access_times: int64")
    .Output("losses: int32")
    .Output("loss_times: int64")
    .Output("admission_counts: int32")
    .Attr("key_type: {int64, int32, uint64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      for (int i = 0; i < 8; ++i) c->set_output(i, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("DynembAddCounts")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Input("counts: int32")
    .Attr("key_type: {int64, int32, uint64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      return c->Merge(c->input(1), c->input(2), &unused);
    });

REGISTER_OP("DynembLoadAdmission")
    .Input("handle: resource")
    .Input("lines: uint64")
    .Input("first_line: int64")
    .Attr("merge: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle lines;
      DimensionHandle words;
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      TF_RETURN_IF_ERROR(Scalar(c, 2));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &lines));
      return c->WithValue(c->Dim(lines, 1), 8, &words);
    });

REGISTER_OP("DynembAdvanceEpoch")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalar(c, 0); });

REGISTER_OP("DynembContains")
    .Input("handle: resource")
    .Input("keys: key_type")
    .Output("found: bool")
    .Attr("key_type: {int64, int32, uint64}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(TableAndKeys(c));
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("DynembSize")
    .Input("handle: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembClear")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalar(c, 0); });

REGISTER_OP("DynembExport")
    .Input("handle: resource")
    .Input("cursor: int64")
    .Input("limit: int64")
    .Input("since: int64")
    .Output("keys: key_type")
    .Output("values: dtype")
    .Output("state: float")
    .Output("updates: int64")
    .Output("next_cursor: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 4));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, TableDim(c, 0)));
      c->set_output(2, c->Matrix(n, c->UnknownDim()));
      c->set_output(3, c->Vector(n));
      c->set_output(4, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembExportIf")
    .Input("handle: resource")
    .Input("cursor: int64")
    .Input("limit: int64")
    .Input("ranges: int64")
    .Input("norms: double")
    .Output("keys: key_type")
    .Output("values: dtype")
    .Output("state: float")
    .Output("updates: int64")
    .Output("scores: int64")
    .Output("next_cursor: int64")
    .Attr("key_type: {int64, int32, uint64}")
    .Attr("dtype: {float, half, bfloat16}")
    .Attr("keys_only: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(Scalars(c, 0, 3));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 1, &unused));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(c->UnknownDim(), TableDim(c, 0)));
      c->set_output(2, c->Matrix(c->UnknownDim(), c->UnknownDim()));
      c->set_output(3, c->Vector(c->UnknownDim()));
      c->set_output(4, c->Vector(c->UnknownDim()));
      c->set_output(5, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembEvict")
    .Input("handle: resource")
    .Input("to_rows: int64")
    .Output("evicted: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalars(c, 0, 2));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembExpire")
    .Input("handle: resource")
    .Output("expired: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("DynembSetDataTime")
    .Input("handle: resource")
    .Input("time: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return Scalars(c, 0, 2); });

REGISTER_OP("DynembStats")
    .Input("handle: resource")
    .Output("names: string")
    .Output("values: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Scalar(c, 0));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Vector(n));
      return absl::OkStatus();
    });

}  // namespace
}  // namespace dynemb
