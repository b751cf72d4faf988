#include "cc/file/row_log.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_set>
#include <utility>

namespace dynemb {
namespace {

constexpr size_t kLeastSegment = size_t{1} << 20;
constexpr uint64_t kSegments = 64;
// Enough for 16 TiB in segments of the least size.
constexpr uint32_t kMostSegments = 1u << 24;
// More segments than any table writes; the numbers of later ones must not overflow.
constexpr uint32_t kMostSequence = 1u << 31;

}  // namespace

Status RowLog::Init(const Options& options, size_t content_bytes) {
  options_ = options;
  BlockReader::Options reader = options.reader;
  reader.files = options.files;
  pid_ = options.files->ProcessId();
  DYNEMB_RETURN_IF_ERROR(BlockReader::OfProcess(reader, &reader_));
  SetContent(content_bytes);
  return Status();
}

void RowLog::SetContent(size_t content_bytes) {
  if (format_.row_bytes != 0) ++epoch_;
  format_ = RowFormat(content_bytes);
  const bool is_empty = std::all_of(segments_.begin(), segments_.end(),
                                    [](const auto& segment) { return segment == nullptr; });
  if (!is_empty) return;  // places keep their meaning
  segments_.clear();
  free_numbers_.clear();
  const size_t units = std::max<size_t>(1, options_.segment_bytes / format_.unit_bytes);
  places_ = PlaceBits();
  while (places_.shift < PlaceBits::kMostShift &&
         (size_t{1} << places_.shift) < units * format_.rows_per_unit) {
    ++places_.shift;
  }
}

uint64_t RowLog::file_bytes() const {
  uint64_t bytes = 0;
  for (const auto& segment : segments_) bytes += segment == nullptr ? 0 : segment->bytes_written();
  return bytes;
}

size_t RowLog::buffer_bytes() const {
  size_t bytes = 0;
  for (const uint32_t number : tail_) bytes += segments_[number]->buffer_bytes();
  return bytes;
}

uint64_t RowLog::live_bytes() const {
  uint64_t bytes = 0;
  for (const auto& segment : segments_) {
    if (segment != nullptr) bytes += uint64_t{segment->live} * segment->format().row_bytes;
  }
  return bytes;
}

std::string RowLog::SegmentPath(const std::string& folder, uint32_t sequence) {
  return folder + "/" + std::to_string(sequence) + ".rows";
}

Status RowLog::CheckOwner() const {
  if (options_.files->ProcessId() == pid_) return Status();
  return FailedPrecondition(options_.folder +
                            ": the files belong to the process that forked this one. This process "
                            "cannot write to them, and lookups write too, when they move rows");
}

Status RowLog::NewSegment() {
  // By a factor: there may be many segments.
  const auto make_room = [](auto* list, size_t n) {
    if (list->capacity() < n) list->reserve(n + n / 2);
  };
  make_room(&tail_, tail_.size() + 1);
  make_room(&free_numbers_, segments_.size() + 1);
  const bool is_new = free_numbers_.empty();
  const uint32_t number = is_new ? static_cast<uint32_t>(segments_.size()) : free_numbers_.back();
  DYNEMB_RETURN_IF_ERROR(CheckNumber(number));
  make_room(&segments_, segments_.size() + 1);
  std::shared_ptr<Segment> made;
  DYNEMB_RETURN_IF_ERROR(CreateSegment(options_.folder, SegmentRows(), &made));
  if (is_new) {
    segments_.push_back(std::move(made));
  } else {
    free_numbers_.pop_back();
    segments_[number] = std::move(made);
  }
  tail_.push_back(number);
  return Status();
}

Status RowLog::CheckNumber(uint32_t number) const {
  if (number < kMostSegments && uint64_t{number} + 1 < uint64_t{1} << (32 - places_.shift)) {
    return Status();
  }
  return ResourceExhausted(options_.folder + ": a table can have at most 2^32 rows in files");
}

Status RowLog::CreateSegment(const std::string& folder, uint32_t rows,
                             std::shared_ptr<Segment>* segment) {
  DYNEMB_RETURN_IF_ERROR(Segment::Create(Context(), SegmentPath(folder, next_sequence_),
                                         next_sequence_, format_, epoch_, rows, segment));
  ++next_sequence_;
  return Status();
}

uint32_t RowLog::MostRows() const {
  const uint64_t units = std::max<uint64_t>(1, options_.segment_bytes / format_.unit_bytes);
  return static_cast<uint32_t>(
      std::min<uint64_t>(units * format_.rows_per_unit, uint64_t{1} << places_.shift));
}

uint32_t RowLog::SegmentRows() const {
  const uint64_t live = std::max<uint64_t>(live_ / kSegments * format_.row_bytes, kLeastSegment);
  const uint64_t units = std::max<uint64_t>(1, live / format_.unit_bytes);
  return static_cast<uint32_t>(std::min<uint64_t>(units * format_.rows_per_unit, MostRows()));
}

Status RowLog::Reserve(size_t n) {
  DYNEMB_RETURN_IF_ERROR(CheckOwner());
  if (!write_error_.ok()) {
    WriteOut();
    DYNEMB_RETURN_IF_ERROR(write_error_);
  }
  size_t room = 0;
  for (const uint32_t number : tail_) {
    room += segments_[number]->max_rows() - segments_[number]->rows();
  }
  while (room < n) {
    DYNEMB_RETURN_IF_ERROR(NewSegment());
    room += segments_[tail_.back()]->max_rows();
  }
  starts_.clear();
  had_.clear();
  size_t before = 0;
  for (const uint32_t number : tail_) {
    Segment& segment = *segments_[number];
    const size_t rows =
        std::min<size_t>(n - std::min(n, before), segment.max_rows() - segment.rows());
    if (rows != 0) segment.Reserve(segment.rows() + static_cast<uint32_t>(rows));
    starts_.push_back(before);
    had_.push_back(segment.rows());
    before += segment.max_rows() - segment.rows();
  }
  appended_ = 0;
  return Status();
}

ColdPlace RowLog::PlaceOf(size_t i) const {
  const size_t s = std::upper_bound(starts_.begin(), starts_.end(), i) - starts_.begin() - 1;
  return At(tail_[s], had_[s] + static_cast<uint32_t>(i - starts_[s]));
}

char* RowLog::Append(ColdPlace* place, size_t* i) noexcept {
  *i = appended_.fetch_add(1, std::memory_order_relaxed);
  *place = PlaceOf(*i);
  return segments_[NumberOf(*place)]->Unwritten(RowOf(*place));
}

size_t RowLog::Commit() noexcept {
  const size_t n = appended_;
  for (size_t s = 0; s < starts_.size() && starts_[s] < n; ++s) {
    Segment& segment = *segments_[tail_[s]];
    const auto rows = static_cast<uint32_t>(
        std::min<size_t>(n - starts_[s], segment.max_rows() - segment.rows()));
    segment.SetRows(segment.rows() + rows);
    segment.live += rows;
  }
  live_ += n;
  return n;
}

Status RowLog::Write(Segment* segment, bool all) {
  uint64_t bytes = 0;
  DYNEMB_RETURN_IF_ERROR(segment->Write(all, &bytes));
  counters_.bytes_written += bytes;
  counters_.writes += bytes != 0;
  return Status();
}

void RowLog::WriteOut() noexcept {
  write_error_ = Status();
  size_t kept = 0;
  for (size_t s = 0; s < tail_.size(); ++s) {
    Segment& segment = *segments_[tail_[s]];
    const bool is_full = segment.rows() == segment.max_rows();
    if (write_error_.ok()) {
      try {
        write_error_ = Write(&segment, false);
      } catch (const std::bad_alloc&) {
        write_error_ = ResourceExhausted("no memory");  // short enough to need none itself
      }
    }
    if (is_full && write_error_.ok()) {
      segment.Seal();
      if (segment.live == 0) Drop(tail_[s]);
    } else {
      tail_[kept++] = tail_[s];
    }
  }
  tail_.resize(kept);
}

Status RowLog::SealTail() {
  DYNEMB_RETURN_IF_ERROR(CheckOwner());
  // One after another: a segment whose last unit is incomplete must be sealed even if the next one
  // cannot be written.
  while (!tail_.empty()) {
    const uint32_t number = tail_.front();
    Segment& segment = *segments_[number];
    DYNEMB_RETURN_IF_ERROR(Write(&segment, true));
    segment.Seal();
    tail_.erase(tail_.begin());
    if (segment.live == 0) Drop(number);
  }
  write_error_ = Status();
  return Status();
}

Status RowLog::CreateSegment(const std::string& folder, std::shared_ptr<Segment>* segment) {
  return CreateSegment(folder, MostRows(), segment);
}

Status RowLog::Adopt(const FlushManifest& flush, const std::string& folder) {
  const auto damaged = [&](const char* why) {
    return DataLoss(folder + "/manifest contradicts itself: " + why);
  };
  if (flush.place_shift > PlaceBits::kMostShift) return damaged("places have too many bits");
  segments_.clear();
  free_numbers_.clear();
  adopted_.clear();
  places_.shift = flush.place_shift;
  std::unordered_set<uint32_t> sequences;
  for (const FlushManifest::SegmentRecord& record : flush.segments) {
    if (!CheckNumber(record.number).ok()) return damaged("a segment has too large a number");
    if (record.sequence >= kMostSequence) return damaged("a segment has too late a number");
    if (!sequences.insert(record.sequence).second) return damaged("a segment is there twice");
    if (record.rows == 0 || record.rows > uint64_t{1} << places_.shift) {
      return damaged("a segment has an impossible number of rows");
    }
    if (record.content_bytes > RowFormat::kMostContent) return damaged("rows are too large");
    if (record.number >= segments_.size()) {
      segments_.resize(size_t{record.number} + 1);
      adopted_.resize(segments_.size());
    }
    if (segments_[record.number] != nullptr) return damaged("two segments have one number");
    const std::string from = SegmentPath(folder, record.sequence);
    const std::string path = SegmentPath(options_.folder, record.sequence);
    const int error = options_.files->Link(from, path);
    if (error < 0) return FileError(from, -error);
    const uint32_t epoch = record.epoch == flush.epoch ? epoch_ : epoch_ - 1;
    DYNEMB_RETURN_IF_ERROR(Segment::Open(Context(), path, record.sequence,
                                         RowFormat(record.content_bytes), epoch, record.rows,
                                         &segments_[record.number]));
    adopted_[record.number].resize(record.rows);
    next_sequence_ = std::max(next_sequence_, record.sequence + 1);
  }
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s] == nullptr) free_numbers_.push_back(s);
  }
  free_numbers_.reserve(segments_.size());
  return Status();
}

