// LeavingRows: the rows that a batch gives to a table's cold rows (device_table_cold.h). Everything
// that they need is taken before the batch changes anything.
#ifndef DYNEMB_DEVICE_LEAVING_ROWS_H_
#define DYNEMB_DEVICE_LEAVING_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "cc/table/cold_rows.h"
#include "cc/table/types.h"

namespace dynemb {

struct LeavingRows {
  size_t first = 0, n = 0;        // n rows, for the new keys from `first` on
  size_t chunk = 0;               // the rows that are copied together
  char* copies = nullptr;         // [chunk, stride], in device memory
  char* host_copies = nullptr;    // the same, pinned
  Score* scores = nullptr;        // [chunk], pinned
  size_t done = 0;                // the rows that have been added
  std::unique_ptr<char[]> row{};  // room for a row in host memory
  ColdRows* reserved = nullptr;   // has room for the rows

  LeavingRows() = default;
  LeavingRows(LeavingRows&& other) noexcept { *this = std::move(other); }
  LeavingRows& operator=(LeavingRows&& other) noexcept {
    Settle();
    first = other.first;
    n = other.n;
    chunk = other.chunk;
    copies = other.copies;
    host_copies = other.host_copies;
    scores = other.scores;
    done = other.done;
    row = std::move(other.row);
    reserved = std::exchange(other.reserved, nullptr);
    return *this;
  }
  ~LeavingRows() { Settle(); }
  // The rows of the next chunk.
  size_t in_chunk() const { return std::min(chunk, n - done); }
  // They have been added, or will not be.
  void Settle() noexcept {
    if (reserved != nullptr) reserved->Settle();
    reserved = nullptr;
  }
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_LEAVING_ROWS_H_
