#include "cc/lookup/backward.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "cc/lookup/tasks.h"
#include "cc/table/phase.h"
#include "cc/table/scratch.h"

namespace dynemb {
namespace {

// The least number of floats that a unit of Write adds up, except the last unit of a task: 10 to 20
// us of work.
constexpr size_t kUnitFloats = 65536;
// The least span of the vectors of a task for which partitions are ranges of rows. Steps of two
// threads on an AMD EPYC, dim 16, Adagrad: 0.84 of the time with one table of 26 million rows, 0.99
// with 8.7 million, and 1.03 to 1.10 with 1 million, whose translations fit the caches anyway.
constexpr uint64_t kLeastSpanFloats = uint64_t{1} << 27;

Status CheckTask(const BackwardTask& t) {
  DYNEMB_RETURN_IF_ERROR(Upstream::Check(t));
  if (t.bags->nnz() != 0 && t.keys == nullptr) {
    return InvalidArgument("keys must be given");
  }
  return {};
}

}  // namespace

Status Backward::Check(const BackwardTask* tasks, size_t num_tasks) {
  for (size_t t = 0; t < num_tasks; ++t) {
    const Status status = CheckTask(tasks[t]);
    if (!status.ok()) {
      return Status(status.code(), "table " + std::to_string(t) + ": " + status.message());
    }
  }
  return {};
}

Status Backward::Prepare(Exec& exec, const BackwardTask* tasks, size_t num_tasks) {
  Phase phase("find unique ids");
  num_tasks_ = 0;
  units_.clear();
  DYNEMB_RETURN_IF_ERROR(Check(tasks, num_tasks));
  std::vector<size_t> sizes(num_tasks);
  for (size_t t = 0; t < num_tasks; ++t) sizes[t] = tasks[t].bags->nnz();
  if (prepared_.size() < num_tasks) prepared_.resize(num_tasks);
  ForEachTask(exec, sizes, [&](Exec& e, size_t t) {
    prepared_[t].task = tasks[t];
    PrepareTask(e, &prepared_[t]);
  });
  num_tasks_ = num_tasks;
  MakeUnits();
  return {};
}

void Backward::Shrink() {
  RenewLarge(&prepared_, [](const Prepared& p) { return p.dedup.num_keys() * sizeof(uint64_t); });
  RenewLarge(&parts_, [](const PartScratch& part) { return part.sums.bytes(); });
}

void Backward::PrepareTask(Exec& exec, Prepared* prepared) {
  const BackwardTask& task = prepared->task;
  const size_t nnz = task.bags->nnz();
  // Bags has checked that nnz is not too large for Dedup.
  static_assert(Bags::kMaxSize <= Dedup<uint64_t>::kMaxKeys, "");
  const auto run = [&](const auto* keys) {
    return task.rows == nullptr
               ? prepared->dedup.Run(exec, keys, nnz)
               : prepared->dedup.RunByRow(exec, keys, task.rows, nnz, kLeastSpanFloats / task.dim);
  };
  const Status status = SizeOf(task.key_type) == 8 ? run(static_cast<const uint64_t*>(task.keys))
                                                   : run(static_cast<const uint32_t*>(task.keys));
  (void)status;
  prepared->upstream.Prepare(exec, task);
}

size_t Backward::num_unique(size_t t) const { return prepared_[t].dedup.num_unique(); }

void Backward::MakeUnits() {
  units_.clear();
  for (uint32_t t = 0; t < num_tasks_; ++t) {
    const Prepared& p = prepared_[t];
    const size_t partitions = p.dedup.num_partitions();
    size_t begin = 0, floats = 0;
    for (size_t i = 0; i < partitions; ++i) {
      const size_t entries =
          p.dedup.Visit([&](const auto& dedup) { return dedup.partition(i).num_entries; });
      floats += entries * p.task.dim;
      if (floats < kUnitFloats && i + 1 < partitions) continue;
      units_.push_back({t, static_cast<uint32_t>(begin), static_cast<uint32_t>(i + 1)});
      begin = i + 1;
      floats = 0;
    }
  }
}

void Backward::Write(Exec& exec, const BackwardOutput* outputs) const {
  Phase phase("sum gradients");
  exec.ParallelFor(units_.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Unit& unit = units_[i];
      const Prepared& prepared = prepared_[unit.task];
      prepared.dedup.Visit([&](const auto& dedup) {
        for (size_t p = unit.partition_begin; p < unit.partition_end; ++p) {
          WritePartition(prepared, dedup, p, outputs[unit.task], dedup.partition(p).unique_begin);
        }
      });
    }
  });
}

