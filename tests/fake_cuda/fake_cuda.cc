#include "tests/fake_cuda/fake_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/cuda_algorithms.h"

namespace dynemb::fake_cuda {
namespace {

constexpr int kGpus = 2;

struct Queue;

// A record of an event: all work of the queue that came before it is done, or not yet.
struct Record {
  std::shared_ptr<Queue> queue;
  bool done = false;
};

// The work of a stream. It outlives the stream's handle.
struct Queue {
  int gpu = 0;
  std::deque<std::function<void()>> work;
};

// Physical memory, which exists until it is released and unmapped.
struct Memory {
  int gpu;
  size_t bytes;
  int file;

  Memory(int of_gpu, size_t size) : gpu(of_gpu), bytes(size), file(memfd_create("gpu", 0)) {
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) std::abort();
    void* const p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED) std::abort();
    std::memset(p, 0xA5, size);
    munmap(p, size);
  }
  ~Memory();
};

struct Mapping {
  size_t bytes;
  std::shared_ptr<Memory> memory;
  bool accessible = false;
};

}  // namespace
}  // namespace dynemb::fake_cuda

// The types that CUDA's headers only declare.
struct CUctx_st {
  int gpu;
};
struct CUstream_st {
  std::shared_ptr<dynemb::fake_cuda::Queue> queue;
  unsigned long long number = 0;
};
struct CUevent_st {
  int gpu;
  std::shared_ptr<dynemb::fake_cuda::Record> latest;
};

