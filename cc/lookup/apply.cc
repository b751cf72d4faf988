#include "cc/lookup/apply.h"

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "cc/lookup/backward.h"
#include "cc/lookup/held_rows.h"
#include "cc/lookup/tasks.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"
#include "cc/table/scratch.h"

namespace dynemb {
namespace {

constexpr size_t kRowGrain = 1024;

// Distinct keys, their rows and their gradients.
struct Sums {
  Buffer<uint64_t> keys;  // room for either key width
  Buffer<RowId> rows;
  Buffer<float> gradients;

  size_t most_bytes() const { return std::max(keys.bytes(), gradients.bytes()); }
};

// The arrays of a task without row ids: the row ids and, if the keys may repeat, the distinct keys
// and their gradients.
struct Distinct : Sums {
  Backward backward;
};

struct ApplyScratch {
  std::deque<Distinct> tasks;  // only grows
  void Shrink() {
    // The arrays of `backward` have the same lengths.
    RenewLarge(&tasks, [](const Distinct& d) { return d.most_bytes(); });
  }
};

struct PooledScratch {
  Backward backward;
  std::deque<Sums> tasks;  // only grows
  void Shrink() {
    backward.Shrink();
    RenewLarge(&tasks, [](const Sums& sums) { return sums.most_bytes(); });
  }
};

struct Round {
  std::vector<size_t> tasks;  // of different tables
  TaskLoop loop;
};

void FindRows(Exec& exec, Tick tick, ApplyTask* task, Distinct* distinct) {
  RowId* const rows = distinct->rows.Resize(task->n);
  task->table->Find(exec, {task->table->options().key_type, task->keys, task->n}, tick, rows);
  task->rows = rows;
}

Status MakeDistinct(Exec& exec, ApplyTask* task, Distinct* distinct) {
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
  DYNEMB_RETURN_IF_ERROR(distinct->backward.Prepare(exec, &sum, 1));
  task->n = distinct->backward.num_unique(0);
  BackwardOutput out;
  out.keys = distinct->keys.Resize(task->n);
  out.sums = distinct->gradients.Resize(task->n * static_cast<size_t>(options.dim));
  distinct->backward.Write(exec, &out);
  task->keys = out.keys;
  task->gradients = out.sums;
  return Status();
}

}  // namespace

Status CheckStates(const std::vector<ApplyTask>& tasks, const OptimizerStep& step) {
  const auto spec_of = [&step](const ApplyTask& task) {
    return StateSpec{step.state, StateWidths(step.kind, step.flags, task.table->options().dim),
                     step.inits};
  };
  for (const ApplyTask& task : tasks) {
    DYNEMB_RETURN_IF_ERROR(task.table->CheckState(spec_of(task), step.owner));
  }
  for (const ApplyTask& task : tasks) task.table->OwnState(spec_of(task), step.owner);
  return Status();
}

Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step,
             Tick tick) {
  DYNEMB_RETURN_IF_ERROR(CheckStates(tasks, step));
  std::vector<RowOptimizer> optimizers;
  std::vector<Table*> tables;
  for (const ApplyTask& task : tasks) {
    optimizers.emplace_back(step.kind, step.flags, step.hyper, task.table->options().dim);
    if (std::find(tables.begin(), tables.end(), task.table) == tables.end()) {
      tables.push_back(task.table);
    }
  }
  std::vector<ApplyTask> distinct = tasks;
  std::vector<std::vector<RowId>> held(tasks.size());
  const SharedScratch<ApplyScratch> scratch;
  if (scratch->tasks.size() < tasks.size()) scratch->tasks.resize(tasks.size());
  std::vector<size_t> sizes;
  for (size_t t = 0; t < tasks.size(); ++t) {
    distinct[t].table->BeginBatch(exec, tick, distinct[t].n);
    if (distinct[t].rows == nullptr) {
      if (!distinct[t].distinct) {
        DYNEMB_RETURN_IF_ERROR(MakeDistinct(exec, &distinct[t], &scratch->tasks[t]));
      }
      FindRows(exec, tick, &distinct[t], &scratch->tasks[t]);
    }
    sizes.push_back(distinct[t].n);
  }
  DYNEMB_RETURN_IF_ERROR(HoldRowsOfTasks(
      exec, &distinct, [](const ApplyTask& task) { return task.n; }, &held));
  // Two tasks may have the same table, and then the same row. The tasks of one table therefore run
  // one after another, in rounds. All rounds are created before the first one changes a row.
  std::vector<Round> rounds;
  std::vector<bool> done(tasks.size());
  for (size_t left = tasks.size(); left > 0;) {
    std::vector<Table*> in_round;
    std::vector<size_t> round, round_sizes;
    for (size_t t = 0; t < tasks.size(); ++t) {
      Table* table = distinct[t].table;
      if (done[t] || std::find(in_round.begin(), in_round.end(), table) != in_round.end()) continue;
      in_round.push_back(table);
      round.push_back(t);
      round_sizes.push_back(sizes[t]);
      done[t] = true;
      --left;
    }
    const std::vector<size_t> grains(round.size(), kRowGrain);
    rounds.push_back({std::move(round), TaskLoop(exec, round_sizes, grains)});
  }
  for (Table* table : tables) {
    DYNEMB_RETURN_IF_ERROR(table->BeginStep(exec, step.flags, step.hyper, tick));
  }
  for (size_t number = 0; number < rounds.size(); ++number) {
    // Each task of this round has `number` earlier tasks for its table.
    const uint64_t rounding = RoundingStep(Update::kOptimizer, step.iteration, number);
    const std::vector<size_t>& round = rounds[number].tasks;
    Phase phase("update rows");
    rounds[number].loop.Run(exec, [&](size_t r, size_t begin, size_t end) {
      const ApplyTask& task = distinct[round[r]];
      const KeySpan keys(task.table->options().key_type, task.keys, task.n);
      task.table->ApplyRange(exec, optimizers[round[r]], keys, task.rows, task.gradients, begin,
                             end, rounding, tick);
    });
  }
  for (Table* table : tables) table->EndStep(exec, step.hyper, step.iteration, tick);
  return Status();
}

