#include "cc/table/warning.h"

namespace dynemb {
namespace {

std::atomic<WarningFn> warning_fn{nullptr};

}  // namespace

void SetWarningFn(WarningFn fn) { warning_fn = fn; }

void Warn(const char* text) {
  const WarningFn fn = warning_fn;
  if (fn != nullptr) fn(text);
}

void BackgroundErrors::Add(const Status& error) noexcept {
  count_.fetch_add(1, std::memory_order_relaxed);
  Warn(error.message().c_str());
}

}  // namespace dynemb
