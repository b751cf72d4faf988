#include "cc/lookup/pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cc/lookup/dispatch.h"
#include "cc/lookup/tasks.h"
#include "cc/table/codec.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"

namespace dynemb {
namespace {

// Ids per piece of parallel work.
constexpr size_t kIdGrain = 4096;

// Combines the ids of bags [bag, last_bag), given in bag order. kDim is the dim if it is one of the
// common ones, so that the loops over columns unroll; 0 otherwise.
template <class K, int64_t kDim>
class PoolVisitor {
 public:
  PoolVisitor(const PoolTask& task, const HashTable<K, OneLane>& table, bool insert, size_t bag,
              std::vector<size_t>* put_aside)
      : task_(task),
        table_(table),
        layout_(table.layout()),
        insert_(insert),
        bag_(bag),
        put_aside_(put_aside),
        loaded_(layout_.dim),
        sum_(layout_.dim) {
    StartBag();
  }

  uint64_t hits = 0, misses = 0;

  void Hit(size_t i, RowId row, const char* at) {
    ++hits;
    task_.rows[task_.bags->position(i)] = row;
    Add(i, layout_.vector(at));
  }
  void Miss(size_t i, K key) {
    ++misses;
    task_.rows[task_.bags->position(i)] = kNoRow;
    if (insert_) {
      while (i >= bag_end_) NextBag();
      incomplete_ = true;
      return;
    }
    initial_.resize(layout_.vector_bytes());
    table_.InitialVector(key, initial_.data());
    Add(i, initial_.data());
  }
  // Adds a row found earlier.
  void Add(size_t i, const char* vector) {
    while (i >= bag_end_) NextBag();
    if (incomplete_) return;
    const float* v;
    if (layout_.dtype == DType::kFloat32) {
      v = reinterpret_cast<const float*>(vector);
    } else {
      LoadVector(layout_.dtype, vector, layout_.dim, loaded_.get());
      v = loaded_.get();
    }
    const size_t position = task_.bags->position(i);
    const float w = task_.weights != nullptr ? task_.weights[position] : 1.0f;
    if (task_.combiner == Combiner::kMax) {
      AddMax(position, w, v);
    } else if (count_ == 0) {
      for (int64_t c = 0; c < dim(); ++c) into_[c] = w * v[c];
    } else if (task_.weights == nullptr) {
      for (int64_t c = 0; c < dim(); ++c) into_[c] += v[c];
    } else {
      for (int64_t c = 0; c < dim(); ++c) into_[c] += w * v[c];
    }
    ++count_;
  }
  // Ends every bag before last_bag.
  void Finish(size_t last_bag) {
    while (bag_ < last_bag) NextBag();
  }

 private:
  int64_t dim() const { return kDim != 0 ? kDim : layout_.dim; }
  char* PooledAt(size_t bag) const {
    return static_cast<char*>(task_.pooled) + bag * layout_.vector_bytes();
  }
  int32_t* ArgmaxAt(size_t bag) const { return task_.argmax + bag * static_cast<size_t>(dim()); }

  void StartBag() {
    if (bag_ >= task_.bags->num_bags()) return;
    bag_end_ = task_.bags->end(bag_);
    count_ = 0;
    incomplete_ = false;
    into_ =
        layout_.dtype == DType::kFloat32 ? reinterpret_cast<float*>(PooledAt(bag_)) : sum_.get();
  }

  void NextBag() {
    if (incomplete_) {
      put_aside_->push_back(bag_);
    } else if (count_ == 0) {
      memset(PooledAt(bag_), 0, layout_.vector_bytes());
      if (task_.combiner == Combiner::kMax) std::fill_n(ArgmaxAt(bag_), dim(), -1);
    } else {
      EndBag();
    }
    ++bag_;
    StartBag();
  }

  void EndBag() {
    if (HasScale(task_.combiner)) {
      const float scale = task_.weights == nullptr
                              ? BagScale(task_.combiner, count_)
                              : BagScale(task_.combiner, *task_.bags, task_.weights, bag_);
      if (scale == 0.0f) {
        for (int64_t c = 0; c < dim(); ++c) into_[c] = 0.0f;  // whatever the sum is, NaN too
      } else {
        for (int64_t c = 0; c < dim(); ++c) into_[c] *= scale;
      }
    }
    if (layout_.dtype != DType::kFloat32) {
      StoreVector(layout_.dtype, into_, layout_.dim, PooledAt(bag_));
    }
  }

  void AddMax(size_t position, float w, const float* v) {
    int32_t* argmax = ArgmaxAt(bag_);
    for (int64_t c = 0; c < dim(); ++c) {
      const float value = w * v[c];
      if (count_ != 0 && !(value > into_[c])) continue;
      into_[c] = value;
      argmax[c] = static_cast<int32_t>(position);
    }
  }

