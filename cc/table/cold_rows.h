// ColdRows: the rows of a table that are not in memory. cc/file implements it with files.
//
// Every key of a table has its row in one place: in memory (a *hot* row, which has a row id and a
// slot in the index), or here (a *cold* row). A batch moves the rows that it uses to memory, and
// gives the rows that a full memory evicts to ColdRows:
//
//   pass 1 misses -> Find -> hot rows with their contents, times and scores -> Remove
//   Reserve -> eviction -> Add ... Add -> Settle
//
// Find need not wait for rows that were read ahead (PlanAhead -> Read -> KeepAhead).
//
// Calls marked (shared) may run concurrently with each other, and (exclusive) calls with none, as
// in table.h. Keys are bit patterns, zero-extended to 64 bits.
#ifndef DYNEMB_TABLE_COLD_ROWS_H_
#define DYNEMB_TABLE_COLD_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/function_ref.h"
#include "cc/table/row.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

// The place of a cold row, until the next (exclusive) call.
using ColdPlace = uint32_t;
constexpr ColdPlace kNoPlace = 0xFFFFFFFFu;

// The data that a table has of a row besides its vector and its state.
struct RowTimes {
  Stamp updated = 0;
  Score score = 0;
};

// A cold row that was read.
struct ColdRow {
  uint64_t key = 0;
  RowTimes times;
  ColdPlace place = kNoPlace;
  Tick updated = 0;               // times.updated when the row left memory; sweeps do not change it
  const char* content = nullptr;  // vector, then state, as from RowLayout::vector_offset on
};

struct ColdStats {
  uint64_t rows = 0;
  uint64_t index_bytes = 0;   // memory of the index
  uint64_t buffer_bytes = 0;  // memory of rows that wait to be written
  uint64_t file_bytes = 0;    // space of the files
  uint64_t row_bytes = 0;     // the part of it that rows take
  uint64_t hits = 0;          // rows that were moved to memory
  uint64_t found_ahead = 0;   // rows that Find did not read, because they had been read ahead
  uint64_t rows_added = 0;    // rows that left memory
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t reads = 0;  // I/O operations
  uint64_t writes = 0;
  uint64_t rows_compacted = 0;
  uint64_t errors = 0;  // that no call has returned (warning.h)
};

// A change of the contents of rows. The calls do not fail, and may run concurrently on different
// rows.
class ContentChange {
 public:
  virtual ~ContentChange() = default;
  // Whether a row with this content is to be changed.
  virtual bool Applies(const char* content) const = 0;
  // Changes a copy of the content of such a row.
  virtual void Apply(uint64_t key, char* content) const = 0;
};

class ColdRows {
 public:
  virtual ~ColdRows() = default;

  virtual uint64_t size() const = 0;  // (shared)
  virtual ColdStats stats() const = 0;

  // --- From memory

  // (exclusive) Prepares for up to n calls of Add, which then cannot fail. On failure, nothing has
  // changed. Each Reserve that succeeds is followed by Settle, on the same thread.
  virtual Status Reserve(size_t n) = 0;
  // Adds a copy of a row of memory, of a key that has no cold row. `updated` is the tick of
  // times.updated. Threads may call it concurrently.
  virtual void Add(uint64_t key, const char* row, RowTimes times, Tick updated) noexcept = 0;
  // (exclusive) Ends the calls of Add. The added rows are cold rows now, whether they could be
  // written or not; the next Reserve returns an error if they could not.
  virtual void Settle() noexcept = 0;

  // --- To memory, and away

  // (shared) Reads the cold rows of n keys, and calls fn(i, row) for each keys[i] that has one, on
  // the calling thread, in any order. The content is valid during the call. On failure, fn may have
  // been called for some of them.
  using RowFn = FunctionRef<void(size_t i, const ColdRow& row)>;
  virtual Status Find(const uint64_t* keys, size_t n, const RowFn& fn) const = 0;
  // Rows that are read before a call of Find needs them.
  class Ahead {
   public:
    virtual ~Ahead() = default;
    // Reads them. Needs no lock.
    virtual Status Read() = 0;
  };
  // (shared) Returns the rows of n distinct keys that Find would have to read from a device; null
  // if there are none. This, Read and KeepAhead throw std::bad_alloc, and have changed nothing.
  virtual std::unique_ptr<Ahead> PlanAhead(const uint64_t* keys, size_t n) const = 0;
  // Keeps rows that were read, and the rows of the previous call, for Find. Null: none. Needs no
  // lock.
  virtual void KeepAhead(std::unique_ptr<Ahead> ahead) = 0;
  // (exclusive) Removes the rows of n distinct keys at these places.
  virtual void Remove(const uint64_t* keys, const ColdPlace* places, size_t n) noexcept = 0;
  // (exclusive) After Remove: these rows must not stay in files. A file that has such rows is
  // condemned: its other rows are to move, and it is to be removed. Compactions do that, before
  // others; a running cut keeps the file until it ends.
  virtual void Condemn(const ColdPlace* places, size_t n) noexcept = 0;
  // (exclusive) *any: whether files are condemned. If so, PlanCompaction returns their rows next,
  // and no row is appended to them.
  virtual Status PrepareRewrite(bool* any) = 0;
  // (exclusive) Removes every row.
  virtual void Clear() noexcept = 0;

  // --- All rows

