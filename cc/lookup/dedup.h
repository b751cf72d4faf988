// Dedup: the distinct values among n keys, and the one at each position.
//
// Keys are radix-partitioned by the top bits of a hash, so that one partition (1 to 2 thousand
// keys) is deduplicated in L1/L2 by one thread:
//
//   keys        a b a c b d …          n, the caller's
//   positions   0 2 5 │ 1 3 4 │ …      original positions; increasing inside a partition
//   local       0 0 1 │ 0 1 0 │ …      their keys' numbers among the partition's distinct keys
//   unique      a d   │ b c   │ …      distinct keys of a partition, in order of first occurrence
//
// The unique index of an entry is the `unique_begin` of its partition plus its `local`. An entry is
// the first occurrence of its key if and only if its `local` is one more than the largest before
// it. A thread that walks the entries of a partition in order, and sums a value per key, therefore
// writes new sums front to back.
//
// RunByRow makes each partition a range of rows instead: a thread that then works on the rows of a
// partition stays in one part of the table's memory (row_ranges.h).
//
// With `Owners`, keys are partitioned by owner first: the unique keys of rank 0 come first, then
// the unique keys of rank 1, and so on, ready to be sent.
//
// Contract. The result is a function of the keys (and rows) alone: the number of partitions depends
// on n, never on the number of threads. Every key value is legal. The work is linear in n for any
// skew (equal keys, or all keys in one partition) and for any choice of keys (distinct.h). A Dedup
// is reusable scratch: repeating a Run of a size seen before allocates no arrays, except for a
// partition much larger than the average. Only one Run at a time; the const methods may be called
// from several threads. Views are valid until the next Run.
#ifndef DYNEMB_LOOKUP_DEDUP_H_
#define DYNEMB_LOOKUP_DEDUP_H_

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "cc/lookup/owners.h"
#include "cc/lookup/split.h"
#include "cc/table/exec.h"
#include "cc/table/scratch.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

// K is uint64_t or uint32_t; signed keys are passed as their bit patterns. AnyDedup, below, is for
// callers that know the width of their keys at run time.
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
    size_t unique_begin;  // the unique index of unique[0]
  };

  // InvalidArgument if there are more than kMaxKeys keys or Owners::kMaxRanks ranks.
  static Status Check(size_t n, const Owners& owners);
  // Fails only if Check does. Keeps no reference to `keys`.
  Status Run(Exec& exec, const K* keys, size_t n, const Owners& owners = Owners());
  // rows[i] is the row of keys[i], if it has one (IsRow). Equal keys have equal rows; otherwise a
  // key is distinct once for each of its rows. The same as Run if the rows span less than
  // `least_span` row ids, by a sample. Fails only if Check does. Keeps no reference to the arrays.
  Status RunByRow(Exec& exec, const K* keys, const RowId* rows, size_t n, uint64_t least_span);

  size_t num_keys() const { return num_keys_; }
  size_t num_unique() const { return num_partitions_ == 0 ? 0 : unique_begins_[num_partitions_]; }
  size_t num_partitions() const { return num_partitions_; }
  Partition partition(size_t p) const {
    const size_t begin = split_.begin(p);
    return {split_.positions() + begin,
            local_.get() + begin,
            split_.keys() + begin,
            split_.end(p) - begin,
            size_t{unique_begins_[p + 1]} - unique_begins_[p],
            unique_begins_[p]};
  }
  // The unique keys of rank r are [owner_begin(r), owner_begin(r + 1)). `rank` is at most the
  // number of ranks.
  size_t owner_begin(uint32_t rank) const;
  // The owner of the keys in partition p.
  uint32_t owner(size_t p) const {
    return owners_.Spread() ? static_cast<uint32_t>(p >> log_partitions_) : owners_.one;
  }

  // The number of slots of other keys that the probes of the last Run passed: less than one per
  // key, unless the keys were chosen to collide. distinct.h gives the bound.
  uint64_t probe_steps() const { return probe_steps_; }

  // Writes unique[num_unique()]: all distinct keys, partition by partition.
  void WriteUnique(Exec& exec, K* unique) const;
  // Writes inverse[num_keys()]: the unique index of each position.
  void WriteInverse(Exec& exec, uint32_t* inverse) const;

 private:
  // Chooses the number of partitions.
  void Prepare(size_t n, const Owners& owners);
  void DedupPartitions(Exec& exec);
  // The number of keys that the hash set of a partition has room for at first.
  size_t UsualKeys() const;

  size_t num_keys_ = 0;
  size_t num_partitions_ = 0;
  uint64_t probe_steps_ = 0;
  int log_partitions_ = 0;  // log2 of the partitions per owner
  Owners owners_;
  // Holds the keys of each partition. The thread that deduplicates a partition overwrites the front
  // of its keys with the unique ones.
  Split<K> split_;
  // Sized for the largest Run so far.
  Buffer<uint32_t> local_;
  Buffer<uint32_t> unique_begins_;        // [partitions + 1]
  std::vector<Buffer<uint32_t>> tables_;  // one per worker
};

extern template class Dedup<uint64_t>;
extern template class Dedup<uint32_t>;

// A Dedup for keys of either width.
class AnyDedup {
 public:
  template <typename K>
  Status Run(Exec& exec, const K* keys, size_t n, const Owners& owners = Owners()) {
    if (!std::holds_alternative<Dedup<K>>(dedup_)) dedup_.emplace<Dedup<K>>();
    return std::get<Dedup<K>>(dedup_).Run(exec, keys, n, owners);
  }
  template <typename K>
  Status RunByRow(Exec& exec, const K* keys, const RowId* rows, size_t n, uint64_t least_span) {
    if (!std::holds_alternative<Dedup<K>>(dedup_)) dedup_.emplace<Dedup<K>>();
    return std::get<Dedup<K>>(dedup_).RunByRow(exec, keys, rows, n, least_span);
  }
  // fn(dedup), with the Dedup<K> of the last Run.
  template <class Fn>
  decltype(auto) Visit(const Fn& fn) const {
    return std::visit(fn, dedup_);
  }
  size_t num_keys() const {
    return Visit([](const auto& dedup) { return dedup.num_keys(); });
  }
  size_t num_unique() const {
    return Visit([](const auto& dedup) { return dedup.num_unique(); });
  }
  size_t num_partitions() const {
    return Visit([](const auto& dedup) { return dedup.num_partitions(); });
  }
  size_t owner_begin(uint32_t rank) const {
    return Visit([&](const auto& dedup) { return dedup.owner_begin(rank); });
  }
  void WriteInverse(Exec& exec, uint32_t* inverse) const {
    Visit([&](const auto& dedup) { dedup.WriteInverse(exec, inverse); });
  }

 private:
  std::variant<Dedup<uint64_t>, Dedup<uint32_t>> dedup_;
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_DEDUP_H_
