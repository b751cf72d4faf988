#include "cc/lookup/dedup.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "cc/lookup/distinct.h"
#include "cc/lookup/row_ranges.h"

namespace dynemb {
namespace {

// The largest average number of keys in a partition; the smallest is half of it. The keys,
// positions, locals and hash set of a partition then take 64 KiB, which fits L2 easily and L1 for
// the most part. Half or twice this number measured the same within 10%.
constexpr size_t kPartitionKeys = 2048;
// A larger average costs less than scattering to more partitions.
constexpr size_t kMaxPartitions = Split<uint64_t>::kMaxPartitions;
static_assert(Owners::kMaxRanks <= kMaxPartitions, "each rank has a partition");

// The partition of a key: the top bits of a hash, whose low bits select the key's slot in the hash
// set of the partition.
struct PartitionOf {
  size_t operator()(uint64_t key, size_t) const { return DistinctHash()(key) >> shift; }
  int shift;  // < 64: there are at least two partitions
};

// The same, among the partitions of the key's owner.
struct OwnedPartitionOf {
  size_t operator()(uint64_t key, size_t) const {
    // Two shifts, because one shift by 64 is undefined.
    return (size_t{owners.Of(key)} << log) + (DistinctHash()(key) >> 1 >> (63 - log));
  }
  Owners owners;
  int log;  // log2 of the partitions per owner
};

// The range of the key's row. A key without a row has the partition that PartitionOf gives it.
struct RowPartitionOf {
  size_t operator()(uint64_t key, size_t i) const {
    return IsRow(rows[i]) ? ranges.Of(key, rows[i]) : of_key(key, i);
  }
  const RowId* rows;
  const RowRanges& ranges;
  PartitionOf of_key;
};

}  // namespace

template <typename K>
Status Dedup<K>::Check(size_t n, const Owners& owners) {
  if (n > kMaxKeys) {
    return InvalidArgument("at most " + std::to_string(kMaxKeys) + " keys in one call, got " +
                           std::to_string(n));
  }
  if (owners.ranks > Owners::kMaxRanks) {
    return InvalidArgument("at most " + std::to_string(Owners::kMaxRanks) + " ranks, got " +
                           std::to_string(owners.ranks));
  }
  return {};
}

template <typename K>
void Dedup<K>::Prepare(size_t n, const Owners& owners) {
  num_keys_ = n;
  owners_ = owners;
  const size_t ranks = owners.Spread() ? owners.ranks : 1;
  log_partitions_ = 0;
  while ((ranks * kPartitionKeys) << log_partitions_ < n &&
         ranks << (log_partitions_ + 1) <= kMaxPartitions) {
    ++log_partitions_;
  }
  num_partitions_ = ranks << log_partitions_;
  local_.Resize(n);
  unique_begins_.Resize(num_partitions_ + 1);
}

template <typename K>
Status Dedup<K>::Run(Exec& exec, const K* keys, size_t n, const Owners& owners) {
  DYNEMB_RETURN_IF_ERROR(Check(n, owners));
  Prepare(n, owners);
  if (owners.Spread()) {
    split_.Run(exec, keys, n, num_partitions_, OwnedPartitionOf{owners, log_partitions_});
  } else {
    split_.Run(exec, keys, n, num_partitions_, PartitionOf{64 - log_partitions_});
  }
  DedupPartitions(exec);
  return {};
}

template <typename K>
Status Dedup<K>::RunByRow(Exec& exec, const K* keys, const RowId* rows, size_t n,
                          uint64_t least_span) {
  DYNEMB_RETURN_IF_ERROR(Check(n, Owners()));
  Prepare(n, Owners());
  const PartitionOf of_key{64 - log_partitions_};
  bool by_row = false;
  if (num_partitions_ > 1) {
    const RowRanges ranges(rows, n, num_partitions_);
    by_row = ranges.span() >= least_span;
    if (by_row) split_.Run(exec, keys, n, num_partitions_, RowPartitionOf{rows, ranges, of_key});
  }
  if (!by_row) split_.Run(exec, keys, n, num_partitions_, of_key);
  DedupPartitions(exec);
  return {};
}

template <typename K>
size_t Dedup<K>::owner_begin(uint32_t rank) const {
  if (owners_.Spread()) return unique_begins_[size_t{rank} << log_partitions_];
  return rank > owners_.one ? num_unique() : 0;
}

template <typename K>
void Dedup<K>::DedupPartitions(Exec& exec) {
  const size_t partitions = num_partitions_;
  const size_t workers = std::min(exec.parallelism(), partitions);
  if (tables_.size() < workers) tables_.resize(workers);
  // Grows the hash sets of all workers, even of those that will get no partition this time: another
  // Run of this size may need them, and must not allocate.
  for (size_t w = 0; w < workers; ++w) tables_[w].Resize(Distinct<K>::TableSize(UsualKeys()));
  // One range per worker, so that each worker has its own hash set. Partitions may differ a lot in
  // size, so workers take them one by one. Relaxed: the partitions of two workers share nothing.
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> steps{0};
  exec.ParallelFor(workers, 1, [&](size_t begin, size_t end) {
    for (size_t worker = begin; worker < end; ++worker) {
      uint64_t steps_here = 0;
      size_t p;
      while ((p = next.fetch_add(1, std::memory_order_relaxed)) < partitions) {
        const size_t at = split_.begin(p);
        const Distinct<K> distinct(split_.keys() + at, split_.end(p) - at, UsualKeys(),
                                   local_.get() + at, &tables_[worker]);
        unique_begins_[p + 1] = distinct.num_unique();
        steps_here += distinct.probe_steps();
      }
      steps.fetch_add(steps_here, std::memory_order_relaxed);
    }
  });
  probe_steps_ = steps;
  unique_begins_[0] = 0;
  for (size_t p = 0; p < partitions; ++p) unique_begins_[p + 1] += unique_begins_[p];
}

template <typename K>
size_t Dedup<K>::UsualKeys() const {
  return std::max(kPartitionKeys, num_keys_ / num_partitions_);
}

template <typename K>
void Dedup<K>::WriteUnique(Exec& exec, K* unique) const {
  const size_t grain = std::max<size_t>(1, num_partitions_ / (4 * exec.parallelism()));
  exec.ParallelFor(num_partitions_, grain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Partition p = partition(i);
      std::copy(p.unique, p.unique + p.num_unique, unique + p.unique_begin);
    }
  });
}

template <typename K>
void Dedup<K>::WriteInverse(Exec& exec, uint32_t* inverse) const {
  const size_t grain = std::max<size_t>(1, num_partitions_ / (4 * exec.parallelism()));
  exec.ParallelFor(num_partitions_, grain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Partition p = partition(i);
      const uint32_t base = static_cast<uint32_t>(p.unique_begin);
      for (size_t e = 0; e < p.num_entries; ++e) inverse[p.positions[e]] = base + p.local[e];
    }
  });
}

template class Dedup<uint64_t>;
template class Dedup<uint32_t>;

}  // namespace dynemb
