// HashTable: the batch calls of a host table, for one key width.
//
// A call on a batch of keys has one or two passes (docs/design.md, "Two passes"). Pass 1 is a
// FindPass over the batch: its visitor gets the row of each key, or the key if it has no row. Pass
// 2, Insert, creates rows for these keys if the call inserts. Calls that write vectors write the
// rows of pass 1 only after pass 2, which can fail. Cold rows move to memory before pass 1 (Warm)
// or at the beginning of pass 2 (BringIn). ApplyRange has no pass: it gets row ids, and checks them
// (Holds).
//
// Pass 2 gives a repeated key the row of its first occurrence (insert_plan.h). Row ids are
// allocated in the order of the batch. Threads fill the rows, each a range of the batch; then each
// worker claims slots in the segments assigned to it, in the order of the batch. The result
// therefore does not depend on the number of threads.
//
// hash_table.cc defines pass 1 and the calls that read or insert, hash_table_write.cc the calls
// that write rows, hash_table_insert.cc pass 2 and Erase, hash_table_cold.cc the moves of cold
// rows, hash_table_scores.cc the calls on scores, hash_table_admission.cc admission,
// hash_table_check.cc the check of the invariants. Each instantiates its members for both key
// widths.
#ifndef DYNEMB_TABLE_HASH_TABLE_H_
#define DYNEMB_TABLE_HASH_TABLE_H_

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/batch_scratch.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/find_pass.h"
#include "cc/table/function_ref.h"
#include "cc/table/host_table.h"
#include "cc/table/insert_plan.h"

namespace dynemb {

// Keys per range of work: enough to amortize the start of a pipeline, few enough to spread evenly
// over threads.
constexpr size_t kKeyGrain = 2048;

template <class K>
class HashTable final : public HostTable {
 public:
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table,
                     Exec* exec = nullptr, HotLimit limit = {});

