// The turns of a group, and Nccl on a stand-in for its library, for ranks that are threads. The
// memory of the GPUs is the host's.
#include "cc/ranks/nccl.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/group.h"
#include "tests/cc/gloo_wires.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

using std::chrono::milliseconds;

std::string StandIn() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe");
  return program.parent_path().parent_path() / "fake_nccl" / "libfake_nccl.so";
}

bool HasEnded(void* stream) {
  static auto* const pending = reinterpret_cast<int (*)(void*)>(
      dlsym(dlopen(StandIn().c_str(), RTLD_NOW), "FakeNcclPending"));
  return pending(stream) == 0;
}

// A fault of the stand-in, while it is in scope.
class Fault {
 public:
  explicit Fault(const char* name) { setenv("FAKE_NCCL_FAULT", name, 1); }
  ~Fault() { unsetenv("FAKE_NCCL_FAULT"); }
};

// Ranks with groups, which use NCCL.
class GpuRanks {
 public:
  explicit GpuRanks(int size, milliseconds timeout = std::chrono::seconds(60)) {
    signal(SIGPIPE, SIG_IGN);  // as in Python
    const std::string hosts = std::string("aabb").substr(0, static_cast<size_t>(size));
    for (auto& wire : Connected({Sockets::kPlain, hosts}, timeout)) {
      groups_.push_back(std::make_unique<Group>(std::move(wire)));
      nccls_.emplace_back();
      EXPECT_TRUE(Nccl::Load(StandIn(), &nccls_.back()).ok());
    }
  }
  ~GpuRanks() {
    for (auto& nccl : nccls_) nccl->Abort();
  }
  int size() const { return static_cast<int>(groups_.size()); }
  Group& operator[](int r) { return *groups_[static_cast<size_t>(r)]; }
  Nccl& nccl(int r) { return *nccls_[static_cast<size_t>(r)]; }
  void End(int r) { groups_[static_cast<size_t>(r)].reset(); }
  void Run(const std::function<void(int)>& f) { OnRanks(size(), f); }

  // An alltoall as an operator on a GPU runs it.
  Status Alltoall(int r, const std::string& name, const std::string& data,
                  const std::vector<int64_t>& rows, std::string* received) {
    std::vector<int64_t> counts;
    Group& group = (*this)[r];
    const auto allocate = [&](int64_t n) {
      received->assign(static_cast<size_t>(n), '\0');
      return received->data();
    };
    int stream = 0;
    const auto exchange = [&](const Slices& to, const Slices& from) {
      return nccl(r).Exchange(&group, to, from, &stream);
    };
    const Group::TakeTurn take_turn = exchange;
    Status status =
        group.Alltoall({name, 0, "bytes"}, data.data(), rows, 1, &counts, allocate, &take_turn);
    if (status.ok()) {
      status = nccl(r).Await(&group, "alltoall '" + name + "'", [&](bool* done) {
        *done = HasEnded(&stream);
        return Status();
      });
    }
    if (!group.failure().ok()) nccl(r).Abort();
    return status;
  }

 private:
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Nccl>> nccls_;
};

// An alltoall in whose turn a rank does only what `take_turn` does.
Status AlltoallBy(Group* group, const std::string& name, const std::string& form,
                  const std::string& data, const std::vector<int64_t>& rows,
                  Group::TakeTurn take_turn) {
  std::vector<int64_t> counts;
  std::string received(64, '\0');
  const auto allocate = [&](int64_t) { return received.data(); };
  return group->Alltoall({name, 0, form}, data.data(), rows, 1, &counts, allocate, &take_turn);
}

const auto kNothing = [](const Slices&, const Slices&) { return Status(); };

// The slice that rank `from` sends to rank `to` in operation `number` of a lane.
std::string SliceOf(int lane, int number, int from, int to) {
  std::mt19937 random(static_cast<unsigned>(((lane * 1009 + number) * 31 + from) * 31 + to));
  const size_t bytes = random() % 3 == 0 ? 0 : random() % (random() % 16 == 0 ? 2000000 : 3000);
  std::string slice(bytes, '\0');
  for (char& c : slice) c = static_cast<char>(random());
  return slice;
}

