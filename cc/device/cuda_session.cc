#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "cc/device/cuda_algorithms.h"
#include "cc/device/cuda_device.h"
#include "cc/device/cuda_driver.h"
#include "cc/device/cuda_stream_state.h"

namespace dynemb {
namespace {

// The alignment of arrays in workspaces.
constexpr size_t kAlignment = 256;
// The addresses reserved for the pinned memory of a session, which holds views of tables and the
// begins of bags.
constexpr size_t kPinnedMost = size_t{16} << 30;

// *bytes = n * size, rounded up to a multiple of kAlignment, at least kAlignment. False on
// overflow.
bool ArrayBytes(size_t n, size_t size, size_t* bytes) {
  if (n > (std::numeric_limits<size_t>::max() - kAlignment) / size) return false;
  *bytes = std::max((n * size + kAlignment - 1) / kAlignment, size_t{1}) * kAlignment;
  return true;
}

Status TooLarge(size_t n, size_t size) {
  return ResourceExhausted("an array of " + std::to_string(n) + " elements of " +
                           std::to_string(size) + " bytes is larger than any memory");
}

}  // namespace

CudaDevice::Session::Session(CudaDevice& device, Stream stream)
    : device_(device),
      state_(device.StateOf(stream)),
      stream_(state_->stream),
      lock_(state_->mutex),
      status_(state_->status) {
  device_.MakeCurrent();
  if (stream != nullptr) Adopt();
}

CudaDevice::Session::~Session() {
  Publish();
  if (pinned_ > 0) {
    state_->pinned[state_->next_pinned].busy = !idle_;
    state_->next_pinned = (state_->next_pinned + 1) % std::size(state_->pinned);
  }
  device_.LeaveCurrent();
}

void CudaDevice::Session::Adopt() {
  unsigned long long number = 0;
  if (!status_.ok() || !Check("cudaStreamGetId", cudaStreamGetId(stream_, &number))) return;
  if (number == state_->number) return;
  state_->number = number;
  state_->times_cleared = 0;
  // The work of the destroyed stream may still use the workspace. Only sessions of this handle
  // write `published`, and this is the only one.
  if (state_->published == nullptr) return;
  if (Ready()) Check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, state_->published, 0));
}

void CudaDevice::Session::Publish() {
  if (published_ || idle_) return;
  const cudaEvent_t event = pinned_ > 0 ? state_->pinned[state_->next_pinned].done : state_->done;
  if (cudaEventRecord(event, stream_) != cudaSuccess) {
    (void)cudaGetLastError();
    (void)cudaStreamSynchronize(stream_);
    idle_ = true;
    return;
  }
  published_ = true;
  std::lock_guard<std::mutex> lock(device_.streams_mutex_);
  state_->published = event;
}

bool CudaDevice::Session::Fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
  return false;
}

bool CudaDevice::Session::Check(const char* what, int error) {
  return error == cudaSuccess || Fail(CudaError(what, error));
}

bool CudaDevice::Session::Ready() {
  if (!status_.ok()) return false;
  idle_ = published_ = false;
  const uint64_t times = device_.times_cleared_.load(std::memory_order_acquire);
  if (times == state_->times_cleared) return true;
  state_->times_cleared = times;
  return Check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, device_.cleared_, 0));
}

void CudaDevice::Session::After(Stream other) {
  std::lock_guard<std::mutex> lock(device_.streams_mutex_);
  const auto found = device_.streams_.find(other);
  if (found == device_.streams_.end() || found->second.get() == state_) return;
  const cudaEvent_t event = found->second->published;
  if (event == nullptr || !Ready()) return;
  Check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, event, 0));
}

void CudaDevice::Session::Launch(const char* what, const void* kernel, size_t threads,
                                 unsigned int per_block, void** arguments) {
  if (!Ready()) return;
  threads = std::min(threads, device_.most_threads_);
  const dim3 blocks(static_cast<unsigned int>((threads + per_block - 1) / per_block));
  Check(what,
        cudaLaunchKernel(kernel, blocks, dim3(per_block), arguments, /*sharedMem=*/0, stream_));
}

void* CudaDevice::Session::TakeBytes(size_t n, size_t size) {
  if (!status_.ok()) return nullptr;
  size_t bytes = 0;
  if (!ArrayBytes(n, size, &bytes) || bytes > std::numeric_limits<size_t>::max() - taken_) {
    Fail(TooLarge(n, size));
    return nullptr;
  }
  const Status status = state_->workspace.Commit(taken_ + bytes);
  if (!status.ok()) {
    Fail(Status(status.code(), "the workspace: " + status.message()));
    return nullptr;
  }
  void* const p = state_->workspace.data() + taken_;
  taken_ += bytes;
  return p;
}

