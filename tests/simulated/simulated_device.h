// SimulatedDevice: a Device (device.h) of host memory and host threads.
//
// Work is done at once when it is given: by the threads of the operator's Exec or, if Lanes are
// LockstepLanes, by teams in lock-step. "Device" memory and "host" memory are two arenas, so that
// code that confuses them is found by the address sanitizer, or by a wrong row.
//
// The device counts what a GPU would be given (DeviceWork).
#ifndef DYNEMB_TESTS_SIMULATED_DEVICE_H_
#define DYNEMB_TESTS_SIMULATED_DEVICE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/device/device.h"
#include "cc/table/arena.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "tests/simulated/simulated_guard.h"

namespace dynemb {

// The work that was given to a device. Work on no items is not given to a GPU, and is not counted.
struct DeviceWork {
  uint64_t launches = 0;  // ForEach, ForKeys, ForRows, ExclusiveSum and SortPairs
  uint64_t copies = 0;    // Copy
  uint64_t bytes = 0;     // of copies
  // Copies from or to ordinary host memory, for which the host of a GPU waits.
  uint64_t ordinary = 0;
  uint64_t fills = 0;  // Fill
  uint64_t waits = 0;  // Synchronize
  // Waits for all work of the device: ranges that were cleared or given back, except by Retire.
  uint64_t drains = 0;

  DeviceWork operator-(const DeviceWork& o) const {
    return {launches - o.launches, copies - o.copies, bytes - o.bytes,  ordinary - o.ordinary,
            fills - o.fills,       waits - o.waits,   drains - o.drains};
  }
};

template <class KeyLanesT, class RowLanesT>
class SimulatedDevice {
 public:
  // Null: only the calling thread.
  using Stream = Exec*;
  static Stream StreamOf(Exec& exec) { return &exec; }

  // Addresses of ranges.
  class KnownMemory {
   public:
    void Add(const Arena& arena) {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_[arena.data()] = arena.data() + arena.reserved();
    }
    void Remove(const Arena& arena) {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_.erase(arena.data());
    }
    bool Has(const void* p) const {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto after = ends_.upper_bound(static_cast<const char*>(p));
      return after != ends_.begin() && p < std::prev(after)->second;
    }

   private:
    mutable std::mutex mutex_;
    std::map<const char*, const char*> ends_;
  };

  // An arena whose addresses the device knows.
  class KnownArena {
   public:
    KnownArena() = default;
    ~KnownArena() { Forget(); }
    KnownArena(KnownArena&& o) noexcept { *this = std::move(o); }
    KnownArena& operator=(KnownArena&& o) noexcept {
      Forget();
      device_ = std::exchange(o.device_, nullptr);
      arena_ = std::move(o.arena_);
      return *this;
    }
    Status Reserve(SimulatedDevice& device, size_t bytes) {
      DYNEMB_RETURN_IF_ERROR(arena_.Reserve(std::min(bytes, kMostAddresses), 1));
      device_ = &device;
      device.known_.Add(arena_);
      return Status();
    }
    Arena* operator->() { return &arena_; }
    const Arena* operator->() const { return &arena_; }
    void Clear() {
      device_->drains_ += arena_.committed() != 0;
      arena_.Clear();
    }
    void Forget(bool drains = true) {
      if (device_ == nullptr) return;
      device_->known_.Remove(arena_);
      device_->drains_ += drains && arena_.committed() != 0;
      device_ = nullptr;
    }

   private:
    SimulatedDevice* device_ = nullptr;
    Arena arena_;
  };

  class Session;

  // Memory that may run out: a commit fails if all ranges of the device together would exceed its
  // memory.
  class Range {
   public:
    Status Reserve(SimulatedDevice& device, size_t bytes) {
      device_ = &device;
      return arena_.Reserve(device, std::min(bytes, device.memory_));
    }
    Status Commit(size_t bytes) {
      if (bytes <= committed_) return Status();
      // Commits an eighth more than before, if there is enough memory.
      const size_t ahead = std::min(committed_ + committed_ / 8, arena_->reserved());
      if (ahead > bytes && device_->used_ + ahead - committed_ <= device_->memory_) bytes = ahead;
      const size_t more = bytes - committed_;
      if (device_->used_ + more > device_->memory_) {
        return ResourceExhausted("the device has " +
                                 std::to_string(device_->memory_ - device_->used_) +
                                 " bytes left, and " + std::to_string(more) + " are needed");
      }
      DYNEMB_RETURN_IF_ERROR(arena_->Commit(bytes));
      device_->used_ += more;
      committed_ = bytes;
      return Status();
    }
    void Clear() { arena_.Clear(); }
    char* data() const { return arena_->data(); }
    size_t committed() const { return committed_; }
    size_t reserved() const { return arena_->reserved(); }

