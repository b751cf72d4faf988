// Segment: an append-only file of rows, and the rows at its end that have not been written yet.
//
// A file consists of *units*, which are read and checked as a whole: one block of 4 KiB, or up to
// eight if the rows are large. A unit has as many rows as fit. No row straddles units.
//
//   unit   ┌──────────────────────────────────┬─────┬─────┬───┬────────┐
//          │ crc u32 │ sequence │ unit │ rows │ row │ row │ … │ unused │
//          └──────────────────────────────────┴─────┴─────┴───┴────────┘
//   row    ┌─────────┬─────────────┬───────────┬────────┬───────┐
//          │ key u64 │ updated u64 │ score i64 │ vector │ state │
//          └─────────┴─────────────┴───────────┴────────┴───────┘
//
// crc is the CRC-32C of the rest of the unit. The sequence number of the segment and the number of
// the unit are in it, so a unit that is at the wrong place, or is left from another file, is not
// taken for the right one. `updated` is a tick (clock.h).
//
// Units that were written do not change, and other files may share them: hard links of flushes and
// of copies that users make, cuts, readers without a lock. If rows must not stay in a file, its
// other rows are written elsewhere, and the file is removed: such a segment is *condemned*.
//
// Files are opened when they are used (open_files.h). The table's lock protects a segment, except
// what says that it needs none.
#ifndef DYNEMB_FILE_SEGMENT_H_
#define DYNEMB_FILE_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cc/file/block_file.h"
#include "cc/file/block_reader.h"
#include "cc/file/file_system.h"
#include "cc/file/open_files.h"
#include "cc/table/status.h"
#include "cc/table/types.h"
#include "cc/table/warning.h"

namespace dynemb {

struct StoredRow {
  uint64_t key;
  Tick updated;
  int64_t score;
};

struct UnitHeader {
  uint32_t crc;
  uint32_t sequence;
  uint32_t unit;
  uint32_t rows;
};

// How rows of one layout are stored. A unit has the fewest blocks of which rows leave at most a
// sixth unused, or the least of what up to eight blocks leave, but all blocks of a row. More blocks
// would save space, and each read of a row would read more of its neighbours.
struct RowFormat {
  static constexpr size_t kMostContent = size_t{1} << 30;

  RowFormat() = default;
  explicit RowFormat(size_t content);  // at most kMostContent

  size_t content_bytes = 0;  // of a vector and its state
  size_t row_bytes = 0;      // a multiple of 8
  size_t unit_bytes = 0;     // a multiple of kBlockBytes
  uint32_t rows_per_unit = 0;
};

class Segment {
 public:
  // The objects that the segments of a log share. It outlives them.
  struct Context {
    FileSystem* files;
    // The errors of files that cannot be removed.
    std::shared_ptr<BackgroundErrors> errors;
  };

  // Creates a file, which must not exist; ResourceExhausted, FailedPrecondition or Internal name it
  // if that fails.
  static Status Create(const Context& context, const std::string& path, uint32_t sequence,
                       const RowFormat& format, uint32_t epoch, uint32_t max_rows,
                       std::shared_ptr<Segment>* segment);
  // A file with this number of rows, all of which are written. No row can be added. DataLoss names
  // the file if it is missing or too short. Units are checked when they are read.
  static Status Open(const Context& context, const std::string& path, uint32_t sequence,
                     const RowFormat& format, uint32_t epoch, uint32_t rows,
                     std::shared_ptr<Segment>* segment);
  // Removes the file, except after Keep, and except in a child of fork.
  ~Segment();
  void Keep() { removes_ = false; }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::string& path() const { return file_.path(); }
  uint32_t sequence() const { return sequence_; }
  const RowFormat& format() const { return format_; }
  // The layouts that the table has had before this one.
  uint32_t epoch() const { return epoch_; }
  uint32_t rows() const { return rows_; }
  uint32_t max_rows() const { return max_rows_; }
  bool sealed() const { return sealed_; }
  uint64_t bytes_written() const { return uint64_t{written_units_} * format_.unit_bytes; }
  size_t buffer_bytes() const { return buffer_.capacity(); }

  // --- Appending

  // Makes room in memory for rows up to this number, at most max_rows(). Throws std::bad_alloc.
  void Reserve(uint32_t rows);
  // The place of a row in memory, of those that Reserve has made room for and that are not written.
  char* Unwritten(uint32_t row);
  // Needs no lock; a row that is written stays so.
  bool IsWritten(uint32_t row) const { return row / format_.rows_per_unit < written_units_; }
  // Rows [rows(), n) are complete.
  void SetRows(uint32_t n) { rows_ = n; }
  // Writes the units that are complete. Unless `all`, waits until there are enough of them to write
  // at once. `all`: writes an incomplete unit, too, which must be the last of the segment. On
  // failure, the rows that were not written stay in memory.
  Status Write(bool all, uint64_t* bytes);
  // No row is added anymore. All rows are written.
  void Seal();
  // Makes the written units durable. If that fails, the system may have dropped some of them, says
  // so only once, and calls the file clean: the segment is condemned from then on.
  Status Sync();

  // --- Reading

  // Opens the file to be read, of which units are written. Needs no lock.
  Status Use(ReadFile::Wait wait, ReadFile::Use* use) { return file_.Open(wait, use); }
  // Reads n consecutive units that are written, to an aligned buffer. Needs no lock. The thread
  // uses no file.
  Status ReadUnits(uint32_t first, uint32_t n, char* to) const;
  // DataLoss, naming file and offset, unless these are the bytes of a unit.
  Status CheckUnit(uint32_t unit, const char* bytes) const;
  // The status of a block read that failed.
  Status ReadError(const BlockRead& read) const;
  // A row in the bytes of its unit.
  const char* RowIn(const char* unit, uint32_t row) const {
    return unit + sizeof(UnitHeader) + (row % format_.rows_per_unit) * format_.row_bytes;
  }
  // Rows that are in use; the log counts them.
  uint32_t live = 0;
  // Whether the rows in use are to be written elsewhere, and the file is to be removed.
  bool condemned = false;
  // Whether a unit could not be read when the rows in use were to move. They stay.
  bool damaged = false;

 private:
  Segment(const Context& context, std::string path, uint32_t sequence, const RowFormat& format,
          uint32_t epoch, uint32_t max_rows)
      : context_(context),
        pid_(context.files->ProcessId()),
        file_(context.files, std::move(path)),
        sequence_(sequence),
        format_(format),
        epoch_(epoch),
        max_rows_(max_rows) {}
  uint32_t UnitsOf(uint32_t rows) const {
    return rows / format_.rows_per_unit + (rows % format_.rows_per_unit != 0);
  }
  void Complete(uint32_t unit, char* bytes) const;

  const Context context_;
  const int pid_;
  mutable ReadFile file_;
  const uint32_t sequence_;
  const RowFormat format_;
  const uint32_t epoch_;
  uint32_t max_rows_;
  uint32_t rows_ = 0;
  std::atomic<uint32_t> written_units_{0};
  bool sealed_ = false;
  bool removes_ = true;
  uint32_t synced_units_ = 0;
  AlignedBuffer buffer_;  // the units from written_units_ on
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_SEGMENT_H_
