// Clock: issues the ticks of batches, and records when each was issued.
//
// Next() is strictly increasing, from 1. TickBefore(t) is a tick that was certainly issued before
// the moment t. If the system's clock was set, t may denote several moments: each moment at which
// the clock showed t, and the moment that lies as long ago as t does by the clock's present time.
// TickBefore uses the first of them. Every later tick was issued then or later, or (because old
// records are thinned, or there are several such moments) before it. Therefore "rows updated since
// t" misses no row, provided that each time the clock was set, a batch saw it. Thread-safe.
//
// The clocks are read when a Clock is created, too, so that a system's clock that is wrong for the
// first batches only is known to have been right before. If it was ahead even then, all times up to
// what it showed may be of moments before the first batch: TickBefore is 0 for them.
#ifndef DYNEMB_TABLE_CLOCK_H_
#define DYNEMB_TABLE_CLOCK_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "cc/table/system_time.h"
#include "cc/table/types.h"

namespace dynemb {

class Clock {
 public:
  explicit Clock(SystemTime* time = &SystemTime::OfProcess());

  Tick Next() { return Next(nullptr); }
  // Also returns the time of the tick (SystemTime::Moment::utc_ns).
  Tick Next(int64_t* utc_ns);
  // The next tick will be greater than `tick`, which another process issued at `utc_ns`; kNow:
  // now. A time later than now is recorded as now.
  static constexpr int64_t kNow = -1;
  void Advance(Tick tick, int64_t utc_ns);
  // The time of day at which a tick was issued, or shortly before, because old records are thinned;
  // nanoseconds since 1970 UTC. 0 if it is not known.
  int64_t TimeOf(Tick tick) const;
  // The last tick issued; 0 before the first.
  Tick last() const;
  // The greatest recorded tick that was certainly issued before `utc_ns`; 0 if there is none.
  Tick TickBefore(int64_t utc_ns) const;

 private:
  struct TickTime {
    Tick tick;
    int64_t boot_ns;   // never decreases
    int64_t shown_ns;  // by the system's clock
  };
  // Whether the system's clock may have shown `utc_ns` before the first tick. Requires mutex_.
  bool ShowedBeforeFirst(int64_t utc_ns) const;
  // Whether the system's clock may have shown `utc_ns` between two records.
  static bool Showed(const TickTime& from, const TickTime& to, int64_t utc_ns);
  // Whether the clock was set between them, by more than it may drift.
  static bool WasSet(const TickTime& from, const TickTime& to);
  void Record(const TickTime& record);
  // Beyond this number of records, every second record of the older half is dropped, except one
  // that alone knows of a time: the clock was set before it and after it.
  static constexpr size_t kMostRecords = size_t{1} << 16;

  SystemTime& time_;
  mutable std::mutex mutex_;
  Tick last_ = 0;
  TickTime start_;         // the creation of this object, with tick 0
  bool has_first_ = true;  // no record of the first ticks was forgotten
  std::vector<TickTime> records_;
  int64_t latest_ns_ = INT64_MIN;  // that the system's clock may have shown until the last record
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CLOCK_H_
