// GuardedMemory: the memory of the fake GPU. It is host memory which the host may not access.
//
// The same pages are mapped twice:
//
//   addresses of the device   what tensors and the workspace of sessions have. No access, except in
//                             the scopes of the simulated device's work (simulated_guard.h).
//   View                      always accessible: for TensorFlow's copies, and for filling blocks.
//
// An access to an address of the device outside such scopes is one by the host: the process writes
// a message and the stack of native functions, and ends by SIGSEGV. If another handler was set
// before (pytest's, which writes the stack of Python functions), that one ends the process.
//
// New blocks, and freed ones, contain garbage. Blocks begin at pages, and share none.
//
// Not seen:
// - an access by the host while another thread is in a scope,
// - system calls that get an address of the device, which fail with EFAULT,
// - work of the device that accesses the host's memory,
// - the memory of tables themselves, which is not here.
#ifndef DYNEMB_FAKE_GPU_GUARDED_MEMORY_H_
#define DYNEMB_FAKE_GPU_GUARDED_MEMORY_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "tests/simulated/simulated_guard.h"

namespace dynemb {

// Thread-safe.
class GuardedMemory final : public SimulatedGuard {
 public:
  static constexpr size_t kBytes = size_t{4} << 30;

  // The memory of the process, created by the first call. From then on it guards the simulated
  // devices, and handles SIGSEGV.
  static GuardedMemory& Get();

  void Begin() override;
  void End() override;
  void* Allocate(size_t bytes) override;
  void Free(void* p) override;

  bool Contains(const void* p) const {
    const auto* c = static_cast<const char*>(p);
    return device_ <= c && c < device_ + kBytes;
  }
  // Where the host may access what is at `p`: the second address of device memory; p itself for any
  // other memory.
  void* View(void* p) const { return Contains(p) ? view_ + (static_cast<char*>(p) - device_) : p; }
  const void* View(const void* p) const { return View(const_cast<void*>(p)); }

 private:
  GuardedMemory();

  char* device_ = nullptr;
  char* view_ = nullptr;
  std::mutex scopes_mutex_;
  int scopes_ = 0;
  std::mutex blocks_mutex_;
  size_t end_ = 0;                              // of the blocks that were ever allocated
  std::map<size_t, size_t> blocks_;             // offset -> bytes, of the blocks in use
  std::map<size_t, std::vector<size_t>> free_;  // bytes -> offsets
};

}  // namespace dynemb

#endif  // DYNEMB_FAKE_GPU_GUARDED_MEMORY_H_
