#include "cc/ranks/gloo_wire.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <random>
#include <thread>
#include <utility>

#include "cc/ranks/tls_transport.h"
#include "gloo/transport/tcp/context.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/tcp/unbound_buffer.h"

namespace dynemb {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

// Tags of exchanges are hashes; these are for reasons of failures, and for tokens.
constexpr uint64_t kReasonTag = ~uint64_t{0}, kTokenTag = ~uint64_t{1};
constexpr size_t kTokenBytes = 16;
constexpr size_t kReasonBytes = 1024;
// How often a waiting exchange looks whether other ranks have ended.
constexpr std::chrono::milliseconds kLook{100};
// A rank must send this number of bytes within the timeout; all that it sends may take longer.
constexpr size_t kPieceBytes = size_t{64} << 20;
constexpr std::chrono::seconds kToTell{1};
// The time for what has left this process to arrive, before its connection is reset.
constexpr std::chrono::milliseconds kToArrive{200};

std::string DrawToken() {
  std::random_device random;
  std::string token;
  while (token.size() < kTokenBytes) token.push_back(static_cast<char>(random()));
  return token;
}

// Finds the first address of a host that this machine can listen at, as a number. (Gloo resolves
// names itself, and uses the result without looking whether there is one.)
Status Resolve(const std::string& host, std::string* address) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) return Internal(gai_strerror(error));
  std::string reason = "it has no address";
  for (const addrinfo* at = found; at != nullptr && address->empty(); at = at->ai_next) {
    const int listening = socket(at->ai_family, at->ai_socktype, at->ai_protocol);
    char text[NI_MAXHOST];
    if (listening < 0 || bind(listening, at->ai_addr, at->ai_addrlen) != 0) {
      reason = strerror(errno);
    } else if (getnameinfo(at->ai_addr, at->ai_addrlen, text, sizeof(text), nullptr, 0,
                           NI_NUMERICHOST) == 0) {
      *address = text;
    }
    if (listening >= 0) close(listening);
  }
  freeaddrinfo(found);
  return address->empty() ? Internal(reason) : Status();
}

}  // namespace

// Memory that is sent to one rank, or received from one. Gloo's own buffers close all connections
// when a wait times out; these only return.
class GlooWire::Buffer : public gloo::transport::tcp::UnboundBuffer {
 public:
  using UnboundBuffer::UnboundBuffer;

  void Send(int rank, uint64_t tag) { send(rank, tag, 0, size); }
  void Receive(int rank, uint64_t tag) { recv(rank, tag, 0, size); }

  // Wait until `end`; return whether the bytes have arrived, or have left. Throw if the connection
  // has closed.
  bool AwaitReceived(SteadyTime end) { return Await(recvCv_, recvCompletions_, end); }
  bool AwaitSent(SteadyTime end) { return Await(sendCv_, sendCompletions_, end); }

 private:
  template <class Condition>
  bool Await(Condition& changed, const int& completions, SteadyTime end) {
    std::unique_lock<std::mutex> lock(m_);
    return changed.wait_until(lock, end, [&] {
      if (completions == 0) throwIfException();
      return completions > 0;
    });
  }
};

class GlooWire::Mesh {
 public:
  Mesh(int rank, int size, const std::string& host, std::chrono::milliseconds timeout,
       std::shared_ptr<const Tls> tls)
      : device_(gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(host.c_str()))),
        context_(tls == nullptr ? device_->createContext(rank, size)
                                : MakeTlsContext(device_, rank, size, std::move(tls))) {
    // Gloo waits five times as long for a connection.
    context_->setTimeout(timeout / 5);
  }

  std::string Listen(int rank) {
    const std::vector<char> bytes = context_->createPair(rank)->address().bytes();
    return {bytes.begin(), bytes.end()};
  }
  void Connect(int rank, const std::string& address) {
    context_->getPair(rank)->connect({address.begin(), address.end()});
  }
  void Close(int size, int self) {
    for (int r = 0; r < size; ++r) {
      if (r != self) context_->getPair(r)->close();
    }
  }
  std::unique_ptr<Buffer> MakeBuffer(char* data, size_t bytes) {
    return std::make_unique<Buffer>(
        std::static_pointer_cast<gloo::transport::tcp::Context>(context_), data, bytes);
  }

 private:
  const std::shared_ptr<gloo::transport::Device> device_;
  const std::shared_ptr<gloo::transport::Context> context_;
};

struct GlooWire::Transfer {
  int rank;
  std::unique_ptr<Buffer> buffer;
};

class GlooWire::Begun {
 public:
  std::vector<Transfer> received, sent;
};

GlooWire::GlooWire(int rank, int size, std::chrono::milliseconds timeout)
    : Wire(rank, size, timeout),
      addresses_(static_cast<size_t>(size)),
      reasons_(static_cast<size_t>(size), std::string(kReasonBytes, '\0')),
      heard_(static_cast<size_t>(size)),
      process_(getpid()) {}

