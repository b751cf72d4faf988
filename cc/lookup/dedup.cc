#include "cc/lookup/dedup.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

namespace dynemb {
namespace {

// The largest average; the smallest is half of it. Keys, positions, locals and table of a partition
// are then 64 KiB, well inside L2 and for the most part in L1. Half or twice as many measured the
// same within 10 %.
constexpr size_t kPartitionKeys = 2048;
// Bounds the arrays of counters. A larger average than the above costs less than more ways to
// scatter to would.
constexpr size_t kMaxPartitions = 4096;
// Keys per block of the scatter, at least.
constexpr size_t kBlockKeys = 8192;
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

// How far ahead the scatter asks for memory: keys enough to cover a miss, and the next cache line
// of a partition. It reads one stream and writes two per partition, more than hardware prefetchers
// follow; without, a key cost twice as much.
constexpr size_t kPrefetchKeys = 128;
constexpr size_t kLine = 64;

// `bytes` beyond p, which may be past the end of its array; as an integer, since such a pointer
// must not be formed.
template <int kWrite>
inline void PrefetchAhead(const void* p, size_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + bytes), kWrite);
}

struct PartitionOf {
  explicit PartitionOf(size_t partitions) : shift(64) {
    for (size_t p = partitions; p > 1; p /= 2) --shift;
  }
  size_t operator()(uint64_t key) const { return MixHash(key) >> shift; }
  int shift;  // < 64, as there are at least two
};

}  // namespace

template <typename K>
Status Dedup<K>::Run(Exec& exec, const K* keys, size_t n) {
  if (n > kMaxKeys) {
    return InvalidArgument("at most " + std::to_string(kMaxKeys) + " keys in one call, got " +
                           std::to_string(n));
  }
  num_keys_ = n;
  num_partitions_ =
      std::min(PowerOfTwoAtLeast((n + kPartitionKeys - 1) / kPartitionKeys), kMaxPartitions);
  GrowTo(&keys_, n);
  GrowTo(&positions_, n);
  GrowTo(&local_, n);
  GrowTo(&entry_begins_, num_partitions_ + 1);
  GrowTo(&unique_begins_, num_partitions_ + 1);
  if (num_partitions_ > 1) {
    Split(exec, keys);
    DedupPartitions(exec);
    return {};
  }
  if (n > 0) std::memcpy(keys_.data(), keys, n * sizeof(K));
  for (size_t i = 0; i < n; ++i) positions_[i] = static_cast<uint32_t>(i);
  entry_begins_[0] = 0;
  entry_begins_[1] = static_cast<uint32_t>(n);
  unique_begins_[0] = 0;
  if (tables_.empty()) tables_.resize(1);
  unique_begins_[1] = DedupPartition(0, &tables_[0]);
  return {};
}

// A stable counting sort: each block of keys counts its keys per partition, and is then dealt its
// own part of each partition, in the order of the blocks. So the result does not depend on the
// number of blocks.
template <typename K>
void Dedup<K>::Split(Exec& exec, const K* keys) {
  const size_t n = num_keys_, partitions = num_partitions_;
  const PartitionOf partition_of(partitions);
  const size_t threads = exec.parallelism();
  const size_t blocks =
      threads == 1 ? 1 : std::max<size_t>(1, std::min(n / kBlockKeys, 4 * threads));
  const size_t block_keys = (n + blocks - 1) / blocks;
  GrowTo(&cursors_, blocks * partitions);

  exec.ParallelFor(n, block_keys, [&](size_t begin, size_t end) {
    // On the stack, since neighbours in cursors_ share cache lines.
    uint32_t counts[kMaxPartitions];
    std::fill(counts, counts + partitions, 0);
    for (size_t i = begin; i < end; ++i) {
      PrefetchAhead<0>(&keys[i], kPrefetchKeys * sizeof(K));
      ++counts[partition_of(keys[i])];
    }
    std::copy(counts, counts + partitions, cursors_.data() + begin / block_keys * partitions);
  });

  uint32_t at = 0;
  for (size_t p = 0; p < partitions; ++p) {
    entry_begins_[p] = at;
    for (size_t i = p; i < blocks * partitions; i += partitions) {
      at += std::exchange(cursors_[i], at);
    }
  }
  entry_begins_[partitions] = at;

  exec.ParallelFor(n, block_keys, [&](size_t begin, size_t end) {
    const uint32_t* const from = cursors_.data() + begin / block_keys * partitions;
    uint32_t cursors[kMaxPartitions];
    std::copy(from, from + partitions, cursors);
    K* to_keys = keys_.data();
    uint32_t* to_positions = positions_.data();
    for (size_t i = begin; i < end; ++i) {
      PrefetchAhead<0>(&keys[i], kPrefetchKeys * sizeof(K));
      const K key = keys[i];
      const uint32_t to = cursors[partition_of(key)]++;
      PrefetchAhead<1>(&to_keys[to], kLine);
      PrefetchAhead<1>(&to_positions[to], kLine);
      to_keys[to] = key;
      to_positions[to] = static_cast<uint32_t>(i);
    }
  });
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
  const size_t n = entry_begins_[p + 1] - entry_begins_[p];
  K* const keys = keys_.data() + entry_begins_[p];
  uint32_t* const local = local_.data() + entry_begins_[p];

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
