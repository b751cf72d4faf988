// Expiry: the time to live of rows, and the record of times by which a table knows how old a row
// is.
//
// Rows store ticks, not times. A table with a time to live therefore records which ticks it has
// used at which time. The time is one of three (TtlClock): the number of steps, the time that
// passes (SystemTime), or a time that the user takes from the data. A row expires when its age, now
// minus the time of its last update (or last access), reaches the time to live. Because ticks and
// times both increase, the expired rows have ticks up to some tick, the *horizon*:
//
//   ticks     1 ... 40      41 ... 73     74 ... 90     91 ...
//             horizon ─┐
//   marks     (dropped)│  {until 73, 5}  {until 90, 6}  {until 97, 7}     now = 7, ttl = 3
//                      └─ of the last mark whose time is at most now - ttl
//
// A mark says that rows with ticks up to `until`, and after the mark before it, were used at
// `time`. Times that differ by less than ttl / kMarks share a mark, with the latest of them: a row
// never expires early, and at most ttl / kMarks late. With up to kMarks steps to live, steps are
// exact.
//
// Rows that were loaded without marks are as old as the first mark after it.
//
// A time of the data that is much later than the last one may be a mistake of one event, after
// which nothing would be left of the table. It therefore waits for the next call, which either
// confirms it, or drops it.
//
// With TtlClock::kWall, marks are moments of the boot clock, so that a system's clock that is set
// makes no row older or younger. In files they are times of day, and a mark later than now is read
// as now.
//
// Thread-safe, because calls that share the table's lock record times, too.
#ifndef DYNEMB_TABLE_EXPIRY_H_
#define DYNEMB_TABLE_EXPIRY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "cc/table/system_time.h"
#include "cc/table/table_options.h"
#include "cc/table/types.h"

namespace dynemb {

class Expiry {
 public:
  static constexpr int64_t kMarks = 1024;
  // A time of the data that is later than the last one by more than this many times the time to
  // live is not believed at once.
  static constexpr int64_t kLeap = 4;

  // Takes the options; call it once, first. `system_time` is for TtlClock::kWall.
  void Configure(const TableOptions& options, SystemTime* system_time = &SystemTime::OfProcess());
  // Swaps the marks with another object of the same options.
  void Swap(Expiry* other);

  // Whether rows have a time to live.
  bool active() const { return ttl_ != 0; }
  // Whether nothing expires in a table of `rows` rows.
  bool Spares(uint64_t rows) const { return rows <= min_rows_; }
  // The number of rows that never expire. If it is 0, the number of rows does not matter.
  uint64_t min_rows() const { return min_rows_; }
  bool since_access() const { return since_access_; }

  // A step begins, with this tick. Calls with one tick are one step.
  void Step(Tick tick);
  // Sets the time of TtlClock::kData, at a tick. An earlier time than the last one is ignored. One
  // that is a leap later takes effect with the next call, if that has a similar or a later time;
  // otherwise it is ignored, and that call returns it.
  std::optional<int64_t> SetTime(int64_t time, Tick tick);
  // Records that a batch uses the table at `tick`, and returns the horizon; 0: no row has expired.
  // All calls with one tick that follow each other get the same horizon. `rows` returns the number
  // of rows of the table.
  template <class Rows>
  Tick At(Tick tick, const Rows& rows) {
    if (!active()) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    if (tick != 0 && tick == last_tick_) return last_horizon_;
    Note(tick);
    const Tick horizon = min_rows_ != 0 && Spares(rows()) ? 0 : horizon_;
    if (tick != 0) {
      last_tick_ = tick;
      last_horizon_ = horizon;
    }
    return horizon;
  }

  // The marks as numbers, for files: the horizon, then `until` and `time` of each mark. The last
  // mark is the mark of `tick`, now. Empty if rows have no time to live, or no time is known.
  std::vector<int64_t> Save(Tick tick);
  // Replaces all marks by those that Save returned. False, without a change, if the numbers are not
  // marks in ascending order.
  bool Restore(const std::vector<int64_t>& saved);

 private:
  struct Mark {
    Tick until;
    int64_t first;  // the time at which the mark began
    int64_t time;
  };
  // Requires mutex_, like AddMark. Does not throw: it is called while threads find rows. If there
  // is no memory for a mark, the last one is extended, so that rows expire later.
  void Note(Tick tick);
  bool AddMark(Tick tick);

  std::mutex mutex_;
  int64_t ttl_ = 0;
  TtlClock clock_ = TtlClock::kSteps;
  bool since_access_ = false;
  uint64_t min_rows_ = 0;
  SystemTime* system_time_ = nullptr;
  bool has_time_ = true;  // false: TtlClock::kData, and SetTime was not called
  int64_t time_ = 0;
  std::optional<int64_t> waiting_;  // a time that is a leap later than time_
  Tick last_step_ = 0;
  Tick horizon_ = 0;
  Tick last_tick_ = 0, last_horizon_ = 0;
  std::deque<Mark> marks_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_EXPIRY_H_
