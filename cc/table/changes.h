// Changes: a table's record of changes, with which it can be written to disk while it trains. It
// records the rows updated and the keys deleted since the last cuts, and saves rows of the running
// cut before batches overwrite them.
//
// Cut. The table at one moment between two batches, the watermark. It is read in ranges of rows
// under the table's shared lock, and batches write in between. A batch that is about to overwrite a
// row of the cut that has not been read saves a copy first (SavedRows). Each row of the cut is
// therefore delivered exactly once, read or saved, with its contents at the watermark. `todo` has
// the rows that were neither read nor saved.
//
// Updated rows. From the first cut on, the rows that are updated after a cut are recorded in a set.
// The sets of the last two cuts are kept. A cut of the rows updated since a tick examines only the
// rows in these sets if they reach back to that tick, and all rows otherwise. The sets only select
// the rows to examine; a row's last update decides.
//
// If memory runs out, no batch fails half-way:
//
// - A set without memory is given up, and the next cut examines all rows (Start, Extend,
//   AddAllRows).
// - A row that cannot be saved fails the cut (SavedRows).
// - A deletion that cannot be recorded makes the log forget all earlier ones (DeletionLog).
// - Only BeginCut throws, before it has changed anything.
//
// Not thread-safe, except Deleted, and BeforeWrite on different rows. The table's lock protects the
// rest.
#ifndef DYNEMB_TABLE_CHANGES_H_
#define DYNEMB_TABLE_CHANGES_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "cc/table/deletion_log.h"
#include "cc/table/row.h"
#include "cc/table/row_bits.h"
#include "cc/table/row_columns.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

// A time in a cut, as it is written: ticks since the base that the table had at the watermark. It
// is at most the watermark.
using CutTime = uint32_t;
using CutColumns = RowColumns<CutTime>;

// SavedRows: a queue of copies of rows, from batches to the reader of the cuts. It is bounded: a
// batch that would exceed the bound waits until the reader has taken some rows. The reader must
// therefore never wait for a table's lock without taking saved rows in the meantime.
//
// A batch must not fail half-way because it cannot save a row. If memory for a copy runs out, the
// cuts fail instead: saved rows are dropped, waiting batches continue, and Error reports the
// failure to the reader.
//
// Each thread saves rows into its own chunk (up to kSlots threads; further threads share). The
// bound counts the full size of a chunk until the chunk is finished. Saving a row therefore takes
// only a lock for which, as a rule, only the reader contends.
class SavedRows {
 public:
  struct Chunk {
    size_t table = 0;
    size_t n = 0;
    size_t stride = 0;
    std::vector<char>
        rows;  // [n, stride]: a row, with CutTime in place of the last update; its score
  };

  explicit SavedRows(size_t most_bytes) : most_bytes_(most_bytes) {}
  ~SavedRows() { Close(); }
  SavedRows(const SavedRows&) = delete;
  SavedRows& operator=(const SavedRows&) = delete;

  // The size of a saved row of this layout.
  static size_t Stride(const RowLayout& layout) { return layout.stride + sizeof(CutTime); }

  // `score` is as in ReadCut.
  void Push(size_t table, const RowLayout& layout, const char* row, CutTime updated,
            CutTime score) noexcept {
    Save(table, layout, row, updated, score, true);
  }
  // For callers that must not wait while they push: they call WaitForRoom beforehand, and then
  // PushAtOnce, which does not wait and may exceed the bound.
  void WaitForRoom(size_t bytes) noexcept;
  void PushAtOnce(size_t table, const RowLayout& layout, const char* row, CutTime updated,
                  CutTime score) noexcept {
    Save(table, layout, row, updated, score, false);
  }
  // Takes the oldest full chunk or, if there is none, a thread's open chunk. Returns false if there
  // is no chunk at all.
  bool Pop(Chunk* chunk) noexcept;
  // Ends reading: later rows are dropped, and waiting batches continue.
  void Close() noexcept;
  // Says that rows were lost: Error reports it, and later rows are dropped.
  void Fail() noexcept;
  // ResourceExhausted if rows were lost; rows saved after that are dropped.
  Status Error() const;

 private:
  static constexpr size_t kChunkBytes = size_t{1} << 18;
  static constexpr size_t kSlots = 16;

  struct Node {
    Chunk chunk;
    size_t reserved = 0;  // bytes that the bound counts for it
    std::unique_ptr<Node> next;
  };
  struct Slot {
    std::mutex mutex;  // locked before mutex_
    std::unique_ptr<Node> open;
    char apart[64];  // keeps threads from writing to the same cache line
  };

  void Save(size_t table, const RowLayout& layout, const char* row, CutTime updated, CutTime score,
            bool wait) noexcept;
  // The size of a chunk: small enough that the chunks of all slots take only a fraction of the
  // bound.
  size_t ChunkBytes(size_t stride) const;
  // Reserves `bytes` of the bound; false if there is no room.
  bool Reserve(size_t bytes);
  // Passes the chunk of a slot to the reader, and gives back its unused room.
  void Finish(std::unique_ptr<Node> node) noexcept;
  void DropAll() noexcept;
  void Give(std::unique_ptr<Node> node, Chunk* chunk) noexcept;

