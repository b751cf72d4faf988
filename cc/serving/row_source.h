// RowSource: rows by key in arrays that do not change: a shard of a base (mapped files), or the
// changes of deltas (memory).
//
//   slots   [2^log_slots] u32: 0, or 1 + the position of a key (docs/file_format.md, index)
//   keys    [n]: the keys of rows, then deleted keys
//   vectors [live, dim]
//
// FindIn looks up a block of keys in stages. Each stage prefetches what the next reads, so that the
// misses of the block overlap:
//
// 1. Hash the keys, and prefetch the slots.
// 2. Read the slots, and prefetch the keys that they name.
// 3. Compare the keys, and prefetch the vectors.
#ifndef DYNEMB_SERVING_ROW_SOURCE_H_
#define DYNEMB_SERVING_ROW_SOURCE_H_

#include <cstddef>
#include <cstdint>

#include "cc/serving/verified_file.h"
#include "cc/table/find_pass.h"
#include "cc/table/hash.h"
#include "cc/table/unaligned.h"

namespace dynemb {

// The most keys of a block: few enough that what is prefetched stays in the cache.
constexpr size_t kFindBlock = 64;

// Where a key was found: the address of its vector, or kDeleted, or kUnknown.
using Place = const char*;
constexpr Place kUnknown = nullptr;
inline const char kDeletedByte = 0;
constexpr Place kDeleted = &kDeletedByte;

struct RowSource {
  const uint32_t* slots = nullptr;
  const char* keys = nullptr;
  const char* vectors = nullptr;
  uint64_t salt = 0;
  uint32_t log_slots = 2;
  uint64_t live = 0;  // the number of rows
  uint64_t n = 0;     // the number of keys
  size_t vector_bytes = 0;
  // The files of the arrays, if they have to be verified as they are read; otherwise null.
  const VerifiedFile* slots_file = nullptr;
  const VerifiedFile* keys_file = nullptr;
  const VerifiedFile* vectors_file = nullptr;
};

// Sets places[i] for each i of pending[0, n), n <= kFindBlock, whose key the source has. Moves the
// others to the front of `pending`, and returns their number. Returns false in *sound if the source
// is damaged; places are then undefined. If `reads` is false, the caller does not read the vectors,
// and their blocks are not verified.
template <class K>
size_t FindIn(const RowSource& source, const K* keys, uint32_t* pending, size_t n, Place* places,
              bool* sound, bool reads = true) {
  const uint64_t mask = (uint64_t{1} << source.log_slots) - 1;
  const bool verify = source.slots_file != nullptr;
  uint64_t at[kFindBlock];
  uint32_t entries[kFindBlock];
  for (size_t j = 0; j < n; ++j) {
    at[j] = HashKey(keys[pending[j]], source.salt) >> (64 - source.log_slots);
    __builtin_prefetch(source.slots + at[j]);
  }
  const auto entry_at = [&](uint64_t slot) -> uint32_t {
    const uint32_t* const address = source.slots + slot;
    if (verify && !source.slots_file->Ensure(reinterpret_cast<const char*>(address), 4)) {
      *sound = false;
      return 0;
    }
    const uint32_t entry = *address;
    if (entry > source.n) {
      *sound = false;
      return 0;
    }
    return entry;
  };
  for (size_t j = 0; j < n; ++j) {
    entries[j] = entry_at(at[j]);
    if (entries[j] != 0) __builtin_prefetch(source.keys + (entries[j] - 1) * sizeof(K));
  }
  size_t left = 0;
  for (size_t j = 0; j < n; ++j) {
    const uint32_t i = pending[j];
    Place place = kUnknown;
    uint64_t probes = 0;
    for (uint32_t entry = entries[j]; entry != 0; entry = entry_at(at[j])) {
      const char* const key = source.keys + (uint64_t{entry} - 1) * sizeof(K);
      if (verify && !source.keys_file->Ensure(key, sizeof(K))) {
        *sound = false;
        break;
      }
      if (LoadUnaligned<K>(key) == keys[i]) {
        place = kDeleted;
        if (entry <= source.live) {
          place = source.vectors + (uint64_t{entry} - 1) * source.vector_bytes;
          if (!reads) break;
          if (verify && !source.vectors_file->Ensure(place, source.vector_bytes)) *sound = false;
          PrefetchBytes(place,
                        source.vector_bytes < kPrefetchMost ? source.vector_bytes : kPrefetchMost);
        }
        break;
      }
      // Each probe of a key finds another one, so more probes than keys mean a damaged index.
      if (++probes > source.n) {
        *sound = false;
        break;
      }
      at[j] = (at[j] + 1) & mask;
    }
    if (place == kUnknown) {
      pending[left++] = i;
    } else {
      places[i] = place;
    }
  }
  return left;
}

}  // namespace dynemb

#endif  // DYNEMB_SERVING_ROW_SOURCE_H_
