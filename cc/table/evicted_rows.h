// EvictedRows: copies of the keys and vectors of the rows that a batch evicts.
#ifndef DYNEMB_TABLE_EVICTED_ROWS_H_
#define DYNEMB_TABLE_EVICTED_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "cc/table/row.h"

namespace dynemb {

class EvictedRows {
 public:
  explicit EvictedRows(const RowLayout& layout) : layout_(layout) {}

  // Makes room for n more rows, so that adding them does not throw.
  void Reserve(size_t n) {
    keys_.reserve(keys_.size() + n);
    vectors_.reserve(vectors_.size() + n * layout_.vector_bytes());
  }

  // Adds a copy of the key (its bit pattern) and the vector of a row. Thread-safe. If memory runs
  // out, it throws std::bad_alloc and adds nothing.
  void Add(uint64_t key, const char* row) {
    const char* vector = layout_.vector(row);
    std::lock_guard<std::mutex> lock(mutex_);
    vectors_.insert(vectors_.end(), vector, vector + layout_.vector_bytes());
    try {
      keys_.push_back(key);
    } catch (...) {
      vectors_.resize(vectors_.size() - layout_.vector_bytes());
      throw;
    }
  }

  size_t size() const { return keys_.size(); }
  // Copies the keys (of type K) and the vectors to arrays of size() rows, in ascending order of the
  // keys' bit patterns. The order is therefore the same for any number of threads.
  template <class K>
  void Copy(K* keys, char* vectors) const {
    std::vector<size_t> order(size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keys_[a] < keys_[b]; });
    const size_t bytes = layout_.vector_bytes();
    for (size_t i = 0; i < order.size(); ++i) {
      keys[i] = static_cast<K>(keys_[order[i]]);
      memcpy(vectors + i * bytes, vectors_.data() + order[i] * bytes, bytes);
    }
  }

 private:
  const RowLayout layout_;
  std::mutex mutex_;
  std::vector<uint64_t> keys_;
  std::vector<char> vectors_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_EVICTED_ROWS_H_
