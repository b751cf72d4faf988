#include "cc/file/thread_block_reader.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/file/block_transfer.h"

namespace dynemb {
namespace {

// With 64 reads at once, each of which takes 80 us, a device does 800,000 per second: more than
// threads that block for each read can start.
constexpr size_t kMostThreads = 64;

struct Batch {
  Batch(BlockRead* reads, size_t n) : reads(reads), n(n) {}

  // Reads until no read is left to take.
  void Work(FileSystem& files) {
    // Relaxed is enough to take each read once. The batch was published under the mutex, and its
    // results are published when a worker leaves it, also under the mutex.
    for (;;) {
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= n) return;
      BlockTransfer(&reads[i]).Finish(files);
    }
  }
  bool HasWork() const { return next.load(std::memory_order_relaxed) < n; }

  BlockRead* const reads;
  const size_t n;
  std::atomic<size_t> next{0};
  // Guarded by the mutex of the pool:
  size_t workers = 0;  // in Work
  Batch* later = nullptr;
  std::condition_variable left;  // workers is 0
};

}  // namespace

class ThreadBlockReader::Pool {
 public:
  Pool(FileSystem& files, size_t most) : files_(files), most_(most) { threads_.reserve(most); }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Run(Batch* batch) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Append(batch);
      const size_t wanted = std::min(batch->n - 1, most_);
      while (idle_ + starting_ < wanted && threads_.size() < most_ && Start()) {
      }
    }
    // A worker wakes two others if there is work left: the caller would take longer to wake all.
    wake_.notify_one();
    wake_.notify_one();
    batch->Work(files_);
    std::unique_lock<std::mutex> lock(mutex_);
    Remove(batch);
    batch->left.wait(lock, [&] { return batch->workers == 0; });
  }

 private:
  // False if the system has no more threads; then there will be no further attempt.
  bool Start() {
    try {
      threads_.emplace_back([this] { Loop(); });
      ++starting_;
      return true;
    } catch (...) {
      most_ = threads_.size();
      return false;
    }
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    --starting_;
    for (;;) {
      ++idle_;
      Batch* batch = nullptr;
      // Once only: others take reads without the mutex, so that a second call may find none.
      wake_.wait(lock, [&] { return stopped_ || (batch = FirstWithWork()) != nullptr; });
      --idle_;
      if (stopped_) return;
      ++batch->workers;
      const bool others = idle_ != 0;
      lock.unlock();
      if (others) {
        wake_.notify_one();
        wake_.notify_one();
      }
      batch->Work(files_);
      lock.lock();
      // Under the mutex: the caller may destroy the batch as soon as it sees 0.
      if (--batch->workers == 0) batch->left.notify_one();
    }
  }

  // Drops the batches of which all reads are taken; their callers find them missing.
  Batch* FirstWithWork() {
    while (first_ != nullptr && !first_->HasWork()) first_ = first_->later;
    return first_;
  }

  void Append(Batch* batch) {
    Batch** end = &first_;
    while (*end != nullptr) end = &(*end)->later;
    *end = batch;
  }

  void Remove(Batch* batch) {
    for (Batch** at = &first_; *at != nullptr; at = &(*at)->later) {
      if (*at == batch) {
        *at = batch->later;
        return;
      }
    }
  }

  FileSystem& files_;
  std::mutex mutex_;
  // Guarded by the mutex:
  size_t most_;
  std::vector<std::thread> threads_;
  size_t starting_ = 0;
  size_t idle_ = 0;
  bool stopped_ = false;
  Batch* first_ = nullptr;
  std::condition_variable wake_;
};

ThreadBlockReader::ThreadBlockReader(FileSystem& files, unsigned depth, bool from_last)
    : files_(files),
      from_last_(from_last),
      pool_(std::make_unique<Pool>(files, std::min<size_t>(depth, kMostThreads) - 1)),
      pid_(getpid()) {}

ThreadBlockReader::~ThreadBlockReader() {
  // A child has no threads to join, and the mutex may be locked in it for ever.
  if (getpid() != pid_) (void)pool_.release();
}

void ThreadBlockReader::Read(BlockRead* reads, size_t n, const EndedFn& ended) {
  Batch batch(reads, n);
  if (n > 1 && getpid() == pid_) {
    pool_->Run(&batch);
  } else {
    batch.Work(files_);
  }
  for (size_t i = 0; i < n; ++i) ended(reads[from_last_ ? n - 1 - i : i]);
}

}  // namespace dynemb
