// RowLog's reads of rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "cc/file/row_log.h"
#include "cc/table/scratch.h"

namespace dynemb {
namespace {

// The bytes that Fetch holds at once, and reads at once.
constexpr size_t kWindowBytes = size_t{4} << 20;
constexpr size_t kReadBytes = size_t{128} << 10;
// The segments that a Fetch uses at once, so that many can run at the same time.
constexpr size_t kMostUses = 64;

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
  std::vector<size_t> first_units;  // of each read; its units end where the next read's begin
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
  // The files of a window, in its order. Not part of the scratch, which outlives an exception.
  std::vector<ReadFile::Use> uses;
  uses.reserve(kMostUses);
  for (size_t begin = 0; begin < requests.size();) {
    uses.clear();
    units.clear();
    reads.clear();
    first_units.clear();
    size_t bytes = 0;
    size_t r = begin;
    while (r < requests.size() && (bytes == 0 || bytes < kWindowBytes)) {
      const Request& first = requests[r];
      if (uses.empty() || requests[r - 1].segment != first.segment) {
        if (uses.size() == kMostUses) break;
        ReadFile::Use use;
        DYNEMB_RETURN_IF_ERROR(
            first.segment->Use(uses.empty() ? ReadFile::Wait::kYes : ReadFile::Wait::kNo, &use));
        if (!use) break;  // the rest of the rows in a later window
        uses.push_back(std::move(use));
      }
      const int fd = uses.back().fd();
      const uint32_t unit = unit_of(first);
      const size_t unit_bytes = first.segment->format().unit_bytes;
      const uint64_t offset = uint64_t{unit} * unit_bytes;
      size_t end = r + 1;
      while (end < requests.size() && requests[end].segment == first.segment &&
             unit_of(requests[end]) == unit) {
        ++end;
      }
      const bool continues = !reads.empty() && reads.back().fd == fd &&
                             reads.back().offset + reads.back().bytes == offset &&
                             reads.back().bytes + unit_bytes <= kReadBytes;
      if (continues) {
        reads.back().bytes += unit_bytes;
      } else {
        reads.push_back({fd, offset, unit_bytes, nullptr, 0});
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

}  // namespace dynemb
