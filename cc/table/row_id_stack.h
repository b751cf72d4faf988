// RowIdStack: a stack of row ids, in chunks. Growth copies no ids, so that a batch that frees rows
// does not wait for it.
#ifndef DYNEMB_TABLE_ROW_ID_STACK_H_
#define DYNEMB_TABLE_ROW_ID_STACK_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "cc/table/types.h"

namespace dynemb {

class RowIdStack {
 public:
  size_t size() const { return size_; }
  // The bytes of memory of the chunks.
  size_t bytes() const { return chunks_.size() * kChunk * sizeof(RowId); }
  // Makes room for n calls of Push. Throws std::bad_alloc.
  void Reserve(size_t n) {
    const size_t chunks = (size_ + n + kChunk - 1) / kChunk;
    while (chunks_.size() < chunks) {
      chunks_.push_back(std::unique_ptr<RowId[]>(new RowId[kChunk]));
    }
  }
  // Requires room.
  void Push(RowId row) noexcept {
    chunks_[size_ / kChunk][size_ % kChunk] = row;
    ++size_;
  }
  // Requires size() > 0.
  RowId Pop() noexcept {
    --size_;
    return chunks_[size_ / kChunk][size_ % kChunk];
  }
  void Clear() {
    chunks_.clear();
    size_ = 0;
  }

 private:
  static constexpr size_t kChunk = 4096;

  std::vector<std::unique_ptr<RowId[]>> chunks_;
  size_t size_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROW_ID_STACK_H_