// Exchanges slices of all ranks, and returns the first error.
Status ExchangeSlices(GpuRanks* ranks, int r, int lane, int number) {
  std::string data, expected, received;
  std::vector<int64_t> rows;
  for (int other = 0; other < ranks->size(); ++other) {
    const std::string sent = SliceOf(lane, number, r, other);
    data += sent;
    rows.push_back(static_cast<int64_t>(sent.size()));
    expected += SliceOf(lane, number, other, r);
  }
  const std::string name = "lane " + std::to_string(lane) + ", " + std::to_string(number);
  const Status status = ranks->Alltoall(r, name, data, rows, &received);
  if (status.ok()) {
    EXPECT_TRUE(received == expected) << name << " on rank " << r;
  }
  return status;
}

class GpuRanksTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, GpuRanksTest, testing::Values(1, 2, 4));

TEST_P(GpuRanksTest, RandomAlltoallsBringEachSliceToItsRank) {
  GpuRanks ranks(GetParam());
  const int n = static_cast<int>(Longer(kSanitized ? 10 : 40));
  ranks.Run([&](int r) {
    for (int number = 0; number < n; ++number) {
      const Status status = ExchangeSlices(&ranks, r, 0, number);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  });
}

TEST_P(GpuRanksTest, ConcurrentLanesOfAlltoallsBringEachSliceToItsRank) {
  GpuRanks ranks(GetParam());
  const int n = static_cast<int>(Longer(kSanitized ? 8 : 30));
  ranks.Run([&](int r) {
    OnRanks(3, [&](int lane) {
      std::mt19937 random(static_cast<unsigned>(r * 3 + lane));
      for (int number = 0; number < n; ++number) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        const Status status = ExchangeSlices(&ranks, r, lane, number);
        ASSERT_TRUE(status.ok()) << status.message();
      }
    });
  });
}

TEST_P(GpuRanksTest, AllRanksTakeTurnsInTheSameOrder) {
  GpuRanks ranks(GetParam());
  const int n = static_cast<int>(Longer(40));
  std::vector<std::vector<std::string>> orders(static_cast<size_t>(ranks.size()));
  ranks.Run([&](int r) {
    std::atomic<int> in_turn = 0;
    OnRanks(4, [&](int lane) {
      std::mt19937 random(static_cast<unsigned>(r * 4 + lane));
      const std::vector<int64_t> rows(static_cast<size_t>(ranks.size()), 0);
      for (int number = 0; number < n; ++number) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        const std::string name = std::to_string(lane) + "/" + std::to_string(number);
        const Status status =
            AlltoallBy(&ranks[r], name, "", "", rows, [&](const Slices&, const Slices&) {
              EXPECT_EQ(in_turn++, 0);
              orders[static_cast<size_t>(r)].push_back(name);
              --in_turn;
              return Status();
            });
        ASSERT_TRUE(status.ok()) << status.message();
      }
    });
  });
  EXPECT_EQ(orders[0].size(), static_cast<size_t>(4 * n));
  for (const auto& order : orders) EXPECT_EQ(order, orders[0]);
}

TEST(GpuRanks, AnErrorThatAllRanksHaveTakesNoTurn) {
  GpuRanks ranks(3);
  std::vector<std::string> errors(3);
  ranks.Run([&](int r) {
    std::string received(3, '\0');
    std::vector<int64_t> counts;
    const auto allocate = [&](int64_t) { return received.data(); };
    // Rank 1 has other data; rank 2 refuses; ranks 0 and 1 are on a GPU, and rank 2 is not.
    Status status =
        AlltoallBy(&ranks[r], "form", r == 1 ? "int rows" : "float rows", "", {0, 0, 0},
                   [](const Slices&, const Slices&) { return Internal("not expected"); });
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    if (r == 2) {
      EXPECT_TRUE(ranks[r].Refuse("alltoall", {"refused", 0, ""}, "wrong splits").ok());
    } else {
      errors[static_cast<size_t>(r)] =
          ranks.Alltoall(r, "refused", "abc", {1, 1, 1}, &received).message();
    }
    if (r == 2) {
      status = ranks[r].Alltoall({"places", 0, "bytes"}, "abc", {1, 1, 1}, 1, &counts, allocate);
    } else {
      status = ranks.Alltoall(r, "places", "abc", {1, 1, 1}, &received);
    }
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.message();
    EXPECT_NE(status.message().find("on a GPU"), std::string::npos) << status.message();
    status = ranks.Alltoall(r, "after", std::string(3, static_cast<char>('a' + r)), {1, 1, 1},
                            &received);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(received, "abc");
  });
  for (int r : {0, 1}) {
    EXPECT_EQ(errors[static_cast<size_t>(r)], "alltoall 'refused': rank 2: wrong splits");
  }
}

