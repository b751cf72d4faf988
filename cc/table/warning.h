// Warnings, and the errors of work that no call waits for.
//
// The library does not print. Its user chooses where warnings go (SetWarningFn); the operators send
// them to TensorFlow's log.
#ifndef DYNEMB_TABLE_WARNING_H_
#define DYNEMB_TABLE_WARNING_H_

#include <atomic>
#include <cstdint>

#include "cc/table/status.h"

namespace dynemb {

// Calls of Warn pass their text to this function, on the thread that warns. It must not throw.
// Null, as at the beginning: warnings are dropped.
using WarningFn = void (*)(const char* text);
void SetWarningFn(WarningFn fn);
void Warn(const char* text);

// Errors that no call returns. Each of them is a warning, and is counted. Thread-safe.
class BackgroundErrors {
 public:
  void Add(const Status& error) noexcept;
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> count_{0};
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_WARNING_H_
