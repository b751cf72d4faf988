#include "cc/device/cuda_device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cc/device/cuda_algorithms.h"
#include "cc/device/cuda_driver.h"
#include "cc/device/cuda_stream_state.h"

namespace dynemb {
namespace {

// The maximal number of blocks of a launch per multiprocessor: four times the number that fits at
// once, so that blocks that finish early make room for others. With more items than threads,
// threads stride over the items.
constexpr size_t kBlocksPerMultiprocessor = 32;

std::string Version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The number of GPUs, or an error that says why there are none.
Status CountDevices(int* count) {
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess && *count > 0) return Status();
  (void)cudaGetLastError();
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaGetLastError();
  if (driver == 0) return FailedPrecondition("no NVIDIA driver: libcuda.so.1 was not found");
  if (error == cudaErrorInsufficientDriver) {
    return FailedPrecondition("the NVIDIA driver is too old: it is for CUDA " + Version(driver) +
                              ", this library for " + Version(CUDART_VERSION));
  }
  if (error == cudaSuccess || error == cudaErrorNoDevice) {
    return FailedPrecondition(
        "no GPU: the NVIDIA driver is installed, but finds none (is CUDA_VISIBLE_DEVICES set?)");
  }
  return CudaError("cudaGetDeviceCount", error);
}

Status Attribute(int ordinal, cudaDeviceAttr attribute, int* value) {
  const cudaError_t error = cudaDeviceGetAttribute(value, attribute, ordinal);
  return error == cudaSuccess ? Status() : CudaError("cudaDeviceGetAttribute", error);
}

}  // namespace

CudaDevice::Stream CudaDevice::StreamOf(Exec& exec) {
  const auto* stream = dynamic_cast<const StreamExec*>(&exec);
  return stream != nullptr ? stream->stream() : nullptr;
}

Status CudaDevice::Get(int ordinal, CudaDevice** device) {
  // Never destroyed: tables may outlive static objects.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, CudaDevice*>;
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = devices->find(ordinal);
  if (found != devices->end()) {
    *device = found->second;
    return Status();
  }
  int count = 0;
  DYNEMB_RETURN_IF_ERROR(CountDevices(&count));
  if (ordinal < 0 || ordinal >= count) {
    return InvalidArgument("there is no GPU " + std::to_string(ordinal) + ": the process sees " +
                           std::to_string(count));
  }
  DYNEMB_RETURN_IF_ERROR(CudaDriver::Load());
  auto* const made = new CudaDevice(ordinal);
  // With cudaSetDevice, the runtime library creates the context that it shares with other
  // libraries. That context replaces the one that is pushed here, and is then popped. If there was
  // no context before, nothing is pushed.
  CUcontext before = nullptr;
  (void)CudaDriver::Get().ctx_get_current(&before);
  (void)CudaDriver::Get().ctx_push_current(before);
  const Status status = made->Init();
  (void)CudaDriver::Get().ctx_pop_current(&before);
  if (!status.ok()) {
    delete made;
    return Status(status.code(), "GPU " + std::to_string(ordinal) + ": " + status.message());
  }
  *device = (*devices)[ordinal] = made;
  return Status();
}

CudaDevice::CudaDevice(int ordinal) : ordinal_(ordinal) {}

// Only called if Init fails.
CudaDevice::~CudaDevice() {
  if (cleared_ != nullptr) (void)cudaEventDestroy(cleared_);
  if (own_stream_ != nullptr) (void)cudaStreamDestroy(own_stream_);
}

