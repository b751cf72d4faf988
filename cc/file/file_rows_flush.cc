// FileRows' part of flushes (flush_manifest.h).
#include <algorithm>
#include <cstring>
#include <utility>

#include "cc/file/file_rows.h"
#include "cc/file/flush_manifest.h"

namespace dynemb {

// Copies of rows, in separate segments.
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
  DYNEMB_RETURN_IF_ERROR(log_.CheckOwner());
  const RowLog::Segments& segments = log_.segments();
  const auto first_copy = static_cast<uint32_t>(segments.size());
  DYNEMB_RETURN_IF_ERROR(log_.CheckNumber(first_copy));
  Copies copies(&log_, folder, first_copy);
  FlushIndexWriter index(files_, folder + "/index");
  DYNEMB_RETURN_IF_ERROR(index.Open());
  std::vector<uint32_t> rows_of(segments.size());  // of each segment, up to the last one in use

  Status status;
  index_.ForHashes([&](uint64_t hash, const SlotIndex::Entry* entry) {
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
    if (status.ok()) status = index.Add({hash, place, entry->times.updated, entry->times.score});
    return status.ok();
  });
  DYNEMB_RETURN_IF_ERROR(status);
  DYNEMB_RETURN_IF_ERROR(
      hot([&](uint64_t key, const char* row, RowTimes times, Tick updated) -> Status {
        const StoredRow stored{key, updated, static_cast<int64_t>(times.score)};
        ColdPlace place;
        DYNEMB_RETURN_IF_ERROR(copies.Add(stored, row + layout_.rows.vector_offset, &place));
        const uint64_t hash = HashOf(key);
        return index.Add({hash, place, times.updated, times.score});
      }));

  FlushManifest manifest;
  manifest.salt = salt_;
  manifest.place_shift = log_.places().shift;
  manifest.epoch = layout_.epoch;
  manifest.content_bytes = layout_.rows.content_bytes();
  for (uint32_t s = 0; s < rows_of.size(); ++s) {
    if (rows_of[s] == 0) continue;
    Segment& segment = *segments[s];
    if (segment.condemned) return Internal(segment.path() + " has to be rewritten first");
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
  return manifest.Write(*files_, folder);
}

Status FileRows::ReadFlush(const std::string& folder, std::string* record) const {
  FlushManifest manifest;
  DYNEMB_RETURN_IF_ERROR(FlushManifest::Read(*files_, folder, &manifest));
  *record = std::move(manifest.table);
  return Status();
}

Status FileRows::CheckLayouts(const FlushManifest& manifest, const std::string& folder) const {
  const auto damaged = [&](const char* why) {
    return DataLoss(folder + "/manifest contradicts itself: " + why);
  };
  for (const FlushManifest::SegmentRecord& record : manifest.segments) {
    if (record.epoch == manifest.epoch && record.content_bytes != manifest.content_bytes) {
      return damaged("rows of one layout have two sizes");
    }
    if (record.content_bytes < layout_.rows.vector_bytes()) return damaged("rows have no vectors");
  }
  return Status();
}

Status FileRows::Restore(const std::string& folder, std::vector<uint64_t>* forgotten) {
  FlushManifest manifest;
  DYNEMB_RETURN_IF_ERROR(FlushManifest::Read(*files_, folder, &manifest));
  if (index_.size() != 0 || manifest.content_bytes != layout_.rows.content_bytes()) {
    return Internal(folder + ": a flush is restored to another kind of table");
  }
  DYNEMB_RETURN_IF_ERROR(CheckLayouts(manifest, folder));
  DYNEMB_RETURN_IF_ERROR(ReadForgotten(*files_, folder, forgotten));
  ForgetAhead();
  DYNEMB_RETURN_IF_ERROR(log_.Adopt(manifest, folder));
  salt_ = manifest.salt;
  index_.ReserveEvenly(manifest.rows);
  DYNEMB_RETURN_IF_ERROR(
      ReadFlushIndex(*files_, folder + "/index", manifest.rows, manifest.index_crc,
                     [&](const IndexRecord& record) -> Status {
                       DYNEMB_RETURN_IF_ERROR(log_.AdoptRow(record.place));
                       index_.AddAgain(record.hash, record.place, {record.updated, record.score});
                       return Status();
                     }));
  log_.EndAdopting();
  index_.EndAdding();
  if (forgotten->empty()) return Status();
  std::vector<uint64_t> keys;
  std::vector<ColdPlace> places;
  DYNEMB_RETURN_IF_ERROR(
      Find(forgotten->data(), forgotten->size(), [&](size_t i, const ColdRow& row) {
        keys.push_back((*forgotten)[i]);
        places.push_back(row.place);
      }));
  Remove(keys.data(), places.data(), keys.size());
  Condemn(places.data(), places.size());
  return Status();
}

Status FileRows::NoteForgotten(const std::string& folder, const std::vector<uint64_t>& keys) {
  DYNEMB_RETURN_IF_ERROR(log_.CheckOwner());
  return WriteForgotten(*files_, folder, keys);
}

}  // namespace dynemb
