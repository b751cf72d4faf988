// Route on the host and on simulated devices.
#include "cc/lookup/route.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/requests_fixture.h"
#include "tests/cc/route_fixture.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

template <class Place>
class RouteTest : public RouteFixture<Place> {};

TYPED_TEST_SUITE(RouteTest, Places);

TYPED_TEST(RouteTest, RandomTablesAndFeatures) {
  std::mt19937_64 random(1);
  for (int round = 0; round < (kSanitized ? 15 : 40); ++round) {
    Call call = RandomTables(1 + static_cast<uint32_t>(random() % 9), &random);
    FillKeys(&call, &random);
    SCOPED_TRACE(testing::Message() << "round " << round);
    ASSERT_NO_FATAL_FAILURE(this->Check(call));
  }
}

// Every owner reads the keys that the ranks request from it.
TYPED_TEST(RouteTest, OwnersReadTheRequestedKeys) {
  std::mt19937_64 random(2);
  for (uint32_t ranks : {1u, 2u, 3u, 8u, 2u}) {
    for (int round = 0; round < 5; ++round) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, round " << round);
      Call call = RandomTables(ranks, &random);
      std::vector<Routed> of_rank;
      for (uint32_t r = 0; r < ranks; ++r) {
        FillKeys(&call, &random);
        call.self = r;
        of_rank.push_back(this->Run(call));
      }
      for (uint32_t owner = 0; owner < ranks; ++owner) {
        std::vector<int32_t> words, splits;
        std::vector<std::vector<uint64_t>> expected(call.key_types.size());
        for (uint32_t r = 0; r < ranks; ++r) {
          const std::vector<int32_t>& message = of_rank[r].messages[owner];
          // The owner's own message is not sent.
          if (r != owner) words.insert(words.end(), message.begin(), message.end());
          splits.push_back(r == owner ? 0 : static_cast<int32_t>(message.size()));
          const auto keys = ReadMessage(message, call.key_types);
          for (size_t t = 0; t < keys.size(); ++t) {
            expected[t].insert(expected[t].end(), keys[t].begin(), keys[t].end());
          }
        }
        Requests::Received received;
        received.words = words.data();
        received.num_words = static_cast<int64_t>(words.size());
        received.splits = splits.data();
        received.ranks = ranks;
        received.self = owner;
        received.own = of_rank[owner].messages[owner].data();
        received.num_own_words = static_cast<int64_t>(of_rank[owner].messages[owner].size());
        const ReceivedKeys keys = ReceiveAt(this->place_, received, call.key_types);
        ASSERT_EQ(keys.error, "");
        for (size_t t = 0; t < call.key_types.size(); ++t) {
          for (uint32_t r = 0; r < ranks; ++r) {
            ASSERT_EQ(keys.counts[t][r], static_cast<int64_t>(of_rank[r].counts[t][owner]));
          }
          ASSERT_EQ(keys.Values(t, call.key_types[t]), expected[t])
              << "table " << t << " of rank " << owner;
        }
      }
    }
  }
}

TYPED_TEST(RouteTest, LayoutOfMessages) {
  Call call;
  call.ranks = 2;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kInt32, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kUint64, Owners::Rule::kOne, 1);
  call.features = {{0, {7, 4, 7}}, {1, {0xFFFFFFFF, 0xFFFFFFFF}}, {0, {4, 0x900000002ull}}};
  for (uint32_t self : {kNoRank, 0u, 1u}) {
    call.self = self;
    Routed routed;
    ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
    EXPECT_EQ(routed.counts, (std::vector<std::vector<size_t>>{{2, 1}, {0, 1}, {0, 0}}));
    EXPECT_EQ(routed.messages[0], (std::vector<int32_t>{2, 0, 0, 4, 0, 2, 9}));
    EXPECT_EQ(routed.messages[1], (std::vector<int32_t>{1, 1, 0, 7, 0, -1}));
    EXPECT_EQ(routed.index, (std::vector<std::vector<uint32_t>>{{2, 0, 2}, {0, 0}, {0, 1}}));
  }
}

