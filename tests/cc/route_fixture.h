// A rank's call of Route, random calls, the promises of the result, and the fixture that is typed
// by Places. For the tests of route.h.
#ifndef DYNEMB_TESTS_CC_ROUTE_FIXTURE_H_
#define DYNEMB_TESTS_CC_ROUTE_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cc/device/route.h"
#include "cc/lookup/route.h"
#include "tests/cc/exact_memory.h"
#include "tests/cc/places.h"

namespace dynemb {

// One rank's call.
struct Call {
  struct Feature {
    size_t table;
    std::vector<uint64_t> keys;  // 32-bit keys are zero-extended
  };
  uint32_t ranks = 1;
  uint32_t self = kNoRank;
  std::vector<KeyType> key_types;  // [tables]
  std::vector<Owners> owners;      // [tables]
  std::vector<Feature> features;
};

// The result of Route.
struct Routed {
  std::vector<std::vector<uint32_t>> index;    // [features]
  std::vector<std::vector<size_t>> counts;     // [tables][ranks]
  std::vector<std::vector<int32_t>> messages;  // [ranks]
};

inline Owners MakeOwners(Owners::Rule rule, uint32_t ranks, uint32_t one = 0) {
  Owners owners;
  owners.rule = rule;
  owners.ranks = ranks;
  owners.one = one;
  return owners;
}

// Adds a table on the ranks of `call`.
inline void AddTable(Call* call, KeyType key_type, Owners::Rule rule, uint32_t one = 0) {
  call->key_types.push_back(key_type);
  call->owners.push_back(MakeOwners(rule, call->ranks, one));
}

// Every table has 40 ids in each of up to three features.
inline Call ManyTables(uint32_t ranks, size_t tables, std::mt19937_64* random) {
  Call call;
  call.ranks = ranks;
  call.self = ranks / 2;
  for (size_t t = 0; t < tables; ++t) {
    AddTable(&call, static_cast<KeyType>(t % 3), static_cast<Owners::Rule>(t % 3), ranks - 1);
    for (size_t f = 0; f < (t == 0 ? 1 : t % 4); ++f) {
      call.features.push_back({t, {}});
      for (int i = 0; i < 40; ++i) call.features.back().keys.push_back((*random)() >> 32);
    }
  }
  return call;
}

// A call with random tables and features, whose ids FillKeys sets. Some tables have no feature.
inline Call RandomTables(uint32_t ranks, std::mt19937_64* random) {
  Call call;
  call.ranks = ranks;
  if ((*random)() % 3 > 0) call.self = static_cast<uint32_t>((*random)() % ranks);
  for (size_t t = (*random)() % 6; t > 0; --t) {
    AddTable(&call, static_cast<KeyType>((*random)() % 3),
             static_cast<Owners::Rule>((*random)() % 3),
             static_cast<uint32_t>((*random)() % ranks));
  }
  if (call.key_types.empty()) return call;
  for (size_t f = (*random)() % 8; f > 0; --f) {
    call.features.push_back({(*random)() % call.key_types.size(), {}});
  }
  return call;
}

// Gives each feature no, few or many ids.
inline void FillKeys(Call* call, std::mt19937_64* random) {
  for (Call::Feature& feature : call->features) {
    const size_t sizes[] = {0, 1, 30, 3000, 40000}, n = sizes[(*random)() % 5];
    const uint64_t values = 1 + (*random)() % (2 * n + 1);
    feature.keys.clear();
    for (size_t i = 0; i < n; ++i) {
      const uint64_t key = (*random)() % values * 0x9E3779B97F4A7C15ull;
      feature.keys.push_back(call->key_types[feature.table] == KeyType::kInt32 ? key >> 32 : key);
    }
  }
}

// The keys that a message requests, table by table, by the layout in route.h; empty if the message
// is not valid.
inline std::vector<std::vector<uint64_t>> ReadMessage(const std::vector<int32_t>& message,
                                                      const std::vector<KeyType>& key_types) {
  std::vector<std::vector<uint64_t>> keys(key_types.size());
  size_t at = key_types.size();
  for (size_t t = 0; t < key_types.size(); ++t) {
    for (int32_t k = 0; k < message[t]; ++k) {
      const size_t words = key_types[t] == KeyType::kInt32 ? 1 : 2;
      uint64_t key = 0;
      if (at + words > message.size()) return {};
      std::memcpy(&key, &message[at], 4 * words);
      keys[t].push_back(key);
      at += words;
    }
  }
  if (at != message.size()) return {};
  return keys;
}

// Checks the contract of route.h for one rank's call.
inline void CheckRouted(const Call& call, const Routed& routed) {
  const size_t tables = call.key_types.size();
  std::vector<std::vector<uint64_t>> request(tables);
  for (uint32_t r = 0; r < call.ranks; ++r) {
    const auto keys = ReadMessage(routed.messages[r], call.key_types);
    ASSERT_EQ(keys.size(), tables) << "to rank " << r;
    for (size_t t = 0; t < tables; ++t) {
      ASSERT_EQ(routed.counts[t][r], keys[t].size()) << "table " << t << ", rank " << r;
      for (uint64_t key : keys[t]) ASSERT_EQ(call.owners[t].Of(key), r);
      request[t].insert(request[t].end(), keys[t].begin(), keys[t].end());
    }
  }
  std::vector<std::set<uint64_t>> distinct(tables);
  for (size_t f = 0; f < call.features.size(); ++f) {
    const Call::Feature& feature = call.features[f];
    distinct[feature.table].insert(feature.keys.begin(), feature.keys.end());
    for (size_t i = 0; i < feature.keys.size(); ++i) {
      ASSERT_LT(routed.index[f][i], request[feature.table].size());
      ASSERT_EQ(request[feature.table][routed.index[f][i]], feature.keys[i])
          << "feature " << f << ", id " << i;
    }
  }
  for (size_t t = 0; t < tables; ++t) {
    // Each key is requested once, and no other key.
    ASSERT_EQ(request[t].size(), distinct[t].size()) << "table " << t;
    ASSERT_EQ(std::set<uint64_t>(request[t].begin(), request[t].end()), distinct[t]);
  }
}

// The result on a device: the distinct keys of each table in the order of their first ids, by
// owner.
inline Routed Expected(const Call& call) {
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
struct RouteTasks {
  std::vector<RouteTask> tasks;
  std::vector<Exact<uint32_t>> index;

  explicit RouteTasks(const Call& call) : tasks(call.key_types.size()) {
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

// allocate(const RouteSizes&, int32_t** words, int32_t** own) is called as device::Route calls it.
template <class Fn>
Status RouteAt(HostPlace& at, const std::vector<RouteTask>& tasks, uint32_t ranks, uint32_t self,
               Route* scratch, const Fn& allocate) {
  DYNEMB_RETURN_IF_ERROR(scratch->Prepare(at.exec(), tasks, ranks, self));
  const RouteSizes& sizes = scratch->sizes();
  size_t num_words = 0;
  for (uint32_t r = 0; r < ranks; ++r) {
    EXPECT_EQ(scratch->num_words(r), sizes.words[r]);
    num_words += sizes.words[r];
    for (size_t t = 0; t < tasks.size(); ++t) {
      EXPECT_EQ(static_cast<int64_t>(scratch->count(t, r)), sizes.counts[t * ranks + r]);
    }
  }
  EXPECT_EQ(scratch->num_words(), num_words);
  EXPECT_EQ(scratch->num_own_words(), sizes.num_own_words);
  int32_t* words = nullptr;
  int32_t* own = nullptr;
  DYNEMB_RETURN_IF_ERROR(allocate(sizes, &words, &own));
  scratch->Write(at.exec(), words, own);
  return Status();
}
template <class Device, class Fn>
Status RouteAt(DevicePlace<Device>& at, const std::vector<RouteTask>& tasks, uint32_t ranks,
               uint32_t self, Route*, const Fn& allocate) {
  bool some = false;
  for (const RouteTask& task : tasks) {
    for (const RouteIds& ids : task.features) some |= ids.n != 0;
  }
  return at.Call(
      [&](auto& session) { return device::Route(session, tasks, ranks, self, allocate); },
      some ? 1 : 0);
}

template <class Place>
class RouteFixture : public testing::Test {
 protected:
  static constexpr bool kIsHost = Place::kIsHost;
  static constexpr int32_t kGuard = -123456789;

  template <class Fn>
  Status TryRoute(const std::vector<RouteTask>& tasks, uint32_t ranks, uint32_t self,
                  const Fn& allocate) {
    return RouteAt(place_, tasks, ranks, self, &scratch_, allocate);
  }

  Routed Run(const Call& call) {
    Routed routed;
    RouteTasks tasks(call);
    Exact<int32_t> words(0), own(0);
    RouteSizes sizes;
    int calls = 0;
    const Status status = TryRoute(tasks.tasks, call.ranks, call.self,
                                   [&](const RouteSizes& of, int32_t** to, int32_t** to_own) {
                                     ++calls;
                                     sizes = of;
                                     size_t num_words = 0;
                                     for (size_t n : of.words) num_words += n;
                                     // Offset by one word: keys need not be at multiples of 8
                                     // bytes.
                                     words = Exact<int32_t>(num_words + 2);
                                     own = Exact<int32_t>(of.num_own_words + 2);
                                     for (Exact<int32_t>* a : {&words, &own})
                                       a->p[0] = a->p[a->n - 1] = kGuard;
                                     *to = words.p.get() + 1;
                                     *to_own = call.self == kNoRank ? nullptr : own.p.get() + 1;
                                     return Status();
                                   });
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(calls, 1);
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
    EXPECT_EQ(at, words.p.get() + words.n - 1);
    return routed;
  }

  // Checks the contract of route.h and, on a device, the order of keys. On the host, the result is
  // the same for every Exec.
  void Check(const Call& call, Routed* result = nullptr) {
    Routed first;
    bool is_first = true;
    place_.ForEach([&] {
      const Routed routed = Run(call);
      if (std::exchange(is_first, false)) {
        ASSERT_NO_FATAL_FAILURE(CheckRouted(call, routed));
        first = kIsHost ? routed : Expected(call);
      }
      ASSERT_EQ(routed.counts, first.counts);
      ASSERT_EQ(routed.messages, first.messages);
      ASSERT_EQ(routed.index, first.index);
    });
    if (result != nullptr) *result = first;
  }

  Place place_;

 private:
  Route scratch_;  // reused, so that tables and sizes grow and shrink
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_ROUTE_FIXTURE_H_
