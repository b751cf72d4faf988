// Changes: what a table remembers so that it can be written to disk while it trains: which rows
// were updated and which keys deleted since the last cuts, and what rows held at the running cut.
//
// Cut. The table as it was at a moment between two batches, the watermark. It is read row by row
// under the table's shared lock, a stretch at a time, and batches that write go on in between. A
// batch that is about to overwrite a row of the cut that was not read yet saves a copy of it first
// (SavedRows); so each row of the cut is delivered exactly once, read or saved, as it was at the
// watermark. `todo` holds the rows for which neither has happened.
//
// Since. From the first cut on, rows updated after a cut are noted in a set; the sets of the last
// two cuts are kept. A cut of the rows updated since a tick looks at these rows alone if the sets
// reach back so far, at all rows otherwise. The sets only say where to look: a row's own time of
// last update decides.
//
// Without memory. Nothing here fails a batch half-way. The sets are only hints, so where there is
// no memory for one it is given up, and the next cut looks at all rows (Start, Extend, AddAllRows);
// a row that cannot be saved fails the cut (SavedRows), a deletion that cannot be noted is
// forgotten (DeletionLog). BeginCut alone throws, before it has changed anything.
//
// Not thread-safe but for BeforeWrite on different rows and Deleted; the table's lock covers it.
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
#include <vector>

#include "cc/table/deletion_log.h"
#include "cc/table/row.h"
#include "cc/table/row_bits.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

// A time of a cut as it is written: ticks since the base that the table had at the watermark, and
// at most the watermark.
using CutTime = uint32_t;

// Copies of rows, from batches to whoever reads the cuts. Bounded: a batch that would exceed the
// bound waits until the reader has taken some, so the reader must never wait for a table's lock
// without looking here meanwhile.
//
// A batch must not fail half-way because it cannot save a row. Without memory for a copy the cuts
// have failed: what is saved is dropped, who waits goes on, and Error tells the reader.
//
// Threads save into chunks of their own (up to kSlots of them), which the bound counts whole
// until they are finished; so a row costs a lock that only the reader contends for.
class SavedRows {
 public:
  struct Chunk {
    size_t table = 0;
    size_t n = 0;
    size_t stride = 0;
    std::vector<char> rows;  // [n, stride]; CutTime in place of the last update
  };

  explicit SavedRows(size_t most_bytes) : most_bytes_(most_bytes) {}
  ~SavedRows() { Close(); }
  SavedRows(const SavedRows&) = delete;
  SavedRows& operator=(const SavedRows&) = delete;

  void Push(size_t table, const RowLayout& layout, const char* row, CutTime updated) noexcept {
    Save(table, layout, row, updated, true);
  }
  // For who must not wait while it pushes: it waits before, and may then exceed the bound.
  void WaitForRoom(size_t bytes) noexcept;
  void PushAtOnce(size_t table, const RowLayout& layout, const char* row,
                  CutTime updated) noexcept {
    Save(table, layout, row, updated, false);
  }
  // The oldest chunk of some thread; false if there is none.
  bool Pop(Chunk* chunk) noexcept;
  // Nobody reads any more: what comes is dropped, who waits goes on.
  void Close() noexcept;
  // ResourceExhausted: rows were lost. What a row saved after it would say is dropped.
  Status Error() const;

 private:
  static constexpr size_t kChunkBytes = size_t{1} << 18;
  static constexpr size_t kSlots = 16;

  struct Node {
    Chunk chunk;
    size_t reserved = 0;  // of the bound
    std::unique_ptr<Node> next;
  };
  struct Slot {
    std::mutex mutex;  // before mutex_
    std::unique_ptr<Node> open;
    char apart[64];  // so that threads do not write to one cache line
  };

  void Save(size_t table, const RowLayout& layout, const char* row, CutTime updated,
            bool wait) noexcept;
  // Bytes of a chunk: few enough that all slots' are a part of the bound.
  size_t ChunkBytes(size_t stride) const;
  // Takes room for `bytes`, if there is any.
  bool Reserve(size_t bytes);
  // The chunk of a slot is ready for the reader; what it does not need is given back.
  void Finish(std::unique_ptr<Node> node) noexcept;
  void DropAll() noexcept;
  void Give(std::unique_ptr<Node> node, Chunk* chunk) noexcept;

  const size_t most_bytes_;
  std::atomic<size_t> bytes_{0};
  std::atomic<bool> stopped_{false};  // nothing more is saved
  std::atomic<bool> failed_{false};
  Slot slots_[kSlots];
  std::mutex mutex_;
  std::condition_variable popped_;
  // Full chunks, the oldest first: a list, as nodes are moved into it without memory.
  std::unique_ptr<Node> full_;
  Node* last_ = nullptr;
};

struct Cut {
  SavedRows* saved = nullptr;
  size_t table = 0;  // its number in the snapshot
  RowLayout layout;  // at the watermark
  Tick watermark = 0;
  Tick since = 0;  // rows updated after it belong to the cut; 0: all
  Tick base = 0;   // of the CutTimes
  RowBits todo;
  uint64_t most_rows = 0;  // at least as many as will be delivered; exact for a cut of all rows
  uint64_t cursor = 0;     // no row below it is in todo
  // Bit patterns of the keys that were deleted since `since`, and were not there at the watermark.
  std::vector<uint64_t> deleted;

  CutTime Time(Tick tick) const {
    if (tick > watermark) tick = watermark;
    return tick > base ? static_cast<CutTime>(tick - base) : 0;
  }
};

class Changes {
 public:
  bool tracking() const { return tracking_; }
  // Notes changes from now on, for a table of so many rows. The table is as it was at `tick`; keys
  // deleted after known_since are known.
  void Start(Tick tick, Tick known_since, uint64_t rows) noexcept;

  // The row is about to change, or to be given to another key. `updated`: its last update, 0 if it
  // is not held by a key.
  void BeforeWrite(RowId row, const char* at, Tick updated) noexcept {
    // A set that was given up has no rows.
    if (updated <= recent_.since && row < recent_.rows.rows()) recent_.rows.Add(row);
    if (cut_ != nullptr && row < cut_->todo.rows() && cut_->todo.Take(row) &&
        updated > cut_->since) {
      cut_->saved->Push(cut_->table, cut_->layout, at, cut_->Time(updated));
    }
  }
  void Deleted(Tick tick, uint64_t key) noexcept { deletions_.Add(tick, key); }
  // Room for more rows.
  void Extend(uint64_t rows) noexcept {
    if (tracking_ && recent_.known) recent_.OrGiveUp([&](RowBits* set) { set->Extend(rows); });
  }
  // A table of so many rows remembers the deletion of as many keys, but of a million at least.
  void TrimDeletions(uint64_t rows) {
    if (tracking_) deletions_.Trim(std::max<uint64_t>(rows, kDeletionsAtLeast));
  }
  const DeletionLog& deletions() const { return deletions_; }

  // Every row counts as updated: times of last update have lost their exactness.
  void AddAllRows(uint64_t rows) noexcept {
    if (tracking_ && recent_.known) recent_.OrGiveUp([&](RowBits* set) { set->Reset(rows, true); });
  }

  // What the cut is of, `todo` apart, is set already. Needs tracking. Throws std::bad_alloc before
  // anything has changed.
  void BeginCut(std::unique_ptr<Cut> cut, uint64_t rows);
  void EndCut() { cut_.reset(); }
  Cut* cut() const { return cut_.get(); }

 private:
  // A superset of the rows updated after `since`, up to the next one's.
  struct Updated {
    Tick since = 0;
    RowBits rows;
    bool known = true;  // or there was no memory, and any row may have been updated

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
