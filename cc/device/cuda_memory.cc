// CudaDevice::Range and CudaDevice::HostRange.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "cc/device/cuda_device.h"
#include "cc/device/cuda_driver.h"

namespace dynemb {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
// A range grows by at least this fraction of its committed memory, up to kCommitMost.
constexpr size_t kCommitFraction = 8;
constexpr size_t kCommitMost = 256 * kMiB;
// If more addresses than this are requested, fewer than this are useless.
constexpr size_t kReserveLeast = 1024 * kMiB;

size_t RoundUp(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

Status BeyondReservation(size_t bytes, size_t reserved) {
  return ResourceExhausted("needs " + std::to_string(bytes) + " bytes, more than the " +
                           std::to_string(reserved) + " reserved for it");
}

CUdeviceptr Address(const char* p) { return reinterpret_cast<CUdeviceptr>(p); }

// Maps physical memory at [at, at + bytes), which is reserved and has none.
Status MapMemory(int ordinal, char* at, size_t bytes) {
  const CudaDriver& driver = CudaDriver::Get();
  const CUmemAllocationProp memory = MemoryOf(ordinal);
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult error = driver.mem_create(&handle, bytes, &memory, 0)) {
    return CudaError("cuMemCreate", error);
  }
  const CUresult mapped = driver.mem_map(Address(at), bytes, 0, handle, 0);
  // The memory exists until it is unmapped.
  (void)driver.mem_release(handle);
  if (mapped != CUDA_SUCCESS) return CudaError("cuMemMap", mapped);
  CUmemAccessDesc access = {};
  access.location = memory.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (const CUresult error = driver.mem_set_access(Address(at), bytes, &access, 1)) {
    (void)driver.mem_unmap(Address(at), bytes);
    return CudaError("cuMemSetAccess", error);
  }
  return Status();
}

}  // namespace

