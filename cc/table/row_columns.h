// RowColumns: rows as arrays, one for each kind of data.
#ifndef DYNEMB_TABLE_ROW_COLUMNS_H_
#define DYNEMB_TABLE_ROW_COLUMNS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/table/row.h"

namespace dynemb {

// Element i of each column is of row i. A null column is skipped. `Time` is the type of times and
// scores: int64_t for ticks, and for scores as Table::Scores returns them; CutTime in a cut; Stamp
// as a table stores them.
template <class Time>
struct RowColumns {
  void* keys = nullptr;     // [n], of the layout's key size
  void* vectors = nullptr;  // [n, dim], of the layout's dtype
  float* state = nullptr;   // [n, state width]
  Time* updates = nullptr;  // [n]
  Time* scores = nullptr;   // [n]

  static RowColumns Keys(void* keys) { return {keys, nullptr, nullptr, nullptr, nullptr}; }
  static RowColumns Scores(Time* scores) { return Times(nullptr, scores); }
  static RowColumns Times(Time* updates, Time* scores) {
    return {nullptr, nullptr, nullptr, updates, scores};
  }

  bool has_content() const { return keys != nullptr || vectors != nullptr || state != nullptr; }
  // Sets the key, the vector and the state of row i.
  void Set(size_t i, const RowLayout& l, const char* row) const { Set(i, l, row, l.vector(row)); }
  // `content`: the vector and the state.
  void Set(size_t i, const RowLayout& l, const void* key, const char* content) const {
    if (keys != nullptr) memcpy(static_cast<char*>(keys) + i * l.key_size, key, l.key_size);
    if (vectors != nullptr) {
      memcpy(static_cast<char*>(vectors) + i * l.vector_bytes(), content, l.vector_bytes());
    }
    if (state != nullptr && l.state_bytes() != 0) {
      memcpy(state + i * static_cast<size_t>(l.state_width),
             content + l.state_offset - l.vector_offset, l.state_bytes());
    }
  }
};

using TickColumns = RowColumns<int64_t>;

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_COLUMNS_H_
