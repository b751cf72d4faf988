// Pool and WeightGradient for tables in host memory.
//
// PoolBags finds rows and combines them in one pass. An inserting Pool then inserts the keys that
// the pass did not find: InsertMissing for one task, or InsertJointly for several tasks on a table
// with admission. PoolBagsAgain then combines the bags that were put aside, from their row ids.
#include "cc/lookup/pool.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cc/lookup/dispatch.h"
#include "cc/lookup/held_rows.h"
#include "cc/lookup/tasks.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/staged.h"

namespace dynemb {
namespace {

// Ids per range of work.
constexpr size_t kIdGrain = 4096;

// What an inserting Pool leaves to do for a range of a task, or for a whole task.
struct Rest {
  std::vector<uint32_t> missing;  // positions of keys without rows; of a whole task: ascending
  std::vector<size_t> bags;       // that have such keys, in increasing order
};

// `rows` if ids may be absent from their bags, otherwise null.
template <class K>
const RowId* SkippedRows(const HashTable<K>& table, const RowId* rows) {
  return table.AbsentRow() == kSkippedRow ? rows : nullptr;
}

// Adds the rows that FindRange finds to their bags. `i` is the number of an id in the order of the
// bags; bags.position(i) is its position in the arrays.
template <class K, int64_t kDim>
class PoolVisitor {
 public:
  PoolVisitor(const PoolTask& task, const HashTable<K>& table, bool insert, size_t bag)
      : task_(task),
        table_(table),
        layout_(table.layout()),
        insert_(insert),
        bags_(task, layout_.dtype, layout_.dim, bag, SkippedRows(table, task.rows)) {}

  uint64_t hits = 0, misses = 0;

  void Hit(size_t i, RowId row, const char* at) {
    ++hits;
    task_.rows[task_.bags->position(i)] = row;
    Add(i, at);
  }
  void Miss(size_t i, K key) {
    ++misses;
    RowId* const row = &task_.rows[task_.bags->position(i)];
    *row = kNoRow;
    if (insert_) {
      missing_.push_back(static_cast<uint32_t>(task_.bags->position(i)));
      bags_.PutAside(i);
      return;
    }
    *row = table_.AbsentRow();
    AddAbsent(i, key);
  }
  void Add(size_t i, const char* at) { bags_.Add(i, layout_.vector(at)); }
  // Adds an id whose key has no row.
  void AddAbsent(size_t i, K key) {
    if (table_.AbsentRow() == kSkippedRow) return bags_.Skip(i);
    absent_.resize(layout_.vector_bytes());
    table_.AbsentVector(key, absent_.data());
    bags_.Add(i, absent_.data());
  }
  void GoTo(size_t bag) { bags_.GoTo(bag); }
  void Finish(size_t last_bag) { bags_.Finish(last_bag); }
  Rest rest() { return {std::move(missing_), bags_.put_aside()}; }

 private:
  const PoolTask& task_;
  const HashTable<K>& table_;
  const RowLayout layout_;
  const bool insert_;
  BagCombiner<kDim> bags_;
  std::vector<uint32_t> missing_;
  std::vector<char> absent_;
};

// Calls fn(HashTable&, keys, integral_constant of the dim or 0).
template <class Fn>
void Dispatch(const PoolTask& task, const Fn& fn) {
  DispatchKeys(task.table, task.keys, [&](auto& table, const auto* keys) {
    DispatchDim(table.layout().dim, [&](auto dim) { fn(table, keys, dim); });
  });
}

// Finds the rows of the bags [begin, end), and combines them.
template <class K, int64_t kDim>
DYNEMB_CLONES void PoolBags(const PoolTask& task, const HashTable<K>& table, const K* keys,
                            size_t begin, size_t end, Tick tick, bool insert, Rest* rest) {
  PoolVisitor<K, kDim> visit(task, table, insert, begin);
  const Bags& bags = *task.bags;
  const size_t first = bags.begin(begin);
  const size_t last = bags.end(end - 1);
  if (bags.order() == nullptr) {
    table.FindRange([keys](size_t i) { return keys[i]; }, first, last, tick, insert, visit);
  } else {
    const uint32_t* order = bags.order();
    table.FindRange([keys, order](size_t i) { return keys[order[i]]; }, first, last, tick, insert,
                    visit);
  }
  visit.Finish(end);
  *rest = visit.rest();
  table.CountFinds(visit.hits, visit.misses);
}

void PoolRange(const PoolTask& task, size_t begin, size_t end, Tick tick, bool insert, Rest* rest) {
  Dispatch(task, [&](auto& table, const auto* keys, auto dim) {
    using K = std::decay_t<decltype(*keys)>;
    PoolBags<K, decltype(dim)::value>(task, table, keys, begin, end, tick, insert, rest);
  });
}

// The ids of some bags, one after the other.
class IdsOfBags {
 public:
  IdsOfBags(const Bags& bags, const size_t* numbers, size_t n)
      : bags_(bags), next_(numbers), end_(numbers + n) {
    FindBag();
  }
  bool at_end() const { return id_ == bag_end_; }
  size_t position() const { return bags_.position(id_); }
  void Next() {
    if (++id_ == bag_end_) FindBag();
  }

