// SharedMutex: a reader-writer lock that starves no thread. std::shared_mutex leaves the order to
// the platform: glibc's prefers readers, so that a continuous stream of lookups (serving during
// training) starves training. Its other kind prefers writers, so that two threads that train starve
// snapshots.
//
// - A waiting writer goes before readers that come after it.
// - Readers that wait while a writer has the lock go before the next writer, all together.
//
// Like std::shared_mutex, it must not be locked twice by one thread.
#ifndef DYNEMB_TABLE_SHARED_MUTEX_H_
#define DYNEMB_TABLE_SHARED_MUTEX_H_

#include <chrono>
#include <cstdint>
#include <mutex>

#include "cc/table/monotonic.h"

namespace dynemb {

class SharedMutex {
 public:
  SharedMutex() = default;
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;

  void lock() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_writers_;
    writers_.wait(lock, [this] { return IsFree(); });
    --waiting_writers_;
    writing_ = true;
  }
  bool try_lock() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!IsFree()) return false;
    writing_ = true;
    return true;
  }
  void unlock() {
    std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    ++phase_;
    admitted_ = waiting_readers_;
    if (waiting_readers_ != 0) readers_.notify_all();
    if (admitted_ == 0) writers_.notify_one();
  }

  void lock_shared() {
    std::unique_lock<std::mutex> lock(mutex_);
    const Waiting waiting(this);
    readers_.wait(lock, [&] { return waiting.MayRead(); });
    Enter(waiting);
  }
  bool try_lock_shared() {
    std::lock_guard<std::mutex> lock(mutex_);
    const Waiting waiting(this);
    if (waiting.MayRead()) Enter(waiting);
    return waiting.MayRead();
  }
  // Waits for at most `most`; returns whether it got the lock.
  bool try_lock_shared_for(std::chrono::nanoseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    const Waiting waiting(this);
    if (!readers_.wait_for(lock, most, [&] { return waiting.MayRead(); })) return false;
    Enter(waiting);
    return true;
  }
  void unlock_shared() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--reading_ == 0 && admitted_ == 0) writers_.notify_one();
  }

 private:
  // A reader that waits, from its arrival on. Under mutex_.
  class Waiting {
   public:
    explicit Waiting(SharedMutex* of) : of_(*of), phase_(of->phase_) { ++of_.waiting_readers_; }
    ~Waiting() { --of_.waiting_readers_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    // Whether a writer has had the lock since then. The reader is then one of admitted_.
    bool Admitted() const { return phase_ != of_.phase_; }
    bool MayRead() const { return !of_.writing_ && (Admitted() || of_.waiting_writers_ == 0); }

   private:
    SharedMutex& of_;
    const uint64_t phase_;
  };

  bool IsFree() const { return !writing_ && reading_ == 0 && admitted_ == 0; }
  void Enter(const Waiting& waiting) {
    ++reading_;
    if (waiting.Admitted()) --admitted_;
  }

  std::mutex mutex_;
  MonotonicCondition writers_, readers_;
  bool writing_ = false;
  uint64_t reading_ = 0;
  uint64_t waiting_writers_ = 0;
  uint64_t waiting_readers_ = 0;
  uint64_t admitted_ = 0;  // readers that go before the next writer, and have not entered yet
  uint64_t phase_ = 0;     // the number of times that a writer has released the lock
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SHARED_MUTEX_H_
