// Loads and stores the vector of a row as float32, whatever the row's element type.
//
// Contract. `row` is the packed vector, with any alignment. `vector` is an array of dim float32
// values. The two do not overlap.
//
// - float32 is copied bit by bit.
// - Rounding is defined in half.h.
// - The random bits of StoreVectorStochastic are words of Philox (philox.h), selected by (seed,
//   key, step, column). One step therefore writes the same row on any thread, rank or machine.
//   Callers get `step` from rounding.h.
// - No function allocates, blocks or fails.
#ifndef DYNEMB_TABLE_CODEC_H_
#define DYNEMB_TABLE_CODEC_H_

#include <cstdint>
#include <cstring>

#include "cc/table/types.h"

namespace dynemb {

namespace internal_codec {
inline void Copy(const void* from, int64_t dim, void* to) {
  // memcpy must not get a null pointer, not even for 0 bytes.
  if (dim > 0) std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
}
void LoadHalf(DType type, const void* row, int64_t dim, float* vector);
void StoreHalf(DType type, const float* vector, int64_t dim, void* row);
void StoreHalfStochastic(DType type, const float* vector, int64_t dim, void* row, uint64_t seed,
                         uint64_t key, uint64_t step);
}  // namespace internal_codec

inline void LoadVector(DType type, const void* row, int64_t dim, float* vector) {
  if (type == DType::kFloat32) {
    internal_codec::Copy(row, dim, vector);
  } else {
    internal_codec::LoadHalf(type, row, dim, vector);
  }
}

// Rounds to nearest, ties to even.
inline void StoreVector(DType type, const float* vector, int64_t dim, void* row) {
  if (type == DType::kFloat32) {
    internal_codec::Copy(vector, dim, row);
  } else {
    internal_codec::StoreHalf(type, vector, dim, row);
  }
}

// Rounds up or down at random, without bias, so that small updates to a 16-bit row are not lost but
// add up.
inline void StoreVectorStochastic(DType type, const float* vector, int64_t dim, void* row,
                                  uint64_t seed, uint64_t key, uint64_t step) {
  if (type == DType::kFloat32) {
    internal_codec::Copy(vector, dim, row);
  } else {
    internal_codec::StoreHalfStochastic(type, vector, dim, row, seed, key, step);
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CODEC_H_
