#include "cc/tf/output_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "cc/table/memory_limit.h"

namespace dynemb {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kKeepMost = size_t{512} << 20;
constexpr size_t kKeepFraction = 16;  // at most 1/16 of the machine's memory is kept

// Rounds `bytes` up, so that outputs of about the same size can use the same blocks. At most an
// eighth is wasted.
size_t SizeClass(size_t bytes) {
  size_t step = OutputAllocator::kSmallest / 8;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

OutputAllocator* OutputAllocator::Get() {
  static auto* const allocator = new OutputAllocator;
  return allocator;
}

OutputAllocator::OutputAllocator()
    : keep_most_(std::min(kKeepMost, PhysicalMemory() / kKeepFraction)) {}

// The idle block of this size that was returned last, which may still be in a cache. Null if there
// is none.
void* OutputAllocator::TakeIdle(size_t bytes) {
  for (size_t i = idle_.size(); i-- > 0;) {
    if (idle_[i].bytes != bytes) continue;
    void* memory = idle_[i].memory;
    idle_.erase(idle_.begin() + static_cast<ptrdiff_t>(i));
    idle_bytes_ -= bytes;
    return memory;
  }
  return nullptr;
}

void* OutputAllocator::AllocateRaw(size_t alignment, size_t bytes) {
  bytes = SizeClass(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  void* memory = alignment <= 4096 ? TakeIdle(bytes) : nullptr;
  if (memory == nullptr) {
    const size_t align = bytes >= kHugePage ? kHugePage : size_t{4096};
    memory = std::aligned_alloc(std::max(alignment, align), (bytes + align - 1) / align * align);
    if (memory == nullptr) return nullptr;
    if (bytes >= kHugePage) (void)madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
  in_use_[memory] = bytes;
  return memory;
}

void OutputAllocator::DeallocateRaw(void* memory) {
  if (memory == nullptr) return;
  std::vector<Block> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = in_use_.find(memory);
    idle_.push_back({memory, at->second});
    idle_bytes_ += at->second;
    in_use_.erase(at);
    size_t drop = 0;
    while (idle_bytes_ > keep_most_) idle_bytes_ -= idle_[drop++].bytes;
    const auto end = idle_.begin() + static_cast<ptrdiff_t>(drop);
    dropped.assign(idle_.begin(), end);
    idle_.erase(idle_.begin(), end);
  }
  for (const Block& block : dropped) std::free(block.memory);
}

}  // namespace dynemb