void* CudaDevice::Session::PinnedBytes(size_t n, size_t size) {
  if (!status_.ok()) return nullptr;
  StreamState::Pinned& pinned = state_->pinned[state_->next_pinned];
  if (pinned.busy) {
    if (!Check("cudaEventSynchronize", cudaEventSynchronize(pinned.done))) return nullptr;
    pinned.busy = false;
  }
  size_t bytes = 0;
  if (!ArrayBytes(n, size, &bytes) || bytes > std::numeric_limits<size_t>::max() - pinned_) {
    Fail(TooLarge(n, size));
    return nullptr;
  }
  Status status;
  if (pinned.memory.reserved() == 0) status = pinned.memory.Reserve(device_, kPinnedMost);
  if (status.ok()) status = pinned.memory.Commit(pinned_ + bytes);
  if (!status.ok()) {
    Fail(Status(status.code(), "pinned host memory: " + status.message()));
    return nullptr;
  }
  void* const p = pinned.memory.data() + pinned_;
  pinned_ += bytes;
  return p;
}

void CudaDevice::Session::Copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0 || !Ready()) return;
  auto* t = static_cast<char*>(to);
  const auto* f = static_cast<const char*>(from);
  const RegisteredMemory& registered = device_.registered_;
  while (bytes > 0) {
    const size_t n = registered.Within(f, registered.Within(t, bytes));
    if (!Check("cudaMemcpyAsync", cudaMemcpyAsync(t, f, n, cudaMemcpyDefault, stream_))) return;
    t += n;
    f += n;
    bytes -= n;
  }
}

void CudaDevice::Session::Fill(void* p, uint8_t byte, size_t bytes) {
  if (bytes == 0 || !Ready()) return;
  auto* at = static_cast<char*>(p);
  while (bytes > 0) {
    const size_t n = device_.registered_.Within(at, bytes);
    if (!Check("cudaMemsetAsync", cudaMemsetAsync(at, byte, n, stream_))) return;
    at += n;
    bytes -= n;
  }
}

void CudaDevice::Session::ExclusiveSum(uint32_t* values, size_t n) {
  if (n == 0 || !Ready()) return;
  if (n > std::numeric_limits<uint32_t>::max()) {
    Fail(InvalidArgument("ExclusiveSum: more than 2^32 - 1 values: " + std::to_string(n)));
    return;
  }
  const auto count = static_cast<uint32_t>(n);
  const Scratch scratch(*this);
  size_t bytes = 0;
  if (!Check("ExclusiveSum", CudaExclusiveSum(nullptr, &bytes, values, count, stream_))) return;
  if (void* const storage = TakeBytes(bytes, 1)) {
    Check("ExclusiveSum", CudaExclusiveSum(storage, &bytes, values, count, stream_));
  }
}

template <class Key>
void CudaDevice::Session::SortPairsOf(Key* keys, uint32_t* values, size_t n, int bits) {
  if (n == 0 || bits == 0 || !Ready()) return;
  if (n > std::numeric_limits<uint32_t>::max()) {
    Fail(InvalidArgument("SortPairs: more than 2^32 - 1 pairs: " + std::to_string(n)));
    return;
  }
  const auto count = static_cast<uint32_t>(n);
  const Scratch scratch(*this);
  auto* const other_keys = Take<Key>(n);
  auto* const other_values = Take<uint32_t>(n);
  size_t bytes = 0;
  bool in_others = false;
  const auto sort = [&](void* storage) {
    return Check("SortPairs", CudaSortPairs(storage, &bytes, keys, other_keys, values, other_values,
                                            count, bits, stream_, &in_others));
  };
  if (status_.ok() && sort(nullptr)) {
    void* const storage = TakeBytes(bytes, 1);
    if (storage != nullptr && sort(storage) && in_others) {
      Copy(keys, other_keys, n * sizeof(*keys));
      Copy(values, other_values, n * sizeof(*values));
    }
  }
}
template void CudaDevice::Session::SortPairsOf(uint64_t*, uint32_t*, size_t, int);
template void CudaDevice::Session::SortPairsOf(uint32_t*, uint32_t*, size_t, int);

void CudaDevice::Session::Retire(Range range) {
  if (range.committed() == 0) return;
  device_.ReleaseRetired(/*wait=*/false);
  std::lock_guard<std::mutex> lock(device_.retired_mutex_);
  cudaEvent_t done = nullptr;
  if (!device_.spare_events_.empty()) {
    done = device_.spare_events_.back();
    device_.spare_events_.pop_back();
  } else if (cudaEventCreateWithFlags(&done, cudaEventDisableTiming) != cudaSuccess) {
    (void)cudaGetLastError();
    return;  // the range waits for the GPU
  }
  if (cudaEventRecord(done, stream_) != cudaSuccess) {
    (void)cudaGetLastError();
    device_.spare_events_.push_back(done);
    return;  // likewise
  }
  device_.retired_.push_back({std::move(range), done});
}

Status CudaDevice::Session::Synchronize() {
  if (Check("cudaStreamSynchronize", cudaStreamSynchronize(stream_))) idle_ = true;
  return status_;
}

}  // namespace dynemb
