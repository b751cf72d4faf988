// Requests reads messages that were sent over a network. A damaged message is refused, or gives
// counts that fit the message. Reads never leave the message; builds with sanitizers check this.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cc/lookup/route.h"
#include "tests/cc/route_model.h"

namespace dynemb {
namespace {

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

// Messages as received: all words, and the number of words of each.
struct Received {
  std::vector<KeyType> key_types;
  std::vector<int32_t> words, splits;
  // The message of `self`, separate from the received messages.
  uint32_t self = kNoRank;
  std::vector<int32_t> own{};
};

// Messages of three ranks for three tables.
Received MakeReceived(std::mt19937_64* random) {
  Received received;
  received.key_types = {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64};
  const std::vector<std::vector<int32_t>> counts = {{2, 3, 0}, {0, 0, 0}, {1, 0, 4}};
  for (const std::vector<int32_t>& of_rank : counts) {
    received.words.insert(received.words.end(), of_rank.begin(), of_rank.end());
    const int32_t key_words = 2 * of_rank[0] + of_rank[1] + 2 * of_rank[2];
    for (int32_t w = 0; w < key_words; ++w) {
      received.words.push_back(static_cast<int32_t>((*random)()));
    }
    received.splits.push_back(3 + key_words);
  }
  return received;
}

// Reads from and copies to arrays of the exact sizes. `keys_of_tables` may be null.
Status Read(const Received& received, Requests* requests,
            std::vector<std::vector<char>>* keys_of_tables = nullptr) {
  const auto exact = [](const std::vector<int32_t>& v) {
    std::unique_ptr<int32_t[]> copy(new int32_t[v.size()]);
    std::copy(v.begin(), v.end(), copy.get());
    return copy;
  };
  const auto words = exact(received.words), splits = exact(received.splits);
  const auto own = exact(received.own);
  const auto ranks = static_cast<uint32_t>(received.splits.size());
  Requests::Received r;
  r.words = words.get();
  r.num_words = static_cast<int64_t>(received.words.size());
  r.splits = splits.get();
  r.ranks = ranks;
  r.self = received.self;
  r.own = own.get();
  r.num_own_words = static_cast<int64_t>(received.own.size());
  const int64_t num_words = r.num_words + r.num_own_words;
  const Status status = requests->Init(r, received.key_types);
  if (!status.ok()) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status;
  }
  int64_t total = 0;
  for (size_t t = 0; t < received.key_types.size(); ++t) {
    int64_t keys = 0;
    for (uint32_t r = 0; r < ranks; ++r) {
      EXPECT_GE(requests->count(t, r), 0);
      keys += requests->count(t, r);
    }
    EXPECT_EQ(keys, requests->num_keys(t));
    const auto bytes = static_cast<size_t>(keys) * SizeOf(received.key_types[t]);
    total += ranks + static_cast<int64_t>(bytes / 4);
    EXPECT_LE(total, num_words);
    if (total > num_words) return status;
    std::unique_ptr<char[]> copy(new char[bytes]);
    requests->CopyKeys(t, copy.get());
    if (keys_of_tables != nullptr) keys_of_tables->emplace_back(copy.get(), copy.get() + bytes);
  }
  EXPECT_EQ(total, num_words) << "words that belong to no table";
  return status;
}

// Values that may replace a word.
std::vector<int32_t> Hostile(int32_t word, std::mt19937_64* random) {
  // Wraps around.
  const auto plus = [word](uint32_t d) { return static_cast<int32_t>(uint32_t(word) + d); };
  std::vector<int32_t> words = {
      0,       1,       -1,        2,     3,     kMin,     kMax,    1 << 29,       1 << 30,
      plus(1), plus(2), plus(~0u), ~word, -1000, kMax / 2, 1 << 16, plus(1u << 31)};
  for (int bit = 0; bit < 32; ++bit) words.push_back(plus(1u << bit));
  for (int i = 0; i < 10; ++i) words.push_back(static_cast<int32_t>((*random)()));
  return words;
}

TEST(RequestsTest, UndamagedMessagesAreRead) {
  std::mt19937_64 random(1);
  Requests requests;
  const Status status = Read(MakeReceived(&random), &requests);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(requests.count(0, 0), 2);
  EXPECT_EQ(requests.count(1, 0), 3);
  EXPECT_EQ(requests.count(2, 2), 4);
  EXPECT_EQ(requests.num_keys(0), 3);
}

TEST(RequestsTest, DamagedWordsDoNotLeadOutOfBounds) {
  std::mt19937_64 random(2);
  const Received intact = MakeReceived(&random);
  Requests requests;
  size_t refused = 0;
  for (size_t i = 0; i < intact.words.size(); ++i) {
    for (int32_t word : Hostile(intact.words[i], &random)) {
      Received damaged = intact;
      damaged.words[i] = word;
      refused += !Read(damaged, &requests).ok();
    }
  }
  EXPECT_GT(refused, 9u * 50) << "almost every damaged count is refused";
  for (size_t i = 0; i < intact.splits.size(); ++i) {
    for (int32_t word : Hostile(intact.splits[i], &random)) {
      Received damaged = intact;
      damaged.splits[i] = word;
      EXPECT_EQ(Read(damaged, &requests).ok(), word == intact.splits[i]) << word;
    }
  }
}

// Two wrong counts may have the right total. Only a negative count shows the damage.
TEST(RequestsTest, CountsThatCompensateForEachOther) {
  std::mt19937_64 random(3);
  const Received intact = MakeReceived(&random);
  Requests requests;
  const int64_t key_words[] = {2, 1, 2};
  size_t message = 0;  // where the words of a rank begin
  for (int32_t words : intact.splits) {
    for (size_t more = 0; more < 3; ++more) {
      for (size_t less = 0; less < 3; ++less) {
        for (int64_t moved = 2; moved < int64_t{1} << 33; moved = moved * 5 / 4 / 2 * 2 + 2) {
          Received damaged = intact;
          int32_t& up = damaged.words[message + more];
          int32_t& down = damaged.words[message + less];
          const int64_t counts[] = {up + moved / key_words[more], down - moved / key_words[less]};
          if (more == less || counts[0] > kMax || counts[1] < kMin) continue;
          up = static_cast<int32_t>(counts[0]);
          down = static_cast<int32_t>(counts[1]);
          ASSERT_EQ(Read(damaged, &requests).ok(), down >= 0) << up << " and " << down;
        }
      }
    }
    message += static_cast<size_t>(words);
  }
}

TEST(RequestsTest, PairsOfDamagedWordsDoNotLeadOutOfBounds) {
  std::mt19937_64 random(6);
  const Received intact = MakeReceived(&random);
  Requests requests;
  for (int round = 0; round < 20000; ++round) {
    Received damaged = intact;
    for (int i = 0; i < 2; ++i) {
      std::vector<int32_t>& words = random() % 2 == 0 ? damaged.words : damaged.splits;
      const size_t at = random() % words.size();
      const std::vector<int32_t> hostile = Hostile(words[at], &random);
      words[at] = hostile[random() % hostile.size()];
    }
    (void)Read(damaged, &requests);
  }
}

TEST(RequestsTest, MessagesOfOtherLengthsAreRefused) {
  std::mt19937_64 random(4);
  const Received intact = MakeReceived(&random);
  Requests requests;
  for (size_t n = 0; n < intact.words.size(); ++n) {
    Received cut = intact;
    cut.words.resize(n);
    EXPECT_FALSE(Read(cut, &requests).ok()) << n << " words";
  }
  Received longer = intact;
  longer.words.push_back(0);
  EXPECT_FALSE(Read(longer, &requests).ok());
  Received fewer_ranks = intact;
  fewer_ranks.splits.pop_back();
  EXPECT_FALSE(Read(fewer_ranks, &requests).ok());
  Received more_ranks = intact;
  more_ranks.splits.push_back(0);
  EXPECT_FALSE(Read(more_ranks, &requests).ok());
}

// Ranks that make different calls get an error, instead of reading ids as ids of another table.
TEST(RequestsTest, MessagesOfOtherTablesAreRefused) {
  std::mt19937_64 random(5);
  const Received intact = MakeReceived(&random);
  Requests requests;
  using Types = std::vector<KeyType>;
  const KeyType k64 = KeyType::kInt64, k32 = KeyType::kInt32;
  for (const Types& types : {Types{}, Types{k64}, Types{k64, k32}, Types{k32, k32, k64},
                             Types{k64, k64, k64}, Types{k64, k32, k64, k64}}) {
    Received other = intact;
    other.key_types = types;
    const Status status = Read(other, &requests);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(std::to_string(types.size()) + " tables"), std::string::npos)
        << status.message();
  }
}

