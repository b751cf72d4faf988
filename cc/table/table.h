// Table: a hash table from keys to rows (vector and optimizer state) that grows while it is used.
// There is one per variable.
//
// The interface has three parts: batches of keys (table_batches.h), cuts (table_cut.h), and the
// table as a whole (here).
//
// Memory. Arrays are in the table's memory: host memory for a table of Table::Create, device memory
// for a table of cc/device, whose Exec is a stream. Calls that process whole tables (Export,
// ReadCut and LoadRows) always use arrays in host memory, and scores and counts are
// always in host memory.
//
// Locking. Calls marked (shared) may run concurrently with each other. Calls marked (exclusive) may
// not run concurrently with any other. The caller holds mutex() accordingly; for several tables it
// uses TableLock.
//
// Failure. A call that returns an error, or throws std::bad_alloc, has changed nothing that a
// caller can observe, except scores of rows that it found, the epoch (score.h), admission counters
// and statistics, unless it says otherwise. It may have removed expired rows, brought rows up to
// date (catch_up.h), and moved rows between memory and files (cold_rows.h). Calls that return no
// Status can fail, too, on a device or in a table with cold rows; Error returns their errors.
#ifndef DYNEMB_TABLE_TABLE_H_
#define DYNEMB_TABLE_TABLE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/catch_up.h"
#include "cc/table/cold_rows.h"
#include "cc/table/expiry.h"
#include "cc/table/row.h"
#include "cc/table/row_columns.h"
#include "cc/table/row_predicate.h"
#include "cc/table/score.h"
#include "cc/table/shared_mutex.h"
#include "cc/table/table_batches.h"
#include "cc/table/table_cut.h"
#include "cc/table/table_options.h"

namespace dynemb {

// Rows to export.
struct ExportPlan {
  std::vector<RowId> rows;
  int64_t next_cursor = -1;  // -1: there are no further rows
  // Whether these are cold rows (cold_rows.h): `rows` are their places then, and `times` theirs.
  bool cold = false;
  std::vector<RowTimes> times{};
};

class Table : public TableBatches, public TableCut {
 public:
  // Creates an empty table in host memory. InvalidArgument names the option and its value. `exec`
  // commits the memory of init_capacity; if it is null, the calling thread does.
  static Status Create(const TableOptions& options, std::unique_ptr<Table>* table,
                       Exec* exec = nullptr);
  // Creates an empty table that keeps at most max_memory_bytes of rows in host memory, and gives
  // the other rows to `cold`. InvalidArgument also if the memory holds fewer than kLeastHotRows.
  static constexpr uint64_t kLeastHotRows = 64;
  static Status Create(const TableOptions& options, std::unique_ptr<ColdRows> cold,
                       uint64_t max_memory_bytes, std::unique_ptr<Table>* table,
                       Exec* exec = nullptr);
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // The salt of the table's hash (hash.h).
  static uint64_t SaltOf(const TableOptions& options);

  const TableOptions& options() const { return options_; }
  SharedMutex& mutex() const { return mutex_; }
  virtual const RowLayout& layout() const = 0;
  virtual uint64_t size() const = 0;     // (shared)
  virtual TableStats stats() const = 0;  // (shared)
  // Whether no call changes the table. TableLock then does not lock it.
  virtual bool read_only() const { return false; }

  // (shared) Returns the last error of a call that could not return one, and forgets it. An error
  // of cold rows is returned only to the thread whose call failed. If an error has left the table
  // inconsistent, every call of Error returns that error, and the table refuses every change.
  // Callers check Error before they use the results of calls that return no Status. A table in host
  // memory without cold rows has no such errors; a table of an exported model has one if its files
  // are damaged.
  virtual Status Error() const { return Status(); }

  // --- Optimizer state

  const StateSpec& state_spec() const { return state_spec_; }
  // (exclusive) Makes room for the optimizer's state in every row. A table that has this state
  // already keeps it; other state is dropped, and each row gets the initial state.
  Status AttachState(Exec& exec, const StateSpec& spec) {
    return spec == state_spec_ ? Status() : ResetState(exec, spec);
  }
  // (exclusive) The same, but drops equal state, too.
  virtual Status ResetState(Exec& exec, const StateSpec& spec) = 0;

