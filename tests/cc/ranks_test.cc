// The contract of Group, for ranks that are threads, each with a wire over Gloo, with and without
// TLS, on hosts of which some have several ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/ranks/group.h"
#include "cc/table/half.h"
#include "tests/cc/gloo_wires.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

using std::chrono::milliseconds;

class Ranks {
 public:
  explicit Ranks(const Setting& setting, milliseconds timeout = std::chrono::seconds(60)) {
    for (auto& wire : Connected(setting, timeout)) {
      groups_.push_back(std::make_unique<Group>(std::move(wire)));
    }
  }
  int size() const { return static_cast<int>(groups_.size()); }
  Group& operator[](int r) { return *groups_[static_cast<size_t>(r)]; }
  void End(int r) { groups_[static_cast<size_t>(r)].reset(); }
  void Run(const std::function<void(int)>& f) { OnRanks(size(), f); }

 private:
  std::vector<std::unique_ptr<Group>> groups_;
};

// A result, and the function that allocates it.
struct Result {
  explicit Result(size_t row_bytes) : row_bytes(row_bytes) {}
  size_t row_bytes;
  std::string bytes;
  char* operator()(int64_t rows) {
    bytes.resize(static_cast<size_t>(rows) * row_bytes);
    return bytes.data();
  }
};

Status Alltoall(Group* group, const Group::Operation& operation, const std::string& data,
                const std::vector<int64_t>& rows, size_t row_bytes, std::string* received,
                std::vector<int64_t>* counts) {
  Result result(row_bytes);
  const auto allocate = [&](int64_t n) { return result(n); };
  const Status status = group->Alltoall(operation, data.data(), rows, row_bytes, counts, allocate);
  *received = result.bytes;
  return status;
}

Status Allgather(Group* group, const Group::Operation& operation, const std::string& data,
                 int64_t rows, size_t row_bytes, std::string* received) {
  Result result(row_bytes);
  const auto allocate = [&](int64_t n) { return result(n); };
  const Status status = group->Allgather(operation, data.data(), rows, row_bytes, allocate);
  *received = result.bytes;
  return status;
}

template <class T>
Status Allreduce(Group* group, const Group::Operation& operation, Number type,
                 std::vector<T>* values) {
  auto* data = reinterpret_cast<char*>(values->data());
  return group->Allreduce(operation, type, data, data, values->size());
}

