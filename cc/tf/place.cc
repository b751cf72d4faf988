#include "cc/tf/place.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/file/file_rows.h"
#include "cc/tf/table_resource.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "xla/stream_executor/stream.h"

#if DYNEMB_TENSORFLOW_MINOR != 19  // whose headers lack a file that this one includes
#include "xla/stream_executor/stream_executor.h"
#endif

#if defined(DYNEMB_CUDA)
#include "cc/device/cuda_exchange.h"
#include "cc/device/cuda_table.h"
#include "cc/serving_device/cuda_served.h"
#endif

namespace dynemb {
namespace {

#if DYNEMB_TENSORFLOW_MINOR >= 21
using DeviceAddress = stream_executor::DeviceAddressBase;
#else
using DeviceAddress = stream_executor::DeviceMemoryBase;
#endif

// The cold rows of a table with files.
Status MakeColdRows(const TableOptions& options, std::unique_ptr<ColdRows>* cold) {
  if (options.file_path.empty()) return Status();
  FileOptions files;
  files.folder = options.file_path;
  return FileRows::Create(files, options, cold);
}

absl::Status MakeCpuTable(tf::OpKernelContext* ctx, const TableOptions& options,
                          std::unique_ptr<Table>* table, Lookups** lookups) {
  if (options.tier != Tier::kHost) {
    return absl::FailedPreconditionError(absl::StrCat("table '", options.name,
                                                      "' has its rows in a GPU's memory, but ",
                                                      ctx->device()->name(), " is not a GPU"));
  }
  PoolExec exec = MakeHostExec(ctx);
  *lookups = &HostLookups();
  if (options.file_path.empty()) return ToAbsl(Table::Create(options, table, &exec));
  std::unique_ptr<ColdRows> cold;
  DYNEMB_RETURN_IF_LIBRARY_ERROR(MakeColdRows(options, &cold));
  return ToAbsl(Table::Create(options, std::move(cold), options.max_dram_bytes, table, &exec));
}

// The stream of an operator on a GPU.
absl::Status FindStream(tf::OpKernelContext* ctx, stream_executor::Stream** stream) {
  tf::DeviceContext* const context = ctx->op_device_context();
  *stream = context != nullptr ? context->stream() : nullptr;
  if (*stream != nullptr) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("an operator on ", ctx->device()->name(), " has no stream"));
}

#if defined(DYNEMB_CUDA)

// The number that CUDA gives the GPU.
absl::Status FindOrdinal(tf::OpKernelContext* ctx, int* ordinal) {
#if DYNEMB_TENSORFLOW_MINOR == 19
  *ordinal = ctx->device()->tensorflow_accelerator_device_info()->gpu_id;
#else
  stream_executor::Stream* stream;
  TF_RETURN_IF_ERROR(FindStream(ctx, &stream));
  *ordinal = stream->parent()->device_ordinal();
#endif
  return absl::OkStatus();
}

absl::Status MakeGpuTable(tf::OpKernelContext* ctx, const TableOptions& options,
                          std::unique_ptr<Table>* table, Lookups** lookups) {
  if (options.tier == Tier::kHost) {
    return absl::InvalidArgumentError(absl::StrCat("table '", options.name,
                                                   "' has its rows in the host's memory, but ",
                                                   ctx->device()->name(), " is not a CPU"));
  }
  int ordinal;
  TF_RETURN_IF_ERROR(FindOrdinal(ctx, &ordinal));
  DYNEMB_RETURN_IF_LIBRARY_ERROR(CudaLookups(ordinal, lookups));
  std::unique_ptr<ColdRows> cold;
  DYNEMB_RETURN_IF_LIBRARY_ERROR(MakeColdRows(options, &cold));
  return ToAbsl(MakeCudaTable(options, ordinal, table, std::move(cold)));
}

absl::Status GetGpuLookups(tf::OpKernelContext* ctx, Lookups** lookups) {
  int ordinal;
  TF_RETURN_IF_ERROR(FindOrdinal(ctx, &ordinal));
  return ToAbsl(CudaLookups(ordinal, lookups));
}

absl::Status GetGpuExchange(tf::OpKernelContext* ctx, Exchange** exchange) {
  int ordinal;
  TF_RETURN_IF_ERROR(FindOrdinal(ctx, &ordinal));
  return ToAbsl(CudaExchange(ordinal, exchange));
}

absl::Status GetGpuServedPlace(tf::OpKernelContext* ctx, ServedPlace** place) {
  int ordinal;
  TF_RETURN_IF_ERROR(FindOrdinal(ctx, &ordinal));
  return ToAbsl(CudaServedPlace(ordinal, place));
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

absl::Status GetGpuServedPlace(tf::OpKernelContext*, ServedPlace**) { return WithoutCuda(); }

#endif

}  // namespace

// Only devices with streams have accelerator information.
bool OnGpu(tf::OpKernelContext* ctx) {
  return ctx->device()->tensorflow_accelerator_device_info() != nullptr;
}

absl::Status MakeExec(tf::OpKernelContext* ctx, std::unique_ptr<Exec>* exec) {
  if (!OnGpu(ctx)) {
    *exec = std::make_unique<PoolExec>(MakeHostExec(ctx));
    return absl::OkStatus();
  }
  stream_executor::Stream* stream;
  TF_RETURN_IF_ERROR(FindStream(ctx, &stream));
  return ToAbsl(
      ExecOfStream(static_cast<CUstream_st*>(stream->platform_specific_handle().stream), exec));
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
  *lookups = &HostLookups();
  return absl::OkStatus();
}

absl::Status GetExchange(tf::OpKernelContext* ctx, Exchange** exchange) {
  if (OnGpu(ctx)) return GetGpuExchange(ctx, exchange);
  *exchange = &HostExchange();
  return absl::OkStatus();
}

absl::Status GetServedPlace(tf::OpKernelContext* ctx, ServedPlace** place) {
  *place = nullptr;
  return OnGpu(ctx) ? GetGpuServedPlace(ctx, place) : absl::OkStatus();
}

absl::Status CopyToHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to) {
  if (bytes == 0) return absl::OkStatus();
  if (!OnGpu(ctx)) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  stream_executor::Stream* stream;
  TF_RETURN_IF_ERROR(FindStream(ctx, &stream));
  const DeviceAddress device(const_cast<void*>(from), bytes);
  TF_RETURN_IF_ERROR(stream->Memcpy(to, device, bytes));
  return stream->BlockHostUntilDone();
}

absl::Status CopyFromHost(tf::OpKernelContext* ctx, const void* from, size_t bytes, void* to) {
  if (bytes == 0) return absl::OkStatus();
  if (!OnGpu(ctx)) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  stream_executor::Stream* stream;
  TF_RETURN_IF_ERROR(FindStream(ctx, &stream));
  DeviceAddress device(to, bytes);
  TF_RETURN_IF_ERROR(stream->Memcpy(&device, from, bytes));
  return stream->BlockHostUntilDone();
}

}  // namespace dynemb
