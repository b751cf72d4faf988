// HostsWire and SharedRings: exchanges by shared memory, and those that ranks forward for others.
#include "cc/ranks/hosts_wire.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/shared_rings.h"
#include "tests/cc/gloo_wires.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

using std::chrono::milliseconds;

Setting Plain(const std::string& layout) { return {Sockets::kPlain, layout}; }

// One exchange of wires, in which rank f sends length(f, t) bytes to rank t.
using LengthOf = std::function<size_t(int from, int to)>;

void ExpectExchanged(const std::vector<std::unique_ptr<Wire>>& wires, size_t most,
                     const LengthOf& length, uint64_t tag = 1) {
  const auto size = static_cast<int>(wires.size());
  const auto byte = [&](int from, int to) { return static_cast<char>(from * 16 + to + 1); };
  OnRanks(size, [&](int r) {
    std::vector<std::string> sent, received;
    Slices to(size), from(size);
    for (int other = 0; other < size; ++other) {
      sent.emplace_back(length(r, other), byte(r, other));
      received.emplace_back(length(other, r), '\0');
    }
    for (int other = 0; other < size; ++other) {
      const auto o = static_cast<size_t>(other);
      to[other] = {sent[o].data(), sent[o].size()};
      from[other] = {received[o].data(), received[o].size()};
    }
    const Status status =
        wires[static_cast<size_t>(r)]->ExchangeAtMost(most, tag, "exchange", to, from);
    ASSERT_TRUE(status.ok()) << status.message();
    for (int other = 0; other < size; ++other) {
      const auto o = static_cast<size_t>(other);
      ASSERT_EQ(received[o], std::string(length(other, r), byte(other, r))) << other << " to " << r;
    }
  });
}

// What a rank sends to other hosts: the model of docs/scaling.md, for any numbers of ranks.
HostsWire::Counts ModelOf(const std::string& layout, int rank, size_t bytes, bool forwarded) {
  std::map<char, std::vector<int>> hosts;
  for (size_t r = 0; r < layout.size(); ++r) hosts[layout[r]].push_back(static_cast<int>(r));
  const std::vector<int>& here = hosts[layout[static_cast<size_t>(rank)]];
  const auto local = static_cast<size_t>(std::find(here.begin(), here.end(), rank) - here.begin());
  HostsWire::Counts counts;
  for (const auto& [host, ranks] : hosts) {
    if (host == layout[static_cast<size_t>(rank)]) continue;
    for (size_t m = 0; m < ranks.size(); ++m) {
      if (forwarded && m % here.size() != local) continue;
      ++counts.messages;
      counts.bytes += static_cast<int64_t>(forwarded ? here.size() * (bytes + 4) : bytes);
    }
  }
  return counts;
}

// The most bytes of slices that are forwarded.
size_t MostForwarded(const std::string& layout) {
  std::map<char, size_t> ranks;
  size_t most = 0;
  for (const char host : layout) most = std::max(most, ++ranks[host]);
  return HostsWire::kMostForwarded / most - 4;
}

class HostsWireTest : public OverSockets {};
INSTANTIATE_TEST_SUITE_P(Settings, HostsWireTest,
                         testing::ValuesIn(Settings({"aaaabbbb", "abcdabcd", "aaaabb", "aab"},
                                                    {"aab"})),
                         NameOf);

TEST_P(HostsWireTest, SendsTheMessagesAndBytesOfTheModel) {
  const std::string layout = GetParam().layout;
  const auto wires = Connected(GetParam(), std::chrono::seconds(60));
  std::vector<HostsWire::Counts> before(wires.size());
  const size_t longest = MostForwarded(layout);
  for (const size_t most : {size_t{64}, longest, longest + 1, SIZE_MAX}) {
    for (const size_t bytes : {size_t{64}, size_t{1000}, longest}) {
      if (bytes > most) continue;
      ExpectExchanged(wires, most, [&](int, int) { return bytes; });
      for (int r = 0; r < static_cast<int>(wires.size()); ++r) {
        const auto i = static_cast<size_t>(r);
        const auto counts = static_cast<const HostsWire&>(*wires[i]).sent();
        const auto model = ModelOf(layout, r, bytes, most <= longest);
        EXPECT_EQ(counts.messages - before[i].messages, model.messages) << r << " of " << layout;
        EXPECT_EQ(counts.bytes - before[i].bytes, model.bytes) << r << " of " << layout;
        before[i] = counts;
      }
    }
  }
}

