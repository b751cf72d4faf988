// Route and OwnersOf on simulated devices: the host's messages, counts and errors, with keys in the
// order that device/route.h specifies.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/route.h"
#include "tests/cc/counting_session.h"
#include "tests/cc/route_model.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace {

constexpr int32_t kGuard = -123456789;

// The rule: the distinct keys of each table in the order of their first ids, by owner.
Routed Expected(const Call& call) {
  const size_t tables = call.key_types.size();
  std::vector<std::vector<std::vector<uint64_t>>> requests(tables);  // [tables][ranks]
  std::vector<std::map<uint64_t, uint32_t>> places(tables);          // among the keys of its owner
  Routed routed;
  routed.index.resize(call.features.size());
  for (size_t t = 0; t < tables; ++t) {
    requests[t].resize(call.ranks);
    for (const Call::Feature& feature : call.features) {
      if (feature.table != t) continue;
      for (uint64_t key : feature.keys) {
        std::vector<uint64_t>& request = requests[t][call.owners[t].Of(key)];
        if (places[t].emplace(key, request.size()).second) request.push_back(key);
      }
    }
    std::vector<uint32_t> begins{0};
    routed.counts.emplace_back();
    for (const std::vector<uint64_t>& request : requests[t]) {
      routed.counts[t].push_back(request.size());
      begins.push_back(begins.back() + static_cast<uint32_t>(request.size()));
    }
    for (size_t f = 0; f < call.features.size(); ++f) {
      if (call.features[f].table != t) continue;
      for (uint64_t key : call.features[f].keys) {
        routed.index[f].push_back(begins[call.owners[t].Of(key)] + places[t][key]);
      }
    }
  }
  for (uint32_t rank = 0; rank < call.ranks; ++rank) {
    std::vector<int32_t> message;
    for (size_t t = 0; t < tables; ++t) {
      message.push_back(static_cast<int32_t>(requests[t][rank].size()));
    }
    for (size_t t = 0; t < tables; ++t) {
      for (uint64_t key : requests[t][rank]) {
        message.push_back(static_cast<int32_t>(key));
        if (call.key_types[t] != KeyType::kInt32)
          message.push_back(static_cast<int32_t>(key >> 32));
      }
    }
    routed.messages.push_back(message);
  }
  return routed;
}

// The tasks of a call, and their memory.
struct Tasks {
  std::vector<RouteTask> tasks;
  std::vector<Exact<uint32_t>> index;

  explicit Tasks(const Call& call) : tasks(call.key_types.size()) {
    for (size_t t = 0; t < tasks.size(); ++t) {
      tasks[t].key_type = call.key_types[t];
      tasks[t].owners = call.owners[t];
    }
    for (const Call::Feature& feature : call.features) {
      index.emplace_back(feature.keys.size());
      RouteIds ids;
      ids.n = feature.keys.size();
      if (ids.n != 0 && call.key_types[feature.table] == KeyType::kInt32) {
        keys32_.emplace_back(std::vector<uint32_t>(feature.keys.begin(), feature.keys.end()));
        ids.keys = keys32_.back().p.get();
      } else if (ids.n != 0) {
        keys64_.emplace_back(feature.keys);
        ids.keys = keys64_.back().p.get();
      }
      // A feature without ids need not have an array.
      if (ids.n != 0) ids.index = index.back().p.get();
      tasks[feature.table].features.push_back(ids);
    }
  }

 private:
  std::vector<Exact<uint64_t>> keys64_;
  std::vector<Exact<uint32_t>> keys32_;
};

template <class Device>
class DeviceRouteTest : public testing::Test {
 protected:
  using Session = CountingSession<Device>;