// The slice that rank `from` sends to rank `to` in operation number `number`.
std::string SliceOf(uint64_t seed, int number, int from, int to, size_t row_bytes) {
  std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(number) * 10007 +
                         static_cast<uint64_t>(from) * 101 + static_cast<uint64_t>(to));
  const size_t rows = random() % 4 == 0 ? 0 : random() % (random() % 8 == 0 ? 20000 : 40);
  std::string bytes(rows * row_bytes, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

class RanksTest : public OverSockets {};
INSTANTIATE_TEST_SUITE_P(Settings, RanksTest,
                         testing::ValuesIn(Settings({"a", "ab", "abc", "abcd", "abcdefg", "aa",
                                                     "aaaa", "abab", "abacaba", "aaabbbb"},
                                                    {"ab", "abcd", "aabb"})),
                         NameOf);

TEST_P(RanksTest, RandomAlltoallsBringEachSliceToItsRank) {
  Ranks ranks(GetParam());
  const size_t n = Longer(kSanitized ? 8 : 24);
  ranks.Run([&](int r) {
    for (int number = 0; number < static_cast<int>(n); ++number) {
      const size_t row_bytes = 1 + static_cast<size_t>(number) * 7 % 65;
      std::string data, expected, received;
      std::vector<int64_t> rows, expected_counts, counts;
      for (int other = 0; other < ranks.size(); ++other) {
        const std::string sent = SliceOf(1, number, r, other, row_bytes);
        data += sent;
        rows.push_back(static_cast<int64_t>(sent.size() / row_bytes));
        const std::string got = SliceOf(1, number, other, r, row_bytes);
        expected += got;
        expected_counts.push_back(static_cast<int64_t>(got.size() / row_bytes));
      }
      const Status status =
          Alltoall(&ranks[r], {"random"}, data, rows, row_bytes, &received, &counts);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(counts, expected_counts);
      ASSERT_EQ(received, expected);
    }
  });
}

TEST_P(RanksTest, OperationsOfOtherNamesRunInAnyOrder) {
  Ranks ranks(GetParam());
  constexpr int kNames = 6;
  ranks.Run([&](int r) {
    std::vector<int> order(kNames);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(static_cast<unsigned>(r));
    for (size_t round = 0; round < Longer(kSanitized ? 2 : 5); ++round) {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::thread> threads;
      for (const int name : order) {
        threads.emplace_back([&, name] {
          const size_t row_bytes = 8;
          const std::string data = SliceOf(2, name, r, 0, row_bytes);
          std::string expected, received;
          for (int other = 0; other < ranks.size(); ++other) {
            expected += SliceOf(2, name, other, 0, row_bytes);
          }
          const Group::Operation operation{"name " + std::to_string(name / 2), name % 2};
          const Status status =
              Allgather(&ranks[r], operation, data, static_cast<int64_t>(data.size() / row_bytes),
                        row_bytes, &received);
          EXPECT_TRUE(status.ok()) << status.message();
          EXPECT_EQ(received, expected);
        });
      }
      for (std::thread& t : threads) t.join();
    }
  });
}

class RandomCollectivesTest : public OverSockets {};
INSTANTIATE_TEST_SUITE_P(Settings, RandomCollectivesTest,
                         testing::ValuesIn(Settings({"abcd", "aaaa", "aabb", "aaab"},
                                                    {"abcd", "aabb"})),
                         NameOf);

// Random operations of four ranks, in three threads of each; all results are those of a model.
TEST_P(RandomCollectivesTest, FourRanksInThreads) {
  constexpr int kThreads = 3;
  const size_t per_thread = Longer(kSanitized ? 20 : 120);
  Ranks ranks(GetParam());
  const auto run = [&](int r, int thread) {
    const auto size = static_cast<size_t>(ranks.size());
    std::mt19937_64 random(static_cast<uint64_t>(thread));  // the same on all ranks
    for (size_t number = 0; number < per_thread; ++number) {
      const std::string name =
          "thread " + std::to_string(thread) + "/" + std::to_string(random() % 4);
      const uint64_t seed = random(), kind = random() % 4;
      const int root = static_cast<int>(random() % size);
      const size_t row_bytes = 1 + random() % 24;
      const size_t n = random() % (random() % 16 == 0 ? 40'000 : 200);
      const auto slice = [&](int from, int to) {
        return SliceOf(seed, static_cast<int>(number), from, to, row_bytes);
      };
      const auto rows_of = [&](const std::string& bytes) {
        return static_cast<int64_t>(bytes.size() / row_bytes);
      };
      std::string data, received, expected;
      Status status;
      if (kind == 0) {
        std::vector<int64_t> rows, counts;
        for (int other = 0; other < ranks.size(); ++other) {
          const std::string sent = slice(r, other);
          data += sent;
          rows.push_back(rows_of(sent));
          expected += slice(other, r);
        }
        status = Alltoall(&ranks[r], {name}, data, rows, row_bytes, &received, &counts);
      } else if (kind == 1) {
        data = slice(r, 0);
        for (int other = 0; other < ranks.size(); ++other) expected += slice(other, 0);
        status = Allgather(&ranks[r], {name}, data, rows_of(data), row_bytes, &received);
      } else if (kind == 2) {
        expected = std::string(n, static_cast<char>(seed));
        received = r == root ? expected : std::string(n, 'x');
        status = ranks[r].Broadcast({name}, root, received.data(), n);
      } else {
        std::vector<int64_t> values(n);
        for (size_t i = 0; i < n; ++i) values[i] = static_cast<int64_t>((seed ^ i) + size_t(r));
        status = Allreduce(&ranks[r], {name}, Number::kInt64, &values);
        for (size_t i = 0; i < n; ++i) {
          const auto sum = static_cast<int64_t>((seed ^ i) * size + size * (size - 1) / 2);
          ASSERT_EQ(values[i], sum) << i << " of " << n;
        }
      }
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(received, expected) << "number " << number << " of kind " << kind;
    }
  };
  ranks.Run([&](int r) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(run, r, thread);
    for (std::thread& t : threads) t.join();
  });
}

TEST_P(RanksTest, BroadcastHasTheBytesOfTheRoot) {
  Ranks ranks(GetParam());
  ranks.Run([&](int r) {
    for (int root = 0; root < ranks.size(); ++root) {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'000}}) {
        std::string data(bytes, static_cast<char>('a' + r));
        ASSERT_TRUE(ranks[r].Broadcast({"b"}, root, data.data(), bytes).ok());
        EXPECT_EQ(data, std::string(bytes, static_cast<char>('a' + root)));
      }
    }
    char byte = 0;
    EXPECT_EQ(ranks[r].Broadcast({"b"}, ranks.size(), &byte, 1).code(), Code::kInvalidArgument);
  });
}

