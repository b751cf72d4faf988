// World: the tables of a Place, and training steps on them, whose results tests compare as bits.
// lookups_suite.h defines Place.
#ifndef DYNEMB_TESTS_CC_LOOKUPS_WORLD_H_
#define DYNEMB_TESTS_CC_LOOKUPS_WORLD_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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
#include "cc/table/float_bits.h"
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
  Floats weights;      // empty: none
  bool repeats;        // its gradients are applied twice, without row ids
  bool finds = false;  // its gradients are applied without row ids
};

// The results of a training step, as bits.
struct Outcome {
  std::vector<std::vector<char>> pooled;
  std::vector<std::vector<int32_t>> argmax;
  std::vector<std::map<uint64_t, std::vector<float>>> sums;
  std::vector<std::vector<uint32_t>> weight_gradients;
};

// All NaNs have the same bits here: the bits of a NaN differ between a GPU and the host.
inline std::vector<uint32_t> Bits(const Floats& floats) {
  std::vector<uint32_t> bits(floats.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    bits[i] = std::isnan(floats[i]) ? 0x7FC00000u : FloatBits(floats[i]);
  }
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

// Tables in a place, and training steps on them.
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
      const Status status = ask.uniform
                                ? bags.InitUniform(nnz / ask.num_bags, nnz, ask.num_bags)
                                : bags.InitIndices(serial, ask.bag_of.data(), 1, nnz, ask.num_bags);
      ASSERT_TRUE(status.ok()) << status.message();
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
               OptimizerKind kind, Tick tick, Outcome* outcome, OptimizerFlags flags = {},
               const Hyper& hyper = {}) {
    Step step;
    DYNEMB_RETURN_IF_ERROR(Pool(asks, tick, true, &step, outcome));
    return SumAndApply(asks, upstream, kind, tick, &step, outcome, flags, hyper);
  }

  // The gradients of the pooled vectors of a step.
  std::vector<BackwardTask> Gradients(const std::vector<Ask>& asks,
                                      const std::vector<Floats>& upstream, Step* step) const {
    std::vector<BackwardTask> tasks;
    for (size_t a = 0; a < asks.size(); ++a) {
      const TableOptions& o = table(asks[a].table).options();
      std::vector<char> encoded(upstream[a].size() * SizeOf(o.dtype));
      StoreVector(o.dtype, upstream[a].data(), static_cast<int64_t>(upstream[a].size()),
                  encoded.data());
      BackwardTask task;
      task.key_type = o.key_type;
      task.keys = step->pools[a].keys;
      task.rows = step->pools[a].rows;
      task.bags = &step->bags[a];
      task.weights = step->pools[a].weights;
      task.combiner = asks[a].combiner;
      task.argmax = step->pools[a].argmax;
      task.dtype = o.dtype;
      task.upstream = step->arrays.Up(encoded);
      task.dim = o.dim;
      tasks.push_back(task);
    }
    return tasks;
  }

  // The part of Train after the lookup, in one call. No two lookups are of one table.
  Status ApplyPooled(const std::vector<Ask>& asks, const std::vector<Floats>& upstream,
                     OptimizerKind kind, Tick tick, Step* step, OptimizerFlags flags = {},
                     const Hyper& hyper = {}) {
    const std::vector<BackwardTask> gradients = Gradients(asks, upstream, step);
    std::vector<ApplyPooledTask> tasks(asks.size());
    for (size_t a = 0; a < asks.size(); ++a) {
      static_cast<BackwardTask&>(tasks[a]) = gradients[a];
      tasks[a].table = &table(asks[a].table);
    }
    const StateSpec& state = tasks[0].table->state_spec();
    return Place::lookups().ApplyPooled(
        Place::exec(), tasks, {kind, flags, hyper, tick, state.optimizer, state.inits}, tick + 1);
  }

  // The part of Train after the lookup.
  Status SumAndApply(const std::vector<Ask>& asks, const std::vector<Floats>& upstream,
                     OptimizerKind kind, Tick tick, Step* of, Outcome* outcome,
                     OptimizerFlags flags = {}, const Hyper& hyper = {}) {
    Step& step = *of;
    const std::vector<BackwardTask> tasks = Gradients(asks, upstream, &step);
    std::vector<WeightGradientTask> weighted;
    for (size_t a = 0; a < asks.size(); ++a) {
      const Ask& ask = asks[a];
      if (ask.weights.empty()) continue;
      WeightGradientTask gradient;
      static_cast<BagWeightTask&>(gradient) = {&step.bags[a],
                                               step.pools[a].weights,
                                               ask.combiner,
                                               step.pools[a].argmax,
                                               step.pools[a].pooled,
                                               tasks[a].upstream,
                                               step.arrays.Up(Floats(ask.keys.size()))};
      gradient.table = &table(ask.table);
      gradient.keys = tasks[a].keys;
      gradient.rows = tasks[a].rows;
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
      apply.rows = asks[a].finds ? nullptr : out->rows;
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
    return Place::lookups().Apply(
        Place::exec(), applies, {kind, flags, hyper, tick, state.optimizer, state.inits}, tick + 1);
  }

  // The vectors and state of keys, with or without rows.
  std::pair<Floats, Floats> Rows(size_t t, const Keys& keys) const {
    typename Place::Arrays arrays;
    const RowLayout& l = table(t).layout();
    float* const vectors = arrays.Up(Floats(keys.size() * static_cast<size_t>(l.dim)));
    float* const state = arrays.Up(Floats(keys.size() * static_cast<size_t>(l.state_width)));
    auto* const found = reinterpret_cast<bool*>(arrays.Up(std::vector<char>(keys.size())));
    table(t).ReadRows(Place::exec(),
                      {table(t).options().key_type, arrays.Up(Pack(t, keys)), keys.size()}, vectors,
                      state, found);
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

// Seven lookups: three of table 0, and two of table 2.
inline std::vector<Ask> SevenAsks(Random& random, uint64_t keys) {
  std::vector<Ask> asks;
  const auto add = [&](size_t table, Combiner combiner, bool uniform, bool weighted, bool repeats) {
    Ask ask;
    ask.table = table;
    ask.combiner = combiner;
    ask.uniform = uniform;
    ask.repeats = repeats;
    ask.finds = table == 1;
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

// Compares table t of a world on a device with table t of a world on the host: the rows of keys
// [0, keys), and statistics that the device does not define otherwise.
template <class Device, class Host>
void ExpectSameTable(const World<Device>& device, const World<Host>& host, size_t t, size_t keys) {
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
}

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_LOOKUPS_WORLD_H_
