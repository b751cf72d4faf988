// TableBatches: the calls of a table that work on a batch of keys.
//
// Keys are a KeySpan of the table's key type, of n keys; position i of every other array belongs to
// keys[i].
// Keys may repeat within a batch unless a call says otherwise. `tick` is the batch's number from a
// Clock. It must be greater than every tick that the table has seen, so it is taken while the
// caller holds the lock. table.h says which memory arrays are in, what (shared) and (exclusive)
// mean, and what a failed call leaves behind.
#ifndef DYNEMB_TABLE_TABLE_BATCHES_H_
#define DYNEMB_TABLE_TABLE_BATCHES_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/changes.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/exec.h"
#include "cc/table/key_span.h"
#include "cc/table/optimizer.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

class TableBatches {
 public:
  virtual ~TableBatches() = default;

  // (exclusive) Announces a batch that writes and names n keys; repeated calls with one tick add
  // up. Returns its stamp. The calls below announce themselves; code that runs its own passes
  // (cc/lookup) calls this before its first pass. Sweeps a share of the old stamps (stamps.h).
  virtual Stamp BeginBatch(Exec& exec, Tick tick, size_t n) = 0;
  // (exclusive) The same for an inserting lookup. Lookups with one tick are one step of the table
  // (TableOptions::epoch_steps).
  virtual Stamp BeginLookup(Exec& exec, Tick tick, size_t n) = 0;

  // --- Reading

