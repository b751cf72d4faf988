// ReceiveKeys on simulated devices: the keys and the errors of the host's Requests.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/route.h"
#include "cc/lookup/route.h"
#include "tests/cc/counting_session.h"

namespace dynemb {
namespace {

// Received messages: all words, and the number of words of each message.
struct Messages {
  std::vector<KeyType> key_types;
  std::vector<int32_t> words, splits;
  uint32_t self = kNoRank;
  std::vector<int32_t> own{};
};

// The received keys, or the error.
struct Keys {
  std::string error;
  std::vector<std::vector<int64_t>> counts;  // [tables]
  std::vector<std::vector<char>> keys;       // [tables]
  bool operator==(const Keys& o) const {
    return error == o.error && counts == o.counts && keys == o.keys;
  }
};

// Calls fn(received) with messages in memory of their exact size.
template <class Fn>
void WithReceived(const Messages& messages, const Fn& fn) {
  const Exact<int32_t> words(messages.words), splits(messages.splits), own(messages.own);
  Requests::Received received;
  received.words = words.p.get();
  received.num_words = static_cast<int64_t>(words.n);
  received.splits = splits.p.get();
  received.ranks = static_cast<uint32_t>(splits.n);
  received.self = messages.self;
  received.own = own.p.get();
  received.num_own_words = static_cast<int64_t>(own.n);
  fn(received);
}

Keys ReadOnHost(const Messages& messages) {
  Keys result;
  WithReceived(messages, [&](const Requests::Received& received) {
    Requests requests;
    const Status status = requests.Init(received, messages.key_types);
    result.error = status.message();
    if (!status.ok()) return;
    for (size_t t = 0; t < messages.key_types.size(); ++t) {
      result.counts.emplace_back();
      for (uint32_t r = 0; r < received.ranks; ++r) {
        result.counts[t].push_back(requests.count(t, r));
      }
      result.keys.emplace_back(static_cast<size_t>(requests.num_keys(t)) *
                               SizeOf(messages.key_types[t]));
      requests.CopyKeys(t, result.keys[t].data());
    }
  });
  return result;
}

template <class Device>
class DeviceRequestsTest : public testing::Test {
 protected:
  using Session = CountingSession<Device>;

  Keys Read(const Messages& messages) {
    Keys result;
    const size_t tables = messages.key_types.size();
    std::vector<Exact<uint64_t>> keys64;
    std::vector<Exact<uint32_t>> keys32;
    std::vector<std::pair<const void*, size_t>> written;
    WithReceived(messages, [&](const Requests::Received& received) {
      Session session(device_, &exec_);
      const Status status = device::ReceiveKeys(
          session, received, messages.key_types, [&](size_t t, const int64_t* counts, void** to) {
            EXPECT_EQ(t, result.counts.size());
            result.counts.emplace_back(counts, counts + received.ranks);
            size_t n = 0;
            for (uint32_t r = 0; r < received.ranks; ++r) n += static_cast<size_t>(counts[r]);
            if (messages.key_types[t] == KeyType::kInt32) {
              keys32.emplace_back(n);
              *to = keys32.back().p.get();
            } else {
              keys64.emplace_back(n);
              *to = keys64.back().p.get();
            }
            written.emplace_back(*to, n * SizeOf(messages.key_types[t]));
            return Status();
          });
      result.error = status.message();
      if (!status.ok()) {
        EXPECT_EQ(status.code(), Code::kInvalidArgument);
      }
      work_ = session.work;
    });
    EXPECT_EQ(written.size(), result.error.empty() ? tables : 0u);
    for (const auto& [p, bytes] : written) {
      result.keys.emplace_back(static_cast<const char*>(p), static_cast<const char*>(p) + bytes);
    }
    return result;
  }