// Gloo closes the connections after what was sent, unlike Mesh::Close.
GlooWire::~GlooWire() {
  if (getpid() == process_) return;
  for (std::unique_ptr<Buffer>& heard : heard_) (void)heard.release();
  (void)mesh_.release();
}

Status GlooWire::CheckProcess() const {
  if (getpid() == process_) return Status();
  return FailedPrecondition("the ranks were joined by the process that has forked this one");
}

Status GlooWire::Listen(int rank, int size, const std::string& host,
                        std::chrono::milliseconds timeout, std::shared_ptr<const Tls> tls,
                        std::unique_ptr<GlooWire>* wire) {
  std::unique_ptr<GlooWire> made(new GlooWire(rank, size, timeout));
  const std::string on = "rank " + std::to_string(rank) + " cannot listen at '" + host + "': ";
  std::string address;
  const Status resolved = Resolve(host, &address);
  if (!resolved.ok()) return Internal(on + resolved.message());
  try {
    made->mesh_ = std::make_unique<Mesh>(rank, size, address, timeout, std::move(tls));
    for (int r = 0; r < size; ++r) {
      if (r != rank)
        made->addresses_[static_cast<size_t>(r)] = made->mesh_->Listen(r) + DrawToken();
    }
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    return Internal(on + e.what());
  }
  *wire = std::move(made);
  return Status();
}

Status GlooWire::Connect(const std::vector<std::string>& addresses) {
  if (addresses.size() != addresses_.size()) {
    return InvalidArgument(std::to_string(addresses.size()) + " addresses for " +
                           std::to_string(size()) + " ranks");
  }
  Slices shown(size()), seen(size());
  std::vector<std::string> tokens(addresses.size(), std::string(kTokenBytes, '\0'));
  std::vector<std::string> drawn = tokens;
  int other = 0;
  try {
    for (; other < size(); ++other) {
      if (other == rank()) continue;
      const auto r = static_cast<size_t>(other);
      const size_t length = std::max(addresses[r].size(), kTokenBytes) - kTokenBytes;
      drawn[r] = addresses[r].substr(length);
      shown[other] = {drawn[r].data(), drawn[r].size()};
      seen[other] = {tokens[r].data(), tokens[r].size()};
      mesh_->Connect(other, addresses[r].substr(0, length));
      heard_[r] = mesh_->MakeBuffer(reasons_[r].data(), reasons_[r].size());
      heard_[r]->Receive(other, kReasonTag);
    }
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    return Fail("rank " + std::to_string(rank()) + " cannot connect to rank " +
                std::to_string(other) + ": " + e.what());
  }
  DYNEMB_RETURN_IF_ERROR(Exchange(kTokenTag, "the connection", shown, seen));
  for (size_t r = 0; r < tokens.size(); ++r) {
    if (r == static_cast<size_t>(rank())) continue;
    if (addresses_[r].compare(addresses_[r].size() - kTokenBytes, kTokenBytes, tokens[r]) != 0) {
      return Fail("the process that connected to rank " + std::to_string(rank()) + " as rank " +
                  std::to_string(r) + " is not a rank of this group");
    }
  }
  return Status();
}

std::string GlooWire::On(const std::string& operation) const {
  return operation + " on rank " + std::to_string(rank()) + ": ";
}

Status GlooWire::Exchange(uint64_t tag, const std::string& operation, const Slices& to,
                          const Slices& from) {
  std::shared_ptr<Begun> begun;
  DYNEMB_RETURN_IF_ERROR(Begin(tag, operation, to, from, &begun));
  return Finish(operation, *begun, {});
}

Status GlooWire::Begin(uint64_t tag, const std::string& operation, const Slices& to,
                       const Slices& from, std::shared_ptr<Begun>* begun) {
  DYNEMB_RETURN_IF_ERROR(CheckProcess());
  DYNEMB_RETURN_IF_ERROR(failure());
  *begun = std::make_shared<Begun>();
  // Gloo keeps the order of the pieces of one rank and tag.
  const auto start = [&](std::vector<Transfer>* transfers, int other, const Slices::Slice& slice,
                         void (Buffer::*begin)(int, uint64_t)) {
    for (size_t done = 0; done < slice.bytes; done += kPieceBytes) {
      const size_t bytes = std::min(kPieceBytes, slice.bytes - done);
      transfers->push_back({other, mesh_->MakeBuffer(slice.data + done, bytes)});
      (transfers->back().buffer.get()->*begin)(other, tag);
    }
  };
  int other = rank();
  try {
    for (int i = 1; i < size(); ++i) {
      other = (rank() + size() - i) % size();
      start(&(*begun)->received, other, from[other], &Buffer::Receive);
    }
    for (int i = 1; i < size(); ++i) {
      other = (rank() + i) % size();
      start(&(*begun)->sent, other, to[other], &Buffer::Send);
    }
  } catch (const std::bad_alloc&) {
    (void)Fail(On(operation) + "out of memory");
    throw;
  } catch (const std::exception&) {
    return FailClosed(other, operation);
  }
  if (to[rank()].bytes != 0) memcpy(from[rank()].data, to[rank()].data, to[rank()].bytes);
  return Status();
}

