// The index of a table in device memory, and the view that kernels have of the table.
//
// Flat index. The whole index is one ring of buckets (bucket_ops.h). The top bits of a key's hash,
// as a fraction of the ring, select its home bucket; its probe may continue to any later bucket.
// Therefore
//
// - a probe is two dependent reads, bucket and head, without a directory,
// - every key finds a place while a slot is free,
// - the ring grows by a rebuild from its own slots into a larger one. On a GPU this is cheap enough
//   to do at once (a read of all buckets and all keys). Splitting single segments would need the
//   host in every batch.
//
// Rows. A row is a head (key and times, RowHead) and its contents (vector and state). A table has
// two tiers: the contents of rows with ids below `split` are in device memory, the others in host
// memory that kernels can access. A row's id therefore says where its contents are, and a row that
// moves gets another id. The heads of all rows are in device memory: to find a key, to check that a
// row still belongs to it, and to time a row reads nothing from host memory.
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
  uint32_t count = 0;  // number of buckets, below 2^31
  uint64_t salt = 0;   // for the hashes of its keys
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

// The number of buckets for `keys` keys at this load.
inline uint64_t BucketsFor(uint64_t keys, double max_load) {
  return static_cast<uint64_t>(static_cast<double>(keys) / (max_load * kSlotsPerBucket)) + 1;
}

// The contents of rows.
struct TieredRows {
  char* device = nullptr;
  char* host = nullptr;
  uint64_t split = 0;
  uint64_t stride = 0;  // RowLayout::content_bytes, a multiple of 16

  DYNEMB_HD char* At(RowId row) const {
    return row < split ? device + row * stride : host + (row - split) * stride;
  }
};

// An array of keys of 32 or 64 bits, read as bit patterns of 64 bits. The width is a run-time
// value, not a template parameter: it is the same for all threads, and the cost of a probe is
// memory access.
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

struct alignas(16) RowHead {
  uint64_t key;  // a key of 32 bits is in the low ones
  Stamp update;  // the last update; 0: the row is free
  RowId free;    // the free list: its i-th entry is in the head of row i, whatever key that row has
};

// The part of a table that kernels need. `layout` is that of a row in one piece, as copies have it:
// the fields of the head, followed by the contents.
struct DeviceView {
  FlatRing ring;
  RowHead* heads = nullptr;
  TieredRows rows;
  RowLayout layout;

  DYNEMB_HD uint64_t KeyAt(RowId row) const { return heads[row].key; }
  DYNEMB_HD Stamp* UpdateAt(RowId row) const { return &heads[row].update; }
  DYNEMB_HD char* VectorAt(RowId row) const { return rows.At(row); }
  DYNEMB_HD float* StateAt(RowId row) const {
    return reinterpret_cast<float*>(rows.At(row) + (layout.state_offset - layout.vector_offset));
  }
  DYNEMB_HD uint64_t HashOf(uint64_t key) const { return HashKey(key, ring.salt); }
  DYNEMB_HD RowId* FreeRow(uint64_t i) const { return &heads[i].free; }
  DYNEMB_HD bool InDevice(RowId row) const { return row < rows.split; }
  // The slot of a key; no bucket if it has none.
  template <class Lanes>
  DYNEMB_HD SlotRef Find(Lanes& lanes, uint64_t key) const {
    return dynemb::Find(lanes, *this, ring, ProbeIn(ring, HashOf(key)), key);
  }
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_FLAT_INDEX_H_
