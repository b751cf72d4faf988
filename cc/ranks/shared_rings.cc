#include "cc/ranks/shared_rings.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <random>

namespace dynemb {
namespace {

using Clock = std::chrono::steady_clock;

// Rings of a machine together have about this number of bytes at most, and one has at most kMost.
constexpr size_t kAllRings = size_t{64} << 20, kMost = size_t{256} << 10, kLeast = size_t{16} << 10;
// Frames begin at multiples of this number, so that a header never wraps around.
constexpr size_t kStep = 32;
constexpr std::chrono::milliseconds kLook{100};

Status OfSystem(const char* what) { return Internal(std::string(what) + ": " + strerror(errno)); }

size_t RoundUp(size_t n, size_t step) { return (n + step - 1) / step * step; }

}  // namespace

struct alignas(64) SharedRings::Doorbell {
  std::atomic<uint32_t> rung;      // changes when there may be something to do; a futex
  std::atomic<uint32_t> sleepers;  // threads that may sleep on it
  std::atomic<uint32_t> beats;
};

struct SharedRings::Ring {
  alignas(64) std::atomic<uint64_t> head;  // bytes written since the beginning
  alignas(64) std::atomic<uint64_t> tail;  // bytes read
  // Whether the writer waits for room.
  alignas(64) std::atomic<uint32_t> blocked;
};

struct SharedRings::Frame {
  uint64_t tag;
  uint64_t total;  // of the message
  uint64_t bytes;  // that follow
  uint64_t unused;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

SharedRings::SharedRings(int self, int processes)
    : self_(self), processes_(processes), ring_bytes_(RingBytes(processes)) {
  static_assert(sizeof(Frame) == kStep);
}

SharedRings::~SharedRings() {
  EndOffer();
  if (memory_ != nullptr) munmap(memory_, Bytes());
}

size_t SharedRings::RingBytes(int processes) {
  const auto n = static_cast<size_t>(processes);
  const size_t share = kAllRings / std::max(size_t{1}, n * (n - 1));
  size_t bytes = kLeast;
  while (bytes < kMost && bytes * 2 <= share) bytes *= 2;
  return bytes;
}

// The token takes 64 bytes, so that the rest is aligned.
size_t SharedRings::Bytes() const {
  const auto n = static_cast<size_t>(processes_);
  return 64 + n * sizeof(Doorbell) + n * n * (sizeof(Ring) + ring_bytes_);
}

SharedRings::Doorbell* SharedRings::doorbell(int process) const {
  return reinterpret_cast<Doorbell*>(memory_ + 64) + process;
}

SharedRings::Ring* SharedRings::ring(int from, int to) const {
  return reinterpret_cast<Ring*>(doorbell(processes_)) + from * processes_ + to;
}

char* SharedRings::bytes(int from, int to) const {
  return reinterpret_cast<char*>(ring(processes_, 0)) +
         static_cast<size_t>(from * processes_ + to) * ring_bytes_;
}

Status SharedRings::Map(int descriptor) {
  void* const at = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return OfSystem("mmap");
  memory_ = static_cast<char*>(at);
  return Status();
}

Status SharedRings::Create(int processes, std::unique_ptr<SharedRings>* rings) {
  std::unique_ptr<SharedRings> made(new SharedRings(0, processes));
  made->descriptor_ = memfd_create("tf_dynemb_ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made->descriptor_ < 0) return OfSystem("memfd_create");
  // What a process cannot get later would be a signal; nor may a process shorten the memory.
  const int error = posix_fallocate(made->descriptor_, 0, static_cast<off_t>(made->Bytes()));
  if (error != 0) return Internal(std::string("posix_fallocate: ") + strerror(error));
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(made->descriptor_, F_ADD_SEALS, kSeals) != 0) return OfSystem("F_ADD_SEALS");
  DYNEMB_RETURN_IF_ERROR(made->Map(made->descriptor_));
  // Zeros are empty rings.
  std::random_device random;
  for (size_t i = 0; i < sizeof(Offer::token); ++i) {
    made->token()[i] = static_cast<char>(random());
  }
  *rings = std::move(made);
  return Status();
}

Status SharedRings::Attach(const Offer& offer, int self, int processes,
                           std::unique_ptr<SharedRings>* rings) {
  std::unique_ptr<SharedRings> made(new SharedRings(self, processes));
  const std::string path =
      "/proc/" + std::to_string(offer.process) + "/fd/" + std::to_string(offer.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) return OfSystem(path.c_str());
  // In another container, the path may be that of any file.
  struct stat file {};
  const bool is_memory = fcntl(descriptor, F_GET_SEALS) > 0 && fstat(descriptor, &file) == 0 &&
                         static_cast<size_t>(file.st_size) == made->Bytes();
  Status status = is_memory ? made->Map(descriptor) : Internal(path + " is another file");
  close(descriptor);
  DYNEMB_RETURN_IF_ERROR(status);
  if (memcmp(made->token(), offer.token.data(), offer.token.size()) != 0) {
    return Internal(path + " is another file");
  }
  *rings = std::move(made);
  return Status();
}

SharedRings::Offer SharedRings::offer() const {
  Offer offer;
  offer.process = getpid();
  offer.descriptor = descriptor_;
  memcpy(offer.token.data(), token(), offer.token.size());
  return offer;
}

void SharedRings::EndOffer() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

void SharedRings::Beat() { doorbell(self_)->beats.fetch_add(1, std::memory_order_relaxed); }
uint32_t SharedRings::beats(int process) const {
  return doorbell(process)->beats.load(std::memory_order_relaxed);
}

// The order of the two accesses, here and in Sleep, is why no wake-up is lost: either Sleep finds
// the word changed, or this finds the sleeper.
void SharedRings::Awake(int process) const {
  Doorbell* const bell = doorbell(process);
  bell->rung.fetch_add(1, std::memory_order_seq_cst);
  if (bell->sleepers.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedRings::Sleep(uint32_t seen, std::chrono::nanoseconds most) const {
  Doorbell* const bell = doorbell(self_);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  timespec time{};
  time.tv_sec = static_cast<time_t>(seconds.count());
  time.tv_nsec = static_cast<long>((most - seconds).count());
  bell->sleepers.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &bell->rung, FUTEX_WAIT, seen, &time, nullptr, 0);
  bell->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

bool SharedRings::Push(uint64_t tag, Outgoing* out) {
  Ring* const ring = this->ring(self_, out->to);
  char* const bytes = this->bytes(self_, out->to);
  uint64_t head = ring->head.load(std::memory_order_relaxed);
  bool pushed = false;
  while (out->done < out->total) {
    const size_t left = out->total - out->done;
    const auto room = [&](std::memory_order order) {
      return ring_bytes_ - static_cast<size_t>(head - ring->tail.load(order));
    };
    // A frame has a quarter of the ring, or the rest of the message.
    const size_t least = kStep + RoundUp(std::min(left, ring_bytes_ / 4 - kStep), kStep);
    if (room(std::memory_order_acquire) < least) {
      // As in Awake: either this finds the room, or the reader finds that it is waited for.
      ring->blocked.store(1, std::memory_order_seq_cst);
      if (room(std::memory_order_seq_cst) < least) break;
    }
    const size_t n = std::min(left, ring_bytes_ / 4 - kStep);
    const Frame frame{tag, out->total, n, 0};
    memcpy(bytes + head % ring_bytes_, &frame, sizeof(frame));
    uint64_t at = head + kStep;
    for (size_t todo = n; todo != 0;) {
      const Slices::Slice& part = out->parts[out->part];
      const size_t place = at % ring_bytes_;
      const size_t piece = std::min({todo, part.bytes - out->done_of_part, ring_bytes_ - place});
      if (piece != 0) memcpy(bytes + place, part.data + out->done_of_part, piece);
      at += piece;
      todo -= piece;
      out->done_of_part += piece;
      if (out->done_of_part == part.bytes) {
        ++out->part;
        out->done_of_part = 0;
      }
    }
    out->done += n;
    head += kStep + RoundUp(n, kStep);
    ring->head.store(head, std::memory_order_release);
    Awake(out->to);
    pushed = true;
  }
  return pushed;
}

void SharedRings::CopyFromRing(int from, uint64_t at, size_t n, char* to) const {
  const char* const bytes = this->bytes(from, self_);
  const size_t place = at % ring_bytes_, first = std::min(n, ring_bytes_ - place);
  memcpy(to, bytes + place, first);
  if (n != first) memcpy(to + first, bytes, n - first);
}

Status SharedRings::Take(const Frame& frame, int from, uint64_t at, bool* completes) {
  Inbox& inbox = inboxes_[{frame.tag, from}];
  Incoming* const asked = inbox.asked;
  if (asked == nullptr || asked->is_complete() || !inbox.unasked.empty()) {
    const bool begins =
        inbox.unasked.empty() || inbox.unasked.back().bytes.size() == inbox.unasked.back().total;
    if (begins) {
      inbox.unasked.push_back({{}, static_cast<size_t>(frame.total)});
      inbox.unasked.back().bytes.reserve(static_cast<size_t>(frame.total));
    }
    std::string& bytes = inbox.unasked.back().bytes;
    const size_t done = bytes.size();
    bytes.resize(done + frame.bytes);
    CopyFromRing(from, at, frame.bytes, bytes.data() + done);
    return Status();
  }
  if (asked->total == 0) {
    asked->total = static_cast<size_t>(frame.total);
    if (asked->data == nullptr) asked->text.resize(asked->total);
  }
  const size_t room = asked->data == nullptr ? asked->text.size() : asked->room;
  if (asked->total != frame.total || asked->total > room) {
    return Internal("a message of " + std::to_string(frame.total) + " bytes came, where " +
                    std::to_string(room) + " were expected");
  }
  char* const to = asked->data == nullptr ? asked->text.data() : asked->data;
  CopyFromRing(from, at, frame.bytes, to + asked->done);
  asked->done += frame.bytes;
  *completes = asked->is_complete();
  return Status();
}

Status SharedRings::Drain(uint64_t tag, bool* moved) {
  bool others = false;  // whether a message of another exchange of this process is complete
  for (int from = 0; from < processes_; ++from) {
    if (from == self_) continue;
    Ring* const ring = this->ring(from, self_);
    uint64_t tail = ring->tail.load(std::memory_order_relaxed);
    uint64_t head = ring->head.load(std::memory_order_acquire);
    while (head != tail) {
      Frame frame;
      memcpy(&frame, bytes(from, self_) + tail % ring_bytes_, sizeof(frame));
      if (head - tail > ring_bytes_ || frame.bytes > head - tail - kStep ||
          frame.bytes > frame.total) {
        return Internal("the shared memory is damaged");
      }
      bool completes = false;
      DYNEMB_RETURN_IF_ERROR(Take(frame, from, tail + kStep, &completes));
      if (frame.tag == tag) *moved = true;
      others = others || (completes && frame.tag != tag);
      tail += kStep + RoundUp(frame.bytes, kStep);
      ring->tail.store(tail, std::memory_order_seq_cst);
      head = ring->head.load(std::memory_order_acquire);
      const bool is_roomy = head - tail <= ring_bytes_ / 2;
      if (is_roomy && ring->blocked.load(std::memory_order_seq_cst) != 0) {
        ring->blocked.store(0, std::memory_order_seq_cst);
        Awake(from);
      }
    }
  }
  if (others) Awake(self_);
  return Status();
}

Status SharedRings::Exchange(uint64_t tag, std::vector<Outgoing>* out, std::vector<Incoming>* in,
                             Look look) {
  // Whatever ends the exchange, nothing may point to its messages after it.
  struct Asked {
    SharedRings* rings;
    uint64_t tag;
    std::vector<Incoming>* in;
    ~Asked() {
      std::lock_guard<std::mutex> lock(rings->mutex_);
      for (const Incoming& incoming : *in) {
        const auto at = rings->inboxes_.find({tag, incoming.from});
        if (at == rings->inboxes_.end()) continue;
        at->second.asked = nullptr;
        if (at->second.unasked.empty()) rings->inboxes_.erase(at);
      }
    }
  } asked{this, tag, in};
  for (Outgoing& outgoing : *out) {
    outgoing.total = 0;
    for (const Slices::Slice& part : outgoing.parts) outgoing.total += part.bytes;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Incoming& incoming : *in) {
      Inbox& inbox = inboxes_[{tag, incoming.from}];
      inbox.asked = &incoming;
      if (inbox.unasked.empty()) continue;
      // What has come of it goes on at its place.
      Inbox::Arrived& arrived = inbox.unasked.front();
      incoming.total = arrived.total;
      incoming.done = arrived.bytes.size();
      if (incoming.data == nullptr) {
        incoming.text = std::move(arrived.bytes);
        incoming.text.resize(incoming.total);
      } else if (incoming.total > incoming.room) {
        return Internal("a message of " + std::to_string(incoming.total) + " bytes came, where " +
                        std::to_string(incoming.room) + " were expected");
      } else {
        memcpy(incoming.data, arrived.bytes.data(), arrived.bytes.size());
      }
      inbox.unasked.pop_front();
    }
  }
  Clock::time_point last_moved = Clock::now(), next_look = last_moved + kLook;
  std::vector<int> receives, sends;
  for (;;) {
    const uint32_t seen = doorbell(self_)->rung.load(std::memory_order_seq_cst);
    bool moved = false;
    receives.clear();
    sends.clear();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      size_t before = 0, after = 0;
      for (const Incoming& incoming : *in) before += incoming.done;
      for (Outgoing& outgoing : *out) moved = Push(tag, &outgoing) || moved;
      DYNEMB_RETURN_IF_ERROR(Drain(tag, &moved));
      for (const Incoming& incoming : *in) {
        after += incoming.done;
        if (!incoming.is_complete()) receives.push_back(incoming.from);
      }
      for (const Outgoing& outgoing : *out) {
        if (outgoing.done < outgoing.total) sends.push_back(outgoing.to);
      }
      moved = moved || after != before;
    }
    if (receives.empty() && sends.empty()) return Status();
    const Clock::time_point now = Clock::now();
    if (moved) last_moved = now;
    if (now >= next_look) {
      DYNEMB_RETURN_IF_ERROR(look(now - last_moved, receives, sends));
      next_look = now + kLook;
    }
    if (!moved) Sleep(seen, next_look - now);
  }
}

}  // namespace dynemb