TEST(GpuRanks, ARankThatEndsInsideAnExchangeIsAnErrorOfTheOthers) {
  GpuRanks ranks(3);
  ranks.Run([&](int r) {
    ASSERT_TRUE(ExchangeSlices(&ranks, r, 0, 0).ok());
    if (r == 2) {  // announces, and sends nothing
      (void)AlltoallBy(&ranks[r], "last", "bytes", "abc", {1, 1, 1}, kNothing);
      ranks.End(r);
      return;
    }
    std::string received;
    Status status = ranks.Alltoall(r, "last", "abc", {1, 1, 1}, &received);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("rank 2 has ended"), std::string::npos) << status.message();
    status = ranks.Alltoall(r, "after", "abc", {1, 1, 1}, &received);
    EXPECT_NE(status.message().find("rank 2 has ended"), std::string::npos) << status.message();
  });
}

TEST(GpuRanks, ARankThatSendsNothingIsAnErrorAfterTheTimeout) {
  GpuRanks ranks(2, milliseconds(2000));
  ranks.Run([&](int r) {
    ASSERT_TRUE(ExchangeSlices(&ranks, r, 0, 0).ok());
    std::string received;
    if (r == 1) {
      const Status status = AlltoallBy(&ranks[r], "late", "bytes", "ab", {1, 1}, kNothing);
      EXPECT_TRUE(status.ok());
      // The next one needs the other rank, which fails first.
      std::this_thread::sleep_for(milliseconds(1000));
      const Status next = ranks.Alltoall(r, "next", "ab", {1, 1}, &received);
      EXPECT_NE(next.message().find("alltoall 'late' on rank 0"), std::string::npos)
          << next.message();
      return;
    }
    const Status status = ranks.Alltoall(r, "late", "ab", {1, 1}, &received);
    EXPECT_NE(status.message().find("has not ended within 2 s"), std::string::npos)
        << status.message();
  });
}

TEST(GpuRanks, AFailureOfTheLibraryIsAnErrorOfAllRanks) {
  for (const char* name : {"id", "join", "send", "error"}) {
    GpuRanks ranks(2);
    const Fault fault(name);
    ranks.Run([&](int r) {
      std::string received;
      const Status status = ranks.Alltoall(r, "any", "ab", {1, 1}, &received);
      EXPECT_EQ(status.code(), Code::kInternal) << name;
      EXPECT_NE(status.message().find("unhandled system error"), std::string::npos)
          << name << ": " << status.message();
    });
  }
}

TEST(GpuRanks, ARankThatLeavesEndsTheExchangesOfTheOthers) {
  GpuRanks ranks(2);
  ranks.Run([&](int r) {
    ASSERT_TRUE(ExchangeSlices(&ranks, r, 0, 0).ok());
    if (r == 1) {
      ranks[r].Leave();
      ranks.nccl(r).Abort();
    }
    std::string received;
    const Status status = ranks.Alltoall(r, "after", "ab", {1, 1}, &received);
    EXPECT_NE(status.message().find("rank 1 has left the group"), std::string::npos)
        << status.message();
  });
}

TEST(NcclLibrary, SaysWhatIsMissing) {
  std::unique_ptr<Nccl> nccl;
  Status status = Nccl::Load("/no/such/library.so", &nccl);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("/no/such/library.so"), std::string::npos) << status.message();
  status = Nccl::Load("libm.so.6", &nccl);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("libm.so.6 has no nccl"), std::string::npos) << status.message();
  const Fault fault("version");
  status = Nccl::Load(StandIn(), &nccl);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("2.14 or later"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace dynemb
