// RowColumns: the arrays that rows are copied to, one for each kind of data.
#ifndef DYNEMB_TABLE_ROW_COLUMNS_H_
#define DYNEMB_TABLE_ROW_COLUMNS_H_

#include <cstddef>
#include <cstring>

#include "cc/table/row.h"

namespace dynemb {

// Element i of each column is of row i. A null column is skipped.
struct RowColumns {
  void* keys;     // [n], of the layout's key size
  void* vectors;  // [n, dim], of the layout's dtype
  float* state;   // [n, state width]

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

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_COLUMNS_H_
