#include "cc/file/uring_block_reader.h"

#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "cc/file/block_transfer.h"
#include "cc/file/ring.h"

namespace dynemb {
namespace {

// The number of calls at once: roughly the number of cores that process the blocks.
constexpr size_t kMostRings = 16;

// The system had no room for the request. The caller then reads by itself.
bool IsBusy(int result) { return result == -EAGAIN || result == -ENOMEM || result == -ECANCELED; }

}  // namespace

// A ring, and the reads that are in flight in it.
class UringBlockReader::Lane {
 public:
  Status Open(unsigned depth, bool vectored) {
    DYNEMB_RETURN_IF_ERROR(ring_.Open(depth, vectored));
    transfers_.resize(ring_.depth());
    free_.reserve(ring_.depth());
    ended_.reserve(2 * size_t{ring_.depth()});
    for (unsigned slot = ring_.depth(); slot-- > 0;) free_.push_back(slot);
    return Status();
  }

  bool broken() const { return broken_; }
  void Forget() { ring_.Forget(); }

  void Read(const Options& options, BlockRead* reads, size_t n, const EndedFn& ended) {
    size_t next = 0;
    while (next < n || in_flight() != 0) {
      if (broken_ && next < n) {
        BlockTransfer(&reads[next]).Finish(*options.files);
        ended(reads[next++]);
      }
      for (; !broken_ && next < n && !free_.empty(); ++next) {
        const BlockTransfer transfer(&reads[next]);
        if (transfer.ended()) {
          ended(reads[next]);
        } else {
          Start(transfer);
        }
      }
      if (!ended_.empty()) {
        // The device has its next reads before the caller looks at the last ones.
        if (!broken_ && ring_.pushed() != 0) Wait(*options.files, 0);
        Deliver(ended);
      }
      if (in_flight() != 0) {
        // The queue stays at least three quarters full while there are reads to add.
        const size_t wait = next < n ? (in_flight() + 3) / 4 : in_flight();
        Wait(*options.files, static_cast<unsigned>(wait));
        Reap(options);
      }
    }
    Deliver(ended);
  }

 private:
  size_t in_flight() const { return transfers_.size() - free_.size(); }

  void Start(const BlockTransfer& transfer) {
    const unsigned slot = free_.back();
    free_.pop_back();
    transfers_[slot] = transfer;
    Push(slot);
  }

  void Push(unsigned slot) {
    const BlockTransfer& transfer = transfers_[slot];
    ring_.Push(slot, transfer.read()->fd, transfer.to(), transfer.bytes(), transfer.offset());
  }

  void End(unsigned slot) {
    free_.push_back(slot);
    ended_.push_back(transfers_[slot].read());
  }

  void Deliver(const EndedFn& ended) {
    for (const BlockRead* read : ended_) ended(*read);
    ended_.clear();
  }

  // Gives what was pushed to the system, and waits until about `wait` reads have ended; fewer after
  // an interruption.
  void Wait(FileSystem& files, unsigned wait) {
    if (broken_) {
      // Its reads still write to their buffers. The system completes them in any of its calls.
      (void)sched_yield();
      return;
    }
    const int error = ring_.Enter(wait);
    if (error == 0 || error == EINTR) return;
    if ((error == EAGAIN || error == EBUSY) && ring_.pushed() != in_flight()) {
      (void)sched_yield();  // what is with the system will end, and make room
      return;
    }
    broken_ = error != EAGAIN && error != EBUSY;
    FinishPushed(files);
  }

  // Reads what the system has not taken in the calling thread.
  void FinishPushed(FileSystem& files) {
    const unsigned pushed = ring_.pushed();
    for (unsigned i = 0; i < pushed; ++i) {
      const unsigned slot = ring_.PushedSlot(i);
      transfers_[slot].Finish(files);
      End(slot);
    }
    ring_.Unpush();
  }

