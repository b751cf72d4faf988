// StreamExec: the Exec of an operator whose tensors are on a GPU. It represents the operator's
// stream, which CudaDevice::StreamOf returns. Host work runs on the calling thread. This header
// needs no header of CUDA.
#ifndef DYNEMB_DEVICE_STREAM_EXEC_H_
#define DYNEMB_DEVICE_STREAM_EXEC_H_

#include <cstddef>
#include <memory>

#include "cc/table/exec.h"
#include "cc/table/status.h"

struct CUstream_st;  // *CUstream_st is CUDA's cudaStream_t

namespace dynemb {

class StreamExec final : public Exec {
 public:
  // Internal for a null stream. To a CudaDevice null is its own stream, for which the operators of
  // other streams do not wait.
  static Status Make(CUstream_st* stream, std::unique_ptr<Exec>* exec) {
    if (stream == nullptr) return Internal("an operator on a GPU has no stream");
    *exec = std::make_unique<StreamExec>(stream);
    return Status();
  }
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
