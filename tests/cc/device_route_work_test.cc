// What only Route and ReceiveKeys on a device have: the work that they give the device, the owners
// of keys, and failures.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/route.h"
#include "tests/cc/counting_session.h"
#include "tests/cc/requests_fixture.h"
#include "tests/cc/route_fixture.h"

namespace dynemb {
namespace {

template <class Place>
class DeviceRouteTest : public RouteFixture<Place> {
 protected:
  using Device = typename Place::Device;
  // The numbers of launches, copies and fills of fn().
  template <class Fn>
  size_t WorkOf(const Fn& fn) {
    const DeviceWork before = this->place_.device().work();
    fn();
    const DeviceWork work = this->place_.device().work() - before;
    return work.launches + work.copies + work.fills;
  }
};

TYPED_TEST_SUITE(DeviceRouteTest, ForSimulatedDevices<DevicePlace>);

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

// The amount of work given to the device does not grow with the numbers of ranks and tables.
TYPED_TEST(DeviceRouteTest, WorkDoesNotDependOnRanksAndTables) {
  std::mt19937_64 random(3);
  std::vector<size_t> route, receive;
  for (const auto& [ranks, tables] :
       {std::pair<uint32_t, size_t>{1, 1}, {2, 2}, {64, 100}, {Owners::kMaxRanks, 10}, {1, 200}}) {
    const Call call = ManyTables(ranks, tables, &random);
    route.push_back(this->WorkOf([&] { this->Run(call); }));
    const Messages messages = RandomMessages(ranks, tables + 2, ranks - 1, 200, &random);
    WithReceived(messages, [&](const Requests::Received& received) {
      receive.push_back(
          this->WorkOf([&] { ReceiveAt(this->place_, received, messages.key_types); }));
    });
  }
  EXPECT_EQ(route, std::vector<size_t>(5, route[0]));
  EXPECT_EQ(receive, std::vector<size_t>(5, receive[0]));
  for (const Messages& nothing :
       {Messages{{}, {}, {}}, {{}, {}, {0, 0}}, {{KeyType::kInt64}, {}, {}}}) {
    WithReceived(nothing, [&](const Requests::Received& received) {
      EXPECT_EQ(this->WorkOf([&] { ReceiveAt(this->place_, received, nothing.key_types); }), 0u);
    });
  }
}

TEST(DeviceRouteWorkTest, SortsOnlyTheBitsOfSections) {
  std::mt19937_64 random(8);
  ThreadsDevice device;
  const Call call = ManyTables(Owners::kMaxRanks, 200, &random);
  RouteTasks tasks(call);
  std::vector<int32_t> words, own;
  CountingSession<> session(device, nullptr);
  ASSERT_TRUE(device::Route(session, tasks.tasks, call.ranks, call.self,
                            [&](const RouteSizes& sizes, int32_t** to, int32_t** to_own) {
                              size_t n = 0;
                              for (const size_t size : sizes.words) n += size;
                              words.resize(n);
                              own.resize(sizes.num_own_words);
                              *to = words.data();
                              *to_own = own.data();
                              return Status();
                            })
                  .ok());
  EXPECT_EQ(session.sorted_bits, std::vector<int>{20});
}

TYPED_TEST(DeviceRouteTest, ErrorsGiveNoWork) {
  const uint64_t key = 1;
  uint32_t index = 77;
  std::vector<RouteTask> tasks(2);
  tasks[0].features = tasks[1].features = {{&key, 1, &index}};
  tasks[1].owners.ranks = 3;
  const auto allocate = [](const RouteSizes&, int32_t**, int32_t**) { return Status(); };
  const size_t work = this->WorkOf([&] {
    EXPECT_EQ(this->TryRoute(tasks, 1, 0, allocate).code(), Code::kInvalidArgument);
    // Each table has a legal number of ids, but all tables together have too many.
    tasks[1].owners.ranks = 1;
    tasks[1].features = {{&key, 0xFFFFFFFEu, &index}};
    const Status status = this->TryRoute(tasks, 1, 0, allocate);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("2^32 - 2 ids"), std::string::npos) << status.message();
  });
  EXPECT_EQ(work, 0u);
  EXPECT_EQ(index, 77u);
}

// Memory runs out for each of its arrays in turn, or for the messages.
TYPED_TEST(DeviceRouteTest, ReturnsFailures) {
  Call call;
  call.ranks = 3;
  AddTable(&call, KeyType::kInt64, Owners::Rule::kHash);
  for (const std::vector<uint64_t>& keys : {std::vector<uint64_t>{1, 2, 3, 2}, {}}) {
    call.features = {{0, keys}};
    RouteTasks tasks(call);
    std::vector<int32_t> words(100);
    const auto route = [&](const Status& of_place) {
      return this->TryRoute(tasks.tasks, 3, kNoRank,
                            [&](const RouteSizes&, int32_t** to, int32_t**) {
                              *to = words.data();
                              return of_place;
                            });
    };
    EXPECT_EQ(route(ResourceExhausted("no room")).message(), "no room");
    EXPECT_GT(this->place_.FailEach([&] { return route(Status()); }), keys.empty() ? 1u : 6u);
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
        typename TypeParam::Device::Session session(this->place_.device(), &this->place_.exec());
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

// The message is shorter than its stated length: only its numbers of keys are read.
TYPED_TEST(DeviceRouteTest, TooManyReceivedKeys) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const std::vector<int32_t> numbers = {kMost, kMost, 1};
  const int32_t split = 0;
  Requests::Received received;
  received.splits = &split;
  received.ranks = 1;
  received.self = 0;
  received.own = numbers.data();
  received.num_own_words = 3 + 2 * int64_t{kMost} + 1;
  const auto allocate = [](size_t, const int64_t*, void**) {
    ADD_FAILURE() << "asked for room";
    return Status();
  };
  const Status status = this->place_.Call(
      [&](auto& session) {
        return device::ReceiveKeys(session, received, {3, KeyType::kInt32}, allocate);
      },
      1);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("2^32 - 2 keys"), std::string::npos) << status.message();
}

TYPED_TEST(DeviceRouteTest, ReturnsFailuresOfReceiveKeys) {
  std::mt19937_64 random(6);
  Messages messages = RandomMessages(3, 2, 1, 50, &random);
  std::vector<uint64_t> keys(1000);
  size_t places = 0;
  WithReceived(messages, [&](const Requests::Received& received) {
    const auto receive = [&](size_t fails) {
      const auto allocate = [&](size_t t, const int64_t*, void** to) {
        ++places;
        *to = keys.data();
        return t == fails ? ResourceExhausted("no room") : Status();
      };
      return this->place_.Call(
          [&](auto& session) {
            return device::ReceiveKeys(session, received, messages.key_types, allocate);
          },
          1);
    };
    EXPECT_EQ(receive(0).message(), "no room");
    EXPECT_EQ(places, 1u);
    EXPECT_EQ(receive(1).message(), "no room");
    EXPECT_EQ(places, 3u);
    EXPECT_EQ(this->place_.FailEach([&] { return receive(2); }), 4u);
  });
}

}  // namespace
}  // namespace dynemb
