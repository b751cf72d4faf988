#include "cc/table/changes.h"

#include <cstring>
#include <utility>

namespace dynemb {

void SavedRows::Push(size_t table, const RowLayout& layout, const char* row, CutTime updated) {
  std::unique_lock<std::mutex> lock(mutex_);
  Wait(&lock, layout.stride);
  Append(table, layout, row, updated);
}

void SavedRows::WaitForRoom(size_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  Wait(&lock, bytes);
}

void SavedRows::PushAtOnce(size_t table, const RowLayout& layout, const char* row,
                           CutTime updated) {
  std::lock_guard<std::mutex> lock(mutex_);
  Append(table, layout, row, updated);
}

void SavedRows::Wait(std::unique_lock<std::mutex>* lock, size_t bytes) {
  popped_.wait(*lock, [&] { return closed_ || bytes_ + bytes <= most_bytes_ || bytes_ == 0; });
}

void SavedRows::Append(size_t table, const RowLayout& layout, const char* row, CutTime updated) {
  if (closed_) return;
  if (chunks_.empty() || chunks_.back().table != table ||
      chunks_.back().rows.size() + layout.stride > kChunkBytes) {
    chunks_.emplace_back();
    chunks_.back().table = table;
    chunks_.back().stride = layout.stride;
    chunks_.back().rows.reserve(std::max(kChunkBytes, layout.stride));
  }
  Chunk& chunk = chunks_.back();
  // Around the last update: others of a batch's threads may be writing it (Upsert).
  chunk.rows.insert(chunk.rows.end(), row, row + layout.key_size);
  const auto* time = reinterpret_cast<const char*>(&updated);
  chunk.rows.insert(chunk.rows.end(), time, time + sizeof(updated));
  chunk.rows.resize(chunk.rows.size() + layout.vector_offset - layout.key_size - sizeof(updated));
  chunk.rows.insert(chunk.rows.end(), row + layout.vector_offset, row + layout.stride);
  ++chunk.n;
  bytes_ += layout.stride;
}

bool SavedRows::Pop(Chunk* chunk) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (chunks_.empty()) return false;
    *chunk = std::move(chunks_.front());
    chunks_.pop_front();
    bytes_ -= chunk->rows.size();
  }
  popped_.notify_all();
  return true;
}

void SavedRows::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    chunks_.clear();
    bytes_ = 0;
  }
  popped_.notify_all();
}

void Changes::Start(Tick tick, Tick known_since, uint64_t rows) {
  tracking_ = true;
  recent_.since = tick;
  recent_.rows.Reset(rows, false);
  before_ = Updated();
  before_.since = tick;
  deletions_.Restart(known_since);
}

void Changes::BeginCut(std::unique_ptr<Cut> cut, uint64_t rows) {
  // The sets may know rows that are gone since (Clear), and their memory too.
  const bool reaches_back = cut->since != 0 && cut->since >= before_.since;
  cut->todo.Reset(rows, !reaches_back);
  if (reaches_back) {
    cut->todo.AddAll(recent_.rows);
    if (cut->since < recent_.since) cut->todo.AddAll(before_.rows);
  }
  std::swap(before_, recent_);
  recent_.since = cut->watermark;
  recent_.rows.Reset(rows, false);
  cut_ = std::move(cut);
}

}  // namespace dynemb
