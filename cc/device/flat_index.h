// The index of a table in device memory, and how kernels see the table.
//
// Flat. The whole index is one ring of buckets (bucket_ops.h): a key's home is a fraction of the
// ring, given by the top of its hash, and it may go on to any bucket behind it. So a probe is two
// dependent reads, bucket and row, with no directory before them, and no key is without a place
// while a slot is free. The ring grows by being built again, larger, from its own slots: on a GPU
// that is cheap enough to be done at once (a read of all buckets and of all keys), where splitting
// one segment after another would need the host in every batch.
//
// Rows. Row ids below `split` are in device memory, the others in host memory that kernels reach:
// the two tiers of a table. A row's id says where it is; a row is moved by giving it another id.
#ifndef DYNEMB_DEVICE_FLAT_INDEX_H_
#define DYNEMB_DEVICE_FLAT_INDEX_H_

#include <cstdint>

#include "cc/table/bucket.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/key.h"
#include "cc/table/portability.h"
#include "cc/table/row.h"
#include "cc/table/types.h"

namespace dynemb {

struct FlatRing {
  Bucket* buckets = nullptr;
  uint32_t count = 0;  // of buckets, below 2^31
  uint64_t salt = 0;   // of the hashes of the keys in it
};

struct FlatProbe {
  uint32_t home;
  uint8_t digest;
};

DYNEMB_HD inline Bucket* OnPath(const FlatRing& ring, uint32_t home, uint32_t step) {
  const uint32_t b = home + step;
  return ring.buckets + (b < ring.count ? b : b - ring.count);
}
DYNEMB_HD inline uint32_t PathLength(const FlatRing& ring) { return ring.count; }
DYNEMB_HD inline FlatProbe ProbeIn(const FlatRing& ring, uint64_t hash) {
  return {static_cast<uint32_t>(((hash >> 32) * ring.count) >> 32), MakeProbe(hash).digest};
}

// Buckets for so many keys at this load.
inline uint64_t BucketsFor(uint64_t keys, double max_load) {
  return static_cast<uint64_t>(static_cast<double>(keys) / (max_load * kSlotsPerBucket)) + 1;
}

struct TieredRows {
  char* device = nullptr;
  char* host = nullptr;
  uint64_t split = 0;
  uint64_t stride = 0;

  DYNEMB_HD char* At(RowId row) const {
    return row < split ? device + row * stride : host + (row - split) * stride;
  }
};

// Keys in an array, int32 or 64 bits wide, as bit patterns of 64. Their width is known when a
// kernel runs, not when it is compiled: it is the same for all threads, and what a probe costs is
// memory.
struct KeyArray {
  const void* keys = nullptr;
  size_t key_size = 8;

  DYNEMB_HD uint64_t operator[](size_t i) const {
    return key_size == 8 ? static_cast<const uint64_t*>(keys)[i]
                         : static_cast<const uint32_t*>(keys)[i];
  }
  // For ElectPositions (kernels.h).
  DYNEMB_HD uint64_t Hash(size_t i) const { return ElectionHash((*this)[i], 0); }
  DYNEMB_HD bool Same(size_t i, size_t j) const { return (*this)[i] == (*this)[j]; }
  // The keys from i on.
  KeyArray From(size_t i) const {
    return {static_cast<const char*>(keys) + i * key_size, key_size};
  }
};
DYNEMB_HD inline void StoreKey(void* keys, size_t key_size, size_t i, uint64_t key) {
  if (key_size == 8) {
    static_cast<uint64_t*>(keys)[i] = key;
  } else {
    static_cast<uint32_t*>(keys)[i] = static_cast<uint32_t>(key);
  }
}

// What kernels need of a table. Rows begin at multiples of 16 bytes, and so do their vectors:
// behind key and last update there are four bytes that are nobody's. Those of the first rows are
// the free list: its i-th entry is in row i, whichever key that row is.
struct DeviceView {
  FlatRing ring;
  TieredRows rows;
  RowLayout layout;
  StampOrder order{};

  DYNEMB_HD char* RowAt(RowId row) const { return rows.At(row); }
  DYNEMB_HD uint64_t KeyAt(RowId row) const { return KeyArray{rows.At(row), layout.key_size}[0]; }
  DYNEMB_HD uint64_t HashOf(uint64_t key) const { return HashKey(key, ring.salt); }
  DYNEMB_HD RowId* FreeRow(uint64_t i) const {
    return reinterpret_cast<RowId*>(rows.At(static_cast<RowId>(i)) + kFreeOffset);
  }
  static constexpr size_t kFreeOffset = 12;
  DYNEMB_HD bool InDevice(RowId row) const { return row < rows.split; }
  // The slot of a key.
  template <class Lanes>
  DYNEMB_HD SlotRef Find(Lanes& lanes, uint64_t key) const {
    return dynemb::Find(lanes, *this, ring, ProbeIn(ring, HashOf(key)), key);
  }
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_FLAT_INDEX_H_