namespace dynemb::fake_cuda {
namespace {

// Everything is protected by the mutex, which the work that runs does not take.
std::recursive_mutex mutex;
std::map<uintptr_t, size_t> reservations;
std::map<uintptr_t, Mapping> mappings;
std::map<CUmemGenericAllocationHandle, std::shared_ptr<Memory>> handles;
std::map<uintptr_t, size_t> registrations;  // of host memory
std::vector<std::shared_ptr<Queue>> queues;
std::vector<CUstream_st*> free_streams;
size_t used[kGpus];
uint64_t misuses = 0;
unsigned long long numbers = 0;
int running = 0;  // the depth of Run
CUctx_st contexts[kGpus] = {{0}, {1}};

thread_local std::vector<CUctx_st*> current;
thread_local cudaError_t last_error = cudaSuccess;

Memory::~Memory() {
  used[gpu] -= bytes;
  close(file);
}

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t Fail(cudaError_t error) { return last_error = error; }
cudaError_t Misuse(const char* what, cudaError_t error = cudaErrorInvalidValue) {
  std::fprintf(stderr, "fake CUDA: %s\n", what);
  ++misuses;
  return Fail(error);
}
CUresult DriverMisuse(const char* what) {
  Misuse(what);
  last_error = cudaSuccess;  // the driver's errors are not those of the runtime library
  return CUDA_ERROR_INVALID_VALUE;
}

int CurrentGpu() {
  if (current.empty()) current.push_back(&contexts[0]);
  return current.back()->gpu;
}

// The entry of a map from beginnings that has p, or end().
template <class Map, class SizeOf>
auto Containing(Map& map, uintptr_t p, const SizeOf& size_of) {
  auto at = map.upper_bound(p);
  if (at == map.begin()) return map.end();
  --at;
  return p < at->first + size_of(at->second) ? at : map.end();
}
auto MappingOf(uintptr_t p) {
  return Containing(mappings, p, [](const Mapping& m) { return m.bytes; });
}
auto RegistrationOf(uintptr_t p) {
  return Containing(registrations, p, [](size_t bytes) { return bytes; });
}

enum class Where { kDevice, kRegistered, kOrdinary, kInvalid };
Where WhereIs(const void* of, size_t bytes) {
  const auto p = reinterpret_cast<uintptr_t>(of);
  if (p == 0) return Where::kInvalid;
  if (MappingOf(p) != mappings.end()) {
    for (uintptr_t at = p; at < p + bytes;) {
      const auto mapping = MappingOf(at);
      if (mapping == mappings.end() || !mapping->second.accessible) return Where::kInvalid;
      at = mapping->first + mapping->second.bytes;
    }
    return Where::kDevice;
  }
  if (Containing(reservations, p, [](size_t n) { return n; }) != reservations.end()) {
    return Where::kInvalid;
  }
  const auto registration = RegistrationOf(p);
  if (registration == registrations.end()) return Where::kOrdinary;
  return p + bytes <= registration->first + registration->second ? Where::kRegistered
                                                                 : Where::kInvalid;
}

void Protect(bool access) {
  for (const auto& [p, mapping] : mappings) {
    if (!mapping.accessible) continue;
    const int protection = access ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (mprotect(reinterpret_cast<void*>(p), mapping.bytes, protection) != 0) std::abort();
  }
}

// Device memory can be accessed meanwhile.
struct Running {
  Running() {
    if (running++ == 0) Protect(true);
  }
  ~Running() {
    if (--running == 0) Protect(false);
  }
};

void RunOne(Queue* queue) {
  const Running access;
  const std::function<void()> work = std::move(queue->work.front());
  queue->work.pop_front();
  work();
}
void RunAll(Queue* queue) {
  const Running access;
  while (!queue->work.empty()) RunOne(queue);
}
void RunUntil(const std::shared_ptr<Record>& record) {
  if (record == nullptr) return;
  const Running access;
  while (!record->done) RunOne(record->queue.get());
}

// Whether work may be given to this stream now.
bool MayUse(CUstream_st* stream) {
  return stream != nullptr && stream->queue != nullptr && stream->queue->gpu == CurrentGpu();
}

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

// --- The driver ---

CUresult GetCurrent(CUcontext* context) {
  *context = current.empty() ? nullptr : current.back();
  return CUDA_SUCCESS;
}
CUresult Push(CUcontext context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  current.push_back(context);
  return CUDA_SUCCESS;
}
CUresult Pop(CUcontext* context) {
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}
CUresult DeviceAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}
CUresult AddressReserve(CUdeviceptr* p, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  const Lock lock(mutex);
  if (bytes == 0 || bytes % kGranularity != 0)
    return DriverMisuse("a reservation of part of a unit");
  // One unit more, to align the address.
  void* const at = mmap(nullptr, bytes + kGranularity, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<uintptr_t>(at);
  const uintptr_t aligned = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (aligned > begin) munmap(at, aligned - begin);
  const size_t rest = begin + kGranularity - aligned;
  if (rest > 0) munmap(reinterpret_cast<void*>(aligned + bytes), rest);
  reservations[aligned] = bytes;
  *p = aligned;
  return CUDA_SUCCESS;
}
CUresult AddressFree(CUdeviceptr p, size_t bytes) {
  const Lock lock(mutex);
  const auto at = reservations.find(p);
  if (at == reservations.end() || at->second != bytes) {
    return DriverMisuse("addresses are freed that were not reserved like this");
  }
  const auto mapping = mappings.lower_bound(p);
  if (mapping != mappings.end() && mapping->first < p + bytes) {
    return DriverMisuse("addresses are freed that have mappings");
  }
  munmap(reinterpret_cast<void*>(p), bytes);
  reservations.erase(at);
  return CUDA_SUCCESS;
}
CUresult Create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* of,
                unsigned long long) {
  const Lock lock(mutex);
  if (bytes == 0 || bytes % kGranularity != 0) return DriverMisuse("memory of part of a unit");
  const int gpu = of->location.id;
  if (used[gpu] + bytes > kMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  used[gpu] += bytes;
  *handle = ++numbers;
  handles[*handle] = std::make_shared<Memory>(gpu, bytes);
  return CUDA_SUCCESS;
}
CUresult ReleaseMemory(CUmemGenericAllocationHandle handle) {
  const Lock lock(mutex);
  if (handles.erase(handle) == 0) return DriverMisuse("memory is released twice");
  return CUDA_SUCCESS;
}
CUresult Map(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const Lock lock(mutex);
  const auto memory = handles.find(handle);
  if (memory == handles.end() || offset != 0 || bytes != memory->second->bytes ||
      p % kGranularity != 0) {
    return DriverMisuse("a mapping of memory that is not as large, or at no unit");
  }
  const auto reserved = Containing(reservations, p, [](size_t n) { return n; });
  if (reserved == reservations.end() || p + bytes > reserved->first + reserved->second) {
    return DriverMisuse("a mapping at addresses that are not reserved");
  }
  const auto next = mappings.lower_bound(p);
  if (MappingOf(p) != mappings.end() || (next != mappings.end() && next->first < p + bytes)) {
    return DriverMisuse("a mapping at addresses that have one");
  }
  if (mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
           memory->second->file, 0) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mappings[p] = {bytes, memory->second, false};
  return CUDA_SUCCESS;
}
CUresult Unmap(CUdeviceptr p, size_t bytes) {
  const Lock lock(mutex);
  const auto at = mappings.find(p);
  if (at == mappings.end() || at->second.bytes != bytes) {
    return DriverMisuse("a part of a mapping, or none, is unmapped");
  }
  mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mappings.erase(at);
  return CUDA_SUCCESS;
}
CUresult SetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  const Lock lock(mutex);
  const auto at = mappings.find(p);
  if (at == mappings.end() || at->second.bytes != bytes || count != 1 ||
      access->location.id != at->second.memory->gpu) {
    return DriverMisuse("access to what is not a mapping of this GPU");
  }
  at->second.accessible = true;
  if (running > 0) Protect(true);
  return CUDA_SUCCESS;
}
CUresult Granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

}  // namespace

