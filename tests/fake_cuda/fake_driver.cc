// CUDA's driver: contexts and memory.
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_cuda/fake_state.h"

namespace dynemb::fake_cuda {
namespace {

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

void* DriverFunction(const std::string& name) {
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
  return found != functions.end() ? found->second : nullptr;
}

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
