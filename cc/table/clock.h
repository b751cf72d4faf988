// Clock: numbers batches and remembers when they were.
//
// Next() is strictly increasing from 1. TickBefore(t) answers which batches are certainly older
// than a moment in time: every tick above it was issued at t or later, or (because old records are
// thinned) shortly before. So "rows updated since t" misses nothing. Thread-safe.
#ifndef DYNEMB_TABLE_CLOCK_H_
#define DYNEMB_TABLE_CLOCK_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "cc/table/types.h"

namespace dynemb {

class Clock {
 public:
  // Nanoseconds since 1970-01-01 UTC.
  using Now = std::function<int64_t()>;

  Clock();  // the system's clock
  explicit Clock(Now now) : now_(std::move(now)) {}

  Tick Next() { return Next(nullptr); }
  // Also gives the time of the tick.
  Tick Next(int64_t* utc_ns);
  // The next tick will be greater than `tick`, which another process issued at `utc_ns`.
  void Advance(Tick tick, int64_t utc_ns);
  // The last tick issued; 0 before the first.
  Tick last() const;
  // The greatest recorded tick issued before `utc_ns`; 0 if none was.
  Tick TickBefore(int64_t utc_ns) const;

 private:
  struct TickTime {
    Tick tick;
    int64_t utc_ns;
  };
  void Record(const TickTime& record);
  // Beyond this many records the older half keeps every second one.
  static constexpr size_t kMostRecords = size_t{1} << 16;

  Now now_;
  mutable std::mutex mutex_;
  Tick last_ = 0;
  std::vector<TickTime> records_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CLOCK_H_
