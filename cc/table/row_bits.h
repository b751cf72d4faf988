// RowBits: a set of row ids, one bit each. Add and Take are thread-safe; the other functions are
// not.
#ifndef DYNEMB_TABLE_ROW_BITS_H_
#define DYNEMB_TABLE_ROW_BITS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/types.h"

namespace dynemb {

class RowBits {
 public:
  // If Reset or Extend throws std::bad_alloc, nothing has changed.
  //
  // Sets the range of rows to [0, rows), with all of them in the set, or none.
  void Reset(uint64_t rows, bool all) {
    words_.assign((rows + 63) / 64, all ? ~uint64_t{0} : 0);
    rows_ = rows;
    if (all && rows % 64 != 0) words_.back() = (uint64_t{1} << rows % 64) - 1;
  }
  // Extends the range of rows to [0, rows). The new rows are not in the set.
  void Extend(uint64_t rows) {
    if (rows <= rows_) return;
    words_.resize((rows + 63) / 64);
    rows_ = rows;
  }
  uint64_t rows() const { return rows_; }

  void Add(RowId row) { __atomic_fetch_or(&words_[row / 64], Bit(row), __ATOMIC_RELAXED); }
  // Removes a row; returns whether it was in the set.
  bool Take(RowId row) {
    if ((__atomic_load_n(&words_[row / 64], __ATOMIC_RELAXED) & Bit(row)) == 0) return false;
    return (__atomic_fetch_and(&words_[row / 64], ~Bit(row), __ATOMIC_RELAXED) & Bit(row)) != 0;
  }

  // Adds the rows of `other` that are below rows().
  void AddAll(const RowBits& other) {
    for (size_t w = 0; w < std::min(words_.size(), other.words_.size()); ++w) {
      words_[w] |= other.words_[w];
    }
    if (rows_ % 64 != 0) words_.back() &= (uint64_t{1} << rows_ % 64) - 1;
  }
  uint64_t Count() const {
    uint64_t count = 0;
    for (uint64_t word : words_) count += static_cast<uint64_t>(__builtin_popcountll(word));
    return count;
  }
  // The first row of the set that is >= row; rows() if there is none.
  uint64_t Next(uint64_t row) const {
    for (size_t w = row / 64; w < words_.size(); ++w) {
      const uint64_t word = w == row / 64 ? words_[w] & (~uint64_t{0} << row % 64) : words_[w];
      if (word != 0) return w * 64 + static_cast<uint64_t>(__builtin_ctzll(word));
    }
    return rows_;
  }

 private:
  static uint64_t Bit(uint64_t row) { return uint64_t{1} << row % 64; }

  uint64_t rows_ = 0;
  std::vector<uint64_t> words_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_BITS_H_
