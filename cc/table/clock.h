// Clock: issues the ticks of batches, and records when each was issued.
//
// Next() is strictly increasing, from 1. TickBefore(t) is a tick that was certainly issued before
// time t. Every later tick was issued at t or later, or (because old records are thinned) shortly
// before t. Therefore "rows updated since t" misses no row. Thread-safe.
#ifndef DYNEMB_TABLE_CLOCK_H_
#define DYNEMB_TABLE_CLOCK_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "cc/table/types.h"

namespace dynemb {

// The system's clock, in nanoseconds since 1970-01-01 UTC.
int64_t SystemNow();

class Clock {
 public:
  // Returns nanoseconds since 1970-01-01 UTC.
  using Now = std::function<int64_t()>;

  Clock();  // reads the system's clock
  explicit Clock(Now now) : now_(std::move(now)) {}

  Tick Next() { return Next(nullptr); }
  // Also returns the time of the tick.
  Tick Next(int64_t* utc_ns);
  // The next tick will be greater than `tick`, which another process issued at `utc_ns`.
  void Advance(Tick tick, int64_t utc_ns);
  // The time at which a tick was issued, or shortly before, because old records are thinned;
  // nanoseconds since 1970 UTC. 0 if it is not known.
  int64_t TimeOf(Tick tick) const;
  // The last tick issued; 0 before the first.
  Tick last() const;
  // The greatest recorded tick that was issued before `utc_ns`; 0 if there is none.
  Tick TickBefore(int64_t utc_ns) const;

 private:
  struct TickTime {
    Tick tick;
    int64_t utc_ns;
  };
  void Record(const TickTime& record);
  // Beyond this number of records, every second record of the older half is dropped.
  static constexpr size_t kMostRecords = size_t{1} << 16;

  Now now_;
  mutable std::mutex mutex_;
  Tick last_ = 0;
  std::vector<TickTime> records_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CLOCK_H_
