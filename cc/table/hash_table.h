// HashTable: the batch algorithms of HostTable for one key width and one kind of Lanes.
//
// Everything reduces to two passes (docs/design.md, "Two passes"). Pass 1 is a FindPass over the
// batch with a visitor that does the call's work on rows that are there and leaves kNoRow for the
// rest. Pass 2, Insert, makes rows for those.
//
// Pass 2 (insert_plan.h). Repeated keys are parted off, to take the row of their first occurrence.
// Row ids are dealt in the order of the batch. Threads fill the rows, each a stretch of the batch;
// then each claims slots in the segments it owns, in the order of the batch. So the result does not
// depend on the number of workers.
#ifndef DYNEMB_TABLE_HASH_TABLE_H_
#define DYNEMB_TABLE_HASH_TABLE_H_

#include <memory>

#include "cc/table/batch_scratch.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/find_pass.h"
#include "cc/table/host_table.h"
#include "cc/table/insert_plan.h"
#include "cc/table/lanes.h"

namespace dynemb {

// Keys per piece of parallel work: long enough to hide the start of a pipeline, short enough to
// spread evenly.
constexpr size_t kKeyGrain = 2048;

template <class K, class Lanes>
class HashTable final : public HostTable {
 public:
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table,
                     Exec* exec = nullptr);

