// The contract suite of Lookups on a device: the results have the same bits as those of the host's
// functions on host tables. Typed by a Place:
//
//   static std::string Missing()      why there can be no tables here; empty if there can
//   static Status Make(options, std::unique_ptr<Table>*)
//   static Lookups& lookups()
//   static Exec& exec()
//   static constexpr Tick kSteps      the maximal number of steps of a test
//   class Arrays                      arrays in the memory of the tables, until it ends:
//     T* Up(const std::vector<T>&), std::vector<T> Down(const T*, n)
#ifndef DYNEMB_TESTS_CC_LOOKUPS_SUITE_H_
#define DYNEMB_TESTS_CC_LOOKUPS_SUITE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/apply.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/lookups.h"
#include "cc/lookup/pool.h"
#include "tests/cc/host_arrays.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

// One lookup of a step.
struct Ask {
  size_t table;
  Combiner combiner;
  Keys keys;
  std::vector<int64_t> bag_of;
  int64_t num_bags;
  bool uniform;
  Floats weights;  // empty: none
  bool repeats;    // its gradients are applied without rows, each of them twice
};

// The results of a training step, as bits.
struct Outcome {
  std::vector<std::vector<char>> pooled;
  std::vector<std::vector<int32_t>> argmax;
  std::vector<std::map<uint64_t, std::vector<float>>> sums;
  std::vector<std::vector<uint32_t>> weight_gradients;
};

inline std::vector<uint32_t> Bits(const Floats& floats) {
  std::vector<uint32_t> bits(floats.size());
  std::memcpy(bits.data(), floats.data(), floats.size() * sizeof(float));
  return bits;
}

// A Place with the host's functions.
struct HostPlace {
  using Arrays = HostArrays;
  static std::string Missing() { return ""; }
  static Status Make(const TableOptions& options, std::unique_ptr<Table>* table) {
    TableOptions host = options;
    host.tier = Tier::kHost;
    return Table::Create(host, table);
  }
  static Lookups& lookups() { return HostLookups(); }
  static Exec& exec() {
    static SerialExec exec;
    return exec;
  }
};

// Tables in a place, and steps of training on them.
template <class Place>
class World {
 public:
  Status Add(const TableOptions& options) {
    tables_.emplace_back();
    return Place::Make(options, &tables_.back());
  }
  // Adds a table with the state of Adagrad.
  Status AddForAdagrad(const TableOptions& options) {
    DYNEMB_RETURN_IF_ERROR(Add(options));
    return tables_.back()->AttachState(Place::exec(), {"adagrad", {options.dim}, {0.1f}});
  }
  Table& table(size_t t) const { return *tables_[t]; }
  size_t num_tables() const { return tables_.size(); }

  std::vector<char> Pack(size_t t, const Keys& keys) const {
    const size_t size = SizeOf(table(t).options().key_type);
    std::vector<char> packed(keys.size() * size);
    for (size_t i = 0; i < keys.size(); ++i) std::memcpy(&packed[i * size], &keys[i], size);
    return packed;
  }

  // The arrays of one step, and the tasks over them.
  struct Step {
    typename Place::Arrays arrays;
    std::vector<Bags> bags;
    std::vector<PoolTask> pools;
  };

  void Prepare(const std::vector<Ask>& asks, Step* step) const {
    step->bags.resize(asks.size());
    for (size_t a = 0; a < asks.size(); ++a) {
      const Ask& ask = asks[a];
      const RowLayout& l = table(ask.table).layout();
      const auto nnz = static_cast<int64_t>(ask.keys.size());
      SerialExec serial;
      Bags& bags = step->bags[a];
      const Status made = ask.uniform
                              ? bags.InitUniform(nnz / ask.num_bags, nnz, ask.num_bags)
                              : bags.InitIndices(serial, ask.bag_of.data(), 1, nnz, ask.num_bags);
      ASSERT_TRUE(made.ok()) << made.message();
      const auto num_bags = static_cast<size_t>(ask.num_bags);
      PoolTask task;
      task.table = &table(ask.table);
      task.keys = step->arrays.Up(Pack(ask.table, ask.keys));
      task.bags = &bags;
      task.weights = ask.weights.empty() ? nullptr : step->arrays.Up(ask.weights);
      task.combiner = ask.combiner;
      task.pooled = step->arrays.Up(std::vector<char>(num_bags * l.vector_bytes(), 0x5A));
      task.rows = step->arrays.Up(RowIds(ask.keys.size(), 12345));
      if (ask.combiner == Combiner::kMax) {
        task.argmax =
            step->arrays.Up(std::vector<int32_t>(num_bags * static_cast<size_t>(l.dim), 12345));
      }
      step->pools.push_back(task);
    }
  }

