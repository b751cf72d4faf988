// A stand-in for the part of NCCL's library that cc/ranks/nccl.cc uses, without a GPU. Ranks are
// processes or threads of one machine, and send by local sockets.
//
// As NCCL: communicators do not block, and cannot be used before all ranks have joined; groups go
// on in the background, in the order in which they have ended; the memory is a GPU's, if
// FAKE_GPU_LIBRARY names the fake GPU; and a rank that has gone is waited for without end.
//
// Stricter than NCCL, which would hang, or mix up data: a rank fails if a message has not the
// length that it expects.
//
// FAKE_NCCL_FAULT=version: an old version. =id, =join, =send: the call fails. =error: groups fail
// while they go on. =exit: the process ends in place of a group.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5,
              kInProgress = 7;
constexpr int kLook = 20;  // ms

struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

bool Fault(const char* name) {
  const char* const fault = std::getenv("FAKE_NCCL_FAULT");
  return fault != nullptr && std::strcmp(fault, name) == 0;
}

// The fake GPU of this process; without one, its memory is the host's.
struct Gpu {
  void* (*view)(void*) = nullptr;
  void (*begin)() = nullptr;
  void (*end)() = nullptr;

  static const Gpu& Get() {
    static const Gpu gpu = [] {
      Gpu found;
      const char* const path = std::getenv("FAKE_GPU_LIBRARY");
      void* const library = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
      if (library == nullptr) return found;
      found.view = reinterpret_cast<void* (*)(void*)>(dlsym(library, "FakeGpuView"));
      found.begin = reinterpret_cast<void (*)()>(dlsym(library, "FakeGpuBegin"));
      found.end = reinterpret_cast<void (*)()>(dlsym(library, "FakeGpuEnd"));
      return found;
    }();
    return gpu;
  }
  char* View(void* p) const { return static_cast<char*>(view != nullptr ? view(p) : p); }
  void Begin() const {
    if (begin != nullptr) begin();
  }
  void End() const {
    if (end != nullptr) end();
  }
};

struct Message {
  int peer;
  char* data;
  size_t bytes;
};
struct Group {
  std::vector<Message> sends, receives;
  void* stream = nullptr;
};

// The groups that have begun and not ended, by stream.
class Streams {
 public:
  static Streams& Get() {
    static auto* const streams = new Streams;
    return *streams;
  }
  void Begin(void* stream) {
    Gpu::Get().Begin();
    std::lock_guard<std::mutex> lock(mutex_);
    ++pending_[stream];
  }
  void End(void* stream) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (--pending_[stream] == 0) pending_.erase(stream);
    }
    Gpu::Get().End();
  }
  int Pending(void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(stream);
    return found == pending_.end() ? 0 : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<void*, int> pending_;  // guarded by mutex_
};
struct Header {
  uint64_t number;  // of the message among those of this sender to this receiver
  uint64_t bytes;
};

// A message on its way: a header, and then the data.
struct Transfer {
  int socket;
  bool is_send;
  Header expected;
  char* data;
  Header header;    // as it is sent, or received
  size_t done = 0;  // bytes of both

  bool HasEnded() const { return done == sizeof(header) + expected.bytes; }
};

