#include "cc/serving/served_lookups.h"

#include <chrono>
#include <vector>

#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/tasks.h"
#include "cc/serving/served_table.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"

namespace dynemb {
namespace {

const ServedTable& TableOf(const Table* table) { return *static_cast<const ServedTable*>(table); }

template <class K, int64_t kDim>
DYNEMB_CLONES void PoolBags(const PoolTask& task, const ServedTable& table, size_t begin,
                            size_t end) {
  const auto began = std::chrono::steady_clock::now();
  const auto* const keys = static_cast<const K*>(task.keys);
  const Bags& bags = *task.bags;
  const RowLayout& layout = table.layout();
  std::vector<char> absent(layout.vector_bytes());
  BagCombiner<kDim> combine(task, layout.dtype, layout.dim, begin,
                            table.Skips() ? task.rows : nullptr);
  uint64_t hits = 0, misses = 0;
  const auto visit = [&](size_t i, K key, Place place) {
    RowId* const row = &task.rows[bags.position(i)];
    if (place.has_row()) {
      ++hits;
      *row = 0;  // a served table has no row ids
      return combine.Add(i, place.row(), place.format());
    }
    ++misses;
    *row = table.AbsentRow();
    if (table.Skips()) return combine.Skip(i);
    table.AbsentVector(key, absent.data());
    combine.Add(i, absent.data());
  };
  const size_t first = bags.begin(begin), last = bags.end(end - 1);
  if (const uint32_t* const order = bags.order()) {
    table.ForEach<K>([keys, order](size_t i) { return keys[order[i]]; }, first, last, true, visit);
  } else {
    table.ForEach<K>([keys](size_t i) { return keys[i]; }, first, last, true, visit);
  }
  combine.Finish(end);
  table.Count(hits, misses, began);
}

void PoolRange(const PoolTask& task, size_t begin, size_t end) {
  const ServedTable& table = TableOf(task.table);
  DispatchDim(table.layout().dim, [&](auto dim) {
    if (table.options().key_type == KeyType::kInt32) {
      PoolBags<uint32_t, decltype(dim)::value>(task, table, begin, end);
    } else {
      PoolBags<uint64_t, decltype(dim)::value>(task, table, begin, end);
    }
  });
}

// The address of the vector of the id at a position, in the table's dtype. `buffer` has room for
// one.
template <class K>
const char* VectorAt(const WeightGradientTask& task, const ServedTable& table, size_t position,
                     char* buffer) {
  const char* vector = buffer;
  table.ForEach<K>([&](size_t) { return static_cast<const K*>(task.keys)[position]; }, 0, 1, true,
                   [&](size_t, K key, Place place) {
                     if (!place.has_row()) {
                       table.AbsentVector(key, buffer);
                     } else if (place.format() == FormatOf(table.layout().dtype)) {
                       vector = place.row();
                     } else {
                       table.ReadVector(place, buffer);
                     }
                   });
  return vector;
}

class ServedLookupsImpl final : public Lookups {
 public:
  Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick, bool) override {
    Phase phase("find and pool");
    std::vector<size_t> sizes, grains;
    for (const PoolTask& task : tasks) {
      sizes.push_back(task.bags->num_bags());
      grains.push_back(BagGrain(*task.bags));
    }
    ParallelForTasks(exec, sizes, grains,
                     [&](size_t t, size_t begin, size_t end) { PoolRange(tasks[t], begin, end); });
    for (const PoolTask& task : tasks) DYNEMB_RETURN_IF_ERROR(task.table->Error());
    return Status();
  }

  Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks) override {
    WeightGradients(exec, tasks, [](const WeightGradientTask& task, size_t begin, size_t end) {
      const ServedTable& table = TableOf(task.table);
      const RowLayout& layout = table.layout();
      std::vector<char> buffer(layout.vector_bytes());
      WeightGradientOfBags(
          task, layout.dtype, layout.dim, begin, end,
          [&](size_t position) {
            return table.options().key_type == KeyType::kInt32
                       ? VectorAt<uint32_t>(task, table, position, buffer.data())
                       : VectorAt<uint64_t>(task, table, position, buffer.data());
          },
          table.Skips() ? task.rows : nullptr);
    });
    for (const WeightGradientTask& task : tasks) DYNEMB_RETURN_IF_ERROR(task.table->Error());
    return Status();
  }

  Status SumGradients(Exec& exec, const std::vector<BackwardTask>& tasks,
                      const Allocate& allocate) override {
    return HostLookups().SumGradients(exec, tasks, allocate);
  }

  Status Apply(Exec&, const std::vector<ApplyTask>& tasks, const OptimizerStep&, Tick) override {
    return ReadOnly(tasks.front().table);
  }

  Status ApplyPooled(Exec&, const std::vector<ApplyPooledTask>& tasks, const OptimizerStep&,
                     Tick) override {
    return ReadOnly(tasks.front().table);
  }

 private:
  static Status ReadOnly(const Table* table) {
    return FailedPrecondition("table '" + table->options().name +
                              "' of an exported model is read-only");
  }
};

}  // namespace

Lookups& ServedLookups() {
  static Lookups* const lookups = new ServedLookupsImpl;
  return *lookups;
}

}  // namespace dynemb
