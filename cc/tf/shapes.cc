#include "cc/tf/shapes.h"

namespace dynemb {

DimensionHandle TableDim(InferenceContext* c, int index) {
  const auto* carried = c->input_handle_shapes_and_types(index);
  if (carried == nullptr || carried->empty()) return c->UnknownDim();
  const ShapeHandle shape = (*carried)[0].shape;
  if (!c->RankKnown(shape) || c->Rank(shape) != 2) return c->UnknownDim();
  return c->Dim(shape, 1);
}

absl::Status HasDim(InferenceContext* c, int index, DimensionHandle dim) {
  DimensionHandle unused;
  return c->Merge(dim, TableDim(c, index), &unused);
}

absl::Status VectorOrEmpty(InferenceContext* c, int index, DimensionHandle size) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 1, &vector));
  const DimensionHandle have = c->Dim(vector, 0);
  if (!c->ValueKnown(have) || c->Value(have) == 0) return absl::OkStatus();
  DimensionHandle unused;
  return c->Merge(have, size, &unused);
}

absl::Status BagsOfKeys(InferenceContext* c, int keys, int bags, DimensionHandle* num_bags) {
  const ShapeHandle shape = c->input(bags);
  ShapeHandle unused_shape;
  TF_RETURN_IF_ERROR(c->WithRankAtMost(shape, 2, &unused_shape));
  if (!c->RankKnown(shape)) return absl::OkStatus();
  DimensionHandle unused;
  if (c->Rank(shape) == 2) return c->Merge(c->Dim(shape, 0), c->Dim(c->input(keys), 0), &unused);
  if (c->Rank(shape) == 0) return absl::OkStatus();
  DimensionHandle from_splits;
  TF_RETURN_IF_ERROR(c->Subtract(c->Dim(shape, 0), 1, &from_splits));
  return c->Merge(*num_bags, from_splits, num_bags);
}

absl::Status GradientOfBags(InferenceContext* c, int first, int n, int i,
                            const std::string& combiner) {
  const auto at = [&](int list) { return first + list * n + i; };
  ShapeHandle keys, rows, grads, argmax;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(at(0)), 1, &keys));
  TF_RETURN_IF_ERROR(c->Merge(keys, c->input(at(1)), &rows));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(at(5)), 2, &grads));
  DimensionHandle num_bags = c->Dim(grads, 0);
  TF_RETURN_IF_ERROR(BagsOfKeys(c, at(0), at(2), &num_bags));
  TF_RETURN_IF_ERROR(VectorOrEmpty(c, at(3), c->Dim(keys, 0)));
  if (combiner != "max") return absl::OkStatus();
  return c->Merge(grads, c->input(at(4)), &argmax);
}

absl::Status Scalar(InferenceContext* c, int index) {
  ShapeHandle unused;
  return c->WithRank(c->input(index), 0, &unused);
}

absl::Status Scalars(InferenceContext* c, int begin, int n) {
  for (int i = begin; i < begin + n; ++i) TF_RETURN_IF_ERROR(Scalar(c, i));
  return absl::OkStatus();
}

absl::Status VectorsOfKeys(InferenceContext* c, int keys, int values, DimensionHandle* dim) {
  ShapeHandle vectors;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(values), 1, &vectors));
  *dim = c->Dim(vectors, -1);
  ShapeHandle leading;
  TF_RETURN_IF_ERROR(c->Subshape(vectors, 0, -1, &leading));
  ShapeHandle unused;
  return c->Merge(c->input(keys), leading, &unused);
}

absl::Status NewTable(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  int64_t dim;
  tf::DataType dtype;
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
  TF_RETURN_IF_ERROR(c->GetAttr("dtype", &dtype));
  if (dim <= 0) {
    return absl::InvalidArgumentError("dim=" + std::to_string(dim) + ": must be positive");
  }
  using tf::shape_inference::ShapeAndType;
  c->set_output_handle_shapes_and_types(
      0, std::vector<ShapeAndType>{{c->Matrix(c->UnknownDim(), dim), dtype}});
  return absl::OkStatus();
}

absl::Status TableAndKeys(InferenceContext* c) { return Scalar(c, 0); }

absl::Status TableKeysAndVectors(InferenceContext* c) {
  DimensionHandle dim;
  TF_RETURN_IF_ERROR(Scalar(c, 0));
  TF_RETURN_IF_ERROR(VectorsOfKeys(c, 1, 2, &dim));
  return HasDim(c, 0, dim);
}

absl::Status AttrSize(InferenceContext* c, const char* attr, size_t* size) {
  const tf::AttrValue* value = c->GetAttr(attr);
  if (value == nullptr) return absl::InvalidArgumentError(std::string("no attribute ") + attr);
  const auto& list = value->list();
  *size = static_cast<size_t>(list.i_size() + list.type_size() + list.s_size() + list.b_size());
  return absl::OkStatus();
}

absl::Status HaveSize(InferenceContext* c, const std::vector<const char*>& attrs, size_t size) {
  for (const char* attr : attrs) {
    size_t have;
    TF_RETURN_IF_ERROR(AttrSize(c, attr, &have));
    if (have != size) {
      return absl::InvalidArgumentError(std::string(attr) + " must have " + std::to_string(size) +
                                        " entries, got " + std::to_string(have));
    }
  }
  return absl::OkStatus();
}

absl::Status CountsOfRanks(InferenceContext* c, int index, int64_t tables, DimensionHandle* ranks) {
  ShapeHandle counts;
  DimensionHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(index), 2, &counts));
  TF_RETURN_IF_ERROR(c->WithValue(c->Dim(counts, 0), tables, &unused));
  *ranks = c->Dim(counts, 1);
  return absl::OkStatus();
}

}  // namespace dynemb
