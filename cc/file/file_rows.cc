#include "cc/file/file_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cc/table/hash.h"
#include "cc/table/require.h"
#include "cc/table/staged.h"

namespace dynemb {
namespace {

// The index of cold rows uses other bits of a key than the table's index.
constexpr uint64_t kColdSalt = 0xC2B2AE3D27D4EB4Full;

}  // namespace

Status CreateFileTable(const TableOptions& options, const FileOptions& files,
                       uint64_t max_memory_bytes, std::unique_ptr<Table>* table, Exec* exec) {
  std::unique_ptr<ColdRows> cold;
  DYNEMB_RETURN_IF_ERROR(FileRows::Create(files, options, &cold));
  return Table::Create(options, std::move(cold), max_memory_bytes, table, exec);
}

Status FileRows::Create(const FileOptions& options, const TableOptions& table,
                        std::unique_ptr<ColdRows>* rows) {
  if (options.folder.empty()) return InvalidArgument("the folder of a file tier has no name");
  std::unique_ptr<FileRows> made(new FileRows);
  made->files_ = options.files;
  made->compacts_ = options.compact_in_background;
  made->salt_ = MixKey(Table::SaltOf(table) ^ kColdSalt);
  made->layout_.rows = RowLayout(SizeOf(table.key_type), table.dtype, table.dim, 0);
  if (made->layout_.rows.content_bytes() > RowFormat::kMostContent) {
    return InvalidArgument("rows in files can have at most 2^30 bytes");
  }
  DYNEMB_RETURN_IF_ERROR(ProcessFolder::Get(options.files, options.folder, &made->process_folder_));
  DYNEMB_RETURN_IF_ERROR(made->process_folder_->MakeTableFolder(&made->folder_));
  RowLog::Options log;
  log.folder = made->folder_;
  log.segment_bytes = options.segment_bytes;
  log.files = options.files;
  log.reader = options.reader;
  log.errors = made->errors_;
  DYNEMB_RETURN_IF_ERROR(made->log_.Init(log, made->layout_.rows.content_bytes()));
  *rows = std::move(made);
  return Status();
}

FileRows::~FileRows() {
  cut_.reset();
  log_.Clear();
  if (!folder_.empty()) process_folder_->RemoveTableFolder(folder_);
}

uint64_t FileRows::HashOf(uint64_t key) const { return HashKey(key, salt_); }

ColdStats FileRows::stats() const {
  ColdStats s;
  s.rows = index_.size();
  s.index_bytes = index_.bytes();
  s.buffer_bytes = log_.buffer_bytes();
  s.file_bytes = log_.file_bytes();
  s.row_bytes = log_.live_bytes();
  s.rows_added = rows_added_;
  s.rows_compacted = compacted_;
  s.errors = errors_->count();
  s.found_ahead = found_ahead_;
  s.bytes_read = log_.counters().bytes_read;
  s.bytes_written = log_.counters().bytes_written;
  s.reads = log_.counters().reads;
  s.writes = log_.counters().writes;
  return s;
}

Status FileRows::Reserve(size_t n) {
  index_.Reserve(n);
  added_.reserve(n);
  DYNEMB_RETURN_IF_ERROR(log_.Reserve(n));
  added_.resize(n);
  return Status();
}

void FileRows::Add(uint64_t key, const char* row, RowTimes times, Tick updated) noexcept {
  ColdPlace place;
  size_t i;
  char* const to = log_.Append(&place, &i);
  const StoredRow stored{key, updated, static_cast<int64_t>(times.score)};
  memcpy(to, &stored, sizeof(stored));
  memcpy(to + sizeof(stored), row + layout_.rows.vector_offset, layout_.rows.content_bytes());
  added_[i] = {key, times};
}

void FileRows::Settle() noexcept {
  const size_t n = log_.Commit();
  RunStaged(
      n, kMostStaged, [&](size_t i) { index_.Prefetch(HashOf(added_[i].key)); },
      [&](size_t i) { index_.Add(HashOf(added_[i].key), log_.PlaceOf(i), added_[i].times); });
  index_.EndAdding();
  added_.clear();
  rows_added_ += n;
  log_.WriteOut();
}

Status FileRows::ReadCandidates(const RowLog::Segments& segments, PlaceBits places,
                                const Layout& layout, const std::vector<Candidate>& candidates,
                                const StoredFn& fn) const {
  std::vector<RowLog::Request> requests;
  requests.reserve(candidates.size());
  for (size_t c = 0; c < candidates.size(); ++c) {
    const uint32_t number = places.NumberOf(candidates[c].place);
    if (number >= segments.size() || segments[number] == nullptr) {
      return Internal(log_.folder() + ": a place without a segment");
    }
    requests.push_back({c, segments[number].get(), places.RowOf(candidates[c].place)});
  }
  std::vector<char> converted(layout.rows.content_bytes());
  return log_.Fetch(std::move(requests), [&](size_t c, const Segment& segment, const char* row) {
    Deliver(layout, candidates[c], segment, row, converted.data(), fn);
  });
}

void FileRows::Deliver(const Layout& layout, const Candidate& candidate, const Segment& segment,
                       const char* row, char* converted, const StoredFn& fn) {
  StoredRow stored;
  memcpy(&stored, row, sizeof(stored));
  const char* content = row + sizeof(stored);
  if (segment.epoch() != layout.epoch) {
    layout.Convert(content, converted);
    content = converted;
  }
  fn(candidate, stored, content);
}

void FileRows::Layout::Convert(const char* content, char* to) const {
  memset(to, 0, rows.content_bytes());
  memcpy(to, content, rows.vector_bytes());
  if (rows.state_width == 0) return;
  memcpy(to + rows.state_offset - rows.vector_offset, initial_state.data(), rows.state_bytes());
}

Status FileRows::Find(const uint64_t* keys, size_t n, const RowFn& fn) const {
  if (index_.size() == 0) return Status();
  std::vector<Candidate> candidates;
  const auto prefetch = [&](size_t i) { index_.Prefetch(HashOf(keys[i])); };
  RunStaged(n, kMostStaged, prefetch, [&](size_t i) {
    index_.ForEach(HashOf(keys[i]), [&](const SlotIndex::Entry* entry) {
      candidates.push_back({i, entry->place, entry->times});
    });
  });
  const auto deliver = [&](const Candidate& candidate, const StoredRow& stored,
                           const char* content) {
    // No row was never updated.
    if (stored.key != keys[candidate.i] || stored.updated == 0) return;
    fn(candidate.i, {stored.key, candidate.times, candidate.place, stored.updated, content});
  };
  FindAhead(&candidates, deliver);
  return ReadCandidates(log_.segments(), log_.places(), layout_, candidates, deliver);
}

void FileRows::Remove(const uint64_t* keys, const ColdPlace* places, size_t n) noexcept {
  const auto prefetch = [&](size_t i) { index_.Prefetch(HashOf(keys[i])); };
  RunStaged(n, kMostStaged, prefetch, [&](size_t i) {
    const uint64_t hash = HashOf(keys[i]);
    if (IsOfCut(places[i])) {
      index_.ForEach(hash, [&](const SlotIndex::Entry* entry) {
        if (entry->place == places[i]) KeepTimes(*entry);
      });
    }
    index_.Remove(hash, places[i]);
    log_.Release(places[i]);
  });
}

void FileRows::Condemn(const ColdPlace* places, size_t n) noexcept {
  ForgetAhead();
  for (size_t i = 0; i < n; ++i) {
    const uint32_t row = log_.RowOf(places[i]);
    const std::shared_ptr<Segment>& segment = log_.segments()[log_.NumberOf(places[i])];
    if (segment == nullptr) continue;  // it was the last row of its file
    if (segment->IsWritten(row) || IsOfCut(places[i])) {
      segment->condemned = true;
    } else {
      memset(segment->Unwritten(row), 0, segment->format().row_bytes);
    }
  }
}

Status FileRows::PrepareRewrite(bool* any) { return log_.SealCondemned(any); }

void FileRows::Clear() noexcept {
  ForgetAhead();
  if (cut_ != nullptr && cut_->cleared.size() == 0) std::swap(index_, cut_->cleared);
  index_.Clear();
  log_.Clear();
}

ColdRows::Scanned FileRows::Scan(uint64_t cursor, uint64_t limit, uint64_t most,
                                 const TimesFn& chosen) const {
  Scanned scanned;
  scanned.next = kEnd;
  uint64_t examined = 0;
  uint64_t last = kEnd;
  index_.ForFrom(cursor, [&](uint64_t position, const SlotIndex::Entry* entry) {
    // Entries with equal positions stay together.
    if (position != last && (examined >= most || scanned.places.size() >= limit)) {
      scanned.next = position;
      return false;
    }
    last = position;
    ++examined;
    if (chosen(entry->times)) {
      scanned.places.push_back(entry->place);
      scanned.times.push_back(entry->times);
    }
    return true;
  });
  return scanned;
}

Status FileRows::Read(const std::vector<ColdPlace>& places, const RowFn& fn) const {
  std::vector<Candidate> candidates;
  candidates.reserve(places.size());
  for (size_t i = 0; i < places.size(); ++i) candidates.push_back({i, places[i], {}});
  bool all = true;
  DYNEMB_RETURN_IF_ERROR(ReadCandidates(
      log_.segments(), log_.places(), layout_, candidates,
      [&](const Candidate& candidate, const StoredRow& stored, const char* content) {
        all &= stored.updated != 0;
        fn(candidate.i, {stored.key, candidate.times, candidate.place, stored.updated, content});
      }));
  return all ? Status() : DataLoss(folder_ + ": a row was never updated");
}

void FileRows::ChangeTimes(const ChangeFn& change) {
  index_.ForFrom(0, [&](uint64_t, SlotIndex::Entry* entry) {
    entry->times = change(entry->times);
    return true;
  });
}

void FileRows::ChangeShare(double share, const ChangeFn& change) {
  const uint64_t end =
      share >= 1 ? SlotIndex::kEnd : static_cast<uint64_t>(share * double{SlotIndex::kEnd});
  if (end <= changed_) return;
  index_.ForFrom(changed_, [&](uint64_t position, SlotIndex::Entry* entry) {
    if (position >= end) return false;
    entry->times = change(entry->times);
    return true;
  });
  changed_ = end;
}

Status FileRows::ChangeLayout(const RowLayout& layout, const std::vector<float>& initial_state) {
  if (layout.content_bytes() > RowFormat::kMostContent) {
    return InvalidArgument("rows in files can have at most 2^30 bytes");
  }
  Layout changed{layout, 0, initial_state};
  DYNEMB_RETURN_IF_ERROR(log_.SealTail());
  log_.SetContent(changed.rows.content_bytes());
  changed.epoch = log_.epoch();
  layout_ = std::move(changed);
  return Status();
}

void FileRows::CheckInvariants() const {
  index_.CheckInvariants();
  Require(index_.size() == log_.live(), "the index and the log have different numbers of rows");
  std::vector<uint32_t> live(log_.segments().size());
  std::vector<Candidate> all;
  index_.ForFrom(0, [&](uint64_t, const SlotIndex::Entry* entry) {
    const uint32_t number = log_.NumberOf(entry->place);
    Require(number < live.size() && log_.segments()[number] != nullptr, "a place has no segment");
    Require(log_.RowOf(entry->place) < log_.segments()[number]->rows(), "a place has no row");
    ++live[number];
    all.push_back({0, entry->place, entry->times});
    return true;
  });
  for (size_t s = 0; s < live.size(); ++s) {
    const auto& segment = log_.segments()[s];
    Require(segment == nullptr || segment->live == live[s], "wrong number of live rows");
  }
  size_t read = 0;
  const Status status =
      ReadCandidates(log_.segments(), log_.places(), layout_, all,
                     [&](const Candidate& candidate, const StoredRow& stored, const char*) {
                       bool found = false;
                       index_.ForEach(HashOf(stored.key), [&](const SlotIndex::Entry* entry) {
                         found |= entry->place == candidate.place;
                       });
                       Require(found, "a row is under another key");
                       ++read;
                     });
  Require(!status.ok() || read == all.size(), "a row was not read");
}

}  // namespace dynemb