  struct Scanned {
    std::vector<ColdPlace> places;
    std::vector<RowTimes> times;
    uint64_t next = 0;  // the cursor of the next call; kEnd: there are no further rows
  };
  // (shared) Lists the rows for which chosen(times) holds, from a cursor on, until there are
  // `limit` (or a few more), or `most` rows have been examined. The first cursor is 0. Rows that
  // stay cold between calls are listed once, wherever they are moved.
  static constexpr uint64_t kEnd = ~uint64_t{0};
  using TimesFn = FunctionRef<bool(const RowTimes& times)>;
  virtual Scanned Scan(uint64_t cursor, uint64_t limit, uint64_t most,
                       const TimesFn& chosen) const = 0;
  // (shared) Reads rows by place, and calls fn(i, row) for each, in any order. DataLoss if a place
  // has no row.
  virtual Status Read(const std::vector<ColdPlace>& places, const RowFn& fn) const = 0;
  // (exclusive) Replaces the times of all rows by change(times).
  using ChangeFn = FunctionRef<RowTimes(const RowTimes& times)>;
  virtual void ChangeTimes(const ChangeFn& change) = 0;
  // (exclusive) The same, of a share of the rows: RestartShares begins with the first one, and
  // calls with growing shares up to 1 reach every row once.
  virtual void RestartShares() = 0;
  virtual void ChangeShare(double share, const ChangeFn& change) = 0;
  // (exclusive) Changes the contents of the rows from *position on, in the order of the files,
  // until about `limit` rows have been examined, or all before `end`. The first position is 0.
  // Sets *position to the next one; it is at least `end` at the end. On failure, only rows before
  // *position have been changed. Calls up to EndOfRows() reach every row that was there then and
  // that has stayed, if all calls of Compact between them get the change, too.
  virtual Status ChangeContents(Exec& exec, const ContentChange& change, uint64_t limit,
                                uint64_t end, uint64_t* position) = 0;
  // (exclusive) The position after all rows.
  virtual uint64_t EndOfRows() const = 0;

  // --- Cuts (changes.h)

  // (exclusive) Begins a cut of the rows for which chosen(times) holds. They are delivered with
  // their contents of now, whatever happens to them. Throws std::bad_alloc.
  virtual void BeginCut(const TimesFn& chosen) = 0;
  virtual uint64_t CutRows() const = 0;  // that have not been read
  // (shared) The places of the next rows of the cut, at most `limit`; none at the end.
  virtual std::vector<ColdPlace> PlanCut(size_t limit) const = 0;
  // (shared) Reads them, and marks them as read.
  virtual Status ReadCut(const std::vector<ColdPlace>& plan, const RowFn& fn) = 0;
  virtual void EndCut() = 0;
  // (exclusive on both) Swaps the running cuts: the rows of two tables have been swapped, and their
  // cuts have not.
  virtual void SwapCuts(ColdRows* other) noexcept = 0;

  // --- Flushes: folders from which another table can continue, in another process, too

  // (exclusive) Writes all cold rows, the rows of memory, and the table's own record to an empty
  // folder. No file is condemned. hot(add) calls add(key, row, times, updated) for each row of
  // memory, until one fails, and returns the error. All of it is durable when the call succeeds. If
  // it fails, the folder is no flush, and nothing else has changed.
  using AddHotFn = FunctionRef<Status(uint64_t key, const char* row, RowTimes times, Tick updated)>;
  using HotRowsFn = FunctionRef<Status(const AddHotFn& add)>;
  virtual Status Flush(const std::string& folder, const std::string& record,
                       const HotRowsFn& hot) = 0;
  // Sets *record to the record of the flush in a folder. DataLoss if the folder is not a flush.
  virtual Status ReadFlush(const std::string& folder, std::string* record) const = 0;
  // (exclusive) Adds the rows of a flush, including rows that were in memory, without the keys that
  // it has as forgotten, which are returned. There are no rows yet, and the layout is the flush's
  // layout. The folder is not changed, and may be removed afterwards. If it fails, some rows have
  // been added.
  virtual Status Restore(const std::string& folder, std::vector<uint64_t>* forgotten) = 0;
  // Makes these the keys that a flush has as forgotten; durable when it succeeds.
  virtual Status NoteForgotten(const std::string& folder, const std::vector<uint64_t>& keys) = 0;

  // --- Space

  // Rows that are moved together, to give back the space of removed rows.
  class Compaction {
   public:
    virtual ~Compaction() = default;
    // Reads them. Needs no lock. After DataLoss, Compact moves those that could be read, and the
    // file with the others is left alone from then on. After another error, none was read: the
    // same can be read later.
    virtual Status Read() = 0;
    // Whether the rows must be moved without pauses, as the files take too much space.
    bool urgent = false;
    // Whether they are of condemned files.
    bool rewrites = false;
  };
  // Whether a thread of the table compacts. Otherwise only ColdTable::CompactFiles does.
  virtual bool compacts_in_background() const = 0;
  // (shared) Sets *next to the next rows to move; null if no space has to be given back.
  virtual Status PlanCompaction(std::unique_ptr<Compaction>* next) const = 0;
  // (exclusive) Moves the planned rows that are still there, with changed contents unless `change`
  // is null. Not while rows are added.
  virtual Status Compact(Compaction* planned, const ContentChange* change) = 0;

  // --- The table

  // (exclusive) Changes the layout. Rows keep their vectors; their state is dropped, and reads as
  // `initial_state`.
  virtual Status ChangeLayout(const RowLayout& layout, const std::vector<float>& initial_state) = 0;
  // (shared, or exclusive) For tests: aborts if an invariant does not hold.
  virtual void CheckInvariants() const = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_COLD_ROWS_H_