TYPED_TEST(RouteTest, FeaturesOfOneTableShareRequests) {
  std::mt19937_64 random(3);
  Call call;
  call.ranks = 4;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kHash);
  std::vector<uint64_t> keys(20000);
  for (uint64_t& key : keys) key = random() % 9000;
  call.features = {{0, keys}};
  Routed alone, twice;
  ASSERT_NO_FATAL_FAILURE(this->Check(call, &alone));
  call.features = {{0, keys}, {0, {}}, {0, keys}};
  ASSERT_NO_FATAL_FAILURE(this->Check(call, &twice));
  EXPECT_EQ(twice.index[0], twice.index[2]);
  for (uint32_t r = 0; r < 4; ++r) EXPECT_EQ(twice.counts[0][r], alone.counts[0][r]);
}

// Equal keys of different tables are distinct, for every key type.
TYPED_TEST(RouteTest, TablesWithTheSameKeys) {
  std::mt19937_64 random(2);
  std::vector<uint64_t> keys(3000);
  for (uint64_t& key : keys) key = random() % 2000;
  Call call;
  call.ranks = 3;
  for (size_t t = 0; t < 7; ++t) {
    AddTable(&call, t % 2 == 0 ? KeyType::kInt64 : KeyType::kInt32,
             t < 4 ? Owners::Rule::kHash : Owners::Rule::kModulo);
    call.features.push_back({t, keys});
  }
  call.features.push_back({3, keys});
  Routed routed;
  ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
  EXPECT_EQ(routed.index[7], routed.index[3]);
  // On a device, the order does not depend on the key type.
  for (size_t t : {1, 2, 3}) {
    if (this->kIsHost) break;
    EXPECT_EQ(routed.index[t], routed.index[0]);
  }
}

TYPED_TEST(RouteTest, EmptyRequests) {
  Routed routed;
  Call call;
  call.ranks = 3;
  ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
  EXPECT_EQ(routed.messages, std::vector<std::vector<int32_t>>(3)) << "no tables";
  AddTable(&call, KeyType::kInt32, Owners::Rule::kHash);
  AddTable(&call, KeyType::kInt64, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kInt64, Owners::Rule::kOne, 2);
  const std::vector<std::vector<int32_t>> none(3, {0, 0, 0});
  for (uint32_t self : {kNoRank, 1u}) {
    call.self = self;
    call.features.clear();
    ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
    EXPECT_EQ(routed.messages, none) << "tables without features";
    call.features = {{0, {}}, {1, {}}, {1, {}}, {2, {}}};
    ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
    EXPECT_EQ(routed.messages, none) << "features without ids";
  }
}

TYPED_TEST(RouteTest, AllKeysBelongToOneRank) {
  for (uint32_t one : {0u, 2u, 6u}) {
    for (KeyType type : {KeyType::kInt64, KeyType::kInt32}) {
      for (Owners::Rule rule : {Owners::Rule::kModulo, Owners::Rule::kOne}) {
        Call call;
        call.ranks = 7;
        call.self = type == KeyType::kInt32 ? 2 : kNoRank;
        AddTable(&call, type, rule, one);
        call.features = {{0, {}}, {0, {}}};
        for (uint64_t i = 0; i < 30000; ++i) {
          call.features[i % 2].keys.push_back(i % 17000 * 7 + one);
        }
        Routed routed;
        ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
        for (uint32_t r = 0; r < 7; ++r) {
          EXPECT_EQ(routed.counts[0][r], r == one ? 17000u : 0u);
        }
      }
    }
  }
}

TYPED_TEST(RouteTest, ManyRanks) {
  std::mt19937_64 random(4);
  for (uint32_t ranks : {Owners::kMaxRanks, 1000u}) {
    Call call;
    call.ranks = ranks;
    AddTable(&call, KeyType::kInt64, Owners::Rule::kHash);
    AddTable(&call, KeyType::kInt32, Owners::Rule::kOne, ranks - 1);
    AddTable(&call, KeyType::kInt32, Owners::Rule::kModulo);
    for (size_t t = 0; t < 3; ++t) {
      call.features.push_back({t, {}});
      for (int i = 0; i < 9000; ++i) call.features[t].keys.push_back(random() >> 32);
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(call));
  }
}

