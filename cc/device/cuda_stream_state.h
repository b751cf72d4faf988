// CudaDevice::StreamState: the data of a CudaDevice per stream. Only the sources of CudaDevice
// include this header.
#ifndef DYNEMB_DEVICE_CUDA_STREAM_STATE_H_
#define DYNEMB_DEVICE_CUDA_STREAM_STATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

#include "cc/device/cuda_device.h"
#include "cc/table/status.h"

namespace dynemb {

struct CudaDevice::StreamState {
  // Held by a session during its life; it protects all members except `published`.
  std::mutex mutex;
  // Used by its own sessions only: at other times it may have been destroyed.
  Stream stream = nullptr;
  // CUDA's number of the stream. A later stream may have the same handle, but not the same number.
  unsigned long long number = 0;
  // An error if creating this failed.
  Status status;

  Range workspace;
  // Sessions that use pinned memory take these in turns, so that a session need not wait for the
  // work of the previous one: the host may be eight such sessions ahead.
  struct Pinned {
    HostRange memory;
    cudaEvent_t done = nullptr;  // follows the last work that uses the memory
    bool busy = false;           // whether that work may still be running
  };
  Pinned pinned[8];
  size_t next_pinned = 0;

  // For Publish in sessions without pinned memory.
  cudaEvent_t done = nullptr;
  // The event that was recorded last: `done`, or a Pinned's event. It follows all published work. A
  // wait for an event refers to its latest record at the time of the call, which may be later.
  cudaEvent_t published = nullptr;
  // The number of the last ClearMemory that this stream waits for, or has waited for.
  uint64_t times_cleared = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_STREAM_STATE_H_