  Status Pool(const std::vector<Ask>& asks, Tick tick, bool insert, Step* step, Outcome* outcome) {
    Prepare(asks, step);
    DYNEMB_RETURN_IF_ERROR(Place::lookups().Pool(Place::exec(), step->pools, tick, insert));
    for (size_t a = 0; a < asks.size(); ++a) {
      const RowLayout& l = table(asks[a].table).layout();
      const auto num_bags = static_cast<size_t>(asks[a].num_bags);
      const PoolTask& task = step->pools[a];
      outcome->pooled.push_back(
          step->arrays.Down(static_cast<char*>(task.pooled), num_bags * l.vector_bytes()));
      outcome->argmax.push_back(
          task.argmax == nullptr
              ? std::vector<int32_t>()
              : step->arrays.Down(task.argmax, num_bags * static_cast<size_t>(l.dim)));
    }
    return Status();
  }

  // One step: looks up, sums the gradients `upstream` [bags, dim] of each lookup, and applies them.
  Status Train(const std::vector<Ask>& asks, const std::vector<Floats>& upstream,
               OptimizerKind kind, Tick tick, Outcome* outcome) {
    Step step;
    DYNEMB_RETURN_IF_ERROR(Pool(asks, tick, true, &step, outcome));
    std::vector<WeightGradientTask> weighted;
    std::vector<BackwardTask> tasks;
    for (size_t a = 0; a < asks.size(); ++a) {
      const Ask& ask = asks[a];
      const TableOptions& o = table(ask.table).options();
      std::vector<char> encoded(upstream[a].size() * SizeOf(o.dtype));
      StoreVector(o.dtype, upstream[a].data(), static_cast<int64_t>(upstream[a].size()),
                  encoded.data());
      BackwardTask task;
      task.key_type = o.key_type;
      task.keys = step.pools[a].keys;
      task.rows = step.pools[a].rows;
      task.bags = &step.bags[a];
      task.weights = step.pools[a].weights;
      task.combiner = ask.combiner;
      task.argmax = step.pools[a].argmax;
      task.dtype = o.dtype;
      task.upstream = step.arrays.Up(encoded);
      task.dim = o.dim;
      tasks.push_back(task);
      if (ask.weights.empty()) continue;
      WeightGradientTask gradient;
      static_cast<BagWeightTask&>(gradient) = {&step.bags[a],
                                               step.pools[a].weights,
                                               ask.combiner,
                                               step.pools[a].argmax,
                                               step.pools[a].pooled,
                                               task.upstream,
                                               step.arrays.Up(Floats(ask.keys.size()))};
      gradient.table = &table(ask.table);
      gradient.keys = task.keys;
      gradient.rows = task.rows;
      weighted.push_back(gradient);
    }
    DYNEMB_RETURN_IF_ERROR(Place::lookups().WeightGradient(Place::exec(), weighted));
    for (const WeightGradientTask& task : weighted) {
      outcome->weight_gradients.push_back(Bits(step.arrays.Down(task.gradient, task.bags->nnz())));
    }

    std::vector<ApplyTask> applies;
    std::vector<size_t> unique;
    const auto allocate = [&](size_t a, size_t n, BackwardOutput* out) {
      const TableOptions& o = table(asks[a].table).options();
      out->keys = step.arrays.Up(std::vector<char>(n * SizeOf(o.key_type)));
      out->rows = step.arrays.Up(RowIds(n));
      out->sums = step.arrays.Up(Floats(n * static_cast<size_t>(o.dim)));
      ApplyTask apply;
      apply.table = &table(asks[a].table);
      apply.keys = out->keys;
      apply.rows = asks[a].table == 1 ? nullptr : out->rows;  // one task without rows
      apply.distinct = true;
      apply.gradients = out->sums;
      apply.n = n;
      applies.push_back(apply);
      return Status();
    };
    DYNEMB_RETURN_IF_ERROR(Place::lookups().SumGradients(Place::exec(), tasks, allocate));
    for (size_t a = 0; a < asks.size(); ++a) {
      const TableOptions& o = table(asks[a].table).options();
      const size_t key_size = SizeOf(o.key_type), dim = static_cast<size_t>(o.dim);
      const std::vector<char> keys =
          step.arrays.Down(static_cast<const char*>(applies[a].keys), applies[a].n * key_size);
      const Floats sums = step.arrays.Down(applies[a].gradients, applies[a].n * dim);
      if (asks[a].repeats) {
        std::vector<char> keys_twice = keys;
        keys_twice.insert(keys_twice.end(), keys.begin(), keys.end());
        Floats sums_twice = sums;
        sums_twice.insert(sums_twice.end(), sums.begin(), sums.end());
        applies[a].keys = step.arrays.Up(keys_twice);
        applies[a].gradients = step.arrays.Up(sums_twice);
        applies[a].rows = nullptr;
      }
      outcome->sums.emplace_back();
      for (size_t i = 0; i < applies[a].n; ++i) {
        uint64_t key = 0;
        std::memcpy(&key, &keys[i * key_size], key_size);
        outcome->sums.back()[key] = Floats(sums.begin() + static_cast<int64_t>(i * dim),
                                           sums.begin() + static_cast<int64_t>((i + 1) * dim));
      }
    }
    for (size_t a = 0; a < asks.size(); ++a) {
      if (!asks[a].repeats) continue;
      applies[a].n *= 2;
      applies[a].distinct = false;
    }
    const StateSpec& state = applies[0].table->state_spec();
    return Place::lookups().Apply(Place::exec(), applies,
                                  {kind, {}, {}, tick, state.optimizer, state.inits}, tick + 1);
  }

