// The contract suite of Exchange on a device: the results of a group of ranks have the same bits as
// with the host's Exchange. All ranks are in one process, and their messages are copied from one to
// the other. Exchanges may order a request differently, so everything is compared by id or by key.
// Typed by a Place:
//
//   static std::string Missing()      the reason why there is no such exchange; empty if there is
//   static Exchange& exchange()
//   static Exec& exec()
//   class Arrays                      arrays in the memory of the exchange, until it ends:
//     T* Up(const std::vector<T>&), std::vector<T> Down(const T*, n)
#ifndef DYNEMB_TESTS_CC_EXCHANGE_SUITE_H_
#define DYNEMB_TESTS_CC_EXCHANGE_SUITE_H_

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/exchange.h"
#include "cc/table/codec.h"
#include "cc/table/key.h"
#include "tests/cc/exchange_group.h"
#include "tests/cc/host_arrays.h"

namespace dynemb {
namespace testing_exchange {

template <class T>
std::vector<char> BytesOf(const std::vector<T>& values) {
  std::vector<char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The results, by id or by key.
struct Exchanged {
  std::vector<int64_t> asked;                // the number of keys per table, rank and owner
  std::vector<std::vector<int32_t>> owners;  // of the keys of every feature
  std::vector<std::vector<char>> rows;       // of the ids of every feature, as received
  std::vector<std::vector<char>> pooled;     // of every feature
  std::vector<std::vector<int32_t>> argmax;  // the same
  std::vector<std::vector<char>> weight_gradients;
  std::map<std::pair<size_t, uint64_t>, std::vector<char>> sums;  // of (table, key)
};

// One rank of a group.
template <class Place>
class Member {
 public:
  using Words = std::vector<std::vector<int32_t>>;  // to or from each rank, without its own

  Member(const Group& group, uint32_t rank, Exchanged* exchanged)
      : group_(group), rank_(rank), exchanged_(*exchanged), features_(group.features[rank]) {
    SerialExec serial;
    for (const Feature& feature : features_) {
      bags_.emplace_back();
      const auto nnz = static_cast<int64_t>(feature.keys.size());
      const Status made =
          bags_.back().InitIndices(serial, feature.bag_of.data(), 1, nnz, feature.num_bags);
      EXPECT_TRUE(made.ok()) << made.message();
      weights_.push_back(feature.weights.empty() ? nullptr : arrays_.Up(feature.weights));
      std::vector<char> upstream(feature.upstream.size() * SizeOf(TableOf(feature).dtype));
      StoreVector(TableOf(feature).dtype, feature.upstream.data(),
                  static_cast<int64_t>(feature.upstream.size()), upstream.data());
      upstreams_.push_back(arrays_.Up(upstream));
    }
  }

  Words RequestKeys() {
    std::vector<RouteTask> tasks(group_.tables.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      tasks[t].key_type = group_.tables[t].key_type;
      tasks[t].owners = OwnersOf(t);
    }
    for (const Feature& feature : features_) {
      const void* const keys = arrays_.Up(Pack(feature.table, feature.keys));
      index_.push_back(arrays_.Up(std::vector<uint32_t>(feature.keys.size(), 12345)));
      tasks[feature.table].features.push_back({keys, feature.keys.size(), index_.back()});
      int32_t* const owners = arrays_.Up(std::vector<int32_t>(feature.keys.size(), -1));
      Succeeds(Place::exchange().FindOwners(Place::exec(), OwnersOf(feature.table),
                                            TableOf(feature).key_type, keys, feature.keys.size(),
                                            owners));
      exchanged_.owners.push_back(arrays_.Down(owners, feature.keys.size()));
    }
    int32_t* words = nullptr;
    size_t num_words = 0;
    std::vector<size_t> sizes;
    Succeeds(Place::exchange().RequestKeys(
        Place::exec(), tasks, group_.ranks, rank_,
        [&](const RouteSizes& of_route, int32_t** to_words, int32_t** to_own) {
          asked_ = of_route.counts;
          sizes = of_route.words;
          for (size_t size : sizes) num_words += size;
          num_own_words_ = of_route.num_own_words;
          words = *to_words = arrays_.Up(std::vector<int32_t>(num_words, 12345));
          own_words_ = *to_own = arrays_.Up(std::vector<int32_t>(num_own_words_, 12345));
          return Status();
        }));
    exchanged_.asked.insert(exchanged_.asked.end(), asked_.begin(), asked_.end());
    return Split(arrays_.Down(words, num_words), sizes);
  }

  // Sends the vectors of the received keys to the ranks that requested them.
  Words Answer(const Words& messages) {
    std::vector<int32_t> splits, joined = Join(messages, &splits);
    Requests::Received received;
    received.words = arrays_.Up(joined);
    received.num_words = static_cast<int64_t>(joined.size());
    received.splits = splits.data();
    received.ranks = group_.ranks;
    received.self = rank_;
    received.own = own_words_;
    received.num_own_words = static_cast<int64_t>(num_own_words_);
    std::vector<KeyType> key_types;
    for (const SpreadTable& table : group_.tables) key_types.push_back(table.key_type);
    Succeeds(Place::exchange().ReceiveKeys(
        Place::exec(), received, key_types, [&](size_t t, const int64_t* counts, void** keys) {
          served_.insert(served_.end(), counts, counts + group_.ranks);
          size_t n = 0;
          for (uint32_t r = 0; r < group_.ranks; ++r) n += static_cast<size_t>(counts[r]);
          keys_.push_back(arrays_.Up(std::vector<char>(n * SizeOf(key_types[t]), 0x5A)));
          num_keys_.push_back(n);
          *keys = keys_.back();
          return Status();
        }));
    std::vector<const void*> rows;
    for (size_t t = 0; t < group_.tables.size(); ++t) {
      held_.push_back(arrays_.Up(VectorsOf(t, KeysOfRank(t))));
      rows.push_back(held_[t] == nullptr ? this : static_cast<const void*>(held_[t]));
    }
    return PackRows(Layout(served_, &SpreadTable::dtype), rows);
  }

  // Pools the received vectors, and sends their gradients to the owners.
  Words Pool(const Words& messages) {
    const WireLayout layout = Layout(asked_, &SpreadTable::dtype);
    std::vector<int32_t> splits;
    Exchange::Received received;
    received.layout = &layout;
    received.words = arrays_.Up(Join(messages, &splits));
    for (size_t t = 0; t < group_.tables.size(); ++t) {
      // The rows that this rank requests of itself, among all rows that it sends.
      int64_t before = 0;
      for (uint32_t r = 0; r < rank_; ++r) before += served_[t * group_.ranks + r];
      received.own.push_back(held_[t] + before * static_cast<int64_t>(VectorBytes(t)));
    }
    Unpack(received);
    PoolFeatures(received);
    return SumRequested();
  }

  // Sums the received gradients.
  void Sum(const Words& messages) {
    const WireLayout layout = Layout(served_, nullptr);
    std::vector<int32_t> splits;
    Exchange::Received received;
    received.layout = &layout;
    received.words = arrays_.Up(Join(messages, &splits));
    received.own.assign(own_sums_.begin(), own_sums_.end());
    std::vector<BackwardTask> tasks(group_.tables.size());
    std::vector<Bags> bags(tasks.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      const auto n = static_cast<int64_t>(num_keys_[t]);
      Succeeds(bags[t].InitUniform(1, n, n));
      tasks[t].key_type = group_.tables[t].key_type;
      tasks[t].keys = keys_[t];
      tasks[t].bags = &bags[t];
      tasks[t].dim = group_.tables[t].dim;
    }
    std::vector<BackwardOutput> outputs(tasks.size());
    std::vector<size_t> unique(tasks.size());
    Succeeds(Place::exchange().SumReceived(
        Place::exec(), received, tasks, [&](size_t t, size_t n, BackwardOutput* output) {
          unique[t] = n;
          output->keys = arrays_.Up(std::vector<char>(n * SizeOf(tasks[t].key_type)));
          output->sums = arrays_.Up(std::vector<float>(n * static_cast<size_t>(tasks[t].dim), 7));
          outputs[t] = *output;
          return Status();
        }));
    for (size_t t = 0; t < tasks.size(); ++t) {
      const auto dim = static_cast<size_t>(tasks[t].dim);
      const auto keys = Unpack(t, static_cast<const char*>(outputs[t].keys), unique[t]);
      const std::vector<float> sums = arrays_.Down(outputs[t].sums, unique[t] * dim);
      for (size_t i = 0; i < keys.size(); ++i) {
        const std::vector<float> sum(&sums[i * dim], &sums[i * dim] + dim);
        EXPECT_TRUE(exchanged_.sums.emplace(std::pair(t, keys[i]), BytesOf(sum)).second);
      }
    }
  }

 private:
  static void Succeeds(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

  const SpreadTable& TableOf(const Feature& feature) const { return group_.tables[feature.table]; }
  size_t VectorBytes(size_t t) const {
    return static_cast<size_t>(group_.tables[t].dim) * SizeOf(group_.tables[t].dtype);
  }
  Owners OwnersOf(size_t t) const {
    Owners owners;
    owners.rule = group_.tables[t].rule;
    owners.ranks = group_.ranks;
    owners.one = static_cast<uint32_t>(t) % group_.ranks;
    return owners;
  }
  std::vector<char> Pack(size_t t, const std::vector<uint64_t>& keys) const {
    const size_t size = SizeOf(group_.tables[t].key_type);
    std::vector<char> packed(keys.size() * size);
    for (size_t i = 0; i < keys.size(); ++i) std::memcpy(&packed[i * size], &keys[i], size);
    return packed;
  }
  std::vector<uint64_t> Unpack(size_t t, const char* keys, size_t n) const {
    const size_t size = SizeOf(group_.tables[t].key_type);
    const std::vector<char> packed = arrays_.Down(keys, n * size);
    std::vector<uint64_t> unpacked(n);
    for (size_t i = 0; i < n; ++i) std::memcpy(&unpacked[i], &packed[i * size], size);
    return unpacked;
  }
  std::vector<uint64_t> KeysOfRank(size_t t) const { return Unpack(t, keys_[t], num_keys_[t]); }

  // Arbitrary vectors, always the same for a key.
  std::vector<char> VectorsOf(size_t t, const std::vector<uint64_t>& keys) const {
    const auto dim = static_cast<size_t>(group_.tables[t].dim);
    std::vector<float> vectors;
    for (uint64_t key : keys) {
      for (size_t c = 0; c < dim; ++c) {
        vectors.push_back(static_cast<float>(MixKey(key * 64 + c + t) % 20001) / 10000.0f - 1.0f);
      }
    }
    std::vector<char> stored(keys.size() * VectorBytes(t));
    StoreVector(group_.tables[t].dtype, vectors.data(), static_cast<int64_t>(vectors.size()),
                stored.data());
    return stored;
  }

  // The dtype of vectors, or of gradients, which are float32.
  WireLayout Layout(const std::vector<int64_t>& counts, DType SpreadTable::*dtype) const {
    std::vector<WireTable> tables;
    for (const SpreadTable& t : group_.tables) {
      tables.push_back({dtype == nullptr ? DType::kFloat32 : t.*dtype, t.dim, t.wire});
    }
    WireLayout layout;
    Succeeds(layout.Init(tables, counts.data(), group_.ranks, rank_));
    return layout;
  }

  static Words Split(const std::vector<int32_t>& words, const std::vector<size_t>& sizes) {
    Words split;
    auto at = words.begin();
    for (size_t size : sizes) {
      split.emplace_back(at, at + static_cast<std::ptrdiff_t>(size));
      at += static_cast<std::ptrdiff_t>(size);
    }
    return split;
  }
  static Words Split(const std::vector<int32_t>& words, const WireLayout& layout) {
    std::vector<size_t> sizes;
    for (uint32_t r = 0; r < layout.ranks(); ++r) sizes.push_back(layout.num_words(r));
    return Split(words, sizes);
  }
  static std::vector<int32_t> Join(const Words& words, std::vector<int32_t>* splits) {
    std::vector<int32_t> joined;
    for (const std::vector<int32_t>& of_rank : words) {
      joined.insert(joined.end(), of_rank.begin(), of_rank.end());
      splits->push_back(static_cast<int32_t>(of_rank.size()));
    }
    return joined;
  }

  Words PackRows(const WireLayout& layout, const std::vector<const void*>& rows) {
    int32_t* const words = arrays_.Up(std::vector<int32_t>(layout.num_words(), 12345));
    Succeeds(Place::exchange().PackRows(Place::exec(), layout, rows, words));
    return Split(arrays_.Down(words, layout.num_words()), layout);
  }

  void Unpack(const Exchange::Received& received) {
    std::vector<void*> rows;
    for (size_t t = 0; t < group_.tables.size(); ++t) {
      const size_t bytes = received.layout->num_rows(t) * VectorBytes(t);
      rows.push_back(arrays_.Up(std::vector<char>(bytes, 0x5A)));
    }
    Succeeds(Place::exchange().UnpackRows(Place::exec(), *received.layout, received.words,
                                          received.own, rows));
    for (size_t f = 0; f < features_.size(); ++f) {
      const size_t t = features_[f].table, bytes = VectorBytes(t);
      const std::vector<char> of_table =
          arrays_.Down(static_cast<const char*>(rows[t]), received.layout->num_rows(t) * bytes);
      std::vector<char> of_ids;
      for (uint32_t index : arrays_.Down(index_[f], features_[f].keys.size())) {
        ASSERT_LT(index, received.layout->num_rows(t));
        of_ids.insert(of_ids.end(), &of_table[index * bytes], &of_table[index * bytes] + bytes);
      }
      exchanged_.rows.push_back(of_ids);
    }
  }

  void PoolFeatures(const Exchange::Received& received) {
    std::vector<Exchange::PoolFeature> pools;
    std::vector<Exchange::WeightFeature> weighted;
    for (size_t f = 0; f < features_.size(); ++f) {
      const Feature& feature = features_[f];
      const auto num_bags = static_cast<size_t>(feature.num_bags);
      const auto dim = static_cast<size_t>(TableOf(feature).dim);
      Exchange::PoolFeature pool;
      pool.table = feature.table;
      pool.index = index_[f];
      pool.bags = &bags_[f];
      pool.weights = weights_[f];
      pool.combiner = feature.combiner;
      pool.pooled = arrays_.Up(std::vector<char>(num_bags * VectorBytes(feature.table), 0x5A));
      if (feature.combiner == Combiner::kMax) {
        pool.argmax = arrays_.Up(std::vector<int32_t>(num_bags * dim, 12345));
      }
      argmax_.push_back(pool.argmax);
      pools.push_back(pool);
      if (feature.weights.empty()) continue;
      Exchange::WeightFeature weight;
      static_cast<BagWeightTask&>(weight) = {
          &bags_[f],
          weights_[f],
          feature.combiner,
          pool.argmax,
          pool.pooled,
          upstreams_[f],
          arrays_.Up(std::vector<float>(feature.keys.size(), 7))};
      weight.table = feature.table;
      weight.index = index_[f];
      weighted.push_back(weight);
    }
    Succeeds(Place::exchange().PoolReceived(Place::exec(), received, pools));
    for (size_t f = 0; f < features_.size(); ++f) {
      const auto num_bags = static_cast<size_t>(features_[f].num_bags);
      exchanged_.pooled.push_back(arrays_.Down(static_cast<const char*>(pools[f].pooled),
                                               num_bags * VectorBytes(features_[f].table)));
      const size_t maxima =
          argmax_[f] == nullptr ? 0 : num_bags * static_cast<size_t>(TableOf(features_[f]).dim);
      exchanged_.argmax.push_back(arrays_.Down(argmax_[f], maxima));
    }
    Succeeds(Place::exchange().WeightGradient(Place::exec(), received, weighted));
    for (const Exchange::WeightFeature& weight : weighted) {
      exchanged_.weight_gradients.push_back(
          BytesOf(arrays_.Down(weight.gradient, weight.bags->nnz())));
    }
  }

  Words SumRequested() {
    const WireLayout layout = Layout(asked_, nullptr);
    std::vector<GatherGradient::Task> tasks(group_.tables.size());
    for (size_t f = 0; f < features_.size(); ++f) {
      GatherGradient::Feature feature;
      feature.bags = &bags_[f];
      feature.weights = weights_[f];
      feature.combiner = features_[f].combiner;
      feature.argmax = argmax_[f];
      feature.dtype = TableOf(features_[f]).dtype;
      feature.upstream = upstreams_[f];
      feature.dim = TableOf(features_[f]).dim;
      feature.index = index_[f];
      tasks[features_[f].table].features.push_back(feature);
    }
    for (size_t t = 0; t < tasks.size(); ++t) {
      const size_t rows = layout.section(t, rank_).rows;
      own_sums_.push_back(
          arrays_.Up(std::vector<float>(rows * static_cast<size_t>(group_.tables[t].dim), 7)));
    }
    int32_t* const words = arrays_.Up(std::vector<int32_t>(layout.num_words(), 12345));
    Succeeds(Place::exchange().SumRequested(Place::exec(), layout, tasks, words, own_sums_));
    return Split(arrays_.Down(words, layout.num_words()), layout);
  }

  const Group& group_;
  const uint32_t rank_;
  Exchanged& exchanged_;
  const std::vector<Feature>& features_;
  typename Place::Arrays arrays_;
  std::vector<Bags> bags_;
  std::vector<const float*> weights_;
  std::vector<const char*> upstreams_;
  std::vector<uint32_t*> index_;
  std::vector<int32_t*> argmax_;
  std::vector<int64_t> asked_, served_;
  int32_t* own_words_ = nullptr;
  size_t num_own_words_ = 0;
  std::vector<char*> keys_;
  std::vector<size_t> num_keys_;
  std::vector<char*> held_;
  std::vector<float*> own_sums_;
};

template <class Place>
Exchanged RunGroup(const Group& group) {
  using Of = Member<Place>;
  Exchanged exchanged;
  std::vector<std::unique_ptr<Of>> members;
  for (uint32_t r = 0; r < group.ranks; ++r) {
    members.push_back(std::make_unique<Of>(group, r, &exchanged));
  }
  // Calls fn(member, messages to it) for all members in turn, then returns the messages of each
  // member to each.
  const auto step = [&](const std::vector<typename Of::Words>& sent, const auto& fn) {
    std::vector<typename Of::Words> next;
    for (uint32_t r = 0; r < group.ranks; ++r) {
      typename Of::Words messages;
      for (uint32_t from = 0; from < sent.size(); ++from) messages.push_back(sent[from][r]);
      next.push_back(fn(members[r].get(), messages));
    }
    return next;
  };
  const auto asked = step({}, [](Of* m, const auto&) { return m->RequestKeys(); });
  const auto answers = step(asked, [](Of* m, const auto& messages) { return m->Answer(messages); });
  const auto gradients =
      step(answers, [](Of* m, const auto& messages) { return m->Pool(messages); });
  for (uint32_t r = 0; r < group.ranks; ++r) {
    typename Of::Words messages;
    for (uint32_t from = 0; from < group.ranks; ++from) messages.push_back(gradients[from][r]);
    members[r]->Sum(messages);
  }
  return exchanged;
}

struct HostPlace {
  using Arrays = HostArrays;
  static Exchange& exchange() { return HostExchange(); }
  static Exec& exec() {
    static SerialExec exec;
    return exec;
  }
};

template <class Place>
class ExchangeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Place::Missing().empty()) GTEST_SKIP() << Place::Missing();
  }

