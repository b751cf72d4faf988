// GlooWire, without a Group: what it does when another side does not behave as a rank.
#include "cc/ranks/gloo_wire.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/gloo_wires.h"

namespace dynemb {
namespace {

using std::chrono::milliseconds;

// More bytes than the system keeps for a rank that does not receive.
TEST(GlooWireTest, ARankThatStopsReceivingIsNamed) {
  const auto wires = Connected(2, milliseconds(500));
  std::string data(64 << 20, 'x');
  Slices to(2), from(2);
  to[1] = {data.data(), data.size()};
  const Status status = wires[0]->Exchange(1, "send", to, from);
  EXPECT_EQ(status.message(), "send on rank 0: rank 1 has received nothing for 0.5 s");
}

TEST(GlooWireTest, AnAddressAtWhichNobodyCanListen) {
  // One of another machine, a name that nobody has, and no name.
  for (const std::string host : {"192.0.2.1", "no.such.host.invalid", ""}) {
    std::unique_ptr<GlooWire> wire;
    const Status status = GlooWire::Listen(0, 2, host, milliseconds(100), &wire);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_EQ(status.message().find("rank 0 cannot listen at '" + host + "': "), 0u)
        << status.message();
  }
}

// A process that connects to a port of a rank before the rank that it is for.
class StrangerTest : public testing::Test {
 protected:
  void SetUp() override {
    signal(SIGPIPE, SIG_IGN);
    for (int r = 0; r < 2; ++r) {
      const Status status = GlooWire::Listen(r, 2, "127.0.0.1", milliseconds(1000), &wires_[r]);
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
  int sockets_[2];
};

TEST_F(StrangerTest, SaysNothing) {
  const std::string errors = Errors();
  EXPECT_NE(errors.find("has sent nothing for 1 s"), std::string::npos) << errors;
}

// Gloo throws, in its own thread, at a message for which there is no buffer.
TEST_F(StrangerTest, SendsWhatNobodyExpects) {
  Say(Message(1, 4711, "text"));
  const std::string errors = Errors();
  EXPECT_NE(errors.find("rank 0 cannot connect to rank 1"), std::string::npos) << errors;
}

TEST_F(StrangerTest, ShowsAnotherToken) {
  constexpr uint64_t kSend = 1, kSendReady = 2, kReceiveReady = 3, kTokenTag = ~uint64_t{1};
  std::vector<std::thread> strangers;
  for (const int socket : sockets_) {
    strangers.emplace_back([=] {
      uint64_t head[6];
      while (recv(socket, head, sizeof(head), MSG_WAITALL) == sizeof(head)) {
        if (head[1] != kReceiveReady || head[2] != kTokenTag) continue;
        const std::string token = Message(kReceiveReady, kTokenTag, "") +
                                  Message(kSendReady, kTokenTag, "") +
                                  Message(kSend, kTokenTag, std::string(16, 'x'));
        EXPECT_EQ(write(socket, token.data(), token.size()), static_cast<ssize_t>(token.size()));
      }
    });
  }
  const std::string errors = Errors();
  EXPECT_NE(errors.find("is not a rank of this group"), std::string::npos) << errors;
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  for (std::thread& t : strangers) t.join();
}

}  // namespace
}  // namespace dynemb
