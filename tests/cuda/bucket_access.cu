// The bucket algorithm with the lanes that ship, for tests/python/test_gpu_memory_model.py, which
// reads its PTX. The kernels have no other memory to access than buckets, keys of 32 bits, pins and
// results of 32 bits.
#include "cc/device/thread_lane.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/lanes_cuda.cuh"

namespace dynemb {
namespace {

struct Keys {
  const char* rows;

  DYNEMB_HD uint32_t KeyAt(RowId row) const { return LoadUnaligned<uint32_t>(rows + 4ull * row); }
  DYNEMB_HD uint64_t HashOf(uint32_t key) const { return HashKey(key, 0); }
};

template <class Lanes>
__device__ void AllOperations(Lanes& lanes, const Keys& keys, Bucket* segment, uint32_t key,
                              const Evictable& evictable, RowId* rows) {
  const Probe probe = MakeProbe(keys.HashOf(key));
  const SlotRef found = Find(lanes, keys, segment, probe, key);
  const SlotRef claimed = Claim(lanes, segment, probe, rows[0], 1);
  const EvictedSlot evicted = Evict(lanes, keys, segment, probe, evictable, 1);
  const bool erased = Erase(lanes, segment, probe, found);
  if (lanes.rank() != 0) return;
  rows[0] = found.row;
  rows[1] = claimed.row;
  rows[2] = evicted.row;
  rows[3] = evicted.score;
  rows[4] = erased ? 1 : 0;
}

}  // namespace

__global__ void ByThreads(Keys keys, Bucket* segment, Evictable evictable, RowId* rows) {
  ThreadLane lane;
  AllOperations(lane, keys, segment, threadIdx.x, evictable, rows);
}

template <uint32_t W>
__global__ void ByTiles(Keys keys, Bucket* segment, Evictable evictable, RowId* rows) {
  const auto group =
      cooperative_groups::tiled_partition<W>(cooperative_groups::this_thread_block());
  CudaTile<W> lanes(group);
  AllOperations(lanes, keys, segment, threadIdx.x / W, evictable, rows);
}
template __global__ void ByTiles<4>(Keys, Bucket*, Evictable, RowId*);
template __global__ void ByTiles<8>(Keys, Bucket*, Evictable, RowId*);

}  // namespace dynemb
