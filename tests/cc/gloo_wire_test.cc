// GlooWire, without a Group: what it does when another side does not behave as a rank.
#include "cc/ranks/gloo_wire.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/tls.h"
#include "tests/cc/certificates.h"
#include "tests/cc/gloo_wires.h"

namespace dynemb {
namespace {

using std::chrono::milliseconds;

class GlooWireTest : public OverSockets {};
INSTANTIATE_TEST_SUITE_P(Sockets, GlooWireTest, testing::ValuesIn(Settings({"ab"}, {"ab"})),
                         NameOf);

// More bytes than the system keeps for a rank that does not receive.
TEST_P(GlooWireTest, ARankThatStopsReceivingIsNamed) {
  const auto wires = Connected(GetParam(), milliseconds(2000));
  std::string data(64 << 20, 'x');
  Slices to(2), from(2);
  to[1] = {data.data(), data.size()};
  const Status status = wires[0]->Exchange(1, "send", to, from);
  EXPECT_EQ(status.message(), "send on rank 0: rank 1 has received nothing for 2 s");
}

TEST_P(GlooWireTest, AnAddressAtWhichNobodyCanListen) {
  // One of another machine, a name that nobody has, and no name.
  for (const std::string host : {"192.0.2.1", "no.such.host.invalid", ""}) {
    std::unique_ptr<GlooWire> wire;
    const Status status = GlooWire::Listen(0, 2, host, milliseconds(100), TlsOf(sockets()), &wire);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_EQ(status.message().find("rank 0 cannot listen at '" + host + "': "), 0u)
        << status.message();
  }
}

// A process that connects to a port of a rank before the rank that it is for.
class StrangerTest : public OverSockets {
 protected:
  void SetUp() override {
    OverSockets::SetUp();
    if (IsSkipped()) return;
    for (int r = 0; r < 2; ++r) {
      const Status status =
          GlooWire::Listen(r, 2, "127.0.0.1", milliseconds(1000), TlsOf(sockets()), &wires_[r]);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    for (int r = 0; r < 2; ++r) {
      // Gloo's address begins with the system's.
      const std::string& address = wires_[r]->addresses()[static_cast<size_t>(1 - r)];
      sockets_[r] = socket(AF_INET, SOCK_STREAM, 0);
      ASSERT_EQ(connect(sockets_[r], reinterpret_cast<const sockaddr*>(address.data()),
                        sizeof(sockaddr_in)),
                0);
    }
  }
  void TearDown() override {
    for (const int socket : sockets_) close(socket);
  }
  void Say(const std::string& bytes) {
    for (const int socket : sockets_) {
      EXPECT_EQ(write(socket, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    }
  }
  // The errors of both ranks. The one whose port has the stranger listens; the other one finds it
  // closed.
  std::string Errors() {
    std::string errors[2];
    OnRanks(2, [&](int r) {
      const auto& addresses = wires_[1 - r]->addresses();
      std::vector<std::string> given(2);
      given[static_cast<size_t>(1 - r)] = addresses[static_cast<size_t>(r)];
      const Status status = wires_[r]->Connect(given);
      EXPECT_FALSE(status.ok());
      errors[r] = status.message();
    });
    return errors[0] + "\n" + errors[1];
  }
  // A message of Gloo (transport/tcp/pair.h).
  static std::string Message(uint64_t opcode, uint64_t slot, const std::string& data) {
    const uint64_t head[6] = {sizeof(head) + data.size(), opcode, slot, 0, data.size(), 0};
    return std::string(reinterpret_cast<const char*>(head), sizeof(head)) + data;
  }

  std::unique_ptr<GlooWire> wires_[2];
  int sockets_[2] = {-1, -1};
};

INSTANTIATE_TEST_SUITE_P(Sockets, StrangerTest, testing::ValuesIn(Settings({"ab"}, {"ab"})),
                         NameOf);

TEST_P(StrangerTest, SaysNothing) {
  const std::string errors = Errors();
  const bool is_plain = sockets() == Sockets::kPlain;
  const char* const late =
      is_plain ? "has sent nothing for 1 s" : "has not completed the TLS handshake";
  EXPECT_NE(errors.find(late), std::string::npos) << errors;
}

// Gloo throws, in its own thread, at a message for which there is no buffer.
TEST_P(StrangerTest, SendsWhatNobodyExpects) {
  Say(Message(1, 4711, "text"));
  const std::string errors = Errors();
  EXPECT_NE(errors.find("rank 0 cannot connect to rank 1"), std::string::npos) << errors;
}

// One end of a connection, with TLS or not, whose calls block.
class Stranger {
 public:
  // Without TLS if `tls` is null.
  Stranger(int socket, const Tls* tls) : socket_(socket) {
    if (tls != nullptr) session_ = tls->Start(socket, /*is_client=*/true);
  }
  bool Handshake() { return session_ == nullptr || session_->Handshake() == Result::kDone; }
  const std::string& failure() const { return session_->failure(); }
  bool Receive(void* data, size_t bytes) {
    for (size_t got = 0, more = 0; got < bytes; got += more) {
      char* const at = static_cast<char*>(data) + got;
      if (session_ == nullptr) {
        const ssize_t received = recv(socket_, at, bytes - got, 0);
        if (received <= 0) return false;
        more = static_cast<size_t>(received);
      } else if (session_->Read(at, bytes - got, &more) != Result::kDone) {
        return false;
      }
    }
    return true;
  }
  bool Send(const std::string& text) {
    size_t sent = 0;
    if (session_ != nullptr)
      return session_->Write(text.data(), text.size(), &sent) == Result::kDone;
    return write(socket_, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }

 private:
  using Result = Tls::Session::Result;
  const int socket_;
  std::unique_ptr<Tls::Session> session_;
};

// With TLS, it has a certificate of the same authority.
TEST_P(StrangerTest, ShowsAnotherToken) {
  constexpr uint64_t kSend = 1, kSendReady = 2, kReceiveReady = 3, kTokenTag = ~uint64_t{1};
  const std::shared_ptr<const Tls> tls = TlsOf(sockets());
  std::vector<std::thread> strangers;
  for (const int socket : sockets_) {
    strangers.emplace_back([=] {
      Stranger stranger(socket, tls.get());
      if (!stranger.Handshake()) return;  // one of both finds its port closed
      uint64_t head[6];
      while (stranger.Receive(head, sizeof(head))) {
        if (head[1] != kReceiveReady || head[2] != kTokenTag) continue;
        EXPECT_TRUE(stranger.Send(Message(kReceiveReady, kTokenTag, "") +
                                  Message(kSendReady, kTokenTag, "") +
                                  Message(kSend, kTokenTag, std::string(16, 'x'))));
      }
    });
  }
  const std::string errors = Errors();
  EXPECT_NE(errors.find("is not a rank of this group"), std::string::npos) << errors;
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  for (std::thread& t : strangers) t.join();
}

// One of two ranks listens, and the other one closes its port before it connects.
TEST_P(GlooWireTest, AStrangerAtThePortThatIsNotUsed) {
  std::unique_ptr<GlooWire> wires[2];
  sockaddr_in places[2];
  for (int r = 0; r < 2; ++r) {
    const Status status =
        GlooWire::Listen(r, 2, "127.0.0.1", std::chrono::seconds(20), TlsOf(sockets()), &wires[r]);
    ASSERT_TRUE(status.ok()) << status.message();
    memcpy(&places[r], wires[r]->addresses()[static_cast<size_t>(1 - r)].data(), sizeof(places[r]));
  }
  // Gloo compares the bytes.
  const int connects = places[0].sin_port > places[1].sin_port ? 0 : 1;
  const int stranger = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(
      connect(stranger, reinterpret_cast<const sockaddr*>(&places[connects]), sizeof(sockaddr_in)),
      0);
  const std::shared_ptr<const Tls> tls = TlsOf(sockets());
  EXPECT_TRUE(Stranger(stranger, tls.get()).Handshake());
  std::this_thread::sleep_for(milliseconds(200));
  OnRanks(2, [&](int r) {
    std::vector<std::string> given(2);
    given[static_cast<size_t>(1 - r)] = wires[1 - r]->addresses()[static_cast<size_t>(r)];
    const Status status = wires[r]->Connect(given);
    EXPECT_TRUE(status.ok()) << status.message();
  });
  close(stranger);
}

class TlsStrangerTest : public StrangerTest {};
INSTANTIATE_TEST_SUITE_P(Sockets, TlsStrangerTest, testing::ValuesIn(Settings({}, {"ab"})), NameOf);

TEST_P(TlsStrangerTest, HasNoCertificateOfTheAuthority) {
  const Certificates others("others"), namesakes;
  // It knows the ranks' authority, but that one has not certified it, or not for today.
  const auto certified_by = [](const Certificates& authority) {
    return Tls::Files{authority.files().certificate, authority.files().key,
                      Certificates::Shared().authority()};
  };
  const struct {
    Tls::Files files;
    const char* reason;
  } cases[] = {{certified_by(others), "not accepted: unable to get local issuer certificate"},
               {certified_by(namesakes), "not accepted: certificate signature failure"},
               {Certificates::Shared().expired(), "not accepted: certificate has expired"}};
  for (const auto& [files, reason] : cases) {
    const std::shared_ptr<const Tls> tls = Certificates::Load(files);
    std::vector<std::thread> strangers;
    for (const int socket : sockets_) {
      strangers.emplace_back([&tls, socket] {
        Stranger stranger(socket, tls.get());
        char byte;
        EXPECT_FALSE(stranger.Handshake() && stranger.Receive(&byte, 1));
      });
    }
    const std::string errors = Errors();
    EXPECT_NE(errors.find("cannot connect to rank "), std::string::npos) << errors;
    EXPECT_NE(errors.find(reason), std::string::npos) << errors;
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
    for (std::thread& t : strangers) t.join();
    TearDown();
    SetUp();
  }
}

}  // namespace
}  // namespace dynemb