Status RowLog::AdoptRow(ColdPlace place) {
  const uint32_t number = NumberOf(place), row = RowOf(place);
  if (number >= segments_.size() || segments_[number] == nullptr ||
      row >= segments_[number]->rows() || adopted_[number][row]) {
    return DataLoss(options_.folder + ": the index of the flush has a row without a place");
  }
  adopted_[number][row] = true;
  ++segments_[number]->live;
  ++live_;
  return Status();
}

std::shared_ptr<Segment> RowLog::FirstFrom(uint32_t sequence, uint32_t* number) const {
  std::shared_ptr<Segment> oldest;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    const auto& segment = segments_[s];
    if (segment == nullptr || segment->sequence() < sequence) continue;
    if (oldest != nullptr && oldest->sequence() < segment->sequence()) continue;
    oldest = segment;
    *number = s;
  }
  return oldest;
}

void RowLog::Drop(uint32_t number) noexcept {
  segments_[number].reset();
  free_numbers_.push_back(number);  // NewSegment has made room
}

void RowLog::Release(ColdPlace place) noexcept {
  const uint32_t number = NumberOf(place);
  Segment& segment = *segments_[number];
  --segment.live;
  --live_;
  if (segment.live != 0 || !segment.sealed()) return;
  Drop(number);
}

