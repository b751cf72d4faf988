#include "cc/lookup/gather.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "cc/lookup/tasks.h"
#include "cc/table/phase.h"
#include "cc/table/portability.h"
#include "cc/table/row_prefetch.h"
#include "cc/table/scratch.h"
#include "cc/table/staged.h"

namespace dynemb {
namespace {

constexpr size_t kIndexGrain = 65536;
// Floats in a range of sums: the sums and their inputs fit L2.
constexpr size_t kRangeFloats = 32768;

template <class Task>
DYNEMB_INLINE const char* VectorAt(const Task& task, size_t position, size_t vector_bytes) {
  const uint32_t row = task.index[position];
  return task.rows != nullptr ? static_cast<const char*>(task.rows[row])
                              : static_cast<const char*>(task.vectors) + row * vector_bytes;
}

template <int64_t kDim>
DYNEMB_CLONES void PoolBags(const GatherTask& task, size_t begin, size_t end) {
  BagCombiner<kDim> combine(task, task.dtype, task.dim, begin);
  const Bags& bags = *task.bags;
  const size_t vector_bytes = static_cast<size_t>(task.dim) * SizeOf(task.dtype);
  const size_t last = bags.end(end - 1);
  const size_t first = bags.begin(begin);
  const RowPrefetch prefetch(nullptr, /*stride=*/1, vector_bytes);  // vectors may begin anywhere
  const auto vector_at = [&](size_t i) {
    return VectorAt(task, bags.position(first + i), vector_bytes);
  };
  RunStaged(
      last - first, StagedBlock(prefetch.lines()), [&](size_t i) { prefetch(vector_at(i)); },
      [&](size_t i) { combine.Add(first + i, vector_at(i)); });
  combine.Finish(end);
}

// log2 of the number of rows in a range.
int LogRangeRows(int64_t dim, size_t n) {
  int log = 6;
  while ((size_t{2} << log) * static_cast<size_t>(dim) <= kRangeFloats ||
         n >> log > Split<uint32_t>::kMaxPartitions - 1) {
    ++log;
  }
  return log;
}

size_t NumRanges(size_t n, int log) {
  return std::max<size_t>(1, (n + (size_t{1} << log) - 1) >> log);
}

// Adds the number of the table to the message of an error.
Status WithTable(size_t t, const Status& status) {
  if (status.ok()) return status;
  return Status(status.code(), "table " + std::to_string(t) + ": " + status.message());
}

Status CheckTask(const GatherGradient::Task& task) {
  for (const GatherGradient::Feature& feature : task.features) {
    DYNEMB_RETURN_IF_ERROR(Upstream::Check(feature));
    if (feature.dim != task.dim) {
      return InvalidArgument("dim is " + std::to_string(feature.dim) + ", expected " +
                             std::to_string(task.dim));
    }
    if (feature.index == nullptr && feature.bags->nnz() > 0) return InvalidArgument("no index");
  }
  if (task.outputs.empty()) return {};
  size_t rows = 0;
  for (const GatherGradient::Output& output : task.outputs) rows += output.rows;
  if (rows == task.n) return {};
  return InvalidArgument("the outputs have " + std::to_string(rows) + " rows, expected " +
                         std::to_string(task.n));
}

}  // namespace

Status CheckIndex(Exec& exec, const uint32_t* index, size_t nnz, size_t n) {
  std::atomic<uint32_t> largest{0};
  exec.ParallelFor(nnz, kIndexGrain, [&](size_t begin, size_t end) {
    uint32_t most = 0;
    for (size_t i = begin; i < end; ++i) most = std::max(most, index[i]);
    // Relaxed: read after ParallelFor has joined.
    uint32_t seen = largest.load(std::memory_order_relaxed);
    while (seen < most && !largest.compare_exchange_weak(seen, most, std::memory_order_relaxed)) {
    }
  });
  if (nnz == 0 || largest.load(std::memory_order_relaxed) < n) return {};
  return InvalidArgument("index holds " + std::to_string(largest.load()) + ", but there are " +
                         std::to_string(n) + " rows");
}

void GatherPool(Exec& exec, const std::vector<GatherTask>& tasks) {
  Phase phase("pool received rows");
  std::vector<size_t> sizes;
  std::vector<size_t> grains;
  for (const GatherTask& task : tasks) {
    sizes.push_back(task.bags->num_bags());
    grains.push_back(BagGrain(*task.bags));
  }
  ParallelForTasks(exec, sizes, grains, [&](size_t t, size_t begin, size_t end) {
    DispatchDim(tasks[t].dim,
                [&](auto dim) { PoolBags<decltype(dim)::value>(tasks[t], begin, end); });
  });
}

void GatherWeightGradient(Exec& exec, const std::vector<GatherWeightTask>& tasks) {
  Phase phase("weight gradients");
  WeightGradients(exec, tasks, [](const GatherWeightTask& task, size_t begin, size_t end) {
    const size_t vector_bytes = static_cast<size_t>(task.dim) * SizeOf(task.dtype);
    WeightGradientOfBags(task, task.dtype, task.dim, begin, end,
                         [&](size_t position) { return VectorAt(task, position, vector_bytes); });
  });
}

Status GatherGradient::Check(const std::vector<Task>& tasks) {
  for (size_t t = 0; t < tasks.size(); ++t) {
    DYNEMB_RETURN_IF_ERROR(WithTable(t, CheckTask(tasks[t])));
  }
  return {};
}

Status GatherGradient::Run(Exec& exec, const std::vector<Task>& tasks) {
  Phase phase("sum gradients");
  DYNEMB_RETURN_IF_ERROR(Check(tasks));
  std::vector<size_t> first_feature;
  size_t num_features = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    first_feature.push_back(num_features);
    num_features += tasks[t].features.size();
    for (const Feature& feature : tasks[t].features) {
      DYNEMB_RETURN_IF_ERROR(
          WithTable(t, CheckIndex(exec, feature.index, feature.bags->nnz(), tasks[t].n)));
    }
  }
  if (prepared_.size() < num_features) prepared_.resize(num_features);

