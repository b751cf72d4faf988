// Snapshot: reads cuts of several tables, all at one watermark, while batches go on changing them.
//
//   std::unique_ptr<Snapshot> snapshot;
//   DYNEMB_RETURN_IF_ERROR(Snapshot::Begin(exec, tables, since, false, &clock, &snapshot));
//   for (;;) {
//     Snapshot::Piece piece;
//     DYNEMB_RETURN_IF_ERROR(snapshot->Next(limit, &piece));
//     if (piece.n == 0) break;
//     ... room for piece.n rows of table piece.table ...
//     DYNEMB_RETURN_IF_ERROR(snapshot->Read(exec, &piece, keys, vectors, ...));
//   }
//
// Every row of the cuts is delivered exactly once, as it was at the watermark; only its times may
// be later than they were then, though not than the watermark: that of last access if the row was
// used meanwhile, that of last update if the table's base moved (Table::BeginBatch). Rows come in
// no particular order. For one thread. A table can be in one snapshot at a time. As long as it
// lives, it must be read on or destroyed: batches that overwrite many rows wait for its reader
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
  // A stretch of rows of one table. Rows that are still in the table are locked in it (shared)
  // until they are read or the piece is gone; it must go before the snapshot.
  struct Piece {
    size_t table = 0;
    size_t n = 0;
    std::vector<RowId> plan{};
    const char* saved = nullptr;  // [n, stride], if they are not in the table any more
    std::shared_lock<SharedMutex> lock;
  };

  // Begins cuts of the rows updated after since[t] (0: all rows) of tables[t], with the keys
  // deleted since then if they are wanted; takes the tables' locks. On failure no cut is left.
  // Tables must outlive the snapshot. `most_saved`: bytes of saved rows that may wait for the
  // reader.
  static Status Begin(Exec& exec, std::vector<Table*> tables, const std::vector<Tick>& since,
                      bool with_deleted, Clock* clock, std::unique_ptr<Snapshot>* snapshot,
                      size_t most_saved = size_t{64} << 20);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // What changed with a tick up to this one is in the snapshot, later changes are not.
  Tick watermark() const { return watermark_; }
  int64_t watermark_utc_ns() const { return watermark_utc_ns_; }
  // At least as many rows as will be delivered; exact for a cut of all rows.
  uint64_t most_rows(size_t table) const { return info_[table].most_rows; }
  Tick base(size_t table) const { return info_[table].base; }
  // Of the rows as they are delivered.
  const RowLayout& layout(size_t table) const { return info_[table].layout; }
  const StateSpec& state_spec(size_t table) const { return info_[table].state_spec; }
  const std::vector<uint64_t>& deleted(size_t table) const { return info_[table].deleted; }

  // The next rows, at most `limit` > 0; none at the end. Rows of a piece that is not read come
  // again. ResourceExhausted, from then on: rows of the cuts were lost, as there was no memory to
  // save them. So only who has read until no rows come, without an error, has the cuts.
  Status Next(size_t limit, Piece* piece);
  // Delivers the rows of a piece, and unlocks; null skips a column. The error is Next's, or the
  // table's (Table::Error): then nothing was delivered.
  Status Read(Exec& exec, Piece* piece, void* keys, void* vectors, float* state, CutTime* updates,
              CutTime* accesses);

 private:
  struct Info {
    RowLayout layout;
    StateSpec state_spec;
    Tick base;
    uint64_t most_rows;
    std::vector<uint64_t> deleted;
  };
  Snapshot(std::vector<Table*> tables, size_t most_saved)
      : tables_(std::move(tables)), to_lock_(tables_), saved_(most_saved) {}

  std::vector<Table*> tables_;
  std::vector<Table*> to_lock_;  // the same; the destructor must not need memory
  size_t begun_ = 0;             // tables that have a cut of this snapshot
  SavedRows saved_;
  Tick watermark_ = 0;
  int64_t watermark_utc_ns_ = 0;
  std::vector<Info> info_;
  size_t current_ = 0;  // the table that is read
  SavedRows::Chunk chunk_;
  size_t chunk_read_ = 0;  // rows of it
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SNAPSHOT_H_
