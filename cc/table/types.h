// The element types of keys and vectors, row ids, ticks and stamps.
#ifndef DYNEMB_TABLE_TYPES_H_
#define DYNEMB_TABLE_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace dynemb {

// Keys are compared and hashed as bit patterns, so int64 and uint64 share one implementation.
enum class KeyType : uint8_t { kInt64, kInt32, kUint64 };
// The element type of the vector of a row. Optimizer state is float32 for all of them.
enum class DType : uint8_t { kFloat32, kFloat16, kBfloat16 };

constexpr size_t SizeOf(KeyType t) { return t == KeyType::kInt32 ? 4 : 8; }
constexpr size_t SizeOf(DType t) { return t == DType::kFloat32 ? 4 : 2; }

// The number of a row. On the host it is stable from insertion until the row is erased or evicted;
// then it may be given to another key. In a device's memory, promotion may change it too.
using RowId = uint32_t;
constexpr RowId kNoRow = 0xFFFFFFFFu;
// In the result of a lookup, instead of kNoRow: admission (admission.h) gave the key no row.
constexpr RowId kUnadmittedRow = kNoRow - 1;
constexpr RowId kSkippedRow = kNoRow - 2;  // and its ids are absent from their bags
constexpr bool IsRefused(RowId row) { return row - kSkippedRow < 2; }
// Whether a row id is the id of a row.
constexpr bool IsRow(RowId row) { return row < kSkippedRow; }
constexpr uint64_t kMostRows = kSkippedRow;  // the maximal number of rows in a table

// How the rows of keys are removed.
enum class Removal : uint8_t {
  kErase,
  kWipe,    // their memory is also overwritten with zeros, and files that had them are removed
  kEvict,   // stats() counts them as evicted
  kExpire,  // stats() counts them as expired
};

// The number of a batch, strictly increasing within a process and at least 1; see clock.h.
using Tick = uint64_t;
// A tick as a table stores it (stamps.h). 0 means "never", so a row whose last update is 0 is free.
using Stamp = uint32_t;
// The order in which a full table evicts rows; score.h.
using Score = uint32_t;

}  // namespace dynemb

#endif  // DYNEMB_TABLE_TYPES_H_
