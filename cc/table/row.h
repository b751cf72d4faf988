// RowLayout: the fields of a row, and their offsets.
//
//   offset 0   key_size     vector_offset       state_offset            bytes()   stride
//          ┌─────┬─────────────┬──────────────────┬─────────────────────┬─────────┐
//          │ key │ last update │ vector dim×dtype │ state: floats       │ padding │
//          │ 8/4 │  Stamp u32  │                  │ state_width×float32 │         │
//          └─────┴─────────────┴──────────────────┴─────────────────────┴─────────┘
//
// The vector and the state begin at multiples of `align` bytes. On the host this is 4. In device
// memory it is 16, the widest access of a GPU thread, and rows begin at multiples of it, too. On
// the host, rows begin at multiples of 8. With keys of 64 bits and float32, a dim that is a
// multiple of 4 gives them multiples of 16: of a row of dim 16, key and vector are then on two
// cache lines, never on three.
#ifndef DYNEMB_TABLE_ROW_H_
#define DYNEMB_TABLE_ROW_H_

#include <cstdint>

#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb {

struct RowLayout {
  RowLayout() = default;
  RowLayout(size_t key_bytes, DType vector_dtype, int64_t vector_dim, int64_t state_floats,
            size_t align = 4)
      : dtype(vector_dtype), dim(vector_dim), state_width(state_floats), key_size(key_bytes) {
    const auto aligned = [align](size_t n) { return (n + align - 1) / align * align; };
    vector_offset = aligned(key_size + sizeof(Stamp));
    state_offset = aligned(vector_offset + vector_bytes());
    content_size = aligned(state_offset + state_bytes()) - vector_offset;
    stride = (bytes() + 7) / 8 * 8;
  }

  DYNEMB_HD size_t vector_bytes() const { return static_cast<size_t>(dim) * SizeOf(dtype); }
  DYNEMB_HD size_t state_bytes() const { return static_cast<size_t>(state_width) * sizeof(float); }

  // The bytes of the vector and the state, from vector_offset on.
  DYNEMB_HD size_t content_bytes() const { return content_size; }
  // The bytes of a row, without the padding.
  DYNEMB_HD size_t bytes() const { return vector_offset + content_size; }

  DYNEMB_HD Stamp* update(char* row) const { return reinterpret_cast<Stamp*>(row + key_size); }
  DYNEMB_HD const Stamp* update(const char* row) const {
    return reinterpret_cast<const Stamp*>(row + key_size);
  }
  DYNEMB_HD char* vector(char* row) const { return row + vector_offset; }
  DYNEMB_HD const char* vector(const char* row) const { return row + vector_offset; }
  DYNEMB_HD float* state(char* row) const { return reinterpret_cast<float*>(row + state_offset); }
  DYNEMB_HD const float* state(const char* row) const {
    return reinterpret_cast<const float*>(row + state_offset);
  }

  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  int64_t state_width = 0;
  size_t key_size = 8;
  size_t vector_offset = 0;
  size_t state_offset = 0;
  size_t content_size = 0;
  size_t stride = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_H_
