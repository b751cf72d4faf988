// The CUDA kernels of CudaDevice's sessions: loops over bodies (device.h). Every source that gives
// a body to a CudaDevice includes this header, and is compiled by nvcc. A body becomes one CUDA
// kernel; a body of ForRows, one per width of its teams.
//
// If DYNEMB_CUDA_STAND_IN names a header, that has the loops instead, and the host's compiler
// compiles the sources (tests/fake_cuda).
#ifndef DYNEMB_DEVICE_CUDA_DEVICE_CUH_
#define DYNEMB_DEVICE_CUDA_DEVICE_CUH_

#ifdef DYNEMB_CUDA_STAND_IN
#include DYNEMB_CUDA_STAND_IN
#else

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "cc/device/cuda_algorithms.h"
#include "cc/device/cuda_device.h"
#include "cc/device/device.h"
#include "cc/device/thread_lane.h"
#include "cc/table/lanes_cuda.cuh"

namespace dynemb {
namespace internal_cuda_device {

__device__ inline size_t Thread() {
  return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline size_t NumThreads() { return static_cast<size_t>(gridDim.x) * blockDim.x; }

// How many blocks a multiprocessor must have room for, if a body of ForRows says so; otherwise 0.
template <class Body, class = void>
constexpr unsigned int kLeastBlocks = 0;
template <class Body>
constexpr unsigned int kLeastBlocks<Body, std::void_t<decltype(Body::kLeastBlocks)>> =
    Body::kLeastBlocks;

template <class Body>
__device__ inline size_t Items(size_t n, const Body& body) {
  const size_t items = body.Items();
  return items < n ? items : n;
}

template <class Body>
__global__ void __launch_bounds__(kCudaThreadsPerBlock) EachKernel(size_t n, Body body) {
  if constexpr (device::kHasItems<Body>) n = Items(n, body);
  for (size_t i = Thread(); i < n; i += NumThreads()) body(i);
}

template <class Body>
__global__ void __launch_bounds__(kCudaThreadsPerBlock) KeysKernel(size_t n, Body body) {
  if constexpr (device::kHasItems<Body>) n = Items(n, body);
  ThreadLane lane;
  for (size_t i = Thread(); i < n; i += NumThreads()) body(lane, i);
}

template <uint32_t W, class Body>
__device__ inline void RunRows(size_t n, const Body& body) {
  if constexpr (device::kHasItems<Body>) n = Items(n, body);
  CudaTile<W> lanes(
      cooperative_groups::tiled_partition<W>(cooperative_groups::this_thread_block()));
  for (size_t i = Thread() / W; i < n; i += NumThreads() / W) body(lanes, i);
}

template <uint32_t W, class Body>
__global__ void __launch_bounds__(kCudaThreadsPerRowBlock) RowsKernel(size_t n, Body body) {
  RunRows<W>(n, body);
}

// The same for a body with kLeastBlocks. (To the compiler, no number is not the same as 1.)
template <uint32_t W, class Body>
__global__ void __launch_bounds__(kCudaThreadsPerRowBlock, Body::kLeastBlocks)
    ManyRowsKernel(size_t n, Body body) {
  RunRows<W>(n, body);
}

template <uint32_t W, class Body>
auto* RowsKernelOf() {
  if constexpr (kLeastBlocks<Body> != 0) {
    return &ManyRowsKernel<W, Body>;
  } else {
    return &RowsKernel<W, Body>;
  }
}

template <class Body>
constexpr bool IsBody() {
  static_assert(std::is_trivially_copyable_v<Body>, "a body is copied as bytes");
  static_assert(sizeof(Body) <= 4000, "a body is an argument of the launch, at most 4 KiB");
  return true;
}

}  // namespace internal_cuda_device

template <class Body>
void CudaDevice::Session::ForEach(size_t n, const Body& body) {
  static_assert(internal_cuda_device::IsBody<Body>());
  if (n == 0) return;
  void* arguments[] = {&n, const_cast<Body*>(&body)};
  Launch("ForEach", reinterpret_cast<const void*>(&internal_cuda_device::EachKernel<Body>), n,
         kCudaThreadsPerBlock, arguments);
}

template <class Body>
void CudaDevice::Session::ForKeys(size_t n, const Body& body) {
  static_assert(internal_cuda_device::IsBody<Body>());
  if (n == 0) return;
  void* arguments[] = {&n, const_cast<Body*>(&body)};
  Launch("ForKeys", reinterpret_cast<const void*>(&internal_cuda_device::KeysKernel<Body>), n,
         kCudaThreadsPerBlock, arguments);
}

template <class Body>
void CudaDevice::Session::ForRows(size_t n, size_t quads, const Body& body) {
  static_assert(internal_cuda_device::IsBody<Body>());
  if (n == 0) return;
  const uint32_t width = RowWidth(quads);
  void* arguments[] = {&n, const_cast<Body*>(&body)};
  const auto launch = [&](void (*kernel)(size_t, Body)) {
    Launch("ForRows", reinterpret_cast<const void*>(kernel), n * width, kCudaThreadsPerRowBlock,
           arguments);
  };
  switch (width) {
    case 4:
      return launch(internal_cuda_device::RowsKernelOf<4, Body>());
    case 8:
      return launch(internal_cuda_device::RowsKernelOf<8, Body>());
    case 16:
      return launch(internal_cuda_device::RowsKernelOf<16, Body>());
    default:
      return launch(internal_cuda_device::RowsKernelOf<32, Body>());
  }
}

}  // namespace dynemb

#endif  // DYNEMB_CUDA_STAND_IN

#endif  // DYNEMB_DEVICE_CUDA_DEVICE_CUH_
