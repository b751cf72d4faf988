// The working memory of a table's batches.
#ifndef DYNEMB_TABLE_BATCH_SCRATCH_H_
#define DYNEMB_TABLE_BATCH_SCRATCH_H_

#include <atomic>
#include <cstdint>
#include <cstring>

#include "cc/table/admission.h"
#include "cc/table/hash.h"
#include "cc/table/insert_plan.h"
#include "cc/table/owned_items.h"
#include "cc/table/scratch.h"
#include "cc/table/types.h"

namespace dynemb {

// An approximate set of rows, to which threads add concurrently. It may also report rows that are
// not in it: about one in eight at most.
class RowFilter {
 public:
  // Makes the set empty, for up to n rows.
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
  size_t Word(RowId row) const { return ScatterInteger(row) >> 1 >> (63 - log_words_); }
  uint64_t Bit(RowId row) const { return uint64_t{1} << (ScatterInteger(row) << log_words_ >> 58); }

  uint32_t log_words_ = 0;
  Buffer<uint64_t> words_;
  std::atomic<bool> empty_{true};
};

// A bit for each row id of a table, all of them 0 between batches (Evictable in bucket_ops.h). They
// are kept for the next batch, whatever their number, because to clear all of them would take too
// long. The rows need hundreds of times their memory.
class PinnedRows {
 public:
  // Makes room for row ids below `rows`.
  uint32_t* Reserve(uint64_t rows) {
    const size_t words = (rows + 31) / 32;
    const size_t had = words_.bytes();
    words_.Resize(words);
    if (words_.bytes() != had) memset(words_.get(), 0, words_.bytes());
    return words_.get();
  }
  void Unpin(RowId row) { words_[row / 32] = 0; }

 private:
  Buffer<uint32_t> words_;
};

// The working memory of one batch, of any table.
struct BatchScratch {
  Buffer<RowId> rows;
  Buffer<uint32_t> positions;
  RowFilter again;
  OwnedItems owned;  // of the rows that several threads may change
  InsertPlan plan;
  PinnedRows pinned;
  // The new keys of a batch, for admission (HashTable::Admit).
  Buffer<uint64_t> new_keys;
  Buffer<uint32_t> times;
  Buffer<AdmissionCounters::Place> places;
  Buffer<bool> admitted;
  void Shrink() {
    owned.Shrink();
    new_keys.Shrink();
    times.Shrink();
    places.Shrink();
    admitted.Shrink();
    rows.Shrink();
    positions.Shrink();
    again.Shrink();
    plan.Shrink();
  }
};
using ScratchLease = SharedScratch<BatchScratch>;

}  // namespace dynemb

#endif  // DYNEMB_TABLE_BATCH_SCRATCH_H_
