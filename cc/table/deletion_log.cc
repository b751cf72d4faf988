#include "cc/table/deletion_log.h"

#include <algorithm>
#include <new>

namespace dynemb {

void DeletionLog::Restart(Tick known_since) {
  chunks_.clear();
  size_ = 0;
  known_since_ = known_since;
}

void DeletionLog::Add(Tick tick, uint64_t key) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    Append(tick, key);
  } catch (const std::bad_alloc&) {
    // A delta since an earlier tick is then refused; otherwise it would lack a key. Later deletions
    // with this tick are useless, but do no harm.
    Restart(std::max(known_since_, tick));
  }
}

void DeletionLog::Append(Tick tick, uint64_t key) {
  if (chunks_.empty() || chunks_.back().keys.size() == kChunkKeys) {
    chunks_.emplace_back();
    chunks_.back().keys.reserve(kChunkKeys);
  }
  Chunk& chunk = chunks_.back();
  if (chunk.runs.empty() || chunk.runs.back().tick != tick) {
    chunk.runs.push_back({tick, chunk.keys.size()});
  }
  chunk.keys.push_back(key);
  ++size_;
}

void DeletionLog::Trim(size_t most) {
  while (!chunks_.empty() && size_ - chunks_.front().keys.size() >= most) {
    size_ -= chunks_.front().keys.size();
    known_since_ = chunks_.front().runs.back().tick;
    chunks_.pop_front();
  }
}

std::vector<uint64_t> DeletionLog::Since(Tick since) const {
  std::vector<uint64_t> keys;
  for (const Chunk& chunk : chunks_) {
    if (chunk.runs.back().tick <= since) continue;
    const auto run = std::upper_bound(chunk.runs.begin(), chunk.runs.end(), since,
                                      [](Tick t, const Run& r) { return t < r.tick; });
    keys.insert(keys.end(), chunk.keys.begin() + static_cast<std::ptrdiff_t>(run->begin),
                chunk.keys.end());
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

}  // namespace dynemb