  Routed Run(const Call& call) {
    Routed routed;
    Tasks tasks(call);
    Exact<int32_t> words(0), own(0);
    RouteSizes sizes;
    int places = 0;
    const uint64_t waits = device_.waits();
    {
      Session session(device_, &exec_);
      const Status status =
          device::Route(session, tasks.tasks, call.ranks, call.self,
                        [&](const RouteSizes& of, int32_t** to, int32_t** to_own) {
                          ++places;
                          sizes = of;
                          size_t num_words = 0;
                          for (size_t n : of.words) num_words += n;
                          // Offset by one word: keys need not be at multiples of 8 bytes.
                          words = Exact<int32_t>(num_words + 2);
                          own = Exact<int32_t>(of.num_own_words + 2);
                          for (Exact<int32_t>* a : {&words, &own}) {
                            a->p[0] = a->p[a->n - 1] = kGuard;
                          }
                          *to = words.p.get() + 1;
                          *to_own = call.self == kNoRank ? nullptr : own.p.get() + 1;
                          return Status();
                        });
      EXPECT_TRUE(status.ok()) << status.message();
      work_ = session.work;
    }
    EXPECT_EQ(places, 1);
    const bool some = std::any_of(call.features.begin(), call.features.end(),
                                  [](const Call::Feature& f) { return !f.keys.empty(); });
    EXPECT_EQ(device_.waits() - waits, some ? 1u : 0u);
    for (const Exact<int32_t>* a : {&words, &own}) {
      EXPECT_EQ(a->p[0], kGuard);
      EXPECT_EQ(a->p[a->n - 1], kGuard);
    }
    for (const Exact<uint32_t>& index : tasks.index) routed.index.push_back(index.values());
    EXPECT_EQ(sizes.counts.size(), tasks.tasks.size() * call.ranks);
    EXPECT_EQ(sizes.words.size(), call.ranks);
    for (size_t t = 0; t < tasks.tasks.size(); ++t) {
      const auto begin = sizes.counts.begin() + static_cast<int64_t>(t * call.ranks);
      routed.counts.emplace_back(begin, begin + call.ranks);
    }
    const int32_t* at = words.p.get() + 1;
    for (uint32_t r = 0; r < call.ranks; ++r) {
      if (r == call.self) {
        EXPECT_EQ(sizes.words[r], 0u);
        routed.messages.emplace_back(own.p.get() + 1, own.p.get() + own.n - 1);
        continue;
      }
      routed.messages.emplace_back(at, at + sizes.words[r]);
      at += sizes.words[r];
    }
    return routed;
  }

  // Checks the result against the host's contract, the rule of device/route.h, and the host's
  // counts.
  void Check(const Call& call, Routed* result = nullptr) {
    const Routed routed = Run(call);
    ASSERT_NO_FATAL_FAILURE(CheckRouted(call, routed));
    const Routed expected = Expected(call);
    ASSERT_EQ(routed.counts, expected.counts);
    ASSERT_EQ(routed.messages, expected.messages);
    ASSERT_EQ(routed.index, expected.index);
    dynemb::Route on_host;
    SerialExec serial;
    ASSERT_EQ(routed.counts, RunRoute(serial, call, &on_host).counts);
    if (result != nullptr) *result = routed;
  }

  Device device_;
  ThreadsExec exec_{3};
  size_t work_ = 0;  // the work that the last call gave to the device
};

TYPED_TEST_SUITE(DeviceRouteTest, CountedDevices);

TYPED_TEST(DeviceRouteTest, RandomTablesAndFeatures) {
  std::mt19937_64 random(1);
  for (int round = 0; round < (kSanitized ? 15 : 40); ++round) {
    Call call = RandomTables(1 + static_cast<uint32_t>(random() % 9), &random);
    FillKeys(&call, &random);
    SCOPED_TRACE(testing::Message() << "round " << round);
    ASSERT_NO_FATAL_FAILURE(this->Check(call));
  }
}

TYPED_TEST(DeviceRouteTest, MessageLayout) {
  Call call;
  call.ranks = 2;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kInt32, Owners::Rule::kModulo);
  AddTable(&call, KeyType::kUint64, Owners::Rule::kOne, 1);
  call.features = {{0, {7, 4, 7}}, {1, {0xFFFFFFFF, 0xFFFFFFFF}}, {0, {0x900000002ull, 4}}};
  for (uint32_t self : {kNoRank, 0u, 1u}) {
    call.self = self;
    Routed routed;
    ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
    EXPECT_EQ(routed.counts, (std::vector<std::vector<size_t>>{{2, 1}, {0, 1}, {0, 0}}));
    EXPECT_EQ(routed.messages[0], (std::vector<int32_t>{2, 0, 0, 4, 0, 2, 9}));
    EXPECT_EQ(routed.messages[1], (std::vector<int32_t>{1, 1, 0, 7, 0, -1}));
    EXPECT_EQ(routed.index, (std::vector<std::vector<uint32_t>>{{2, 0, 2}, {0, 0}, {1, 0}}));
  }
}

