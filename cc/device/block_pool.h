// BlockPool: small blocks of one growing range of memory, for ranges that would waste most of a
// unit of 2 MiB. It deals out offsets and touches no memory.
//
// Invariant: every byte of [0, end()) is in one block, taken or free; a block's size is a power of
// two, and its offset a multiple of that. Free blocks are not joined again: tables that come after
// others want the same sizes.
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

  // What a block for `bytes` has; `bytes` is kMost at most.
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
    // What lies before the next multiple of the size becomes free blocks.
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
