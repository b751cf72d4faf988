// Snapshot: reads the cuts of several tables at one watermark, while batches change the tables.
//
//   std::unique_ptr<Snapshot> snapshot;
//   DYNEMB_RETURN_IF_ERROR(Snapshot::Begin(exec, tables, since, CutOf::kRows, &clock, &snapshot));
//   for (;;) {
//     Snapshot::Block block;
//     DYNEMB_RETURN_IF_ERROR(snapshot->Next(limit, &block));
//     if (block.n == 0) break;
//     ... allocate arrays for block.n rows of table block.table ...
//     DYNEMB_RETURN_IF_ERROR(snapshot->Read(exec, &block, {keys, vectors, ...}));
//   }
//
// Every row of the cuts is delivered exactly once, with its contents at the watermark. Rows come in
// no particular order. Only the score of a row and its last update may be later than they were at
// the watermark:
//
// - the score, if the row was used in the meantime. A last access is not later than the watermark
//   itself, though.
// - the last update, if a sweep has clamped it (Table::BeginBatch), but not later than the
// watermark.
//
// A snapshot is used by one thread, and a table can be in one snapshot at a time. The owner must
// keep reading the snapshot or destroy it: batches that overwrite many rows wait for its reader
// (changes.h).
#ifndef DYNEMB_TABLE_SNAPSHOT_H_
#define DYNEMB_TABLE_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "cc/table/changes.h"
#include "cc/table/clock.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/table.h"

namespace dynemb {

class Snapshot {
 public:
  // Some rows of one table. If the rows are still in the table, the block holds the table's lock
  // (shared) until it is read or destroyed. It must be destroyed before the snapshot.
  struct Block {
    size_t table = 0;
    size_t n = 0;
    std::vector<RowId> plan{};
    const char* saved = nullptr;  // the rows, if they are saved rows (changes.h)
    std::shared_lock<SharedMutex> lock;
  };

  // Begins cuts of tables[t] since since[t] (changes.h). Takes the tables' locks. On failure no cut
  // is left. The tables must outlive the snapshot. `most_saved`: the bytes of saved rows that may
  // wait for the reader.
  static Status Begin(Exec& exec, std::vector<Table*> tables, const std::vector<Tick>& since,
                      CutOf of, Clock* clock, std::unique_ptr<Snapshot>* snapshot,
                      size_t most_saved = size_t{64} << 20);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // The snapshot has all changes with ticks up to this one, and no later changes.
  Tick watermark() const { return watermark_; }
  int64_t watermark_utc_ns() const { return watermark_utc_ns_; }
  // An upper bound of the number of rows to be delivered; exact for a cut of all rows.
  uint64_t most_rows(size_t table) const { return info_[table].most_rows; }
  Tick base(size_t table) const { return info_[table].base; }
  // The layout of the delivered rows.
  const RowLayout& layout(size_t table) const { return info_[table].layout; }
  const StateSpec& state_spec(size_t table) const { return info_[table].state_spec; }
  const std::vector<uint64_t>& deleted(size_t table) const { return info_[table].deleted; }
  const std::vector<int64_t>& expiry_marks(size_t table) const { return info_[table].expiry_marks; }
  // AdmissionCounters::data, empty if the table counts no keys; the number of its first line.
  const std::vector<uint64_t>& admission(size_t table) const { return info_[table].admission; }
  int64_t first_admission_line(size_t table) const { return info_[table].first_admission_line; }

  // Sets *block to the next rows, at most `limit` > 0; block->n == 0 at the end. Rows of a block
  // that is not read are returned again. ResourceExhausted, also from all later calls, if rows of
  // the cuts were lost because memory to save them ran out. The cuts are complete only if all calls
  // up to the end succeed.
  Status Next(size_t limit, Block* block);
  // The steps that other tables lack which have the rows of an earlier cut: CatchUp::Save.
  std::vector<double> steps(size_t table) const {
    return info_[table].catch_up.Save(info_[table].since);
  }
  // Copies the rows of a block to columns, and unlocks the table. Fails like Next, or with the
  // table's error (Table::Error); the columns are then not valid.
  Status Read(Exec& exec, Block* block, CutColumns to);

 private:
  struct Info {
    RowLayout layout;
    StateSpec state_spec;
    Tick base;
    uint64_t most_rows;
    std::vector<uint64_t> deleted;
    std::vector<int64_t> expiry_marks;
    std::vector<uint64_t> admission;
    int64_t first_admission_line;
    Tick since;        // of the steps that are saved; 0: none
    CatchUp catch_up;  // at the watermark
  };
  // Read, of rows as they were when they were last used: without the steps that they have missed.
  Status ReadWithoutSteps(Exec& exec, Block* block, const CutColumns& to);
  Snapshot(std::vector<Table*> tables, size_t most_saved)
      : tables_(std::move(tables)), to_lock_(tables_), saved_(most_saved) {}

  std::vector<Table*> tables_;
  std::vector<Table*> to_lock_;  // the same; the destructor must not need memory
  size_t begun_ = 0;             // the number of tables with a cut of this snapshot
  SavedRows saved_;
  Tick watermark_ = 0;
  int64_t watermark_utc_ns_ = 0;
  std::vector<Info> info_;
  size_t current_ = 0;  // the table that is being read
  SavedRows::Chunk chunk_;
  size_t chunk_read_ = 0;  // the number of its rows that have been read
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SNAPSHOT_H_
