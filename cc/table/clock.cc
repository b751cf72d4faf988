#include "cc/table/clock.h"

#include <algorithm>

namespace dynemb {

Clock::Clock(SystemTime* time) : time_(*time) {
  const SystemTime::Moment now = time_.Now();
  start_ = {0, now.boot_ns, now.shown_ns};
}

Tick Clock::Next(int64_t* utc_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  const SystemTime::Moment now = time_.Now();
  if (utc_ns != nullptr) *utc_ns = now.utc_ns;
  Record({++last_, now.boot_ns, now.shown_ns});
  return last_;
}

void Clock::Advance(Tick tick, int64_t utc_ns) {
  if (utc_ns != kNow) time_.SawInFile(utc_ns);
  std::lock_guard<std::mutex> lock(mutex_);
  if (tick <= last_) return;
  last_ = tick;
  const SystemTime::Moment now = time_.Now();
  if (utc_ns == kNow) utc_ns = now.utc_ns;
  // A time that is too late only makes TickBefore return an older tick.
  int64_t boot_ns = now.boot_ns - std::max<int64_t>(0, now.utc_ns - std::max<int64_t>(0, utc_ns));
  if (!records_.empty()) boot_ns = std::max(boot_ns, records_.back().boot_ns);
  Record({tick, boot_ns, now.utc_ns - (now.boot_ns - boot_ns)});
}

bool Clock::ShowedBeforeFirst(int64_t utc_ns) const {
  // A process that has loaded rows has a first tick of before its start.
  const bool follows = has_first_ && records_.front().boot_ns >= start_.boot_ns;
  const TickTime& first = follows ? start_ : records_.front();
  if (utc_ns <= first.shown_ns) return true;
  return follows && Showed(start_, records_.front(), utc_ns);
}

bool Clock::Showed(const TickTime& from, const TickTime& to, int64_t utc_ns) {
  const int64_t passed = to.boot_ns - from.boot_ns;
  if (utc_ns > from.shown_ns && utc_ns <= to.shown_ns && !WasSet(from, to)) return true;
  // It was set at any moment between them.
  return (utc_ns > from.shown_ns && utc_ns <= from.shown_ns + passed) ||
         (utc_ns > to.shown_ns - passed && utc_ns <= to.shown_ns);
}

bool Clock::WasSet(const TickTime& from, const TickTime& to) {
  const int64_t passed = to.boot_ns - from.boot_ns;
  const int64_t set = to.shown_ns - from.shown_ns - passed;
  return std::max(set, -set) > SystemTime::kSecond / 1000 + passed / 1000;
}

void Clock::Record(const TickTime& record) {
  latest_ns_ = std::max(latest_ns_, record.shown_ns);
  if (!records_.empty()) {
    const TickTime& last = records_.back();
    latest_ns_ = std::max(latest_ns_, last.shown_ns + (record.boot_ns - last.boot_ns));
  }
  records_.push_back(record);
  if (records_.size() <= kMostRecords) return;
  size_t kept = 0;
  const size_t half = records_.size() / 2;
  for (size_t i = 0; i < records_.size(); ++i) {
    if (i >= half || i % 2 == 0 ||
        (WasSet(records_[i - 1], records_[i]) && WasSet(records_[i], records_[i + 1]))) {
      records_[kept++] = records_[i];
    }
  }
  records_.resize(kept);
  // If a clock is set very often, the older half of the records is dropped. Their ticks then count
  // as ticks before the first record.
  if (kept > kMostRecords) {
    has_first_ = false;
    records_.erase(records_.begin(), records_.begin() + static_cast<int64_t>(half));
  }
}

Tick Clock::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

int64_t Clock::TimeOf(Tick tick) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto after = std::upper_bound(records_.begin(), records_.end(), tick,
                                      [](Tick t, const TickTime& r) { return t < r.tick; });
  if (after == records_.begin()) return 0;
  const TickTime& at = *std::prev(after);
  return time_.UtcOf(at.boot_ns, at.shown_ns);
}

Tick Clock::TickBefore(int64_t utc_ns) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (records_.empty() || ShowedBeforeFirst(utc_ns)) return 0;
  const SystemTime::Moment now = time_.Now();
  if (utc_ns > latest_ns_ && utc_ns > now.shown_ns) return last_;
  // The caller may have computed it from what the clock shows now.
  const int64_t boot_ns = now.boot_ns - (now.shown_ns - utc_ns);
  const auto after = std::lower_bound(records_.begin(), records_.end(), boot_ns,
                                      [](const TickTime& r, int64_t t) { return r.boot_ns < t; });
  if (after == records_.begin()) return 0;
  // Or have seen it before.
  for (auto at = std::next(records_.begin()); at != after; ++at) {
    if (Showed(*std::prev(at), *at, utc_ns)) return std::prev(at)->tick;
  }
  return std::prev(after)->tick;
}

}  // namespace dynemb
