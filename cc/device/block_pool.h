// BlockPool: allocates small blocks of one growing range of memory, for uses that would waste most
// of a unit of 2 MiB. It allocates offsets, and does not access memory.
//
// Invariant: every byte of [0, end()) is in exactly one block, which is taken or free. A block's
// size is a power of two, and its offset a multiple of its size. Free blocks are not merged: later
// tables need the same sizes as earlier ones.
#ifndef DYNEMB_DEVICE_BLOCK_POOL_H_
#define DYNEMB_DEVICE_BLOCK_POOL_H_

#include <array>
#include <cstddef>
#include <vector>

namespace dynemb {

class BlockPool {
 public:
  static constexpr size_t kLeast = 256;
  static constexpr size_t kMost = size_t{1} << 20;

  // The size of a block for `bytes` bytes, which must be at most kMost.
  static constexpr size_t SizeOf(size_t bytes) {
    size_t size = kLeast;
    while (size < bytes) size *= 2;
    return size;
  }

  // The offset of a block of SizeOf(bytes).
  size_t Take(size_t bytes) {
    const size_t size = SizeOf(bytes);
    std::vector<size_t>& free = FreeOf(size);
    if (!free.empty()) {
      const size_t offset = free.back();
      free.pop_back();
      return offset;
    }
    // The bytes before the next multiple of the size become free blocks.
    while (end_ % size != 0) {
      const size_t gap = end_ & -end_;
      FreeOf(gap).push_back(end_);
      end_ += gap;
    }
    const size_t offset = end_;
    end_ += size;
    return offset;
  }

  void Give(size_t offset, size_t bytes) { FreeOf(SizeOf(bytes)).push_back(offset); }

  size_t end() const { return end_; }

 private:
  std::vector<size_t>& FreeOf(size_t size) {
    size_t at = 0;
    for (size_t s = kLeast; s < size; s *= 2) ++at;
    return free_[at];
  }

  size_t end_ = 0;
  std::array<std::vector<size_t>, 13> free_;
  static_assert(kLeast << 12 == kMost, "one list for each size");
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_BLOCK_POOL_H_