void RowLog::Clear() noexcept {
  segments_.clear();
  free_numbers_.clear();
  tail_.clear();
  live_ = 0;
  write_error_ = Status();
}

double RowLog::space() const {
  uint64_t sealed = 0, live = 0;
  for (const auto& segment : segments_) {
    if (segment == nullptr || !segment->sealed() || segment->damaged) continue;
    sealed += segment->rows() * uint64_t{segment->format().row_bytes};
    live += segment->live * uint64_t{segment->format().row_bytes};
  }
  return static_cast<double>(sealed) / static_cast<double>(std::max<uint64_t>(1, live));
}

std::vector<uint32_t> RowLog::ToCompact(size_t n) const {
  std::vector<uint32_t> numbers;
  std::vector<std::pair<double, uint32_t>> shares;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    const auto& segment = segments_[s];
    if (segment == nullptr || !segment->sealed() || segment->damaged ||
        segment->live == segment->rows()) {
      continue;
    }
    shares.emplace_back(static_cast<double>(segment->live) / segment->rows(), s);
  }
  n = std::min(n, shares.size());
  std::partial_sort(shares.begin(), shares.begin() + static_cast<int64_t>(n), shares.end());
  for (size_t i = 0; i < n; ++i) numbers.push_back(shares[i].second);
  return numbers;
}

std::vector<uint32_t> RowLog::Condemned(size_t n) const {
  std::vector<uint32_t> numbers;
  for (uint32_t s = 0; s < segments_.size() && numbers.size() < n; ++s) {
    const auto& segment = segments_[s];
    if (segment == nullptr || !segment->sealed() || segment->damaged || !segment->condemned) {
      continue;
    }
    numbers.push_back(s);
  }
  return numbers;
}

Status RowLog::SealCondemned(bool* any) {
  *any = false;
  bool in_tail = false;
  for (const auto& segment : segments_) {
    if (segment == nullptr || !segment->condemned) continue;
    *any = true;
    in_tail |= !segment->sealed();
    segment->damaged = false;
  }
  if (!in_tail) return Status();
  DYNEMB_RETURN_IF_ERROR(SealTail());
  *any = std::any_of(segments_.begin(), segments_.end(),
                     [](const auto& segment) { return segment != nullptr && segment->condemned; });
  return Status();
}

}  // namespace dynemb
