// What a CudaDevice keeps for each stream; for the sources of CudaDevice only.
#ifndef DYNEMB_DEVICE_CUDA_STREAM_STATE_H_
#define DYNEMB_DEVICE_CUDA_STREAM_STATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

#include "cc/device/cuda_device.h"
#include "cc/table/status.h"

namespace dynemb {

struct CudaDevice::StreamState {
  // Held by a session as long as it lives; it guards everything here.
  std::mutex mutex;
  Stream stream = nullptr;
  // Whether making this worked.
  Status status;

  Range workspace;
  // The sessions that use pinned memory take these in turns, so that one need not wait for the work
  // of the one before it: the host may be so many of them ahead.
  struct Pinned {
    HostRange memory;
    cudaEvent_t done = nullptr;  // after the last work with it,
    bool busy = false;           // if that may still be under way
  };
  Pinned pinned[8];
  size_t next_pinned = 0;

  // For After: recorded on the other stream. A wait for an event is for what it recorded last when
  // the wait was given, so one event serves all.
  cudaEvent_t other = nullptr;
  // The ClearMemory that this stream waits for, or has waited for.
  uint64_t times_cleared = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_STREAM_STATE_H_
