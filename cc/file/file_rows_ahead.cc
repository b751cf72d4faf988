// FileRows' part of reading ahead: rows that a later Find needs.
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/file/file_rows.h"

namespace dynemb {

Status FileRows::RowsAhead::Read() {
  size_t size = 0;
  for (Row& row : rows) {
    row.offset = size;
    size += row.segment->format().row_bytes;
  }
  bytes.resize(size);
  std::vector<RowLog::Request> requests;
  requests.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    requests.push_back({i, rows[i].segment.get(), rows[i].row});
  }
  DYNEMB_RETURN_IF_ERROR(
      log->Fetch(std::move(requests), [&](size_t i, const Segment& segment, const char* stored) {
        memcpy(bytes.data() + rows[i].offset, stored, segment.format().row_bytes);
      }));
  by_place.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    by_place.emplace(rows[i].place, i);
    rows[i].segment.reset();  // its file goes when the table deletes it
  }
  return Status();
}

const char* FileRows::RowsAhead::At(ColdPlace place, const Segment& segment) const {
  const auto found = by_place.find(place);
  if (found == by_place.end()) return nullptr;
  // The number of a segment that was deleted is used again.
  const Row& row = rows[found->second];
  return row.sequence == segment.sequence() ? bytes.data() + row.offset : nullptr;
}

std::unique_ptr<ColdRows::Ahead> FileRows::PlanAhead(const uint64_t* keys, size_t n) const {
  auto made = std::make_unique<RowsAhead>();
  made->log = &log_;
  made->forgotten = forgotten_;
  for (size_t i = 0; i < n; ++i) {
    index_.ForEach(HashOf(keys[i]), [&](const SlotIndex::Entry* entry) {
      const std::shared_ptr<Segment>& segment = log_.segments()[log_.NumberOf(entry->place)];
      const uint32_t row = log_.RowOf(entry->place);
      if (!segment->IsWritten(row)) return;  // it is in memory
      made->rows.push_back({entry->place, row, segment->sequence(), segment, 0});
    });
  }
  if (made->rows.empty()) return nullptr;
  return made;
}

void FileRows::KeepAhead(std::unique_ptr<Ahead> ahead) {
  std::shared_ptr<const RowsAhead> rows(
      std::unique_ptr<const RowsAhead>(static_cast<const RowsAhead*>(ahead.release())));
  std::shared_ptr<const RowsAhead> old;  // its memory is freed without the lock
  std::lock_guard<std::mutex> lock(ahead_mutex_);
  if (rows != nullptr && rows->forgotten != forgotten_) rows.swap(old);
  std::swap(ahead_[0], ahead_[1]);
  std::swap(ahead_[0], rows);
}

void FileRows::ForgetAhead() noexcept {
  std::shared_ptr<const RowsAhead> old[2];
  std::lock_guard<std::mutex> lock(ahead_mutex_);
  ++forgotten_;
  std::swap(ahead_, old);
}

void FileRows::FindAhead(std::vector<Candidate>* candidates, const StoredFn& fn) const {
  std::shared_ptr<const RowsAhead> ahead[2];
  {
    std::lock_guard<std::mutex> lock(ahead_mutex_);
    for (int a = 0; a < 2; ++a) ahead[a] = ahead_[a];
  }
  if (ahead[0] == nullptr && ahead[1] == nullptr) return;
  std::vector<char> converted(layout_.rows.content_bytes());
  size_t left = 0;
  for (const Candidate& candidate : *candidates) {
    const Segment& segment = *log_.segments()[log_.NumberOf(candidate.place)];
    const char* row = nullptr;
    for (int a = 0; a < 2 && row == nullptr; ++a) {
      if (ahead[a] != nullptr) row = ahead[a]->At(candidate.place, segment);
    }
    if (row == nullptr) {
      (*candidates)[left++] = candidate;
    } else {
      Deliver(layout_, candidate, segment, row, converted.data(), fn);
    }
  }
  found_ahead_ += candidates->size() - left;
  candidates->resize(left);
}

}  // namespace dynemb
