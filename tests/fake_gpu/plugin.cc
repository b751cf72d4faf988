// The fake GPU: a pluggable device of TensorFlow, of type "GPU", whose memory is guarded_memory.h.
//
// TensorFlow places operators on it, allocates their tensors, and copies, as on a GPU. Its streams
// do all work at once, except that of the fake NCCL (fake_nccl.cc), for which events wait. Kernels
// of TensorFlow's own for a GPU are not in a build for the CPU, so most of its operators run on the
// CPU, and TensorFlow copies their tensors.
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/tf_status.h"
#include "tests/fake_gpu/guarded_memory.h"

// TensorFlow keeps pointers to these.
struct SP_Stream_st {};
struct SP_Event_st {
  uint64_t begun = 0;  // the works that had begun when the event was recorded
};
struct SP_Timer_st {};

namespace {

using dynemb::GuardedMemory;

void Succeed(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

// Memory.

void Allocate(const SP_Device*, uint64_t bytes, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = GuardedMemory::Get().Allocate(bytes);
  memory->size = memory->opaque != nullptr ? bytes : 0;
}
void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  GuardedMemory::Get().Free(memory->opaque);
}
void* AllocateOnHost(const SP_Device*, uint64_t bytes) {
  return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}
void FreeOnHost(const SP_Device*, void* p) { std::free(p); }
void* AllocateUnified(const SP_Device*, uint64_t) { return nullptr; }
TF_Bool Statistics(const SP_Device*, SP_AllocatorStats*) { return false; }
TF_Bool MemoryUsage(const SP_Device*, int64_t* free, int64_t* total) {
  *free = *total = GuardedMemory::kBytes;
  return true;
}

// Copies and fills.

void Copy(void* to, const void* from, uint64_t bytes, TF_Status* status) {
  const GuardedMemory& memory = GuardedMemory::Get();
  std::memmove(memory.View(to), memory.View(from), bytes);
  Succeed(status);
}
void CopyToHost(const SP_Device*, SP_Stream, void* to, const SP_DeviceMemoryBase* from,
                uint64_t bytes, TF_Status* status) {
  Copy(to, from->opaque, bytes, status);
}
void CopyToDevice(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const void* from,
                  uint64_t bytes, TF_Status* status) {
  Copy(to->opaque, from, bytes, status);
}
void CopyOnDevice(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to,
                  const SP_DeviceMemoryBase* from, uint64_t bytes, TF_Status* status) {
  Copy(to->opaque, from->opaque, bytes, status);
}
void SyncCopyToHost(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t bytes,
                    TF_Status* status) {
  Copy(to, from->opaque, bytes, status);
}
void SyncCopyToDevice(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t bytes,
                      TF_Status* status) {
  Copy(to->opaque, from, bytes, status);
}
void SyncCopyOnDevice(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                      uint64_t bytes, TF_Status* status) {
  Copy(to->opaque, from->opaque, bytes, status);
}
void Fill(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, uint8_t byte, uint64_t bytes,
          TF_Status* status) {
  std::memset(GuardedMemory::Get().View(to->opaque), byte, bytes);
  Succeed(status);
}
void Zero(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, uint64_t bytes,
          TF_Status* status) {
  Fill(device, stream, to, 0, bytes, status);
}
void FillWords(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, uint32_t word, uint64_t bytes,
               TF_Status* status) {
  auto* const words = static_cast<uint32_t*>(GuardedMemory::Get().View(to->opaque));
  for (uint64_t i = 0; i < bytes / sizeof(word); ++i) words[i] = word;
  Succeed(status);
}

// Streams, events and timers.

// Works of all streams that take time; they end in the order in which they begin.
class Works {
 public:
  uint64_t begun() {
    std::lock_guard<std::mutex> lock(mutex_);
    return begun_;
  }
  void Begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++begun_;
  }
  void End() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++ended_;
    }
    changed_.notify_all();
  }
  bool HaveEnded(uint64_t begun) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_ >= begun;
  }
  void Await(uint64_t begun) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ended_ >= begun; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t begun_ = 0, ended_ = 0;  // guarded by mutex_
};

Works& TheWorks() {
  static auto* const works = new Works;
  return *works;
}

void Record(const SP_Device*, SP_Stream, SP_Event event, TF_Status* status) {
  event->begun = TheWorks().begun();
  Succeed(status);
}
void AwaitEvent(const SP_Device*, SP_Event event, TF_Status* status) {
  TheWorks().Await(event->begun);
  Succeed(status);
}
void AwaitStream(const SP_Device*, SP_Stream, TF_Status* status) {
  TheWorks().Await(TheWorks().begun());
  Succeed(status);
}
void AwaitAll(const SP_Device*, TF_Status* status) { AwaitStream(nullptr, nullptr, status); }

template <class T>
void Create(const SP_Device*, T** created, TF_Status* status) {
  *created = new T;
  Succeed(status);
}
template <class T>
void Destroy(const SP_Device*, T* created) {
  delete created;
}
template <class A>
void NothingTo(const SP_Device*, A, TF_Status* status) {
  Succeed(status);
}
template <class A, class B>
void NothingTo(const SP_Device*, A, B, TF_Status* status) {
  Succeed(status);
}
SE_EventStatus EventStatus(const SP_Device*, SP_Event event) {
  return TheWorks().HaveEnded(event->begun) ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
}
void Wait(const SP_Device* const, SP_Stream, SP_Event, TF_Status* const status) { Succeed(status); }
TF_Bool CallHost(const SP_Device*, SP_Stream, SE_StatusCallbackFn function, void* argument) {
  TF_Status* const status = TF_NewStatus();
  function(argument, status);
  const bool succeeded = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
  return succeeded;
}

void CreateExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* parameters,
                    TF_Status* status) {
  SP_StreamExecutor& e = *parameters->stream_executor;
  e.struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  e.allocate = Allocate;
  e.deallocate = Deallocate;
  e.host_memory_allocate = AllocateOnHost;
  e.host_memory_deallocate = FreeOnHost;
  e.unified_memory_allocate = AllocateUnified;
  e.unified_memory_deallocate = FreeOnHost;
  e.get_allocator_stats = Statistics;
  e.device_memory_usage = MemoryUsage;
  e.create_stream = Create<SP_Stream_st>;
  e.destroy_stream = Destroy<SP_Stream_st>;
  e.create_stream_dependency = NothingTo<SP_Stream, SP_Stream>;
  e.get_stream_status = NothingTo<SP_Stream>;
  e.create_event = Create<SP_Event_st>;
  e.destroy_event = Destroy<SP_Event_st>;
  e.get_event_status = EventStatus;
  e.record_event = Record;
  e.wait_for_event = Wait;
  e.create_timer = Create<SP_Timer_st>;
  e.destroy_timer = Destroy<SP_Timer_st>;
  e.start_timer = NothingTo<SP_Stream, SP_Timer>;
  e.stop_timer = NothingTo<SP_Stream, SP_Timer>;
  e.memcpy_dtoh = CopyToHost;
  e.memcpy_htod = CopyToDevice;
  e.memcpy_dtod = CopyOnDevice;
  e.sync_memcpy_dtoh = SyncCopyToHost;
  e.sync_memcpy_htod = SyncCopyToDevice;
  e.sync_memcpy_dtod = SyncCopyOnDevice;
  e.block_host_for_event = AwaitEvent;
  e.block_host_until_done = AwaitStream;
  e.synchronize_all_activity = AwaitAll;
  e.mem_zero = Zero;
  e.memset = Fill;
  e.memset32 = FillWords;
  e.host_callback = CallHost;
  Succeed(status);
}

// The platform and its one device.

void CountDevices(const SP_Platform*, int* count, TF_Status* status) {
  *count = 1;
  Succeed(status);
}
void CreateDevice(const SP_Platform*, SE_CreateDeviceParams* parameters, TF_Status* status) {
  SP_Device& device = *parameters->device;
  device.struct_size = SP_DEVICE_STRUCT_SIZE;
  device.ordinal = parameters->ordinal;
  device.hardware_name = "fake GPU";
  device.device_vendor = "tests";
  device.pci_bus_id = "0000:00:00.0";
  Succeed(status);
}
void DestroyDevice(const SP_Platform*, SP_Device*) {}
int32_t NumaNode(const SP_Device*) { return -1; }
int64_t MemoryBandwidth(const SP_Device*) { return -1; }
double Gflops(const SP_Device*) { return -1; }
void CreateDeviceFunctions(const SP_Platform*, SE_CreateDeviceFnsParams* parameters,
                           TF_Status* status) {
  SP_DeviceFns& functions = *parameters->device_fns;
  functions.struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  functions.get_numa_node = NumaNode;
  functions.get_memory_bandwidth = MemoryBandwidth;
  functions.get_gflops = Gflops;
  Succeed(status);
}
void DestroyDeviceFunctions(const SP_Platform*, SP_DeviceFns*) {}
void DestroyExecutor(const SP_Platform*, SP_StreamExecutor*) {}
uint64_t Nanoseconds(SP_Timer) { return 1; }
void CreateTimerFunctions(const SP_Platform*, SP_TimerFns* functions, TF_Status* status) {
  functions->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
  functions->nanoseconds = Nanoseconds;
  Succeed(status);
}
void DestroyTimerFunctions(const SP_Platform*, SP_TimerFns*) {}
void DestroyPlatform(SP_Platform*) {}
void DestroyPlatformFunctions(SP_PlatformFns*) {}

}  // namespace

// The functions that TensorFlow calls when the library is loaded as a plugin.
extern "C" void SE_InitPlugin(SE_PlatformRegistrationParams* parameters, TF_Status* status) {
  GuardedMemory::Get();
  SP_Platform& platform = *parameters->platform;
  platform.struct_size = SP_PLATFORM_STRUCT_SIZE;
  platform.name = "FAKE_GPU";
  platform.type = "GPU";
  // Each tensor has its own pages, and what is freed is garbage at once.
  platform.use_bfc_allocator = false;
  SP_PlatformFns& functions = *parameters->platform_fns;
  functions.struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  functions.get_device_count = CountDevices;
  functions.create_device = CreateDevice;
  functions.destroy_device = DestroyDevice;
  functions.create_device_fns = CreateDeviceFunctions;
  functions.destroy_device_fns = DestroyDeviceFunctions;
  functions.create_stream_executor = CreateExecutor;
  functions.destroy_stream_executor = DestroyExecutor;
  functions.create_timer_fns = CreateTimerFunctions;
  functions.destroy_timer_fns = DestroyTimerFunctions;
  parameters->destroy_platform = DestroyPlatform;
  parameters->destroy_platform_fns = DestroyPlatformFunctions;
  Succeed(status);
}

// Also looked up. The kernels of the library have been registered when it was loaded.
extern "C" void TF_InitKernel() {}

// For the fake NCCL: where it may access memory of the device, and the works that it begins and
// ends.
extern "C" void* FakeGpuView(void* p) { return GuardedMemory::Get().View(p); }
extern "C" void FakeGpuBegin() { TheWorks().Begin(); }
extern "C" void FakeGpuEnd() { TheWorks().End(); }

// For tests: memory of the device, which is never freed.
extern "C" void* FakeGpuAllocate(size_t bytes) { return GuardedMemory::Get().Allocate(bytes); }