sockaddr_un AddressOf(const Id& id, int rank, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = std::string("fake_nccl_") + id.bytes + "_" + std::to_string(rank);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // in the abstract name space
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

class Communicator {
 public:
  Communicator(int size, const Id& id, int rank)
      : size_(size),
        rank_(rank),
        id_(id),
        sockets_(static_cast<size_t>(size), -1),
        sent_(static_cast<size_t>(size)),
        received_(static_cast<size_t>(size)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~Communicator() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      aborted_ = true;
    }
    changed_.notify_all();
    thread_.join();
    for (const int socket : sockets_) {
      if (socket >= 0) close(socket);
    }
  }

  int size() const { return size_; }
  bool has_joined() {
    std::lock_guard<std::mutex> lock(mutex_);
    return has_joined_;
  }
  int result() {
    std::lock_guard<std::mutex> lock(mutex_);
    return result_;
  }
  void Add(Group group) {
    Streams::Get().Begin(group.stream);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      groups_.push_back(std::move(group));
    }
    changed_.notify_all();
  }

 private:
  bool aborted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return aborted_;
  }
  void Set(int result) {
    std::lock_guard<std::mutex> lock(mutex_);
    result_ = result;
  }

  void Run() {
    const int connected = Connect();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      result_ = connected;
      has_joined_ = true;
    }
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return aborted_ || !groups_.empty(); });
      if (groups_.empty()) return;
      Group group = std::move(groups_.front());
      groups_.pop_front();
      const bool goes_on = result_ == kSuccess && !aborted_;
      lock.unlock();
      const int result = !goes_on ? kSuccess : Fault("error") ? kSystemError : Move(group);
      if (result != kSuccess) Set(result);
      Streams::Get().End(group.stream);
    }
  }

  // Connects every two ranks: to those below, from those above.
  int Connect() {
    socklen_t length;
    const sockaddr_un own = AddressOf(id_, rank_, &length);
    const int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (bind(listening, reinterpret_cast<const sockaddr*>(&own), length) != 0 ||
        listen(listening, size_) != 0) {
      close(listening);
      return kSystemError;
    }
    for (int r = 0; r < rank_; ++r) {
      const sockaddr_un other = AddressOf(id_, r, &length);
      const int connecting = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      while (connect(connecting, reinterpret_cast<const sockaddr*>(&other), length) != 0) {
        if (aborted()) break;
        usleep(1000);
      }
      (void)!write(connecting, &rank_, sizeof(rank_));
      sockets_[static_cast<size_t>(r)] = connecting;
    }
    for (int n = rank_ + 1; n < size_ && !aborted();) {
      pollfd waiting{listening, POLLIN, 0};
      if (poll(&waiting, 1, kLook) == 0) continue;
      const int accepted = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
      int other = -1;
      if (accepted < 0 || read(accepted, &other, sizeof(other)) != sizeof(other)) continue;
      sockets_[static_cast<size_t>(other)] = accepted;
      ++n;
    }
    close(listening);
    for (const int socket : sockets_) {
      if (socket >= 0) fcntl(socket, F_SETFL, O_NONBLOCK);
    }
    return Fault("join") ? kSystemError : kSuccess;
  }

  int Move(const Group& group) {
    std::vector<Transfer> transfers;
    const auto add = [&](const Message& message, bool is_send) {
      const auto peer = static_cast<size_t>(message.peer);
      const Header header{(is_send ? sent_ : received_)[peer]++, message.bytes};
      transfers.push_back({sockets_[peer], is_send, header, message.data, header});
    };
    for (const Message& send : group.sends) {
      if (send.peer != rank_) {
        add(send, true);
        continue;
      }
      for (const Message& receive : group.receives) {
        if (receive.peer != rank_) continue;
        if (receive.bytes != send.bytes) return kInvalidUsage;
        std::memcpy(receive.data, send.data, send.bytes);
      }
    }
    for (const Message& receive : group.receives) {
      if (receive.peer != rank_) add(receive, false);
    }
    for (;;) {
      std::vector<pollfd> waiting;
      for (Transfer& transfer : transfers) {
        if (!Step(&transfer)) return kInvalidUsage;
        if (transfer.HasEnded()) continue;
        const int events = transfer.is_send ? POLLOUT : POLLIN;
        waiting.push_back({transfer.socket, static_cast<short>(events), 0});
      }
      if (waiting.empty() || aborted()) return kSuccess;
      if (poll(waiting.data(), waiting.size(), kLook) <= 0) continue;
      for (const pollfd& one : waiting) {
        if ((one.revents & (POLLHUP | POLLERR)) != 0) usleep(1000 * kLook);  // it has gone
      }
    }
  }

  // Moves what can be moved now. Returns whether the message is the expected one.
  static bool Step(Transfer* transfer) {
    constexpr size_t kHead = sizeof(Header);
    while (!transfer->HasEnded()) {
      const size_t done = transfer->done;
      char* const at = done < kHead ? reinterpret_cast<char*>(&transfer->header) + done
                                    : transfer->data + (done - kHead);
      const size_t left = (done < kHead ? kHead : kHead + transfer->expected.bytes) - done;
      const ssize_t n = transfer->is_send ? send(transfer->socket, at, left, MSG_NOSIGNAL)
                                          : recv(transfer->socket, at, left, 0);
      if (n <= 0) break;
      transfer->done += static_cast<size_t>(n);
      if (transfer->done == kHead && (transfer->header.number != transfer->expected.number ||
                                      transfer->header.bytes != transfer->expected.bytes)) {
        return false;
      }
    }
    return true;
  }

  const int size_, rank_;
  const Id id_;
  std::vector<int> sockets_;
  std::vector<uint64_t> sent_, received_;  // messages, to and from each rank
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Group> groups_;  // guarded by mutex_
  int result_ = kInProgress;  // guarded by mutex_
  bool has_joined_ = false;   // guarded by mutex_
  bool aborted_ = false;      // guarded by mutex_
};

