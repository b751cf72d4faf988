// MinimalTable: the least that a hash table does, as a measure for the library's.
//
//   bucket b        8 keys: one cache line, compared at once
//   vectors         slot s of bucket b: dim floats at (8 b + s) * dim
//
// A key is in the first bucket with an empty slot, from its home bucket on. There are no row ids,
// times, growth or removals. A lookup of dim 16 therefore touches two cache lines.
//
// Contract. The table has room for `rows` keys, at a load of at most 0.6. No key is kEmpty. Lookup
// and Upsert may be called by one thread at a time; each runs in parallel on `exec`. A batch for
// Upsert has distinct keys.
#ifndef DYNEMB_BENCHMARKS_CC_MINIMAL_TABLE_H_
#define DYNEMB_BENCHMARKS_CC_MINIMAL_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/exec.h"

namespace dynemb {

// Memory in huge pages, which is used when it is first touched. The caller frees it.
void* AllocateHugePages(size_t bytes);

class MinimalTable {
 public:
  static constexpr uint64_t kEmpty = ~uint64_t{0};

  MinimalTable(size_t rows, size_t dim);
  ~MinimalTable();
  MinimalTable(const MinimalTable&) = delete;
  MinimalTable& operator=(const MinimalTable&) = delete;

  // vectors [n, dim]: zeros for keys that the table does not have.
  void Lookup(Exec& exec, const uint64_t* keys, size_t n, float* vectors) const;
  void Upsert(Exec& exec, const uint64_t* keys, size_t n, const float* vectors);

 private:
  size_t Home(uint64_t key) const;
  void LookupRange(const uint64_t* keys, size_t begin, size_t end, float* vectors) const;
  void UpsertRange(const uint64_t* keys, size_t begin, size_t end, const float* vectors);

  size_t dim_, buckets_;
  uint64_t* keys_;  // [buckets, 8]
  float* vectors_;  // [buckets, 8, dim]
};

}  // namespace dynemb

#endif  // DYNEMB_BENCHMARKS_CC_MINIMAL_TABLE_H_
