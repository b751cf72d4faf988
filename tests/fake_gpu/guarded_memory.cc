#include "tests/fake_gpu/guarded_memory.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dynemb {
namespace {

constexpr size_t kPage = 4096;
constexpr int kFresh = 0xEE, kFreed = 0xDD;
constexpr char kMessage[] = "fake GPU: the host accesses the memory of the device\n";

// pytest replaces the standard error of tests by a file, which a process that ends so loses.
int standard_error = STDERR_FILENO;
struct sigaction previous;

// Async-signal-safe, except for `backtrace`, which was called once before so that it allocates
// nothing here.
void Report(int, siginfo_t* info, void*) {
  if (GuardedMemory::Get().Contains(info->si_addr)) {
    void* stack[48];
    if (write(standard_error, kMessage, sizeof(kMessage) - 1) > 0) {
      backtrace_symbols_fd(stack, backtrace(stack, 48), standard_error);
    }
  }
  // The access is repeated, and fails again.
  sigaction(SIGSEGV, &previous, nullptr);
  if (info->si_code <= 0) raise(SIGSEGV);  // another handler's signal, not an access
}

void Require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

}  // namespace

GuardedMemory& GuardedMemory::Get() {
  static auto* const memory = new GuardedMemory;  // never destroyed: tensors may outlive statics
  return *memory;
}

GuardedMemory::GuardedMemory() {
  const int file = memfd_create("fake_gpu", MFD_CLOEXEC);
  Require(file >= 0 && ftruncate(file, kBytes) == 0, "fake GPU: memfd_create");
  const auto map = [file](int access) {
    void* const p = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    Require(p != MAP_FAILED, "fake GPU: mmap");
    return static_cast<char*>(p);
  };
  device_ = map(PROT_NONE);
  view_ = map(PROT_READ | PROT_WRITE);
  close(file);
  SimulatedGuard::Get() = this;

  standard_error = dup(STDERR_FILENO);
  void* stack[1];
  backtrace(stack, 1);
  struct sigaction action = {};
  action.sa_sigaction = Report;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
}

void GuardedMemory::Begin() {
  std::lock_guard<std::mutex> lock(scopes_mutex_);
  if (scopes_++ == 0) {
    Require(mprotect(device_, kBytes, PROT_READ | PROT_WRITE) == 0, "fake GPU: mprotect");
  }
}

void GuardedMemory::End() {
  std::lock_guard<std::mutex> lock(scopes_mutex_);
  if (--scopes_ == 0) Require(mprotect(device_, kBytes, PROT_NONE) == 0, "fake GPU: mprotect");
}

void* GuardedMemory::Allocate(size_t bytes) {
  bytes = std::max((bytes + kPage - 1) / kPage, size_t{1}) * kPage;
  std::lock_guard<std::mutex> lock(blocks_mutex_);
  size_t offset = end_;
  std::vector<size_t>& free = free_[bytes];
  if (!free.empty()) {
    offset = free.back();
    free.pop_back();
  } else if (bytes > kBytes - end_) {
    return nullptr;
  } else {
    end_ += bytes;
  }
  blocks_[offset] = bytes;
  std::memset(view_ + offset, kFresh, bytes);
  return device_ + offset;
}

void GuardedMemory::Free(void* p) {
  if (p == nullptr) return;
  std::lock_guard<std::mutex> lock(blocks_mutex_);
  const auto block = blocks_.find(static_cast<char*>(p) - device_);
  Require(block != blocks_.end(), "fake GPU: Free of an address that is not a block's");
  const auto [offset, bytes] = *block;
  // The time that scopes take is in proportion to the pages which are mapped.
  Require(madvise(p, bytes, MADV_DONTNEED) == 0, "fake GPU: madvise");
  std::memset(view_ + offset, kFreed, bytes);
  free_[bytes].push_back(offset);
  blocks_.erase(block);
}

}  // namespace dynemb