  const PoolTask& task_;
  const HashTable<K, OneLane>& table_;
  const RowLayout layout_;
  const bool insert_;
  size_t bag_;
  std::vector<size_t>* put_aside_;
  size_t bag_end_ = 0;
  size_t count_ = 0;
  bool incomplete_ = false;
  float* into_ = nullptr;
  VectorBuffer loaded_;  // a 16-bit vector as float32
  VectorBuffer sum_;     // of a bag of 16-bit vectors
  std::vector<char> initial_;
};

template <class Fn>
auto DispatchDim(int64_t dim, const Fn& fn) {
  switch (dim) {
    case 4:
      return fn(std::integral_constant<int64_t, 4>());
    case 8:
      return fn(std::integral_constant<int64_t, 8>());
    case 16:
      return fn(std::integral_constant<int64_t, 16>());
    case 32:
      return fn(std::integral_constant<int64_t, 32>());
    case 64:
      return fn(std::integral_constant<int64_t, 64>());
    case 128:
      return fn(std::integral_constant<int64_t, 128>());
    default:
      return fn(std::integral_constant<int64_t, 0>());
  }
}

// fn(HashTable&, keys, integral_constant of the dim or 0)
template <class Fn>
void Dispatch(const PoolTask& task, const Fn& fn) {
  DispatchKeys(task.table, task.keys, [&](auto& table, const auto* keys) {
    DispatchDim(table.layout().dim, [&](auto dim) { fn(table, keys, dim); });
  });
}

// Finds and combines the bags [begin, end).
template <class K, int64_t kDim>
DYNEMB_CLONES void PoolBags(const PoolTask& task, const HashTable<K, OneLane>& table, const K* keys,
                            size_t begin, size_t end, Tick tick, bool insert,
                            std::vector<size_t>* put_aside) {
  PoolVisitor<K, kDim> visit(task, table, insert, begin, put_aside);
  OneLane lane;
  const Bags& bags = *task.bags;
  const size_t first = bags.begin(begin);
  const size_t last = bags.end(end - 1);
  if (bags.order() == nullptr) {
    table.FindRange(
        lane, [keys](size_t i) { return keys[i]; }, first, last, tick, visit);
  } else {
    const uint32_t* order = bags.order();
    table.FindRange(
        lane, [keys, order](size_t i) { return keys[order[i]]; }, first, last, tick, visit);
  }
  visit.Finish(end);
  table.CountFinds(visit.hits, visit.misses);
}

void PoolRange(const PoolTask& task, size_t begin, size_t end, Tick tick, bool insert,
               std::vector<size_t>* put_aside) {
  Dispatch(task, [&](auto& table, const auto* keys, auto dim) {
    using K = std::decay_t<decltype(*keys)>;
    PoolBags<K, decltype(dim)::value>(task, table, keys, begin, end, tick, insert, put_aside);
  });
}

// Combines whole bags from the rows remembered in task.rows.
void PoolRemembered(const PoolTask& task, const size_t* bags, size_t n) {
  Dispatch(task, [&](auto& table, const auto* keys, auto dim) {
    using K = std::decay_t<decltype(*keys)>;
    constexpr size_t kAhead = 8;
    for (size_t b = 0; b < n; ++b) {
      PoolVisitor<K, decltype(dim)::value> visit(task, table, false, bags[b], nullptr);
      const size_t end = task.bags->end(bags[b]);
      for (size_t i = task.bags->begin(bags[b]); i < end; ++i) {
        if (i + kAhead < end) {
          __builtin_prefetch(table.RowAt(task.rows[task.bags->position(i + kAhead)]));
        }
        visit.Add(i, table.layout().vector(table.RowAt(task.rows[task.bags->position(i)])));
      }
      visit.Finish(bags[b] + 1);
    }
  });
}

size_t BagGrain(const Bags& bags) {
  if (bags.num_bags() == 0) return 1;
  const size_t ids_per_bag = std::max<size_t>(1, bags.nnz() / bags.num_bags());
  return std::max<size_t>(1, kIdGrain / ids_per_bag);
}

// Notes the rows of positions that had none; not a lookup that stats() counts.
struct FindAgain {
  const size_t* positions;
  RowId* rows;
  void Hit(size_t j, RowId row, const char*) { rows[positions[j]] = row; }
  template <class K>
  void Miss(size_t, K) {}
};

// Gives a row to every key of the task that has none.
Status InsertMissing(Exec& exec, const PoolTask& task, Tick tick, bool find_again) {
  return DispatchKeys(task.table, task.keys, [&](auto& table, const auto* keys) {
    const size_t n = task.bags->nnz();
    if (find_again) {
      std::vector<size_t> missing;
      for (size_t i = 0; i < n; ++i) {
        if (task.rows[i] == kNoRow) missing.push_back(i);
      }
      const auto key_at = [&missing, keys](size_t j) { return keys[missing[j]]; };
      exec.ParallelFor(missing.size(), kIdGrain, [&](size_t begin, size_t end) {
        FindAgain visit{missing.data(), task.rows};
        OneLane lane;
        table.FindRange(lane, key_at, begin, end, tick, visit);
      });
    }
    return table.InsertInitial(exec, keys, n, tick, task.rows);
  });
}

float Dot(const float* a, const float* b, int64_t dim) {
  float sum = 0.0f;
  for (int64_t c = 0; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

// The weight gradients of one bag.
template <class K>
void WeightGradientOfBag(const WeightGradientTask& task, const HashTable<K, OneLane>& table,
                         const K* keys, size_t bag, float* upstream, float* vector, char* initial) {
  const RowLayout& layout = table.layout();
  const Bags& bags = *task.bags;
  LoadVector(layout.dtype, static_cast<const char*>(task.upstream) + bag * layout.vector_bytes(),
             layout.dim, upstream);
  const float scale = BagScale(task.combiner, bags, task.weights, bag);
  float pooled_dot = 0.0f;
  if (HasScale(task.combiner)) {
    LoadVector(layout.dtype, static_cast<const char*>(task.pooled) + bag * layout.vector_bytes(),
               layout.dim, vector);
    pooled_dot = Dot(upstream, vector, layout.dim);
  }
  for (size_t i = bags.begin(bag); i < bags.end(bag); ++i) {
    const size_t position = bags.position(i);
    const K key = keys[position];
    const RowId row = task.rows[position];
    if (table.Holds(row, key)) {
      LoadVector(layout.dtype, layout.vector(table.RowAt(row)), layout.dim, vector);
    } else {
      table.InitialVector(key, initial);
      LoadVector(layout.dtype, initial, layout.dim, vector);
    }
    float gradient = 0.0f;
    switch (task.combiner) {
      case Combiner::kSum:
        gradient = Dot(upstream, vector, layout.dim);
        break;
      case Combiner::kMean:  // pooled = Σ w v / Σ w
        gradient = (Dot(upstream, vector, layout.dim) - pooled_dot) * scale;
        break;
      case Combiner::kSqrtn:  // pooled = Σ w v / n, n = sqrt(Σ w²)
        gradient =
            (Dot(upstream, vector, layout.dim) - pooled_dot * task.weights[position] * scale) *
            scale;
        break;
      case Combiner::kMax: {
        const int32_t* argmax = task.argmax + bag * static_cast<size_t>(layout.dim);
        for (int64_t c = 0; c < layout.dim; ++c) {
          if (argmax[c] == static_cast<int32_t>(position)) gradient += upstream[c] * vector[c];
        }
        break;
      }
    }
    task.gradient[position] = gradient;
  }
}

}  // namespace

Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert) {
  std::vector<size_t> sizes;
  std::vector<size_t> grains;
  for (const PoolTask& task : tasks) {
    if (insert) task.table->BeginBatch(tick, task.bags->nnz());
    sizes.push_back(task.bags->num_bags());
    grains.push_back(BagGrain(*task.bags));
  }
  // A piece that puts bags aside is found again by where it starts.
  std::vector<std::vector<std::vector<size_t>>> put_aside(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) put_aside[t].resize(sizes[t] / grains[t] + 1);
  {
    Phase phase("find and pool");
    ParallelForTasks(exec, sizes, grains, [&](size_t t, size_t begin, size_t end) {
      PoolRange(tasks[t], begin, end, tick, insert, &put_aside[t][begin / grains[t]]);
    });
  }
  if (!insert) return Status();

  std::vector<Table*> grown;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const PoolTask& task = tasks[t];
    std::vector<size_t> again;
    for (const auto& bags : put_aside[t]) again.insert(again.end(), bags.begin(), bags.end());
    if (again.empty()) continue;
    // What an earlier task on the same table has inserted is not missing any more.
    const bool find_again = std::find(grown.begin(), grown.end(), task.table) != grown.end();
    DYNEMB_RETURN_IF_ERROR(InsertMissing(exec, task, tick, find_again));
    grown.push_back(task.table);
    Phase phase("pool again");
    exec.ParallelFor(again.size(), grains[t], [&](size_t begin, size_t end) {
      PoolRemembered(task, again.data() + begin, end - begin);
    });
  }
  return Status();
}

void WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks) {
  Phase phase("weight gradients");
  std::vector<size_t> sizes;
  std::vector<size_t> grains;
  for (const WeightGradientTask& task : tasks) {
    sizes.push_back(task.bags->num_bags());
    grains.push_back(BagGrain(*task.bags));
  }
  ParallelForTasks(exec, sizes, grains, [&](size_t t, size_t begin, size_t end) {
    const WeightGradientTask& task = tasks[t];
    DispatchKeys(task.table, task.keys, [&](auto& table, const auto* keys) {
      const RowLayout& layout = table.layout();
      VectorBuffer upstream(layout.dim);
      VectorBuffer vector(layout.dim);
      std::vector<char> initial(layout.vector_bytes());
      for (size_t bag = begin; bag < end; ++bag) {
        WeightGradientOfBag(task, table, keys, bag, upstream.get(), vector.get(), initial.data());
      }
    });
  });
}

}  // namespace dynemb
