// Macros that let one source compile for the host and, under nvcc, for the device, and that let one
// wheel serve all x86-64 CPUs.
#ifndef DYNEMB_TABLE_PORTABILITY_H_
#define DYNEMB_TABLE_PORTABILITY_H_

#include <cstdint>  // also defines __GLIBC__

#if defined(__CUDACC__)
#define DYNEMB_HD __host__ __device__
#else
#define DYNEMB_HD
#endif

// Always inlined: a loop over such a function must become one SIMD loop, in each clone of its
// caller.
#if defined(__GNUC__)
#define DYNEMB_INLINE inline __attribute__((always_inline))
#define DYNEMB_RESTRICT __restrict__
#else
#define DYNEMB_INLINE inline
#define DYNEMB_RESTRICT
#endif

// Fetches the cache line of an address. The empty asm is for GCC 12: it takes a function that only
// prefetches for one without effects, and drops its calls.
namespace dynemb {
DYNEMB_INLINE void PrefetchLine(const void* address) {
  __builtin_prefetch(address);
  __asm__ volatile("");
}
}  // namespace dynemb

// Before a loop: asserts that its iterations are independent, even if pointers might alias.
#if defined(__clang__)
#define DYNEMB_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define DYNEMB_IVDEP _Pragma("GCC ivdep")
#else
#define DYNEMB_IVDEP
#endif

// Before a loop with a constant number of iterations, in kernels: unrolls it. The elements of
// arrays that it has the indexes of are then in registers.
#if defined(__CUDA_ARCH__)
#define DYNEMB_UNROLL _Pragma("unroll")
#else
#define DYNEMB_UNROLL
#endif

// After a file's includes: disables fused multiply-add in the rest of the file, whatever flags it
// is built with. Otherwise the clones below would give different bits on different machines. nvcc
// has no such pragma; it needs --fmad=false.
#if defined(__clang__)
#define DYNEMB_NO_CONTRACTION _Pragma("clang fp contract(off)")
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define DYNEMB_NO_CONTRACTION _Pragma("GCC optimize(\"fp-contract=off\")")
#else
#define DYNEMB_NO_CONTRACTION
#endif

// Compiles a function once per instruction set; one of the clones is selected when the library is
// loaded. There is no clone for AVX-512: with it, dim 4 took up to three times longer, and from dim
// 16 on, the best case took a third less time. Clones need ifunc (glibc). Sanitizer runtimes are
// not initialized when ifunc resolvers run, so sanitizer builds use the portable code only.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && defined(__x86_64__) && \
    defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DYNEMB_HAS_CLONES 1
#define DYNEMB_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define DYNEMB_HAS_CLONES 0
#define DYNEMB_CLONES
#endif

#endif  // DYNEMB_TABLE_PORTABILITY_H_
