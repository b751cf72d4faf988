// CUDA's runtime library: devices, streams, events and work.
#include <cstddef>

#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_cuda/fake_state.h"

using namespace dynemb::fake_cuda;  // NOLINT

namespace {

// The alignment of addresses of cudaMalloc, and the unit of protection.
constexpr size_t kAlignment = 256, kPage = 4096;

const char* NameOf(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    default:
      return "another error";
  }
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kGpus;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof(properties->name), "fake GPU");
  properties->totalGlobalMem = kMemory;
  properties->multiProcessorCount = kMultiprocessors;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = DriverFunction(name);
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) { return NameOf(error); }
const char* cudaGetErrorString(cudaError_t error) { return NameOf(error); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaSetDevice(int gpu) {
  if (current.empty()) current.push_back(nullptr);
  current.back() = &contexts[gpu];
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  const Lock lock(mutex);
  *left = kMemory - used[CurrentGpu()];
  *total = kMemory;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock(mutex);
  const int gpu = CurrentGpu();
  for (const auto& queue : std::vector<std::shared_ptr<Queue>>(queues)) {
    if (queue->gpu == gpu) RunAll(queue.get());
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  const Lock lock(mutex);
  if (free_streams.empty()) free_streams.push_back(new CUstream_st);
  *stream = free_streams.back();
  free_streams.pop_back();
  (*stream)->number = ++numbers;
  (*stream)->queue = std::make_shared<Queue>();
  (*stream)->queue->gpu = CurrentGpu();
  (*stream)->queue->blocking = (flags & cudaStreamNonBlocking) == 0;
  queues.push_back((*stream)->queue);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(mutex);
  stream->queue = nullptr;
  free_streams.push_back(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a stream of another GPU, or none");
  *number = stream->number;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;  // it only has copies, which are done at once
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a wait for a stream of another GPU, or none");
  RunAll(stream->queue.get());
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a question about a stream of another GPU, or none");
  return stream->queue->work.empty() ? cudaSuccess : Fail(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a stream of another GPU, or none, that waits");
  const std::shared_ptr<Record> record = event->latest;
  if (record != nullptr) stream->queue->work.emplace_back([record] { RunUntil(record); });
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  const Lock lock(mutex);
  *event = new CUevent_st{CurrentGpu(), nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(mutex);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(mutex);
  if (!MayUse(stream) || event->gpu != stream->queue->gpu) {
    return Misuse("an event or a stream of another GPU, or none", cudaErrorInvalidResourceHandle);
  }
  const auto record = std::make_shared<Record>();
  record->queue = stream->queue;
  event->latest = record;
  stream->queue->work.emplace_back([record] {
    record->done = true;
    record->queue = nullptr;
  });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock(mutex);
  RunUntil(event->latest);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(mutex);
  if (event->latest == nullptr || event->latest->done) return cudaSuccess;
  RunOne(event->latest->queue.get());
  return event->latest->done ? cudaSuccess : Fail(cudaErrorNotReady);
}

cudaError_t cudaHostRegister(void* of, size_t bytes, unsigned int) {
  const Lock lock(mutex);
  const auto p = reinterpret_cast<uintptr_t>(of);
  const auto next = registrations.lower_bound(p);
  if (RegistrationOf(p) != registrations.end() ||
      (next != registrations.end() && next->first < p + bytes)) {
    return Misuse("host memory is registered twice", cudaErrorHostMemoryAlreadyRegistered);
  }
  registrations[p] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  const Lock lock(mutex);
  if (registrations.erase(reinterpret_cast<uintptr_t>(p)) == 0) {
    return Misuse("no registration begins here", cudaErrorHostMemoryNotRegistered);
  }
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  const Lock lock(mutex);
  const int gpu = CurrentGpu();
  const size_t aligned = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t mapped = (aligned + kPage - 1) / kPage * kPage;
  if (used[gpu] + mapped > kMemory) return Fail(cudaErrorMemoryAllocation);
  // The array ends where the mapping does, and the page after it cannot be accessed.
  void* const at = mmap(nullptr, mapped + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return Fail(cudaErrorMemoryAllocation);
  used[gpu] += mapped;
  const auto memory = std::make_shared<Memory>(gpu, mapped);
  if (mmap(at, mapped, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0) == MAP_FAILED) {
    std::abort();
  }
  mappings[reinterpret_cast<uintptr_t>(at)] = {mapped, memory, true};
  if (running > 0) Protect(true);
  *p = static_cast<char*>(at) + mapped - aligned;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  const Lock lock(mutex);
  (void)cudaDeviceSynchronize();
  const auto mapping = MappingOf(reinterpret_cast<uintptr_t>(p));
  if (mapping == mappings.end()) return Misuse("memory is freed that was not allocated");
  munmap(reinterpret_cast<void*>(mapping->first), mapping->second.bytes + kPage);
  mappings.erase(mapping);
  return cudaSuccess;
}

namespace {

bool Within(const decltype(mappings)::iterator& mapping, const void* p, size_t bytes) {
  return mapping != mappings.end() &&
         reinterpret_cast<uintptr_t>(p) + bytes <= mapping->first + mapping->second.bytes;
}

}  // namespace

// In the default stream, which waits for all streams that were not created without it.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes == 0) return cudaSuccess;
  const Lock lock(mutex);
  const Where from_is = WhereIs(from, bytes), to_is = WhereIs(to, bytes);
  if (from_is == Where::kInvalid || to_is == Where::kInvalid) {
    return Misuse("a copy from or to memory that does not exist, or beyond a registration");
  }
  const int gpu = CurrentGpu();
  for (const auto& queue : std::vector<std::shared_ptr<Queue>>(queues)) {
    if (queue->gpu == gpu && queue->blocking) RunAll(queue.get());
  }
  // Through the file, which is quicker than to change the protection of all memory twice.
  const auto to_mapping = MappingOf(reinterpret_cast<uintptr_t>(to));
  const auto from_mapping = MappingOf(reinterpret_cast<uintptr_t>(from));
  if (from_mapping == mappings.end() && Within(to_mapping, to, bytes)) {
    const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(to) - to_mapping->first);
    const ssize_t done = pwrite(to_mapping->second.memory->file, from, bytes, at);
    return done == static_cast<ssize_t>(bytes) ? cudaSuccess : Fail(cudaErrorUnknown);
  }
  if (to_mapping == mappings.end() && Within(from_mapping, from, bytes)) {
    const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(from) - from_mapping->first);
    const ssize_t done = pread(from_mapping->second.memory->file, to, bytes, at);
    return done == static_cast<ssize_t>(bytes) ? cudaSuccess : Fail(cudaErrorUnknown);
  }
  const Running access;
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a copy in a stream of another GPU, or none");
  const Where from_is = WhereIs(from, bytes), to_is = WhereIs(to, bytes);
  if (from_is == Where::kInvalid || to_is == Where::kInvalid) {
    return Misuse("a copy from or to memory that does not exist, or beyond a registration");
  }
  stream->queue->work.emplace_back([=] { std::memmove(to, from, bytes); });
  if (from_is == Where::kOrdinary || to_is == Where::kOrdinary) RunAll(stream->queue.get());
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t stream) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a fill in a stream of another GPU, or none");
  const Where where = WhereIs(p, bytes);
  // CUDA returns an error for these, too; tests provoke it.
  if (where != Where::kDevice && where != Where::kRegistered) return Fail(cudaErrorInvalidValue);
  stream->queue->work.emplace_back([=] { std::memset(p, byte, bytes); });
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t stream) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a launch in a stream of another GPU, or none");
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return Misuse("a launch of no blocks");
  const auto& kernel = *static_cast<const FakeKernel*>(function);
  const size_t n = *static_cast<const size_t*>(arguments[0]);
  // Arguments are copied when the kernel is launched. max_align_t: as aligned as any body.
  const auto words = (kernel.body_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  std::vector<std::max_align_t> body(words);
  std::memcpy(body.data(), arguments[1], kernel.body_bytes);
  stream->queue->work.emplace_back(
      [run = kernel.run, n, body = std::move(body)] { run(n, body.data()); });
  return cudaSuccess;
}
