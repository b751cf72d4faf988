// Where the tables of an operator are, by the device that the operator runs on: in the host's
// memory for a CPU, in the GPU's for a GPU.
#ifndef DYNEMB_TF_PLACE_H_
#define DYNEMB_TF_PLACE_H_

#include <memory>

#include "cc/lookup/exchange.h"
#include "cc/lookup/lookups.h"
#include "cc/table/exec.h"
#include "cc/table/table.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace dynemb {

namespace tf = tensorflow;

// Whether the operator runs on a GPU. Its tensors are in the GPU's memory then, but for those that
// its registration names as the host's.
bool OnGpu(tf::OpKernelContext* ctx);

// What calls on tables get: the stream of a GPU, or else TensorFlow's intra-op threads.
std::unique_ptr<Exec> MakeExec(tf::OpKernelContext* ctx);
// TensorFlow's intra-op threads, for work on the host's memory.
PoolExec MakeHostExec(tf::OpKernelContext* ctx);

// A table as options.tier says, and the calls over tables of its place. On a CPU there are tables
// of Tier::kHost, and, if the environment says TF_DYNEMB_SIMULATED_DEVICE=1, the others on a device
// that the host simulates, for tests; else they are FailedPrecondition. On a GPU there are the
// others only.
absl::Status MakeTable(tf::OpKernelContext* ctx, const TableOptions& options,
                       std::unique_ptr<Table>* table, Lookups** lookups);

// For operators without a table: the calls over arrays that are where the operator's tensors are.
absl::Status LookupsOfDevice(tf::OpKernelContext* ctx, Lookups** lookups);
absl::Status ExchangeOfDevice(tf::OpKernelContext* ctx, Exchange** exchange);

// Between an array of the operator's device and one of the host. Returns when it is done.
absl::Status CopyToHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to);
absl::Status CopyFromHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to);

// An array on the operator's device, as long as `tensor`.
template <class T>
absl::Status Temporary(tf::OpKernelContext* ctx, int64_t elements, tf::Tensor* tensor, T** data) {
  TF_RETURN_IF_ERROR(
      ctx->allocate_temp(tf::DataTypeToEnum<T>::value, tf::TensorShape({elements}), tensor));
  *data = static_cast<T*>(tensor->data());
  return absl::OkStatus();
}

}  // namespace dynemb

// REGISTER_KERNEL_BUILDER for a GPU, where CUDA is built.
#if defined(DYNEMB_CUDA)
#define DYNEMB_REGISTER_GPU_KERNEL(builder, kernel) REGISTER_KERNEL_BUILDER(builder, kernel)
#else
#define DYNEMB_REGISTER_GPU_KERNEL(builder, kernel)
#endif

#endif  // DYNEMB_TF_PLACE_H_
