#include "cc/table/deletion_log.h"

#include <algorithm>
#include <new>
#include <unordered_map>

namespace dynemb {

void DeletionLog::Restart(Tick known_since) {
  chunks_.clear();
  size_ = 0;
  known_since_ = known_since;
}

void DeletionLog::Add(Tick tick, uint64_t key, Removal how) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    Append(tick, key, how);
  } catch (const std::bad_alloc&) {
    // A delta since an earlier tick is then refused; otherwise it would lack a key. Later deletions
    // with this tick are useless, but do no harm.
    Restart(std::max(known_since_, tick));
  }
}

void DeletionLog::Append(Tick tick, uint64_t key, Removal how) {
  if (chunks_.empty() || chunks_.back().keys.size() == kChunkKeys) {
    chunks_.emplace_back();
    chunks_.back().keys.reserve(kChunkKeys);
  }
  Chunk& chunk = chunks_.back();
  if (chunk.runs.empty() || chunk.runs.back().tick != tick || chunk.runs.back().how != how) {
    chunk.runs.push_back({tick, how, chunk.keys.size()});
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

void DeletionLog::FindLast(const std::vector<uint64_t>& keys, Deletion* last) const {
  std::unordered_map<uint64_t, Deletion> found;
  for (const uint64_t key : keys) found[key];
  for (const Chunk& chunk : chunks_) {
    for (size_t r = 0; r < chunk.runs.size(); ++r) {
      const Run& run = chunk.runs[r];
      const size_t end = r + 1 < chunk.runs.size() ? chunk.runs[r + 1].begin : chunk.keys.size();
      for (size_t k = run.begin; k < end; ++k) {
        const auto at = found.find(chunk.keys[k]);
        if (at != found.end()) at->second = {run.tick, run.how};
      }
    }
  }
  for (size_t i = 0; i < keys.size(); ++i) last[i] = found[keys[i]];
}

}  // namespace dynemb