  std::vector<size_t> sizes(num_features), task_of(num_features);
  for (size_t t = 0; t < tasks.size(); ++t) {
    for (size_t f = 0; f < tasks[t].features.size(); ++f) {
      task_of[first_feature[t] + f] = t;
      sizes[first_feature[t] + f] = tasks[t].features[f].bags->nnz();
    }
  }
  ForEachTask(exec, sizes, [&](Exec& e, size_t i) {
    const Task& task = tasks[task_of[i]];
    const Feature& feature = task.features[i - first_feature[task_of[i]]];
    const int log = LogRangeRows(task.dim, task.n);
    prepared_[i].nnz = sizes[i];
    prepared_[i].upstream.Prepare(e, feature);
    prepared_[i].split.Run(e, feature.index, sizes[i], NumRanges(task.n, log),
                           [log](uint32_t index, size_t) { return index >> log; });
  });

  std::vector<size_t> ranges;
  for (const Task& task : tasks) {
    ranges.push_back(task.n == 0 ? 0 : NumRanges(task.n, LogRangeRows(task.dim, task.n)));
  }
  // Pointers, because the elements of a deque are not contiguous.
  std::vector<std::vector<const Prepared*>> of_task(tasks.size());
  for (size_t i = 0; i < num_features; ++i) of_task[task_of[i]].push_back(&prepared_[i]);
  ParallelForTasks(exec, ranges, std::vector<size_t>(tasks.size(), 1),
                   [&](size_t t, size_t begin, size_t end) {
                     for (size_t s = begin; s < end; ++s) PlaceRange(tasks[t], of_task[t], s);
                   });
  return {};
}

void GatherGradient::Shrink() {
  RenewLarge(&prepared_, [](const Prepared& p) { return p.nnz * sizeof(uint64_t); });
}

void GatherGradient::PlaceRange(const Task& task, const std::vector<const Prepared*>& features,
                                size_t range) const {
  const int log = LogRangeRows(task.dim, task.n);
  const auto dim = static_cast<size_t>(task.dim);
  const size_t first = range << log;
  const size_t last = std::min(first + (size_t{1} << log), task.n);
  if (task.outputs.empty()) {
    SumRows(task, features, range, first, last, task.sums + first * dim);
    return;
  }
  size_t begin = 0;  // of the output
  for (const Output& output : task.outputs) {
    const size_t from = std::max(begin, first), to = std::min(begin + output.rows, last);
    if (from < to) {
      SumRows(task, features, range, from, to, output.sums + (from - begin) * dim);
    }
    begin += output.rows;
  }
}

void GatherGradient::SumRows(const Task& task, const std::vector<const Prepared*>& features,
                             size_t range, size_t begin, size_t end, float* sums) const {
  const int log = LogRangeRows(task.dim, task.n);
  const bool is_whole = begin == range << log && end == std::min((range + 1) << log, task.n);
  std::vector<bool> has_term(end - begin);
  uint32_t local[Upstream::kChunk];
  uint32_t positions[Upstream::kChunk];
  bool is_first[Upstream::kChunk];
  for (const Prepared* feature : features) {
    const Split<uint32_t>& split = feature->split;
    const size_t last = split.end(range);
    for (size_t e = split.begin(range); e < last; e += Upstream::kChunk) {
      const size_t num_ids = std::min(last - e, Upstream::kChunk);
      size_t n = 0;
      for (size_t j = 0; j < num_ids; ++j) {
        const uint32_t row = split.keys()[e + j];
        if (!is_whole && (row < begin || row >= end)) continue;
        positions[n] = split.positions()[e + j];
        local[n] = row - static_cast<uint32_t>(begin);
        is_first[n] = !has_term[local[n]];
        has_term[local[n]] = true;
        ++n;
      }
      feature->upstream.Add(positions, local, is_first, n, sums);
    }
  }
  for (size_t row = 0; row < end - begin; ++row) {
    if (!has_term[row]) {
      std::fill_n(sums + row * static_cast<size_t>(task.dim), task.dim, 0.0f);
    }
  }
}

}  // namespace dynemb