// The sum in the order of ranks, for numbers whose sum depends on the order.
TEST_P(RanksTest, SumsAreInTheOrderOfRanks) {
  Ranks ranks(GetParam());
  for (const size_t n : {size_t{0}, size_t{1}, size_t{5}, size_t{3000}, size_t{100'001}}) {
    const auto value = [&](int r, size_t i) {
      uint64_t bits = (i * 31 + static_cast<size_t>(r) + 1) * 0x9e3779b97f4a7c15u;
      bits ^= bits >> 29;
      return std::ldexp(static_cast<float>(static_cast<int32_t>(bits)),
                        static_cast<int>((bits >> 32) % 60) - 30);
    };
    std::vector<std::vector<float>> results(static_cast<size_t>(ranks.size()));
    ranks.Run([&](int r) {
      std::vector<float>& values = results[static_cast<size_t>(r)];
      for (size_t i = 0; i < n; ++i) values.push_back(value(r, i));
      const Status status = Allreduce(&ranks[r], {"sum"}, Number::kFloat32, &values);
      ASSERT_TRUE(status.ok()) << status.message();
    });
    for (size_t i = 0; i < n; ++i) {
      float sum = value(0, i);
      for (int r = 1; r < ranks.size(); ++r) sum += value(r, i);
      for (const auto& result : results) {
        ASSERT_EQ(memcmp(&result[i], &sum, sizeof(sum)), 0) << i << " of " << n;
      }
    }
  }
}

TEST_P(RanksTest, SumsOfEveryType) {
  Ranks ranks(GetParam());
  ranks.Run([&](int r) {
    const auto size = static_cast<size_t>(ranks.size());
    std::vector<int32_t> wrapped{2147483647, r};
    ASSERT_TRUE(Allreduce(&ranks[r], {"i4"}, Number::kInt32, &wrapped).ok());
    EXPECT_EQ(wrapped[0], static_cast<int32_t>(static_cast<uint32_t>(size) * 2147483647u));
    EXPECT_EQ(wrapped[1], static_cast<int32_t>(size * (size - 1) / 2));
    std::vector<int64_t> large{int64_t{1} << 40};
    ASSERT_TRUE(Allreduce(&ranks[r], {"i8"}, Number::kInt64, &large).ok());
    EXPECT_EQ(large[0], static_cast<int64_t>(size << 40));
    std::vector<double> small{1e-300};
    ASSERT_TRUE(Allreduce(&ranks[r], {"f8"}, Number::kFloat64, &small).ok());
    EXPECT_NEAR(small[0] / (static_cast<double>(size) * 1e-300), 1, 1e-15);
    // 2048 + 1 + 1 ... in float16: 2048, if each sum were rounded.
    using Float16 = HalfFormat<DType::kFloat16>;
    std::vector<uint16_t> half{Float16::ToNearest(r == 0 ? 2048.0f : 1.0f)};
    ASSERT_TRUE(Allreduce(&ranks[r], {"f2"}, Number::kFloat16, &half).ok());
    EXPECT_EQ(half[0], Float16::ToNearest(2048.0f + static_cast<float>(size - 1)));
    using Bfloat16 = HalfFormat<DType::kBfloat16>;
    std::vector<uint16_t> brain{Bfloat16::ToNearest(r == 0 ? 256.0f : 1.0f)};
    ASSERT_TRUE(Allreduce(&ranks[r], {"b2"}, Number::kBfloat16, &brain).ok());
    EXPECT_EQ(brain[0], Bfloat16::ToNearest(256.0f + static_cast<float>(size - 1)));
  });
}

// With fewer ranks than its letters, a layout is their beginning.
class RanksErrorTest : public OverSockets {
 protected:
  static Setting Of(size_t ranks) { return GetParam().Of(ranks); }
};
INSTANTIATE_TEST_SUITE_P(Settings, RanksErrorTest,
                         testing::ValuesIn(Settings({"abc", "aaa", "aab", "abb"}, {"abc", "aab"})),
                         NameOf);

TEST_P(RanksErrorTest, AnnouncementsThatDoNotFitAreNamedAndTheGroupGoesOn) {
  Ranks ranks(Of(3));
  ranks.Run([&](int r) {
    std::string received;
    const size_t row_bytes = r == 1 ? 16 : 8;
    Status status = Allgather(&ranks[r], {"g"}, std::string(16, 'x'),
                              static_cast<int64_t>(16 / row_bytes), row_bytes, &received);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("allgather 'g': rank "), std::string::npos);
    EXPECT_NE(status.message().find("16"), std::string::npos) << status.message();

    std::vector<float> values(r == 2 ? 5 : 4, 1.0f);
    status = Allreduce(&ranks[r], {"s"}, Number::kFloat32, &values);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("elements"), std::string::npos) << status.message();

    values.assign(4, 1.0f);
    EXPECT_TRUE(Allreduce(&ranks[r], {"s"}, Number::kFloat32, &values).ok());
    EXPECT_EQ(values[3], 3.0f);
  });
}

