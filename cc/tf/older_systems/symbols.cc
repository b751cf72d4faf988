// Functions that the compiler's headers call and that systems since glibc 2.28 do not all have.
//
// The operator library of a wheel runs on older systems than it is linked on
// (tools/old_symbols.py). It is linked with these functions instead of the system's. They are
// hidden: no other library uses them. They are in every operator library, so that all tests run
// with them. The wait calls the system's, where there is one.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <exception>
#include <ios>

#define DYNEMB_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// glibc 2.33. Before it, the headers had fstat call another function.
DYNEMB_HIDDEN int fstat(int file, struct stat* found) noexcept {
  return static_cast<int>(syscall(SYS_newfstatat, file, "", found, AT_EMPTY_PATH));
}

// glibc 2.30. Waits of std::condition_variable until a steady time. Before it, libstdc++ waited
// until the system's time, as this does.
DYNEMB_HIDDEN int pthread_cond_clockwait(pthread_cond_t* changed, pthread_mutex_t* mutex,
                                         clockid_t clock, const timespec* end) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto of_system =
      reinterpret_cast<Wait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (of_system != nullptr) return of_system(changed, mutex, clock, end);
  timespec now{}, system_now{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system_now);
  constexpr long kSecond = 1'000'000'000;
  timespec system_end{};
  system_end.tv_sec = system_now.tv_sec + end->tv_sec - now.tv_sec;
  system_end.tv_nsec = system_now.tv_nsec + end->tv_nsec - now.tv_nsec;
  for (; system_end.tv_nsec < 0; --system_end.tv_sec) system_end.tv_nsec += kSecond;
  for (; system_end.tv_nsec >= kSecond; ++system_end.tv_sec) system_end.tv_nsec -= kSecond;
  if (system_end.tv_sec < 0) system_end = {};  // an end long ago
  return pthread_cond_timedwait(changed, mutex, &system_end);
}

// GCC 11: std::exception_ptr::_M_addref() of libstdc++, which copies call. Before it, copies called
// the constructor, which is still there. A copy that is never destroyed holds the reference.
void DynembCopyExceptionPtr(void* to, const void* from) noexcept
    __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
DYNEMB_HIDDEN void DynembAddReference(const void* exception_ptr) noexcept
    __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void DynembAddReference(const void* exception_ptr) noexcept {
  void* copy[sizeof(std::exception_ptr) / sizeof(void*)];
  DynembCopyExceptionPtr(copy, exception_ptr);
}

// GCC 9: std::stringstream(). Before it, the constructor with the mode, which is still there.
void DynembStringStreamOf(void* stream, std::ios_base::openmode mode) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1ESt13_Ios_Openmode");
DYNEMB_HIDDEN void DynembStringStream(void* stream) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void DynembStringStream(void* stream) {
  DynembStringStreamOf(stream, std::ios_base::in | std::ios_base::out);
}

}  // extern "C"