  // The vectors and state of keys, with or without rows.
  std::pair<Floats, Floats> Rows(size_t t, const Keys& keys) const {
    typename Place::Arrays arrays;
    const RowLayout& l = table(t).layout();
    float* const vectors = arrays.Up(Floats(keys.size() * static_cast<size_t>(l.dim)));
    float* const state = arrays.Up(Floats(keys.size() * static_cast<size_t>(l.state_width)));
    auto* const found = reinterpret_cast<bool*>(arrays.Up(std::vector<char>(keys.size())));
    table(t).ReadRows(Place::exec(), arrays.Up(Pack(t, keys)), keys.size(), vectors, state, found);
    return {arrays.Down(vectors, keys.size() * static_cast<size_t>(l.dim)),
            arrays.Down(state, keys.size() * static_cast<size_t>(l.state_width))};
  }

 private:
  std::vector<std::unique_ptr<Table>> tables_;
};

inline std::vector<TableOptions> FourTables(uint64_t device_rows) {
  std::vector<TableOptions> all;
  const auto add = [&](const char* name, KeyType key_type, DType dtype, int64_t dim, Tier tier) {
    TableOptions o;
    o.name = name;
    o.key_type = key_type;
    o.dtype = dtype;
    o.dim = dim;
    o.init_capacity = 16;
    o.seed = 40 + all.size();
    o.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
    o.tier = tier;
    o.max_hbm_bytes = device_rows * 64;
    all.push_back(o);
  };
  add("wide", KeyType::kInt64, DType::kFloat32, 8, Tier::kHybrid);
  add("narrow keys", KeyType::kInt32, DType::kFloat32, 4, Tier::kHbm);
  add("half", KeyType::kUint64, DType::kFloat16, 12, Tier::kHybrid);
  add("odd", KeyType::kInt64, DType::kBfloat16, 3, Tier::kHbm);
  return all;
}

