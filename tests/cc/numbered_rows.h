// Rows that are identified by a number: their key and contents. For tests of saved rows.
#ifndef DYNEMB_TESTS_CC_NUMBERED_ROWS_H_
#define DYNEMB_TESTS_CC_NUMBERED_ROWS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "cc/table/changes.h"

namespace dynemb {

inline std::vector<char> RowOf(const RowLayout& layout, uint64_t number) {
  std::vector<char> row(layout.stride, static_cast<char>(number));
  std::memcpy(row.data(), &number, layout.key_size);
  return row;
}

inline uint64_t NumberOf(const SavedRows::Chunk& chunk, size_t i, const RowLayout& layout) {
  uint64_t number = 0;
  std::memcpy(&number, chunk.rows.data() + i * chunk.stride, layout.key_size);
  return number;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_NUMBERED_ROWS_H_