  static void ExpectSameAsHost(const Group& group) {
    const Exchanged got = RunGroup<Place>(group), want = RunGroup<HostPlace>(group);
    EXPECT_EQ(got.asked, want.asked);
    EXPECT_EQ(got.owners, want.owners);
    EXPECT_EQ(got.rows, want.rows);
    EXPECT_EQ(got.pooled, want.pooled);
    EXPECT_EQ(got.argmax, want.argmax);
    EXPECT_EQ(got.weight_gradients, want.weight_gradients);
    EXPECT_EQ(got.sums, want.sums);
  }
};
TYPED_TEST_SUITE_P(ExchangeTest);

TYPED_TEST_P(ExchangeTest, MatchesTheHost) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 40; ++i) {
    SCOPED_TRACE(i);
    const auto ranks = static_cast<uint32_t>(1 + random() % 5);
    this->ExpectSameAsHost(RandomGroup(ranks, i % 2 == 0 ? 20 : 600, &random));
    if (this->HasFailure()) return;
  }
}

TYPED_TEST_P(ExchangeTest, NoIds) {
  std::mt19937_64 random(12);
  Group group = RandomGroup(3, 20, &random);
  for (auto& of_rank : group.features) {
    for (Feature& feature : of_rank) {
      feature.keys.clear();
      feature.bag_of.clear();
      feature.weights.clear();
    }
  }
  this->ExpectSameAsHost(group);
}

TYPED_TEST_P(ExchangeTest, ManyRanks) {
  std::mt19937_64 random(13);
  this->ExpectSameAsHost(RandomGroup(40, 100, &random));
}

REGISTER_TYPED_TEST_SUITE_P(ExchangeTest, MatchesTheHost, NoIds, ManyRanks);

}  // namespace testing_exchange
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_EXCHANGE_SUITE_H_