// Lookups: three of them of one table, and two of another.
inline std::vector<Ask> SevenAsks(Random& random, uint64_t keys) {
  std::vector<Ask> asks;
  const auto add = [&](size_t table, Combiner combiner, bool uniform, bool weighted, bool repeats) {
    Ask ask;
    ask.table = table;
    ask.combiner = combiner;
    ask.uniform = uniform;
    ask.repeats = repeats;
    ask.num_bags = 1 + static_cast<int64_t>(random.Below(40));
    for (int64_t b = 0; b < ask.num_bags; ++b) {
      const uint64_t ids = uniform ? 3 : random.Below(3) == 0 ? 0 : random.Below(9);
      for (uint64_t i = 0; i < ids; ++i) ask.bag_of.push_back(b);
    }
    for (size_t i = ask.bag_of.size(); !uniform && i > 1; --i) {
      std::swap(ask.bag_of[i - 1], ask.bag_of[random.Below(i)]);
    }
    for (size_t i = 0; i < ask.bag_of.size(); ++i) {
      ask.keys.push_back(random.Below(2) == 0 ? random.Below(10) : random.Below(keys));
      if (weighted) ask.weights.push_back(static_cast<float>(random.Below(100)) / 50.0f - 0.5f);
    }
    asks.push_back(ask);
  };
  add(2, Combiner::kSum, false, true, false);
  add(0, Combiner::kMean, true, false, false);
  add(1, Combiner::kMax, false, true, false);
  add(0, Combiner::kSqrtn, false, true, true);
  add(3, Combiner::kMax, true, false, true);
  add(0, Combiner::kSum, false, false, false);
  add(2, Combiner::kMean, false, true, false);
  return asks;
}

inline std::vector<Floats> Upstreams(Random& random, const std::vector<Ask>& asks,
                                     const std::vector<TableOptions>& tables) {
  std::vector<Floats> all;
  for (const Ask& ask : asks) {
    all.emplace_back(static_cast<size_t>(ask.num_bags * tables[ask.table].dim));
    for (float& g : all.back()) g = static_cast<float>(random.Below(2000)) / 1000.0f - 1.0f;
  }
  return all;
}

inline void ExpectSame(const Outcome& got, const Outcome& want) {
  EXPECT_EQ(got.pooled, want.pooled);
  EXPECT_EQ(got.argmax, want.argmax);
  EXPECT_EQ(got.weight_gradients, want.weight_gradients);
  ASSERT_EQ(got.sums.size(), want.sums.size());
  for (size_t a = 0; a < got.sums.size(); ++a) {
    ASSERT_EQ(got.sums[a].size(), want.sums[a].size()) << a;
    for (const auto& [key, sum] : want.sums[a]) {
      ASSERT_EQ(got.sums[a].count(key), 1u) << a;
      ASSERT_EQ(Bits(got.sums[a].at(key)), Bits(sum)) << a << " key " << key;
    }
  }
}

template <class Place>
class LookupsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Place::Missing().empty()) GTEST_SKIP() << Place::Missing();
  }
};
TYPED_TEST_SUITE_P(LookupsTest);

