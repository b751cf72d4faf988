// The device instantiation of the bucket algorithm, with a tile of eight threads per key. The
// kernels are only loops that call bucket_ops.h; CI compiles them wherever nvcc is present.
#include "cc/table/bucket_ops.h"
#include "cc/table/lanes_cuda.cuh"

namespace dynemb {
namespace {

using Tile = CudaTile<8>;

template <class Body>
__device__ void ForEachKey(size_t n, Body body) {
  const auto group =
      cooperative_groups::tiled_partition<Tile::kWidth>(cooperative_groups::this_thread_block());
  Tile lanes(group);
  const size_t tiles = static_cast<size_t>(gridDim.x) * blockDim.x / Tile::kWidth;
  size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / Tile::kWidth;
  for (; i < n; i += tiles) body(lanes, i);
}

}  // namespace

// rows[i] = the row of keys[i], with the score `now`, or kNoRow.
template <class K>
__global__ void FindKernel(TableView<K> view, const K* keys, size_t n, Stamp now, RowId* rows) {
  ForEachKey(n, [&](Tile& lanes, size_t i) {
    const uint64_t hash = view.HashOf(keys[i]);
    const Probe probe = MakeProbe(hash);
    Bucket* segment = view.SegmentBuckets(view.SegmentOf(hash));
    const SlotRef at = Find(lanes, view, segment, probe, keys[i]);
    if (lanes.rank() != 0) return;
    rows[i] = at.row;
    if (at.bucket != nullptr) Tile::Store(&at.bucket->score[at.slot], now);
  });
}

// Gives slots to distinct keys that are not in the table. If rows[i] is a row id, key i gets that
// free row; if it is kNoRow, the row of an evicted key. rows[i] becomes the key's row, or kNoRow if
// it could not get one.
template <class K>
__global__ void ClaimKernel(TableView<K> view, const K* keys, size_t n, Stamp now,
                            Evictable evictable, RowId* rows) {
  ForEachKey(n, [&](Tile& lanes, size_t i) {
    const uint64_t hash = view.HashOf(keys[i]);
    const Probe probe = MakeProbe(hash);
    Bucket* segment = view.SegmentBuckets(view.SegmentOf(hash));
    const RowId fresh = rows[i];
    const SlotRef at = fresh != kNoRow ? Claim(lanes, segment, probe, fresh, now)
                                       : Evict(lanes, view, segment, probe, evictable, now);
    if (lanes.rank() != 0) return;
    rows[i] = at.row;
    if (at.bucket != nullptr) StoreUnaligned<K>(view.RowAt(at.row), keys[i]);
  });
}

// Erases distinct keys. rows[i] = the row that key i had, or kNoRow.
template <class K>
__global__ void EraseKernel(TableView<K> view, const K* keys, size_t n, RowId* rows) {
  ForEachKey(n, [&](Tile& lanes, size_t i) {
    const uint64_t hash = view.HashOf(keys[i]);
    const Probe probe = MakeProbe(hash);
    Bucket* segment = view.SegmentBuckets(view.SegmentOf(hash));
    const SlotRef at = Find(lanes, view, segment, probe, keys[i]);
    const bool erased = at.bucket != nullptr && Erase(lanes, segment, probe, at);
    if (lanes.rank() == 0) rows[i] = erased ? at.row : kNoRow;
  });
}

template __global__ void FindKernel(TableView<uint64_t>, const uint64_t*, size_t, Stamp, RowId*);
template __global__ void FindKernel(TableView<uint32_t>, const uint32_t*, size_t, Stamp, RowId*);
template __global__ void ClaimKernel(TableView<uint64_t>, const uint64_t*, size_t, Stamp, Evictable,
                                     RowId*);
template __global__ void ClaimKernel(TableView<uint32_t>, const uint32_t*, size_t, Stamp, Evictable,
                                     RowId*);
template __global__ void EraseKernel(TableView<uint64_t>, const uint64_t*, size_t, RowId*);
template __global__ void EraseKernel(TableView<uint32_t>, const uint32_t*, size_t, RowId*);

}  // namespace dynemb