  void Reap(const Options& options) {
    Ring::Completion completion;
    while (ring_.Pop(&completion)) {
      const unsigned slot = completion.slot;
      BlockTransfer& transfer = transfers_[slot];
      int result = completion.result;
      if (options.inject != nullptr) result = options.inject(*transfer.read(), result);
      if (!IsBusy(result)) transfer.Apply(*options.files, result);
      if (!transfer.ended() && !IsBusy(result) && !broken_) {
        Push(slot);
        continue;
      }
      transfer.Finish(*options.files);
      End(slot);
    }
  }

  Ring ring_;
  std::vector<BlockTransfer> transfers_;  // one for each slot of the ring
  std::vector<unsigned> free_;            // slots that are not in flight
  // Reads that have ended and were not delivered. A slot may have had two of them: one that Reap
  // has ended, and one that the system has not taken after it.
  std::vector<const BlockRead*> ended_;
  bool broken_ = false;
};

// The lanes. There is always one; more are made when they are needed.
class UringBlockReader::Pool {
 public:
  Pool(unsigned depth, bool vectored) : depth_(depth), vectored_(vectored) {
    lanes_.reserve(kMostRings);
    idle_.reserve(kMostRings);
  }

  Status Add() {
    auto lane = std::make_unique<Lane>();
    DYNEMB_RETURN_IF_ERROR(lane->Open(depth_, vectored_));
    idle_.push_back(lane.get());
    lanes_.push_back(std::move(lane));
    return Status();
  }

  // Null if there are none any more: all were broken.
  Lane* Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (idle_.empty() && lanes_.size() < most_) {
      bool added = false;
      try {
        added = Add().ok();
      } catch (const std::bad_alloc&) {
      }
      if (!added) most_ = lanes_.size();
    }
    returned_.wait(lock, [&] { return !idle_.empty() || lanes_.empty(); });
    if (lanes_.empty()) return nullptr;
    Lane* const lane = idle_.back();
    idle_.pop_back();
    return lane;
  }

  void Return(Lane* lane) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!lane->broken()) {
      idle_.push_back(lane);
      returned_.notify_one();
      return;
    }
    most_ = 0;  // what broke this one, breaks others
    for (auto& owned : lanes_) {
      if (owned.get() != lane) continue;
      owned = std::move(lanes_.back());
      lanes_.pop_back();
      break;
    }
    returned_.notify_all();
  }

  // In a child of fork.
  void Forget() {
    for (const auto& lane : lanes_) lane->Forget();
  }

 private:
  const unsigned depth_;
  const bool vectored_;
  std::mutex mutex_;
  // Guarded by the mutex:
  size_t most_ = kMostRings;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane*> idle_;
  std::condition_variable returned_;
};

Status UringBlockReader::Create(const Options& options, bool vectored,
                                std::unique_ptr<BlockReader>* reader) {
  auto pool = std::make_unique<Pool>(options.depth, vectored);
  DYNEMB_RETURN_IF_ERROR(pool->Add());
  reader->reset(new UringBlockReader(options, std::move(pool)));
  return Status();
}

UringBlockReader::UringBlockReader(const Options& options, std::unique_ptr<Pool> pool)
    : options_(options), pool_(std::move(pool)), pid_(getpid()) {}

UringBlockReader::~UringBlockReader() {
  if (getpid() == pid_) return;
  // A child does not have the memory of the rings, and the mutex may be locked in it for ever.
  pool_->Forget();
  (void)pool_.release();
}

void UringBlockReader::Read(BlockRead* reads, size_t n, const EndedFn& ended) {
  // For one read, pread is faster.
  Lane* const lane = n > 1 && getpid() == pid_ ? pool_->Take() : nullptr;
  if (lane == nullptr) {
    for (size_t i = 0; i < n; ++i) {
      BlockTransfer(&reads[i]).Finish(*options_.files);
      ended(reads[i]);
    }
    return;
  }
  lane->Read(options_, reads, n, ended);
  pool_->Return(lane);
}

}  // namespace dynemb