// The group of this thread, and its communicator.
thread_local Group collected;
thread_local Communicator* collecting = nullptr;

int Collect(std::vector<Message>* messages, const void* data, size_t count, int type, int peer,
            void* communicator, void* stream) {
  if (Fault("send")) return kSystemError;
  auto* const given = static_cast<Communicator*>(communicator);
  if (type != 1 || peer < 0 || peer >= given->size() || !given->has_joined()) {
    return kInvalidArgument;
  }
  collecting = given;
  collected.stream = stream;
  messages->push_back({peer, Gpu::Get().View(const_cast<void*>(data)), count});
  return kSuccess;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = Fault("version") ? 21300 : 22707;
  return kSuccess;
}

int ncclGetUniqueId(Id* id) {
  if (Fault("id")) return kSystemError;
  std::random_device random;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  const std::string name = std::to_string(random()) + std::to_string(random());
  std::memcpy(id->bytes, name.data(), name.size());
  return kSuccess;
}

int ncclCommInitRankConfig(void** communicator, int size, Id id, int rank, Config* config) {
  if (config->size < sizeof(Config) || config->magic != 0xcafebeef || config->blocking != 0) {
    return kInvalidArgument;
  }
  *communicator = new Communicator(size, id, rank);
  return kInProgress;
}

int ncclGroupStart() {
  collected = {};
  collecting = nullptr;
  return kSuccess;
}

int ncclSend(const void* data, size_t count, int type, int peer, void* communicator, void* stream) {
  return Collect(&collected.sends, data, count, type, peer, communicator, stream);
}

int ncclRecv(void* data, size_t count, int type, int peer, void* communicator, void* stream) {
  return Collect(&collected.receives, data, count, type, peer, communicator, stream);
}

int ncclGroupEnd() {
  if (collecting == nullptr) return kSuccess;
  if (Fault("exit")) _exit(0);
  collecting->Add(std::move(collected));
  return kInProgress;
}

int ncclCommGetAsyncError(void* communicator, int* result) {
  *result = static_cast<Communicator*>(communicator)->result();
  return kSuccess;
}

int ncclCommAbort(void* communicator) {
  delete static_cast<Communicator*>(communicator);
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  return result == kSystemError    ? "unhandled system error"
         : result == kInvalidUsage ? "invalid usage"
                                   : "invalid argument";
}

const char* ncclGetLastError(void*) { return "a fault of the stand-in"; }

// For tests: the groups that have not ended.
int FakeNcclPending(void* stream) { return Streams::Get().Pending(stream); }
}
