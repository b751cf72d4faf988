// VectorFormat: how a vector is stored in a snapshot. A trained table has rows of its dtype; a copy
// for serving can have smaller ones (docs/file_format.md; tf_dynemb/format/vector_format.py writes
// them).
//
//   format             bytes of a row         value of column c
//   float32            4 dim                  that number
//   float16, bfloat16  2 dim                  that number
//   int8               dim + 2                q[c] * scale
//                      q int8 [dim], scale float16
//   int4               ceil(dim / 2) + 4      q[c] * scale + bias
//                      q: 4 bits each, from 0 to 15, an even column in the lower half of its byte;
//                      scale float16, bias float16
//
// Contract. `row` has any alignment. The products and sums of values are those of float32 without
// any rounding, except that int4's sum is rounded once, so that each reader gets the same bits,
// whatever instructions it uses.
#ifndef DYNEMB_TABLE_VECTOR_FORMAT_H_
#define DYNEMB_TABLE_VECTOR_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/codec.h"
#include "cc/table/half.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"
#include "cc/table/unaligned.h"

namespace dynemb {

enum class VectorFormat : uint8_t { kFloat32, kFloat16, kBfloat16, kInt8, kInt4 };

// The format of the rows of a trained table.
constexpr VectorFormat FormatOf(DType type) {
  return type == DType::kFloat32   ? VectorFormat::kFloat32
         : type == DType::kFloat16 ? VectorFormat::kFloat16
                                   : VectorFormat::kBfloat16;
}

// The number of elements in a row, and the bytes of one, as numpy.load finds them in a file.
constexpr int64_t ElementsOf(VectorFormat format, int64_t dim) {
  return format == VectorFormat::kInt8   ? dim + 2
         : format == VectorFormat::kInt4 ? (dim + 1) / 2 + 4
                                         : dim;
}
constexpr size_t ElementBytes(VectorFormat format) {
  return format == VectorFormat::kFloat32 ? 4 : format <= VectorFormat::kBfloat16 ? 2 : 1;
}
constexpr size_t StoredBytes(VectorFormat format, int64_t dim) {
  return static_cast<size_t>(ElementsOf(format, dim)) * ElementBytes(format);
}

namespace internal_vector_format {
DYNEMB_INLINE float LoadScale(const char* at) {
  return HalfFormat<DType::kFloat16>::ToFloat(LoadUnaligned<uint16_t>(at));
}

DYNEMB_INLINE void LoadInt8(const char* DYNEMB_RESTRICT row, int64_t dim,
                            float* DYNEMB_RESTRICT vector) {
  const auto* const q = reinterpret_cast<const int8_t*>(row);
  const float scale = LoadScale(row + dim);
  for (int64_t c = 0; c < dim; ++c) vector[c] = static_cast<float>(q[c]) * scale;
}

DYNEMB_INLINE void LoadInt4(const char* DYNEMB_RESTRICT row, int64_t dim,
                            float* DYNEMB_RESTRICT vector) {
  const auto* const q = reinterpret_cast<const uint8_t*>(row);
  const char* const after = row + (dim + 1) / 2;
  const float scale = LoadScale(after), bias = LoadScale(after + 2);
  for (int64_t i = 0; i < dim / 2; ++i) {
    vector[2 * i] = static_cast<float>(q[i] & 15) * scale + bias;
    vector[2 * i + 1] = static_cast<float>(q[i] >> 4) * scale + bias;
  }
  if (dim % 2 != 0) vector[dim - 1] = static_cast<float>(q[dim / 2] & 15) * scale + bias;
}
}  // namespace internal_vector_format

// `vector` is out [dim]; it does not overlap the row.
DYNEMB_INLINE void LoadStored(VectorFormat format, const char* row, int64_t dim, float* vector) {
  switch (format) {
    case VectorFormat::kFloat32:
      return LoadVector(DType::kFloat32, row, dim, vector);
    case VectorFormat::kFloat16:
      return LoadVector(DType::kFloat16, row, dim, vector);
    case VectorFormat::kBfloat16:
      return LoadVector(DType::kBfloat16, row, dim, vector);
    case VectorFormat::kInt8:
      return internal_vector_format::LoadInt8(row, dim, vector);
    case VectorFormat::kInt4:
      return internal_vector_format::LoadInt4(row, dim, vector);
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_VECTOR_FORMAT_H_
