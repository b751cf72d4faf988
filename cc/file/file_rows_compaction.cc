// FileRows' part of moving rows to the end of the log: the rows of segments that have few live rows
// (compaction), and rows whose contents change.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"

namespace dynemb {
namespace {

// The rows in sealed segments for each live one in them, above which space is given back. The files
// then take about 1.3 times the live rows, with the segments that are being written and with what
// units leave unused.
constexpr double kMostSpace = 1.2;
// Above this, space is given back by several segments at a time and without pauses.
constexpr double kUrgentSpace = 1.25;

// A position of ChangeContents is the sequence number of a segment, and the number of a row in it.
constexpr uint32_t kPositionRowBits = PlaceBits::kMostShift;

}  // namespace

// The live rows of some segments, in ranges of units.
class FileRows::Moves final : public ColdRows::Compaction {
 public:
  struct Part {
    std::shared_ptr<Segment> segment;
    uint32_t number;
    uint32_t next_row;  // rows before it have been read
  };
  // Rows of a part that were read.
  struct Range {
    Part* part;
    uint32_t first_row, next_row;
    uint32_t units;
    size_t offset;                      // of their units in `bytes`
    std::vector<uint32_t> unread = {};  // the units that could not be read

    const char* RowAt(uint32_t row, const char* bytes) const {
      const Segment& segment = *part->segment;
      const uint32_t unit = (row - first_row) / segment.format().rows_per_unit;
      return segment.RowIn(bytes + offset + unit * segment.format().unit_bytes, row);
    }
  };

  Status Read() override {
    ranges.clear();
    size_t rows_left = (urgent ? kUrgent : 1) * kCompactRows;
    size_t size = 0;
    for (Part& part : parts) {
      const RowFormat& format = part.segment->format();
      const uint32_t left = part.segment->rows() - part.next_row;
      if (left == 0 || rows_left == 0) continue;
      const uint32_t rows = static_cast<uint32_t>(std::min<size_t>(left, rows_left));
      const uint32_t units = (rows + format.rows_per_unit - 1) / format.rows_per_unit;
      const uint32_t end =
          std::min(part.segment->rows(), part.next_row + units * format.rows_per_unit);
      ranges.push_back({&part, part.next_row, end, units, size});
      rows_left -= rows;
      size += units * format.unit_bytes;
    }
    bytes.Resize(size);
    Status status;
    for (Range& range : ranges) {
      const Segment& segment = *range.part->segment;
      const RowFormat& format = segment.format();
      const uint32_t first = range.first_row / format.rows_per_unit;
      if (segment.ReadUnits(first, range.units, bytes.data() + range.offset).ok()) continue;
      // The rows of all other units can move. Whatever may pass, says nothing about the file.
      for (uint32_t unit = 0; unit < range.units; ++unit) {
        char* const to = bytes.data() + range.offset + unit * format.unit_bytes;
        const Status read = segment.ReadUnits(first + unit, 1, to);
        if (read.ok()) continue;
        if (read.code() != Code::kDataLoss) {
          ranges.clear();
          return read;
        }
        if (status.ok()) status = read;
        range.unread.push_back(unit);
      }
    }
    for (const Range& range : ranges) range.part->next_row = range.next_row;
    return status;
  }