void Backward::PrepareConsume(const Exec& exec) {
  size_t most_keys = 0, most_floats = 0;
  for (size_t t = 0; t < num_tasks_; ++t) {
    prepared_[t].dedup.Visit([&](const auto& dedup) {
      for (size_t p = 0; p < dedup.num_partitions(); ++p) {
        const size_t n = dedup.partition(p).num_unique;
        most_keys = std::max(most_keys, n);
        most_floats = std::max(most_floats, n * static_cast<size_t>(prepared_[t].task.dim));
      }
    });
  }
  const size_t threads = std::min(exec.parallelism(), units_.size());
  if (parts_.size() < threads) parts_.resize(threads);
  for (size_t i = 0; i < threads; ++i) {
    parts_[i].keys.Resize(most_keys);
    parts_[i].rows.Resize(most_keys);
    parts_[i].sums.Resize(most_floats);
  }
}

void Backward::Consume(Exec& exec, FunctionRef<void(const Part&)> consume) {
  // One range per thread, so that each has its own scratch.
  const size_t threads = std::min(exec.parallelism(), units_.size());
  std::atomic<size_t> next{0};
  exec.ParallelFor(threads, 1, [&](size_t begin, size_t end) {
    for (size_t thread = begin; thread < end; ++thread) {
      const PartScratch& scratch = parts_[thread];
      Part part;
      part.keys = scratch.keys.get();
      part.rows = scratch.rows.get();
      part.sums = scratch.sums.get();
      // Relaxed: the counter only has to hand out each unit once.
      size_t i;
      while ((i = next.fetch_add(1, std::memory_order_relaxed)) < units_.size()) {
        const Unit& unit = units_[i];
        const Prepared& prepared = prepared_[unit.task];
        part.task = unit.task;
        prepared.dedup.Visit([&](const auto& dedup) {
          for (size_t p = unit.partition_begin; p < unit.partition_end; ++p) {
            WritePartition(prepared, dedup, p, part, 0);
            part.n = dedup.partition(p).num_unique;
            consume(part);
          }
        });
      }
    }
  });
}

template <typename K>
void Backward::WritePartition(const Prepared& prepared, const Dedup<K>& dedup, size_t partition,
                              const BackwardOutput& out, size_t at) const {
  const BackwardTask& task = prepared.task;
  const auto p = dedup.partition(partition);
  bool is_first[Upstream::kChunk];
  std::copy(p.unique, p.unique + p.num_unique, static_cast<K*>(out.keys) + at);
  if (task.rows != nullptr) {
    // Overwrites the row of the next key until the first occurrence of that key is reached, so
    // there is no branch to mispredict.
    RowId* const rows = out.rows + at;
    for (size_t e = 0, u = 0; u < p.num_unique; ++e) {
      rows[u] = task.rows[p.positions[e]];
      u += p.local[e] == u;
    }
  }
  float* const sums = out.sums + at * task.dim;
  uint32_t num_sums = 0;
  for (size_t e = 0; e < p.num_entries; e += Upstream::kChunk) {
    const size_t n = std::min(p.num_entries - e, Upstream::kChunk);
    for (size_t j = 0; j < n; ++j) {
      is_first[j] = p.local[e + j] == num_sums;
      num_sums += is_first[j];
    }
    prepared.upstream.Add(p.positions + e, p.local + e, is_first, n, sums);
  }
}

}  // namespace dynemb