Status CheckApplyPooled(const std::vector<ApplyPooledTask>& tasks) {
  const std::vector<BackwardTask> gradients(tasks.begin(), tasks.end());
  DYNEMB_RETURN_IF_ERROR(Backward::Check(gradients.data(), gradients.size()));
  std::vector<const Table*> tables;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const std::string name =
        "task " + std::to_string(t) + ", of table '" + tasks[t].table->options().name + "', ";
    if (tasks[t].dim != tasks[t].table->options().dim) {
      return InvalidArgument(name + "has gradients of " + std::to_string(tasks[t].dim) +
                             " columns, but the table has " +
                             std::to_string(tasks[t].table->options().dim));
    }
    if (tasks[t].rows == nullptr && tasks[t].bags->nnz() != 0) {
      return InvalidArgument(name + "has no row ids");
    }
    if (std::find(tables.begin(), tables.end(), tasks[t].table) != tables.end()) {
      return InvalidArgument(name + "is not the first task of this table");
    }
    tables.push_back(tasks[t].table);
  }
  return Status();
}

namespace {

// Tables with cold rows: the rows of all tasks are held in memory before the first one is stepped,
// so all sums are written first.
Status ApplyWritten(Exec& exec, const std::vector<ApplyPooledTask>& tasks,
                    const OptimizerStep& step, Tick tick, PooledScratch* scratch) {
  if (scratch->tasks.size() < tasks.size()) scratch->tasks.resize(tasks.size());
  std::vector<BackwardOutput> outputs(tasks.size());
  std::vector<ApplyTask> applies(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    Sums& sums = scratch->tasks[t];
    ApplyTask& apply = applies[t];
    apply.table = tasks[t].table;
    apply.n = scratch->backward.num_unique(t);
    outputs[t].keys = sums.keys.Resize(apply.n);
    outputs[t].rows = sums.rows.Resize(apply.n);
    outputs[t].sums = sums.gradients.Resize(apply.n * static_cast<size_t>(tasks[t].dim));
    apply.keys = outputs[t].keys;
    apply.rows = outputs[t].rows;
    apply.gradients = outputs[t].sums;
    apply.distinct = true;
  }
  scratch->backward.Write(exec, outputs.data());
  return Apply(exec, applies, step, tick);
}

}  // namespace

Status ApplyPooled(Exec& exec, const std::vector<ApplyPooledTask>& tasks, const OptimizerStep& step,
                   Tick tick) {
  DYNEMB_RETURN_IF_ERROR(CheckApplyPooled(tasks));
  const std::vector<BackwardTask> gradients(tasks.begin(), tasks.end());
  std::vector<ApplyTask> applies(tasks.size());
  std::vector<RowOptimizer> optimizers;
  bool any_cold = false;
  for (size_t t = 0; t < tasks.size(); ++t) {
    applies[t].table = tasks[t].table;
    optimizers.emplace_back(step.kind, step.flags, step.hyper, tasks[t].dim);
    any_cold |= tasks[t].table->has_cold_rows();
  }
  DYNEMB_RETURN_IF_ERROR(CheckStates(applies, step));
  const SharedScratch<PooledScratch> scratch;
  Backward& backward = scratch->backward;
  DYNEMB_RETURN_IF_ERROR(backward.Prepare(exec, gradients.data(), gradients.size()));
  if (any_cold) return ApplyWritten(exec, tasks, step, tick, scratch.get());

  backward.PrepareConsume(exec);
  for (size_t t = 0; t < tasks.size(); ++t) {
    tasks[t].table->BeginBatch(exec, tick, backward.num_unique(t));
  }
  // From here on, nothing but BeginStep fails.
  for (const ApplyPooledTask& task : tasks) {
    DYNEMB_RETURN_IF_ERROR(task.table->BeginStep(exec, step.flags, step.hyper, tick));
  }
  const uint64_t rounding = RoundingStep(Update::kOptimizer, step.iteration, 0);
  {
    Phase phase("sum gradients and update rows");
    backward.Consume(exec, [&](const Backward::Part& part) {
      Table& table = *tasks[part.task].table;
      const KeySpan keys(table.options().key_type, part.keys, part.n);
      table.ApplyRange(exec, optimizers[part.task], keys, part.rows, part.sums, 0, part.n, rounding,
                       tick);
    });
  }
  for (const ApplyPooledTask& task : tasks) {
    task.table->EndStep(exec, step.hyper, step.iteration, tick);
  }
  return Status();
}

}  // namespace dynemb