  // Two optimizers may keep equal state, and still must not step each other's. State therefore has
  // an owner: a text that is unique to one optimizer in the process. Restored state has no owner
  // until an optimizer takes or steps it.
  const std::string& state_owner() const { return state_owner_; }
  // (exclusive) AttachState, and makes `owner` the owner; if `owner` is empty, the state has no
  // owner afterwards. State of another owner is reset. `*was_reset`: whether the state was reset.
  Status TakeState(Exec& exec, const StateSpec& spec, const std::string& owner, bool* was_reset);
  // (shared) FailedPrecondition if the state is not `spec` or has another owner. The message names
  // the table, the optimizer whose state it has, and the one that tries to step it. An optimizer
  // without state may step any table. An empty owner may step any state that is equal to `spec`.
  Status CheckState(const StateSpec& spec, const std::string& owner) const;
  // (exclusive) After CheckState: makes `owner` the owner of state that has none.
  void OwnState(const StateSpec& spec, const std::string& owner) {
    if (state_owner_.empty() && !spec.widths.empty()) state_owner_ = owner;
  }

  // --- Catch-up (catch_up.h). While rows may be behind, calls that read vectors bring their rows
  // up to date first, and need exclusive access.

  const CatchUp& catch_up() const { return catch_up_; }
  // (exclusive) Brings the rows of keys up to date. Calls that read or write vectors, except
  // ReadRows, do this themselves.
  virtual void BringKeys(Exec& exec, KeySpan keys) = 0;
  // (exclusive) Begins a step, before its calls of ApplyRange at the same tick. Steps of optimizers
  // without catch_up are not counted. If it fails, rows may have been brought up to date.
  virtual Status BeginStep(Exec& exec, OptimizerFlags flags, const Hyper& hyper, Tick tick);
  // (exclusive) After the last call of ApplyRange: the step has happened.
  virtual void EndStep(Exec& exec, const Hyper& hyper, uint64_t iteration, Tick tick);
  // (exclusive) Adds the steps that another table with the same state saved (CatchUp::Save): the
  // rows of that table, which the caller is about to load, have them, and other rows lack those
  // that are later than the last step that was loaded before.
  // InvalidArgument if it is no record for this table's state.
  virtual Status LoadSteps(Exec& exec, const std::vector<double>& saved, Tick tick);

  // --- Expiry (expiry.h). For all calls except these, Erase and size(), a key whose row has
  // expired has no row. Inserting batches remove some expired rows each.

  // (exclusive) Removes all rows that have expired; sets *expired to their number. If memory runs
  // out, some of them have been removed.
  virtual Status Expire(Exec& exec, Tick tick, uint64_t* expired);
  // (exclusive) Sets the time of TtlClock::kData. An earlier time than the last one is ignored.
  // InvalidArgument if the table has another clock.
  virtual Status SetDataTime(int64_t time, Tick tick);
  // (exclusive) The marks by which the ages of the rows are known, for files (Expiry::Save).
  virtual std::vector<int64_t> ExpiryMarks(Tick tick) { return expiry_.Save(tick); }
  // (exclusive) Replaces the marks. InvalidArgument if they are not marks.
  virtual Status SetExpiryMarks(const std::vector<int64_t>& marks);

  // (exclusive) Begins the next epoch of a table whose strategy has epochs; otherwise does nothing.
  virtual Status AdvanceEpoch(Exec& exec) = 0;

  // --- All rows