// Covers pairs of positions that the election compares only if threads race.
TEST(RouteKeysTest, SameComparesTableAndKey) {
  const std::vector<uint64_t> keys = {5, 5, 6};
  const std::vector<uint32_t> keys32 = {5, 6};
  const std::vector<device::RoutePart> parts = {{{keys.data(), 8}, nullptr, {}, 0, 0, 4},
                                                {{keys.data() + 2, 8}, nullptr, {}, 0, 0, 4},
                                                {{keys32.data(), 4}, nullptr, {}, 1, 4, 6},
                                                {{nullptr, 8}, nullptr, {}, 2, 6, 9},
                                                {{keys.data(), 8}, nullptr, {}, 2, 6, 9}};
  const std::vector<uint32_t> begins = {0, 3, 4, 6, 6, 9};
  const std::vector<uint64_t> key_of = {5, 5, 6, 6, 5, 6, 5, 5, 6};
  const std::vector<uint32_t> table_of = {0, 0, 0, 0, 1, 1, 2, 2, 2};
  const device::RouteKeys route_keys{{parts.data(), begins.data(), 5}};
  for (size_t i = 0; i < key_of.size(); ++i) {
    for (size_t j = 0; j < key_of.size(); ++j) {
      const bool same = key_of[i] == key_of[j] && table_of[i] == table_of[j];
      EXPECT_EQ(route_keys.Same(i, j), same) << i << " and " << j;
      EXPECT_EQ(route_keys.Hash(i) == route_keys.Hash(j), same) << i << " and " << j;
    }
  }
}

// Equal keys of different tables are distinct, for every key type.
TYPED_TEST(DeviceRouteTest, TablesWithTheSameKeys) {
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
  for (size_t t : {1, 2, 3, 7}) EXPECT_EQ(routed.index[t], routed.index[0]);
}

TYPED_TEST(DeviceRouteTest, NoIds) {
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

TYPED_TEST(DeviceRouteTest, OneRankMayOwnAllKeys) {
  for (uint32_t one : {0u, 2u, 6u}) {
    for (Owners::Rule rule : {Owners::Rule::kModulo, Owners::Rule::kOne}) {
      Call call;
      call.ranks = 7;
      call.self = 2;
      AddTable(&call, KeyType::kInt32, rule, one);
      call.features = {{0, {}}, {0, {}}};
      for (uint64_t i = 0; i < 3000; ++i) {
        call.features[i % 2].keys.push_back(i % 1700 * 7 + one);
      }
      Routed routed;
      ASSERT_NO_FATAL_FAILURE(this->Check(call, &routed));
      for (uint32_t r = 0; r < 7; ++r) EXPECT_EQ(routed.counts[0][r], r == one ? 1700u : 0u);
    }
  }
}

// The amount of work given to the device does not grow with them.
TYPED_TEST(DeviceRouteTest, ManyRanksAndTables) {
  std::mt19937_64 random(3);
  size_t work = 0;
  for (const auto& [ranks, tables] :
       {std::pair<uint32_t, size_t>{1, 1}, {2, 2}, {64, 100}, {Owners::kMaxRanks, 10}, {1, 200}}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks, " << tables << " tables");
    Call call;
    call.ranks = ranks;
    call.self = ranks / 2;
    for (size_t t = 0; t < tables; ++t) {
      AddTable(&call, static_cast<KeyType>(t % 3), static_cast<Owners::Rule>(t % 3), ranks - 1);
      for (size_t f = 0; f < (t == 0 ? 1 : t % 4); ++f) {
        call.features.push_back({t, {}});
        for (int i = 0; i < 40; ++i) call.features.back().keys.push_back(random() >> 32);
      }
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(call));
    EXPECT_TRUE(work == 0 || work == this->work_) << work << " then " << this->work_;
    work = this->work_;
  }
}

TYPED_TEST(DeviceRouteTest, ErrorsMatchTheHost) {
  const uint64_t key = 1;
  uint32_t index = 77;
  RouteTask good;
  good.owners = MakeOwners(Owners::Rule::kHash, 2);
  good.features = {{&key, 1, &index}};
  const auto expect = [&](const std::vector<RouteTask>& tasks, const std::string& part) {
    SerialExec serial;
    dynemb::Route on_host;
    const Status expected = on_host.Prepare(serial, tasks, 2);
    typename TestFixture::Session session(this->device_, &this->exec_);
    const Status status =
        device::Route(session, tasks, 2, kNoRank, [&](const RouteSizes&, int32_t**, int32_t**) {
          ADD_FAILURE() << "asked for room";
          return Status();
        });
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(session.work, 0u);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    EXPECT_EQ(status.message(), expected.message());
  };
  RouteTask bad = good;
  bad.owners.ranks = 3;
  expect({good, bad}, "table 1: its owner is rank 0 of 3, but there are 2 ranks");
  bad.owners = MakeOwners(Owners::Rule::kOne, 2, 2);
  expect({good, bad}, "table 1: its owner is rank 2 of 2, but there are 2 ranks");
  bad = good;
  bad.features = {{&key, 0xFFFFFFFFu, &index}};
  expect({good, bad}, "table 1: at most 4294967294 keys");
  EXPECT_EQ(index, 77u);
}

// Each table has a legal number of ids, but all tables together have too many.
TYPED_TEST(DeviceRouteTest, TooManyIds) {
  const uint64_t key = 1;
  uint32_t index = 77;
  std::vector<RouteTask> tasks(2);
  tasks[0].features = {{&key, 1, &index}};
  tasks[1].features = {{&key, 0xFFFFFFFEu, &index}};
  typename TestFixture::Session session(this->device_, &this->exec_);
  const Status status = device::Route(
      session, tasks, 1, 0, [&](const RouteSizes&, int32_t**, int32_t**) { return Status(); });
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("2^32 - 2 ids"), std::string::npos) << status.message();
  EXPECT_EQ(session.work, 0u);
  EXPECT_EQ(index, 77u);
}