  // Segments and steps, if the files grow faster than single ones give space back.
  static constexpr size_t kUrgent = 8;
  std::vector<Part> parts;
  std::vector<Range> ranges;
  AlignedBuffer bytes;
};

Status FileRows::PlanCompaction(std::unique_ptr<Compaction>* next) const {
  auto* moves = static_cast<Moves*>(next->get());
  const double space = log_.space();
  const bool urgent = space > kUrgentSpace;
  if (moves != nullptr) {
    const auto unfinished = [this](const Moves::Part& part) {
      return part.next_row < part.segment->rows() && IsPresent(part.number, part.segment);
    };
    if (std::any_of(moves->parts.begin(), moves->parts.end(), unfinished)) {
      moves->urgent = urgent;
      return Status();
    }
  }
  next->reset();
  std::vector<uint32_t> chosen = log_.Condemned(Moves::kUrgent);
  const bool condemned = !chosen.empty();
  if (!condemned) {
    if (space < kMostSpace) return Status();
    chosen = log_.ToCompact(urgent ? Moves::kUrgent : 1);
  }
  auto made = std::make_unique<Moves>();
  for (const uint32_t number : chosen) {
    made->parts.push_back({log_.segments()[number], number, 0});
  }
  made->urgent = urgent || condemned;
  made->rewrites = condemned;
  if (!made->parts.empty()) *next = std::move(made);
  return Status();
}

bool FileRows::IsPresent(uint32_t number, const std::shared_ptr<Segment>& segment) const {
  return number < log_.segments().size() && log_.segments()[number] == segment;
}

void FileRows::ListLive(uint32_t number, uint32_t first, uint32_t last, const RowBytesFn& bytes_of,
                        std::vector<Moving>* live) {
  const uint32_t epoch = log_.segments()[number]->epoch();
  for (uint32_t row = first; row < last; ++row) {
    const char* const stored = bytes_of(row);
    uint64_t key;
    memcpy(&key, stored, sizeof(key));
    const ColdPlace place = log_.At(number, row);
    index_.ForEach(HashOf(key), [&](SlotIndex::Entry* entry) {
      if (entry->place == place) live->push_back({entry, epoch, stored});
    });
  }
}

Status FileRows::Move(Exec& exec, const std::vector<Moving>& rows, const ContentChange* change) {
  constexpr size_t kGrain = 256;
  if (rows.empty()) return Status();
  std::vector<ColdPlace> old(rows.size());
  std::vector<char*> to(rows.size());
  DYNEMB_RETURN_IF_ERROR(log_.Reserve(rows.size()));
  // From here on nothing fails.
  for (size_t r = 0; r < rows.size(); ++r) {
    SlotIndex::Entry* const entry = rows[r].entry;
    old[r] = entry->place;
    if (IsOfCut(entry->place)) KeepTimes(*entry);
    size_t i;
    to[r] = log_.Append(&entry->place, &i);
  }
  exec.ParallelFor(rows.size(), kGrain, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) {
      const Moving& moving = rows[r];
      StoredRow stored;
      memcpy(&stored, moving.row, sizeof(stored));
      // The header has the score that the row had when it left memory.
      stored.score = static_cast<int64_t>(moving.entry->times.score);
      memcpy(to[r], &stored, sizeof(stored));
      const char* const from = moving.row + sizeof(stored);
      char* const content = to[r] + sizeof(stored);
      if (moving.epoch == layout_.epoch) {
        memcpy(content, from, layout_.rows.content_bytes());
      } else {
        layout_.Convert(from, content);
      }
      if (change != nullptr && change->Applies(content)) change->Apply(stored.key, content);
    }
  });
  log_.Commit();
  for (const ColdPlace place : old) log_.Release(place);
  log_.WriteOut();
  return Status();
}

Status FileRows::Compact(Compaction* planned, const ContentChange* change) {
  auto* const moves = static_cast<Moves*>(planned);  // keeps segments whose last rows move
  std::vector<Moving> live;
  for (const Moves::Range& range : moves->ranges) {
    // It may have been deleted meanwhile.
    Segment& segment = *range.part->segment;
    if (!IsPresent(range.part->number, range.part->segment)) continue;
    const auto bytes_of = [&](uint32_t row) { return range.RowAt(row, moves->bytes.data()); };
    const uint32_t per_unit = segment.format().rows_per_unit;
    uint32_t first = range.first_row;
    for (const uint32_t unit : range.unread) {
      const uint32_t unread = range.first_row + unit * per_unit;
      ListLive(range.part->number, first, unread, bytes_of, &live);
      first = std::min(range.next_row, unread + per_unit);
    }
    ListLive(range.part->number, first, range.next_row, bytes_of, &live);
    segment.damaged |= !range.unread.empty();
  }
  SerialExec serial;
  DYNEMB_RETURN_IF_ERROR(Move(serial, live, change));
  compacted_ += live.size();
  for (const Moves::Part& part : moves->parts) {
    Segment& segment = *part.segment;
    if (part.next_row < segment.rows() || !IsPresent(part.number, part.segment)) continue;
    if (segment.damaged) continue;
    // All rows of the index would have moved, if it had them under their keys.
    segment.damaged = true;
    errors_->Add(DataLoss(segment.path() + " has rows that no key finds: the index is damaged"));
  }
  return Status();
}

