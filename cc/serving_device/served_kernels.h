// The kernels of served tables, and the source of their vectors for kernels that combine bags
// (cc/device/kernels_pool.h).
//
// FindServed looks up the ids of all tasks of a call. Each id gets a code and an address:
//
//   code                            address
//   kAsIs                           of a vector in the table's dtype: a row, or the default vector
//   1 + format                      of a row of another format
//   kNoRow, kUnadmittedRow          none: the initial vector of the key, or zeros
//   kSkippedRow                     none: the id is absent from its bag
//
// All results have the bits of ServedTable and ServedLookups, except for the bits of a NaN.
#ifndef DYNEMB_SERVING_DEVICE_SERVED_KERNELS_H_
#define DYNEMB_SERVING_DEVICE_SERVED_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/device.h"
#include "cc/device/kernels.h"
#include "cc/device/parts.h"
#include "cc/device/row_math.h"
#include "cc/lookup/combiner.h"
#include "cc/serving_device/served_view.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

constexpr uint32_t kAsIs = 0;

// The ids of a task.
struct ServedIds {
  ServedView table;
  KeyArray keys;
  RowId* rows = nullptr;  // out [n], or null: 0, or the table's absent_row
  bool* found = nullptr;  // out [n], or null: whether the key has a row
};

// For ForEach. Item i is an id; `codes` and `vectors` are [ids of all parts], or both null.
struct FindServed {
  Parts<ServedIds> parts;
  uint32_t* codes;
  const char** vectors;
  bool counts;  // whether stats() counts these ids

  DYNEMB_HD void operator()(size_t i) const {
    const uint32_t p = parts.IndexOf(i);
    const ServedIds& part = parts[p];
    const ServedView& table = part.table;
    const size_t position = i - parts.begin(p);
    const ServedRow at = table.Find(part.keys[position]);
    const bool has = at.vector != nullptr;
    if (part.rows != nullptr) part.rows[position] = has ? 0 : table.absent_row;
    if (part.found != nullptr) part.found[position] = has;
    if (codes != nullptr) {
      const bool as_is = has ? at.format == FormatOf(table.dtype)
                             : table.default_vector != nullptr && table.absent_row != kSkippedRow;
      codes[i] = as_is ? kAsIs : has ? 1 + static_cast<uint32_t>(at.format) : table.absent_row;
      vectors[i] = has ? at.vector : table.default_vector;
    }
    if (!counts) return;
    AtomicAddTogether(table.hits, has ? 1 : 0);
    AtomicAddTogether(table.misses, has ? 0 : 1);
  }
};

// The vectors of ids that FindServed has found: a source of vectors (vector_sources.h).
struct ServedVectors {
  // As for TableVectors, with which they were measured.
  static constexpr uint32_t kInFlight = 8;
  static constexpr unsigned int kLeastBlocks = 10;
  struct Part {
    ServedView table;
    KeyArray keys;
    uint32_t first_id = 0;
    bool some_absent = false;  // whether ids may be absent from their bags
    bool whole = false;        // whether all vectors that are used as they are, are whole
  };
  const uint32_t* codes;
  const char* const* vectors;
  // Whether the columns of rows of other formats are rounded to the table's dtype.
  bool rounds;

  class Vectors {
   public:
    DYNEMB_HD DYNEMB_INLINE Vectors(const ServedVectors& source, const Part& part)
        : codes_(source.codes + part.first_id),
          vectors_(source.vectors + part.first_id),
          rounds_(source.rounds),
          part_(part) {}

    DYNEMB_HD DYNEMB_INLINE DType dtype() const { return part_.table.dtype; }
    DYNEMB_HD DYNEMB_INLINE int64_t dim() const { return part_.table.dim; }
    DYNEMB_HD DYNEMB_INLINE size_t vector_bytes() const { return part_.table.vector_bytes(); }
    // The position itself if its vector is used as it is.
    DYNEMB_HD DYNEMB_INLINE uint32_t Row(uint32_t position) const {
      const uint32_t code = codes_[position];
      return code == kAsIs ? position : code == kSkippedRow ? kSkippedRow : kNoRow;
    }
    DYNEMB_HD DYNEMB_INLINE bool Has(uint32_t row) const { return IsRow(row); }
    DYNEMB_HD DYNEMB_INLINE bool Skips(uint32_t row) const { return row == kSkippedRow; }
    DYNEMB_HD DYNEMB_INLINE CountedRows counted() const {
      return {part_.some_absent ? codes_ : nullptr};
    }
    DYNEMB_HD DYNEMB_INLINE const char* Vector(uint32_t row) const { return vectors_[row]; }
    DYNEMB_HD DYNEMB_INLINE bool AreWhole() const { return part_.whole; }
    DYNEMB_HD DYNEMB_INLINE Quad<float> Columns(uint32_t position, int64_t first, int n) const {
      const uint32_t code = codes_[position];
      const ServedView& table = part_.table;
      if (!IsRow(code)) {
        if (table.absent_is_zero) return {};
        return InitialColumns(table.initial, part_.keys[position], table.dtype, first, n);
      }
      const auto format = static_cast<VectorFormat>(code - 1);
      Quad<float> quad{};
      for (int j = 0; j < kQuad; ++j) {
        if (j < n) quad.at[j] = StoredColumn(format, vectors_[position], table.dim, first + j);
      }
      return rounds_ ? Rounded(quad) : quad;
    }

   private:
    DYNEMB_HD DYNEMB_INLINE Quad<float> Rounded(Quad<float> quad) const {
      if (dtype() == DType::kFloat32) return quad;
      for (int j = 0; j < kQuad; ++j) {
        const uint16_t half = internal_row_math::NearestHalf(dtype(), quad.at[j]);
        quad.at[j] = internal_row_math::FromHalf(dtype(), half);
      }
      return quad;
    }

    const uint32_t* const codes_;
    const char* const* const vectors_;
    const bool rounds_;
    const Part& part_;
  };
};

// For ForRows. Item i is an id of one table: writes its vector to vectors[i] in the table's dtype.
struct CopyServed {
  ServedVectors source;
  ServedVectors::Part part;
  char* vectors;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const ServedVectors::Vectors from(source, part);
    const auto position = static_cast<uint32_t>(i);
    char* const to = vectors + i * from.vector_bytes();
    if (from.Has(from.Row(position))) {
      CopyBytes(lanes, to, from.Vector(position), from.vector_bytes());
      return;
    }
    ForEachQuad(lanes, from.dim(), [&](int64_t first, int n) {
      StoreColumns(from.dtype(), from.Columns(position, first, n), first, n, Rounding{}, to);
    });
  }
};

// For ForRows. Item i is an id of one table: writes its row in float32 to vectors[i], zeros if it
// has none.
struct LoadServed {
  ServedVectors source;
  ServedVectors::Part part;
  const bool* found;
  float* vectors;

  template <class Lanes>
  DYNEMB_HD void operator()(Lanes& lanes, size_t i) const {
    const ServedVectors::Vectors from(source, part);
    const auto position = static_cast<uint32_t>(i);
    const bool is_row = from.Has(from.Row(position));
    ForEachQuad(lanes, from.dim(), [&](int64_t first, int n) {
      Quad<float> quad{};
      if (found[i]) {
        quad = is_row ? LoadColumns(from.dtype(), from.Vector(position), first, n)
                      : from.Columns(position, first, n);
      }
      StoreQuad(quad, n, vectors + i * static_cast<size_t>(from.dim()) + first);
    });
  }
};

}  // namespace dynemb::device

#endif  // DYNEMB_SERVING_DEVICE_SERVED_KERNELS_H_
