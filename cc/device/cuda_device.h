// CudaDevice: a GPU, as device.h wants it. This header needs no header of CUDA; kernels are
// launched where cuda_device.cuh is included, which needs nvcc.
//
// Memory of tables is physical memory that is mapped, piece by piece, into an address range that
// was reserved at its greatest size (CUDA's virtual memory management): growing copies nothing and
// moves nothing. New memory is cleared on the device's own stream, and every other stream waits for
// that before its next work; the host does not.
//
// Nothing here waits for the GPU, allocates or frees, but: Synchronize; Copy, if ordinary host
// memory takes part; Commit, which maps memory; Take, when a stream's workspace grows; Pinned,
// while the GPU is eight such sessions of the stream behind; and destructors and Clear, which wait
// for all work of the GPU.
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
#include "cc/device/piece_map.h"
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
  // Null is the device's own stream.
  using Stream = CUstream_st*;
  // Of a StreamExec its stream, of any other null.
  static Stream StreamOf(Exec& exec);

  // The GPU of this number: made when it is first asked for, one per process, never destroyed.
  // FailedPrecondition says what is missing: a driver, a driver as new as this library, a GPU, code
  // for this GPU, or a property of it that ranges need.
  static Status Get(int ordinal, CudaDevice** device);

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  // Bytes of its memory: all, and what ranges and workspaces have of it.
  size_t memory() const { return memory_; }
  size_t used() const { return used_; }
  // Bytes that nobody has, in any process.
  Status FreeMemory(size_t* bytes) const;

  // For a stream that will be destroyed, once its last session has begun: waits for its work, and
  // gives its workspace back. Session::After of it is nothing to wait for from now on, so tables
  // that were used on it stay.
  void Forget(Stream stream);

  // Memory of the device. What is committed reads as zero at first. A range of more than a
  // megabyte takes memory in units of 2 MiB and, once it is large, an eighth more than is asked for
  // (256 MiB at most) if there is as much. Smaller ones share such units (block_pool.h). Commit's
  // failure is ResourceExhausted, names the bytes and changes nothing. Not for several threads at
  // once.
  class Range {
   public:
    Range() = default;
    ~Range() { Release(); }
    Range(Range&& other) noexcept { *this = std::move(other); }
    Range& operator=(Range&& other) noexcept;

    // Addresses for `bytes`, or for as much as the device has if that is less; a power-of-two
    // fraction of it if the process has no more, but at least 1 GiB. Call once.
    Status Reserve(CudaDevice& device, size_t bytes) { return Reserve(device, bytes, kTable); }
    Status Commit(size_t bytes);
    // Waits for the GPU; everything committed reads as zero again, and stays committed.
    void Clear();

    char* data() const { return data_; }
    size_t committed() const { return committed_; }
    size_t reserved() const { return reserved_; }

   private:
    friend class CudaDevice;
    enum Use : uint8_t {
      kTable,      // new memory reads as zero; small ones are blocks of the device's pool
      kWorkspace,  // new memory reads as anything
      kPool        // likewise, and its memory counts where its blocks are used
    };

    Status Reserve(CudaDevice& device, size_t bytes, Use use);
    Status CommitBlock();
    Status CommitPieces(size_t bytes);
    void Release();

    CudaDevice* device_ = nullptr;
    char* data_ = nullptr;
    size_t reserved_ = 0;
    size_t committed_ = 0;
    Use use_ = kTable;
    bool block_ = false;          // of the device's pool
    std::vector<size_t> pieces_;  // bytes that were mapped at once, from the front
  };

  // Host memory that kernels reach at the host's address. It is page-locked when it is committed,
  // at some GB/s: in pieces of at least 1 MiB, so that the price of a call does not count, and of
  // an eighth of what there is up to 64 MiB, so that a batch that has to wait for one does not wait
  // for much more than it needs.
  class HostRange {
   public:
    HostRange() = default;
    ~HostRange() { Release(); }
    HostRange(HostRange&& other) noexcept { *this = std::move(other); }
    HostRange& operator=(HostRange&& other) noexcept;

    Status Reserve(CudaDevice& device, size_t bytes);
    Status Commit(size_t bytes);
    // As Range's.
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
    std::vector<size_t> pieces_;  // bytes that were registered at once, from the front
  };

 private:
  struct StreamState;

 public:
  // See device.h. Used and ended by the thread that made it. Once something has failed no more work
  // is given out. A body may have 4 KiB.
  class Session {
   public:
    using KeyLanes = ThreadLane;
    // The fewest of 4, 8, 16 or 32 threads that are one for each quad, if so many are: what is left
    // of a warp has other rows.
    static constexpr uint32_t RowWidth(size_t quads) {
      return quads <= 4 ? 4 : quads <= 8 ? 8 : quads <= 16 ? 16 : 32;
    }

    Session(CudaDevice& device, Stream stream);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

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
      // What is taken next is used by work that comes later in the stream.
      ~Scratch() { session_.taken_ = before_; }
      Scratch(const Scratch&) = delete;
      Scratch& operator=(const Scratch&) = delete;

     private:
      Session& session_;
      const size_t before_;
    };

    // From the stream's workspace, which only grows.
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
    void SortPairs(uint64_t* keys, uint32_t* values, size_t n, int bits = 64);
    Status Synchronize();
    Status status() const { return status_; }

   private:
    void* TakeBytes(size_t n, size_t size);
    void* PinnedBytes(size_t n, size_t size);
    // Has at least one thread for each of `threads` items, if they are not too many, run a kernel.
    void Launch(const char* what, const void* kernel, size_t threads, void** arguments);
    // Before work is given out. False if something has failed.
    bool Ready();
    // Keeps the first `error`, a cudaError_t, that is one. False if it is one.
    bool Check(const char* what, int error);
    bool Fail(Status status);

    CudaDevice& device_;
    StreamState* const state_;
    const Stream stream_;
    std::unique_lock<std::mutex> lock_;
    size_t taken_ = 0;   // bytes of the workspace
    size_t pinned_ = 0;  // bytes of the pinned one
    bool idle_ = false;  // nothing was given since the last Synchronize
    Status status_;
  };

 private:
  // Makes the GPU the calling thread's current one while it lives.
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
  // Waits for all work of the GPU. Its errors are those of the sessions that gave it.
  void WaitForAll() const;
  // Has [p, p + bytes) read as zero for all work that is given from now on.
  Status ClearMemory(void* p, size_t bytes);

  const int ordinal_;
  std::string name_;
  CUctx_st* context_ = nullptr;
  Stream own_stream_ = nullptr;
  size_t memory_ = 0;
  size_t granularity_ = 0;
  size_t most_threads_ = 0;  // that a launch has
  std::atomic<size_t> used_{0};

  // What a stream waits for before its next work: the last ClearMemory.
  std::mutex clear_mutex_;
  CUevent_st* cleared_ = nullptr;
  std::atomic<uint64_t> times_cleared_{0};

  // Streams that have had sessions and are not forgotten: they exist while this is held.
  std::mutex streams_mutex_;
  std::unordered_map<Stream, std::unique_ptr<StreamState>> streams_;

  std::mutex pool_mutex_;
  Range pool_memory_;
  BlockPool pool_;
  PieceMap host_pieces_;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_CUDA_DEVICE_H_
