// A rank's call of Route, random calls, and the checks of the result. For the tests of route.h.
#ifndef DYNEMB_TESTS_CC_ROUTE_MODEL_H_
#define DYNEMB_TESTS_CC_ROUTE_MODEL_H_

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "cc/lookup/route.h"

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
  bool operator==(const Routed& o) const {
    return index == o.index && counts == o.counts && messages == o.messages;
  }
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

inline Routed RunRoute(Exec& exec, const Call& call, Route* route) {
  Routed routed;
  std::vector<std::vector<uint32_t>> keys32(call.features.size());
  std::vector<RouteTask> tasks(call.key_types.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    tasks[t].key_type = call.key_types[t];
    tasks[t].owners = call.owners[t];
  }
  routed.index.resize(call.features.size());
  for (size_t f = 0; f < call.features.size(); ++f) {
    const Call::Feature& feature = call.features[f];
    keys32[f].assign(feature.keys.begin(), feature.keys.end());
    routed.index[f].assign(feature.keys.size(), ~0u);
    RouteIds ids;
    ids.keys = call.key_types[feature.table] == KeyType::kInt32
                   ? static_cast<const void*>(keys32[f].data())
                   : static_cast<const void*>(feature.keys.data());
    ids.n = feature.keys.size();
    ids.index = routed.index[f].data();
    tasks[feature.table].features.push_back(ids);
  }
  const Status status = route->Prepare(exec, tasks, call.ranks, call.self);
  EXPECT_TRUE(status.ok()) << status.message();
  for (size_t t = 0; t < tasks.size(); ++t) {
    routed.counts.emplace_back();
    for (uint32_t r = 0; r < call.ranks; ++r) routed.counts[t].push_back(route->count(t, r));
  }
  // Write writes every word, and nothing else.
  constexpr int32_t kGuard = -123456789;
  std::vector<int32_t> words(route->num_words() + 2, kGuard), again(words.size(), 0);
  std::vector<int32_t> own(route->num_own_words() + 2, kGuard), own_again(own.size(), 0);
  route->Write(exec, words.data() + 1, own.data() + 1);
  route->Write(exec, again.data() + 1, own_again.data() + 1);
  for (const std::vector<int32_t>& written : {words, own}) {
    EXPECT_EQ(written.front(), kGuard);
    EXPECT_EQ(written.back(), kGuard);
  }
  again.front() = again.back() = own_again.front() = own_again.back() = kGuard;
  EXPECT_EQ(words, again);
  EXPECT_EQ(own, own_again);
  size_t at = 1;
  for (uint32_t r = 0; r < call.ranks; ++r) {
    if (r == call.self) {
      EXPECT_EQ(route->num_words(r), 0u);
      routed.messages.emplace_back(own.begin() + 1, own.end() - 1);
      continue;
    }
    routed.messages.emplace_back(&words[at], &words[at] + route->num_words(r));
    at += route->num_words(r);
  }
  EXPECT_EQ(at, words.size() - 1);
  return routed;
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

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_ROUTE_MODEL_H_
