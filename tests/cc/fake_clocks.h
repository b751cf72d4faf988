// The clocks of a machine, for tests: time passes on both, and the system's clock can be set.
#ifndef DYNEMB_TESTS_CC_FAKE_CLOCKS_H_
#define DYNEMB_TESTS_CC_FAKE_CLOCKS_H_

#include <cstdint>

#include "cc/table/system_time.h"

namespace dynemb {

struct FakeClocks {
  static constexpr int64_t kSecond = SystemTime::kSecond;
  static constexpr int64_t kHour = 3600 * kSecond;
  static constexpr int64_t kDay = 24 * kHour;
  static constexpr int64_t kYear = 365 * kDay;

  explicit FakeClocks(int64_t utc = 1700000000 * kSecond) : utc_ns(utc) {}
  void Pass(int64_t ns) {
    utc_ns += ns;
    boot_ns += ns;
  }
  void Set(int64_t ahead_ns) { utc_ns += ahead_ns; }

  int64_t utc_ns;
  int64_t boot_ns = 77 * kSecond;
  SystemTime time{[this] { return ClockReading{utc_ns, boot_ns}; }};
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_FAKE_CLOCKS_H_