// Many steps of each of three optimizers, with rows that move between the tiers: all outputs, rows
// and counts are the same as on the host.
TYPED_TEST_P(LookupsTest, TrainsLikeTheHost) {
  for (const auto kind :
       {OptimizerKind::kAdagrad, OptimizerKind::kAdam, OptimizerKind::kRowwiseAdagrad}) {
    SCOPED_TRACE(static_cast<int>(kind));
    World<TypeParam> device;
    World<HostPlace> host;
    const std::vector<TableOptions> options = FourTables(24);
    for (const TableOptions& o : options) {
      ASSERT_TRUE(device.Add(o).ok());
      ASSERT_TRUE(host.Add(o).ok());
      StateSpec spec;
      spec.optimizer = "optimizer";
      spec.widths = StateWidths(kind, {}, o.dim);
      spec.inits.assign(spec.widths.size(), 0.1f);
      Table& d = device.table(device.num_tables() - 1);
      ASSERT_TRUE(d.AttachState(TypeParam::exec(), spec).ok());
      ASSERT_TRUE(host.table(host.num_tables() - 1).AttachState(HostPlace::exec(), spec).ok());
    }
    Random random(5);
    uint64_t keys = 30;
    for (Tick tick = 1; tick < 2 * TypeParam::kSteps; tick += 2, keys += 15) {
      SCOPED_TRACE(tick);
      const std::vector<Ask> asks = SevenAsks(random, keys);
      const std::vector<Floats> upstream = Upstreams(random, asks, options);
      Outcome got, want;
      const Status status = device.Train(asks, upstream, kind, tick, &got);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(host.Train(asks, upstream, kind, tick, &want).ok());
      ExpectSame(got, want);
      for (size_t t = 0; t < device.num_tables(); ++t) {
        ASSERT_TRUE(device.table(t).Promote(TypeParam::exec(), tick + 1).ok());
      }
      if (this->HasFailure()) return;
    }
    uint64_t promotions = 0;
    for (size_t t = 0; t < options.size(); ++t) {
      SCOPED_TRACE(options[t].name);
      const Keys all = Progression(0, keys);
      const auto got = device.Rows(t, all), want = host.Rows(t, all);
      EXPECT_EQ(Bits(got.first), Bits(want.first));
      EXPECT_EQ(Bits(got.second), Bits(want.second));
      device.table(t).CheckInvariants();
      const TableStats d = device.table(t).stats(), h = host.table(t).stats();
      EXPECT_EQ(d.size, h.size);
      EXPECT_EQ(d.hits, h.hits);
      EXPECT_EQ(d.misses, h.misses);
      EXPECT_EQ(d.inserts, h.inserts);
      EXPECT_EQ(d.dropped_gradients, h.dropped_gradients);
      EXPECT_EQ(d.nonfinite_gradients, h.nonfinite_gradients);
      promotions += d.promotions;
    }
    EXPECT_GT(promotions, 0u);
  }
}

// Without `insert`, a key without a row counts as its initial vector.
TYPED_TEST_P(LookupsTest, ReadsWithoutInserting) {
  World<TypeParam> device;
  World<HostPlace> host;
  for (const TableOptions& o : FourTables(24)) {
    ASSERT_TRUE(device.Add(o).ok());
    ASSERT_TRUE(host.Add(o).ok());
  }
  Random random(6);
  for (Tick tick = 1; tick < TypeParam::kSteps; ++tick) {
    const std::vector<Ask> asks = SevenAsks(random, 40 * tick);
    const bool insert = tick % 3 == 0;
    Outcome got, want;
    typename World<TypeParam>::Step step;
    World<HostPlace>::Step host_step;
    ASSERT_TRUE(device.Pool(asks, tick, insert, &step, &got).ok());
    ASSERT_TRUE(host.Pool(asks, tick, insert, &host_step, &want).ok());
    ExpectSame(got, want);
    // Row ids may differ, but the same keys have rows.
    for (size_t a = 0; a < asks.size(); ++a) {
      const RowIds rows = step.arrays.Down(step.pools[a].rows, asks[a].keys.size());
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(rows[i] == kNoRow, host_step.pools[a].rows[i] == kNoRow) << a << " " << i;
      }
    }
    for (size_t t = 0; t < 4; ++t) ASSERT_EQ(device.table(t).size(), host.table(t).size());
  }
}

