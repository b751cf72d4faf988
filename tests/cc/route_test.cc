#include "cc/lookup/route.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/cc/execs.h"
#include "tests/cc/route_model.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

// Checks the result of `call`, which must have the same bits for every Exec.
void CheckAll(const Call& call, Route* route, Routed* result = nullptr) {
  Routed expected;
  ForEachExec([&](Exec& exec) {
    const Routed routed = RunRoute(exec, call, route);
    if (exec.parallelism() == 1) {
      ASSERT_NO_FATAL_FAILURE(CheckRouted(call, routed));
      expected = routed;
    }
    ASSERT_TRUE(routed == expected);
  });
  if (result != nullptr) *result = expected;
}

TEST(RouteTest, RandomTablesAndFeatures) {
  std::mt19937_64 random(1);
  Route route;  // reused, so that tables and sizes grow and shrink
  for (int round = 0; round < (kSanitized ? 15 : 40); ++round) {
    Call call = RandomTables(1 + static_cast<uint32_t>(random() % 9), &random);
    FillKeys(&call, &random);
    SCOPED_TRACE(testing::Message() << "round " << round);
    ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route));
  }
}

// Every owner reads the keys that the ranks request from it.
TEST(RouteTest, OwnersReadTheRequestedKeys) {
  std::mt19937_64 random(2);
  Requests requests;
  for (uint32_t ranks : {1u, 2u, 3u, 8u, 2u}) {
    for (int round = 0; round < 5; ++round) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, round " << round);
      Call call = RandomTables(ranks, &random);
      std::vector<Routed> of_rank;
      for (uint32_t r = 0; r < ranks; ++r) {
        FillKeys(&call, &random);
        call.self = r;
        Route route;
        ThreadsExec exec(1 + r % 3);
        of_rank.push_back(RunRoute(exec, call, &route));
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
        const Status status = requests.Init(received, call.key_types);
        ASSERT_TRUE(status.ok()) << status.message();
        for (size_t t = 0; t < call.key_types.size(); ++t) {
          for (uint32_t r = 0; r < ranks; ++r) {
            ASSERT_EQ(requests.count(t, r), static_cast<int64_t>(of_rank[r].counts[t][owner]));
          }
          ASSERT_EQ(requests.num_keys(t), static_cast<int64_t>(expected[t].size()));
          std::vector<uint64_t> keys(expected[t].size());
          if (call.key_types[t] == KeyType::kInt32) {
            std::vector<uint32_t> keys32(keys.size());
            requests.CopyKeys(t, keys32.data());
            keys.assign(keys32.begin(), keys32.end());
          } else {
            requests.CopyKeys(t, keys.data());
          }
          ASSERT_EQ(keys, expected[t]) << "table " << t << " of rank " << owner;
        }
      }
    }
  }
}

TEST(RouteTest, LayoutOfMessages) {
  Call call;
  call.ranks = 2;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kInt32, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kUint64, Owners::Rule::kOne, 1);
  call.features = {{0, {7, 4, 7}}, {1, {0xFFFFFFFF, 0xFFFFFFFF}}, {0, {4, 0x900000002ull}}};
  Route route;
  Routed routed;
  ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &routed));
  EXPECT_EQ(routed.counts, (std::vector<std::vector<size_t>>{{2, 1}, {0, 1}, {0, 0}}));
  EXPECT_EQ(routed.messages[0], (std::vector<int32_t>{2, 0, 0, 4, 0, 2, 9}));
  EXPECT_EQ(routed.messages[1], (std::vector<int32_t>{1, 1, 0, 7, 0, -1}));
  EXPECT_EQ(routed.index, (std::vector<std::vector<uint32_t>>{{2, 0, 2}, {0, 0}, {0, 1}}));
}

