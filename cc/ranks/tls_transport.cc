#include "cc/ranks/tls_transport.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "gloo/transport/tcp/context.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/tcp/pair.h"
#include "gloo/transport/tcp/unbound_buffer.h"

namespace dynemb {
namespace {

namespace tcp = gloo::transport::tcp;
using Result = Tls::Session::Result;

// The bytes of a record of TLS, the unit of its encryption.
constexpr size_t kRecordBytes = 16 << 10;

// A connection. Its members are guarded by m_, which callers of the functions below hold.
class TlsPair : public tcp::Pair {
 public:
  TlsPair(tcp::Context* context, tcp::Device* device, int rank, std::chrono::milliseconds timeout,
          std::shared_ptr<const Tls> tls)
      : Pair(context, device, rank, timeout), tls_(std::move(tls)) {}

  using Pair::listen;

  ~TlsPair() override {
    std::lock_guard<std::mutex> lock(m_);
    if (state_ != CLOSED) TlsPair::changeState(CLOSED);
  }

 protected:
  void waitUntilConnected(std::unique_lock<std::mutex>& lock, bool use_timeout) override {
    const auto end = std::chrono::steady_clock::now() + 5 * timeout_;
    Pair::waitUntilConnected(lock, use_timeout);
    // A client speaks first.
    if (state_ == CONNECTED && !is_secure_) Advance();
    const bool in_time = cv_.wait_until(lock, end, [&] {
      throwIfException();
      return is_secure_ || state_ == CLOSED;
    });
    if (!in_time) signalAndThrowException("the other end has not completed the TLS handshake");
  }

  void handleReadWrite(int events) override {
    if (!is_secure_) return Advance();
    // Of the handshake.
    if (tx_.empty()) events &= ~EPOLLOUT;
    Pair::handleReadWrite(events);
  }

  bool write(tcp::Op& op) override {
    if (state_ == CLOSED) return false;
    gloo::NonOwningPtr<tcp::UnboundBuffer> buffer;
    if (op.getOpcode() == tcp::Op::SEND_UNBOUND_BUFFER) {
      buffer = gloo::NonOwningPtr<tcp::UnboundBuffer>(op.ubuf);
      if (!buffer) return false;
    }
    while (op.nwritten < op.preamble.nbytes) {
      std::array<iovec, 2> parts;
      int num_parts = 0;
      (void)prepareWrite(op, buffer, parts.data(), num_parts);
      const void* data = parts[0].iov_base;
      size_t bytes = parts[0].iov_len;
      std::array<char, kRecordBytes> record;
      if (num_parts == 2) {  // the beginning of a message: both parts are in one record
        memcpy(record.data(), data, bytes);
        const size_t more = std::min(parts[1].iov_len, record.size() - bytes);
        memcpy(record.data() + bytes, parts[1].iov_base, more);
        data = record.data();
        bytes += more;
      }
      size_t done = 0;
      if (!Check(session_->Write(data, bytes, &done))) return false;
      op.nwritten += done;
    }
    writeComplete(op, buffer, op.getOpcode());
    return true;
  }

  bool read() override {
    if (state_ == CLOSED) return false;
    gloo::NonOwningPtr<tcp::UnboundBuffer> buffer;
    for (;;) {
      iovec part{};
      const ssize_t bytes = prepareRead(rx_, buffer, part);
      if (bytes < 0) return false;
      if (bytes == 0) break;
      size_t done = 0;
      if (!Check(session_->Read(part.iov_base, part.iov_len, &done))) return false;
      rx_.nread += done;
    }
    readComplete(buffer);
    return true;
  }

  void changeState(state next) noexcept override {
    // CONNECTING: what has connected to the socket that has listened until now is gone.
    if (next == CLOSED || next == CONNECTING) {
      session_ = nullptr;
      is_secure_ = false;
    }
    Pair::changeState(next);
  }

 private:
  // Takes the next step of the handshake.
  void Advance() {
    if (session_ == nullptr) session_ = tls_->Start(fd_, is_client_);
    const Result result = session_->Handshake();
    if (result == Result::kFailed) return (void)Check(result);
    if (result == Result::kDone) {
      is_secure_ = true;
      cv_.notify_all();
    }
    device_->registerDescriptor(fd_, result == Result::kAwaitsWrite ? EPOLLOUT : EPOLLIN, this);
  }

  // Returns whether a step is done. If it has failed, fails the pair.
  bool Check(Result result) {
    if (result == Result::kFailed) signalException("TLS: " + session_->failure());
    return result == Result::kDone;
  }

  const std::shared_ptr<const Tls> tls_;
  std::unique_ptr<Tls::Session> session_;
  bool is_secure_ = false;  // the handshake is complete
};

class TlsContext : public tcp::Context {
 public:
  TlsContext(std::shared_ptr<tcp::Device> device, int rank, int size,
             std::shared_ptr<const Tls> tls)
      : Context(std::move(device), rank, size), tls_(std::move(tls)) {}

  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override {
    auto made = std::make_unique<TlsPair>(this, device_.get(), rank, getTimeout(), tls_);
    TlsPair* const pair = made.get();
    auto& place = pairs_[static_cast<size_t>(rank)];
    place = std::move(made);
    pair->listen();  // of bazel/gloo.patch: Gloo's constructor would call it
    return place;
  }

 private:
  const std::shared_ptr<const Tls> tls_;
};

}  // namespace

std::shared_ptr<gloo::transport::Context> MakeTlsContext(
    const std::shared_ptr<gloo::transport::Device>& device, int rank, int size,
    std::shared_ptr<const Tls> tls) {
  return std::make_shared<TlsContext>(std::dynamic_pointer_cast<tcp::Device>(device), rank, size,
                                      std::move(tls));
}

}  // namespace dynemb
