// SystemTime: the time of day, from a clock that may be wrong for a while.
//
// The system's clock can be set: by a time server, by hand, after a virtual machine was paused. The
// boot clock only runs on, while the machine is suspended too, but each start of the machine begins
// at 0. The rule:
//
//   Within a process, time passes as the boot clock does. The time of day is the boot clock plus
//   the offset of the system's clock from it that was seen for longest.
//
// A clock that was set is therefore believed once it has been there for longer than the one before
// (at most kProof), and steps of less than kJump are believed at once. Ages of rows are differences
// of the boot clock, which no setting changes; only files have times of day. There is no clock to
// check a file's time against, except that it cannot be later than now.
//
// Thread-safe.
#ifndef DYNEMB_TABLE_SYSTEM_TIME_H_
#define DYNEMB_TABLE_SYSTEM_TIME_H_

#include <cstdint>
#include <functional>
#include <mutex>

namespace dynemb {

// The times of the two clocks.
struct ClockReading {
  int64_t utc_ns;   // the system's clock: nanoseconds since 1970-01-01 UTC
  int64_t boot_ns;  // CLOCK_BOOTTIME
};

class SystemTime {
 public:
  static constexpr int64_t kSecond = 1000000000;
  // A clock that is set by more than this has jumped.
  static constexpr int64_t kJump = 60 * kSecond;
  // An offset is believed for at least kJump, and no longer than this after the clock was set.
  static constexpr int64_t kProof = 24 * 3600 * kSecond;

  using Read = std::function<ClockReading()>;
  SystemTime();  // reads the machine's clocks
  explicit SystemTime(Read read) : read_(std::move(read)) {}
  SystemTime(const SystemTime&) = delete;
  SystemTime& operator=(const SystemTime&) = delete;

  // The one that the tables of this process share. Never destroyed.
  static SystemTime& OfProcess();

  struct Moment {
    int64_t boot_ns;   // never decreases
    int64_t utc_ns;    // the time of day; decreases only if a clock that was set is believed
    int64_t shown_ns;  // what the system's clock shows
  };
  // Reads the clocks.
  Moment Now();
  // The time of day of an earlier moment, by what is believed now: shown_ns, if the system's clock
  // was right then.
  int64_t UtcOf(int64_t boot_ns, int64_t shown_ns);

  // Says that a file has this time of day; a time later than now is a jump.
  void SawInFile(int64_t utc_ns);
  struct Jumps {
    uint64_t count = 0;
    int64_t last_ns = 0;  // positive: the clock was set ahead
  };
  // The jumps that Now and SawInFile have seen.
  Jumps jumps();

 private:
  Moment NowLocked();  // requires mutex_
  static bool Agree(int64_t a, int64_t b) { return a - b <= kJump && b - a <= kJump; }

  const Read read_;
  std::mutex mutex_;
  bool has_read_ = false;
  int64_t boot_ = 0;          // at the last reading
  int64_t shown_offset_ = 0;  // of the system's clock from the boot clock, at the last reading
  int64_t offset_ = 0;        // the one that is believed
  int64_t proof_ = kJump;     // for how much longer it was seen than others
  int64_t utc_ = INT64_MIN;   // the last time of day since offset_ was believed
  Jumps jumps_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SYSTEM_TIME_H_
