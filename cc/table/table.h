// Table: a hash table from keys to rows (vector + optimizer state) that grows while it is used. One
// per variable.
//
// Batches. Every call works on a batch of keys, given as a plain array of the table's key type, and
// spreads the work over an Exec. Where rows or vectors come back, position i belongs to keys[i].
// Keys of a batch may repeat unless said otherwise. `tick` is the batch's number from a Clock; it
// must be greater than every tick the table has seen, so take it while holding the lock.
//
// Memory. Arrays are where the table is: in the host's memory for Table::Create's, in the device's
// for those of cc/device, whose Exec is a stream. But Export, ReadCut and LoadRows, which go over
// whole tables, always work on arrays of the host.
//
// Locking. Calls marked (shared) may run beside each other; calls marked (exclusive) may not run
// beside anything. The caller holds mutex() accordingly, for several tables through TableLock.
//
// Failure. A call that returns an error, or throws std::bad_alloc, has changed nothing but the
// times of last access, unless it says otherwise. On a device calls that return nothing can fail
// too: Error tells.
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

// Where rows may be.
enum class Tier : uint8_t {
  kHost,    // the host's memory; Table::Create
  kHbm,     // a device's memory (cc/device), as the other
  kHybrid,  // the first max_hbm_bytes of rows in the device's memory, the others in the host's
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
  Tier tier = Tier::kHost;
  uint64_t max_hbm_bytes = 0;  // kHybrid
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
  uint64_t device_hits = 0;     // of these, in a device's memory
  uint64_t misses = 0;          // keys looked up that had none
  uint64_t inserts = 0;
  uint64_t evictions = 0;
  uint64_t erased = 0;
  uint64_t refused = 0;  // keys that found no place
  uint64_t dropped_gradients =
      0;  // for keys without a row, or whose row was evicted since the lookup
  uint64_t nonfinite_gradients = 0;  // rows whose gradient held a NaN or Inf
  uint64_t device_rows = 0;          // places of rows in a device's memory that are in use
  uint64_t promotions = 0;           // rows moved into a device's memory
};

// A stretch of rows to export.
struct ExportPlan {
  std::vector<RowId> rows;
  int64_t next_cursor = -1;  // -1: the end was reached
};

class Table {
 public:
  // A table without rows, in the memory of the host. InvalidArgument names the option and its
  // value. `exec` takes the memory of init_capacity; null: the caller's thread does.
  static Status Create(const TableOptions& options, std::unique_ptr<Table>* table,
                       Exec* exec = nullptr);
  virtual ~Table() = default;
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // What a table with these options hashes its keys with: the same in every run, for tables of
  // different names or seeds not the same. Neither ranks nor files depend on it.
  static uint64_t SaltOf(const TableOptions& options);

  const TableOptions& options() const { return options_; }
  SharedMutex& mutex() const { return mutex_; }
  virtual const RowLayout& layout() const = 0;
  const StateSpec& state_spec() const { return state_spec_; }

  // (shared) What a call that could not tell has failed with, the last of them, once; or always,
  // that the table is in disorder since then, and refuses whatever changes it. Whoever uses what
  // such a call has delivered asks first. Never an error in the host's memory.
  virtual Status Error() const { return Status(); }

  virtual uint64_t size() const = 0;     // (shared)
  virtual TableStats stats() const = 0;  // (shared)

  // (exclusive) Gives every row room for the optimizer's state. Nothing happens if it has just that
  // already; any other state the rows had is dropped.
  Status AttachState(Exec& exec, const StateSpec& spec) {
    return spec == state_spec_ ? Status() : ResetState(exec, spec);
  }
  // (exclusive) The same, but any state is dropped: each row has the initial one.
  virtual Status ResetState(Exec& exec, const StateSpec& spec) = 0;

  // Two optimizers may keep the same state, and still must not step each other's. So state has an
  // owner: a text that names one optimizer among all of the process. State that was restored has
  // none, until an optimizer takes or steps it.
  const std::string& state_owner() const { return state_owner_; }
  // (exclusive) AttachState, and the state is the owner's from now on; without an owner nobody's.
  // State of another owner is not continued: it begins anew.
  // `*begins_anew`: whether it does.
  Status TakeState(Exec& exec, const StateSpec& spec, const std::string& owner, bool* begins_anew);
  // (shared) FailedPrecondition, naming the table, the optimizer whose state it has and the one
  // that tries, if the state is not `spec` or belongs to another owner. An optimizer without state
  // may step any table; an empty owner, any state that is as the spec says.
  Status CheckState(const StateSpec& spec, const std::string& owner) const;
  // (exclusive) After CheckState: state without an owner is this one's from now on.
  void OwnState(const StateSpec& spec, const std::string& owner) {
    if (state_owner_.empty() && !spec.widths.empty()) state_owner_ = owner;
  }
  // (exclusive) Removes every row.
  virtual Status Clear(Exec& exec, Tick tick) = 0;

