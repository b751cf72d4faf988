#include "cc/table/system_time.h"

#include <algorithm>
#include <ctime>

namespace dynemb {
namespace {

int64_t Nanoseconds(clockid_t clock) {
  timespec time{};
  // The clock of suspended machines may be missing: it is younger than the others.
  if (clock_gettime(clock, &time) != 0) clock_gettime(CLOCK_MONOTONIC, &time);
  // Until the year 2255, so that times and their differences are numbers of 64 bits.
  constexpr int64_t kMost = 9000000000;
  const int64_t seconds = std::min(std::max<int64_t>(time.tv_sec, 0), kMost);
  return seconds * SystemTime::kSecond + time.tv_nsec;
}

// The thread, or the machine, may be suspended between the two: that is no jump.
ClockReading ReadClocks() {
  ClockReading reading{};
  for (int attempt = 0; attempt < 10; ++attempt) {
    reading.boot_ns = Nanoseconds(CLOCK_BOOTTIME);
    reading.utc_ns = Nanoseconds(CLOCK_REALTIME);
    if (Nanoseconds(CLOCK_BOOTTIME) - reading.boot_ns < SystemTime::kSecond / 1000) break;
  }
  return reading;
}

}  // namespace

SystemTime::SystemTime() : read_(ReadClocks) {}

SystemTime& SystemTime::OfProcess() {
  static SystemTime* const time = new SystemTime;
  return *time;
}

SystemTime::Moment SystemTime::Now() {
  std::lock_guard<std::mutex> lock(mutex_);
  return NowLocked();
}

SystemTime::Moment SystemTime::NowLocked() {
  const ClockReading reading = read_();
  const int64_t boot = has_read_ ? std::max(boot_, reading.boot_ns) : reading.boot_ns;
  const int64_t offset = reading.utc_ns - boot;
  if (!has_read_) {
    has_read_ = true;
    offset_ = offset;
  } else if (!Agree(offset, shown_offset_)) {
    // It is not known how long the clock has been there: this time counts for no offset.
    ++jumps_.count;
    jumps_.last_ns = offset - shown_offset_;
  } else if (Agree(offset, offset_)) {
    proof_ = std::min(proof_ + (boot - boot_), kProof);
  } else if ((proof_ -= boot - boot_) < 0) {
    proof_ = std::min(-proof_, kProof);
    offset_ = offset;
    utc_ = INT64_MIN;
  }
  boot_ = boot;
  shown_offset_ = offset;
  if (Agree(offset, offset_)) offset_ = offset;
  utc_ = std::max(utc_, boot + offset_);
  return {boot, utc_, reading.utc_ns};
}

int64_t SystemTime::UtcOf(int64_t boot_ns, int64_t shown_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  return Agree(shown_ns - boot_ns, offset_) ? shown_ns : boot_ns + offset_;
}

void SystemTime::SawInFile(int64_t utc_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Moment now = NowLocked();
  if (utc_ns <= now.utc_ns || Agree(utc_ns, now.utc_ns)) return;  // the first: no overflow
  ++jumps_.count;
  jumps_.last_ns = now.utc_ns - utc_ns;
}

SystemTime::Jumps SystemTime::jumps() {
  std::lock_guard<std::mutex> lock(mutex_);
  return jumps_;
}

}  // namespace dynemb
