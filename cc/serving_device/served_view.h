// The view that kernels have of a served table: its sources (cc/serving/row_source.h) in memory
// that they can access, the newest first. A source has
//
//   slots, keys         in device memory
//   rows [0, split)     in device memory: vectors, as files have them (vector_format.h)
//   rows [split, live)  in host memory
//
// Which slots and entries an index may have was checked on the host, so that each search ends.
#ifndef DYNEMB_SERVING_DEVICE_SERVED_VIEW_H_
#define DYNEMB_SERVING_DEVICE_SERVED_VIEW_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/flat_index.h"
#include "cc/device/row_math.h"
#include "cc/table/half.h"
#include "cc/table/hash.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"
#include "cc/table/vector_format.h"

namespace dynemb::device {

struct ServedSource {
  const uint32_t* slots = nullptr;  // [2^log_slots]: 0, or 1 + the position of a key
  KeyArray keys;                    // of rows, then of deleted keys
  const char* device_rows = nullptr;
  const char* host_rows = nullptr;  // the address of row `split`
  uint64_t split = 0;
  uint64_t live = 0;
  uint64_t salt = 0;
  uint32_t log_slots = 0;
  uint32_t row_bytes = 0;
  VectorFormat format = VectorFormat::kFloat32;

  DYNEMB_HD const char* RowAt(uint64_t i) const {
    return i < split ? device_rows + i * row_bytes : host_rows + (i - split) * row_bytes;
  }
};

// Where a key was found.
struct ServedRow {
  const char* vector = nullptr;  // null: the key has no row
  VectorFormat format = VectorFormat::kFloat32;
};

struct ServedView {
  const ServedSource* sources = nullptr;
  uint32_t num_sources = 0;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  // The vector of keys without a row: this one in the table's dtype, or if it is null zeros or the
  // initial vector.
  const char* default_vector = nullptr;
  bool absent_is_zero = false;
  RowId absent_row = kNoRow;  // kSkippedRow: their ids are absent from bags
  InitializerView initial{};
  uint64_t* hits = nullptr;  // keys that were looked up, with and without a row
  uint64_t* misses = nullptr;

  DYNEMB_HD size_t vector_bytes() const { return static_cast<size_t>(dim) * SizeOf(dtype); }

  DYNEMB_HD ServedRow Find(uint64_t key) const {
    for (uint32_t s = 0; s < num_sources; ++s) {
      const ServedSource& source = sources[s];
      const uint64_t mask = (uint64_t{1} << source.log_slots) - 1;
      for (uint64_t at = HashKey(key, source.salt) >> (64 - source.log_slots);;
           at = (at + 1) & mask) {
        const uint32_t entry = source.slots[at];
        if (entry == 0) break;
        const uint64_t position = uint64_t{entry} - 1;
        if (source.keys[position] != key) continue;
        if (position >= source.live) return {};  // deleted
        return {source.RowAt(position), source.format};
      }
    }
    return {};
  }
};

// Column c of a stored vector, with the bits of LoadStored. `row` has any alignment if the format
// is int8 or int4, otherwise that of its elements.
DYNEMB_HD DYNEMB_INLINE float StoredColumn(VectorFormat format, const char* row, int64_t dim,
                                           int64_t c) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(row);
  const auto scale_at = [bytes](int64_t at) {
    const auto half = static_cast<uint16_t>(bytes[at] | bytes[at + 1] << 8);
    return HalfFormat<DType::kFloat16>::ToFloat(half);
  };
  switch (format) {
    case VectorFormat::kFloat32:
      return reinterpret_cast<const float*>(row)[c];
    case VectorFormat::kFloat16:
      return HalfFormat<DType::kFloat16>::ToFloat(reinterpret_cast<const uint16_t*>(row)[c]);
    case VectorFormat::kBfloat16:
      return HalfFormat<DType::kBfloat16>::ToFloat(reinterpret_cast<const uint16_t*>(row)[c]);
    case VectorFormat::kInt8:
      return static_cast<float>(static_cast<int8_t>(bytes[c])) * scale_at(dim);
    case VectorFormat::kInt4: {
      const int64_t after = (dim + 1) / 2;
      const int q = c % 2 == 0 ? bytes[c / 2] & 15 : bytes[c / 2] >> 4;
      return static_cast<float>(q) * scale_at(after) + scale_at(after + 2);
    }
  }
  return 0.0f;
}

}  // namespace dynemb::device

#endif  // DYNEMB_SERVING_DEVICE_SERVED_VIEW_H_
