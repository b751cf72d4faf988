// OutputAllocator: memory for the large outputs of kernels, kept for the next call.
//
// The system's allocator gives large blocks back to the system at once, so every call would fault
// its outputs in anew, page by page (docs/performance_log.md, "outputs"). Here a block that its
// last reader has let go of is kept, in huge pages where it is large enough. What is kept is
// bounded, and the longest unused goes first.
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
  // Outputs of at least so many bytes are worth it.
  static constexpr size_t kSmallest = size_t{128} << 10;

  // The process's one. It lives for ever: tensors may.
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
  std::mutex mutex_;         // guards what follows
  std::vector<Block> idle_;  // in the order in which they were given back
  size_t idle_bytes_ = 0;
  std::unordered_map<void*, size_t> in_use_;
};

}  // namespace dynemb

#endif  // DYNEMB_TF_OUTPUT_ALLOCATOR_H_
