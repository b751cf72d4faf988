// Groups of ranks and their lookups: the cases of exchange_suite.h.
#ifndef DYNEMB_TESTS_CC_EXCHANGE_GROUP_H_
#define DYNEMB_TESTS_CC_EXCHANGE_GROUP_H_

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "cc/lookup/combiner.h"
#include "cc/lookup/owners.h"
#include "cc/lookup/wire.h"
#include "cc/table/key.h"
#include "cc/table/types.h"

namespace dynemb {
namespace testing_exchange {

struct SpreadTable {
  KeyType key_type;
  Owners::Rule rule;
  DType dtype;
  int64_t dim;
  WireType wire;
};

// The lookup of one rank in one table.
struct Feature {
  size_t table;
  Combiner combiner;
  int64_t num_bags;
  std::vector<uint64_t> keys;  // 32-bit keys are zero-extended
  std::vector<int64_t> bag_of;
  std::vector<float> weights;   // empty: none
  std::vector<float> upstream;  // [num_bags, dim]
};

struct Group {
  uint32_t ranks;
  std::vector<SpreadTable> tables;
  std::vector<std::vector<Feature>> features;  // [ranks]
};

// A group with random tables, owners and combiners. About a quarter of the features of each rank
// have no ids.
inline Group RandomGroup(uint32_t ranks, size_t ids, std::mt19937_64* random) {
  const auto below = [&](size_t n) { return static_cast<size_t>((*random)() % n); };
  Group group;
  group.ranks = ranks;
  for (size_t t = 1 + below(5); t > 0; --t) {
    group.tables.push_back({static_cast<KeyType>(below(3)), static_cast<Owners::Rule>(below(3)),
                            static_cast<DType>(below(3)), static_cast<int64_t>(1 + below(40)),
                            static_cast<WireType>(below(4))});
  }
  struct Kind {
    size_t table;
    Combiner combiner;
    bool weighted;
  };
  std::vector<Kind> kinds;
  for (size_t f = 1 + below(7); f > 0; --f) {
    kinds.push_back({below(group.tables.size()), static_cast<Combiner>(below(4)), below(2) == 0});
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    group.features.emplace_back();
    for (const Kind& kind : kinds) {
      const SpreadTable& table = group.tables[kind.table];
      Feature feature{kind.table, kind.combiner, static_cast<int64_t>(1 + below(30)), {}, {}, {},
                      {}};
      for (size_t i = below(4) == 0 ? 0 : below(ids); i > 0; --i) {
        const uint64_t key = MixKey(below(ids));
        feature.keys.push_back(table.key_type == KeyType::kInt32 ? key >> 32 : key);
        feature.bag_of.push_back(
            static_cast<int64_t>(below(static_cast<size_t>(feature.num_bags))));
        if (kind.weighted) feature.weights.push_back(static_cast<float>(below(100)) / 50 - 0.5f);
      }
      for (int64_t i = feature.num_bags * table.dim; i > 0; --i) {
        feature.upstream.push_back(static_cast<float>(below(2001)) / 1000 - 1);
      }
      group.features.back().push_back(std::move(feature));
    }
  }
  return group;
}

}  // namespace testing_exchange
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_EXCHANGE_GROUP_H_
