#include "cc/file/row_log.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "cc/table/scratch.h"

namespace dynemb {
namespace {

// The bytes that Fetch holds at once, and reads at once.
constexpr size_t kWindowBytes = size_t{4} << 20;
constexpr size_t kReadBytes = size_t{128} << 10;
constexpr size_t kLeastSegment = size_t{1} << 20;
constexpr uint64_t kSegments = 64;

}  // namespace

Status RowLog::Init(const Options& options, size_t content_bytes) {
  options_ = options;
  BlockReader::Options reader = options.reader;
  reader.files = options.files;
  DYNEMB_RETURN_IF_ERROR(BlockReader::Create(reader, &reader_));
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

Status RowLog::NewSegment() {
  tail_.reserve(tail_.size() + 1);
  free_numbers_.reserve(segments_.size() + 1);
  const bool is_new = free_numbers_.empty();
  const uint32_t number = is_new ? static_cast<uint32_t>(segments_.size()) : free_numbers_.back();
  DYNEMB_RETURN_IF_ERROR(CheckNumber(number));
  segments_.reserve(segments_.size() + 1);
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
  if (uint64_t{number} + 1 < uint64_t{1} << (32 - places_.shift)) return Status();
  return ResourceExhausted(options_.folder + ": a table can have at most 2^32 rows in files");
}

Status RowLog::CreateSegment(const std::string& folder, uint32_t rows,
                             std::shared_ptr<Segment>* segment) {
  DYNEMB_RETURN_IF_ERROR(Segment::Create(options_.files, SegmentPath(folder, next_sequence_),
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
  if (flush.place_shift > PlaceBits::kMostShift) return DataLoss(folder + "/manifest is damaged");
  segments_.clear();
  free_numbers_.clear();
  places_.shift = flush.place_shift;
  for (const FlushManifest::SegmentRecord& record : flush.segments) {
    DYNEMB_RETURN_IF_ERROR(CheckNumber(record.number));
    if (record.number >= segments_.size()) segments_.resize(size_t{record.number} + 1);
    const std::string from = SegmentPath(folder, record.sequence);
    const std::string path = SegmentPath(options_.folder, record.sequence);
    const int error = options_.files->Link(from, path);
    if (error < 0) return FileError(from, -error);
    const uint32_t epoch = record.epoch == flush.epoch ? epoch_ : epoch_ - 1;
    DYNEMB_RETURN_IF_ERROR(Segment::Open(options_.files, path, record.sequence,
                                         RowFormat(record.content_bytes), epoch, record.rows,
                                         &segments_[record.number]));
    next_sequence_ = std::max(next_sequence_, record.sequence + 1);
  }
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s] == nullptr) free_numbers_.push_back(s);
  }
  free_numbers_.reserve(segments_.size());
  return Status();
}

Status RowLog::AdoptRow(ColdPlace place) {
  const uint32_t number = NumberOf(place);
  if (number >= segments_.size() || segments_[number] == nullptr ||
      RowOf(place) >= segments_[number]->rows()) {
    return DataLoss(options_.folder + ": the index of the flush has a row without a segment");
  }
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

namespace {

// The working memory of a Fetch.
struct FetchScratch {
  // The requests [begin, end) of a unit, whose bytes are at `offset` in the buffer.
  struct Unit {
    size_t begin, end;
    size_t offset;
  };

  void Shrink() {
    if (buffer.capacity() > kKeptBytes) buffer = AlignedBuffer();
  }

  AlignedBuffer buffer;
  std::vector<Unit> units;
  std::vector<BlockRead> reads;
  std::vector<size_t> first_units;  // of each read; its units end where those of the next one begin
};

}  // namespace

Status RowLog::Fetch(std::vector<Request> requests, const StoredFn& fn) const {
  // Rows that wait to be written are in memory.
  const auto written = [](const Request& r) { return r.segment->IsWritten(r.row); };
  const auto waiting = std::partition(requests.begin(), requests.end(), written);
  for (auto r = waiting; r != requests.end(); ++r) {
    fn(r->i, *r->segment, r->segment->Unwritten(r->row));
  }
  requests.erase(waiting, requests.end());
  if (requests.empty()) return Status();
  std::sort(requests.begin(), requests.end(), [](const Request& a, const Request& b) {
    if (a.segment != b.segment) return a.segment->sequence() < b.segment->sequence();
    return a.row < b.row;
  });
  const auto unit_of = [](const Request& r) { return r.row / r.segment->format().rows_per_unit; };
  const SharedScratch<FetchScratch> scratch;
  std::vector<FetchScratch::Unit>& units = scratch->units;
  std::vector<BlockRead>& reads = scratch->reads;
  std::vector<size_t>& first_units = scratch->first_units;
  AlignedBuffer& buffer = scratch->buffer;
  for (size_t begin = 0; begin < requests.size();) {
    units.clear();
    reads.clear();
    first_units.clear();
    size_t bytes = 0;
    size_t r = begin;
    while (r < requests.size() && (bytes == 0 || bytes < kWindowBytes)) {
      const Request& first = requests[r];
      const uint32_t unit = unit_of(first);
      const size_t unit_bytes = first.segment->format().unit_bytes;
      const uint64_t offset = uint64_t{unit} * unit_bytes;
      size_t end = r + 1;
      while (end < requests.size() && requests[end].segment == first.segment &&
             unit_of(requests[end]) == unit) {
        ++end;
      }
      const bool continues = !reads.empty() && reads.back().fd == first.segment->read_fd() &&
                             reads.back().offset + reads.back().bytes == offset &&
                             reads.back().bytes + unit_bytes <= kReadBytes;
      if (continues) {
        reads.back().bytes += unit_bytes;
      } else {
        reads.push_back({first.segment->read_fd(), offset, unit_bytes, nullptr, 0});
        first_units.push_back(units.size());
      }
      units.push_back({r, end, bytes});
      bytes += unit_bytes;
      r = end;
    }
    first_units.push_back(units.size());
    buffer.Resize(0);  // nothing to keep
    buffer.Resize(bytes);
    for (size_t i = 0; i < reads.size(); ++i) {
      reads[i].to = buffer.data() + units[first_units[i]].offset;
    }
    counters_.reads += reads.size();
    counters_.bytes_read += bytes;
    Status status;
    std::exception_ptr thrown;
    reader_->Read(reads.data(), reads.size(), [&](const BlockRead& read) {
      if (!status.ok() || thrown != nullptr) return;
      const auto i = static_cast<size_t>(&read - reads.data());
      try {
        for (size_t u = first_units[i]; u < first_units[i + 1] && status.ok(); ++u) {
          const FetchScratch::Unit& unit = units[u];
          const Segment& segment = *requests[unit.begin].segment;
          const char* const content = buffer.data() + unit.offset;
          status = read.error != 0 ? segment.ReadError(read)
                                   : segment.CheckUnit(unit_of(requests[unit.begin]), content);
          for (size_t k = unit.begin; k < unit.end && status.ok(); ++k) {
            fn(requests[k].i, segment, segment.RowIn(content, requests[k].row));
          }
        }
      } catch (...) {
        thrown = std::current_exception();  // other reads still write to the buffer
      }
    });
    if (thrown != nullptr) std::rethrow_exception(thrown);
    DYNEMB_RETURN_IF_ERROR(status);
    begin = r;
  }
  return Status();
}

double RowLog::space() const {
  uint64_t sealed = 0, live = 0;
  for (const auto& segment : segments_) {
    if (segment == nullptr || !segment->sealed()) continue;
    sealed += segment->rows();
    live += segment->live;
  }
  return static_cast<double>(sealed) / static_cast<double>(std::max<uint64_t>(1, live));
}

std::vector<uint32_t> RowLog::ToCompact(size_t n) const {
  std::vector<uint32_t> numbers;
  std::vector<std::pair<double, uint32_t>> shares;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    const auto& segment = segments_[s];
    if (segment == nullptr || !segment->sealed() || segment->live == segment->rows()) continue;
    shares.emplace_back(static_cast<double>(segment->live) / segment->rows(), s);
  }
  n = std::min(n, shares.size());
  std::partial_sort(shares.begin(), shares.begin() + static_cast<int64_t>(n), shares.end());
  for (size_t i = 0; i < n; ++i) numbers.push_back(shares[i].second);
  return numbers;
}

}  // namespace dynemb