// Two hosts of four ranks: the numbers themselves, of which docs/scaling.md has the formulas.
TEST(HostsWireModelTest, EightRanks) {
  const auto flat = ModelOf("aaaabbbb", 5, 1000, false);
  const auto forwarded = ModelOf("aaaabbbb", 5, 1000, true);
  EXPECT_EQ(flat.messages, 4);
  EXPECT_EQ(flat.bytes, 4000);
  EXPECT_EQ(forwarded.messages, 1);
  EXPECT_EQ(forwarded.bytes, 4016);
}

// Also slices without bytes, and ranks that send or receive nothing at all.
TEST_P(HostsWireTest, SlicesOfAnyLengths) {
  const auto wires = Connected(GetParam(), std::chrono::seconds(60));
  std::mt19937_64 random(5);
  for (size_t number = 0; number < Longer(kSanitized ? 10 : 40); ++number) {
    const size_t most = number % 3 == 0 ? size_t{300'000} : MostForwarded(GetParam().layout);
    const uint64_t seed = random(), dense = random() % 3;
    ExpectExchanged(wires, most, [&](int from, int to) {
      std::mt19937_64 of_pair(seed + static_cast<uint64_t>(from * 64 + to));
      if (dense == 0 && (from + to) % 3 != 0) return size_t{0};
      if (dense == 1 && from != 0) return size_t{0};
      return static_cast<size_t>(of_pair()) % (of_pair() % 4 == 0 ? most : 100);
    });
  }
}

// Rank 0 has sent much that rank 1 asks for only later.
TEST(HostsWireOrderTest, MessagesThatNobodyAsksForDoNotStandInTheWay) {
  const auto wires = Connected(Plain("aa"), std::chrono::seconds(60));
  constexpr uint64_t kTags = 12;
  constexpr size_t kBytes = 1'000'000;
  const auto exchange = [&](int r, uint64_t tag) {
    std::string sent(kBytes, static_cast<char>(tag * 2 + static_cast<uint64_t>(r)));
    std::string received(kBytes, '\0');
    Slices to(2), from(2);
    to[1 - r] = {sent.data(), sent.size()};
    from[1 - r] = {received.data(), received.size()};
    const Status status =
        wires[static_cast<size_t>(r)]->Exchange(tag, std::to_string(tag), to, from);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(received,
              std::string(kBytes, static_cast<char>(tag * 2 + static_cast<uint64_t>(1 - r))));
  };
  std::vector<std::thread> threads;
  for (uint64_t tag = 0; tag < kTags; ++tag) threads.emplace_back(exchange, 0, tag);
  std::this_thread::sleep_for(milliseconds(50));
  for (uint64_t tag = kTags; tag-- > 0;) exchange(1, tag);
  for (std::thread& t : threads) t.join();
}

// A rank is one exchange ahead of another one: messages of one tag keep their order.
TEST(HostsWireOrderTest, ExchangesOfOneTagMatchInTheirOrder) {
  const auto wires = Connected(Plain("aaa"), std::chrono::seconds(60));
  OnRanks(3, [&](int r) {
    for (int number = 0; number < 200; ++number) {
      std::string sent(static_cast<size_t>(1 + number * 37), static_cast<char>(number + r));
      std::vector<std::string> received(3, std::string(sent.size(), '\0'));
      Slices to(3), from(3);
      for (int other = 0; other < 3; ++other) {
        to[other] = {sent.data(), sent.size()};
        from[other] = {received[static_cast<size_t>(other)].data(), sent.size()};
      }
      ASSERT_TRUE(wires[static_cast<size_t>(r)]->Exchange(7, "same", to, from).ok());
      for (int other = 0; other < 3; ++other) {
        ASSERT_EQ(received[static_cast<size_t>(other)],
                  std::string(sent.size(), static_cast<char>(number + other)));
      }
      if (number % 16 == r) std::this_thread::sleep_for(milliseconds(1));
    }
  });
}

TEST(HostsWireOrderTest, AMessageThatDoesNotFitIsAnErrorOfAll) {
  const auto wires = Connected(Plain("aa"), std::chrono::seconds(60));
  OnRanks(2, [&](int r) {
    std::string data(100, 'x');
    Slices to(2), from(2);
    to[1 - r] = {data.data(), r == 0 ? size_t{100} : size_t{10}};
    from[1 - r] = {data.data(), size_t{10}};
    Status status = wires[static_cast<size_t>(r)]->Exchange(1, "misfit", to, from);
    if (status.ok()) status = wires[static_cast<size_t>(r)]->Exchange(2, "next", to, from);
    EXPECT_EQ(status.message(),
              "misfit on rank 1: a message of 100 bytes came, where 10 were expected");
  });
}

// The error of an exchange in which rank r sends a byte to each rank in `with`, and receives one.
std::string ErrorOf(Wire* wire, size_t most, const std::string& operation,
                    const std::vector<int>& with) {
  std::vector<char> sent(static_cast<size_t>(wire->size())), received = sent;
  Slices to(wire->size()), from(wire->size());
  for (const int other : with) {
    to[other] = {&sent[static_cast<size_t>(other)], 1};
    from[other] = {&received[static_cast<size_t>(other)], 1};
  }
  return wire->ExchangeAtMost(most, static_cast<uint64_t>(operation[0]), operation, to, from)
      .message();
}

// Rank 0 waits for a message that rank 2 forwards. Rank 2, which waits for rank 3, began later.
TEST(HostsWireFaultTest, ARankThatWaitsForAnotherOneOfItsHostSaysSoFirst) {
  const auto wires = Connected(Plain("aabb"), milliseconds(500));
  OnRanks(4, [&](int r) {
    if (r == 3) return;
    if (r == 2) std::this_thread::sleep_for(milliseconds(250));
    EXPECT_EQ(ErrorOf(wires[static_cast<size_t>(r)].get(), 1, "x", {0, 1, 2, 3}),
              "x on rank 2: rank 3 has sent nothing for 0.5 s");
  });
}

// Rank 0 waits for rank 1 of its host. Rank 1, which waits for rank 3, began later.
TEST(HostsWireFaultTest, ARankThatWaitsForAnotherHostSaysSoFirst) {
  const auto wires = Connected(Plain("aabb"), milliseconds(500));
  OnRanks(2, [&](int r) {
    if (r == 1) std::this_thread::sleep_for(milliseconds(250));
    const auto i = static_cast<size_t>(r);
    EXPECT_EQ(r == 0 ? ErrorOf(wires[i].get(), 1, "y", {0, 1, 2, 3})
                     : ErrorOf(wires[i].get(), SIZE_MAX, "x", {3}),
              "x on rank 1: rank 3 has sent nothing for 0.5 s");
  });
}

// A thread that can be stopped, as all threads of a process are by SIGSTOP.
class Stopping {
 public:
  Stopping() { std::signal(SIGUSR1, &Stop); }
  ~Stopping() { std::signal(SIGUSR1, SIG_DFL); }
  void operator()(pthread_t thread) { pthread_kill(thread, SIGUSR1); }
  static void GoOn() { stopped_ = false; }

 private:
  static void Stop(int) {
    for (stopped_ = true; stopped_;) usleep(1000);
  }
  static inline std::atomic<bool> stopped_{false};
};

// Rank 1 is stopped while it waits for rank 3, when all that it has for others has left it. In the
// next exchange, rank 0 waits for it, and ranks 2 and 3 for what ranks 0 and 1 forward.
TEST(HostsWireFaultTest, ARankThatIsStoppedWhileItWaitsIsNamed) {
  const auto wires = Connected(Plain("aabb"), milliseconds(1000));
  Stopping stop;
  std::atomic<int> failed{0};
  OnRanks(4, [&](int r) {
    Wire* const wire = wires[static_cast<size_t>(r)].get();
    if (r == 3) std::this_thread::sleep_for(milliseconds(600));
    std::thread stopping;
    if (r == 1) {
      stopping = std::thread([&, waiting = pthread_self()] {
        std::this_thread::sleep_for(milliseconds(300));
        stop(waiting);
        while (failed != 3) usleep(1000);
        Stopping::GoOn();
      });
    }
    const std::string first = ErrorOf(wire, 1, "x", {0, 1, 2, 3});
    if (r == 1) return stopping.join();
    EXPECT_EQ(first, "");
    EXPECT_EQ(ErrorOf(wire, 1, "y", {0, 1, 2, 3}), "y on rank 0: rank 1 has sent nothing for 1 s");
    ++failed;
  });
}

TEST(SharedRingsTest, MemoryThatIsNotThatOfTheOffer) {
  std::unique_ptr<SharedRings> first, attached;
  ASSERT_TRUE(SharedRings::Create(2, &first).ok());
  const SharedRings::Offer offer = first->offer();
  SharedRings::Offer wrong = offer;
  wrong.token[3] ^= 1;
  EXPECT_FALSE(SharedRings::Attach(wrong, 1, 2, &attached).ok());
  wrong = offer;
  wrong.descriptor = 1 << 20;
  EXPECT_FALSE(SharedRings::Attach(wrong, 1, 2, &attached).ok());
  FILE* const other = tmpfile();
  wrong.descriptor = fileno(other);
  EXPECT_FALSE(SharedRings::Attach(wrong, 1, 2, &attached).ok());
  fclose(other);
  EXPECT_FALSE(SharedRings::Attach(offer, 1, 3, &attached).ok());  // of another size
  EXPECT_EQ(attached, nullptr);
  EXPECT_TRUE(SharedRings::Attach(offer, 1, 2, &attached).ok());
}

}  // namespace
}  // namespace dynemb
