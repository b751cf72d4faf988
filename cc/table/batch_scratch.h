// The working memory of a table's batches.
#ifndef DYNEMB_TABLE_BATCH_SCRATCH_H_
#define DYNEMB_TABLE_BATCH_SCRATCH_H_

#include <atomic>
#include <cstdint>
#include <cstring>

#include "cc/table/insert_plan.h"
#include "cc/table/scratch.h"
#include "cc/table/types.h"

namespace dynemb {

// A set of rows that threads add to, and that holds some others too: about one in eight at most.
class RowFilter {
 public:
  // Empties it, for up to n rows.
  void Reset(size_t n) {
    log_words_ = 0;
    while ((kBitsPerWord << log_words_) < 8 * n) ++log_words_;
    const size_t words = size_t{1} << log_words_;
    memset(words_.Resize(words), 0, words * sizeof(uint64_t));
    empty_.store(true, std::memory_order_relaxed);
  }
  void Add(RowId row) {
    __atomic_fetch_or(&words_[Word(row)], Bit(row), __ATOMIC_RELAXED);
    if (empty()) empty_.store(false, std::memory_order_relaxed);
  }
  bool MayHold(RowId row) const { return (words_[Word(row)] & Bit(row)) != 0; }
  bool empty() const { return empty_.load(std::memory_order_relaxed); }
  void Shrink() { words_.Shrink(); }

 private:
  static constexpr size_t kBitsPerWord = 64;
  // The top bits of a product choose the word, the next six the bit.
  static uint64_t Scatter(RowId row) { return row * 0x9E3779B97F4A7C15ull; }
  size_t Word(RowId row) const { return Scatter(row) >> 1 >> (63 - log_words_); }
  uint64_t Bit(RowId row) const { return uint64_t{1} << (Scatter(row) << log_words_ >> 58); }

  uint32_t log_words_ = 0;
  Buffer<uint64_t> words_;
  std::atomic<bool> empty_{true};
};

// What batches need beside their arguments; any table may use any of them.
struct BatchScratch {
  Buffer<RowId> rows;
  Buffer<uint32_t> positions;
  RowFilter again;
  InsertPlan plan;
  void Shrink() {
    rows.Shrink();
    positions.Shrink();
    again.Shrink();
    plan.Shrink();
  }
};
using ScratchLease = SharedScratch<BatchScratch>;

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BATCH_SCRATCH_H_