  // (exclusive) Removes every row.
  virtual Status Clear(Exec& exec, Tick tick) = 0;
  // (shared) At most `limit` rows that satisfy the predicate, from row `cursor` on. Calls that
  // follow next_cursor from 0 to -1 list each such row exactly once, except rows that are erased or
  // evicted in the meantime. Between them, no row may move between tiers: by Promote, or by an
  // inserting lookup that returns vectors.
  virtual ExportPlan SelectRows(Exec& exec, uint64_t cursor, uint64_t limit,
                                const RowPredicate& where) const;
  // (shared) SelectRows, of the rows that were updated after `since` (0: all rows).
  ExportPlan PlanExport(Exec& exec, uint64_t cursor, uint64_t limit, Tick since) const {
    RowPredicate where;
    where.updated_after = since;
    return SelectRows(exec, cursor, limit, where);
  }
  // (shared, under the lock of SelectRows) Copies the rows, with ticks of last update, and scores
  // as Scores returns them, to columns in host memory. The copies are up to date.
  void Export(Exec& exec, const ExportPlan& plan, TickColumns to) const;
  // (exclusive) Evicts the rows with the lowest scores until at most `rows` rows are left; sets
  // *evicted to the number of evicted rows. A table that holds fewer rows does not change. If
  // memory runs out, some of the rows have been evicted.
  Status EvictTo(Exec& exec, uint64_t rows, Tick tick, uint64_t* evicted);
  // (exclusive on both tables) Swaps the rows, their state and the seed with another table of the
  // same key type, dtype, dim, max_capacity and limits of memory. This table then counts as
  // unchanged since `tick`, and tracks changes from then on.
  virtual void SwapRows(Table* other, Tick tick) = 0;

  // (exclusive) AdmissionCounters::Load, of a table that counts keys; otherwise InvalidArgument.
  virtual Status LoadAdmission(const uint64_t*, int64_t, int64_t, bool) {
    return InvalidArgument("table '" + options_.name + "' does not count keys for admission");
  }

  // --- Tiers

  // Whether rows may be cold (cold_rows.h).
  virtual bool has_cold_rows() const { return false; }
  // Whether lookups change rows, and need exclusive access: they bring rows up to date
  // (catch_up.h), or move cold rows to memory.
  bool reading_changes_rows() const { return catch_up_.active() || has_cold_rows(); }
  // (exclusive) Moves the cold rows of keys to memory. Calls that need rows in memory do this
  // themselves, except calls with row ids, and code that runs its own passes (cc/lookup). If it
  // fails, Error returns the error, and keys with cold rows look as if they had none.
  virtual void Warm(Exec& exec, KeySpan keys) {
    (void)exec;
    (void)keys;
  }
  // Reads the cold rows of keys from the device, for a later call that needs them, which then finds
  // them in memory. Keeps the rows of the last two calls. No row moves or counts as used, and
  // results are the same without it. Takes the lock itself, but does not hold it while it reads. If
  // a read fails, or memory runs out, the later call reads, and returns the error.
  virtual void ReadAhead(Exec& exec, KeySpan keys) {
    (void)exec;
    (void)keys;
  }
  // (exclusive) Moves each row rows[i] that has become cold since it was found to memory again, and
  // sets rows[i]. `num` arrays of rows, all of which are then in memory.
  struct HeldRows {
    KeySpan keys;
    RowId* rows;
  };
  virtual Status HoldRows(Exec& exec, const HeldRows* held, size_t num) {
    (void)exec;
    (void)held;
    (void)num;
    return Status();
  }
  // (exclusive) Makes everything that the table has durable in a folder, which exists and is empty
  // (cold_rows.h). `tick`: a new one, of the time utc_ns. FailedPrecondition if the table has no
  // files. If it fails, the folder is not a flush, and the table has the same rows. If it succeeds,
  // KeepFlush follows.
  virtual Status Flush(Exec&, const std::string& folder, Tick tick, int64_t utc_ns) {
    (void)folder, (void)tick, (void)utc_ns;
    return CheckHasFiles();
  }
  // (exclusive) Says which flush a restart will continue from (flush_history.h): the one that was
  // just written, or the one before, or with an empty name none, because another table has taken
  // its place. Keys that are wiped from now on are noted in it.
  virtual Status KeepFlush(const std::string& folder) {
    (void)folder;
    return CheckHasFiles();
  }
  // (exclusive) Continues from a flush: the table, which is new, gets its rows, state, scores and
  // times, and counts as unchanged since its tick. The state has no owner.
  // FailedPrecondition if options differ on which the rows depend. If it fails, the table must be
  // destroyed.
  virtual Status Restore(Exec&, const std::string& folder, FlushInfo* info) {
    (void)folder, (void)info;
    return CheckHasFiles();
  }
  // (shared) Whether enough batches have read rows since the last Promote to make another one
  // worthwhile.
  virtual bool PromotionIsDue() const { return false; }
  // (exclusive) Moves rows that are read often to the faster memory, if the table has two. Row ids
  // found before are invalid afterwards, except for ApplyRange, which finds moved rows again.
  virtual Status Promote(Exec& exec, Tick tick) {
    (void)exec;
    (void)tick;
    return Status();
  }
  // (exclusive) Promote, if it is due. If there is no memory for it, rows stay where they are, and
  // the call succeeds.
  Status PromoteIfDue(Exec& exec, Tick tick);