    Range() = default;
    ~Range() { Release(); }
    Range(Range&& o) noexcept { *this = std::move(o); }
    Range& operator=(Range&& o) noexcept {
      Release();
      device_ = std::exchange(o.device_, nullptr);
      committed_ = std::exchange(o.committed_, 0);
      arena_ = std::move(o.arena_);
      return *this;
    }

   private:
    friend class Session;
    void Release() {
      if (device_ != nullptr) device_->used_ -= committed_;
      device_ = nullptr;
    }
    SimulatedDevice* device_ = nullptr;
    KnownArena arena_;
    size_t committed_ = 0;  // as requested; the arena may have more
  };
  class HostRange {
   public:
    Status Reserve(SimulatedDevice& device, size_t bytes) { return arena_.Reserve(device, bytes); }
    Status Commit(size_t bytes) { return arena_->Commit(bytes); }
    void Clear() { arena_.Clear(); }
    char* data() const { return arena_->data(); }
    size_t committed() const { return arena_->committed(); }
    size_t reserved() const { return arena_->reserved(); }

   private:
    KnownArena arena_;
  };

  class Session {
   public:
    using KeyLanes = KeyLanesT;
    using RowLanes = RowLanesT;
    // Always the same. Tests use devices of several widths, to show that the results of bodies do
    // not depend on it.
    static constexpr uint32_t RowWidth(size_t) { return RowLanes::width(); }
    // Few, so that small tests give runs of items to teams.
    static constexpr size_t Teams(size_t) { return 2; }

    Session(SimulatedDevice& device, Stream stream)
        : device_(device), lock_(device.mutex_), exec_(stream != nullptr ? stream : &serial_) {}
    ~Session() { GiveBack(0); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    void Publish() {}
    void After(Stream) {}

    template <class Body>
    void ForEach(size_t n, const Body& body) {
      if (!status_.ok()) return;
      device_.launches_ += n != 0;
      const AccessScope access;
      if constexpr (device::kHasItems<Body>) n = std::min(n, body.Items());
      exec_->ParallelFor(n, kGrain, [&body](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) body(i);
      });
    }
    template <class Body>
    void ForKeys(size_t n, const Body& body) {
      ForTeams<KeyLanes>(n, body);
    }
    template <class Body>
    void ForRows(size_t n, size_t, const Body& body) {
      ForTeams<RowLanes>(n, body);
    }

    class Scratch {
     public:
      explicit Scratch(Session& session) : session_(session), before_(session.taken_.size()) {}
      ~Scratch() { session_.GiveBack(before_); }
      Scratch(const Scratch&) = delete;
      Scratch& operator=(const Scratch&) = delete;

     private:
      Session& session_;
      const size_t before_;
    };

    template <class T>
    T* Take(size_t n) {
      if (!Working()) return nullptr;
      // Filled with garbage: on a GPU, an array has the contents that the last session left there.
      const size_t bytes = std::max<size_t>(n, 1) * sizeof(T);
      taken_.emplace_back();  // first: if it throws, no memory is lost
      char* const p = Allocate(bytes);
      if (p == nullptr) {
        taken_.pop_back();
        return nullptr;
      }
      taken_.back() = {p, bytes};
      const AccessScope access;
      std::memset(p, 0xA5, bytes);
      return reinterpret_cast<T*>(p);
    }

    template <class T>
    T* Pinned(size_t n) {
      pinned_.emplace_back(std::max<size_t>(n, 1) * sizeof(T));
      return reinterpret_cast<T*>(pinned_.back().data());
    }

