// FileRows' part of flushes (flush_manifest.h).
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cc/file/file_rows.h"
#include "cc/file/flush_manifest.h"

namespace dynemb {

// Copies of rows, in segments of their own.
class FileRows::Copies {
 public:
  // The first segment gets this number.
  Copies(RowLog* log, std::string folder, uint32_t number)
      : log_(log), folder_(std::move(folder)), number_(number) {}

  Status Add(const StoredRow& stored, const char* content, ColdPlace* place) {
    if (segment_ == nullptr || segment_->rows() == segment_->max_rows()) {
      DYNEMB_RETURN_IF_ERROR(EndSegment());
      DYNEMB_RETURN_IF_ERROR(log_->CreateSegment(folder_, &segment_));
      reserved_ = 0;
    }
    const uint32_t row = segment_->rows();
    if (row == reserved_) {
      uint64_t bytes = 0;
      DYNEMB_RETURN_IF_ERROR(segment_->Write(false, &bytes));
      reserved_ = row + kRowsAtOnce;
      segment_->Reserve(reserved_);  // at most the largest number
    }
    char* const to = segment_->Unwritten(row);
    memcpy(to, &stored, sizeof(stored));
    memcpy(to + sizeof(stored), content, segment_->format().content_bytes);
    segment_->SetRows(row + 1);
    *place = log_->At(number_, row);
    return Status();
  }

  // Makes the rows durable, and adds their segments to the manifest.
  Status Finish(std::vector<FlushManifest::SegmentRecord>* segments) {
    DYNEMB_RETURN_IF_ERROR(EndSegment());
    segments->insert(segments->end(), done_.begin(), done_.end());
    return Status();
  }

 private:
  static constexpr uint32_t kRowsAtOnce = 4096;

  Status EndSegment() {
    if (segment_ == nullptr) return Status();
    uint64_t bytes = 0;
    DYNEMB_RETURN_IF_ERROR(segment_->Write(true, &bytes));
    DYNEMB_RETURN_IF_ERROR(segment_->Sync());
    segment_->Keep();
    done_.push_back({number_, segment_->sequence(), segment_->rows(), segment_->epoch(),
                     segment_->format().content_bytes});
    segment_.reset();
    return log_->CheckNumber(++number_);
  }

