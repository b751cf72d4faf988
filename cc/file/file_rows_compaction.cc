// FileRows' part of compaction: live rows of segments with few of them move to the end of the log.
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
    size_t offset;  // of their units in `bytes`

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
    for (const Range& range : ranges) {
      const Segment& segment = *range.part->segment;
      DYNEMB_RETURN_IF_ERROR(segment.ReadUnits(range.first_row / segment.format().rows_per_unit,
                                               range.units, bytes.data() + range.offset));
    }
    for (const Range& range : ranges) range.part->next_row = range.next_row;
    return Status();
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
  if (space < kMostSpace) return Status();
  auto made = std::make_unique<Moves>();
  for (const uint32_t number : log_.ToCompact(urgent ? Moves::kUrgent : 1)) {
    made->parts.push_back({log_.segments()[number], number, 0});
  }
  made->urgent = urgent;
  if (!made->parts.empty()) *next = std::move(made);
  return Status();
}

bool FileRows::IsPresent(uint32_t number, const std::shared_ptr<Segment>& segment) const {
  return number < log_.segments().size() && log_.segments()[number] == segment;
}

Status FileRows::Compact(Compaction* planned) {
  auto* const moves = static_cast<Moves*>(planned);
  struct Live {
    SlotIndex::Entry* entry;
    uint32_t epoch;  // of its segment
    const char* row;
  };
  std::vector<Live> live;
  for (const Moves::Range& range : moves->ranges) {
    // It may have been deleted meanwhile.
    if (!IsPresent(range.part->number, range.part->segment)) continue;
    for (uint32_t row = range.first_row; row < range.next_row; ++row) {
      const char* const stored = range.RowAt(row, moves->bytes.data());
      uint64_t key;
      memcpy(&key, stored, sizeof(key));
      const ColdPlace place = log_.At(range.part->number, row);
      index_.ForEach(HashOf(key), [&](SlotIndex::Entry* entry) {
        if (entry->place == place) live.push_back({entry, range.part->segment->epoch(), stored});
      });
    }
  }
  if (live.empty()) return Status();
  std::vector<ColdPlace> old;
  old.reserve(live.size());
  DYNEMB_RETURN_IF_ERROR(log_.Reserve(live.size()));
  // From here on nothing fails. `moves` keeps segments whose last rows move.
  for (const Live& move : live) {
    ColdPlace place;
    size_t i;
    char* const to = log_.Append(&place, &i);
    memcpy(to, move.row, sizeof(StoredRow));
    if (move.epoch == layout_.epoch) {
      memcpy(to + sizeof(StoredRow), move.row + sizeof(StoredRow), layout_.rows.content_bytes());
    } else {
      layout_.Convert(move.row + sizeof(StoredRow), to + sizeof(StoredRow));
    }
    // The header has the score that the row had when it left memory.
    const auto score = static_cast<int64_t>(move.entry->times.score);
    memcpy(to + offsetof(StoredRow, score), &score, sizeof(score));
    old.push_back(move.entry->place);
    if (IsOfCut(move.entry->place)) KeepTimes(*move.entry);
    move.entry->place = place;
  }
  log_.Commit();
  for (const ColdPlace place : old) log_.Release(place);
  log_.WriteOut();
  compacted_ += live.size();
  return Status();
}

}  // namespace dynemb
