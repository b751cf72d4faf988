// SharedMutex: a reader-writer lock in which a waiting writer goes before new readers. A continuous
// stream of lookups (serving during training) therefore cannot starve training. std::shared_mutex
// leaves the order to the platform, and glibc's prefers readers.
//
// Like std::shared_mutex, it must not be locked twice by one thread.
#ifndef DYNEMB_TABLE_SHARED_MUTEX_H_
#define DYNEMB_TABLE_SHARED_MUTEX_H_

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <cstdint>

namespace dynemb {

class SharedMutex {
 public:
  SharedMutex() {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
#if defined(__GLIBC__)
    // The only kind in glibc that really prefers writers.
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    pthread_rwlock_init(&lock_, &attributes);
    pthread_rwlockattr_destroy(&attributes);
  }
  ~SharedMutex() { pthread_rwlock_destroy(&lock_); }
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;

  void lock() { pthread_rwlock_wrlock(&lock_); }
  bool try_lock() { return pthread_rwlock_trywrlock(&lock_) == 0; }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  bool try_lock_shared() { return pthread_rwlock_tryrdlock(&lock_) == 0; }
  // Waits for at most `most`; returns whether it got the lock.
  bool try_lock_shared_for(std::chrono::nanoseconds most) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t ns = until.tv_nsec + most.count();
    until.tv_sec += static_cast<time_t>(ns / 1000000000);
    until.tv_nsec = static_cast<long>(ns % 1000000000);
    return pthread_rwlock_timedrdlock(&lock_, &until) == 0;
  }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SHARED_MUTEX_H_