  RowLog* const log_;
  const std::string folder_;
  uint32_t number_;
  std::shared_ptr<Segment> segment_;
  uint32_t reserved_ = 0;
  std::vector<FlushManifest::SegmentRecord> done_;
};

Status FileRows::Flush(const std::string& folder, const std::string& record, const HotRowsFn& hot) {
  const RowLog::Segments& segments = log_.segments();
  const auto first_copy = static_cast<uint32_t>(segments.size());
  DYNEMB_RETURN_IF_ERROR(log_.CheckNumber(first_copy));
  Copies copies(&log_, folder, first_copy);
  FlushIndexWriter index(files_, folder + "/index");
  DYNEMB_RETURN_IF_ERROR(index.Open());
  std::vector<uint32_t> rows_of(segments.size());  // of each segment, up to the last one in use

  Status status;
  index_.ForFrom(0, [&](uint64_t position, const SlotIndex::Entry* entry) {
    ColdPlace place = entry->place;
    const uint32_t number = log_.NumberOf(place), row = log_.RowOf(place);
    Segment& segment = *segments[number];
    if (segment.IsWritten(row)) {
      rows_of[number] = std::max(rows_of[number], row + 1);
    } else {
      // The tail has rows of this layout only.
      const char* const bytes = segment.Unwritten(row);
      StoredRow stored;
      memcpy(&stored, bytes, sizeof(stored));
      status = copies.Add(stored, bytes + sizeof(stored), &place);
    }
    if (status.ok())
      status = index.Add({position, place, entry->times.updated, entry->times.score});
    return status.ok();
  });
  DYNEMB_RETURN_IF_ERROR(status);
  DYNEMB_RETURN_IF_ERROR(
      hot([&](uint64_t key, const char* row, RowTimes times, Tick updated) -> Status {
        const StoredRow stored{key, updated, static_cast<int64_t>(times.score)};
        ColdPlace place;
        DYNEMB_RETURN_IF_ERROR(copies.Add(stored, row + layout_.rows.vector_offset, &place));
        return index.Add({SlotIndex::PositionOf(HashOf(key)), place, times.updated, times.score});
      }));

  FlushManifest manifest;
  manifest.salt = salt_;
  manifest.place_shift = log_.places().shift;
  manifest.epoch = layout_.epoch;
  manifest.content_bytes = layout_.rows.content_bytes();
  for (uint32_t s = 0; s < rows_of.size(); ++s) {
    if (rows_of[s] == 0) continue;
    Segment& segment = *segments[s];
    DYNEMB_RETURN_IF_ERROR(segment.Sync());
    const std::string to = RowLog::SegmentPath(folder, segment.sequence());
    const int error = files_->Link(segment.path(), to);
    if (error < 0) return FileError(to, -error);
    manifest.segments.push_back(
        {s, segment.sequence(), rows_of[s], segment.epoch(), segment.format().content_bytes});
  }
  DYNEMB_RETURN_IF_ERROR(copies.Finish(&manifest.segments));
  DYNEMB_RETURN_IF_ERROR(index.Finish());
  manifest.rows = index.records();
  manifest.index_crc = index.crc();
  manifest.table = record;
  std::string flushed = folder;
  DYNEMB_RETURN_IF_ERROR(manifest.Write(*files_, folder));
  flushed_ = std::move(flushed);
  return Status();
}

Status FileRows::ReadFlush(const std::string& folder, std::string* record) const {
  FlushManifest manifest;
  DYNEMB_RETURN_IF_ERROR(FlushManifest::Read(*files_, folder, &manifest));
  *record = std::move(manifest.table);
  return Status();
}

Status FileRows::Restore(const std::string& folder) {
  FlushManifest manifest;
  DYNEMB_RETURN_IF_ERROR(FlushManifest::Read(*files_, folder, &manifest));
  if (index_.size() != 0 || manifest.content_bytes != layout_.rows.content_bytes()) {
    return Internal(folder + ": a flush is restored to another kind of table");
  }
  ForgetAhead();
  DYNEMB_RETURN_IF_ERROR(log_.Adopt(manifest, folder));
  salt_ = manifest.salt;
  index_.Reserve(manifest.rows);
  DYNEMB_RETURN_IF_ERROR(ReadFlushIndex(*files_, folder + "/index", manifest.rows,
                                        manifest.index_crc,
                                        [&](const IndexRecord& record) -> Status {
                                          DYNEMB_RETURN_IF_ERROR(log_.AdoptRow(record.place));
                                          index_.AddAgain(SlotIndex::HashAt(record.position),
                                                     record.place, {record.updated, record.score});
                                          return Status();
                                        }));
  index_.EndAdding();
  flushed_ = folder;
  const std::string wiped = folder + "/wiped";
  const int fd = files_->Open(wiped, O_RDONLY, 0);
  if (fd == -ENOENT) return Status();
  if (fd < 0) return FileError(wiped, -fd);
  files_->Close(fd);
  return DropWiped();
}

Status FileRows::NoteWipe() const {
  if (flushed_.empty()) return Status();
  const std::string path = flushed_ + "/wiped";
  const int fd = files_->Open(path, O_WRONLY | O_CREAT, 0644);
  if (fd == -ENOENT) return Status();
  if (fd < 0) return FileError(path, -fd);
  files_->Close(fd);
  const int error = files_->SyncDirectory(flushed_);
  return error < 0 ? FileError(path, -error) : Status();
}

Status FileRows::DropWiped() {
  constexpr uint64_t kRows = 65536;
  struct Wiped {
    uint64_t hash;
    ColdPlace place;
  };
  std::vector<Wiped> gone;
  std::vector<uint64_t> hashes;
  std::vector<ColdPlace> places;
  const auto read = [&]() -> Status {
    DYNEMB_RETURN_IF_ERROR(Read(places, [&](size_t i, const ColdRow& row) {
      if (row.updated == 0) gone.push_back({hashes[i], places[i]});
    }));
    hashes.clear();
    places.clear();
    return Status();
  };
  Status status;
  index_.ForFrom(0, [&](uint64_t position, const SlotIndex::Entry* entry) {
    hashes.push_back(SlotIndex::HashAt(position));
    places.push_back(entry->place);
    if (places.size() == kRows) status = read();
    return status.ok();
  });
  DYNEMB_RETURN_IF_ERROR(status);
  DYNEMB_RETURN_IF_ERROR(read());
  for (const Wiped& row : gone) {
    index_.Remove(row.hash, row.place);
    log_.Release(row.place);
  }
  return Status();
}

}  // namespace dynemb
