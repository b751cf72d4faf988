// The state of the stand-in for CUDA, which its driver and its runtime library share.
#ifndef DYNEMB_TESTS_FAKE_CUDA_FAKE_STATE_H_
#define DYNEMB_TESTS_FAKE_CUDA_FAKE_STATE_H_

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace dynemb::fake_cuda {

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
  bool blocking = false;  // the default stream waits for it
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

// Everything is protected by the mutex, which the work that runs does not take.
inline std::recursive_mutex mutex;
inline std::map<uintptr_t, size_t> reservations;
inline std::map<uintptr_t, Mapping> mappings;
inline std::map<CUmemGenericAllocationHandle, std::shared_ptr<Memory>> handles;
inline std::map<uintptr_t, size_t> registrations;  // of host memory
inline std::vector<std::shared_ptr<Queue>> queues;
inline std::vector<CUstream_st*> free_streams;
inline size_t used[kGpus];
inline uint64_t misuses = 0;
inline unsigned long long numbers = 0;
inline int running = 0;  // the depth of Run
inline CUctx_st contexts[kGpus] = {{0}, {1}};

inline thread_local std::vector<CUctx_st*> current;
inline thread_local cudaError_t last_error = cudaSuccess;

inline Memory::~Memory() {
  used[gpu] -= bytes;
  close(file);
}

using Lock = std::lock_guard<std::recursive_mutex>;

inline cudaError_t Fail(cudaError_t error) { return last_error = error; }
inline cudaError_t Misuse(const char* what, cudaError_t error = cudaErrorInvalidValue) {
  std::fprintf(stderr, "fake CUDA: %s\n", what);
  ++misuses;
  return Fail(error);
}
inline CUresult DriverMisuse(const char* what) {
  Misuse(what);
  last_error = cudaSuccess;  // the driver's errors are not those of the runtime library
  return CUDA_ERROR_INVALID_VALUE;
}

inline int CurrentGpu() {
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
inline auto MappingOf(uintptr_t p) {
  return Containing(mappings, p, [](const Mapping& m) { return m.bytes; });
}
inline auto RegistrationOf(uintptr_t p) {
  return Containing(registrations, p, [](size_t bytes) { return bytes; });
}

enum class Where { kDevice, kRegistered, kOrdinary, kInvalid };
inline Where WhereIs(const void* of, size_t bytes) {
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

inline void Protect(bool access) {
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

inline void RunOne(Queue* queue) {
  const Running access;
  const std::function<void()> work = std::move(queue->work.front());
  queue->work.pop_front();
  work();
}
inline void RunAll(Queue* queue) {
  if (queue->work.empty()) return;
  const Running access;
  while (!queue->work.empty()) RunOne(queue);
}
inline void RunUntil(const std::shared_ptr<Record>& record) {
  if (record == nullptr) return;
  const Running access;
  while (!record->done) RunOne(record->queue.get());
}

// Whether work may be given to this stream now.
inline bool MayUse(CUstream_st* stream) {
  return stream != nullptr && stream->queue != nullptr && stream->queue->gpu == CurrentGpu();
}

// The function of the driver that has this name; null if there is none.
void* DriverFunction(const std::string& name);

}  // namespace dynemb::fake_cuda

#endif  // DYNEMB_TESTS_FAKE_CUDA_FAKE_STATE_H_
