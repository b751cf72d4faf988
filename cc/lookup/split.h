// Split: a stable counting sort of keys into partitions, by all threads.
//
//   keys        a b a c b d …          n, the caller's
//   keys()      a a c │ b b d │ …      partition by partition
//   positions() 0 2 3 │ 1 4 5 │ …      their original positions; increasing inside a partition
//
// Contract. partition_of(keys[i], i) is below `partitions`, which is at most kMaxPartitions; it is
// called twice per key, from any thread. The result does not depend on the number of threads. A
// Split is reusable scratch: repeating a Run of a size seen before allocates nothing. Only one Run
// at a time. Views are valid until the next Run.
#ifndef DYNEMB_LOOKUP_SPLIT_H_
#define DYNEMB_LOOKUP_SPLIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cc/table/exec.h"
#include "cc/table/scratch.h"

namespace dynemb {

// K is uint64_t or uint32_t.
template <typename K>
class Split {
 public:
  // Bounds the arrays of counters, which are on the stack.
  static constexpr size_t kMaxPartitions = 4096;

  template <class PartitionOf>
  void Run(Exec& exec, const K* keys, size_t n, size_t partitions, const PartitionOf& partition_of);

  size_t num_partitions() const { return num_partitions_; }
  size_t begin(size_t partition) const { return begins_[partition]; }
  size_t end(size_t partition) const { return begins_[partition + 1]; }
  // The thread that works on a partition may overwrite keys of it that it has read.
  K* keys() { return keys_.get(); }
  const K* keys() const { return keys_.get(); }
  const uint32_t* positions() const { return positions_.get(); }

 private:
  // The least number of keys per block of the scatter, unless there is one block.
  static constexpr size_t kBlockKeys = 8192;
  // How far ahead the scatter prefetches: enough keys to cover a cache miss, and the next cache
  // line of a partition. The scatter reads one stream and writes two per partition, which is more
  // than hardware prefetchers follow. Without prefetching, a key costs twice as much.
  static constexpr size_t kPrefetchKeys = 128;
  static constexpr size_t kLine = 64;

  // Prefetches the memory `bytes` beyond p, which may be past the end of the array. The address is
  // computed as an integer, because such a pointer must not be formed.
  template <int kWrite>
  static void PrefetchAhead(const void* p, size_t bytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + bytes),
                       kWrite);
  }

  size_t num_partitions_ = 0;
  // Sized for the largest Run so far.
  Buffer<K> keys_;
  Buffer<uint32_t> positions_;
  Buffer<uint32_t> begins_;   // [partitions + 1]
  Buffer<uint32_t> cursors_;  // [blocks][partitions]
};

// Each block counts its keys per partition, and is then assigned a range of each partition, in the
// order of the blocks. The result therefore does not depend on the number of blocks.
template <typename K>
template <class PartitionOf>
void Split<K>::Run(Exec& exec, const K* keys, size_t n, size_t partitions,
                   const PartitionOf& partition_of) {
  num_partitions_ = partitions;
  keys_.Resize(n);
  positions_.Resize(n);
  begins_.Resize(partitions + 1);
  if (partitions == 1) {
    if (n > 0) std::memcpy(keys_.get(), keys, n * sizeof(K));
    for (size_t i = 0; i < n; ++i) positions_[i] = static_cast<uint32_t>(i);
    begins_[0] = 0;
    begins_[1] = static_cast<uint32_t>(n);
    return;
  }
  const size_t threads = exec.parallelism();
  const size_t blocks =
      threads == 1 ? 1 : std::max<size_t>(1, std::min(n / kBlockKeys, 4 * threads));
  const size_t block_keys = (n + blocks - 1) / blocks;
  cursors_.Resize(blocks * partitions);
  if (n == 0) std::fill_n(cursors_.get(), partitions, 0);  // no block sets them

  exec.ParallelFor(n, block_keys, [&](size_t begin, size_t end) {
    // On the stack, because the counters of neighboring blocks share cache lines in cursors_.
    uint32_t counts[kMaxPartitions];
    std::fill(counts, counts + partitions, 0);
    for (size_t i = begin; i < end; ++i) {
      PrefetchAhead<0>(&keys[i], kPrefetchKeys * sizeof(K));
      ++counts[partition_of(keys[i], i)];
    }
    std::copy(counts, counts + partitions, cursors_.get() + begin / block_keys * partitions);
  });

  uint32_t at = 0;
  for (size_t p = 0; p < partitions; ++p) {
    begins_[p] = at;
    for (size_t i = p; i < blocks * partitions; i += partitions) {
      at += std::exchange(cursors_[i], at);
    }
  }
  begins_[partitions] = at;

  exec.ParallelFor(n, block_keys, [&](size_t begin, size_t end) {
    const uint32_t* const from = cursors_.get() + begin / block_keys * partitions;
    uint32_t cursors[kMaxPartitions];
    std::copy(from, from + partitions, cursors);
    K* to_keys = keys_.get();
    uint32_t* to_positions = positions_.get();
    for (size_t i = begin; i < end; ++i) {
      PrefetchAhead<0>(&keys[i], kPrefetchKeys * sizeof(K));
      const K key = keys[i];
      const uint32_t to = cursors[partition_of(key, i)]++;
      PrefetchAhead<1>(&to_keys[to], kLine);
      PrefetchAhead<1>(&to_positions[to], kLine);
      to_keys[to] = key;
      to_positions[to] = static_cast<uint32_t>(i);
    }
  });
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_SPLIT_H_
