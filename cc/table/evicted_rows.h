// EvictedRows: copies of the rows that a batch evicts, with their scores.
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
    scores_.reserve(scores_.size() + n);
    contents_.reserve(contents_.size() + n * ContentBytes());
  }

  // Adds a copy of the key (its bit pattern), the vector and the state of a row, and its score, as
  // Table::Scores returns it. Thread-safe. If memory runs out, it throws std::bad_alloc and adds
  // nothing.
  void Add(uint64_t key, const char* row, int64_t score) {
    const char* vector = layout_.vector(row);
    const auto* state = reinterpret_cast<const char*>(layout_.state(row));
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t n = keys_.size();
    try {
      keys_.push_back(key);
      scores_.push_back(score);
      const size_t needed = (n + 1) * ContentBytes();
      if (needed > contents_.capacity()) contents_.reserve(2 * needed);
    } catch (...) {
      keys_.resize(n);
      scores_.resize(n);
      throw;
    }
    contents_.insert(contents_.end(), vector, vector + layout_.vector_bytes());
    contents_.insert(contents_.end(), state, state + layout_.state_bytes());
  }

  // The same for n rows, of which `rows` has copies, one after the other.
  void AddAll(size_t n, const uint64_t* keys, const char* rows, const int64_t* scores) {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t before = keys_.size();
    try {
      keys_.insert(keys_.end(), keys, keys + n);
      scores_.insert(scores_.end(), scores, scores + n);
      contents_.resize((before + n) * ContentBytes());
    } catch (...) {
      keys_.resize(before);
      scores_.resize(before);
      throw;
    }
    char* to = contents_.data() + before * ContentBytes();
    for (size_t i = 0; i < n; ++i, to += ContentBytes()) {
      const char* const row = rows + i * layout_.stride;
      memcpy(to, layout_.vector(row), layout_.vector_bytes());
      memcpy(to + layout_.vector_bytes(), layout_.state(row), layout_.state_bytes());
    }
  }

  size_t size() const { return keys_.size(); }
  int64_t state_width() const { return layout_.state_width; }
  // Copies the keys (of type K), vectors, state and scores to arrays of size() rows, in ascending
  // order of the keys' bit patterns. The order is therefore the same for any number of threads.
  template <class K>
  void Copy(K* keys, char* vectors, float* state, int64_t* scores) const {
    std::vector<size_t> order(size());
    std::iota(order.begin(), order.end(), size_t{0});
    const auto by_key = [&](size_t a, size_t b) { return keys_[a] < keys_[b]; };
    // Those of a device come sorted.
    if (!std::is_sorted(keys_.begin(), keys_.end())) std::sort(order.begin(), order.end(), by_key);
    const size_t bytes = layout_.vector_bytes();
    for (size_t i = 0; i < order.size(); ++i) {
      const char* content = contents_.data() + order[i] * ContentBytes();
      keys[i] = static_cast<K>(keys_[order[i]]);
      memcpy(vectors + i * bytes, content, bytes);
      if (layout_.state_width != 0) {
        memcpy(state + i * static_cast<size_t>(layout_.state_width), content + bytes,
               layout_.state_bytes());
      }
      scores[i] = scores_[order[i]];
    }
  }

 private:
  size_t ContentBytes() const { return layout_.vector_bytes() + layout_.state_bytes(); }

  const RowLayout layout_;
  std::mutex mutex_;
  std::vector<uint64_t> keys_;
  std::vector<int64_t> scores_;
  std::vector<char> contents_;  // of each row: its vector, then its state
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_EVICTED_ROWS_H_