  // (shared, or exclusive) For tests: aborts the process with a message if an invariant does not
  // hold.
  virtual void CheckInvariants() const = 0;

 protected:
  Table() = default;
  // FailedPrecondition unless rows may be in files.
  Status CheckHasFiles() const;
  // InvalidArgument names the option and its value.
  static Status CheckOptions(const TableOptions& options);
  // The error of a full table. `why` ends with what to do.
  Status Full(uint64_t keys, uint64_t size, uint64_t capacity, const std::string& why) const;
  static constexpr char kEvictsNothing[] =
      "evict_strategy is none. Raise max_capacity, or choose an evict_strategy that evicts";
  static constexpr char kAllInUse[] =
      "every row that could be evicted is in use by this batch. Raise max_capacity, or pass fewer "
      "different ids at a time";
  static constexpr char kOutOfMemory[] =
      ". Free memory, or set a max_capacity for which there is enough";  // after its own message
  // FailedPrecondition: a cut is running, or the table has forgotten some of the keys that were
  // deleted after `since`.
  Status CheckNoCut(const Cut* running) const;
  Status CheckDeletions(const DeletionLog& log, Tick since) const;
  // For Explain: sets the losses of keys, which are in host memory.
  static void SetLosses(const DeletionLog& log, KeySpan keys, KeyState* states);
  // SelectRows, of all rows, expired or not, that examines at most `most` of them.
  virtual ExportPlan ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                              const RowPredicate& where) const = 0;
  // Export, of the rows as they are.
  virtual void CopyRows(Exec& exec, const std::vector<RowId>& rows,
                        const TickColumns& to) const = 0;
  // The same for cold rows.
  virtual void CopyColdRows(const ExportPlan&, const TickColumns&) const {}
  // Brings at most `num` rows from `first` on up to date, and returns the first row after them; 0
  // at the end of the rows.
  virtual uint64_t BringRows(Exec& exec, uint64_t first, uint64_t num) = 0;
  // Sets the marks of all rows.
  virtual void MarkRows(Exec& exec, float mark) = 0;
  // Sets the last float of the initial state.
  virtual void MarkNewRows(Exec& exec, float mark) = 0;
  // Uploads the record of steps to a table whose kernels read it. After a call that uploads no new
  // step, the upload of one more step allocates no memory.
  virtual Status CopySteps(Exec&, const CatchUp&) { return Status(); }
  // Whether a sweep that brings rows up to date is running: rows must not move to where it has
  // been.
  bool sweeps_rows() const { return brought_.next_row != 0; }
  // Brings all rows up to date.
  Status BringAll(Exec& exec);
  // MarkRows. If it fails, MendMarks has to succeed before the next step.
  Status MarkAll(Exec& exec, float mark);
  // Marks all rows as rows that have all steps if MarkAll has failed. They do: no step is recorded
  // before MarkAll is called.
  Status MendMarks(Exec& exec) {
    return marks_are_wrong_ ? MarkAll(exec, catch_up_.mark()) : Status();
  }
  // The first tick at which the rows of a delta since another one were updated: other rows have
  // settled, and the steps since then are known. 0: a delta has all rows.
  Tick RowsOfDeltaSince(Tick since) const {
    const bool known = since >= std::max(steps_lost_, catch_up_.forgotten());
    return known ? catch_up_.Settled(since) : 0;
  }
  // The mark of a row that the running step has updated.
  float step_mark() const { return counts_step_ ? catch_up_.next_mark() : catch_up_.mark(); }
  // Notes that the steps up to the last one are about to be forgotten.
  void LoseSteps() {
    if (catch_up_.active()) steps_lost_ = std::max(steps_lost_, catch_up_.last_tick());
  }
  // Removes keys, which are in host memory, and adds their number to *removed.
  virtual Status RemoveKeys(Exec& exec, KeySpan keys, Tick tick, Removal how, uint64_t* removed);

