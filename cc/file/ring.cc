#include "cc/file/ring.h"

#if __has_include(<linux/io_uring.h>)
#include <errno.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "cc/file/file_system.h"

namespace dynemb {
namespace {

// The same on all architectures. Older headers of the C library lack them.
constexpr long kSetup = 425;
constexpr long kEnter = 426;
constexpr long kRegister = 427;
// Linux 5.19: no interrupt of a thread for each completion; ours always waits in Enter.
constexpr unsigned kCooperative = 1U << 8;

template <class T>
T* Field(void* mapping, size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(mapping) + offset);
}

Status Refused(const char* call, int error) {
  Status refused = FileError(std::string("io_uring: ") + call, error);
  // EINVAL and the like: the system has another idea of this call.
  if (refused.code() == Code::kResourceExhausted) return refused;
  return FailedPrecondition(refused.message());
}

}  // namespace

Ring::~Ring() { Close(); }

void Ring::Close() {
  for (Mapping* mapping : {&submissions_, &completions_, &entries_}) {
    if (mapping->data != nullptr) (void)munmap(mapping->data, mapping->bytes);
    *mapping = {};
  }
  if (fd_ >= 0) (void)close(fd_);
  fd_ = -1;
}

void Ring::Forget() {
  submissions_ = completions_ = entries_ = {};
  Close();
}

Status Ring::Map(Mapping* mapping, size_t bytes, uint64_t offset) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                          static_cast<off_t>(offset));
  if (data == MAP_FAILED) return Refused("mmap", errno);
  *mapping = {data, bytes};
  if (madvise(data, bytes, MADV_DONTFORK) != 0) return Refused("madvise", errno);
  return Status();
}

bool Ring::Supports(uint8_t operation) const {
  constexpr unsigned kMost = 256;
  alignas(io_uring_probe) char room[sizeof(io_uring_probe) + kMost * sizeof(io_uring_probe_op)];
  std::memset(room, 0, sizeof(room));
  if (syscall(kRegister, fd_, IORING_REGISTER_PROBE, room, kMost) < 0) return false;
  const auto* const probe = reinterpret_cast<const io_uring_probe*>(room);
  return operation <= probe->last_op && (probe->ops[operation].flags & IO_URING_OP_SUPPORTED) != 0;
}

