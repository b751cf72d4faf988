// Sources: the vectors of ids, for kernels that combine them (kernels_pool.h). A kernel has one
// *source* for all parts of a launch:
//
//   Source::Part                       the data of a part; its vectors have one dtype and dim
//   Source::Vectors(source, part)      the vectors of a part:
//     dtype(), dim(), vector_bytes()
//     uint32_t Row(position)           the row of an id
//     bool Has(row)                    whether that row exists
//     bool Skips(row)                  whether an id with this row is absent from its bag
//     CountedRows counted()            which ids of the part are in their bags
//     const char* Vector(row)          the vector of an existing row, aligned to its elements
//     Quad<float> Columns(position, first, n)
//                                      columns [first, first + n) of the vector that replaces the
//                                      missing row of an id, rounded as in a row
//
// Row and Vector may read memory. To read several vectors, a kernel calls Row for all of them
// first, and then Vector for all of them, so that these accesses overlap.
#ifndef DYNEMB_DEVICE_VECTOR_SOURCES_H_
#define DYNEMB_DEVICE_VECTOR_SOURCES_H_

#include <cstddef>
#include <cstdint>

#include "cc/device/flat_index.h"
#include "cc/device/row_math.h"
#include "cc/device/table_views.h"
#include "cc/lookup/combiner.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb::device {

// Rows of tables. `keys` and `rows` are arrays over the whole batch: the id at position p of a part
// is at first_id + p. An id whose row is kNoRow counts as the initial vector of its key. An id
// whose key was refused counts as zeros or as that vector, or is absent (cc/table/admission.h).
struct TableVectors {
  // Of PoolBags. Without the number of blocks, ptxas spills in teams of four, to get a few more.
  static constexpr uint32_t kInFlight = 8;
  static constexpr unsigned int kLeastBlocks = 10;
  struct Part {
    uint32_t first_id = 0;
    uint32_t table = 0;        // index in TableViews
    bool some_absent = false;  // whether ids may be absent
  };
  TableViews tables;
  KeyArray keys;
  const RowId* rows;

  class Vectors {
   public:
    DYNEMB_HD DYNEMB_INLINE Vectors(const TableVectors& source, const Part& part)
        : source_(source), part_(part), table_(source.tables[part.table]) {}

    DYNEMB_HD DYNEMB_INLINE DType dtype() const { return table_.layout.dtype; }
    DYNEMB_HD DYNEMB_INLINE int64_t dim() const { return table_.layout.dim; }
    DYNEMB_HD DYNEMB_INLINE size_t vector_bytes() const { return table_.layout.vector_bytes(); }
    DYNEMB_HD DYNEMB_INLINE RowId Row(uint32_t position) const {
      return source_.rows[size_t{part_.first_id} + position];
    }
    DYNEMB_HD DYNEMB_INLINE bool Has(RowId row) const { return IsRow(row); }
    DYNEMB_HD DYNEMB_INLINE bool Skips(RowId row) const { return row == kSkippedRow; }
    DYNEMB_HD DYNEMB_INLINE CountedRows counted() const {
      return {part_.some_absent ? source_.rows + part_.first_id : nullptr};
    }
    DYNEMB_HD DYNEMB_INLINE const char* Vector(RowId row) const { return table_.VectorAt(row); }
    // Whether all vectors are whole (row_math.h).
    DYNEMB_HD DYNEMB_INLINE bool AreWhole() const { return IsWhole(table_.layout); }
    DYNEMB_HD DYNEMB_INLINE Quad<float> Columns(uint32_t position, int64_t first, int n) const {
      if (table_.admission.IsZero(Row(position))) return {};
      const uint64_t key = source_.keys[size_t{part_.first_id} + position];
      return InitialColumns(table_.initial, key, table_.layout.dtype, first, n);
    }

   private:
    const TableVectors& source_;
    const Part& part_;
    const TableView& table_;
  };
};

// Vectors in arrays, selected by index (cc/lookup/gather.h). An id whose index is not a row counts
// as zeros.
struct IndexedVectors {
  static constexpr uint32_t kInFlight = 4;
  static constexpr unsigned int kLeastBlocks = 0;
  struct Part {
    const uint32_t* index = nullptr;    // [nnz]
    size_t n = 0;                       // rows
    const void* vectors = nullptr;      // [n, dim]; not used if `rows` is not null
    const void* const* rows = nullptr;  // [n] addresses
    DType dtype = DType::kFloat32;
    int64_t dim = 0;
    static constexpr bool some_absent = false;
  };

  class Vectors {
   public:
    DYNEMB_HD DYNEMB_INLINE Vectors(const IndexedVectors&, const Part& part)
        : part_(part), rows_(part.rows) {}

    DYNEMB_HD DYNEMB_INLINE DType dtype() const { return part_.dtype; }
    DYNEMB_HD DYNEMB_INLINE int64_t dim() const { return part_.dim; }
    DYNEMB_HD DYNEMB_INLINE size_t vector_bytes() const {
      return static_cast<size_t>(part_.dim) * SizeOf(part_.dtype);
    }
    DYNEMB_HD DYNEMB_INLINE uint32_t Row(uint32_t position) const { return part_.index[position]; }
    DYNEMB_HD DYNEMB_INLINE bool Has(uint32_t row) const { return row < part_.n; }
    DYNEMB_HD DYNEMB_INLINE bool Skips(uint32_t) const { return false; }
    DYNEMB_HD DYNEMB_INLINE CountedRows counted() const { return {}; }
    DYNEMB_HD DYNEMB_INLINE const char* Vector(uint32_t row) const {
      return rows_ != nullptr ? static_cast<const char*>(rows_[row])
                              : static_cast<const char*>(part_.vectors) + row * vector_bytes();
    }
    DYNEMB_HD DYNEMB_INLINE bool AreWhole() const {
      return rows_ == nullptr && IsWhole(part_.dtype, part_.dim, part_.vectors);
    }
    DYNEMB_HD DYNEMB_INLINE Quad<float> Columns(uint32_t, int64_t, int) const { return {}; }

   private:
    const Part& part_;
    const void* const* const rows_;  // read once, not per vector
  };
};

}  // namespace dynemb::device

#endif  // DYNEMB_DEVICE_VECTOR_SOURCES_H_
