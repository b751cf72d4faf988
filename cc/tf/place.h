// The place of an operator's tables, which depends on the device that the operator runs on: on a
// CPU it is host memory, on a GPU the memory of the GPU.
#ifndef DYNEMB_TF_PLACE_H_
#define DYNEMB_TF_PLACE_H_

#include <memory>

#include "cc/lookup/exchange.h"
#include "cc/lookup/lookups.h"
#include "cc/serving/served_place.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/table.h"
#include "tensorflow/core/framework/op_kernel.h"

struct CUstream_st;  // *CUstream_st is CUDA's cudaStream_t

namespace dynemb {

namespace tf = tensorflow;

// Whether the operator runs on a GPU. Its tensors are then in the GPU's memory, except those that
// its registration puts in host memory.
bool OnGpu(tf::OpKernelContext* ctx);

// The executor for calls on tables: the stream of a GPU, or TensorFlow's intra-op threads on a CPU.
// Internal if an operator on a GPU has no stream.
absl::Status MakeExec(tf::OpKernelContext* ctx, std::unique_ptr<Exec>* exec);
// The executor for a stream of CUDA; Internal if it is null. The linker puts another function in
// its place for the fake GPU of tests, whose streams are not CUDA's.
Status ExecOfStream(CUstream_st* stream, std::unique_ptr<Exec>* exec);
// TensorFlow's intra-op threads, for work on the host's memory.
PoolExec MakeHostExec(tf::OpKernelContext* ctx);

// Creates a table in the tier that `options` names, and returns the calls over tables in its place.
//
// - On a CPU, Tier::kHost is available; the other tiers are FailedPrecondition.
// - On a GPU, Tier::kHost is an InvalidArgument, and the other tiers are available.
absl::Status MakeTable(tf::OpKernelContext* ctx, const TableOptions& options,
                       std::unique_ptr<Table>* table, Lookups** lookups);

// The place of served tables on the operator's device; null on a CPU.
absl::Status GetServedPlace(tf::OpKernelContext* ctx, ServedPlace** place);

// For operators without a table: the calls over arrays that are where the operator's tensors are.
absl::Status GetLookups(tf::OpKernelContext* ctx, Lookups** lookups);
absl::Status GetExchange(tf::OpKernelContext* ctx, Exchange** exchange);

// Copy between an array on the operator's device and one on the host. They return when it is done.
// Internal if an operator on a GPU has no stream.
absl::Status CopyToHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to);
absl::Status CopyFromHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to);

// Allocates an array on the operator's device, which lives as long as `tensor`.
template <class T>
absl::Status Temporary(tf::OpKernelContext* ctx, int64_t elements, tf::Tensor* tensor, T** data) {
  TF_RETURN_IF_ERROR(
      ctx->allocate_temp(tf::DataTypeToEnum<T>::value, tf::TensorShape({elements}), tensor));
  *data = static_cast<T*>(tensor->data());
  return absl::OkStatus();
}

}  // namespace dynemb

// REGISTER_KERNEL_BUILDER for a GPU if CUDA is built, otherwise nothing.
#if defined(DYNEMB_CUDA)
#define DYNEMB_REGISTER_GPU_KERNEL(builder, kernel) REGISTER_KERNEL_BUILDER(builder, kernel)
#else
#define DYNEMB_REGISTER_GPU_KERNEL(builder, kernel)
#endif

#endif  // DYNEMB_TF_PLACE_H_
