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
