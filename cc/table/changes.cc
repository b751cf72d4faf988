#include "cc/table/changes.h"

#include <cstring>
#include <utility>

namespace dynemb {
namespace {

// Numbers the threads that save rows, so that each of the first kSlots threads has its own slot.
size_t ThisThread() {
  static std::atomic<size_t> threads{0};
  thread_local const size_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace

size_t SavedRows::ChunkBytes(size_t stride) const {
  const size_t bytes = std::min(kChunkBytes, most_bytes_ / (4 * kSlots));
  return std::max<size_t>(1, bytes / stride) * stride;
}

bool SavedRows::Reserve(size_t bytes) {
  size_t have = bytes_.load();
  do {
    if (have != 0 && have + bytes > most_bytes_) return false;
  } while (!bytes_.compare_exchange_weak(have, have + bytes));
  return true;
}

void SavedRows::Save(size_t table, const RowLayout& layout, const char* row, CutTime updated,
                     CutTime score, bool wait) noexcept {
  const size_t stride = Stride(layout);
  Slot& slot = slots_[ThisThread() % kSlots];
  std::unique_lock<std::mutex> lock(slot.mutex);
  if (stopped_) return;
  const auto fits = [&] {
    return slot.open != nullptr && slot.open->chunk.table == table &&
           slot.open->chunk.rows.size() + stride <= slot.open->reserved;
  };
  if (!fits()) {
    // There may be no room for another chunk until the reader has taken this one.
    if (slot.open != nullptr) Finish(std::move(slot.open));
    lock.unlock();
    const size_t bytes = ChunkBytes(stride);
    if (!wait) {
      bytes_ += bytes;
    } else if (!Reserve(bytes)) {
      std::unique_lock<std::mutex> waiting(mutex_);
      popped_.wait(waiting, [&] { return stopped_ || Reserve(bytes); });
    }
    std::unique_ptr<Node> node;
    try {
      node = std::make_unique<Node>();
      node->chunk.rows.reserve(bytes);
    } catch (const std::bad_alloc&) {
      Fail();
      return;
    }
    node->chunk.table = table;
    node->chunk.stride = stride;
    node->reserved = bytes;
    lock.lock();
    if (stopped_) return;
    if (slot.open != nullptr) Finish(std::move(slot.open));  // from a thread that shares the slot
    slot.open = std::move(node);
  }
  Chunk& chunk = slot.open->chunk;
  // These fit in the reserved room. The last update is not read from the row: other threads of the
  // batch may be writing it (Upsert).
  chunk.rows.insert(chunk.rows.end(), row, row + layout.key_size);
  const auto append = [&chunk](CutTime value) {
    const auto* bytes = reinterpret_cast<const char*>(&value);
    chunk.rows.insert(chunk.rows.end(), bytes, bytes + sizeof(value));
  };
  append(updated);
  chunk.rows.resize(chunk.rows.size() + layout.vector_offset - layout.key_size - sizeof(updated));
  chunk.rows.insert(chunk.rows.end(), row + layout.vector_offset, row + layout.stride);
  append(score);
  ++chunk.n;
}

void SavedRows::WaitForRoom(size_t bytes) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  popped_.wait(lock, [&] {
    const size_t have = bytes_;
    return stopped_ || have + bytes <= most_bytes_ || have == 0;
  });
}

void SavedRows::Finish(std::unique_ptr<Node> node) noexcept {
  Node* const added = node.get();
  std::vector<char>& rows = node->chunk.rows;
  const size_t unused = node->reserved - rows.size();
  if (unused > rows.size()) rows.shrink_to_fit();  // may fail, which does no harm
  {
    std::lock_guard<std::mutex> lock(mutex_);
    node->reserved -= unused;
    bytes_ -= unused;
    (last_ == nullptr ? full_ : last_->next) = std::move(node);
    last_ = added;
  }
  if (unused != 0) popped_.notify_all();
}

void SavedRows::Give(std::unique_ptr<Node> node, Chunk* chunk) noexcept {
  *chunk = std::move(node->chunk);
  {
    // Under the lock; otherwise a thread that is about to wait would miss the notification.
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_ -= node->reserved;
  }
  popped_.notify_all();
}

bool SavedRows::Pop(Chunk* chunk) noexcept {
  std::unique_ptr<Node> node;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (full_ != nullptr) {
      node = std::move(full_);
      full_ = std::move(node->next);
      if (full_ == nullptr) last_ = nullptr;
    }
  }
  for (size_t s = 0; s < kSlots && node == nullptr; ++s) {
    std::lock_guard<std::mutex> lock(slots_[s].mutex);
    node = std::move(slots_[s].open);
  }
  if (node == nullptr) return false;
  Give(std::move(node), chunk);
  return true;
}

void SavedRows::DropAll() noexcept {
  stopped_ = true;
  for (Slot& slot : slots_) {
    std::lock_guard<std::mutex> lock(slot.mutex);
    slot.open.reset();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // One by one: destroying a node together with the rest of a long list would recurse deeply.
    while (full_ != nullptr) full_ = std::move(full_->next);
    last_ = nullptr;
  }
  popped_.notify_all();
}

void SavedRows::Close() noexcept { DropAll(); }

void SavedRows::Fail() noexcept {
  failed_ = true;
  DropAll();
}

Status SavedRows::Error() const {
  if (!failed_) return Status();
  return ResourceExhausted(
      "the snapshot is incomplete: there was no memory to save rows that were overwritten while it "
      "was read");
}

void Changes::Start(Tick tick, Tick known_since, uint64_t rows) noexcept {
  tracking_ = true;
  recent_ = Updated();
  recent_.since = tick;
  recent_.OrGiveUp([&](RowBits* set) { set->Reset(rows, false); });
  before_ = Updated();
  before_.since = tick;
  deletions_.Restart(known_since);
}

void Changes::BeginCut(std::unique_ptr<Cut> cut, uint64_t rows) {
  // The sets may contain rows that no longer exist (Clear). AddAll drops them.
  const bool reaches_back =
      cut->since != 0 && !cut->used && recent_.known &&
      (cut->since >= recent_.since || (before_.known && cut->since >= before_.since));
  RowBits updated;
  updated.Reset(rows, false);
  cut->todo.Reset(rows, !reaches_back);
  // Nothing throws from here on.
  if (reaches_back) {
    cut->todo.AddAll(recent_.rows);
    if (cut->since < recent_.since) cut->todo.AddAll(before_.rows);
  }
  before_ = std::move(recent_);
  recent_ = Updated();
  recent_.since = cut->watermark;
  recent_.rows = std::move(updated);
  cut_ = std::move(cut);
}

}  // namespace dynemb