uint64_t FileRows::EndOfRows() const { return uint64_t{log_.next_sequence()} << kPositionRowBits; }

Status FileRows::ChangeContents(Exec& exec, const ContentChange& change, uint64_t limit,
                                uint64_t end, uint64_t* position) {
  AlignedBuffer bytes;
  std::vector<Moving> live;
  std::vector<char> converted(layout_.rows.content_bytes());
  while (*position < end && limit != 0) {
    const auto sequence = static_cast<uint32_t>(*position >> kPositionRowBits);
    uint32_t number = 0;
    const std::shared_ptr<Segment> segment = log_.FirstFrom(sequence, &number);
    if (segment == nullptr) {
      *position = end;
      break;
    }
    constexpr uint64_t kRowMask = (uint64_t{1} << kPositionRowBits) - 1;
    const uint32_t first =
        segment->sequence() == sequence ? static_cast<uint32_t>(*position & kRowMask) : 0;
    const uint64_t begin_of_segment = uint64_t{segment->sequence()} << kPositionRowBits;
    if (begin_of_segment >= end) {
      *position = end;
      break;
    }
    if (first >= segment->rows()) {
      *position = begin_of_segment + (uint64_t{1} << kPositionRowBits);
      continue;
    }
    // Whole units, up to the first one that waits to be written; or all rows from that one on.
    const RowFormat& format = segment->format();
    const uint32_t per_unit = format.rows_per_unit;
    const auto most = static_cast<uint32_t>(std::min<uint64_t>(limit, kCompactRows));
    const uint32_t first_unit = first / per_unit;
    uint32_t last = segment->rows();
    uint32_t units = 0;
    if (segment->IsWritten(first)) {
      units = (most + per_unit - 1) / per_unit;
      while (units > 1 && !segment->IsWritten((first_unit + units - 1) * per_unit)) --units;
      last = std::min(last, (first_unit + units) * per_unit);
      bytes.Resize(units * format.unit_bytes);
      DYNEMB_RETURN_IF_ERROR(segment->ReadUnits(first_unit, units, bytes.data()));
    } else {
      // Move may take the memory of these rows away.
      last = std::min(last, first + most);
      units = (last - 1) / per_unit - first_unit + 1;
      bytes.Resize(units * format.unit_bytes);
      for (uint32_t row = first; row < last; ++row) {
        char* const unit = bytes.data() + (row / per_unit - first_unit) * format.unit_bytes;
        memcpy(const_cast<char*>(segment->RowIn(unit, row)), segment->Unwritten(row),
               format.row_bytes);
      }
    }
    live.clear();
    const auto bytes_of = [&](uint32_t row) -> const char* {
      return segment->RowIn(bytes.data() + (row / per_unit - first_unit) * format.unit_bytes, row);
    };
    ListLive(number, first, last, bytes_of, &live);
    limit -= std::min<uint64_t>(limit, std::max<size_t>(1, live.size()));
    const auto stays = [&](const Moving& moving) {
      const char* content = moving.row + sizeof(StoredRow);
      if (moving.epoch != layout_.epoch) {
        layout_.Convert(content, converted.data());
        content = converted.data();
      }
      return !change.Applies(content);
    };
    live.erase(std::remove_if(live.begin(), live.end(), stays), live.end());
    DYNEMB_RETURN_IF_ERROR(Move(exec, live, &change));
    *position = begin_of_segment + last;
  }
  return Status();
}

}  // namespace dynemb