  const size_t most_bytes_;
  std::atomic<size_t> bytes_{0};
  std::atomic<bool> stopped_{false};  // no more rows are saved
  std::atomic<bool> failed_{false};
  Slot slots_[kSlots];
  std::mutex mutex_;
  std::condition_variable popped_;
  // Full chunks, the oldest first. A list, because adding a node to it needs no memory.
  std::unique_ptr<Node> full_;
  Node* last_ = nullptr;
};

// The contents of a cut since a tick. A cut since 0 has all rows.
enum class CutOf {
  kRows,   // the rows updated after it
  kDelta,  // also the keys deleted after it, and the rows that steps since then have changed in
           // other ways than other settled rows (catch_up.h)
  kDeltaAndUsed,  // also the rows used after it, and perhaps some that were used while the cut is
                  // read; all rows of a table whose scores do not say when a row was used
};

struct Cut {
  SavedRows* saved = nullptr;
  size_t table = 0;  // its number in the snapshot
  RowLayout layout;  // at the watermark
  Tick watermark = 0;
  Tick since = 0;     // rows updated after it belong to the cut; 0: all rows
  bool used = false;  // so do rows whose last access is after it
  Tick base = 0;      // of the CutTimes
  RowBits todo;
  uint64_t most_rows = 0;     // an upper bound of the rows to deliver; exact for a cut of all rows
  uint64_t cursor = 0;        // no row below it is in todo
  bool cold_planned = false;  // the last plan is of cold rows (cold_rows.h)
  // Bit patterns of the keys that were deleted after `since` and had no row at the watermark.
  std::vector<uint64_t> deleted;
  // AdmissionCounters::data at the watermark, and the number of its first line.
  std::vector<uint64_t> admission{};
  int64_t first_admission_line = 0;

  CutTime Time(Tick tick) const {
    if (tick > watermark) tick = watermark;
    return tick > base ? static_cast<CutTime>(tick - base) : 0;
  }
};

class Changes {
 public:
  bool tracking() const { return tracking_; }
  // Records changes from now on, for a table of `rows` rows; 0 for one that records only deletions.
  // The table has not changed since `tick`, and no key was deleted after `known_since`.
  void Start(Tick tick, Tick known_since, uint64_t rows) noexcept;

  // Call when a row is about to change, or to be given to another key. `updated`: its last update,
  // 0 if no key holds it. score_of(cut) is its score, as in ReadCut; it is called if the row is
  // saved.
  template <class ScoreOf>
  void BeforeWrite(RowId row, const char* at, Tick updated, const ScoreOf& score_of) noexcept {
    // A set that was given up has room for no rows.
    if (updated <= recent_.since && row < recent_.rows.rows()) recent_.rows.Add(row);
    if (cut_ != nullptr && row < cut_->todo.rows() && cut_->todo.Take(row) &&
        (updated > cut_->since || (cut_->used && updated != 0))) {
      cut_->saved->Push(cut_->table, cut_->layout, at, cut_->Time(updated), score_of(*cut_));
    }
  }
  void Deleted(Tick tick, uint64_t key, Removal how) noexcept { deletions_.Add(tick, key, how); }
  // Makes room for rows [0, rows).
  void Extend(uint64_t rows) noexcept {
    if (tracking_ && recent_.known) recent_.OrGiveUp([&](RowBits* set) { set->Extend(rows); });
  }
  // Limits the log of a table of `rows` rows to about `rows` deletions, or kDeletionsAtLeast if
  // that is more.
  void TrimDeletions(uint64_t rows) {
    if (tracking_) deletions_.Trim(std::max<uint64_t>(rows, kDeletionsAtLeast));
  }
  const DeletionLog& deletions() const { return deletions_; }
  DeletionLog& deletions() { return deletions_; }

  // Records every row as updated, because last updates are no longer exact.
  void AddAllRows(uint64_t rows) noexcept {
    if (tracking_ && recent_.known) recent_.OrGiveUp([&](RowBits* set) { set->Reset(rows, true); });
  }

  // Begins a cut of a table that records rows, with the row ids [0, rows), and sets its `todo`. The
  // caller has set the cut's contents (`saved` to `base`, `deleted`, `admission`), and sets
  // `most_rows` afterwards. Requires tracking(). If it throws std::bad_alloc, nothing has changed.
  void BeginCut(std::unique_ptr<Cut> cut, uint64_t rows);
  // Begins a cut of a table that records only deletions. The caller has set `todo` and `most_rows`,
  // too.
  void KeepCut(std::unique_ptr<Cut> cut) noexcept { cut_ = std::move(cut); }
  void EndCut() { cut_.reset(); }
  Cut* cut() const { return cut_.get(); }

 private:
  // A superset of the rows updated after `since`, up to the `since` of the next set.
  struct Updated {
    Tick since = 0;
    RowBits rows;
    bool known = true;  // false: memory ran out, and any row may have been updated

    template <class Fn>
    void OrGiveUp(const Fn& fn) noexcept {
      try {
        fn(&rows);
      } catch (const std::bad_alloc&) {
        known = false;
        rows = RowBits();
      }
    }
  };

  bool tracking_ = false;
  Updated recent_, before_;
  DeletionLog deletions_;
  std::unique_ptr<Cut> cut_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CHANGES_H_
