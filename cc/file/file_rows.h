// FileRows: cold rows (cold_rows.h) in files. An index in memory (slot_index.h) has an entry of 16
// bytes for each row; the rows are in segments (row_log.h).
//
//   key ─hash──> SlotIndex: fingerprint, place, last update, score
//       ─place─> RowLog: unit of a segment
//
// - A row that leaves memory is appended to the log; the rows of a batch are written together, one
//   after another. A row that moves to memory is dead in the log.
// - The rows of a batch are read together: sorted by place, each unit once, in parallel
//   (block_reader.h).
// - Rows whose contents change are appended again (ChangeContents).
// - Compaction appends the live rows of the segments with the fewest again, and deletes these. A
//   background thread plans and reads (ColdTable::Compactor); it holds the table's lock only to
//   move up to kCompactRows rows at a time, a few milliseconds, or several times that number if the
//   files grow faster than it gives space back.
// - A cut is a set of places. Written rows do not change, so it needs no copies of rows: it keeps
//   the segments until it has been read.
// - Rows that are written can be read ahead, without a lock. Find takes their bytes instead of
//   reading; until then the table does not change.
// - A flush (flush_manifest.h) has links to the segments, and copies of the rows that are in no
//   file. Written rows do not change, so the segments stay as they are in it; a segment to which
//   rows are added later has more than the flush knows.
// - Rows that no file may have anymore, because they are forgotten, or may not have, because a sync
//   failed, condemn their segments. Compaction takes these first.
//
// Files. Each object has its own folder below options.folder (process_folder.h), which is removed
// with the object.
#ifndef DYNEMB_FILE_FILE_ROWS_H_
#define DYNEMB_FILE_FILE_ROWS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/file/process_folder.h"
#include "cc/file/row_log.h"
#include "cc/file/slot_index.h"
#include "cc/table/cold_rows.h"
#include "cc/table/table.h"
#include "cc/table/table_options.h"

namespace dynemb {

struct FileOptions {
  std::string folder;  // created if it is missing
  size_t segment_bytes = size_t{64} << 20;
  FileSystem* files = &FileSystem::Posix();
  BlockReader::Options reader;
  bool compact_in_background = true;
};

// Creates a table that keeps at most max_memory_bytes of rows in memory, and the others in files.
Status CreateFileTable(const TableOptions& options, const FileOptions& files,
                       uint64_t max_memory_bytes, std::unique_ptr<Table>* table,
                       Exec* exec = nullptr);

class FileRows final : public ColdRows {
 public:
  static constexpr size_t kCompactRows = 8192;

  static Status Create(const FileOptions& options, const TableOptions& table,
                       std::unique_ptr<ColdRows>* rows);
  ~FileRows() override;

  uint64_t size() const override { return index_.size(); }
  ColdStats stats() const override;
  Status Reserve(size_t n) override;
  void Add(uint64_t key, const char* row, RowTimes times, Tick updated) noexcept override;
  void Settle() noexcept override;
  Status Find(const uint64_t* keys, size_t n, const RowFn& fn) const override;
  std::unique_ptr<Ahead> PlanAhead(const uint64_t* keys, size_t n) const override;
  void KeepAhead(std::unique_ptr<Ahead> ahead) override;
  void Remove(const uint64_t* keys, const ColdPlace* places, size_t n) noexcept override;
  void Condemn(const ColdPlace* places, size_t n) noexcept override;
  Status PrepareRewrite(bool* any) override;
  void Clear() noexcept override;
  Scanned Scan(uint64_t cursor, uint64_t limit, uint64_t most,
               const TimesFn& chosen) const override;
  Status Read(const std::vector<ColdPlace>& places, const RowFn& fn) const override;
  void ChangeTimes(const ChangeFn& change) override;
  void RestartShares() override { changed_ = 0; }
  void ChangeShare(double share, const ChangeFn& change) override;
  Status ChangeContents(Exec& exec, const ContentChange& change, uint64_t limit, uint64_t end,
                        uint64_t* position) override;
  uint64_t EndOfRows() const override;
  void BeginCut(const TimesFn& chosen) override;
  uint64_t CutRows() const override;
  std::vector<ColdPlace> PlanCut(size_t limit) const override;
  Status ReadCut(const std::vector<ColdPlace>& plan, const RowFn& fn) override;
  void EndCut() override;
  void SwapCuts(ColdRows* other) noexcept override;
  Status Flush(const std::string& folder, const std::string& record, const HotRowsFn& hot) override;
  Status ReadFlush(const std::string& folder, std::string* record) const override;
  Status Restore(const std::string& folder, std::vector<uint64_t>* forgotten) override;
  Status NoteForgotten(const std::string& folder, const std::vector<uint64_t>& keys) override;
  bool compacts_in_background() const override { return compacts_; }
  Status PlanCompaction(std::unique_ptr<Compaction>* next) const override;
  Status Compact(Compaction* planned, const ContentChange* change) override;
  Status ChangeLayout(const RowLayout& layout, const std::vector<float>& initial_state) override;
  void CheckInvariants() const override;