Status GlooWire::Finish(const std::string& operation, const Begun& begun,
                        std::chrono::milliseconds longer) {
  DYNEMB_RETURN_IF_ERROR(
      AwaitAll(operation, begun.received, longer, &Buffer::AwaitReceived, "sent nothing"));
  return AwaitAll(operation, begun.sent, longer, &Buffer::AwaitSent, "received nothing");
}

Status GlooWire::AwaitAll(const std::string& operation, const std::vector<Transfer>& transfers,
                          std::chrono::milliseconds longer, Await await, const char* what) {
  using Clock = std::chrono::steady_clock;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const SteadyTime end = Clock::now() + timeout() + longer;
    for (;;) {
      try {
        if ((transfers[i].buffer.get()->*await)(std::min(end, Clock::now() + kLook))) break;
      } catch (const std::exception&) {
        return FailClosed(transfers[i].rank, operation);
      }
      if (on_wait_) on_wait_();
      DYNEMB_RETURN_IF_ERROR(LookAt(operation, transfers, i, await));
      if (Clock::now() < end) continue;
      std::vector<int> ranks;
      for (size_t j = i; j < transfers.size(); ++j) {
        const int other = transfers[j].rank;
        bool done = false;
        try {
          done = (transfers[j].buffer.get()->*await)({});
        } catch (const std::exception&) {
          return FailClosed(other, operation);
        }
        if (!done && (ranks.empty() || ranks.back() != other)) ranks.push_back(other);
      }
      if (ranks.empty()) break;
      return Fail(On(operation) + Late(ranks, what));
    }
  }
  return Status();
}

Status GlooWire::Look(std::vector<bool>* ended) {
  DYNEMB_RETURN_IF_ERROR(CheckProcess());
  DYNEMB_RETURN_IF_ERROR(failure());
  ended->assign(heard_.size(), false);
  for (size_t r = 0; r < heard_.size(); ++r) {
    if (heard_[r] == nullptr) continue;
    try {
      if (heard_[r]->AwaitReceived({})) return Fail(reasons_[r].c_str());
    } catch (const std::exception&) {
      (*ended)[r] = true;
    }
  }
  return Status();
}

Status GlooWire::LookAt(const std::string& operation, const std::vector<Transfer>& transfers,
                        size_t first, Await await) {
  std::vector<bool> ended;
  DYNEMB_RETURN_IF_ERROR(Look(&ended));
  for (size_t i = first; i < transfers.size(); ++i) {
    bool done = false;
    try {
      done = (transfers[i].buffer.get()->*await)({});
    } catch (const std::exception&) {
      return FailClosed(transfers[i].rank, operation);
    }
    if (!done && ended[static_cast<size_t>(transfers[i].rank)]) {
      return FailClosed(transfers[i].rank, operation);
    }
  }
  return Status();
}

Status GlooWire::FailClosed(int other, const std::string& operation) {
  std::string reason =
      On(operation) + "rank " + std::to_string(other) + " has ended, or its connection is lost";
  try {
    // It came before the end of the connection.
    const auto r = static_cast<size_t>(other);
    if (heard_[r]->AwaitReceived({})) reason = reasons_[r].c_str();
  } catch (const std::exception&) {  // none came
  }
  return Fail(reason);
}

Status GlooWire::Fail(const std::string& reason) {
  DYNEMB_RETURN_IF_ERROR(CheckProcess());
  if (Record(reason)) Tell(reason);
  return failure();
}

void GlooWire::Tell(const std::string& reason) {
  std::string text(kReasonBytes, '\0');
  text.replace(0, std::min(reason.size(), kReasonBytes - 1), reason, 0, kReasonBytes - 1);
  std::vector<std::unique_ptr<Buffer>> told;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    try {
      told.push_back(mesh_->MakeBuffer(text.data(), text.size()));
      told.back()->Send(r, kReasonTag);
    } catch (const std::exception&) {  // this one cannot be told
    }
  }
  const SteadyTime end = std::chrono::steady_clock::now() + kToTell;
  for (const std::unique_ptr<Buffer>& buffer : told) {
    try {
      (void)buffer->AwaitSent(end);
    } catch (const std::exception&) {
    }
  }
  std::this_thread::sleep_for(kToArrive);
  try {
    mesh_->Close(size(), rank());
  } catch (const std::exception&) {
  }
}

}  // namespace dynemb
