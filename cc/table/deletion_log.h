// DeletionLog: which keys a table has lost, erased or evicted, since some tick.
//
// Keys stand in the order of their ticks. The log is bounded: Trim forgets the oldest, and Since
// then refuses to answer for the time that was forgotten. Without memory for a key all are
// forgotten.
#ifndef DYNEMB_TABLE_DELETION_LOG_H_
#define DYNEMB_TABLE_DELETION_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "cc/table/types.h"

namespace dynemb {

// What a log remembers however small its table is.
constexpr size_t kDeletionsAtLeast = size_t{1} << 20;

class DeletionLog {
 public:
  // Empty; deletions up to `known_since` are unknown.
  void Restart(Tick known_since);
  // `key` is a bit pattern, zero-extended. Ticks must not decrease. Threads may add at once.
  void Add(Tick tick, uint64_t key) noexcept;
  // Forgets the oldest keys until hardly more than `most` are left.
  void Trim(size_t most);

  // The tick after which every deletion is known.
  Tick known_since() const { return known_since_; }
  // The keys deleted after `since`, ascending, each once; needs since >= known_since().
  std::vector<uint64_t> Since(Tick since) const;
  size_t size() const { return size_; }

 private:
  static constexpr size_t kChunkKeys = 8192;
  struct Run {
    Tick tick;
    size_t begin;  // of its keys in the chunk
  };
  struct Chunk {
    std::vector<uint64_t> keys;
    std::vector<Run> runs;
  };

  void Append(Tick tick, uint64_t key);

  std::mutex mutex_;  // of Add
  Tick known_since_ = 0;
  size_t size_ = 0;
  std::deque<Chunk> chunks_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_DELETION_LOG_H_