TEST_P(RanksErrorTest, ARankThatDoesNotCallIsNamedOnAllOthers) {
  Ranks ranks(Of(3), milliseconds(500));
  ranks.Run([&](int r) {
    if (r == 2) return;
    std::string received;
    const Status status = Allgather(&ranks[r], {"all"}, "x", 1, 1, &received);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("allgather 'all' on rank "), std::string::npos);
    EXPECT_NE(status.message().find(": rank 2 has sent nothing for 0.5 s"), std::string::npos)
        << status.message();
    // The first failure stays.
    EXPECT_EQ(Allgather(&ranks[r], {"next"}, "x", 1, 1, &received).message(), status.message());
  });
}

TEST_P(RanksErrorTest, RanksThatCallOtherOperationsNameEachOther) {
  Ranks ranks(Of(2), milliseconds(500));
  ranks.Run([&](int r) {
    std::string received;
    const Status status = Allgather(&ranks[r], {r == 0 ? "first" : "second"}, "x", 1, 1, &received);
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("has sent nothing for 0.5 s"), std::string::npos)
        << status.message();
  });
}

// Rank 0 waits for rank 1, which waits for others: both have the error of rank 1. With two levels,
// rank 1 waits for the rank of the same host first.
TEST_P(RanksErrorTest, TheReasonOfANeighbourThatGaveUpIsPassedOn) {
  Ranks ranks(Of(3), milliseconds(1000));
  ranks.Run([&](int r) {
    if (r == 2) return;
    std::string received;
    if (r == 0) std::this_thread::sleep_for(milliseconds(500));
    const Status status = Allgather(&ranks[r], {r == 0 ? "a" : "b"}, "x", 1, 1, &received);
    const char* const missed = GetParam().layout == "aab"   ? "rank 0 has"
                               : GetParam().layout == "abb" ? "rank 2 has"
                                                            : "ranks 0, 2 have";
    EXPECT_EQ(status.message(),
              std::string("allgather 'b' on rank 1: ") + missed + " sent nothing for 1 s");
  });
}