  // (exclusive) Announces a batch that writes and names n keys; several times with one tick add up.
  // The calls below announce themselves; code that runs passes of its own (cc/lookup) does so
  // before the first. Sweeps old stamps (stamps.h).
  virtual Stamp BeginBatch(Exec& exec, Tick tick, size_t n) = 0;

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
  virtual void Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n,
                       Tick since, Tick now, bool* changed) const = 0;

  // (exclusive) rows[i] = the row of keys[i], made with its initial vector and state where there
  // was none.
  virtual Status FindOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows) = 0;
  // (exclusive) FindOrInsert, and copies the rows that make room.
  virtual Status InsertAndEvict(Exec& exec, const void* keys, size_t n, Tick tick, RowId* rows,
                                EvictedRows* evicted) = 0;
  // (exclusive) FindOrInsert, and copies the vectors.
  virtual Status LookupOrInsert(Exec& exec, const void* keys, size_t n, Tick tick, void* vectors,
                                RowId* rows) = 0;
  // (exclusive) Sets vectors (the table's dtype). Of repeated keys the last wins. New rows get
  // initial state.
  virtual Status Upsert(Exec& exec, const void* keys, size_t n, const void* vectors, Tick tick) = 0;
  // (exclusive) Adds float32 deltas to the vectors of distinct keys. A new row starts from its
  // initial vector. 16-bit vectors are rounded by the number of such calls that the table has had.
  virtual Status Accumulate(Exec& exec, const void* keys, size_t n, const float* deltas,
                            Tick tick) = 0;
  // (exclusive) Sets float32 vectors and state of distinct keys; a key without a row is inserted,
  // or skipped. `step` (rounding.h) says by which random bits 16-bit vectors are rounded.
  virtual Status WriteRows(Exec& exec, const void* keys, size_t n, const float* vectors,
                           const float* state, bool insert, uint64_t step, Tick tick) = 0;
  // (exclusive) Removes the keys that are there; returns how many were. `wipe`: also overwrites
  // their rows with zeros.
  virtual size_t Erase(Exec& exec, const void* keys, size_t n, Tick tick, bool wipe = false) = 0;

  // (exclusive) Applies the optimizer to the rows of distinct keys[begin..end). rows[i] is where an
  // earlier call found keys[i]; a row that is no longer that key's is not touched, and counted.
  // Ranges may run in parallel, after one BeginBatch. The table's state must be `optimizer`'s.
  // `step` as in WriteRows.
  virtual void ApplyRange(Exec& exec, const RowOptimizer& optimizer, const void* keys,
                          const RowId* rows, const float* gradients, size_t begin, size_t end,
                          uint64_t step, Tick tick) = 0;

  // (shared) The rows updated after `since` (0: all), from row `cursor` on, at most `limit`. Rows
  // that are neither erased nor evicted come exactly once when next_cursor is followed from 0 to
  // -1, and Promote is not called meanwhile.
  virtual ExportPlan PlanExport(Exec& exec, uint64_t cursor, uint64_t limit, Tick since) const = 0;
  // (shared, same lock as the plan) keys, vectors (the table's types), state and ticks of last
  // update, to the host's memory; null skips one.
  virtual void Export(Exec& exec, const ExportPlan& plan, void* keys, void* vectors, float* state,
                      int64_t* updates) const = 0;

  // A cut of the table (changes.h); cc/table/snapshot.h reads the cuts of several tables.
  //
  // (exclusive) Begins a cut of the rows updated after `since` (0: of all), with the keys deleted
  // since then if they are wanted. FailedPrecondition: a cut is running, or some of those keys have
  // been forgotten.
  virtual Status BeginCut(Exec& exec, Tick watermark, Tick since, bool with_deleted,
                          SavedRows* saved, size_t number) = 0;
  virtual void EndCut() = 0;           // (exclusive)
  virtual const Cut* cut() const = 0;  // null: none is running
  // (shared) The next rows of the cut that are to be read, at most `limit`. A call looks at a few
  // times as many rows at most, and may find none among them.
  virtual std::vector<RowId> PlanCut(size_t limit) = 0;
  // (shared) Whether all rows of the cut have been looked at.
  virtual bool CutIsRead() const = 0;
  // (shared, same lock as the plan) Delivers the planned rows; null skips a column.
  virtual void ReadCut(Exec& exec, const std::vector<RowId>& plan, void* keys, void* vectors,
                       float* state, CutTime* updates, CutTime* accesses) = 0;
  // Whether changes are noted; (exclusive) notes them from now on, the table being as it was at
  // `tick`, if they were not before.
  virtual bool tracking() const = 0;
  virtual void Track(Tick tick) = 0;

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
  virtual void Adopt(Table* other, Tick tick) = 0;

  // (shared) Whether so much was read since the last Promote that another is worth its work.
  virtual bool PromotionIsDue() const { return false; }
  // (exclusive) Makes up for reads since the last call: rows that are read often move to the faster
  // memory, where a table has two. Row ids found before are not valid after it but for ApplyRange,
  // which looks up again where it must.
  virtual Status Promote(Exec& exec, Tick tick) {
    (void)exec;
    (void)tick;
    return Status();
  }

  // (exclusive) Promote if it is due. Without memory for it rows stay where they are: that is no
  // error of the batch it was called for.
  Status PromoteIfDue(Exec& exec, Tick tick);

  // (shared, or exclusive) Aborts the process with a message if an invariant of the structure does
  // not hold. For tests.
  virtual void CheckInvariants() const = 0;

 protected:
  Table() = default;
  // InvalidArgument names the option and its value.
  static Status CheckOptions(const TableOptions& options);
  // The error of a table that is full.
  Status Full(uint64_t keys, uint64_t size, uint64_t capacity, const std::string& why) const;
  // FailedPrecondition: a cut is running already, or some of the keys deleted since `since` have
  // been forgotten.
  Status CheckNoCut(const Cut* running) const;
  Status CheckDeletions(const DeletionLog& log, Tick since) const;
  // The state that a new row gets. InvalidArgument names what is wrong with the spec.
  static Status InitialState(const StateSpec& spec, std::vector<float>* initial);
  // For Adopt. Who steps a table goes on with the rows it gets, if their state is the same; other
  // state has no owner.
  void SwapStateSpecs(Table* other);

  TableOptions options_;
  StateSpec state_spec_;
  uint64_t additions_ = 0;  // calls of Accumulate

 private:
  std::string state_owner_;
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
