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

// Fails if the table that input `index` names is known to have vectors of another width.
absl::Status HasDim(InferenceContext* c, int index, DimensionHandle dim);
// Fails unless input `index` is a vector of `size` elements, or of 0 elements if it is left out.
absl::Status VectorOrEmpty(InferenceContext* c, int index, DimensionHandle size);
// Checks input `bags`, which describes the bags of the ids in input `keys` (docs/operators.md).
// Merges the number of bags with `num_bags`.
absl::Status BagsOfKeys(InferenceContext* c, int keys, int bags, DimensionHandle* num_bags);

// Checks the inputs of the gradient of the pooled vectors of lookup i of n. The lists of n inputs
// from input `first` on are keys, rows, bags, weights, argmax and grads.
absl::Status GradientOfBags(InferenceContext* c, int first, int n, int i,
                            const std::string& combiner);

// Fails unless input `index` is a scalar.
absl::Status Scalar(InferenceContext* c, int index);
// Fails unless inputs [begin, begin + n) are scalars.
absl::Status Scalars(InferenceContext* c, int begin, int n);
// Sets `dim` to the width of the vectors in input `values`, which has one for every key in input
// `keys`. Fails if their shapes do not agree.
absl::Status VectorsOfKeys(InferenceContext* c, int keys, int values, DimensionHandle* dim);

// Gets the length of a list attribute.
absl::Status AttrSize(InferenceContext* c, const char* attr, size_t* size);
// Fails unless these list attributes have this length.
absl::Status HaveSize(InferenceContext* c, const std::vector<const char*>& attrs, size_t size);
// Fails unless input `index` is [tables, ranks]. Sets `ranks`.
absl::Status CountsOfRanks(InferenceContext* c, int index, int64_t tables, DimensionHandle* ranks);

// A shape function for operators whose output is the handle of a table with the attributes `dim`
// and `dtype`.
absl::Status NewTable(InferenceContext* c);
// A shape function for operators whose inputs are a table handle and keys of any shape.
absl::Status TableAndKeys(InferenceContext* c);
// The same with vectors: inputs are a table handle, keys, and a vector of the table's width per
// key.
absl::Status TableKeysAndVectors(InferenceContext* c);

}  // namespace dynemb

#endif  // DYNEMB_TF_SHAPES_H_