TEST_P(RanksErrorTest, ARankThatEndsIsNamedAtOnce) {
  Ranks ranks(Of(3));
  const auto begin = std::chrono::steady_clock::now();
  ranks.Run([&](int r) {
    if (r == 1) {
      std::this_thread::sleep_for(milliseconds(100));
      return ranks.End(1);
    }
    std::string received;
    const Status status = Allgather(&ranks[r], {"all"}, "x", 1, 1, &received);
    EXPECT_NE(status.message().find("rank 1 has ended, or its connection is lost"),
              std::string::npos)
        << status.message();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

// Rank 0 waits for rank 2 first, and rank 1 has ended.
TEST_P(RanksErrorTest, ARankThatEndsIsNamedWhileAnotherOneIsLate) {
  Ranks ranks(Of(3));
  ranks.Run([&](int r) {
    if (r == 1) return ranks.End(1);
    if (r == 2) return;
    std::string received;
    const Status status = Allgather(&ranks[0], {"all"}, "x", 1, 1, &received);
    EXPECT_EQ(status.message(),
              "allgather 'all' on rank 0: rank 1 has ended, or its connection is lost");
  });
}

// The last operation of ranks of which one ends sooner.
TEST_P(RanksErrorTest, ARankThatEndsAfterItsPartIsNoFailure) {
  for (int round = 0; round < 5; ++round) {
    Ranks ranks(Of(3));
    ranks.Run([&](int r) {
      std::string received;
      if (r == 2) std::this_thread::sleep_for(milliseconds(250));
      const Status status = Allgather(&ranks[r], {"last"}, "x", 1, 1, &received);
      EXPECT_TRUE(status.ok()) << status.message();
      ranks.End(r);
    });
  }
}

TEST_P(RanksErrorTest, LeavingEndsTheOperationsOfThisRankAndOfOthers) {
  Ranks ranks(Of(2));
  std::thread leaves([&] {
    std::this_thread::sleep_for(milliseconds(200));
    ranks[0].Leave();
  });
  const auto begin = std::chrono::steady_clock::now();
  ranks.Run([&](int r) {
    std::string received;
    const Status status = Allgather(&ranks[r], {r == 0 ? "a" : "b"}, "x", 1, 1, &received);
    EXPECT_EQ(status.message(), "rank 0 has left the group");
  });
  leaves.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST_P(RanksErrorTest, TwoOperationsOfOneNameAtTheSameTime) {
  Ranks ranks(Of(2), std::chrono::seconds(60));
  std::thread first([&] {
    std::string received;
    EXPECT_TRUE(Allgather(&ranks[0], {"same"}, "x", 1, 1, &received).ok());
  });
  std::this_thread::sleep_for(milliseconds(200));
  std::string received;
  const Status status = Allgather(&ranks[0], {"same"}, "x", 1, 1, &received);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("allgather 'same' runs already on rank 0"), std::string::npos);
  EXPECT_TRUE(Allgather(&ranks[1], {"same"}, "y", 1, 1, &received).ok());
  first.join();
}

TEST_P(RanksErrorTest, DataOfAnotherFormAreRefused) {
  Ranks ranks(Of(2));
  ranks.Run([&](int r) {
    std::string received;
    const Group::Operation operation{"g", 0, r == 0 ? "float" : "int32"};
    const Status status = Allgather(&ranks[r], operation, "xxxx", 1, 4, &received);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(), r == 0 ? "allgather 'g': rank 1 has int32, and rank 0 has float"
                                       : "allgather 'g': rank 0 has float, and rank 1 has int32");
  });
}

// The rows of rank 0 for rank 1 are too many for an announcement; rank 1 has no memory for them.
TEST_P(RanksErrorTest, AResultWithoutMemory) {
  Ranks ranks(Of(2));
  const std::string data(1 << 20, 'x');
  ranks.Run([&](int r) {
    const Status status =
        ranks[r].Allgather({"g"}, data.data(), 1, data.size(), [&](int64_t) -> char* {
          static char memory[2 << 20];
          return r == 1 ? nullptr : memory;
        });
    EXPECT_EQ(status.code(), r == 1 ? Code::kResourceExhausted : Code::kInternal);
    EXPECT_EQ(status.message(), "allgather 'g': rank 1 is out of memory for its result");
  });
}

TEST_P(RanksErrorTest, WrongArgumentsOfOneRankAreAnErrorOfAll) {
  Ranks ranks(Of(3));
  ranks.Run([&](int r) {
    std::string received;
    std::vector<int64_t> counts;
    const Status status = r == 1
                              ? ranks[r].Refuse("alltoall", {"a"}, std::string(1 << 20, 'w'))
                              : Alltoall(&ranks[r], {"a"}, "xxx", {1, 1, 1}, 1, &received, &counts);
    if (r == 1) {
      EXPECT_TRUE(status.ok()) << status.message();
    } else {
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_EQ(status.message().find("alltoall 'a': rank 1: www"), 0u) << status.message();
    }
    EXPECT_TRUE(Alltoall(&ranks[r], {"a"}, "xyz", {1, 1, 1}, 1, &received, &counts).ok());
    EXPECT_EQ(received, std::string(3, static_cast<char>('x' + r)));
  });
}

// About the most bytes that an announcement has room for, with any number of ranks.
TEST_P(RanksTest, SlicesOfAnyLengthNearThatOfAnAnnouncement) {
  Ranks ranks(GetParam());
  std::vector<int64_t> lengths;
  for (const int64_t most : {128, 9360, 16 << 10}) {
    for (int64_t n = most - 2; n <= most + 2; ++n) lengths.push_back(n);
  }
  ranks.Run([&](int r) {
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto length = [&](int from, int to) {
        return lengths[(i + static_cast<size_t>(from) * 5 + static_cast<size_t>(to)) %
                       lengths.size()];
      };
      std::vector<int64_t> rows, counts;
      std::string data, received, expected;
      for (int other = 0; other < ranks.size(); ++other) {
        rows.push_back(length(r, other));
        data.append(static_cast<size_t>(rows.back()), static_cast<char>('a' + r));
        expected.append(static_cast<size_t>(length(other, r)), static_cast<char>('a' + other));
      }
      ASSERT_TRUE(Alltoall(&ranks[r], {"near"}, data, rows, 1, &received, &counts).ok());
      ASSERT_EQ(received, expected);
      std::vector<float> values(static_cast<size_t>(lengths[i]) / 4, 1.0f);
      ASSERT_TRUE(Allreduce(&ranks[r], {"near"}, Number::kFloat32, &values).ok());
      ASSERT_EQ(values, std::vector<float>(values.size(), static_cast<float>(ranks.size())));
      std::string bytes(static_cast<size_t>(lengths[i]), static_cast<char>('a' + r));
      ASSERT_TRUE(ranks[r].Broadcast({"near"}, 0, bytes.data(), bytes.size()).ok());
      ASSERT_EQ(bytes, std::string(bytes.size(), 'a'));
    }
  });
}

// Ranks that wait until the other one has taken what they send would wait without end.
TEST_P(RanksErrorTest, RanksThatSendEachOtherMoreThanTheSystemKeeps) {
  Ranks ranks(Of(2));
  const size_t bytes = 32 << 20;
  ranks.Run([&](int r) {
    const std::string data(2 * bytes, static_cast<char>('a' + r));
    std::string received;
    std::vector<int64_t> counts;
    const Status status = Alltoall(&ranks[r], {"large"}, data, {1, 1}, bytes, &received, &counts);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(received, std::string(bytes, 'a') + std::string(bytes, 'b'));
  });
}

}  // namespace
}  // namespace dynemb
