// Table: a hash table from keys to rows (vector + optimizer state) that grows while it is used. One
// per variable.
//
// Batches. Every call works on a batch of keys, given as a plain array of the table's key type, and
// spreads the work over an Exec. Where rows or vectors come back, position i belongs to keys[i].
// Keys of a batch may repeat unless said otherwise. `tick` is the batch's number from a Clock; it
// must be greater than every tick the table has seen, so take it while holding the lock.
//
// Locking. Calls marked (shared) may run beside each other; calls marked (exclusive) may not run
// beside anything. The caller holds mutex() accordingly, for several tables through TableLock.
//
// Failure. A call that returns an error has changed nothing but the times of last access, unless it
// says otherwise.
#ifndef DYNEMB_TABLE_TABLE_H_
#define DYNEMB_TABLE_TABLE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc/table/changes.h"
#include "cc/table/evicted_rows.h"
#include "cc/table/exec.h"
#include "cc/table/index.h"
#include "cc/table/initializer.h"
#include "cc/table/optimizer.h"
#include "cc/table/row.h"
#include "cc/table/row_store.h"
#include "cc/table/shared_mutex.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

// How a victim is chosen when a table at max_capacity gets a new key.
enum class EvictStrategy : uint8_t {
  kLru,   // the least recently accessed row of the new key's neighbourhood
  kNone,  // nothing is evicted; the insert fails
};

struct TableOptions {
  std::string name;
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  int64_t init_capacity = 1024;  // rows to make room for at once, their memory included
  int64_t max_capacity = 0;      // rows at most; 0: no limit but memory
  double max_load_factor = 0.85;
  EvictStrategy evict_strategy = EvictStrategy::kLru;
  uint64_t seed = 0;
  bool stochastic_rounding = true;  // of updates of 16-bit vectors
  std::vector<ColumnInit> initializer{ColumnInit{InitKind::kConstant, 0.0f, 0.0f}};
};

// What an optimizer keeps in every row: states of `widths` floats, each starting at its value of
// `inits`.
struct StateSpec {
  std::string optimizer;
  std::vector<int64_t> widths;
  std::vector<float> inits;

  int64_t width() const;
  bool operator==(const StateSpec& o) const {
    return optimizer == o.optimizer && widths == o.widths && inits == o.inits;
  }
};

// Counted since the table was made. `bytes` are in use now.
struct TableStats {
  uint64_t size = 0;   // rows held
  uint64_t slots = 0;  // size / slots is the load
  uint64_t index_bytes = 0;
  uint64_t row_bytes = 0;
  uint64_t metadata_bytes = 0;  // index, keys and times: all but vectors and state
  uint64_t hits = 0;            // keys looked up that had a row
  uint64_t misses = 0;          // keys looked up that had none
  uint64_t inserts = 0;
  uint64_t evictions = 0;
  uint64_t erased = 0;
  uint64_t refused = 0;  // keys that found no place
  uint64_t dropped_gradients =
      0;  // for keys without a row, or whose row was evicted since the lookup
  uint64_t nonfinite_gradients = 0;  // rows whose gradient held a NaN or Inf
};

// A stretch of rows to export.
struct ExportPlan {
  std::vector<RowId> rows;
  int64_t next_cursor = -1;  // -1: the end was reached
};

class Table {
 public:
  // A table without rows. InvalidArgument names the option and its value. `exec` takes the memory
  // of init_capacity; null: the caller's thread does.
  static Status Create(const TableOptions& options, std::unique_ptr<Table>* table,
                       Exec* exec = nullptr);
  virtual ~Table() = default;
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const TableOptions& options() const { return options_; }
  const RowLayout& layout() const { return rows_.layout(); }
  const StateSpec& state_spec() const { return state_spec_; }
  SharedMutex& mutex() const { return mutex_; }

  uint64_t size() const { return rows_.live(); }  // (shared)
  TableStats stats() const;                       // (shared)

  // (exclusive) Gives every row room for the optimizer's state. Nothing happens if it has just that
  // already; any other state the rows had is dropped.
  Status AttachState(Exec& exec, const StateSpec& spec);
  // (exclusive) Removes every row.
  Status Clear(Tick tick);

  // (exclusive) Announces a batch that writes and names n keys; several times with one tick add up.
  // The calls below announce themselves; code that runs passes of its own (cc/lookup) does so
  // before the first. Moves the base of stamps when they run out.
  Stamp BeginBatch(Tick tick, size_t n);

