#include "cc/table/clock.h"

#include <algorithm>
#include <chrono>

namespace dynemb {

int64_t SystemNow() {
  return static_cast<int64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  std::chrono::system_clock::now().time_since_epoch())
                                  .count());
}

Clock::Clock() : now_(SystemNow) {}

Tick Clock::Next(int64_t* utc_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  // The system's clock may be set back, but the times of records must not decrease.
  int64_t now = now_();
  if (!records_.empty()) now = std::max(now, records_.back().utc_ns);
  if (utc_ns != nullptr) *utc_ns = now;
  Record({++last_, now});
  return last_;
}

void Clock::Advance(Tick tick, int64_t utc_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (tick <= last_) return;
  last_ = tick;
  // A time that is too late only makes TickBefore return an older tick.
  utc_ns = std::min(utc_ns, now_());
  if (!records_.empty()) utc_ns = std::max(utc_ns, records_.back().utc_ns);
  Record({tick, utc_ns});
}

void Clock::Record(const TickTime& record) {
  records_.push_back(record);
  if (records_.size() > kMostRecords) {
    size_t kept = 0;
    const size_t half = records_.size() / 2;
    for (size_t i = 0; i < records_.size(); ++i) {
      if (i >= half || i % 2 == 0) records_[kept++] = records_[i];
    }
    records_.resize(kept);
  }
}

Tick Clock::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

int64_t Clock::TimeOf(Tick tick) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::upper_bound(records_.begin(), records_.end(), tick,
                                   [](Tick t, const TickTime& r) { return t < r.tick; });
  return at == records_.begin() ? 0 : std::prev(at)->utc_ns;
}

Tick Clock::TickBefore(int64_t utc_ns) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = std::lower_bound(records_.begin(), records_.end(), utc_ns,
                                   [](const TickTime& r, int64_t t) { return r.utc_ns < t; });
  return at == records_.begin() ? 0 : std::prev(at)->tick;
}

}  // namespace dynemb