// Equal numbers of ids in tables of every kind.
TYPED_TEST(RouteTest, ManyRanksAndTables) {
  std::mt19937_64 random(3);
  for (const auto& [ranks, tables] :
       {std::pair<uint32_t, size_t>{1, 1}, {2, 2}, {64, 100}, {Owners::kMaxRanks, 10}, {1, 200}}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks, " << tables << " tables");
    ASSERT_NO_FATAL_FAILURE(this->Check(ManyTables(ranks, tables, &random)));
  }
}

// Also for the message of `self`, which is not sent.
TEST(RouteSizesTest, MessagesHaveLessThan2To31Words) {
  constexpr int64_t kMostWords = (int64_t{1} << 31) - 1;
  const std::vector<KeyType> types = {KeyType::kInt64, KeyType::kInt32};
  for (uint32_t self : {kNoRank, 0u, 1u}) {
    RouteSizes sizes;
    const int64_t half = int64_t{1} << 29;
    const int64_t rest = kMostWords - 2 - 2 * half;
    ASSERT_TRUE(SizesOf(types, {3, half, 4, rest}, 2, self, &sizes).ok());
    EXPECT_EQ(sizes.counts, (std::vector<int64_t>{3, half, 4, rest}));
    EXPECT_EQ(sizes.words[0], self == 0 ? 0u : 2u + 6 + 4);
    EXPECT_EQ(sizes.words[1], self == 1 ? 0u : static_cast<size_t>(kMostWords));
    EXPECT_EQ(sizes.num_own_words, self == kNoRank ? 0u : self == 0 ? 12u : size_t{kMostWords});
    const Status status = SizesOf(types, {3, half, 4, rest + 1}, 2, self, &sizes);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("the keys for rank 1 are 8589934592 bytes"), std::string::npos)
        << status.message();
  }
}

TYPED_TEST(RouteTest, ErrorsNameTheTable) {
  const uint64_t key = 1;
  uint32_t index = 77, of_bad = 77;
  RouteTask good;
  good.owners = MakeOwners(Owners::Rule::kHash, 2);
  good.features = {{&key, 1, &index}};
  const auto expect = [&](const RouteTask& bad, const std::string& part) {
    index = 77;
    const auto allocate = [](const RouteSizes&, int32_t**, int32_t**) {
      ADD_FAILURE() << "asked for room";
      return Status();
    };
    const Status status = this->TryRoute({good, bad}, 2, kNoRank, allocate);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(status.message(), CheckRoute({good, bad}, 2).message());
    EXPECT_EQ(index, 77u);
    EXPECT_EQ(of_bad, 77u);
  };
  RouteTask bad = good;
  bad.owners.ranks = 3;
  expect(bad, "its owner is rank 0 of 3, but there are 2 ranks");
  bad.owners = MakeOwners(Owners::Rule::kOne, 2, 2);
  expect(bad, "its owner is rank 2 of 2, but there are 2 ranks");
  bad = good;
  bad.features = {{&key, Dedup<uint64_t>::kMaxKeys + 1, &of_bad}};
  expect(bad, "at most 4294967294 keys");
  bad = good;
  bad.owners = MakeOwners(Owners::Rule::kHash, Owners::kMaxRanks + 1);
  expect(bad, "4097");
  // The next call succeeds.
  std::vector<int32_t> words(8);
  const auto allocate = [&](const RouteSizes& sizes, int32_t** to, int32_t**) {
    EXPECT_EQ(sizes.words[0] + sizes.words[1], 2u * 2 + 2 * 2);
    *to = words.data();
    return Status();
  };
  RouteTask other = good;
  other.features = {{&key, 1, &of_bad}};
  EXPECT_TRUE(this->TryRoute({good, other}, 2, kNoRank, allocate).ok());
  EXPECT_EQ(index, 0u);
  EXPECT_EQ(of_bad, 0u);
}

}  // namespace
}  // namespace dynemb
