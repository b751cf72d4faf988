// EvictedRows: copies of the rows that a batch evicts, with their scores, as columns in ascending
// order of the keys' bit patterns. The order is therefore the same for any number of threads.
//
// A table adds the rows one by one (Add), or writes the columns itself (Place). If the columns are
// in the memory of the table's device, it always does the latter.
#ifndef DYNEMB_TABLE_EVICTED_ROWS_H_
#define DYNEMB_TABLE_EVICTED_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "cc/table/row.h"
#include "cc/table/row_columns.h"

namespace dynemb {

class EvictedRows {
 public:
  // Where the columns are. If `allocate` is null, they are members in host memory, which live as
  // long as this object.
  enum class Memory { kHost, kDevice };

  // Returns columns for n rows, without updates. Called once, when the number of rows is known, and
  // may throw std::bad_alloc. Columns of a device can be null: the rows are lost, then.
  using Allocate = std::function<TickColumns(size_t n)>;

  explicit EvictedRows(const RowLayout& layout, Allocate allocate = nullptr,
                       Memory memory = Memory::kHost)
      : layout_(layout), allocate_(std::move(allocate)), memory_of_columns_(memory) {}

  Memory memory() const { return memory_of_columns_; }

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

  // The columns of all n rows, which the caller writes, in the order of the keys. No row has been
  // added. Throws std::bad_alloc.
  const TickColumns& Place(size_t n) {
    if (placed_ || !keys_.empty()) std::abort();
    columns_ = allocate_ != nullptr ? allocate_(n) : MakeColumns(n);
    placed_ = true;
    num_placed_ = n;
    return columns_;
  }

  size_t size() const { return placed_ ? num_placed_ : keys_.size(); }

  // Ends adding rows: sorts those that were added into columns. Throws std::bad_alloc.
  const TickColumns& Finish() {
    if (placed_) return columns_;
    const size_t n = keys_.size();
    if (memory_of_columns_ == Memory::kDevice) return Place(n);  // none were added
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keys_[a] < keys_[b]; });
    const TickColumns to = allocate_ != nullptr ? allocate_(n) : MakeColumns(n);
    const size_t bytes = layout_.vector_bytes();
    const auto width = static_cast<size_t>(layout_.state_width);
    for (size_t i = 0; i < n; ++i) {
      const char* content = contents_.data() + order[i] * ContentBytes();
      memcpy(static_cast<char*>(to.keys) + i * layout_.key_size, &keys_[order[i]],
             layout_.key_size);
      memcpy(static_cast<char*>(to.vectors) + i * bytes, content, bytes);
      if (width != 0) memcpy(to.state + i * width, content + bytes, layout_.state_bytes());
      to.scores[i] = scores_[order[i]];
    }
    columns_ = to;
    placed_ = true;
    num_placed_ = n;
    return columns_;
  }

 private:
  size_t ContentBytes() const { return layout_.vector_bytes() + layout_.state_bytes(); }

  TickColumns MakeColumns(size_t n) {
    // Aligned for all of them: scores first. Not cleared.
    const size_t scores = n * sizeof(int64_t), keys = (n * layout_.key_size + 7) / 8 * 8;
    const size_t state = (n * layout_.state_bytes() + 7) / 8 * 8;
    memory_.reset(new char[scores + keys + state + n * layout_.vector_bytes()]);
    char* const p = memory_.get();
    return {p + scores, p + scores + keys + state, reinterpret_cast<float*>(p + scores + keys),
            nullptr, reinterpret_cast<int64_t*>(p)};
  }

  const RowLayout layout_;
  const Allocate allocate_;
  const Memory memory_of_columns_;
  std::mutex mutex_;
  // The rows that were added.
  std::vector<uint64_t> keys_;
  std::vector<int64_t> scores_;
  std::vector<char> contents_;  // of each row: its vector, then its state
  bool placed_ = false;         // whether there are columns
  size_t num_placed_ = 0;
  TickColumns columns_;
  std::unique_ptr<char[]> memory_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_EVICTED_ROWS_H_
