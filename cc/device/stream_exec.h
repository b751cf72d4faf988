// StreamExec: the Exec of an operator whose tensors are on a GPU. It represents the operator's
// stream, which CudaDevice::StreamOf returns. Host work runs on the calling thread. This header
// needs no header of CUDA.
#ifndef DYNEMB_DEVICE_STREAM_EXEC_H_
#define DYNEMB_DEVICE_STREAM_EXEC_H_

#include <cstddef>

#include "cc/table/exec.h"

struct CUstream_st;  // *CUstream_st is CUDA's cudaStream_t

namespace dynemb {

class StreamExec final : public Exec {
 public:
  // The stream must live as long as work is given to it.
  explicit StreamExec(CUstream_st* stream) : stream_(stream) {}

  CUstream_st* stream() const { return stream_; }
  size_t parallelism() const override { return 1; }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override {
    serial_.ParallelFor(n, grain, fn);
  }

 private:
  CUstream_st* const stream_;
  SerialExec serial_;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_STREAM_EXEC_H_