// Full tables each evict their own rows, and record the evicted keys.
TYPED_TEST_P(LookupsTest, FullTablesEvict) {
  World<TypeParam> device;
  World<HostPlace> host;
  std::vector<TableOptions> options = FourTables(24);
  options[0].max_capacity = 300;
  options[1].max_capacity = 200;
  for (const TableOptions& o : options) {
    ASSERT_TRUE(device.Add(o).ok());
    device.table(device.num_tables() - 1).Track(0);
    TableOptions unlimited = o;
    unlimited.max_capacity = 0;
    ASSERT_TRUE(host.Add(unlimited).ok());
  }
  Random random(7);
  for (Tick tick = 1; tick < 20 + TypeParam::kSteps; ++tick) {
    const std::vector<Ask> asks = SevenAsks(random, 100000);
    Outcome got, want;
    typename World<TypeParam>::Step step;
    World<HostPlace>::Step host_step;
    const Status status = device.Pool(asks, tick, true, &step, &got);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(host.Pool(asks, tick, true, &host_step, &want).ok());
    ExpectSame(got, want);  // no row was ever changed: each has its initial vector
  }
  for (size_t t = 0; t < 2; ++t) {
    const TableStats stats = device.table(t).stats();
    EXPECT_EQ(stats.size, static_cast<uint64_t>(options[t].max_capacity));
    EXPECT_GT(stats.evictions, 0u);
    EXPECT_EQ(stats.inserts, stats.size + stats.evictions);
    device.table(t).CheckInvariants();
    // Every evicted key that was not inserted again is among the deleted keys.
    SavedRows saved(size_t{1} << 30);
    ASSERT_TRUE(device.table(t).BeginCut(TypeParam::exec(), 100, 1, true, &saved, 0).ok());
    EXPECT_GE(device.table(t).cut()->deleted.size() + stats.size, host.table(t).stats().inserts);
    device.table(t).EndCut();
  }
  for (size_t t = 2; t < 4; ++t) {
    EXPECT_EQ(device.table(t).size(), host.table(t).size());
    EXPECT_EQ(device.table(t).stats().evictions, 0u);
  }
}

// Calls that cannot succeed return an error, and change nothing in any table.
TYPED_TEST_P(LookupsTest, Refuses) {
  World<TypeParam> device;
  World<HostPlace> host;
  std::vector<TableOptions> options = FourTables(24);
  options[3].max_capacity = 20;
  options[3].evict_strategy = EvictStrategy::kNone;
  for (const TableOptions& o : options) ASSERT_TRUE(device.Add(o).ok());
  ASSERT_TRUE(host.Add(options[0]).ok());
  Random random(8);
  std::vector<Ask> asks = SevenAsks(random, 30);
  for (Ask& ask : asks) {
    if (ask.table != 3) continue;
    ask.keys = Progression(0, 60);
    ask.num_bags = 20;
  }
  Outcome outcome;
  typename World<TypeParam>::Step step;
  const Status full = device.Pool(asks, 1, true, &step, &outcome);
  EXPECT_EQ(full.code(), Code::kResourceExhausted);
  EXPECT_NE(full.message().find("'odd'"), std::string::npos) << full.message();
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(device.table(t).size(), 0u);
    device.table(t).CheckInvariants();
  }
  // A table in another place.
  typename World<TypeParam>::Step mixed;
  device.Prepare(asks, &mixed);
  mixed.pools[1].table = &host.table(0);
  const Status elsewhere = TypeParam::lookups().Pool(TypeParam::exec(), mixed.pools, 2, true);
  EXPECT_EQ(elsewhere.code(), Code::kInvalidArgument);
  EXPECT_NE(elsewhere.message().find("'wide'"), std::string::npos) << elsewhere.message();
  // A state of another optimizer.
  ApplyTask apply;
  apply.table = &device.table(1);
  const Status stateless =
      TypeParam::lookups().Apply(TypeParam::exec(), {apply}, {OptimizerKind::kAdam}, 3);
  EXPECT_EQ(stateless.code(), Code::kFailedPrecondition);
  EXPECT_NE(stateless.message().find("'narrow keys'"), std::string::npos) << stateless.message();
  // A state of the same widths, and a state of another owner.
  bool begins_anew = false;
  ASSERT_TRUE(device.table(1)
                  .TakeState(TypeParam::exec(),
                             {"adagrad", {device.table(1).options().dim}, {0.1f}}, "the owner",
                             &begins_anew)
                  .ok());
  for (const OptimizerStep& step :
       {OptimizerStep{OptimizerKind::kLion, {}, {}, 1, "lion", {0.1f}},
        OptimizerStep{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.5f}},
        OptimizerStep{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}, "another"}}) {
    const Status refused = TypeParam::lookups().Apply(TypeParam::exec(), {apply}, step, 4);
    EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
    EXPECT_NE(refused.message().find("'narrow keys'"), std::string::npos) << refused.message();
  }
  const OptimizerStep own{OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}, "the owner"};
  EXPECT_TRUE(TypeParam::lookups().Apply(TypeParam::exec(), {apply}, own, 5).ok());
}