  // (shared) rows[i] = the row of keys[i], or kNoRow. Counts as an access.
  virtual void Find(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) = 0;
  // (shared) Without counting as an access.
  virtual void Contains(Exec& exec, const void* keys, size_t n, bool* found) const = 0;
  // (shared) Like Find, and copies the vectors. A key without a row gets `default_vector` (dim
  // elements), or where that is null the vector it would start with.
  virtual void Lookup(Exec& exec, const void* keys, size_t n, Tick tick, const void* default_vector,
                      void* vectors, RowId* rows) = 0;
  // (shared) vectors as float32 and state of the keys that have rows; zeros for others. Not an
  // access.
  virtual void ReadRows(Exec& exec, const void* keys, size_t n, float* vectors, float* state,
                        bool* found) const = 0;

  // (shared) changed[i] = whether rows[i] may have another vector than when an earlier call, after
  // the batch `since`, found rows_before[i] (kNoRow: no row) for the same key. What batch `now` has
  // inserted where there was no row is as it was read then.
  void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n, Tick since,
               Tick now, bool* changed) const;

  // (exclusive) rows[i] = the row of keys[i], made with its initial vector and state where there
  // was none.
  virtual Status FindOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) = 0;
  // (exclusive) FindOrInsert, and copies the rows that make room.
  Status InsertAndEvict(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows,
                        EvictedRows* evicted) {
    evicted_ = evicted;
    Status status = FindOrInsert(exec, keys, n, tick, rows);
    evicted_ = nullptr;
    return status;
  }
  // (exclusive) FindOrInsert, and copies the vectors.
  virtual Status LookupOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, void* vectors,
                                RowId* rows) = 0;
  // (exclusive) Sets vectors (the table's dtype). Of repeated keys the last wins. New rows get
  // initial state. If the system refuses memory for new rows, rows that were there may have been
  // set already; a table that is full is unchanged.
  virtual Status Upsert(Exec& exec, const void* keys, size_t n, const void* vectors, Tick tick) = 0;
  // (exclusive) Adds float32 deltas to the vectors of distinct keys. A new row starts from its
  // initial vector.
  virtual Status Accumulate(Exec& exec, const void* keys, size_t n, const float* deltas,
                            Tick tick) = 0;
  // (exclusive) Sets float32 vectors and state of distinct keys; a key without a row is inserted,
  // or skipped.
  virtual Status WriteRows(Exec& exec, const void* keys, size_t n, const float* vectors,
                           const float* state, bool insert, Tick tick) = 0;
  // (exclusive) Removes the keys that are there; returns how many were. `wipe`: also overwrites
  // their rows with zeros.
  virtual size_t Erase(Exec& exec, const void* keys, size_t n, Tick tick, bool wipe = false) = 0;

  // (exclusive) Applies the optimizer to the rows of distinct keys[begin..end). rows[i] is where an
  // earlier call found keys[i]; a row that is no longer that key's is not touched, and counted.
  // Ranges may run in parallel, after one BeginBatch. The table's state must be `optimizer`'s.
  virtual void ApplyRange(const RowOptimizer& optimizer, const void* keys, const RowId* rows,
                          const float* gradients, size_t begin, size_t end, Tick tick) = 0;

  // (shared) The rows updated after `since` (0: all), from row `cursor` on, at most `limit`. Rows
  // that are neither erased nor evicted come exactly once when next_cursor is followed from 0 to
  // -1.
  ExportPlan PlanExport(uint64_t cursor, uint64_t limit, Tick since) const;
  // (shared, same lock as the plan) keys, vectors (the table's types), state and ticks of last
  // update; null skips one.
  void Export(Exec& exec, const ExportPlan& plan, void* keys, void* vectors, float* state,
              int64_t* updates) const;

  // A cut of the table (changes.h); cc/table/snapshot.h reads the cuts of several tables.
  //
  // (exclusive) Begins a cut of the rows updated after `since` (0: of all), with the keys deleted
  // since then if they are wanted. FailedPrecondition: a cut is running, or some of those keys have
  // been forgotten.
  Status BeginCut(Exec& exec, Tick watermark, Tick since, bool with_deleted, SavedRows* saved,
                  size_t number);
  void EndCut() { changes_.EndCut(); }               // (exclusive)
  const Cut* cut() const { return changes_.cut(); }  // null: none is running
  // (shared) The next rows of the cut that are to be read, at most `limit`. A call looks at a few
  // times as many rows at most, and may find none among them.
  std::vector<RowId> PlanCut(size_t limit);
  // (shared) Whether all rows of the cut have been looked at.
  bool CutIsRead() const;
  // (shared, same lock as the plan) Delivers the planned rows; null skips a column.
  void ReadCut(Exec& exec, const std::vector<RowId>& plan, void* keys, void* vectors, float* state,
               CutTime* updates, CutTime* accesses);
  // Whether changes are noted; (exclusive) notes them from now on, the table being as it was at
  // `tick`, if they were not before.
  bool tracking() const { return changes_.tracking(); }
  void Track(Tick tick);

  // What a loaded row brings along. Times are ticks less `base`.
  struct LoadedRows {
    const void* keys = nullptr;         // [n], distinct
    const void* vectors = nullptr;      // [n, dim], the table's dtype
    const float* state = nullptr;       // [n, state width]; null: initial state
    const CutTime* updates = nullptr;   // [n]
    const CutTime* accesses = nullptr;  // [n]
    Tick base = 0;
    size_t n = 0;
  };
  // (exclusive) Sets rows, their times too. `tick` is greater than any of them.
  virtual Status LoadRows(Exec& exec, const LoadedRows& rows, Tick tick) = 0;
  // (exclusive on both) Exchanges the rows, and the state they have, with another table of the same
  // key type, dtype, dim and max_capacity. This table is then as it was at `tick`; changes are
  // noted from there.
  void Adopt(Table* other, Tick tick);

  // (shared, or exclusive) Aborts the process with a message if an invariant of the structure does
  // not hold. For tests.
  virtual void CheckInvariants() const = 0;

 protected:
  Table() = default;
  Status Init(const TableOptions& options, Exec* exec);

  // accesses[i] = the last access of rows[i], which are held.
  virtual void LastAccesses(Exec& exec, const RowId* rows, size_t n, Stamp* accesses) const = 0;

  // To be called before a row changes or gets another key. `updated` is its last update; the
  // caller may have overwritten it in the row already.
  void BeforeWrite(RowId row, Stamp updated) {
    if (!changes_.tracking()) return;
    changes_.BeforeWrite(row, rows_.At(row), updated == 0 ? 0 : base_ + updated);
  }
  // The same for all rows.
  void BeforeWriteAll();
  // To be called before the row of `key` is given to another, or freed, to make room.
  void BeforeEviction(uint64_t key, RowId row, Stamp now) {
    if (changes_.tracking()) changes_.Deleted(base_ + now, key);
    if (evicted_ != nullptr) evicted_->Add(key, rows_.At(row));
  }
  // Gives back a row that is in no slot any more.
  void FreeRow(RowId row) {
    Stamp* updated = layout().update(rows_.At(row));
    BeforeWrite(row, *updated);
    *updated = 0;
    rows_.Free(row);
  }
  // Those of `keys` (bit patterns) that have no row.
  void DropHeld(Exec& exec, const std::vector<uint64_t>& keys,
                std::vector<uint64_t>* not_held) const;
  uint64_t KeyBits(RowId row) const;

  // Rows the table may hold.
  uint64_t capacity() const;
  Stamp ToStamp(Tick tick) const {
    const Tick since_base = tick > base_ ? tick - base_ : 1;
    return since_base > kLastStamp ? kLastStamp : static_cast<Stamp>(since_base);
  }

  static constexpr Stamp kLastStamp = 0xFFFFFFFFu;
  // How far the base is moved, and how close to the end.
  static constexpr Stamp kRebase = 0x80000000u;
  static constexpr Stamp kRebaseAt = 0xFFFF0000u;

  TableOptions options_;
  StateSpec state_spec_;
  std::vector<float> initial_state_;
  Initializer initializer_;
  Index index_;
  RowStore rows_;
  Changes changes_;
  EvictedRows* evicted_ = nullptr;  // of the running batch, if it wants them
  Tick base_ = 0;
  Stamp batch_stamp_ = 0;    // of the last BeginBatch
  uint64_t batch_keys_ = 0;  // keys named under it: no more rows than this are as fresh

  struct Counters {
    std::atomic<uint64_t> hits{0}, misses{0}, inserts{0}, evictions{0}, erased{0}, refused{0},
        dropped_gradients{0}, nonfinite_gradients{0};
  };
  mutable Counters counters_;

 private:
  mutable SharedMutex mutex_;
};

// Locks several tables, each once even if it is named twice, in the order of their addresses, so
// that calls on overlapping sets cannot wait for each other in a circle.
class TableLock {
 public:
  enum class Mode { kShared, kExclusive };
  TableLock(std::vector<Table*> tables, Mode mode);
  ~TableLock();
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

 private:
  std::vector<Table*> tables_;
  Mode mode_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_TABLE_H_