TEST(RouteTest, FeaturesOfOneTableShareRequests) {
  std::mt19937_64 random(3);
  Call call;
  call.ranks = 4;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kHash);
  std::vector<uint64_t> keys(20000);
  for (uint64_t& key : keys) key = random() % 9000;
  call.features = {{0, keys}};
  Route route;
  Routed alone, twice;
  ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &alone));
  call.features = {{0, keys}, {0, {}}, {0, keys}};
  ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &twice));
  EXPECT_EQ(twice.index[0], twice.index[2]);
  for (uint32_t r = 0; r < 4; ++r) EXPECT_EQ(twice.counts[0][r], alone.counts[0][r]);
}

TEST(RouteTest, EmptyRequests) {
  Route route;
  Routed routed;
  Call call;
  call.ranks = 3;
  ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &routed));
  EXPECT_EQ(routed.messages, std::vector<std::vector<int32_t>>(3)) << "no tables";
  AddTable(&call, KeyType::kInt32, Owners::Rule::kHash);
  AddTable(&call, KeyType::kInt64, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kInt64, Owners::Rule::kOne, 2);
  const std::vector<std::vector<int32_t>> none(3, {0, 0, 0});
  ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &routed));
  EXPECT_EQ(routed.messages, none) << "tables without features";
  call.features = {{0, {}}, {1, {}}, {1, {}}, {2, {}}};
  ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &routed));
  EXPECT_EQ(routed.messages, none) << "features without ids";
}

TEST(RouteTest, AllKeysBelongToOneRank) {
  Route route;
  for (uint32_t one : {0u, 2u, 6u}) {
    for (KeyType type : {KeyType::kInt64, KeyType::kInt32}) {
      for (Owners::Rule rule : {Owners::Rule::kModulo, Owners::Rule::kOne}) {
        Call call;
        call.ranks = 7;
        AddTable(&call, type, rule, one);
        call.features = {{0, {}}, {0, {}}};
        for (uint64_t i = 0; i < 30000; ++i) {
          call.features[i % 2].keys.push_back(i % 17000 * 7 + one);
        }
        Routed routed;
        ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route, &routed));
        for (uint32_t r = 0; r < 7; ++r) {
          EXPECT_EQ(routed.counts[0][r], r == one ? 17000u : 0u);
        }
      }
    }
  }
}

TEST(RouteTest, ManyRanks) {
  std::mt19937_64 random(4);
  Route route;
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
    ASSERT_NO_FATAL_FAILURE(CheckAll(call, &route));
  }
}

// Also for the message of `self`, which is not sent.
TEST(RouteTest, MessagesHaveLessThan2To31Words) {
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

TEST(RouteTest, ErrorsNameTheTable) {
  SerialExec exec;
  Route route;
  const uint64_t key = 1;
  uint32_t index = 77;
  RouteTask good;
  good.owners = MakeOwners(Owners::Rule::kHash, 2);
  good.features = {{&key, 1, &index}};
  const auto expect = [&](const RouteTask& bad, const std::string& part) {
    const Status status = route.Prepare(exec, {good, bad}, 2);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("table 1: "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  RouteTask bad = good;
  bad.owners.ranks = 3;
  expect(bad, "its owner is rank 0 of 3, but there are 2 ranks");
  bad.owners = MakeOwners(Owners::Rule::kOne, 2, 2);
  expect(bad, "its owner is rank 2 of 2, but there are 2 ranks");
  bad = good;
  uint32_t of_bad = 77;
  bad.features = {{&key, Dedup<uint64_t>::kMaxKeys + 1, &of_bad}};
  expect(bad, "4294967295");
  EXPECT_EQ(of_bad, 77u);
  bad = good;
  bad.owners = MakeOwners(Owners::Rule::kHash, Owners::kMaxRanks + 1);
  expect(bad, "4097");
  // The Route is still usable.
  EXPECT_TRUE(route.Prepare(exec, {good, good}, 2).ok());
  EXPECT_EQ(index, 0u);
  EXPECT_EQ(route.num_words(), 2u * 2 + 2 * 2);
}

}  // namespace
}  // namespace dynemb