CudaDevice::Range& CudaDevice::Range::operator=(Range&& other) noexcept {
  if (this == &other) return *this;
  Release();
  device_ = std::exchange(other.device_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  reserved_ = std::exchange(other.reserved_, 0);
  committed_ = std::exchange(other.committed_, 0);
  use_ = other.use_;
  block_ = std::exchange(other.block_, false);
  mappings_ = std::exchange(other.mappings_, {});
  return *this;
}

Status CudaDevice::Range::Reserve(CudaDevice& device, size_t bytes, Use use) {
  device_ = &device;
  use_ = use;
  if (use == kTable && bytes <= BlockPool::kMost) {
    std::lock_guard<std::mutex> lock(device.pool_mutex_);
    const size_t size = BlockPool::SizeOf(bytes);
    const size_t offset = device.pool_.Take(bytes);
    if (offset + size <= device.pool_memory_.reserved()) {
      block_ = true;
      data_ = device.pool_memory_.data() + offset;
      reserved_ = size;
      return Status();
    }
    device.pool_.Give(offset, bytes);  // the pool is full
  }
  Current current(device);
  const size_t unit = device.granularity_;
  const size_t most = RoundUp(std::min(std::max<size_t>(bytes, 1), device.memory_), unit);
  CUdeviceptr address = 0;
  for (size_t size = most;; size = RoundUp(size / 2, unit)) {
    const CUresult error = CudaDriver::Get().mem_address_reserve(&address, size, 0, 0, 0);
    if (error == CUDA_SUCCESS) {
      data_ = reinterpret_cast<char*>(address);
      reserved_ = size;
      return Status();
    }
    if (size / 2 < kReserveLeast) {
      const Status status = CudaError("cuMemAddressReserve", error);
      return ResourceExhausted("cannot reserve " + std::to_string(size) +
                               " bytes of GPU addresses: " + status.message());
    }
  }
}

Status CudaDevice::Range::Commit(size_t bytes) {
  if (bytes <= committed_) return Status();
  if (bytes > reserved_) return BeyondReservation(bytes, reserved_);
  const Status status = CommitOnce(bytes);
  // The pool's memory grows for a block, whose Commit is the one that tries again.
  if (status.ok() || use_ == kPool || !device_->ReleaseRetired(/*wait=*/true)) return status;
  return CommitOnce(bytes);
}

Status CudaDevice::Range::CommitOnce(size_t bytes) {
  if (block_) return CommitBlock();
  const size_t unit = device_->granularity_;
  const size_t needed = RoundUp(bytes, unit);
  const size_t ahead = committed_ + std::min(committed_ / kCommitFraction, kCommitMost);
  const size_t wanted = std::min(std::max(needed, RoundUp(ahead, unit)), reserved_);
  Current current(*device_);
  const Status status = CommitMapping(wanted);
  return status.ok() || wanted == needed ? status : CommitMapping(needed);
}

// Maps the new memory in one mapping.
Status CudaDevice::Range::CommitMapping(size_t bytes) {
  const size_t more = bytes - committed_;
  char* const at = data_ + committed_;
  Status status = MapMemory(device_->ordinal_, at, more);
  if (status.ok() && use_ == kTable) {
    status = device_->ClearMemory(at, more);
    if (!status.ok()) (void)CudaDriver::Get().mem_unmap(Address(at), more);
  }
  if (!status.ok()) {
    size_t left = 0, total = 0;
    if (cudaMemGetInfo(&left, &total) != cudaSuccess) (void)cudaGetLastError();
    return Status(status.code(), "the GPU has no memory for " + std::to_string(more) +
                                     " more bytes, with " + std::to_string(committed_) +
                                     " in use here, " + std::to_string(device_->used()) +
                                     " in all tables and " + std::to_string(left) +
                                     " free: " + status.message());
  }
  mappings_.push_back(more);
  committed_ = bytes;
  if (use_ != kPool) device_->used_ += more;
  return Status();
}

Status CudaDevice::Range::CommitBlock() {
  {
    std::lock_guard<std::mutex> lock(device_->pool_mutex_);
    Range& memory = device_->pool_memory_;
    DYNEMB_RETURN_IF_ERROR(memory.Commit(static_cast<size_t>(data_ - memory.data_) + reserved_));
  }
  DYNEMB_RETURN_IF_ERROR(device_->ClearMemory(data_, reserved_));
  committed_ = reserved_;
  device_->used_ += reserved_;
  return Status();
}

void CudaDevice::Range::Clear() {
  if (committed_ == 0) return;
  device_->WaitForAll();
  // If this fails, all later work of the GPU fails too.
  (void)device_->ClearMemory(data_, committed_);
}

void CudaDevice::Range::Release(Idle idle) {
  if (data_ == nullptr) return;
  if (committed_ > 0 && idle == Idle::kWait) device_->WaitForAll();
  if (block_) {
    std::lock_guard<std::mutex> lock(device_->pool_mutex_);
    device_->pool_.Give(static_cast<size_t>(data_ - device_->pool_memory_.data_), reserved_);
  } else {
    Current current(*device_);
    const CudaDriver& driver = CudaDriver::Get();
    char* at = data_;
    for (const size_t bytes : mappings_) {
      (void)driver.mem_unmap(Address(at), bytes);
      at += bytes;
    }
    (void)driver.mem_address_free(Address(data_), reserved_);
  }
  if (use_ != kPool) device_->used_ -= committed_;
  data_ = nullptr;
}

CudaDevice::HostRange& CudaDevice::HostRange::operator=(HostRange&& other) noexcept {
  if (this == &other) return *this;
  Release();
  device_ = std::exchange(other.device_, nullptr);
  arena_ = std::move(other.arena_);
  committed_ = std::exchange(other.committed_, 0);
  registrations_ = std::exchange(other.registrations_, {});
  return *this;
}

Status CudaDevice::HostRange::Reserve(CudaDevice& device, size_t bytes) {
  device_ = &device;
  return arena_.Reserve(bytes, std::min(bytes, kReserveLeast));
}

Status CudaDevice::HostRange::Commit(size_t bytes) {
  if (bytes <= committed_) return Status();
  if (bytes > reserved()) return BeyondReservation(bytes, reserved());
  const size_t needed = RegisterUpTo(committed_, bytes, reserved(), false);
  const size_t wanted = RegisterUpTo(committed_, bytes, reserved(), true);
  const Status status = Register(wanted);
  return status.ok() || wanted == needed ? status : Register(needed);
}

Status CudaDevice::HostRange::Register(size_t bytes) {
  DYNEMB_RETURN_IF_ERROR(arena_.Commit(bytes));
  Current current(*device_);
  char* const at = data() + committed_;
  const size_t more = bytes - committed_;
  if (const cudaError_t error =
          cudaHostRegister(at, more, cudaHostRegisterMapped | cudaHostRegisterPortable)) {
    const Status status = CudaError("cudaHostRegister", error);
    return Status(status.code(), "the system refused to lock " + std::to_string(more) +
                                     " bytes of host memory for the GPU, with " +
                                     std::to_string(committed_) +
                                     " in use here: " + status.message());
  }
  device_->registered_.Add(at, more);
  registrations_.push_back(more);
  committed_ = bytes;
  return Status();
}

void CudaDevice::HostRange::Clear() {
  if (committed_ == 0) return;
  device_->WaitForAll();
  std::fill_n(data(), committed_, char{0});
}

void CudaDevice::HostRange::Release() {
  if (!registrations_.empty()) {
    device_->WaitForAll();
    Current current(*device_);
    char* at = data();
    for (const size_t bytes : registrations_) {
      device_->registered_.Remove(at);
      if (cudaHostUnregister(at) != cudaSuccess) (void)cudaGetLastError();
      at += bytes;
    }
    registrations_.clear();
  }
  committed_ = 0;
}

}  // namespace dynemb