Status CudaDevice::Init() {
  const CudaDriver& driver = CudaDriver::Get();
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal_)) {
    return CudaError("cudaGetDeviceProperties", error);
  }
  name_ = properties.name;
  memory_ = properties.totalGlobalMem;
  const auto multiprocessors = static_cast<size_t>(properties.multiProcessorCount);
  resident_threads_ = multiprocessors * static_cast<size_t>(properties.maxThreadsPerMultiProcessor);
  most_threads_ = multiprocessors * kBlocksPerMultiprocessor * kCudaThreadsPerBlock;
  if (const cudaError_t error = cudaSetDevice(ordinal_)) return CudaError("cudaSetDevice", error);
  if (const CUresult error = driver.ctx_get_current(&context_)) {
    return CudaError("cuCtxGetCurrent", error);
  }

  const std::string of = " of " + name_ + " (compute capability " +
                         std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                         ")";
  int maps = 0, registers = 0, same_address = 0;
  CUdevice self = ordinal_;
  if (const CUresult error = driver.device_get_attribute(
          &maps, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, self)) {
    return CudaError("cuDeviceGetAttribute", error);
  }
  DYNEMB_RETURN_IF_ERROR(Attribute(ordinal_, cudaDevAttrHostRegisterSupported, &registers));
  DYNEMB_RETURN_IF_ERROR(
      Attribute(ordinal_, cudaDevAttrCanUseHostPointerForRegisteredMem, &same_address));
  if (maps == 0) {
    return FailedPrecondition("the memory" + of +
                              " cannot be mapped: tables could not grow in place");
  }
  if (registers == 0 || same_address == 0) {
    return FailedPrecondition("the kernels" + of + " cannot access host memory at its own address");
  }
  const CUmemAllocationProp memory = MemoryOf(ordinal_);
  if (const CUresult error = driver.mem_get_allocation_granularity(
          &granularity_, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM)) {
    return CudaError("cuMemGetAllocationGranularity", error);
  }
  if (const int error = FindCudaKernels()) {
    return FailedPrecondition("this library was not compiled for the architecture" + of +
                              ": set TF_DYNEMB_CUDA_ARCHITECTURES when building it (" +
                              CudaError("cudaFuncGetAttributes", error).message() + ")");
  }

  if (const cudaError_t error = cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking)) {
    return CudaError("cudaStreamCreateWithFlags", error);
  }
  if (const cudaError_t error = cudaEventCreateWithFlags(&cleared_, cudaEventDisableTiming)) {
    return CudaError("cudaEventCreateWithFlags", error);
  }
  return pool_memory_.Reserve(*this, memory_ / 8, Range::kPool);
}

Status CudaDevice::FreeMemory(size_t* bytes) const {
  Current current(*this);
  size_t total = 0;
  const cudaError_t error = cudaMemGetInfo(bytes, &total);
  return error == cudaSuccess ? Status() : CudaError("cudaMemGetInfo", error);
}

CudaDevice::StreamState* CudaDevice::StateOf(Stream stream) {
  std::lock_guard<std::mutex> lock(streams_mutex_);
  std::unique_ptr<StreamState>& state = streams_[stream];
  if (state == nullptr) {
    state = std::make_unique<StreamState>();
    state->stream = stream != nullptr ? stream : own_stream_;
    Current current(*this);
    const auto make = [&](cudaEvent_t* event) {
      const cudaError_t error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
      if (error != cudaSuccess) state->status = CudaError("cudaEventCreateWithFlags", error);
    };
    make(&state->done);
    for (StreamState::Pinned& pinned : state->pinned) make(&pinned.done);
    if (state->status.ok()) {
      state->status = state->workspace.Reserve(*this, memory_, Range::kWorkspace);
    }
  }
  return state.get();
}

void CudaDevice::WaitForAll() const {
  Current current(*this);
  (void)cudaDeviceSynchronize();
  (void)cudaGetLastError();
}

Status CudaDevice::ClearMemory(void* p, size_t bytes) {
  Current current(*this);
  std::lock_guard<std::mutex> lock(clear_mutex_);
  if (const cudaError_t error = cudaMemsetAsync(p, 0, bytes, own_stream_)) {
    return CudaError("cudaMemsetAsync", error);
  }
  if (const cudaError_t error = cudaEventRecord(cleared_, own_stream_)) {
    return CudaError("cudaEventRecord", error);
  }
  // Release: a thread that reads this number sees the recorded event.
  times_cleared_.fetch_add(1, std::memory_order_release);
  return Status();
}

bool CudaDevice::ReleaseRetired(bool wait) {
  Current current(*this);
  std::lock_guard<std::mutex> lock(retired_mutex_);
  const size_t before = retired_.size();
  size_t kept = 0;
  for (size_t i = 0; i < before; ++i) {
    Retired& retired = retired_[i];
    // Any result but "not ready" is the end of the work before the event: a failure ends it, too.
    if (wait) {
      (void)cudaEventSynchronize(retired.done);
    } else if (cudaEventQuery(retired.done) == cudaErrorNotReady) {
      if (kept != i) retired_[kept] = std::move(retired);
      ++kept;
      continue;
    }
    retired.range.Release(Range::Idle::kYes);
    spare_events_.push_back(retired.done);
  }
  retired_.erase(retired_.begin() + static_cast<std::ptrdiff_t>(kept), retired_.end());
  (void)cudaGetLastError();
  return before != kept;
}

// A push instead of cudaSetDevice: the thread may have no context, and must not keep one.
void CudaDevice::MakeCurrent() const { (void)CudaDriver::Get().ctx_push_current(context_); }

void CudaDevice::LeaveCurrent() {
  CUcontext context = nullptr;
  (void)CudaDriver::Get().ctx_pop_current(&context);
}

}  // namespace dynemb
