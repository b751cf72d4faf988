// SharedRings: messages between the processes of one machine, by memory that they share.
//
// Layout. The memory is a memfd, which has no name and no limit of /dev/shm, and which the kernel
// frees when its last process ends, however that ends. It has a doorbell for each process, and a
// ring for each ordered pair of them, of at most 256 KiB:
//
//   token | doorbells [n] | rings [n][n]: head, tail, blocked | bytes [n][n]
//
// A message goes through the ring of its sender and receiver in frames: a header with the tag and
// the length of the whole message, then some of its bytes. Frames of other messages may lie
// between them.
//
// Invariants. A ring has one process that writes it, and one that reads it: the writer moves only
// the head, and the reader only the tail, after it has copied. There is no lock that a process
// could take with it when it is killed or stopped. A process that waits for messages takes those
// of all tags out of its rings, and keeps what no exchange has asked for yet in its own memory: a
// message cannot stand in the way of another one.
//
// Waiting. A process sleeps on the word of its doorbell (a futex). A process that writes a frame
// for it, or frees room that it has asked for, changes the word and wakes it.
//
// Other processes of the same user could open the memory; so could they the memory of the process.
// All calls are thread-safe.
#ifndef DYNEMB_RANKS_SHARED_RINGS_H_
#define DYNEMB_RANKS_SHARED_RINGS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cc/ranks/wire.h"
#include "cc/table/function_ref.h"
#include "cc/table/status.h"

namespace dynemb {

class SharedRings {
 public:
  // Where another process of this machine finds the memory. Plain bytes.
  struct Offer {
    int64_t process = 0;  // 0: there is none
    int64_t descriptor = -1;
    std::array<char, 16> token{};  // by which it knows that it has found the right memory
  };

  // Makes the memory for process 0 of `processes`.
  static Status Create(int processes, std::unique_ptr<SharedRings>* rings);
  // Maps the memory of an offer for another one of them. Fails if this process cannot open it, as
  // in another container, or if it is not what the offer says.
  static Status Attach(const Offer& offer, int self, int processes,
                       std::unique_ptr<SharedRings>* rings);
  ~SharedRings();
  SharedRings(const SharedRings&) = delete;
  SharedRings& operator=(const SharedRings&) = delete;

  // Until EndOffer.
  Offer offer() const;
  void EndOffer();

  // A thread of this process that waits for other things than these messages calls Beat about ten
  // times a second. A process whose beats grow is therefore not the one at fault. One that is
  // stopped has none.
  void Beat();
  uint32_t beats(int process) const;

  // A message for a process: all parts, one after the other. None if they have no bytes.
  struct Outgoing {
    int to = 0;
    std::vector<Slices::Slice> parts;
    // Of Exchange:
    size_t part = 0, done_of_part = 0, done = 0, total = 0;
  };
  // A message of a process.
  struct Incoming {
    int from = 0;
    char* data = nullptr;  // null: `text` is made as long as the message
    size_t room = 0;       // at `data`: the message may be shorter
    std::string text{};
    // Of Exchange:
    size_t done = 0, total = 0;  // total is 0 until it begins
    bool is_complete() const { return total != 0 && done == total; }
  };

  // Is called about ten times a second by an exchange that waits, with the messages that are not
  // complete. `idle` is the time since a byte of the exchange has moved. An error ends the
  // exchange.
  using Look = FunctionRef<Status(std::chrono::steady_clock::duration idle,
                                  const std::vector<int>& receives, const std::vector<int>& sends)>;

  // Sends `out` and receives `in`, at most one message for each process and of each. Exchanges with
  // the same tag match in the order of the calls. A message is sent when all its bytes are in the
  // ring, whether or not the other process has read them.
  Status Exchange(uint64_t tag, std::vector<Outgoing>* out, std::vector<Incoming>* in, Look look);

 private:
  struct Doorbell;
  struct Ring;
  struct Frame;
  // What has come, or is to come, of one process with one tag.
  struct Inbox {
    struct Arrived {
      std::string bytes;
      size_t total;
    };
    Incoming* asked = nullptr;
    std::deque<Arrived> unasked;  // only the last one may be incomplete
  };
  using Inboxes = std::map<std::pair<uint64_t, int>, Inbox>;

  SharedRings(int self, int processes);
  static size_t RingBytes(int processes);
  size_t Bytes() const;
  Status Map(int descriptor);
  char* token() const { return memory_; }
  Doorbell* doorbell(int process) const;
  Ring* ring(int from, int to) const;
  char* bytes(int from, int to) const;

  // Writes as many frames of a message as have room; returns whether it has written any.
  bool Push(uint64_t tag, Outgoing* out);
  // Takes all frames out of this process's rings. Sets *moved if one was for `tag`.
  Status Drain(uint64_t tag, bool* moved);
  // Adds the bytes of a frame, at `at` of the ring, to its message. Fails if they do not fit. Sets
  // *completes if an exchange has asked for the message, and has all of it now.
  Status Take(const Frame& frame, int from, uint64_t at, bool* completes);
  void CopyFromRing(int from, uint64_t at, size_t n, char* to) const;
  void Awake(int process) const;
  void Sleep(uint32_t seen, std::chrono::nanoseconds most) const;

  const int self_, processes_;
  const size_t ring_bytes_;
  char* memory_ = nullptr;
  int descriptor_ = -1;
  std::mutex mutex_;  // of all that follows, and of this process's ends of the rings
  Inboxes inboxes_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_SHARED_RINGS_H_