// Memory runs out for each of its arrays in turn, or for the messages.
TYPED_TEST(DeviceRouteTest, ReturnsFailures) {
  Call call;
  call.ranks = 3;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kHash);
  for (const std::vector<uint64_t>& keys : {std::vector<uint64_t>{1, 2, 3, 2}, {}}) {
    call.features = {{0, keys}};
    Tasks tasks(call);
    std::vector<int32_t> words(100);
    const auto route = [&](const Status& of_place) {
      typename TestFixture::Session session(this->device_, &this->exec_);
      return device::Route(session, tasks.tasks, 3, kNoRank,
                           [&](const RouteSizes&, int32_t** to, int32_t**) {
                             *to = words.data();
                             return of_place;
                           });
    };
    EXPECT_EQ(route(ResourceExhausted("no room")).message(), "no room");
    uint64_t takes = 0;
    for (;; ++takes) {
      EXPECT_FALSE(this->device_.FailTake(takes));
      const Status status = route(Status());
      if (status.ok()) break;
      EXPECT_EQ(status.code(), Code::kResourceExhausted);
    }
    EXPECT_TRUE(this->device_.FailTake(TypeParam::kNever));
    EXPECT_GT(takes, keys.empty() ? 1u : 6u);
  }
}

TYPED_TEST(DeviceRouteTest, OwnersOfKeys) {
  std::mt19937_64 random(7);
  for (Owners::Rule rule : {Owners::Rule::kHash, Owners::Rule::kModulo, Owners::Rule::kOne}) {
    for (uint32_t ranks : {1u, 5u, Owners::kMaxRanks}) {
      const Owners owners = MakeOwners(rule, ranks, ranks / 2);
      for (size_t n : {0u, 1u, 5000u}) {
        Exact<uint64_t> keys(n);
        Exact<uint32_t> keys32(n);
        for (size_t i = 0; i < n; ++i) keys32.p[i] = static_cast<uint32_t>(keys.p[i] = random());
        Exact<int32_t> to(n), to32(n);
        typename TestFixture::Session session(this->device_, &this->exec_);
        EXPECT_TRUE(device::OwnersOf(session, owners, KeyType::kUint64,
                                     n == 0 ? nullptr : &keys.p[0], n, to.p.get())
                        .ok());
        EXPECT_TRUE(
            device::OwnersOf(session, owners, KeyType::kInt32, keys32.p.get(), n, to32.p.get())
                .ok());
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(static_cast<uint32_t>(to.p[i]), owners.Of(keys.p[i]));
          ASSERT_EQ(static_cast<uint32_t>(to32.p[i]), owners.Of(keys32.p[i]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace dynemb