// Lookups without ids, and calls without lookups.
TYPED_TEST_P(LookupsTest, TakesNothing) {
  World<TypeParam> device;
  for (const TableOptions& o : FourTables(24)) ASSERT_TRUE(device.Add(o).ok());
  std::vector<Ask> asks(2);
  asks[0] = {1, Combiner::kMean, {}, {}, 3, false, {}, false};
  asks[1] = {0, Combiner::kMax, {}, {}, 0, false, {}, true};
  Outcome outcome;
  for (Table* table : {&device.table(0), &device.table(1)}) {
    ASSERT_TRUE(
        table->AttachState(TypeParam::exec(), {"adagrad", {table->options().dim}, {0.1f}}).ok());
  }
  const Status status =
      device.Train(asks, {Floats(12), Floats()}, OptimizerKind::kAdagrad, 1, &outcome);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(outcome.pooled[0], std::vector<char>(48, 0));
  EXPECT_TRUE(outcome.pooled[1].empty());
  EXPECT_TRUE(outcome.sums[0].empty());
  // The first task of a call may have no ids, and therefore no arrays.
  asks[1] = {0, Combiner::kSum, {5, 6}, {0, 2}, 3, false, {0.5f, 2.0f}, false};
  typename World<TypeParam>::Step step;
  ASSERT_TRUE(device.Pool(asks, 3, true, &step, &outcome).ok());
  const Keys keys{5, 6};
  const Floats vectors = device.Rows(0, keys).first;
  std::vector<WeightGradientTask> gradients(2);
  for (size_t a = 0; a < 2; ++a) {
    const PoolTask& pool = step.pools[a];
    static_cast<BagWeightTask&>(gradients[a]) = {pool.bags,
                                                 pool.weights,
                                                 pool.combiner,
                                                 pool.argmax,
                                                 pool.pooled,
                                                 step.arrays.Up(Floats(24, 1.0f)),
                                                 step.arrays.Up(Floats(asks[a].keys.size()))};
    gradients[a].table = pool.table;
    gradients[a].keys = pool.keys;
    gradients[a].rows = pool.rows;
  }
  ASSERT_TRUE(TypeParam::lookups().WeightGradient(TypeParam::exec(), gradients).ok());
  const Floats of_weights = step.arrays.Down(gradients[1].gradient, 2);
  for (size_t i = 0; i < 2; ++i) {  // all ones times the vector
    float sum = 0.0f;
    for (size_t c = 0; c < 8; ++c) sum += vectors[i * 8 + c];
    EXPECT_EQ(of_weights[i], sum);
  }
  Lookups& lookups = TypeParam::lookups();
  EXPECT_TRUE(lookups.Pool(TypeParam::exec(), {}, 4, true).ok());
  EXPECT_TRUE(lookups.WeightGradient(TypeParam::exec(), {}).ok());
  EXPECT_TRUE(lookups.SumGradients(TypeParam::exec(), {}, nullptr).ok());
  EXPECT_TRUE(lookups.Apply(TypeParam::exec(), {}, OptimizerStep(), 4).ok());
}

REGISTER_TYPED_TEST_SUITE_P(LookupsTest, TrainsLikeTheHost, ReadsWithoutInserting, FullTablesEvict,
                            Refuses, TakesNothing);

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_LOOKUPS_SUITE_H_
