#include "cc/tf/place.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/device/simulated_place.h"
#include "cc/device/stream_exec.h"
#include "cc/tf/table_resource.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "xla/stream_executor/stream.h"

#if DYNEMB_TENSORFLOW_MINOR != 19  // whose headers lack a file that this one includes
#include "xla/stream_executor/stream_executor.h"
#endif

#if defined(DYNEMB_CUDA)
#include "cc/device/cuda_exchange.h"
#include "cc/device/cuda_table.h"
#endif

namespace dynemb {
namespace {

#if DYNEMB_TENSORFLOW_MINOR >= 21
using DeviceAddress = stream_executor::DeviceAddressBase;
#else
using DeviceAddress = stream_executor::DeviceMemoryBase;
#endif

bool DeviceIsSimulated() {
  const char* const value = std::getenv("TF_DYNEMB_SIMULATED_DEVICE");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

absl::Status MakeCpuTable(tf::OpKernelContext* ctx, const TableOptions& options,
                          std::unique_ptr<Table>* table, Lookups** lookups) {
  if (options.tier == Tier::kHost) {
    PoolExec exec = MakeHostExec(ctx);
    *lookups = &HostLookups();
    return ToAbsl(Table::Create(options, table, &exec));
  }
  if (!DeviceIsSimulated()) {
    return absl::FailedPreconditionError(absl::StrCat("table '", options.name,
                                                      "' has its rows in a GPU's memory, but ",
                                                      ctx->device()->name(), " is not a GPU"));
  }
  *lookups = &SimulatedLookups();
  return ToAbsl(MakeSimulatedTable(options, table));
}

stream_executor::Stream* StreamOf(tf::OpKernelContext* ctx) {
  return ctx->op_device_context()->stream();
}

#if defined(DYNEMB_CUDA)

// The number that CUDA gives the GPU.
int OrdinalOf(tf::OpKernelContext* ctx) {
#if DYNEMB_TENSORFLOW_MINOR == 19
  return ctx->device()->tensorflow_accelerator_device_info()->gpu_id;
#else
  return StreamOf(ctx)->parent()->device_ordinal();
#endif
}

absl::Status MakeGpuTable(tf::OpKernelContext* ctx, const TableOptions& options,
                          std::unique_ptr<Table>* table, Lookups** lookups) {
  if (options.tier == Tier::kHost) {
    return absl::InvalidArgumentError(absl::StrCat("table '", options.name,
                                                   "' has its rows in the host's memory, but ",
                                                   ctx->device()->name(), " is not a CPU"));
  }
  const int ordinal = OrdinalOf(ctx);
  DYNEMB_RETURN_IF_LIBRARY_ERROR(CudaLookups(ordinal, lookups));
  return ToAbsl(MakeCudaTable(options, ordinal, table));
}

absl::Status GetGpuLookups(tf::OpKernelContext* ctx, Lookups** lookups) {
  return ToAbsl(CudaLookups(OrdinalOf(ctx), lookups));
}

absl::Status GetGpuExchange(tf::OpKernelContext* ctx, Exchange** exchange) {
  return ToAbsl(CudaExchange(OrdinalOf(ctx), exchange));
}

#else

// Not reached: no kernel is registered for a GPU.
absl::Status WithoutCuda() { return absl::InternalError("this library was built without CUDA"); }

absl::Status MakeGpuTable(tf::OpKernelContext*, const TableOptions&, std::unique_ptr<Table>*,
                          Lookups**) {
  return WithoutCuda();
}

absl::Status GetGpuLookups(tf::OpKernelContext*, Lookups**) { return WithoutCuda(); }

absl::Status GetGpuExchange(tf::OpKernelContext*, Exchange**) { return WithoutCuda(); }

#endif

}  // namespace

// Only devices with streams have accelerator information.
bool OnGpu(tf::OpKernelContext* ctx) {
  return ctx->device()->tensorflow_accelerator_device_info() != nullptr;
}

std::unique_ptr<Exec> MakeExec(tf::OpKernelContext* ctx) {
  if (!OnGpu(ctx)) return std::make_unique<PoolExec>(MakeHostExec(ctx));
  return std::make_unique<StreamExec>(
      static_cast<CUstream_st*>(StreamOf(ctx)->platform_specific_handle().stream));
}

PoolExec MakeHostExec(tf::OpKernelContext* ctx) {
  const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
  const auto helpers = static_cast<size_t>(std::max(0, workers->num_threads - 1));
  return PoolExec(
      [pool = workers->workers](std::function<void()> fn) { pool->Schedule(std::move(fn)); },
      helpers);
}

absl::Status MakeTable(tf::OpKernelContext* ctx, const TableOptions& options,
                       std::unique_ptr<Table>* table, Lookups** lookups) {
  return OnGpu(ctx) ? MakeGpuTable(ctx, options, table, lookups)
                    : MakeCpuTable(ctx, options, table, lookups);
}

absl::Status GetLookups(tf::OpKernelContext* ctx, Lookups** lookups) {
  if (OnGpu(ctx)) return GetGpuLookups(ctx, lookups);
  *lookups = DeviceIsSimulated() ? &SimulatedLookups() : &HostLookups();
  return absl::OkStatus();
}

absl::Status GetExchange(tf::OpKernelContext* ctx, Exchange** exchange) {
  if (OnGpu(ctx)) return GetGpuExchange(ctx, exchange);
  *exchange = DeviceIsSimulated() ? &SimulatedExchange() : &HostExchange();
  return absl::OkStatus();
}

absl::Status CopyToHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to) {
  if (bytes == 0) return absl::OkStatus();
  if (!OnGpu(ctx)) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  const DeviceAddress device(const_cast<void*>(from), bytes);
  TF_RETURN_IF_ERROR(StreamOf(ctx)->Memcpy(to, device, bytes));
  return StreamOf(ctx)->BlockHostUntilDone();
}

absl::Status CopyFromHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to) {
  if (bytes == 0) return absl::OkStatus();
  if (!OnGpu(ctx)) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  DeviceAddress device(to, bytes);
  TF_RETURN_IF_ERROR(StreamOf(ctx)->Memcpy(&device, from, bytes));
  return StreamOf(ctx)->BlockHostUntilDone();
}

}  // namespace dynemb