  // (shared) rows[i] = the row of keys[i], or kNoRow. Counts as an access (score.h).
  virtual void Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) = 0;
  // (shared) found[i] = whether keys[i] has a row. Does not count as an access.
  virtual void Contains(Exec& exec, KeySpan keys, bool* found) const = 0;
  // (shared) Like Find, and also copies the vectors. A key without a row gets `default_vector` (dim
  // elements). If that is null, it gets its initial vector, or what a table with admission returns
  // for it (Unadmitted), with the row id of a refused key.
  virtual void Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector,
                      void* vectors, RowId* rows) = 0;
  // (shared) Copies the vectors, as float32, and the state of the keys that have rows; zeros for
  // other keys. Does not count as an access.
  virtual void ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state,
                        bool* found) const = 0;
  // (shared) scores[i] = the score of the row of keys[i] (score.h), as the tick of the last access
  // if it is a stamp; -1 if the key has no row. Does not count as an access.
  virtual void Scores(Exec& exec, KeySpan keys, int64_t* scores) const = 0;
  // A table's knowledge of a key.
  struct KeyState {
    bool has_row = false;
    bool in_device = false;        // the row is in device memory
    bool is_cold = false;          // the row is not in memory
    Tick updated = 0;              // the last update of the row
    int64_t score = -1;            // as Scores returns it
    uint32_t admission_count = 0;  // how often it was counted towards its admission
    Tick lost = 0;                 // the last time that the key lost a row; 0: not known
    Removal lost_by = Removal::kErase;
  };
  // (shared) states[i] = what is known about keys[i]. States are in host memory. Losses are known
  // since the table tracks changes, as long as its log of deletions has them. Does not count as an
  // access.
  virtual void Explain(Exec& exec, KeySpan keys, KeyState* states) const = 0;
  // (shared) Compares two reads of the same keys. The first was made after batch `since`, and
  // found rows_before; the second found `rows`. (kNoRow: the key had no row.)
  // changed[i] = whether the vector may have changed in between. It has not changed if batch `now`
  // inserted the row, because the first read then returned the same initial vector. A key that has
  // no row in `rows` counts as changed.
  virtual void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n,
                       Tick since, Tick now, bool* changed) const = 0;

  // --- Inserting

  // These four calls are inserting lookups: if the strategy counts keys (score.h), each occurrence
  // of a key counts.
  //
  // (exclusive) rows[i] = the row of keys[i]. A key without a row gets one, with its initial vector
  // and state, unless admission refuses it; rows[i] is then kUnadmittedRow or kSkippedRow. If the
  // call fails, keys may have been counted towards their admission.
  virtual Status FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) = 0;
  // (exclusive) Like FindOrInsert, and also copies the rows that it evicts. It admits every key.
  virtual Status InsertAndEvict(Exec& exec, KeySpan keys, Tick tick, RowId* rows,
                                EvictedRows* evicted) = 0;
  // (exclusive) Like FindOrInsert, and also copies the vectors.
  virtual Status LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors,
                                RowId* rows) = 0;

  // (exclusive) LookupOrInsert of keys that other ranks ask for: keys[i] counts times[i] times
  // towards its admission (admission.h). `times` is in host memory; null: once each.
  virtual Status LookupCounted(Exec& exec, KeySpan keys, const uint32_t* times, Tick tick,
                               void* vectors, RowId* rows) = 0;

  // --- Writing

  // (exclusive) Sets vectors, which have the table's dtype. The last of repeated keys wins. New
  // rows get their initial state.
  virtual Status Upsert(Exec& exec, KeySpan keys, const void* vectors, Tick tick) = 0;
  // (exclusive) Adds float32 deltas to the vectors of distinct keys. A new row starts from its
  // initial vector. The number of such calls that the table has had determines how 16-bit vectors
  // are rounded.
  virtual Status Accumulate(Exec& exec, KeySpan keys, const float* deltas, Tick tick) = 0;
  // (exclusive) Sets the vectors, given as float32, and the state of distinct keys. `insert`: keys
  // without a row get one; otherwise they are skipped. `rounding` (the step of rounding.h)
  // determines how 16-bit vectors are rounded.
  virtual Status WriteRows(Exec& exec, KeySpan keys, const float* vectors, const float* state,
                           bool insert, uint64_t rounding, Tick tick) = 0;
  // (exclusive) Applies the optimizer to the rows of distinct keys[begin..end). rows[i] is the row
  // that an earlier call found for keys[i]. If it no longer belongs to keys[i], the gradient is
  // dropped and counted; a table of two tiers first looks the key up again. Ranges may run in
  // parallel, after one BeginBatch. The table's state must be `optimizer`'s. `rounding` as
  // in WriteRows.
  virtual void ApplyRange(Exec& exec, const RowOptimizer& optimizer, KeySpan keys,
                          const RowId* rows, const float* gradients, size_t begin, size_t end,
                          uint64_t rounding, Tick tick) = 0;
  // (exclusive) Removes the keys that have rows, and returns their number.
  virtual size_t Erase(Exec& exec, KeySpan keys, Tick tick, Removal how = Removal::kErase) = 0;

  // (exclusive) Sets the scores of the keys that have rows; the last of repeated keys wins.
  // InvalidArgument if the strategy's scores are stamps, or a score is greater than the strategy
  // allows (Scoring::Last).
  virtual Status SetScores(Exec& exec, KeySpan keys, const Score* scores) = 0;

  // (exclusive) If the strategy counts keys, adds counts[i] to the count of keys[i], as if an
  // inserting lookup had found it this number of times more. Counts of repeated keys add up; keys
  // without a row are skipped.
  virtual Status AddCounts(Exec& exec, KeySpan keys, const uint32_t* counts) = 0;

  // The rows of a dump, in host memory. Times are ticks minus `base`.
  struct LoadedRows {
    KeySpan keys;                      // [n], distinct
    const void* vectors = nullptr;     // [n, dim], of the table's dtype
    const float* state = nullptr;      // [n, state width]; null: initial state
    const CutTime* updates = nullptr;  // [n]
    // [n] as ReadCut returned them for a table with the same strategy; null: the last updates if
    // scores are stamps, otherwise the scores of new rows.
    const CutTime* scores = nullptr;
    Tick base = 0;

    // The rows [begin, begin + n), of a table with this layout.
    LoadedRows Part(size_t begin, size_t n, const RowLayout& layout) const {
      LoadedRows part = *this;
      part.keys = keys.Part(begin, n);
      part.vectors = static_cast<const char*>(vectors) + begin * layout.vector_bytes();
      if (state != nullptr) part.state = state + begin * static_cast<size_t>(layout.state_width);
      part.updates = updates + begin;
      if (scores != nullptr) part.scores = scores + begin;
      return part;
    }
  };
  // (exclusive) Sets rows with their times, all of which are before `tick`, and their scores. If it
  // fails in a table with cold rows, it may have set some.
  virtual Status LoadRows(Exec& exec, const LoadedRows& rows, Tick tick) = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_TABLE_BATCHES_H_
