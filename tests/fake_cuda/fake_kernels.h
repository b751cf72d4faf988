// CudaDevice's ForEach, ForKeys and ForRows on the stand-in for CUDA, in place of cuda_device.cuh.
#ifndef DYNEMB_TESTS_FAKE_CUDA_FAKE_KERNELS_H_
#define DYNEMB_TESTS_FAKE_CUDA_FAKE_KERNELS_H_

#include <algorithm>
#include <cstddef>

#include "cc/device/cuda_algorithms.h"
#include "cc/device/cuda_device.h"
#include "cc/device/device.h"
#include "cc/device/thread_lane.h"
#include "cc/table/exec.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/simulated/lanes_lockstep.h"

namespace dynemb {
namespace fake_cuda {

template <class Body>
size_t ItemsOf(size_t n, const Body& body) {
  if constexpr (device::kHasItems<Body>) n = std::min(n, body.Items());
  return n;
}

template <class Body>
void RunEach(size_t n, const void* of) {
  const Body& body = *static_cast<const Body*>(of);
  n = ItemsOf(n, body);
  for (size_t i = 0; i < n; ++i) body(i);
}

template <class Lanes, class Body>
void RunTeams(size_t n, const void* of) {
  const Body& body = *static_cast<const Body*>(of);
  SerialExec exec;
  Lanes::Launch(exec, ItemsOf(n, body), 8, [&](Lanes& lanes, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) body(lanes, i);
  });
}

template <class Body, void (*kRun)(size_t, const void*)>
inline constexpr FakeKernel kKernel{sizeof(Body), kRun};

}  // namespace fake_cuda

template <class Body>
void CudaDevice::Session::ForEach(size_t n, const Body& body) {
  if (n == 0) return;
  void* arguments[] = {&n, const_cast<Body*>(&body)};
  Launch("ForEach", &fake_cuda::kKernel<Body, fake_cuda::RunEach<Body>>, n, kCudaThreadsPerBlock,
         arguments);
}

template <class Body>
void CudaDevice::Session::ForKeys(size_t n, const Body& body) {
  if (n == 0) return;
  void* arguments[] = {&n, const_cast<Body*>(&body)};
  Launch("ForKeys", &fake_cuda::kKernel<Body, fake_cuda::RunTeams<ThreadLane, Body>>, n,
         kCudaThreadsPerBlock, arguments);
}

template <class Body>
void CudaDevice::Session::ForRows(size_t n, size_t quads, const Body& body) {
  if (n == 0) return;
  const uint32_t width = RowWidth(quads);
  void* arguments[] = {&n, const_cast<Body*>(&body)};
  const auto launch = [&](const fake_cuda::FakeKernel& kernel) {
    Launch("ForRows", &kernel, n * width, kCudaThreadsPerRowBlock, arguments);
  };
  using fake_cuda::kKernel;
  using fake_cuda::RunTeams;
  switch (width) {
    case 4:
      return launch(kKernel<Body, RunTeams<LockstepLanes<4>, Body>>);
    case 8:
      return launch(kKernel<Body, RunTeams<LockstepLanes<8>, Body>>);
    case 16:
      return launch(kKernel<Body, RunTeams<LockstepLanes<16>, Body>>);
    default:
      return launch(kKernel<Body, RunTeams<LockstepLanes<32>, Body>>);
  }
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_FAKE_CUDA_FAKE_KERNELS_H_
