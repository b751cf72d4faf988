// RegisteredMemory: the ranges of host memory that were registered with the driver, one call each.
// Drivers refuse a copy that extends from one range into the next, so copies are divided where a
// range ends. Thread-safe.
#ifndef DYNEMB_DEVICE_REGISTERED_MEMORY_H_
#define DYNEMB_DEVICE_REGISTERED_MEMORY_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace dynemb {

// Memory is registered in units of a huge page. Two pieces with a boundary within a huge page would
// both lock all of it, and the driver would map it in small pages.
constexpr size_t kRegisterUnit = size_t{2} << 20;

// The end of the next piece of a range of `reserved` bytes whose first `registered` bytes are
// registered, and of which `bytes` are needed: a multiple of kRegisterUnit, or the end of the
// range. With `ahead` the piece has at least an eighth of the registered bytes, at most 64 MiB, so
// that large ranges are registered in few calls.
inline size_t RegisterUpTo(size_t registered, size_t bytes, size_t reserved, bool ahead) {
  constexpr size_t kFraction = 8, kMost = size_t{64} << 20;
  if (ahead) bytes = std::max(bytes, registered + std::min(registered / kFraction, kMost));
  return std::min((bytes + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit, reserved);
}

class RegisteredMemory {
 public:
  void Add(const void* p, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[Address(p)] = Address(p) + bytes;
    ++size_;
  }

  void Remove(const void* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(Address(p));
    --size_;
  }

  // The number of the `bytes` bytes from p on that are in the same range as p. If p is in no range,
  // this is `bytes`.
  size_t Within(const void* p, size_t bytes) const {
    if (size_ == 0) return bytes;
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(Address(p));
    if (after == ranges_.begin()) return bytes;
    const uintptr_t end = std::prev(after)->second;
    return end > Address(p) ? std::min<size_t>(bytes, end - Address(p)) : bytes;
  }

 private:
  static uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

  mutable std::mutex mutex_;
  std::map<uintptr_t, uintptr_t> ranges_;  // begin -> end
  std::atomic<size_t> size_{0};
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_REGISTERED_MEMORY_H_