  void Find(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  void Scores(Exec& exec, KeySpan keys, int64_t* scores) const override;
  void Contains(Exec& exec, KeySpan keys, bool* found) const override;
  void Lookup(Exec& exec, KeySpan keys, Tick tick, const void* default_vector, void* vectors,
              RowId* rows) override;
  void ReadRows(Exec& exec, KeySpan keys, float* vectors, float* state, bool* found) const override;
  Status FindOrInsert(Exec& exec, KeySpan keys, Tick tick, RowId* rows) override;
  Status LookupOrInsert(Exec& exec, KeySpan keys, Tick tick, void* vectors, RowId* rows) override {
    return LookupCounted(exec, keys, nullptr, tick, vectors, rows);
  }
  Status LookupCounted(Exec& exec, KeySpan keys, const uint32_t* times, Tick tick, void* vectors,
                       RowId* rows) override;
  Status Upsert(Exec& exec, KeySpan keys, const void* vectors, Tick tick) override;
  Status Accumulate(Exec& exec, KeySpan keys, const float* deltas, Tick tick) override;
  Status WriteRows(Exec& exec, KeySpan keys, const float* vectors, const float* state, bool insert,
                   uint64_t rounding, Tick tick) override;
  size_t Erase(Exec& exec, KeySpan keys, Tick tick, Removal how) override;
  Status SetScores(Exec& exec, KeySpan keys, const Score* scores) override;
  Status AddCounts(Exec& exec, KeySpan keys, const uint32_t* counts) override;
  Status LoadRows(Exec& exec, const LoadedRows& loaded, Tick tick) override;
  void ApplyRange(Exec& exec, const RowOptimizer& optimizer, KeySpan keys, const RowId* rows,
                  const float* gradients, size_t begin, size_t end, uint64_t rounding,
                  Tick tick) override;
  void Warm(Exec& exec, KeySpan keys) override;
  Status HoldRows(Exec& exec, const HeldRows* held, size_t num) override;
  void CheckInvariants() const override;

  // For code that fuses its own work with pass 1 (cc/lookup).
  //
  // (shared) The find pass over positions [begin, end) of `key_at` of a lookup at `tick`, for a
  // visitor that reads vectors.
  template <class KeyAt, class Visitor>
  void FindRange(const KeyAt& key_at, size_t begin, size_t end, Tick tick, bool inserts,
                 Visitor& visit) const {
    const size_t expired =
        FindPass(View(), layout().vector_offset + layout().vector_bytes(), key_at, begin, end,
                 scoring_.Lookup(stamps_.Encode(tick), inserts), ExpiredAt(tick), visit);
    if (expired != 0) found_expired_.store(true, std::memory_order_relaxed);
  }
  // Row ids that a batch has found, or kNoRow.
  struct FoundRows {
    const RowId* rows;
    size_t n;
  };
  // (exclusive) Pass 2 of a lookup with initial vectors, for a batch that was passed to
  // BeginLookup. Each keys[i], i < n, with rows[i] == kNoRow gets a row, whose id is written to
  // rows[i], or AbsentRow() if admission refuses it. `others` are the other rows of this table that
  // the batch uses. `missing` as in InsertPlan::Build.
  Status InsertInitial(Exec& exec, const K* keys, size_t n, Tick tick, RowId* rows,
                       const std::vector<FoundRows>& others = {},
                       const std::vector<uint32_t>* missing = nullptr);
  // The row id and the vector that a lookup returns for a key without a row.
  RowId AbsentRow() const { return admission_.AbsentRow(); }
  void AbsentVector(K key, void* vector) const {
    if (admission_.AbsentIsZero()) {
      memset(vector, 0, layout().vector_bytes());
    } else {
      InitialVector(key, vector);
    }
  }
  // The vector that `key` starts with, in the table's dtype.
  void InitialVector(K key, void* vector) const {
    initializer_.FillAs(options_.dtype, key, vector);
  }
  // The generation check: whether `row`, which an earlier call found for `key`, still belongs to
  // it.
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

  TableView<K> View() const { return index_.template View<K>(rows_.base(), layout().stride); }
  // InvalidArgument if a batch has more keys than its plan can number.
  static Status CheckBatch(size_t n);

  // Pass 1 over a whole batch. Each range gets its own copy of `visitor` (Hit, Miss, and the counts
  // hits and misses). `counts`: whether stats() counts these finds. Returns the number of keys
  // without a row.
  enum class Counts { kLookup, kNothing };
  template <class Visitor>
  uint64_t FindBatch(Exec& exec, const K* keys, size_t n, const Touch& touch,
                     const Expired& expired, size_t row_bytes, Counts counts,
                     const Visitor& visitor) const;
  // Pass 1 that only notes rows.
  uint64_t FindRows(Exec& exec, const K* keys, size_t n, const Touch& touch, const Expired& expired,
                    Counts counts, RowId* rows) const;

  // Lists the n - missing positions i < n with rows[i] != kNoRow. Null if these are all positions.
  const uint32_t* ListHeld(const RowId* rows, size_t n, uint64_t missing, BatchScratch* scratch);
  // Calls fn(i, row) for each position i that ListHeld lists. `row_bytes` is the number of bytes of
  // a row that fn accesses.
  template <class Fn>
  void ForHeld(Exec& exec, const RowId* rows, const uint32_t* held, size_t num_held,
               size_t row_bytes, const Fn& fn);

  // Sets the vector of the new row of `key`, which has its key and its initial state already. `i`
  // is the first position of the key in the batch.
  using Fill = FunctionRef<void(size_t i, K key, char* row)>;
  // The batch of a call that inserts.
  struct Batch {
    const K* keys;
    size_t n;
    RowId* rows;  // [n] the rows that pass 1 found, or kNoRow
    Stamp now;
    Tick tick;
    // Applied to each repeat of a new key.
    Touch touch;
    std::vector<FoundRows> others{};
    // Whether new keys need admission; [n] how often each position counts (null: once).
    bool admits = false;
    const uint32_t* times = nullptr;
    // Whether stats() has counted the keys without rows as misses.
    bool counted = false;
    // Whether this moves cold rows to memory. The rows that it must not evict are pinned then.
    bool is_move = false;
    // Gets the positions of keys whose cold rows were moved to memory, if it is not null.
    std::vector<uint32_t>* moved = nullptr;
    // Whether moved rows get their missed steps (catch_up.h), like the batch's rows in memory.
    bool brings = true;
    // As in InsertPlan::Build.
    const std::vector<uint32_t>* missing = nullptr;
  };
  // Pass 2: creates rows for the keys with rows[i] == kNoRow, and writes their ids to rows[i].
  // Afterwards the scratch's plan has the positions that repeat a key.
  Status Insert(Exec& exec, const Batch& batch, const Fill& fill, BatchScratch* scratch);
  // Moves the cold rows of the keys with rows[i] == kNoRow to memory, and finds these keys again.
  Status BringIn(Exec& exec, const Batch& batch);
  // Warm, which returns its error.
  Status WarmRows(Exec& exec, KeySpan keys);
  // Gives the rows to memory. `brings` as in Batch.
  Status MoveIn(Exec& exec, const Moved& moved, Stamp now, Tick tick,
                const std::vector<FoundRows>& others, bool brings);
  Status MoveAllOut() override;
  Status ListMissing(Exec& exec, KeySpan keys, std::vector<uint64_t>* missing) const override;
  // LoadRows, of rows that memory can hold together.
  Status LoadPart(Exec& exec, const LoadedRows& loaded, Tick tick);
  // Removes expired rows to make room for n keys: all of them, unless it would cost much more than
  // to evict others.
  Status ExpireToInsert(Exec& exec, size_t n, Tick tick);
  // Removes expired rows (ExpireToInsert) if the table has room for fewer than n more keys. If cold
  // rows are never evicted, fails if there still is too little room.
  Status MakeRoom(Exec& exec, size_t n, Tick tick);
  // Removes the rows of keys with rows[i] == kNoRow that have a row nevertheless: one that has
  // expired.
  void RemoveExpiredRows(Exec& exec, const Batch& batch);
  // If the batch admits: counts the keys of its plan, and removes the refused keys from the plan.
  void Admit(const Batch& batch, Exec& exec, BatchScratch* scratch);
  void ForgetCounts(KeySpan keys);
  // Insert with initial vectors.
  Status InsertInitialAt(Exec& exec, const Batch& batch, BatchScratch* scratch);
  // Does everything that may fail (row ids, slots, room in logs), before keys [0, fresh) of the
  // plan get new rows and the other keys get the rows of evicted keys. On failure nothing has
  // changed.
  Status PrepareRows(Exec& exec, size_t fresh, const Evictable& evictable, InsertPlan* plan);
  void FillRow(size_t i, K key, RowId row, Stamp now, const Fill& fill);
  // Keys [0, fresh) of the plan: fills their rows in order, so that threads write far apart, then
  // claims their slots.
  void PlaceFresh(Exec& exec, const Batch& batch, const InsertPlan& plan, size_t fresh,
                  const Evictable& evictable, const Fill& fill);
  // Gives each key from `fresh` on the slot and the row of another key on its path. Skips keys
  // whose segment has no row that may be evicted.
  void PlaceByEviction(Exec& exec, const Batch& batch, const InsertPlan& plan, size_t fresh,
                       const Evictable& evictable, const Fill& fill);
  // Gives the keys that PlaceByEviction skipped rows that were evicted from any segment.
  void PlaceElsewhere(const Batch& batch, const InsertPlan& plan, size_t fresh,
                      const Evictable& evictable, const Fill& fill);
  // Whether a batch may evict `needed` rows. `num_pinned`: the number of rows that are pinned.
  bool CanEvict(uint64_t needed, const Evictable& evictable, uint64_t num_pinned) const;
  // The number of rows of a segment that may be evicted.
  uint32_t EvictableRows(uint32_t segment, const Evictable& evictable) const;
  // Evicts a row from the first segment at or after *segment that has one that may be evicted.
  void EvictAnywhere(uint32_t* segment, Stamp now, const Evictable& evictable);
  Status Refuse(uint64_t keys, const std::string& why);
  // Calls fn(j) for each key j in [begin, end) of the plan, on the worker of its segment.
  template <class Fn>
  void ForSegmentWorkers(Exec& exec, const InsertPlan& plan, size_t begin, size_t end,
                         const Fn& fn) const;

  void FindQuietly(Exec& exec, KeySpan keys, const Expired& expired, RowId* rows) const override;
  void ReadScores(Exec& exec, const RowId* rows, size_t n, Score* scores) const override;
  Score ScoreOf(RowId row) const override;
  void AdmissionCounts(KeySpan keys, uint32_t* counts) const override;
  // Sets the score of each rows[i], all of which are live, to score(i).
  void WriteScores(Exec& exec, const RowId* rows, size_t n, FunctionRef<Score(size_t i)> score);
  // Finds the rows of the keys that have one. The scratch then has these rows, and their positions
  // in `keys`. Returns their number.
  size_t FindHeld(Exec& exec, KeySpan keys, BatchScratch* scratch) const;
  // Calls fn(i, score) with the address of the score of each rows[i], all of which are live.
  template <class Fn>
  void ForSlots(Exec& exec, const RowId* rows, size_t n, const Fn& fn) const;

  // Whether a pass has found expired rows since the last insert.
  mutable std::atomic<bool> found_expired_{false};
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HASH_TABLE_H_
