// Ranks that are threads of a test, and their wires over Gloo, with and without TLS, on hosts of
// which some have several ranks.
#ifndef DYNEMB_TESTS_CC_GLOO_WIRES_H_
#define DYNEMB_TESTS_CC_GLOO_WIRES_H_

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/gloo_wire.h"
#include "cc/ranks/hosts_wire.h"
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

// Ranks of a group: their sockets, and the host of each, a letter. "abc": each of three ranks is
// alone on its host.
struct Setting {
  Sockets sockets = Sockets::kPlain;
  std::string layout;

  int size() const { return static_cast<int>(layout.size()); }
  // The first ranks.
  Setting Of(size_t ranks) const { return {sockets, layout.substr(0, ranks)}; }
};

inline std::vector<Setting> Settings(const std::vector<std::string>& plain,
                                     const std::vector<std::string>& tls) {
  std::vector<Setting> settings;
  for (const std::string& layout : plain) settings.push_back({Sockets::kPlain, layout});
  for (const std::string& layout : tls) settings.push_back({Sockets::kTls, layout});
  return settings;
}

inline std::string NameOf(const testing::TestParamInfo<Setting>& setting) {
  return (setting.param.sockets == Sockets::kTls ? "Tls_" : "Plain_") + setting.param.layout;
}

// The certificates of ranks; null without TLS.
inline std::shared_ptr<const Tls> TlsOf(Sockets sockets) {
  if (sockets == Sockets::kPlain) return nullptr;
  return Certificates::Load(Certificates::Shared().files());
}

// Tests of settings.
class OverSockets : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    signal(SIGPIPE, SIG_IGN);  // as in Python
    if (sockets() == Sockets::kTls && !Certificates::Shared().has_command()) {
      GTEST_SKIP() << "there is no command `openssl` that makes certificates";
    }
  }
  Sockets sockets() const { return GetParam().sockets; }
};

// The wires of a group, connected.
inline std::vector<std::unique_ptr<Wire>> Connected(const Setting& setting,
                                                    std::chrono::milliseconds timeout) {
  const int size = setting.size();
  std::vector<std::unique_ptr<GlooWire>> wires(static_cast<size_t>(size));
  OnRanks(size, [&](int r) {
    const Status status = GlooWire::Listen(r, size, "127.0.0.1", timeout, TlsOf(setting.sockets),
                                           &wires[static_cast<size_t>(r)]);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  OnRanks(size, [&](int r) {
    std::vector<std::string> addresses;
    for (const auto& wire : wires) addresses.push_back(wire->addresses()[static_cast<size_t>(r)]);
    const Status status = wires[static_cast<size_t>(r)]->Connect(addresses);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  std::vector<std::string> hosts;
  for (const char host : setting.layout) hosts.emplace_back(1, host);
  std::vector<std::unique_ptr<Wire>> result(wires.size());
  OnRanks(size, [&](int r) {
    const auto i = static_cast<size_t>(r);
    const Status status = HostsWire::Join(std::move(wires[i]), hosts, &result[i]);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  return result;
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_GLOO_WIRES_H_
