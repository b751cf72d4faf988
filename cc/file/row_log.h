// RowLog: the rows of a file tier in segments, by place, and their space.
//
// A place is the number of a segment, and of a row in it. Rows are appended to the last segments,
// the *tail*; a segment that is full and written is sealed. A row that is removed only counts as
// dead. A segment without live rows is deleted. Compaction (file_rows.h) appends the live rows of
// other segments again.
//
// The table's lock protects the log, with the exception of Fetch, which needs none. A child of fork
// can read its copy of a log, and cannot append to it.
#ifndef DYNEMB_FILE_ROW_LOG_H_
#define DYNEMB_FILE_ROW_LOG_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/file/block_file.h"
#include "cc/file/block_reader.h"
#include "cc/file/file_system.h"
#include "cc/file/flush_manifest.h"
#include "cc/file/segment.h"
#include "cc/table/cold_rows.h"
#include "cc/table/function_ref.h"
#include "cc/table/status.h"

namespace dynemb {

// The parts of a place.
struct PlaceBits {
  static constexpr uint32_t kMostShift = 28;
  uint32_t shift = 0;  // the bits of a row, at most kMostShift

  uint32_t NumberOf(ColdPlace place) const { return place >> shift; }
  uint32_t RowOf(ColdPlace place) const { return place & ((1u << shift) - 1); }
  ColdPlace At(uint32_t number, uint32_t row) const { return number << shift | row; }
};

class RowLog {
 public:
  struct Options {
    std::string folder;
    // The largest size of a segment; small tables have smaller segments (SegmentRows).
    size_t segment_bytes = size_t{64} << 20;
    FileSystem* files = &FileSystem::Posix();
    BlockReader::Options reader;
    std::shared_ptr<BackgroundErrors> errors = std::make_shared<BackgroundErrors>();
  };
  struct Counters {
    std::atomic<uint64_t> bytes_read{0}, bytes_written{0}, reads{0}, writes{0};
  };

  // Rows have `content_bytes` besides their headers. The folder exists.
  Status Init(const Options& options, size_t content_bytes);

  const std::string& folder() const { return options_.folder; }
  const Counters& counters() const { return counters_; }
  uint64_t file_bytes() const;
  size_t buffer_bytes() const;
  uint64_t live() const { return live_; }
  uint64_t live_bytes() const;

  // --- Appending

  // FailedPrecondition in a child of fork.
  Status CheckOwner() const;
  // Makes room for n rows. Before, writes what could not be written; fails if it still cannot.
  Status Reserve(size_t n);
  // The memory of the next row, which the caller fills, its place, and its number: the i-th of the
  // appended rows. Thread-safe.
  char* Append(ColdPlace* place, size_t* i) noexcept;
  // The appended rows are live. Returns their number; the place of the i-th is PlaceOf(i).
  size_t Commit() noexcept;
  ColdPlace PlaceOf(size_t i) const;
  // Writes complete units. A failure is returned by the next Reserve, which tries again.
  void WriteOut() noexcept;
  // Writes everything, and ends the tail: later rows go to new segments.
  Status SealTail();
  // Rows from now on have this size. The tail has ended.
  void SetContent(size_t content_bytes);
  uint32_t epoch() const { return epoch_; }

  // --- Flushes (flush_manifest.h)

  static std::string SegmentPath(const std::string& folder, uint32_t sequence);
  // Fails if there cannot be a segment with this number.
  Status CheckNumber(uint32_t number) const;
  // Creates a segment for copies of rows in this layout, which is not one of the log's.
  Status CreateSegment(const std::string& folder, std::shared_ptr<Segment>* segment);
  // Makes an empty log continue with the segments of a flush, by links to its files. Rows of the
  // flush's own layout are rows of this one, and all others are of an earlier layout. DataLoss if
  // the manifest contradicts itself.
  Status Adopt(const FlushManifest& flush, const std::string& folder);
  // Counts an adopted row as live. DataLoss if the flush has no such row, or it is live already.
  Status AdoptRow(ColdPlace place);
  // After all rows.
  void EndAdopting() { adopted_ = {}; }

  // --- By place

  // Changes only when the log has no segments. Cuts may keep some longer.
  const PlaceBits& places() const { return places_; }
  uint32_t NumberOf(ColdPlace place) const { return places_.NumberOf(place); }
  uint32_t RowOf(ColdPlace place) const { return places_.RowOf(place); }
  ColdPlace At(uint32_t number, uint32_t row) const { return places_.At(number, row); }
  using Segments = std::vector<std::shared_ptr<Segment>>;
  // By number; null: none.
  const Segments& segments() const { return segments_; }
  // The oldest segment with this sequence number or a later one, and its number; null: there is
  // none. All segments so far have earlier sequence numbers than next_sequence().
  std::shared_ptr<Segment> FirstFrom(uint32_t sequence, uint32_t* number) const;
  uint32_t next_sequence() const { return next_sequence_; }
  // The row is dead.
  void Release(ColdPlace place) noexcept;
  void Clear() noexcept;

  // --- Reading

  // Rows to read, from segments that stay while they are read.
  struct Request {
    size_t i = 0;  // the caller's number
    Segment* segment = nullptr;
    uint32_t row = 0;
  };
  // Calls fn(i, segment, row) for each request, in any order, where `row` are the bytes of a
  // StoredRow and its content. Reads each unit once, and consecutive ones together.
  using StoredFn = FunctionRef<void(size_t i, const Segment& segment, const char* row)>;
  Status Fetch(std::vector<Request> requests, const StoredFn& fn) const;
  // The numbers of the n sealed segments with dead rows that have the lowest shares of live rows;
  // fewer if there are fewer. Damaged segments are left out, because their rows cannot move.
  std::vector<uint32_t> ToCompact(size_t n) const;
  // The same, of the condemned segments.
  std::vector<uint32_t> Condemned(size_t n) const;
  // Ends the tail if a segment of it is condemned. *any: whether a segment is. All of them are to
  // be read again, those that were damaged included.
  Status SealCondemned(bool* any);
  // The bytes of rows in sealed segments for each byte of live ones in them, without damaged ones.
  double space() const;

 private:
  Segment::Context Context() const { return {options_.files, options_.errors}; }
  Status NewSegment();
  // Segment::Write, counted.
  Status Write(Segment* segment, bool all);
  // The rows of a new segment: the 64th part of the live rows, but at least a MiB of them. Dead
  // rows of segments that are not compacted yet are therefore few beside the live ones.
  uint32_t SegmentRows() const;
  // The rows of the largest segments.
  uint32_t MostRows() const;
  Status CreateSegment(const std::string& folder, uint32_t rows, std::shared_ptr<Segment>* segment);
  // Deletes a segment without live rows.
  void Drop(uint32_t number) noexcept;

  Options options_;
  std::shared_ptr<BlockReader> reader_;
  int pid_ = 0;
  RowFormat format_;
  uint32_t epoch_ = 0;
  PlaceBits places_;
  uint32_t next_sequence_ = 1;
  Segments segments_;
  std::vector<uint32_t> free_numbers_;
  uint64_t live_ = 0;
  Status write_error_;

  std::vector<uint32_t> tail_;  // numbers of segments
  // While rows are appended: the first row of each segment of the tail, counted from the first
  // appended row.
  std::vector<size_t> starts_;
  std::vector<uint32_t> had_;  // the rows that each segment of the tail had
  std::atomic<size_t> appended_{0};
  std::vector<std::vector<bool>> adopted_;  // by segment and row, while a flush is adopted
  mutable Counters counters_;
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_ROW_LOG_H_
