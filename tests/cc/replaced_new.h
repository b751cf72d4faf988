// Replaces operator new and delete of a test's binary. Only one source file of a binary may include
// this header, which calls that file's
//
//   void* AllocateForTest(size_t bytes, size_t alignment);   // alignment 1: any; or throws
//
// for memory that std::free frees.
#ifndef DYNEMB_TESTS_CC_REPLACED_NEW_H_
#define DYNEMB_TESTS_CC_REPLACED_NEW_H_

#include <cstddef>
#include <cstdlib>
#include <new>

static void* AllocateForTest(size_t bytes, size_t alignment);

// Not inlined, since the compiler would see malloc's pointer freed by delete and warn.
__attribute__((noinline)) void* operator new(size_t bytes) { return AllocateForTest(bytes, 1); }
__attribute__((noinline)) void* operator new[](size_t bytes) { return AllocateForTest(bytes, 1); }
__attribute__((noinline)) void* operator new(size_t bytes, std::align_val_t alignment) {
  return AllocateForTest(bytes, static_cast<size_t>(alignment));
}
__attribute__((noinline)) void* operator new[](size_t bytes, std::align_val_t alignment) {
  return AllocateForTest(bytes, static_cast<size_t>(alignment));
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete[](void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete[](void* p, size_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete[](void* p, std::align_val_t) noexcept {
  std::free(p);
}
__attribute__((noinline)) void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}
__attribute__((noinline)) void operator delete[](void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

#endif  // DYNEMB_TESTS_CC_REPLACED_NEW_H_
