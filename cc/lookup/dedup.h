// Dedup: the distinct values among n keys, and which of them each position holds.
//
// Keys are radix-partitioned by the top bits of a hash, so that one partition (1 to 2 thousand
// keys) is deduplicated in L1/L2 by one owner:
//
//   keys        a b a c b d …          n, the caller's
//   positions   0 2 5 │ 1 3 4 │ …      original positions; increasing inside a partition
//   local       0 0 1 │ 0 1 0 │ …      which of its partition's distinct keys each of them holds
//   unique      a d   │ b c   │ …      distinct keys of a partition, in order of first occurrence
//
// The unique index of an entry is its partition's `unique_begin` + `local`. So an entry is the
// first occurrence of its key exactly if its `local` is one more than the largest before it: who
// walks a partition's entries in order, and sums something per key, writes new sums front to back.
//
// Contract. The result is a function of the keys alone: the number of partitions depends on n,
// never on the number of threads. Every key value is legal. The work is linear in n for any skew
// (equal keys, or all keys in one partition). A Dedup is reusable scratch: repeating a Run of a
// size seen before allocates no arrays, but for a partition much larger than the average. One Run
// at a time; the const methods may be called from several threads. Views stay valid until the next
// Run.
#ifndef DYNEMB_LOOKUP_DEDUP_H_
#define DYNEMB_LOOKUP_DEDUP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/exec.h"
#include "cc/table/status.h"

namespace dynemb {

// K is uint64_t or uint32_t; signed keys are passed as their bit patterns.
template <typename K>
class Dedup {
 public:
  // Positions and unique indices are 32 bits wide.
  static constexpr size_t kMaxKeys = 0xFFFFFFFEu;

  struct Partition {
    const uint32_t* positions;  // [num_entries]
    const uint32_t* local;      // [num_entries], each < num_unique
    const K* unique;            // [num_unique]
    size_t num_entries;
    size_t num_unique;
    size_t unique_begin;  // of unique[0], among all unique keys
  };

  // Fails only for n > kMaxKeys. Keeps no reference to `keys`.
  Status Run(Exec& exec, const K* keys, size_t n);

  size_t num_keys() const { return num_keys_; }
  size_t num_unique() const { return unique_begins_.empty() ? 0 : unique_begins_[num_partitions_]; }
  size_t num_partitions() const { return num_partitions_; }
  Partition partition(size_t p) const {
    const size_t begin = entry_begins_[p];
    return {positions_.data() + begin,
            local_.data() + begin,
            keys_.data() + begin,
            entry_begins_[p + 1] - begin,
            size_t{unique_begins_[p + 1]} - unique_begins_[p],
            unique_begins_[p]};
  }

  // unique[num_unique()]: all distinct keys, partition by partition.
  void WriteUnique(Exec& exec, K* unique) const;
  // inverse[num_keys()]: the unique index of each position.
  void WriteInverse(Exec& exec, uint32_t* inverse) const;

 private:
  void Split(Exec& exec, const K* keys);
  void DedupPartitions(Exec& exec);
  uint32_t DedupPartition(size_t p, std::vector<uint32_t>* table);
  // Keys of a partition, unless it is much larger than the average.
  size_t UsualKeys() const;

  size_t num_keys_ = 0;
  size_t num_partitions_ = 0;
  // Sized by the largest Run so far. keys_ first holds the keys in partition order; the owner of a
  // partition then overwrites the front of its part with the unique keys.
  std::vector<K> keys_;
  std::vector<uint32_t> positions_;
  std::vector<uint32_t> local_;
  std::vector<uint32_t> entry_begins_;         // [partitions + 1]
  std::vector<uint32_t> unique_begins_;        // [partitions + 1]
  std::vector<uint32_t> cursors_;              // [blocks][partitions]
  std::vector<std::vector<uint32_t>> tables_;  // one per worker
};

extern template class Dedup<uint64_t>;
extern template class Dedup<uint32_t>;

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_DEDUP_H_