 private:
  void FindBag() {
    for (; id_ == bag_end_ && next_ != end_; ++next_) {
      id_ = bags_.begin(*next_);
      bag_end_ = bags_.end(*next_);
    }
  }

  const Bags& bags_;
  const size_t* next_;
  const size_t* const end_;
  size_t id_ = 0, bag_end_ = 0;
};

template <class K, int64_t kDim>
DYNEMB_CLONES void PoolBagsAgain(const PoolTask& task, const HashTable<K>& table, const K* keys,
                                 const size_t* bags, size_t n) {
  const RowLayout& layout = table.layout();
  const RowPrefetch prefetch(table.RowAt(0), layout.stride,
                             layout.vector_offset + layout.vector_bytes());
  PoolVisitor<K, kDim> visit(task, table, false, bags[0]);
  IdsOfBags ahead(*task.bags, bags, n);
  const size_t block = StagedBlock(prefetch.lines());
  const auto fetch_block = [&] {
    for (size_t i = 0; i < block && !ahead.at_end(); ++i, ahead.Next()) {
      const RowId row = task.rows[ahead.position()];
      if (!IsRefused(row)) prefetch(table.RowAt(row));
    }
  };
  fetch_block();
  size_t added = 0;
  for (size_t b = 0; b < n; ++b) {
    visit.GoTo(bags[b]);
    const size_t end = task.bags->end(bags[b]);
    for (size_t i = task.bags->begin(bags[b]); i < end; ++i) {
      if (added++ % block == 0) fetch_block();
      const size_t position = task.bags->position(i);
      if (IsRefused(task.rows[position])) {
        visit.AddAbsent(i, keys[position]);
      } else {
        visit.Add(i, table.RowAt(task.rows[position]));
      }
    }
    visit.Finish(bags[b] + 1);
  }
}

// Combines whole bags from the rows in task.rows.
void PoolRemembered(const PoolTask& task, const size_t* bags, size_t n) {
  if (n == 0) return;
  Dispatch(task, [&](auto& table, const auto* keys, auto dim) {
    PoolBagsAgain<std::decay_t<decltype(*keys)>, decltype(dim)::value>(task, table, keys, bags, n);
  });
}

// Records the rows of positions that had none. stats() does not count this as a lookup.
struct FindAgain {
  const uint32_t* positions;
  RowId* rows;
  void Hit(size_t j, RowId row, const char*) { rows[positions[j]] = row; }
  template <class K>
  void Miss(size_t, K) {}
};

// Inserts the keys of tasks[t] at the positions `missing`. If `find_again`, some may have been
// inserted since the task's rows were filled.
Status InsertMissing(Exec& exec, const std::vector<PoolTask>& tasks, size_t t, Tick tick,
                     const std::vector<uint32_t>& missing, bool find_again) {
  const PoolTask& task = tasks[t];
  return DispatchKeys(task.table, task.keys, [&](auto& table, const auto* keys) {
    using FoundRows = typename std::decay_t<decltype(table)>::FoundRows;
    std::vector<FoundRows> others;
    for (const PoolTask& other : tasks) {
      if (other.table != task.table || &other == &task) continue;
      others.push_back({other.rows, other.bags->nnz()});
    }
    if (find_again) {
      const auto key_at = [&missing, keys](size_t j) { return keys[missing[j]]; };
      exec.ParallelFor(missing.size(), kIdGrain, [&](size_t begin, size_t end) {
        FindAgain visit{missing.data(), task.rows};
        table.FindRange(key_at, begin, end, tick, true, visit);
      });
    }
    return table.InsertInitial(exec, keys, task.bags->nnz(), tick, task.rows, others, &missing);
  });
}

// Inserts the keys without rows of several tasks on one table with admission: a key is counted
// once, for all tasks together. The first of the tasks is tasks[t]; rests[u].missing are the
// positions of tasks[u] without rows.
Status InsertJointly(Exec& exec, const std::vector<PoolTask>& tasks, size_t t, Tick tick,
                     const std::vector<Rest>& rests) {
  return DispatchKeys(tasks[t].table, tasks[t].keys, [&](auto& table, const auto* keys_of_first) {
    using K = std::decay_t<decltype(*keys_of_first)>;
    std::vector<typename HashTable<K>::FoundRows> others;
    std::vector<K> keys;
    const auto for_missing = [&](const auto& fn) {
      for (size_t u = 0; u < tasks.size(); ++u) {
        if (tasks[u].table != tasks[t].table) continue;
        for (const uint32_t i : rests[u].missing) {
          fn(static_cast<const K*>(tasks[u].keys)[i], &tasks[u].rows[i]);
        }
      }
    };
    for (const PoolTask& task : tasks) {
      if (task.table == tasks[t].table) others.push_back({task.rows, task.bags->nnz()});
    }
    for_missing([&](K key, RowId*) { keys.push_back(key); });
    std::vector<RowId> rows(keys.size(), kNoRow);
    DYNEMB_RETURN_IF_ERROR(
        table.InsertInitial(exec, keys.data(), keys.size(), tick, rows.data(), others));
    size_t j = 0;
    for_missing([&](K, RowId* row) { *row = rows[j++]; });
    return Status();
  });
}

// What is left to do for a task, whose ranges left `parts`.
Rest Joined(const Bags& bags, const std::vector<Rest>& parts) {
  Rest all;
  for (const Rest& part : parts) {
    all.missing.insert(all.missing.end(), part.missing.begin(), part.missing.end());
    all.bags.insert(all.bags.end(), part.bags.begin(), part.bags.end());
  }
  if (bags.order() != nullptr) std::sort(all.missing.begin(), all.missing.end());
  return all;
}

// The number of tasks on this table.
size_t TasksOn(const std::vector<PoolTask>& tasks, const Table* table) {
  return static_cast<size_t>(std::count_if(
      tasks.begin(), tasks.end(), [table](const PoolTask& task) { return task.table == table; }));
}

}  // namespace

Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert) {
  std::vector<size_t> sizes;
  std::vector<size_t> grains;
  if (!insert) {
    // Together: a task must not move the rows of another one to files.
    const auto num_keys = [](const PoolTask& task) { return task.bags->nnz(); };
    DYNEMB_RETURN_IF_ERROR(WarmTasks(exec, tasks, num_keys));
  }
  for (const PoolTask& task : tasks) {
    const KeySpan keys(task.table->options().key_type, task.keys, task.bags->nnz());
    if (insert) task.table->BeginLookup(exec, tick, task.bags->nnz());
    task.table->BringKeys(exec, keys);
    sizes.push_back(task.bags->num_bags());
    grains.push_back(BagGrain(*task.bags));
  }
  // parts[t][begin / grains[t]]: of a range of task t.
  std::vector<std::vector<Rest>> parts(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) parts[t].resize(sizes[t] / grains[t] + 1);
  {
    Phase phase("find and pool");
    ParallelForTasks(exec, sizes, grains, [&](size_t t, size_t begin, size_t end) {
      PoolRange(tasks[t], begin, end, tick, insert, &parts[t][begin / grains[t]]);
    });
  }
  if (!insert) return Status();

  std::vector<Rest> rests(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) rests[t] = Joined(*tasks[t].bags, parts[t]);
  std::vector<Table*> grown;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const PoolTask& task = tasks[t];
    const Rest& rest = rests[t];
    if (rest.missing.empty()) continue;
    // An earlier task on the same table may have inserted some of the missing keys.
    const bool find_again = std::find(grown.begin(), grown.end(), task.table) != grown.end();
    if (task.table->options().admission.rule == Admit::kAll || TasksOn(tasks, task.table) == 1) {
      DYNEMB_RETURN_IF_ERROR(InsertMissing(exec, tasks, t, tick, rest.missing, find_again));
    } else if (!find_again) {
      DYNEMB_RETURN_IF_ERROR(InsertJointly(exec, tasks, t, tick, rests));
    }
    grown.push_back(task.table);
    Phase phase("pool again");
    exec.ParallelFor(rest.bags.size(), grains[t], [&](size_t begin, size_t end) {
      PoolRemembered(task, rest.bags.data() + begin, end - begin);
    });
  }
  return Status();
}

Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& given) {
  Phase phase("weight gradients");
  std::vector<WeightGradientTask> tasks = given;
  // Rows may have become cold since the lookup.
  std::vector<std::vector<RowId>> held(tasks.size());
  DYNEMB_RETURN_IF_ERROR(HoldRowsOfTasks(
      exec, &tasks, [](const WeightGradientTask& task) { return task.bags->nnz(); }, &held));
  WeightGradients(exec, tasks, [](const WeightGradientTask& task, size_t begin, size_t end) {
    DispatchKeys(task.table, task.keys, [&](auto& table, const auto* keys) {
      const RowLayout& layout = table.layout();
      std::vector<char> absent(layout.vector_bytes());
      WeightGradientOfBags(
          task, layout.dtype, layout.dim, begin, end,
          [&](size_t position) -> const char* {
            const RowId row = task.rows[position];
            if (table.Holds(row, keys[position])) return layout.vector(table.RowAt(row));
            if (IsRefused(row)) {
              table.AbsentVector(keys[position], absent.data());
            } else {
              table.InitialVector(keys[position], absent.data());
            }
            return absent.data();
          },
          SkippedRows(table, task.rows));
    });
  });
  return Status();
}

}  // namespace dynemb