 private:
  class Moves;
  class Copies;
  // Rows of files, as they are stored. A place and its segment name a row for as long as the
  // segment exists, so these rows stay valid while the table changes, except rows that must be
  // forgotten, and segments of a flush, which are numbered separately (ForgetAhead).
  struct RowsAhead final : Ahead {
    struct Row {
      ColdPlace place;
      uint32_t row;
      uint32_t sequence;                 // of its segment
      std::shared_ptr<Segment> segment;  // until the row has been read
      size_t offset;                     // in `bytes`
    };
    Status Read() override;
    // The row at a place, if it is here, and of this segment.
    const char* At(ColdPlace place, const Segment& segment) const;

    const RowLog* log;
    uint64_t forgotten;  // the value of forgotten_ when it was planned
    std::vector<Row> rows;
    std::vector<char> bytes;
    std::unordered_map<ColdPlace, size_t> by_place;
  };
  // A row of Add.
  struct Added {
    uint64_t key;
    RowTimes times;
  };
  // A row that is about to move.
  struct Moving {
    SlotIndex::Entry* entry;
    uint32_t epoch;   // of its segment
    const char* row;  // as it is stored
  };
  // A candidate of a key, or a row to read.
  struct Candidate {
    size_t i;
    ColdPlace place;
    RowTimes times;
  };
  // The layout of rows, and the state of rows that were written in an earlier one.
  struct Layout {
    RowLayout rows;
    uint32_t epoch = 0;
    std::vector<float> initial_state;

    // Copies a content, of a row of any earlier layout.
    void Convert(const char* content, char* to) const;
  };
  struct ColdCut {
    Layout layout;
    PlaceBits places;
    RowLog::Segments segments;                // keeps them
    std::vector<std::vector<uint64_t>> todo;  // a bit for each row of a segment
    size_t first = 0;                         // segments before it have been read
    std::atomic<uint64_t> left{0};
    // The times of rows that are not in the index anymore, at their places of the cut: of those
    // that were removed or moved, and the index that Clear has cleared.
    std::unordered_map<ColdPlace, RowTimes> gone;
    SlotIndex cleared;
  };

  FileRows() = default;
  uint64_t HashOf(uint64_t key) const;
  // Whether a segment still has its number.
  bool IsPresent(uint32_t number, const std::shared_ptr<Segment>& segment) const;
  // Checks a manifest against the layout, as far as RowLog::Adopt does not.
  Status CheckLayouts(const FlushManifest& manifest, const std::string& folder) const;
  // Whether the row at a place is one of the running cut.
  bool IsOfCut(ColdPlace place) const;
  // Call before a row leaves its place.
  void KeepTimes(const SlotIndex::Entry& entry) noexcept;
  // Appends to *live those rows [first, last) of a segment that the index has at their place.
  using RowBytesFn = FunctionRef<const char*(uint32_t row)>;
  void ListLive(uint32_t number, uint32_t first, uint32_t last, const RowBytesFn& bytes_of,
                std::vector<Moving>* live);
  // Moves rows to the end of the log, with changed contents unless `change` is null.
  Status Move(Exec& exec, const std::vector<Moving>& rows, const ContentChange* change);
  // Reads the rows of candidates from these segments, and calls fn(candidate, stored, content),
  // with contents in this layout.
  using StoredFn = FunctionRef<void(const Candidate&, const StoredRow&, const char* content)>;
  Status ReadCandidates(const RowLog::Segments& segments, PlaceBits places, const Layout& layout,
                        const std::vector<Candidate>& candidates, const StoredFn& fn) const;

  // Calls fn with the content of a stored row, in this layout. `converted` has room for one.
  static void Deliver(const Layout& layout, const Candidate& candidate, const Segment& segment,
                      const char* row, char* converted, const StoredFn& fn);
  // Calls fn for those candidates that were read ahead, and removes them from the list.
  void FindAhead(std::vector<Candidate>* candidates, const StoredFn& fn) const;
  // Forgets all rows that were read ahead, those included that are being read.
  void ForgetAhead() noexcept;

  FileSystem* files_ = nullptr;
  bool compacts_ = true;
  std::shared_ptr<ProcessFolder> process_folder_;
  std::string folder_;
  std::shared_ptr<BackgroundErrors> errors_ = std::make_shared<BackgroundErrors>();
  uint64_t salt_ = 0;
  Layout layout_;
  SlotIndex index_;
  RowLog log_;
  std::vector<Added> added_;  // by the number of the append
  std::unique_ptr<ColdCut> cut_;
  uint64_t changed_ = 0;  // the position up to which ChangeShare has come
  std::atomic<uint64_t> rows_added_{0}, compacted_{0};
  mutable std::atomic<uint64_t> found_ahead_{0};
  // The rows of the last two calls of KeepAhead.
  mutable std::mutex ahead_mutex_;
  std::shared_ptr<const RowsAhead> ahead_[2];
  std::atomic<uint64_t> forgotten_{0};  // calls of ForgetAhead
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_FILE_ROWS_H_
