// Ranks that are threads of a test, and their wires over Gloo, with and without TLS.
#ifndef DYNEMB_TESTS_CC_GLOO_WIRES_H_
#define DYNEMB_TESTS_CC_GLOO_WIRES_H_

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cc/ranks/gloo_wire.h"
#include "cc/ranks/tls.h"
#include "tests/cc/certificates.h"

namespace dynemb {

// Runs f(r) for each rank r, in a thread for each.
inline void OnRanks(int size, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(f, r);
  for (std::thread& t : threads) t.join();
}

enum class Sockets { kPlain, kTls };

inline std::string NameOf(const testing::TestParamInfo<Sockets>& parameter) {
  return parameter.param == Sockets::kTls ? "Tls" : "Plain";
}

// The certificates of ranks; null without TLS.
inline std::shared_ptr<const Tls> TlsOf(Sockets sockets) {
  if (sockets == Sockets::kPlain) return nullptr;
  return Certificates::Load(Certificates::Shared().files());
}

// Tests of both kinds of sockets, and of some number of ranks.
template <class Parameter>
class OverSockets : public testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    signal(SIGPIPE, SIG_IGN);  // as in Python
    if (sockets() == Sockets::kTls && !Certificates::Shared().has_command()) {
      GTEST_SKIP() << "there is no command `openssl` that makes certificates";
    }
  }
  Sockets sockets() const {
    if constexpr (std::is_same_v<Parameter, Sockets>) {
      return this->GetParam();
    } else {
      return std::get<Sockets>(this->GetParam());
    }
  }
};

// The wires of a group, connected.
inline std::vector<std::unique_ptr<Wire>> Connected(Sockets sockets, int size,
                                                    std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<GlooWire>> wires(static_cast<size_t>(size));
  OnRanks(size, [&](int r) {
    const Status status = GlooWire::Listen(r, size, "127.0.0.1", timeout, TlsOf(sockets),
                                           &wires[static_cast<size_t>(r)]);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  OnRanks(size, [&](int r) {
    std::vector<std::string> addresses;
    for (const auto& wire : wires) addresses.push_back(wire->addresses()[static_cast<size_t>(r)]);
    const Status status = wires[static_cast<size_t>(r)]->Connect(addresses);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  std::vector<std::unique_ptr<Wire>> result;
  for (auto& wire : wires) result.push_back(std::move(wire));
  return result;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GLOO_WIRES_H_
