// A stand-in for CUDA's runtime library and driver: the functions that cc/device/cuda_*.cc call,
// in host memory. With it, the host code of CudaDevice runs without a GPU, also under sanitizers.
//
// It is stricter than CUDA, and as late as CUDA may be:
//
// - There are two GPUs, and a thread without a context uses GPU 0. Tests use GPU 1, so that a call
//   without its context fails.
// - Work runs when somebody waits for it, and not before. A buffer that is freed or changed too
//   early is seen.
// - Device memory can only be accessed by work. It is full of garbage when it is created.
// - Memory is created, mapped and unmapped in units of kGranularity. A mapping is unmapped as a
//   whole; addresses with mappings cannot be freed.
// - A copy must not extend from one registration of host memory into the next.
// - A destroyed stream's work still runs. A later stream gets its handle.
//
// Kernels are FakeKernels, which run their bodies on the host (fake_kernels.h).
#ifndef DYNEMB_TESTS_FAKE_CUDA_FAKE_CUDA_H_
#define DYNEMB_TESTS_FAKE_CUDA_FAKE_CUDA_H_

#include <cstddef>
#include <cstdint>

namespace dynemb::fake_cuda {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kMemory = size_t{128} << 20;  // of each GPU
constexpr int kMultiprocessors = 4;

// The `kernel` of cudaLaunchKernel: run(n, body) does all of its work.
struct FakeKernel {
  size_t body_bytes;
  void (*run)(size_t n, const void* body);
};

// The number of calls of the stand-in that failed because the caller broke a rule, since the last
// call of this function. The calls have returned errors, which their callers may have ignored.
uint64_t TakeMisuses();

// The pieces of work that have not run yet.
size_t PendingWork();

}  // namespace dynemb::fake_cuda

#endif  // DYNEMB_TESTS_FAKE_CUDA_FAKE_CUDA_H_