TEST(RequestsTest, OwnMessageIsSeparate) {
  std::mt19937_64 random(6);
  Requests requests;
  const Received all = MakeReceived(&random);
  for (uint32_t self = 0; self < 3; ++self) {
    SCOPED_TRACE(testing::Message() << "rank " << self);
    Received received = all;
    received.self = self;
    const auto begin =
        received.words.begin() + std::accumulate(all.splits.begin(), all.splits.begin() + self, 0);
    received.own.assign(begin, begin + all.splits[self]);
    received.words.erase(begin, begin + all.splits[self]);
    received.splits[self] = 0;
    std::vector<std::vector<char>> keys, expected;
    ASSERT_TRUE(Read(all, &requests, &expected).ok());
    ASSERT_TRUE(Read(received, &requests, &keys).ok());
    EXPECT_EQ(keys, expected);
    Received damaged = received;
    damaged.splits[self] = 1;
    damaged.words.insert(damaged.words.begin() + (begin - received.words.begin()), 7);
    EXPECT_FALSE(Read(damaged, &requests).ok()) << "a rank must not send a message to itself";
    damaged = received;
    damaged.own.pop_back();
    EXPECT_FALSE(Read(damaged, &requests).ok());
    damaged.own.clear();
    EXPECT_FALSE(Read(damaged, &requests).ok());
  }
}

TEST(RequestsTest, EmptyMessages) {
  Requests requests;
  EXPECT_TRUE(Read({{}, {}, {}}, &requests).ok());
  EXPECT_TRUE(Read({{}, {}, {0, 0}}, &requests).ok());
  EXPECT_TRUE(Read({{KeyType::kInt64}, {0, 0}, {1, 1}}, &requests).ok());
  EXPECT_FALSE(Read({{}, {1}, {1}}, &requests).ok());
  EXPECT_FALSE(Read({{KeyType::kInt64}, {}, {0}}, &requests).ok());
}

}  // namespace
}  // namespace dynemb
