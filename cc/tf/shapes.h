// Shape inference shared by the operators of this library.
#ifndef DYNEMB_TF_SHAPES_H_
#define DYNEMB_TF_SHAPES_H_

#include <string>
#include <vector>

#include "tensorflow/core/framework/shape_inference.h"

namespace dynemb {

namespace tf = tensorflow;
using tf::shape_inference::DimensionHandle;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

// The vector width of the table that input `index` names, if its handle carries it; unknown
// otherwise.
DimensionHandle TableDim(InferenceContext* c, int index);

// The table that input `index` names has vectors of this width, as far as is known.
absl::Status HasDim(InferenceContext* c, int index, DimensionHandle dim);
// Input `index` may have 0 elements, or as many as `size`: it is a vector that may be left out.
absl::Status VectorOrEmpty(InferenceContext* c, int index, DimensionHandle size);
// Input `bags` describes bags of the ids of input `keys` (docs/design.md); merges their number with
// `num_bags`.
absl::Status BagsOfKeys(InferenceContext* c, int keys, int bags, DimensionHandle* num_bags);

// Input `index` is a scalar.
absl::Status Scalar(InferenceContext* c, int index);
// Inputs [begin, begin + n) are scalars.
absl::Status Scalars(InferenceContext* c, int begin, int n);
// The vector that input `values` holds for every key of input `keys` has this width; also checks
// that their shapes agree.
absl::Status VectorsOfKeys(InferenceContext* c, int keys, int values, DimensionHandle* dim);

// The length of a list attribute.
absl::Status AttrSize(InferenceContext* c, const char* attr, size_t* size);
// These list attributes are of this length.
absl::Status HaveSize(InferenceContext* c, const std::vector<const char*>& attrs, size_t size);
// Input `index` is [tables, ranks].
absl::Status CountsOfRanks(InferenceContext* c, int index, int64_t tables, DimensionHandle* ranks);

// A shape function for operators whose inputs are a table handle and keys of any shape.
absl::Status TableAndKeys(InferenceContext* c);

}  // namespace dynemb

#endif  // DYNEMB_TF_SHAPES_H_