    void Copy(void* to, const void* from, size_t bytes) {
      if (bytes == 0 || !status_.ok()) return;
      ++device_.copies_;
      device_.ordinary_ += !IsKnown(to) || !IsKnown(from);
      device_.bytes_ += bytes;
      const AccessScope access;
      std::memcpy(to, from, bytes);
    }
    void Fill(void* p, uint8_t byte, size_t bytes) {
      if (bytes == 0 || !status_.ok()) return;
      ++device_.fills_;
      const AccessScope access;
      std::memset(p, byte, bytes);
    }
    // These two also take workspace.
    void ExclusiveSum(uint32_t* values, size_t n) {
      if (!Working()) return;
      device_.launches_ += n != 0;
      const AccessScope access;
      uint32_t sum = 0;
      for (size_t i = 0; i < n; ++i) sum += std::exchange(values[i], sum);
    }
    template <class Key>
    void SortPairs(Key* keys, uint32_t* values, size_t n, int bits = 8 * sizeof(Key)) {
      static_assert(std::is_same_v<Key, uint64_t> || std::is_same_v<Key, uint32_t>);
      if (!Working()) return;
      device_.launches_ += n != 0;
      const AccessScope access;
      const uint64_t low = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
      std::vector<size_t> order(n);
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return (keys[a] & low) < (keys[b] & low); });
      const std::vector<Key> k(keys, keys + n);
      const std::vector<uint32_t> v(values, values + n);
      for (size_t i = 0; i < n; ++i) {
        keys[i] = k[order[i]];
        values[i] = v[order[i]];
      }
    }
    Status Synchronize() {
      ++device_.waits_;
      return status_;
    }
    Status status() const { return status_; }
    // All work given so far is done.
    void Retire(Range range) { range.arena_.Forget(/*drains=*/false); }

   private:
    static constexpr size_t kGrain = 256;
    static constexpr size_t kAlignment = 256;

    char* Allocate(size_t bytes) {
      if (SimulatedGuard* const guard = SimulatedGuard::Get()) {
        void* const p = guard->Allocate(bytes);
        if (p == nullptr)
          status_ = ResourceExhausted("no guarded memory for the work of this call");
        return static_cast<char*>(p);
      }
      return static_cast<char*>(::operator new (bytes, std::align_val_t{kAlignment}));
    }
    void GiveBack(size_t keep) {
      for (; taken_.size() > keep; taken_.pop_back()) {
        if (SimulatedGuard* const guard = SimulatedGuard::Get()) {
          guard->Free(taken_.back().first);
        } else {
          ::operator delete (taken_.back().first, std::align_val_t{kAlignment});
        }
      }
    }
    // Whether an address is in a range, or from Take or Pinned.
    bool IsKnown(const void* p) const {
      const auto* const at = static_cast<const char*>(p);
      const auto has = [at](const std::pair<char*, size_t>& memory) {
        return at >= memory.first && at < memory.first + memory.second;
      };
      return std::any_of(taken_.begin(), taken_.end(), has) ||
             std::any_of(pinned_.begin(), pinned_.end(),
                         [at](const std::vector<char>& memory) {
                           return at >= memory.data() && at < memory.data() + memory.size();
                         }) ||
             device_.known_.Has(p);
    }
    // False if something has failed, or must fail now (FailTake).
    bool Working() {
      if (status_.ok() && device_.takes_ != kNever && device_.takes_-- == 0) {
        status_ = ResourceExhausted("no memory for the work of this call");
        device_.takes_ = kNever;
      }
      return status_.ok();
    }
    template <class Lanes, class Body>
    void ForTeams(size_t n, const Body& body) {
      if (!status_.ok()) return;
      device_.launches_ += n != 0;
      const AccessScope access;
      if constexpr (device::kHasItems<Body>) n = std::min(n, body.Items());
      Lanes::Launch(*exec_, n, 64, [&body](Lanes& lanes, size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) body(lanes, i);
      });
    }

    SimulatedDevice& device_;
    std::lock_guard<std::mutex> lock_;
    SerialExec serial_;
    Exec* exec_;
    std::vector<std::pair<char*, size_t>> taken_;
    std::vector<std::vector<char>> pinned_;
    Status status_;
  };

  // A device with `memory` bytes of memory for tables.
  explicit SimulatedDevice(size_t memory = ~size_t{0} / 2) : memory_(memory) {}
  size_t used() const { return used_; }
  DeviceWork work() const {
    return {launches_, copies_, bytes_, ordinary_, fills_, waits_, drains_};
  }
  // The number of calls of Synchronize.
  uint64_t waits() const { return waits_; }
  // Makes the n-th (from 0) request for workspace from now on fail, once. Returns whether the
  // failure set by the last call is still pending.
  static constexpr uint64_t kNever = ~uint64_t{0};
  bool FailTake(uint64_t n) { return takes_.exchange(n) != kNever; }

 private:
  // The maximal addresses of a range: sanitizers keep shadow memory for all of them.
  static constexpr size_t kMostAddresses = size_t{1} << 30;

  const size_t memory_;
  std::atomic<size_t> used_{0};
  std::atomic<uint64_t> launches_{0}, copies_{0}, bytes_{0}, ordinary_{0}, fills_{0}, waits_{0};
  std::atomic<uint64_t> drains_{0};
  KnownMemory known_;
  std::atomic<uint64_t> takes_{kNever};
  std::mutex mutex_;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_SIMULATED_DEVICE_H_
