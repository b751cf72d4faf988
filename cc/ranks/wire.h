// Wire: moves bytes between the ranks of a group. Gloo, MPI and others implement it.
//
// Contract. An exchange is collective: each rank calls Exchange with the same tag. Exchanges with
// different tags may run at the same time, in threads that each rank starts in any order. Exchanges
// with the same tag match in the order of the calls on each rank, so a caller runs one at a time.
//
// Failure. An exchange ends within the timeout of the wire: with all bytes, or with an error that
// names the ranks that did not answer. A wire that has failed stays failed: buffers may hold bytes
// of half an exchange, and the ranks no longer agree which exchange is next. Each later call
// returns the first error. The memory of an exchange that has failed must stay valid until the
// process ends: an engine may go on to write to it.
#ifndef DYNEMB_RANKS_WIRE_H_
#define DYNEMB_RANKS_WIRE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/table/status.h"

namespace dynemb {

// A range of bytes for each rank.
struct Slices {
  struct Slice {
    char* data = nullptr;
    size_t bytes = 0;
  };
  std::vector<Slice> of;

  explicit Slices(int ranks) : of(static_cast<size_t>(ranks)) {}
  Slice& operator[](int rank) { return of[static_cast<size_t>(rank)]; }
  const Slice& operator[](int rank) const { return of[static_cast<size_t>(rank)]; }
};

class Wire {
 public:
  Wire(int rank, int size, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout) {}
  virtual ~Wire() = default;
  static constexpr size_t kMostShort = size_t{1} << 20;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Sends to[r] to each rank r, and receives from[r] of it. The slices of this rank itself are
  // copied. Both sides must agree on the lengths, except that a rank may send fewer bytes, and not
  // none, than the other one has room for, if that is at most kMostShort. `operation` says in
  // errors, also in the errors of other ranks, what the exchange was for. Throws std::bad_alloc.
  virtual Status Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                          const Slices& from) = 0;

  // As Exchange, where no slice that a rank sends to another one has more than `most` bytes, on any
  // rank; all ranks give the same number. An engine may bring small slices in other ways.
  virtual Status ExchangeAtMost(size_t most, uint64_t tag, const std::string& operation,
                                const Slices& to, const Slices& from) {
    (void)most;
    return Exchange(tag, operation, to, from);
  }

  // Looks at the other ranks outside an exchange. Returns the failure of the wire, which may be one
  // that another rank has said. Otherwise sets (*ended)[r] if rank r has ended, or cannot be
  // reached: this alone is no failure.
  virtual Status Look(std::vector<bool>* ended) = 0;

  // Fails the wire with `reason`, and the wires of the other ranks if the engine can tell them.
  // Returns the first failure, which is this one if there was none.
  virtual Status Fail(const std::string& reason) = 0;
  static std::string Seconds(std::chrono::milliseconds time);  // "0.5 s"

  // The first failure.
  Status failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 protected:
  // Records a failure; returns whether it is the first one.
  bool Record(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return false;
    failure_ = Internal(reason);
    return true;
  }
  // "ranks 1, 2 have sent nothing for 60 s".
  std::string Late(const std::vector<int>& ranks, const char* what) const;

 private:
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  Status failure_;  // guarded by mutex_
};

// Keeps the memory of an exchange that has failed, or its owner, to the end of the process.
template <class T>
void KeepForever(T memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<T>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace dynemb

#endif  // DYNEMB_RANKS_WIRE_H_
