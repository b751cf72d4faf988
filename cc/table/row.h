// RowLayout: what a row holds and where.
//
//   offset 0   key_size     vector_offset       state_offset            stride
//          ┌─────┬─────────────┬──────────────────┬─────────────────────┐
//          │ key │ last update │ vector dim×dtype │ state: floats       │
//          │ 8/4 │  Stamp u32  │                  │ state_width×float32 │
//          └─────┴─────────────┴──────────────────┴─────────────────────┘
//
// Everything is 4-byte aligned (a 16-bit vector of odd dim is padded before the state), nothing
// more, so rows waste at most two bytes.
#ifndef DYNEMB_TABLE_ROW_H_
#define DYNEMB_TABLE_ROW_H_

#include <cstdint>

#include "cc/table/types.h"

namespace dynemb {

struct RowLayout {
  RowLayout() = default;
  RowLayout(size_t key_bytes, DType vector_dtype, int64_t vector_dim, int64_t state_floats)
      : dtype(vector_dtype), dim(vector_dim), state_width(state_floats), key_size(key_bytes) {
    vector_offset = key_size + sizeof(Stamp);
    state_offset = vector_offset + (static_cast<size_t>(dim) * SizeOf(dtype) + 3) / 4 * 4;
    stride = state_offset + static_cast<size_t>(state_width) * sizeof(float);
  }

  size_t vector_bytes() const { return static_cast<size_t>(dim) * SizeOf(dtype); }
  size_t state_bytes() const { return static_cast<size_t>(state_width) * sizeof(float); }

  Stamp* update(char* row) const { return reinterpret_cast<Stamp*>(row + key_size); }
  const Stamp* update(const char* row) const {
    return reinterpret_cast<const Stamp*>(row + key_size);
  }
  char* vector(char* row) const { return row + vector_offset; }
  const char* vector(const char* row) const { return row + vector_offset; }
  float* state(char* row) const { return reinterpret_cast<float*>(row + state_offset); }
  const float* state(const char* row) const {
    return reinterpret_cast<const float*>(row + state_offset);
  }

  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  int64_t state_width = 0;
  size_t key_size = 8;
  size_t vector_offset = 0;
  size_t state_offset = 0;
  size_t stride = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_H_
