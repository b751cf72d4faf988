// CudaDevice: a GPU as a Device (device.h). This header needs no header of CUDA. Sources that
// launch kernels include cuda_device.cuh, which needs nvcc.
//
// The memory of tables is physical memory that is mapped, as it is needed, into an address range
// that is reserved at its maximal size (CUDA's virtual memory management). Growth therefore neither
// copies nor moves anything. New memory is cleared on the device's own stream. Every other stream
// waits for that before its next work; the host does not wait.
//
// A stream may be destroyed at any time after its sessions, because resetting TensorFlow's context
// sends no notification. The stream's work still runs to its end. A CudaDevice uses a stream only
// in the stream's own sessions. Everything else waits for events, which are the device's. The
// workspace of a destroyed stream stays, and the next stream with the same handle takes it over.
//
// Only the following wait for the GPU, or allocate or free memory:
//
// - Synchronize,
// - Copy, if one side is ordinary host memory,
// - Commit, which maps memory,
// - Take, when the workspace of a stream grows,
// - Pinned, while the GPU is eight sessions with pinned memory behind on the stream,
// - destructors and Clear, which wait for all work of the GPU.
#ifndef DYNEMB_DEVICE_CUDA_DEVICE_H_
#define DYNEMB_DEVICE_CUDA_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc/device/block_pool.h"
#include "cc/device/device.h"
#include "cc/device/registered_memory.h"
#include "cc/device/stream_exec.h"
#include "cc/device/thread_lane.h"
#include "cc/table/arena.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"

struct CUctx_st;
struct CUevent_st;

namespace dynemb {

class CudaDevice {
 public:
  // Null: the device's own stream.
  using Stream = CUstream_st*;
  // The stream of a StreamExec; null for any other Exec.
  static Stream StreamOf(Exec& exec);

  // The GPU with this number. It is created by the first call, once per process, and never
  // destroyed. FailedPrecondition says what is missing: a driver, a driver that is new enough for
  // this library, a GPU, code for this GPU, or a property of the GPU that ranges need.
  static Status Get(int ordinal, CudaDevice** device);

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  // The bytes of its memory, and the bytes that ranges and workspaces use.
  size_t memory() const { return memory_; }
  size_t used() const { return used_; }
  // The bytes that no process uses.
  Status FreeMemory(size_t* bytes) const;

  // Memory of the device. Committed memory reads as zero at first. Ranges of more than 1 MiB take
  // memory in units of 2 MiB. When a large one grows, it grows by at least an eighth (at most 256
  // MiB), if there is enough memory. Smaller ranges share units (block_pool.h). If memory runs out,
  // Commit returns ResourceExhausted, which names the bytes, and changes nothing. Not thread-safe.
  class Range {
   public:
    Range() = default;
    ~Range() { Release(); }
    Range(Range&& other) noexcept { *this = std::move(other); }
    Range& operator=(Range&& other) noexcept;

    // Reserves addresses for `bytes`, or for the device's memory if that is less. If the process
    // does not have that many addresses, reserves a power-of-two fraction of them, but at least 1
    // GiB. Call once.
    Status Reserve(CudaDevice& device, size_t bytes) { return Reserve(device, bytes, kTable); }
    Status Commit(size_t bytes);
    // Waits for the GPU. Committed memory reads as zero again, and stays committed.
    void Clear();

    char* data() const { return data_; }
    size_t committed() const { return committed_; }
    size_t reserved() const { return reserved_; }

   private:
    friend class CudaDevice;
    // Whether Release waits until nothing uses the memory, or nothing does.
    enum class Idle : bool { kWait, kYes };
    enum Use : uint8_t {
      kTable,      // new memory reads as zero; small ranges are blocks of the device's pool
      kWorkspace,  // new memory has any contents
      kPool        // likewise; used() counts its blocks instead of its memory
    };

    Status Reserve(CudaDevice& device, size_t bytes, Use use);
    Status CommitOnce(size_t bytes);
    Status CommitBlock();
    Status CommitMapping(size_t bytes);
    void Release(Idle idle = Idle::kWait);

    CudaDevice* device_ = nullptr;
    char* data_ = nullptr;
    size_t reserved_ = 0;
    size_t committed_ = 0;
    Use use_ = kTable;
    bool block_ = false;            // it is a block of the device's pool
    std::vector<size_t> mappings_;  // the bytes of each mapping, from the front
  };

  // Host memory that kernels access at the host's address. Commit page-locks it, at a few GB/s, in
  // units of 2 MiB, and at least an eighth of the committed memory at a time, up to 64 MiB
  // (RegisterUpTo). A batch that has to wait for it therefore does not wait for much more memory
  // than it needs. Ranges of several units begin at the boundary of a huge page (Arena).
  class HostRange {
   public:
    HostRange() = default;
    ~HostRange() { Release(); }
    HostRange(HostRange&& other) noexcept { *this = std::move(other); }
    HostRange& operator=(HostRange&& other) noexcept;

    Status Reserve(CudaDevice& device, size_t bytes);
    Status Commit(size_t bytes);
    // Like Range::Clear.
    void Clear();

    char* data() const { return arena_.data(); }
    size_t committed() const { return committed_; }
    size_t reserved() const { return arena_.reserved(); }

   private:
    Status Register(size_t bytes);
    void Release();

    CudaDevice* device_ = nullptr;
    Arena arena_;
    size_t committed_ = 0;
    std::vector<size_t> registrations_;  // the bytes of each registration, from the front
  };

 private:
  struct StreamState;

