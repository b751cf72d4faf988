#include "cc/tf/exchange_counters.h"

#include <memory>
#include <mutex>
#include <unordered_map>

namespace dynemb {

ExchangeCounters* ExchangeCounters::Of(const std::string& table) {
  static std::mutex mutex;
  static auto* const counters =
      new std::unordered_map<std::string, std::unique_ptr<ExchangeCounters>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<ExchangeCounters>& of_table = (*counters)[table];
  if (of_table == nullptr) of_table = std::make_unique<ExchangeCounters>();
  return of_table.get();
}

}  // namespace dynemb