  void Find(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) override;
  void Contains(Exec& exec, const void* keys, size_t n, bool* found) const override;
  void Lookup(Exec& exec, const void* keys, size_t n, Tick tick, const void* default_vector,
              void* vectors, RowId* rows) override;
  void ReadRows(Exec& exec, const void* keys, size_t n, float* vectors, float* state,
                bool* found) const override;
  Status FindOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) override;
  Status LookupOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, void* vectors,
                        RowId* rows) override;
  Status Upsert(Exec& exec, const void* keys, size_t n, const void* vectors, Tick tick) override;
  Status Accumulate(Exec& exec, const void* keys, size_t n, const float* deltas,
                    Tick tick) override;
  Status WriteRows(Exec& exec, const void* keys, size_t n, const float* vectors, const float* state,
                   bool insert, uint64_t step, Tick tick) override;
  size_t Erase(Exec& exec, const void* keys, size_t n, Tick tick, bool wipe) override;
  Status LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) override;
  void ApplyRange(Exec& exec, const RowOptimizer& optimizer, const void* keys, const RowId* rows,
                  const float* gradients, size_t begin, size_t end, uint64_t step,
                  Tick tick) override;
  void CheckInvariants() const override;

  // For code that fuses its own work with pass 1 (cc/lookup): the find pass over positions [begin,
  // end) of `key_at`. (shared) `vectors` says whether the visitor reads vectors.
  template <class KeyAt, class Visitor>
  void FindRange(Lanes& lanes, const KeyAt& key_at, size_t begin, size_t end, Tick tick,
                 Visitor& visit) const {
    FindPass(lanes, View(), layout().vector_offset + layout().vector_bytes(), key_at, begin, end,
             tick == 0 ? 0 : stamps_.Encode(tick), visit);
  }
  // (exclusive) Pass 2 with initial vectors, of a batch that BeginBatch has announced: every
  // keys[i], i < n, with rows[i] == kNoRow gets a row, whose id goes to rows[i].
  Status InsertInitial(Exec& exec, const K* keys, size_t n, Tick tick, RowId* rows);
  // The vector that `key` starts with, as it would be stored.
  void InitialVector(K key, void* vector) const;
  // Whether `row`, found for `key` by an earlier call, is still that key's: the generation check.
  bool Holds(RowId row, K key) const {
    return row < rows_.high_water() && *layout().update(rows_.At(row)) != 0 &&
           LoadUnaligned<K>(rows_.At(row)) == key;
  }
  const char* RowAt(RowId row) const { return rows_.At(row); }
  void CountFinds(uint64_t hits, uint64_t misses) const {
    counters_.hits.fetch_add(hits, std::memory_order_relaxed);
    counters_.misses.fetch_add(misses, std::memory_order_relaxed);
  }

 private:
  HashTable() = default;

  TableView<K> View() const {
    return index_.template View<K>(rows_.base(), layout().stride, stamps_.order());
  }

  // Pass 1 over a whole batch; returns how many keys have no row. make(lanes) gives each range its
  // visitor: Hit and Miss, and the counts hits and misses. `counts` says whether these are a lookup
  // that stats() counts.
  enum class Counts { kLookup, kNothing };
  template <class MakeVisitor>
  uint64_t FindBatch(Exec& exec, const K* keys, size_t n, Stamp now, size_t row_bytes,
                     Counts counts, const MakeVisitor& make) const;
  // Pass 1 that only notes rows.
  uint64_t FindRows(Exec& exec, const K* keys, size_t n, Stamp now, Counts counts,
                    RowId* rows) const;

  // The positions i < n with rows[i] != kNoRow, of which there are n - missing; null: all.
  const uint32_t* ListHeld(const RowId* rows, size_t n, uint64_t missing, BatchScratch* scratch);
  // fn(i, row) for such positions, whose rows are `row_bytes` of interest.
  template <class Fn>
  void ForHeld(Exec& exec, const RowId* rows, const uint32_t* held, size_t num_held,
               size_t row_bytes, const Fn& fn);

  // Pass 2: rows for keys[i], their ids to rows[i], for every i < n with rows[i] == kNoRow.
  // fill(lanes, i, key, row_pointer) sets the vector of a new row, which has its key and initial
  // state; i is the first position of its key. `plan` tells afterwards which positions repeat.
  template <class Fill>
  Status Insert(Exec& exec, const K* keys, size_t n, Stamp now, RowId* rows, const Fill& fill,
                InsertPlan* plan);
  // With initial vectors.
  Status InsertInitialAt(Exec& exec, const K* keys, size_t n, Stamp now, RowId* rows,
                         InsertPlan* plan);
  // InvalidArgument if a batch has more keys than its plan can number.
  static Status CheckBatch(size_t n);
  // fn(lanes, j) for each key j of [begin, end), by the owner of its segment.
  template <class Fn>
  void ForSegmentOwners(Exec& exec, const InsertPlan& plan, size_t begin, size_t end,
                        const Fn& fn) const;
  template <class Fill>
  void FillRow(Lanes& lanes, size_t i, K key, RowId row, Stamp now, const Fill& fill);
  // Keys [0, fresh) of the plan: fills their rows in order, so that threads write apart from each
  // other, then claims their slots.
  template <class Fill>
  void PlaceFresh(Exec& exec, const K* keys, const InsertPlan& plan, size_t fresh, Stamp now,
                  RowId* rows, const Fill& fill);
  // The keys from `fresh` on.
  template <class Fill>
  void PlaceByEviction(Exec& exec, const K* keys, const InsertPlan& plan, size_t fresh, Stamp now,
                       RowId* rows, const Fill& fill);
  // Whether `needed` rows are older than `now`.
  bool Evictable(uint64_t needed, Stamp now) const;
  // All that may fail before keys [0, fresh) of the plan get rows of their own and the others those
  // of evicted keys: row ids, slots, room in logs. On failure nothing has changed.
  Status PrepareRows(Exec& exec, size_t fresh, Stamp now, InsertPlan* plan);
  // Gives a row to the keys from `fresh` on whose segments held none that is older than `now`:
  // those of the oldest rows elsewhere.
  template <class Fill>
  void PlaceElsewhere(Exec& exec, const K* keys, const InsertPlan& plan, size_t fresh, Stamp now,
                      RowId* rows, const Fill& fill);
  // Rows of a segment that are older than `now`.
  uint32_t OlderRows(uint32_t segment, Stamp now) const;
  // Frees the row of a key older than `now`, of the first segment from *segment on that has one.
  void EvictAnywhere(uint32_t* segment, Stamp now);
  Status Refuse(uint64_t keys, const std::string& why);

  void LastAccesses(Exec& exec, const RowId* rows, size_t n, Stamp* accesses) const override;
  // fn(i, access) with the slot's last access of each rows[i], which are held.
  template <class Fn>
  void ForSlots(Exec& exec, const RowId* rows, size_t n, const Fn& fn) const;

  // A vector computed as float32 goes into a row.
  void StoreUpdated(const float* vector, K key, uint64_t step, char* row) const;
};

}  // namespace dynemb

#include "cc/table/hash_table_batch.h"
#include "cc/table/hash_table_check.h"
#include "cc/table/hash_table_insert.h"

namespace dynemb {

// Compiled once, in hash_table.cc.
extern template class HashTable<uint64_t, OneLane>;
extern template class HashTable<uint32_t, OneLane>;

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HASH_TABLE_H_