 public:
  // See device.h. A session is used and destroyed by the thread that created it. After a failure it
  // gives no more work to the stream. A body may have up to 4000 bytes.
  class Session {
   public:
    using KeyLanes = ThreadLane;
    // The least of 4, 8, 16 and 32 threads with one thread per quad; 32 if there are more quads.
    // The other threads of a warp have other rows.
    static constexpr uint32_t RowWidth(size_t quads) {
      return quads <= 4 ? 4 : quads <= 8 ? 8 : quads <= 16 ? 16 : 32;
    }

    // Half of the threads that fit: what a kernel with many registers gets.
    size_t Teams(size_t quads) const { return device_.resident_threads_ / 2 / RowWidth(quads); }

    Session(CudaDevice& device, Stream stream);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    void Publish();
    void After(Stream other);

    // In cuda_device.cuh.
    template <class Body>
    void ForEach(size_t n, const Body& body);
    template <class Body>
    void ForKeys(size_t n, const Body& body);
    template <class Body>
    void ForRows(size_t n, size_t quads, const Body& body);

    class Scratch {
     public:
      explicit Scratch(Session& session) : session_(session), before_(session.taken_) {}
      // The memory is reused only by work that comes later in the stream.
      ~Scratch() { session_.taken_ = before_; }
      Scratch(const Scratch&) = delete;
      Scratch& operator=(const Scratch&) = delete;

     private:
      Session& session_;
      const size_t before_;
    };

    // Takes memory of the stream's workspace, which only grows.
    template <class T>
    T* Take(size_t n) {
      return static_cast<T*>(TakeBytes(n, sizeof(T)));
    }
    template <class T>
    T* Pinned(size_t n) {
      return static_cast<T*>(PinnedBytes(n, sizeof(T)));
    }
    void Copy(void* to, const void* from, size_t bytes);
    void Fill(void* p, uint8_t byte, size_t bytes);
    void ExclusiveSum(uint32_t* values, size_t n);
    void SortPairs(uint64_t* keys, uint32_t* values, size_t n, int bits = 64) {
      SortPairsOf(keys, values, n, bits);
    }
    void SortPairs(uint32_t* keys, uint32_t* values, size_t n, int bits = 32) {
      SortPairsOf(keys, values, n, bits);
    }
    Status Synchronize();
    Status status() const { return status_; }
    void Retire(Range range);

   private:
    void* TakeBytes(size_t n, size_t size);
    void* PinnedBytes(size_t n, size_t size);
    template <class Key>
    void SortPairsOf(Key* keys, uint32_t* values, size_t n, int bits);
    // Launches a kernel with at least `threads` threads, or with most_threads_ if that is less, in
    // blocks of `per_block`.
    void Launch(const char* what, const void* kernel, size_t threads, unsigned int per_block,
                void** arguments);
    // Call before giving work. False if something has failed.
    bool Ready();
    // Assigns the state to this stream if another stream with the same handle had it.
    void Adopt();
    // Returns whether `error`, a cudaError_t, is success. Records the first failure.
    bool Check(const char* what, int error);
    bool Fail(Status status);

    CudaDevice& device_;
    StreamState* const state_;
    const Stream stream_;
    std::unique_lock<std::mutex> lock_;
    size_t taken_ = 0;       // bytes of the workspace in use
    size_t pinned_ = 0;      // bytes of the pinned memory in use
    bool idle_ = true;       // no work was given since the last Synchronize
    bool published_ = true;  // no work was given since the last Publish
    Status status_;
  };

 private:
  // Makes the GPU current for the calling thread, during the life of this object.
  class Current {
   public:
    explicit Current(const CudaDevice& device) { device.MakeCurrent(); }
    ~Current() { LeaveCurrent(); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
  };

  explicit CudaDevice(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  Status Init();
  void MakeCurrent() const;
  static void LeaveCurrent();
  StreamState* StateOf(Stream stream);
  // Waits for all work of the GPU. Ignores its errors, which the sessions that gave it report.
  void WaitForAll() const;
  // Makes [p, p + bytes) read as zero for all work that is given from now on.
  Status ClearMemory(void* p, size_t bytes);
  // Gives back the retired ranges whose work is done or, if `wait`, all of them. Returns whether
  // there were any.
  bool ReleaseRetired(bool wait);

  const int ordinal_;
  std::string name_;
  CUctx_st* context_ = nullptr;
  Stream own_stream_ = nullptr;
  size_t memory_ = 0;
  size_t granularity_ = 0;
  size_t resident_threads_ = 0;  // the number of threads that run at the same time
  size_t most_threads_ = 0;      // the maximal number of threads of a launch
  std::atomic<size_t> used_{0};

  // The last ClearMemory. Every stream waits for it before its next work.
  std::mutex clear_mutex_;
  CUevent_st* cleared_ = nullptr;
  std::atomic<uint64_t> times_cleared_{0};

  // The streams that have had sessions. They may have been destroyed. The mutex also protects
  // StreamState::published.
  std::mutex streams_mutex_;
  std::unordered_map<Stream, std::unique_ptr<StreamState>> streams_;

  // Ranges that are given back after an event (Session::Retire), and events for further ones. Held
  // before pool_mutex_.
  struct Retired {
    Range range;
    CUevent_st* done;
  };
  std::mutex retired_mutex_;
  std::vector<Retired> retired_;
  std::vector<CUevent_st*> spare_events_;

  std::mutex pool_mutex_;
  Range pool_memory_;
  BlockPool pool_;
  RegisteredMemory registered_;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_DEVICE_H_
