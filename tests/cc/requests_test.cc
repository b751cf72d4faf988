// Messages that were sent over a network are read, on the host and on simulated devices. A damaged
// message is refused, or gives counts that fit the message. Reads never leave the message; builds
// with sanitizers check this.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/requests_fixture.h"

namespace dynemb {
namespace {

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

template <class Place>
class RequestsTest : public RequestsFixture<Place> {};

TYPED_TEST_SUITE(RequestsTest, Places);

// Messages of three ranks for three tables.
Messages MakeMessages(std::mt19937_64* random) {
  Messages messages;
  messages.key_types = {KeyType::kInt64, KeyType::kInt32, KeyType::kUint64};
  const std::vector<std::vector<int32_t>> counts = {{2, 3, 0}, {0, 0, 0}, {1, 0, 4}};
  for (const std::vector<int32_t>& of_rank : counts) {
    messages.words.insert(messages.words.end(), of_rank.begin(), of_rank.end());
    const int32_t key_words = 2 * of_rank[0] + of_rank[1] + 2 * of_rank[2];
    for (int32_t w = 0; w < key_words; ++w) {
      messages.words.push_back(static_cast<int32_t>((*random)()));
    }
    messages.splits.push_back(3 + key_words);
  }
  return messages;
}

// Values that may replace a word.
std::vector<int32_t> Hostile(int32_t word, std::mt19937_64* random) {
  // Wraps around.
  const auto plus = [word](uint32_t d) { return static_cast<int32_t>(uint32_t(word) + d); };
  std::vector<int32_t> words = {0,     1,         -1,      2,        3,       kMin,
                                kMax,  1 << 29,   1 << 30, plus(1),  plus(2), plus(~0u),
                                ~word, plus(~2u), -1000,   kMax / 2, 1 << 16, plus(1u << 31)};
  for (int bit = 0; bit < 32; ++bit) words.push_back(plus(1u << bit));
  for (int i = 0; i < 10; ++i) words.push_back(static_cast<int32_t>((*random)()));
  return words;
}

TYPED_TEST(RequestsTest, UndamagedMessagesAreRead) {
  std::mt19937_64 random(1);
  ReceivedKeys keys;
  ASSERT_EQ(this->Read(MakeMessages(&random), &keys), "");
  EXPECT_EQ(keys.counts[0][0], 2);
  EXPECT_EQ(keys.counts[1][0], 3);
  EXPECT_EQ(keys.counts[2][2], 4);
  EXPECT_EQ(keys.Values(0, KeyType::kInt64).size(), 3u);
}

TYPED_TEST(RequestsTest, RandomMessages) {
  std::mt19937_64 random(4);
  for (const auto& [ranks, tables] : {std::pair<uint32_t, size_t>{1, 1},
                                      {2, 3},
                                      {9, 1},
                                      {4, 40},
                                      {Owners::kMaxRanks, 2},
                                      {1, 300}}) {
    for (uint64_t most : {1, 3, 200}) {
      for (uint32_t self : {kNoRank, 0u, ranks - 1}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << tables << " tables, " << most);
        ASSERT_EQ(this->Read(RandomMessages(ranks, tables, self, most, &random)), "");
      }
    }
  }
}

TYPED_TEST(RequestsTest, DamagedWordsDoNotLeadOutOfBounds) {
  std::mt19937_64 random(2);
  const Messages intact = MakeMessages(&random);
  size_t refused = 0;
  for (size_t i = 0; i < intact.words.size(); ++i) {
    for (int32_t word : Hostile(intact.words[i], &random)) {
      Messages damaged = intact;
      damaged.words[i] = word;
      refused += !this->Read(damaged).empty();
    }
  }
  EXPECT_GT(refused, 9u * 50) << "almost every damaged count is refused";
  for (size_t i = 0; i < intact.splits.size(); ++i) {
    for (int32_t word : Hostile(intact.splits[i], &random)) {
      Messages damaged = intact;
      damaged.splits[i] = word;
      EXPECT_EQ(this->Read(damaged).empty(), word == intact.splits[i]) << word;
    }
  }
}

// Two wrong counts may have the right total. Only a negative count shows the damage.
TYPED_TEST(RequestsTest, CountsThatCompensateForEachOther) {
  std::mt19937_64 random(3);
  const Messages intact = MakeMessages(&random);
  const int64_t key_words[] = {2, 1, 2};
  size_t message = 0;  // where the words of a rank begin
  for (int32_t words : intact.splits) {
    for (size_t more = 0; more < 3; ++more) {
      for (size_t less = 0; less < 3; ++less) {
        for (int64_t moved = 2; moved < int64_t{1} << 33; moved = moved * 5 / 4 / 2 * 2 + 2) {
          Messages damaged = intact;
          int32_t& up = damaged.words[message + more];
          int32_t& down = damaged.words[message + less];
          const int64_t counts[] = {up + moved / key_words[more], down - moved / key_words[less]};
          if (more == less || counts[0] > kMax || counts[1] < kMin) continue;
          up = static_cast<int32_t>(counts[0]);
          down = static_cast<int32_t>(counts[1]);
          ASSERT_EQ(this->Read(damaged).empty(), down >= 0) << up << " and " << down;
        }
      }
    }
    message += static_cast<size_t>(words);
  }
}

// Up to two damaged words, in messages of wrong lengths, for other tables and ranks.
TYPED_TEST(RequestsTest, DamageOfAnyKind) {
  std::mt19937_64 random(5);
  size_t refused = 0, rounds = 0;
  for (uint32_t self : {kNoRank, 0u, 2u}) {
    const Messages intact = RandomMessages(3, 3, self, 5, &random);
    for (int round = 0; round < 3000; ++round, ++rounds) {
      Messages damaged = intact;
      for (uint64_t i = random() % 3; i <= 1; ++i) {
        std::vector<int32_t>* const arrays[] = {&damaged.words, &damaged.splits, &damaged.own};
        std::vector<int32_t>& words = *arrays[random() % 3];
        if (words.empty()) continue;
        int32_t& word = words[random() % std::min<size_t>(words.size(), 12)];
        const std::vector<int32_t> hostile = Hostile(word, &random);
        word = hostile[random() % hostile.size()];
      }
      if (random() % 8 == 0 && !damaged.words.empty()) damaged.words.pop_back();
      if (random() % 8 == 0) damaged.words.push_back(0);
      if (random() % 8 == 0 && !damaged.own.empty()) damaged.own.pop_back();
      if (random() % 20 == 0) damaged.own.clear();
      if (random() % 20 == 0) damaged.splits.push_back(0);
      if (random() % 20 == 0) damaged.key_types.push_back(KeyType::kInt32);
      refused += !this->Read(damaged).empty();
      ASSERT_FALSE(this->HasFailure());
    }
  }
  EXPECT_GT(refused, rounds / 2);
  EXPECT_LT(refused, rounds);
}

TYPED_TEST(RequestsTest, MessagesOfOtherLengthsAreRefused) {
  std::mt19937_64 random(4);
  const Messages intact = MakeMessages(&random);
  for (size_t n = 0; n < intact.words.size(); ++n) {
    Messages cut = intact;
    cut.words.resize(n);
    EXPECT_NE(this->Read(cut), "") << n << " words";
  }
  Messages longer = intact;
  longer.words.push_back(0);
  EXPECT_NE(this->Read(longer), "");
  Messages fewer_ranks = intact;
  fewer_ranks.splits.pop_back();
  EXPECT_NE(this->Read(fewer_ranks), "");
  Messages more_ranks = intact;
  more_ranks.splits.push_back(0);
  EXPECT_NE(this->Read(more_ranks), "");
}

// Ranks that make different calls get an error, instead of reading ids as ids of another table.
TYPED_TEST(RequestsTest, MessagesOfOtherTablesAreRefused) {
  std::mt19937_64 random(5);
  const Messages intact = MakeMessages(&random);
  using Types = std::vector<KeyType>;
  const KeyType k64 = KeyType::kInt64, k32 = KeyType::kInt32;
  for (const Types& types : {Types{}, Types{k64}, Types{k64, k32}, Types{k32, k32, k64},
                             Types{k64, k64, k64}, Types{k64, k32, k64, k64}}) {
    Messages other = intact;
    other.key_types = types;
    const std::string error = this->Read(other);
    EXPECT_NE(error.find("rank 0"), std::string::npos) << error;
    EXPECT_NE(error.find(std::to_string(types.size()) + " tables"), std::string::npos) << error;
  }
}

TYPED_TEST(RequestsTest, OwnMessageIsSeparate) {
  std::mt19937_64 random(6);
  const Messages all = MakeMessages(&random);
  for (uint32_t self = 0; self < 3; ++self) {
    SCOPED_TRACE(testing::Message() << "rank " << self);
    Messages received = all;
    received.self = self;
    const auto begin =
        received.words.begin() + std::accumulate(all.splits.begin(), all.splits.begin() + self, 0);
    received.own.assign(begin, begin + all.splits[self]);
    received.words.erase(begin, begin + all.splits[self]);
    received.splits[self] = 0;
    ReceivedKeys keys, expected;
    ASSERT_EQ(this->Read(all, &expected), "");
    ASSERT_EQ(this->Read(received, &keys), "");
    EXPECT_EQ(keys.keys, expected.keys);
    Messages damaged = received;
    damaged.splits[self] = 1;
    damaged.words.insert(damaged.words.begin() + (begin - received.words.begin()), 7);
    EXPECT_NE(this->Read(damaged), "") << "a rank must not send a message to itself";
    damaged = received;
    damaged.own.pop_back();
    EXPECT_NE(this->Read(damaged), "");
    damaged.own.clear();
    EXPECT_NE(this->Read(damaged), "");
  }
}

TYPED_TEST(RequestsTest, EmptyMessages) {
  EXPECT_EQ(this->Read({{}, {}, {}}), "");
  EXPECT_EQ(this->Read({{}, {}, {0, 0}}), "");
  EXPECT_EQ(this->Read({{KeyType::kInt64}, {0, 0}, {1, 1}}), "");
  EXPECT_NE(this->Read({{}, {1}, {1}}), "");
  EXPECT_NE(this->Read({{KeyType::kInt64}, {}, {0}}), "");
}

}  // namespace
}  // namespace dynemb