Status Ring::Open(unsigned depth, bool vectored) {
  depth_ = std::min(depth, kMostDepth);
  io_uring_params params = {};
  params.flags = kCooperative;
  fd_ = static_cast<int>(syscall(kSetup, depth_, &params));
  if (fd_ < 0 && errno == EINVAL) {
    params = {};
    fd_ = static_cast<int>(syscall(kSetup, depth_, &params));
  }
  if (fd_ < 0) return Refused("io_uring_setup", errno);  // closed on exec by itself
  DYNEMB_RETURN_IF_ERROR(Map(&submissions_,
                             params.sq_off.array + params.sq_entries * sizeof(unsigned),
                             IORING_OFF_SQ_RING));
  DYNEMB_RETURN_IF_ERROR(Map(&completions_,
                             params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe),
                             IORING_OFF_CQ_RING));
  DYNEMB_RETURN_IF_ERROR(Map(&entries_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  submission_head_ = Field<unsigned>(submissions_.data, params.sq_off.head);
  submission_tail_ = Field<unsigned>(submissions_.data, params.sq_off.tail);
  submission_slots_ = Field<unsigned>(submissions_.data, params.sq_off.array);
  submission_mask_ = params.sq_entries - 1;
  completion_head_ = Field<unsigned>(completions_.data, params.cq_off.head);
  completion_tail_ = Field<unsigned>(completions_.data, params.cq_off.tail);
  completion_slots_ = Field<char>(completions_.data, params.cq_off.cqes);
  completion_mask_ = params.cq_entries - 1;
  operation_ =
      !vectored && Supports(IORING_OP_READ) ? uint8_t{IORING_OP_READ} : uint8_t{IORING_OP_READV};
  if (operation_ == IORING_OP_READV) vectors_.resize(depth_);
  return Probe();
}

// A filter of system calls may permit io_uring_setup, but not io_uring_enter. A read from no file
// fails with EBADF; it shows that reads reach the system and come back.
Status Ring::Probe() {
  char byte;
  Push(0, -1, &byte, 1, 0);
  int error;
  while ((error = Enter(1)) == EINTR) {
  }
  if (error != 0) return Refused("io_uring_enter", error);
  Completion completion;
  if (!Pop(&completion)) return Refused("io_uring_enter", ENOSYS);
  if (completion.result != -EBADF) return Refused("IORING_OP_READ", -completion.result);
  return Status();
}

void Ring::Push(unsigned slot, int fd, void* to, size_t bytes, uint64_t offset) {
  const unsigned tail = *submission_tail_;
  const unsigned index = tail & submission_mask_;
  io_uring_sqe* const entry = Field<io_uring_sqe>(entries_.data, index * sizeof(io_uring_sqe));
  std::memset(entry, 0, sizeof(*entry));
  entry->opcode = operation_;
  entry->fd = fd;
  entry->off = offset;
  entry->user_data = slot;
  if (operation_ == IORING_OP_READV) {
    vectors_[slot] = {to, bytes};
    entry->addr = reinterpret_cast<uintptr_t>(&vectors_[slot]);
    entry->len = 1;
  } else {
    entry->addr = reinterpret_cast<uintptr_t>(to);
    entry->len = static_cast<unsigned>(bytes);
  }
  submission_slots_[index] = index;
  // The system reads the entry after it has seen the tail.
  __atomic_store_n(submission_tail_, tail + 1, __ATOMIC_RELEASE);
}

unsigned Ring::pushed() const {
  return *submission_tail_ - __atomic_load_n(submission_head_, __ATOMIC_ACQUIRE);
}

unsigned Ring::PushedSlot(unsigned i) const {
  const unsigned index = (*submission_tail_ - pushed() + i) & submission_mask_;
  return static_cast<unsigned>(
      Field<io_uring_sqe>(entries_.data, index * sizeof(io_uring_sqe))->user_data);
}

// The system takes entries only inside Enter, so nothing races with this.
void Ring::Unpush() {
  __atomic_store_n(submission_tail_, __atomic_load_n(submission_head_, __ATOMIC_ACQUIRE),
                   __ATOMIC_RELEASE);
}

int Ring::Enter(unsigned wait) {
  const long entered = syscall(kEnter, fd_, pushed(), wait, wait == 0 ? 0U : IORING_ENTER_GETEVENTS,
                               nullptr, size_t{0});
  return entered < 0 ? errno : 0;
}

bool Ring::Pop(Completion* completion) {
  const unsigned head = *completion_head_;
  // The system has written the completion before it moves the tail.
  if (head == __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE)) return false;
  const auto* const entry = reinterpret_cast<const io_uring_cqe*>(
      completion_slots_ + (head & completion_mask_) * sizeof(io_uring_cqe));
  *completion = {static_cast<unsigned>(entry->user_data), entry->res};
  // The system reuses the place of the completion after it has seen the head.
  __atomic_store_n(completion_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace dynemb

#else  // the headers of the system are older than io_uring

namespace dynemb {

Ring::~Ring() = default;
Status Ring::Open(unsigned, bool) {
  return FailedPrecondition("io_uring: not known where this library was compiled");
}
void Ring::Push(unsigned, int, void*, size_t, uint64_t) {}
unsigned Ring::pushed() const { return 0; }
unsigned Ring::PushedSlot(unsigned) const { return 0; }
void Ring::Unpush() {}
int Ring::Enter(unsigned) { return -1; }
bool Ring::Pop(Completion*) { return false; }
void Ring::Forget() {}

}  // namespace dynemb

#endif
