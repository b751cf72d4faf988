#include "cc/lookup/dedup.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace dynemb {
namespace {

// The largest average; the smallest is half of it. Keys, positions, locals and table of a partition
// are then 64 KiB, well inside L2 and for the most part in L1. Half or twice as many measured the
// same within 10 %.
constexpr size_t kPartitionKeys = 2048;
// A larger average costs less than more ways to scatter to would.
constexpr size_t kMaxPartitions = Split<uint64_t>::kMaxPartitions;
static_assert(Owners::kMaxRanks <= kMaxPartitions, "each rank has a partition");
// Slots per key of a table to begin with: at 2, probes go wrong often enough that the mispredicted
// branches cost 2 ns a key.
constexpr size_t kSlotsPerKey = 4;
constexpr size_t kMinTable = 64;

// The 64-bit finalizer of MurmurHash3 (public domain). Not the table's hash: if it were, the keys
// of one part of the table would meet in one partition. Partitions use its top bits, tables its low
// bits.
inline uint64_t MixHash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

size_t PowerOfTwoAtLeast(size_t x) {
  size_t power = 1;
  while (power < x) power *= 2;
  return power;
}

template <typename T>
void GrowTo(std::vector<T>* v, size_t n) {
  if (v->size() < n) v->resize(n);
}

// Slots of a table for n keys.
size_t TableSize(size_t n) { return std::max(PowerOfTwoAtLeast(kSlotsPerKey * n), kMinTable); }

// The partition of a key: by the top bits of a hash.
struct PartitionOf {
  size_t operator()(uint64_t key) const { return MixHash(key) >> shift; }
  int shift;  // < 64, as there are at least two
};

// The same, inside the partitions of its owner.
struct OwnedPartitionOf {
  size_t operator()(uint64_t key) const {
    // Two shifts, as one by 64 is undefined.
    return (size_t{owners.Of(key)} << log) + (MixHash(key) >> 1 >> (63 - log));
  }
  Owners owners;
  int log;  // of the partitions of one owner
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
Status Dedup<K>::Run(Exec& exec, const K* keys, size_t n, const Owners& owners) {
  DYNEMB_RETURN_IF_ERROR(Check(n, owners));
  num_keys_ = n;
  owners_ = owners;
  const size_t ranks = owners.Spread() ? owners.ranks : 1;
  log_partitions_ = 0;
  while ((ranks * kPartitionKeys) << log_partitions_ < n &&
         ranks << (log_partitions_ + 1) <= kMaxPartitions) {
    ++log_partitions_;
  }
  num_partitions_ = ranks << log_partitions_;
  GrowTo(&local_, n);
  GrowTo(&unique_begins_, num_partitions_ + 1);
  if (owners.Spread()) {
    split_.Run(exec, keys, n, num_partitions_, OwnedPartitionOf{owners, log_partitions_});
  } else {
    split_.Run(exec, keys, n, num_partitions_, PartitionOf{64 - log_partitions_});
  }
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
  GrowTo(&tables_, workers);
  // Also of a worker that other workers leave no partition this time.
  for (size_t w = 0; w < workers; ++w) GrowTo(&tables_[w], TableSize(UsualKeys()));
  // One range per worker, so that each has its own table; partitions, whose sizes may differ a lot,
  // are then handed out one by one. Relaxed: a worker's partitions share nothing with another's.
  std::atomic<size_t> next{0};
  exec.ParallelFor(workers, 1, [&](size_t begin, size_t end) {
    for (size_t worker = begin; worker < end; ++worker) {
      size_t p;
      while ((p = next.fetch_add(1, std::memory_order_relaxed)) < partitions) {
        unique_begins_[p + 1] = DedupPartition(p, &tables_[worker]);
      }
    }
  });
  unique_begins_[0] = 0;
  for (size_t p = 0; p < partitions; ++p) unique_begins_[p + 1] += unique_begins_[p];
}

template <typename K>
size_t Dedup<K>::UsualKeys() const {
  return std::max(kPartitionKeys, num_keys_ / num_partitions_);
}

// Returns the number of distinct keys. `table` is open addressing with linear probing, of local
// indices plus one; 0 is an empty slot, so that no key is reserved.
template <typename K>
uint32_t Dedup<K>::DedupPartition(size_t p, std::vector<uint32_t>* table) {
  const size_t n = split_.end(p) - split_.begin(p);
  K* const keys = split_.keys() + split_.begin(p);
  uint32_t* const local = local_.data() + split_.begin(p);

  // A larger partition may be one key many times, so the table starts at the size for the usual,
  // and grows when it gets half full.
  size_t size = TableSize(std::min(n, UsualKeys()));
  GrowTo(table, size);
  uint32_t* slots = table->data();
  std::memset(slots, 0, size * sizeof(*slots));
  size_t mask = size - 1;

  uint32_t num_unique = 0;
  for (size_t i = 0; i < n; ++i) {
    if (num_unique >= size / 2) {
      size *= kSlotsPerKey;
      GrowTo(table, size);
      slots = table->data();
      std::memset(slots, 0, size * sizeof(*slots));
      mask = size - 1;
      for (uint32_t u = 0; u < num_unique; ++u) {
        size_t at = MixHash(keys[u]) & mask;
        while (slots[at] != 0) at = (at + 1) & mask;
        slots[at] = u + 1;
      }
    }
    const K key = keys[i];
    // Written before it is known to be new (num_unique <= i, so nothing unread is lost): an empty
    // slot then stands for it, and "found" and "new" are one path without a branch that repeats
    // make unpredictable.
    keys[num_unique] = key;
    size_t at = MixHash(key) & mask;
    uint32_t u;
    for (;; at = (at + 1) & mask) {
      const uint32_t slot = slots[at];
      u = slot == 0 ? num_unique : slot - 1;
      if (keys[u] == key) break;
    }
    slots[at] = u + 1;
    local[i] = u;
    num_unique += u == num_unique;
  }
  return num_unique;
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
