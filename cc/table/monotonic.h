// MonotonicCondition: a condition variable whose timed waits use the monotonic clock, so that they
// neither end early nor last long if the system's time is set meanwhile.
//
// std::condition_variable does so only with glibc 2.30 and newer (pthread_cond_clockwait). With
// older ones, for which wheels are built, wait_for and wait_until use the system's time. This class
// asks for the clock when the variable is created (pthread_condattr_setclock), which any glibc can.
//
// It has the calls of std::condition_variable that take a condition.
#ifndef DYNEMB_TABLE_MONOTONIC_H_
#define DYNEMB_TABLE_MONOTONIC_H_

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <mutex>
#include <system_error>

namespace dynemb {

class MonotonicCondition {
 public:
  // Throws std::system_error if the system has no memory for it.
  MonotonicCondition() {
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error == 0) {
      error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
      if (error == 0) error = pthread_cond_init(&condition_, &attributes);
      pthread_condattr_destroy(&attributes);
    }
    if (error != 0) throw std::system_error(error, std::generic_category(), "condition variable");
  }
  ~MonotonicCondition() { pthread_cond_destroy(&condition_); }
  MonotonicCondition(const MonotonicCondition&) = delete;
  MonotonicCondition& operator=(const MonotonicCondition&) = delete;

  void notify_one() noexcept { pthread_cond_signal(&condition_); }
  void notify_all() noexcept { pthread_cond_broadcast(&condition_); }

  // Waits until `done()`, which is called with the lock held.
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, const Done& done) {
    while (!done()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }
  // Waits for at most `most`; returns done(). A time longer than a year is a year.
  template <class Rep, class Period, class Done>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::duration<Rep, Period> most,
                const Done& done) {
    using std::chrono::nanoseconds;
    constexpr std::chrono::hours kMost{24 * 365};
    // Compared as doubles: nanoseconds of long times do not fit in integers.
    const bool is_long = std::chrono::duration<double>(most) > std::chrono::duration<double>(kMost);
    nanoseconds rest = is_long ? nanoseconds(kMost) : std::chrono::ceil<nanoseconds>(most);
    rest = std::max(rest, nanoseconds(0));
    constexpr long kSecond = 1000000000;  // NOLINT: the type of tv_nsec
    timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += static_cast<time_t>(rest.count() / kSecond);
    until.tv_nsec += static_cast<long>(rest.count() % kSecond);  // NOLINT
    if (until.tv_nsec >= kSecond) {
      until.tv_nsec -= kSecond;
      ++until.tv_sec;
    }
    while (!done()) {
      // 0, or ETIMEDOUT; any other error means a wrong call, and must not become a busy loop.
      if (pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &until) != 0) {
        return done();
      }
    }
    return true;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_MONOTONIC_H_
