#include "cc/lookup/apply.h"

#include <algorithm>
#include <string>

#include "cc/lookup/backward.h"
#include "cc/lookup/tasks.h"

namespace dynemb {
namespace {

constexpr size_t kRowGrain = 1024;

// A task whose keys may repeat, made distinct, with the rows found.
struct Distinct {
  std::vector<char> keys;
  std::vector<RowId> rows;
  std::vector<float> gradients;
};

Status MakeDistinct(Exec& exec, Tick tick, ApplyTask* task, Distinct* made) {
  const TableOptions& options = task->table->options();
  Bags bags;
  const auto n = static_cast<int64_t>(task->n);
  DYNEMB_RETURN_IF_ERROR(bags.InitUniform(1, n, n));
  BackwardTask sum;
  sum.key_type = options.key_type;
  sum.keys = task->keys;
  sum.bags = &bags;
  sum.upstream = task->gradients;
  sum.dim = options.dim;
  Backward backward;
  DYNEMB_RETURN_IF_ERROR(backward.Prepare(exec, &sum, 1));
  task->n = backward.num_unique(0);
  made->keys.resize(task->n * SizeOf(options.key_type));
  made->gradients.resize(task->n * static_cast<size_t>(options.dim));
  made->rows.resize(task->n);
  BackwardOutput out;
  out.keys = made->keys.data();
  out.sums = made->gradients.data();
  backward.Write(exec, &out);
  task->table->Find(exec, made->keys.data(), task->n, tick, made->rows.data());
  task->keys = made->keys.data();
  task->rows = made->rows.data();
  task->gradients = made->gradients.data();
  return Status();
}

}  // namespace

Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, OptimizerKind kind,
             OptimizerFlags flags, const Hyper& hyper, Tick tick) {
  std::vector<RowOptimizer> optimizers;
  for (const ApplyTask& task : tasks) {
    const std::vector<int64_t> widths = StateWidths(kind, flags, task.table->options().dim);
    if (widths != task.table->state_spec().widths) {
      return FailedPrecondition("table '" + task.table->options().name +
                                "' has no state for this optimizer: its state is of '" +
                                task.table->state_spec().optimizer + "'");
    }
    optimizers.emplace_back(kind, flags, hyper, task.table->options().dim);
  }
  std::vector<ApplyTask> distinct = tasks;
  std::vector<Distinct> made(tasks.size());
  std::vector<size_t> sizes;
  for (size_t t = 0; t < tasks.size(); ++t) {
    distinct[t].table->BeginBatch(tick, distinct[t].n);
    if (distinct[t].rows == nullptr) {
      DYNEMB_RETURN_IF_ERROR(MakeDistinct(exec, tick, &distinct[t], &made[t]));
    }
    sizes.push_back(distinct[t].n);
  }
  // Two tasks may name one table, and then one row: tasks of one table run one after the other.
  std::vector<bool> done(tasks.size());
  for (size_t left = tasks.size(); left > 0;) {
    std::vector<Table*> in_round;
    std::vector<size_t> round;
    for (size_t t = 0; t < tasks.size(); ++t) {
      Table* table = distinct[t].table;
      if (done[t] || std::find(in_round.begin(), in_round.end(), table) != in_round.end()) continue;
      in_round.push_back(table);
      round.push_back(t);
      done[t] = true;
      --left;
    }
    std::vector<size_t> round_sizes;
    for (size_t t : round) round_sizes.push_back(sizes[t]);
    ParallelForTasks(exec, round_sizes, std::vector<size_t>(round.size(), kRowGrain),
                     [&](size_t r, size_t begin, size_t end) {
                       const ApplyTask& task = distinct[round[r]];
                       task.table->ApplyRange(optimizers[round[r]], task.keys, task.rows,
                                              task.gradients, begin, end, tick);
                     });
  }
  return Status();
}

}  // namespace dynemb
