// DeletionLog: the keys that a table has lost since some tick, and how.
//
// Keys are in the order of their ticks. The log is bounded: Trim forgets the oldest keys, and Since
// must then not be called for the forgotten time (known_since). If memory for a key runs out, all
// keys are forgotten.
#ifndef DYNEMB_TABLE_DELETION_LOG_H_
#define DYNEMB_TABLE_DELETION_LOG_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "cc/table/types.h"

namespace dynemb {

// The number of deletions that the log of any table keeps, however small the table is.
constexpr size_t kDeletionsAtLeast = size_t{1} << 20;

class DeletionLog {
 public:
  // Empties the log. Deletions up to `known_since` are unknown.
  void Restart(Tick known_since);
  // `key` is a bit pattern, zero-extended. Ticks must not decrease. Several threads may add
  // concurrently.
  void Add(Tick tick, uint64_t key, Removal how) noexcept;
  // Forgets the oldest keys, in whole chunks, as long as at least `most` keys are left.
  void Trim(size_t most);

  // The tick after which every deletion is known.
  Tick known_since() const { return known_since_; }
  // The keys deleted after `since`, ascending, each once. Requires since >= known_since().
  std::vector<uint64_t> Since(Tick since) const;
  struct Deletion {
    Tick tick = 0;  // 0: none is known
    Removal how = Removal::kErase;
  };
  // last[i] = the last deletion of keys[i] that is known. Examines the whole log.
  void FindLast(const std::vector<uint64_t>& keys, Deletion* last) const;
  size_t size() const { return size_; }

 private:
  static constexpr size_t kChunkKeys = 8192;
  struct Run {
    Tick tick;
    Removal how;
    size_t begin;  // of its keys in the chunk
  };
  struct Chunk {
    std::vector<uint64_t> keys;
    std::vector<Run> runs;
  };

  void Append(Tick tick, uint64_t key, Removal how);

  std::mutex mutex_;  // for Add
  Tick known_since_ = 0;
  size_t size_ = 0;
  std::deque<Chunk> chunks_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_DELETION_LOG_H_
