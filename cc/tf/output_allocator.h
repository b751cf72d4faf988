// OutputAllocator: memory for the large outputs of kernels, kept for the next call.
//
// The system's allocator returns large blocks to the system at once, so every call would fault its
// outputs in again, page by page (benchmarks/log.md, "outputs"). This allocator keeps a block
// when its last reader has released it; large blocks are in huge pages. The total size of idle
// blocks is bounded, and the block that was idle for longest is freed first.
#ifndef DYNEMB_TF_OUTPUT_ALLOCATOR_H_
#define DYNEMB_TF_OUTPUT_ALLOCATOR_H_

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/framework/allocator.h"

namespace dynemb {

class OutputAllocator : public tensorflow::Allocator {
 public:
  // Outputs of fewer bytes are not worth keeping.
  static constexpr size_t kSmallest = size_t{128} << 10;

  // The allocator of the process. It is never destroyed, because tensors that use it may not be.
  static OutputAllocator* Get();

  std::string Name() override { return "dynemb_output"; }
  // Null if the system refuses.
  void* AllocateRaw(size_t alignment, size_t bytes) override;
  void DeallocateRaw(void* memory) override;

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };

  OutputAllocator();
  void* TakeIdle(size_t bytes);

  const size_t keep_most_;   // bytes
  std::mutex mutex_;         // guards the members below
  std::vector<Block> idle_;  // in the order in which they were returned
  size_t idle_bytes_ = 0;
  std::unordered_map<void*, size_t> in_use_;
};

}  // namespace dynemb

#endif  // DYNEMB_TF_OUTPUT_ALLOCATOR_H_
