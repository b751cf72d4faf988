// Ring: the two queues of one io_uring, by the raw system calls. (The library liburing is no part
// of the systems that the wheel is for.)
//
// Contract. Not thread-safe; any thread may use a ring after another has. At most `depth` reads are
// in flight. A child of fork does not have the memory of the queues, and must only call Forget.
#ifndef DYNEMB_FILE_RING_H_
#define DYNEMB_FILE_RING_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/status.h"

namespace dynemb {

class Ring {
 public:
  static constexpr unsigned kMostDepth = 4096;

  // The end of a request: the number that was given to Push, and the bytes transferred or -errno.
  struct Completion {
    unsigned slot;
    int result;
  };

  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Makes the ring, and tests it. FailedPrecondition or ResourceExhausted says what the system
  // refuses. `vectored`: reads by the operation of older kernels even if there is a newer one.
  // Throws std::bad_alloc.
  Status Open(unsigned depth, bool vectored = false);

  unsigned depth() const { return depth_; }

  // Adds a read to the reads of the next Enter. `slot` is less than depth, and not in flight.
  void Push(unsigned slot, int fd, void* to, size_t bytes, uint64_t offset);
  // Reads that the system has not taken yet.
  unsigned pushed() const;
  // The slot of the i-th of these.
  unsigned PushedSlot(unsigned i) const;
  // Takes back all of these.
  void Unpush();

  // Gives the pushed reads to the system, and waits until at least `wait` more reads have ended
  // than have been popped. Returns 0, or an errno: EINTR, or EAGAIN or EBUSY if the system cannot
  // take more reads before others end; after any other error the ring is useless.
  int Enter(unsigned wait);

  // The next read that has ended; false if there is none yet.
  bool Pop(Completion* completion);

  // In a child of fork: closes the descriptor.
  void Forget();

 private:
  struct Mapping {
    void* data = nullptr;
    size_t bytes = 0;
  };

  Status Map(Mapping* mapping, size_t bytes, uint64_t offset);
  // Whether the system has the operation.
  bool Supports(uint8_t operation) const;
  Status Probe();
  void Close();

  int fd_ = -1;
  unsigned depth_ = 0;
  uint8_t operation_ = 0;
  Mapping submissions_, completions_, entries_;
  // Inside the mappings. The system writes the head of the submissions and the tail of the
  // completions; this class writes the others.
  unsigned* submission_head_ = nullptr;
  unsigned* submission_tail_ = nullptr;
  unsigned* submission_slots_ = nullptr;
  unsigned submission_mask_ = 0;
  unsigned* completion_head_ = nullptr;
  unsigned* completion_tail_ = nullptr;
  char* completion_slots_ = nullptr;
  unsigned completion_mask_ = 0;
  std::vector<iovec> vectors_;  // one for each slot; empty unless operation_ needs them
};

}  // namespace dynemb

#endif  // DYNEMB_FILE_RING_H_