  Device device_;
  ThreadsExec exec_{3};
  size_t work_ = 0;  // the work that the last call gave to the device
};

TYPED_TEST_SUITE(DeviceRequestsTest, CountedDevices);

// Messages of random keys. If `self` is a rank, its message is separate.
Messages RandomMessages(uint32_t ranks, size_t tables, uint32_t self, uint64_t most,
                        std::mt19937_64* random) {
  Messages messages;
  messages.self = self;
  for (size_t t = 0; t < tables; ++t) {
    messages.key_types.push_back(static_cast<KeyType>((*random)() % 3));
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    std::vector<int32_t> message(tables);
    size_t key_words = 0;
    for (size_t t = 0; t < tables; ++t) {
      const uint64_t n = (*random)() % 3 == 0 ? 0 : (*random)() % most;
      message[t] = static_cast<int32_t>(n);
      key_words += n * SizeOf(messages.key_types[t]) / 4;
    }
    for (; key_words > 0; --key_words) message.push_back(static_cast<int32_t>((*random)()));
    std::vector<int32_t>& to = r == self ? messages.own : messages.words;
    to.insert(to.end(), message.begin(), message.end());
    messages.splits.push_back(r == self ? 0 : static_cast<int32_t>(message.size()));
  }
  return messages;
}

TYPED_TEST(DeviceRequestsTest, MatchesTheHost) {
  std::mt19937_64 random(4);
  size_t work = 0;
  for (const auto& [ranks, tables] : {std::pair<uint32_t, size_t>{1, 1},
                                      {2, 3},
                                      {9, 1},
                                      {4, 40},
                                      {Owners::kMaxRanks, 2},
                                      {1, 300}}) {
    for (uint64_t most : {1, 3, 200}) {
      for (uint32_t self : {kNoRank, 0u, ranks - 1}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << tables << " tables, " << most);
        const Messages messages = RandomMessages(ranks, tables, self, most, &random);
        const Keys expected = ReadOnHost(messages);
        ASSERT_EQ(expected.error, "");
        const uint64_t waits = this->device_.waits();
        ASSERT_TRUE(this->Read(messages) == expected);
        EXPECT_EQ(this->device_.waits() - waits, 1u);
        if (most == 200 && tables > 2) {
          EXPECT_TRUE(work == 0 || work == this->work_) << work << " then " << this->work_;
          work = this->work_;
        }
      }
    }
  }
  for (const Messages& nothing :
       {Messages{{}, {}, {}}, {{}, {}, {0, 0}}, {{KeyType::kInt64}, {}, {}}}) {
    EXPECT_TRUE(this->Read(nothing) == ReadOnHost(nothing));
    EXPECT_EQ(this->work_, 0u);
  }
  EXPECT_EQ(this->Read({{}, {}, {0, 0}}).error, "");
}

// The errors are the same as on the host. Nothing outside the messages is read, which the address
// sanitizer checks.
TYPED_TEST(DeviceRequestsTest, RejectsDamagedMessages) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  std::mt19937_64 random(5);
  size_t refused = 0, rounds = 0;
  for (uint32_t self : {kNoRank, 0u, 2u}) {
    const Messages intact = RandomMessages(3, 3, self, 5, &random);
    for (int round = 0; round < 1500; ++round, ++rounds) {
      Messages damaged = intact;
      for (uint64_t i = random() % 3; i <= 1; ++i) {
        std::vector<int32_t>* const arrays[] = {&damaged.words, &damaged.splits, &damaged.own};
        std::vector<int32_t>& words = *arrays[random() % 3];
        if (words.empty()) continue;
        int32_t& word = words[random() % std::min<size_t>(words.size(), 12)];
        // Wraps around, like a damaged word.
        const auto plus = [&](uint32_t d) { return static_cast<int32_t>(uint32_t(word) + d); };
        const int32_t near[] = {plus(1), plus(3), plus(~0u), plus(~2u)};
        const int32_t far[] = {0, -1, kLeast, kMost, 1 << 30, static_cast<int32_t>(random())};
        word = random() % 2 == 0 ? near[random() % 4] : far[random() % 6];
      }
      if (random() % 8 == 0 && !damaged.words.empty()) damaged.words.pop_back();
      if (random() % 8 == 0) damaged.words.push_back(0);
      if (random() % 8 == 0 && !damaged.own.empty()) damaged.own.pop_back();
      if (random() % 20 == 0) damaged.own.clear();
      if (random() % 20 == 0) damaged.splits.push_back(0);
      if (random() % 20 == 0) damaged.key_types.push_back(KeyType::kInt32);
      const Keys expected = ReadOnHost(damaged);
      const Keys read = this->Read(damaged);
      ASSERT_EQ(read.error, expected.error);
      ASSERT_TRUE(read == expected);
      refused += !read.error.empty();
    }
  }
  EXPECT_GT(refused, rounds / 2);
  EXPECT_LT(refused, rounds);
}

// The message is shorter than its stated length: only its numbers of keys are read.
TYPED_TEST(DeviceRequestsTest, TooManyKeys) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const std::vector<int32_t> numbers = {kMost, kMost, 1};
  const int32_t split = 0;
  Requests::Received received;
  received.splits = &split;
  received.ranks = 1;
  received.self = 0;
  received.own = numbers.data();
  received.num_own_words = 3 + 2 * int64_t{kMost} + 1;
  typename TestFixture::Session session(this->device_, &this->exec_);
  const Status status = device::ReceiveKeys(session, received, {3, KeyType::kInt32},
                                            [&](size_t, const int64_t*, void**) {
                                              ADD_FAILURE() << "asked for room";
                                              return Status();
                                            });
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("2^32 - 2 keys"), std::string::npos) << status.message();
}

TYPED_TEST(DeviceRequestsTest, ReturnsFailures) {
  std::mt19937_64 random(6);
  Messages messages = RandomMessages(3, 2, 1, 50, &random);
  std::vector<uint64_t> keys(1000);
  size_t places = 0;
  WithReceived(messages, [&](const Requests::Received& received) {
    const auto receive = [&](size_t fails) {
      typename TestFixture::Session session(this->device_, &this->exec_);
      return device::ReceiveKeys(session, received, messages.key_types,
                                 [&](size_t t, const int64_t*, void** to) {
                                   ++places;
                                   *to = keys.data();
                                   return t == fails ? ResourceExhausted("no room") : Status();
                                 });
    };
    EXPECT_EQ(receive(0).message(), "no room");
    EXPECT_EQ(places, 1u);
    EXPECT_EQ(receive(1).message(), "no room");
    EXPECT_EQ(places, 3u);
    uint64_t takes = 0;
    for (;; ++takes) {
      EXPECT_FALSE(this->device_.FailTake(takes));
      const Status status = receive(2);
      if (status.ok()) break;
      EXPECT_EQ(status.code(), Code::kResourceExhausted);
    }
    EXPECT_TRUE(this->device_.FailTake(TypeParam::kNever));
    EXPECT_EQ(takes, 4u);
  });
}

}  // namespace
}  // namespace dynemb