uint64_t TakeMisuses() {
  const Lock lock(mutex);
  return std::exchange(misuses, 0);
}

size_t PendingWork() {
  const Lock lock(mutex);
  size_t pieces = 0;
  for (const auto& queue : queues) pieces += queue->work.size();
  return pieces;
}

}  // namespace dynemb::fake_cuda

using namespace dynemb::fake_cuda;  // NOLINT

// --- The runtime library ---

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
  static const std::map<std::string, void*> functions{
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&GetCurrent)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&Push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&Pop)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&DeviceAttribute)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&AddressReserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&AddressFree)},
      {"cuMemCreate", reinterpret_cast<void*>(&Create)},
      {"cuMemRelease", reinterpret_cast<void*>(&ReleaseMemory)},
      {"cuMemMap", reinterpret_cast<void*>(&Map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&Unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&SetAccess)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&Granularity)}};
  const auto found = functions.find(name);
  *function = found != functions.end() ? found->second : nullptr;
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

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  const Lock lock(mutex);
  if (free_streams.empty()) free_streams.push_back(new CUstream_st);
  *stream = free_streams.back();
  free_streams.pop_back();
  (*stream)->number = ++numbers;
  (*stream)->queue = std::make_shared<Queue>();
  (*stream)->queue->gpu = CurrentGpu();
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
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a wait for a stream of another GPU, or none");
  RunAll(stream->queue.get());
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a stream of another GPU, or none, that waits");
  const std::shared_ptr<Record> record = event->latest;
  if (record != nullptr) stream->queue->work.emplace_back([record] { RunUntil(record); });
  return cudaSuccess;
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

// --- cuda_algorithms.cu ---

namespace dynemb {

int FindCudaKernels() { return cudaSuccess; }

int CudaExclusiveSum(void* storage, size_t* bytes, uint32_t* values, uint32_t n,
                     CUstream_st* stream) {
  if (storage == nullptr) {
    *bytes = 1000;
    return cudaSuccess;
  }
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a sum in a stream of another GPU, or none");
  stream->queue->work.emplace_back([=] {
    std::memset(storage, 0x5A, 1000);
    std::exclusive_scan(values, values + n, values, 0u);
  });
  return cudaSuccess;
}

template <class Key>
int CudaSortPairs(void* storage, size_t* bytes, Key* keys, Key* other_keys, uint32_t* values,
                  uint32_t* other_values, uint32_t n, int bits, CUstream_st* stream,
                  bool* in_others) {
  if (storage == nullptr) {
    *bytes = 1000;
    return cudaSuccess;
  }
  const Lock lock(mutex);
  if (!MayUse(stream)) return Misuse("a sort in a stream of another GPU, or none");
  const bool others = *in_others = (bits + 7) / 8 % 2 != 0;
  stream->queue->work.emplace_back([=] {
    std::memset(storage, 0x5A, 1000);
    const Key mask = bits < static_cast<int>(8 * sizeof(Key)) ? (Key{1} << bits) - 1 : ~Key{0};
    std::vector<std::pair<Key, uint32_t>> pairs(n);
    for (uint32_t i = 0; i < n; ++i) pairs[i] = {keys[i], values[i]};
    std::stable_sort(pairs.begin(), pairs.end(), [mask](const auto& a, const auto& b) {
      return (a.first & mask) < (b.first & mask);
    });
    std::memset(others ? keys : other_keys, 0x5A, n * sizeof(Key));
    std::memset(others ? values : other_values, 0x5A, n * sizeof(uint32_t));
    for (uint32_t i = 0; i < n; ++i) {
      (others ? other_keys : keys)[i] = pairs[i].first;
      (others ? other_values : values)[i] = pairs[i].second;
    }
  });
  return cudaSuccess;
}
template int CudaSortPairs(void*, size_t*, uint64_t*, uint64_t*, uint32_t*, uint32_t*, uint32_t,
                           int, CUstream_st*, bool*);
template int CudaSortPairs(void*, size_t*, uint32_t*, uint32_t*, uint32_t*, uint32_t*, uint32_t,
                           int, CUstream_st*, bool*);

}  // namespace dynemb
