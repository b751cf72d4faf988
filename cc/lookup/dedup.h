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
// With `Owners`, keys are partitioned by owner first: the unique keys of rank 0 come first, then
// those of rank 1, and so on, ready to be sent.
//
// Contract. The result is a function of the keys alone: the number of partitions depends on n,
// never on the number of threads. Every key value is legal. The work is linear in n for any skew
// (equal keys, or all keys in one partition) and for any choice of keys (distinct.h). A Dedup is
// reusable scratch: repeating a Run of a size seen before allocates no arrays, but for a partition
// much larger than the average. One Run at a time; the const methods may be called from several
// threads. Views stay valid until the next Run.
#ifndef DYNEMB_LOOKUP_DEDUP_H_
#define DYNEMB_LOOKUP_DEDUP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/lookup/owners.h"
#include "cc/lookup/split.h"
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

  // InvalidArgument: n > kMaxKeys, or more than Owners::kMaxRanks.
  static Status Check(size_t n, const Owners& owners);
  // Fails as Check does, and else not. Keeps no reference to `keys`.
  Status Run(Exec& exec, const K* keys, size_t n, const Owners& owners = Owners());

  size_t num_keys() const { return num_keys_; }
  size_t num_unique() const { return unique_begins_.empty() ? 0 : unique_begins_[num_partitions_]; }
  size_t num_partitions() const { return num_partitions_; }
  Partition partition(size_t p) const {
    const size_t begin = split_.begin(p);
    return {split_.positions() + begin,
            local_.data() + begin,
            split_.keys() + begin,
            split_.end(p) - begin,
            size_t{unique_begins_[p + 1]} - unique_begins_[p],
            unique_begins_[p]};
  }
  // Unique keys [owner_begin(r), owner_begin(r + 1)) are rank r's; r is at most the number of
  // ranks.
  size_t owner_begin(uint32_t rank) const;
  // The rank whose keys partition p holds.
  uint32_t owner(size_t p) const {
    return owners_.Spread() ? static_cast<uint32_t>(p >> log_partitions_) : owners_.one;
  }

  // Slots of other keys that the last Run has looked at: less than one a key, unless the keys were
  // chosen to meet; distinct.h has the bound.
  uint64_t passed() const { return passed_; }

  // unique[num_unique()]: all distinct keys, partition by partition.
  void WriteUnique(Exec& exec, K* unique) const;
  // inverse[num_keys()]: the unique index of each position.
  void WriteInverse(Exec& exec, uint32_t* inverse) const;

 private:
  void DedupPartitions(Exec& exec);
  // Keys of a partition, unless it is much larger than the average.
  size_t UsualKeys() const;

  size_t num_keys_ = 0;
  size_t num_partitions_ = 0;
  uint64_t passed_ = 0;
  int log_partitions_ = 0;  // of an owner
  Owners owners_;
  // Holds the keys of each partition; its owner among the threads then overwrites the front of them
  // with the unique keys.
  Split<K> split_;
  // Sized by the largest Run so far.
  std::vector<uint32_t> local_;
  std::vector<uint32_t> unique_begins_;        // [partitions + 1]
  std::vector<std::vector<uint32_t>> tables_;  // one per worker
};

extern template class Dedup<uint64_t>;
extern template class Dedup<uint32_t>;

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_DEDUP_H_