  // The tick up to which rows have expired in a batch at `tick` (0: in a call that is not a use of
  // the table); 0: none has.
  Tick HorizonAt(Tick tick) const {
    return expiry_.At(tick, [this] { return RowsHeld(); });
  }
  // The number of rows, as far as it is known without waiting: at least size().
  virtual uint64_t RowsHeld() const { return size(); }
  // How much a call of Reclaim does.
  struct ReclaimWork {
    uint64_t rows;          // to examine
    uint64_t most;          // to remove
    uint64_t least = 4096;  // smaller numbers of rows add up to this one, which is worth a scan
  };
  // For batches that may insert: examines about work.rows rows, and removes about work.most of them
  // that have expired. Each call continues where the last one has stopped.
  void Reclaim(Exec& exec, Tick tick, const ReclaimWork& work);
  // InvalidArgument unless rows may have these scores.
  Status CheckScores(const Scoring& scoring, const Score* scores, size_t n) const;
  // The state of a new row. InvalidArgument names the fault of the spec.
  static Status InitialState(const StateSpec& spec, std::vector<float>* initial);
  // For SwapRows: swaps the seed, the state's spec, and the marks of times. A table's owner stays
  // the same if the adopted state is equal; otherwise the state has no owner.
  void SwapBase(Table* other);
  virtual void TakeSeed(uint64_t seed) { options_.seed = seed; }

  TableOptions options_;
  StateSpec state_spec_;
  CatchUp catch_up_;
  Tick steps_lost_ = 0;       // no step up to this tick is in catch_up_
  bool counts_step_ = false;  // the running step is one of catch_up_
  mutable Expiry expiry_;
  std::atomic<uint64_t> ignored_times_{0};  // of SetDataTime
  uint64_t additions_ = 0;                  // calls of Accumulate

 private:
  // Examines at most `rows` rows from *cursor on, and removes at most `most` of them that were last
  // used at `horizon` or before. Adds their number to *expired. *cursor < 0 at the end.
  Status RemoveExpired(Exec& exec, Tick tick, Tick horizon, uint64_t rows, uint64_t most,
                       int64_t* cursor, uint64_t* expired);

  // The progress of Reclaim.
  struct Reclaimed {
    uint64_t due = 0;       // rows to examine
    uint64_t most = 0;      // rows to remove
    uint64_t cursor = 0;    // the next one
    Tick horizon = 0;       // when the cursor was at 0
    bool complete = false;  // no other row up to this horizon has to be removed
  } reclaimed_;
  // The progress of the sweep that brings all rows up to date.
  struct Brought {
    uint64_t next_row = 0;
    uint64_t step = 0;  // the last one when the sweep began
  } brought_;
  bool marks_are_wrong_ = false;  // MarkAll has failed
  std::string state_owner_;
  mutable SharedMutex mutex_;
};

// Locks several tables, each once, in the order of their addresses, so that calls on overlapping
// sets of tables cannot deadlock.
class TableLock {
 public:
  enum class Mode {
    kShared,
    kExclusive,
    // kExclusive if Table::reading_changes_rows() is true for any of the tables, otherwise kShared.
    kRead,
  };
  TableLock(std::vector<Table*> tables, Mode mode);
  ~TableLock();
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

 private:
  void Lock();
  void Unlock();

  std::vector<Table*> tables_;
  Mode mode_;  // kShared or kExclusive
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_TABLE_H_
