// Symbols that GCC's headers use and that the C and C++ libraries of older systems do not have.
// With these definitions, which no other library sees, the operator library also loads where glibc
// is 2.28 and libstdc++ belongs to GCC 8 (`make wheels`).

#include <new>

#define DYNEMB_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// glibc 2.32: whether the process has only one thread. TensorFlow's have several.
extern DYNEMB_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// GCC 11: called by operator new[] for a length that overflows.
DYNEMB_HIDDEN void dynemb_throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void dynemb_throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GCC 11: std::exception_ptr::_M_release. Older libraries have it inside the destructor, which all
// of them export.
void dynemb_exception_ptr_destructor(void** pointer) __asm__(
    "_ZNSt15__exception_ptr13exception_ptrD1Ev");
DYNEMB_HIDDEN void dynemb_exception_ptr_release(void** pointer) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void dynemb_exception_ptr_release(void** pointer) {
  if (*pointer != nullptr) dynemb_exception_ptr_destructor(pointer);
  *pointer = nullptr;
}

}  // extern "C"
