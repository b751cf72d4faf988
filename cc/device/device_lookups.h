// DeviceLookups: Lookups (cc/lookup/lookups.h) over the tables of one device. The number of
// launches does not grow with the number of tables.
//
// The ids of all tasks become one batch (kernels_lookup.h), in which the ids of a table are
// consecutive. A key that two tasks look up in the same table is therefore inserted once. A launch
// over the batch, or over all bags, finds the table or task of each item from the item's number
// (TableViews, Parts). The gradients of two tasks for the same table are applied one after the
// other.
//
// Only SumGradients waits for the device, because it returns a number, ApplyPooled where it needs
// SumGradients, and DeviceTable where it has to (device_table.h).
#ifndef DYNEMB_DEVICE_DEVICE_LOOKUPS_H_
#define DYNEMB_DEVICE_DEVICE_LOOKUPS_H_

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cc/device/device_table_members.h"
#include "cc/device/kernels_lookup.h"
#include "cc/device/parts.h"
#include "cc/device/sum_gradients.h"
#include "cc/device/vector_sources.h"
#include "cc/lookup/lookups.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"

namespace dynemb {

template <class Device>
class DeviceLookups final : public Lookups {
 public:
  explicit DeviceLookups(Device* device) : device_(device) {}

  Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert) override;
  Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks) override;
  Status SumGradients(Exec& exec, const std::vector<BackwardTask>& tasks,
                      const Allocate& allocate) override;
  Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step,
               Tick tick) override;
  Status ApplyPooled(Exec& exec, const std::vector<ApplyPooledTask>& tasks,
                     const OptimizerStep& step, Tick tick) override;
  Status PromoteIfDue(Exec& exec, const std::vector<Table*>& tables, Tick tick) override;

 private:
  using DTable = DeviceTable<Device>;
  using Work = typename DTable::Work;
  using Batch = typename DTable::Batch;

  // The ids of a task.
  struct Ids {
    Table* table;
    const void* keys;
    const RowId* found;  // rows that an earlier call found; null in all tasks with ids, or in none
    RowId* rows;         // output; likewise
    size_t n;
    size_t num_bags;
  };
  // The order of the ids of several tasks in a batch: the ids of a table are consecutive.
  struct Gathered {
    std::vector<DTable*> tables;
    std::vector<uint32_t> table_begins;  // the ids of tables[t] begin here; one more than tables
    std::vector<size_t> order;           // the tasks, in the order of the batch
    std::vector<uint32_t> begins;        // the ids of task order[p] begin here; one more than tasks
    std::vector<uint32_t> table_of;      // the table of task order[p]

    // The source of the vectors of each task's ids.
    std::vector<device::TableVectors::Part> Vectors() const {
      std::vector<device::TableVectors::Part> parts;
      for (size_t p = 0; p < order.size(); ++p) {
        const bool some_absent = tables[table_of[p]]->admission_.AbsentRow() == kSkippedRow;
        parts.push_back({begins[p], table_of[p], some_absent});
      }
      return parts;
    }
    // The tasks in the order of the batch, as pointers to their base class.
    template <class Base, class Task>
    std::vector<const Base*> Ordered(const std::vector<Task>& tasks) const {
      std::vector<const Base*> ordered;
      for (size_t t : order) ordered.push_back(&tasks[t]);
      return ordered;
    }

    size_t size() const { return begins.back(); }
    size_t table_size(size_t t) const { return table_begins[t + 1] - table_begins[t]; }
    std::vector<const DTable*> locked() const { return {tables.begin(), tables.end()}; }
  };

  // A batch with the ids of one or several tasks.
  struct Joined : Batch {
    const RowId* found = nullptr;           // from the tasks, if they have it
    device::Parts<device::IdPart> parts{};  // if there are several tasks
  };

  static Status PromoteIfDue(Exec& exec, const std::vector<DTable*>& tables, Tick tick);
  // If promotion is possible, finds the rows of an inserting lookup, writes them to the tasks'
  // arrays, and promotes them (DTable::PromoteRead). *found: whether it did.
  static Status FindAndPromote(Exec& exec, const std::vector<Ids>& tasks, const Gathered& gathered,
                               const std::vector<Stamp>& now, bool* found);
  // InvalidArgument if a table is not on this device, or there are too many ids or bags.
  Status Gather(const std::vector<Ids>& tasks, Gathered* gathered) const;
  // Creates the batch in the device's memory. With only one task, its arrays are used directly.
  static Joined Join(Work& work, const std::vector<Ids>& tasks, const Gathered& gathered,
                     std::vector<Stamp> now);
  // Writes the rows of the batch to the tasks' arrays.
  static void Deliver(Work& work, const Joined& batch);
  // Begins a batch and a step of each table; sets now[t].
  static Status BeginStep(Exec& exec, const Gathered& all, const OptimizerStep& step, Tick tick,
                          std::vector<Stamp>* now);
  // Apply and ApplyPooled, after BeginStep.
  Status ApplyTo(Work& work, const std::vector<ApplyTask>& tasks, const OptimizerStep& step,
                 const Gathered& all, const std::vector<Stamp>& now);
  Status SumAndApplyTo(Work& work, const std::vector<ApplyPooledTask>& tasks,
                       const OptimizerStep& step, const Gathered& all,
                       const std::vector<Stamp>& now);
  // Moves the rows of ids to memory that have become cold since they were found.
  Status HoldFound(Work& work, const std::vector<Ids>& ids, const Gathered& gathered,
                   const std::vector<Stamp>& now) const;
  // ApplyPooled in one pass (kernels_apply_pooled.h), of tasks that StepsAtOnce. row_begins[t] is
  // the first number of the rows of task t.
  static bool StepsAtOnce(const std::vector<ApplyPooledTask>& tasks, const OptimizerStep& step,
                          const Gathered& all, std::vector<uint32_t>* row_begins);
  static Status StepAtOnce(Work& work, const std::vector<ApplyPooledTask>& tasks,
                           const OptimizerStep& step, const Gathered& all,
                           const std::vector<Stamp>& now, const std::vector<uint32_t>& row_begins);
  // For tasks without row ids: makes the keys distinct, if they may repeat, and finds their rows.
  // now_of(gathered): the stamps of its tables.
  template <class NowOf>
  Status MakeDistinct(Work& work, const NowOf& now_of, std::vector<ApplyTask>* tasks) const;

  Device* const device_;
};

template <class Device>
Status DeviceLookups<Device>::Gather(const std::vector<Ids>& tasks, Gathered* gathered) const {
  Gathered& g = *gathered;
  std::vector<uint32_t> table_of;
  size_t total = 0, num_bags = 0;
  for (const Ids& ids : tasks) {
    auto* const table = dynamic_cast<DTable*>(ids.table);
    if (table == nullptr || table->device_ != device_) {
      return InvalidArgument("table '" + ids.table->options().name +
                             "' is not on the device of the other tables of this call");
    }
    const auto at = std::find(g.tables.begin(), g.tables.end(), table);
    table_of.push_back(static_cast<uint32_t>(at - g.tables.begin()));
    if (at == g.tables.end()) g.tables.push_back(table);
    DYNEMB_RETURN_IF_ERROR(DTable::CheckBatch(total += ids.n));
    if ((num_bags += ids.num_bags) > size_t{Bags::kMaxSize}) {
      return InvalidArgument("at most " + std::to_string(Bags::kMaxSize) + " bags in one call");
    }
  }
  g.order.resize(tasks.size());
  std::iota(g.order.begin(), g.order.end(), size_t{0});
  std::stable_sort(g.order.begin(), g.order.end(),
                   [&](size_t a, size_t b) { return table_of[a] < table_of[b]; });
  g.begins.push_back(0);
  g.table_begins.assign(g.tables.size() + 1, 0);
  for (size_t t : g.order) {
    g.begins.push_back(g.begins.back() + static_cast<uint32_t>(tasks[t].n));
    g.table_of.push_back(table_of[t]);
    g.table_begins[table_of[t] + 1] = g.begins.back();
  }
  return Status();
}

template <class Device>
typename DeviceLookups<Device>::Joined DeviceLookups<Device>::Join(Work& work,
                                                                   const std::vector<Ids>& tasks,
                                                                   const Gathered& gathered,
                                                                   std::vector<Stamp> now) {
  Joined batch;
  batch.tables = gathered.tables;
  batch.begins = gathered.table_begins;
  batch.now = std::move(now);
  const size_t n = gathered.size();
  if (tasks.size() == 1) {
    const Ids& ids = tasks[0];
    batch.keys = gathered.tables[0]->KeysAt(ids.keys);
    batch.rows = ids.rows != nullptr ? ids.rows : work.template Take<RowId>(n);
    batch.found = ids.found;
    return batch;
  }
  std::vector<device::IdPart> parts;
  for (size_t t : gathered.order) {
    const Ids& ids = tasks[t];
    parts.push_back({{ids.keys, ids.table->layout().key_size}, ids.found, ids.rows});
  }
  batch.parts = device::ToDevice(work, parts, gathered.begins);
  auto* const keys = work.template Take<uint64_t>(n);
  // A task without ids may have no arrays.
  const bool has_found =
      std::any_of(tasks.begin(), tasks.end(), [](const Ids& ids) { return ids.found != nullptr; });
  auto* const found = has_found ? work.template Take<RowId>(n) : nullptr;
  batch.keys = {keys, sizeof(*keys)};
  batch.rows = work.template Take<RowId>(n);
  batch.found = found;
  work.ForEach(n, device::CollectIds{batch.parts, keys, found});
  return batch;
}

template <class Device>
void DeviceLookups<Device>::Deliver(Work& work, const Joined& batch) {
  if (batch.parts.count == 0) return;
  work.ForEach(batch.size(), device::DeliverRows{batch.parts, batch.rows});
}

template <class Device>
Status DeviceLookups<Device>::PromoteIfDue(Exec& exec, const std::vector<Table*>& tables,
                                           Tick tick) {
  std::vector<DTable*> on_device;
  for (Table* table : tables) {
    auto* const of_device = dynamic_cast<DTable*>(table);
    if (of_device == nullptr) {
      DYNEMB_RETURN_IF_ERROR(table->PromoteIfDue(exec, tick));
    } else if (std::find(on_device.begin(), on_device.end(), of_device) == on_device.end()) {
      on_device.push_back(of_device);
    }
  }
  return PromoteIfDue(exec, on_device, tick);
}

template <class Device>
Status DeviceLookups<Device>::PromoteIfDue(Exec& exec, const std::vector<DTable*>& tables,
                                           Tick tick) {
  std::vector<DTable*> due;
  for (DTable* table : tables) {
    if (table->PromotionIsDue()) due.push_back(table);
  }
  const Status status = DTable::Promote(exec, due, tick);
  // Without memory for it, rows stay where they are.
  return status.code() == Code::kResourceExhausted ? Status() : status;
}

template <class Device>
Status DeviceLookups<Device>::SumGradients(Exec& exec, const std::vector<BackwardTask>& tasks,
                                           const Allocate& allocate) {
  typename Device::Session session(*device_, Device::StreamOf(exec));
  return device::SumGradients(session, tasks, allocate);
}

template <class Device>
template <class NowOf>
Status DeviceLookups<Device>::MakeDistinct(Work& work, const NowOf& now_of,
                                           std::vector<ApplyTask>* tasks) const {
  std::vector<ApplyTask*> repeating;
  std::vector<Ids> ids;
  for (ApplyTask& task : *tasks) {
    if (task.rows != nullptr) continue;
    if (task.distinct) {
      auto* const rows = work.template Take<RowId>(task.n);
      task.rows = rows;
      ids.push_back({task.table, task.keys, nullptr, rows, task.n, 0});
    } else {
      repeating.push_back(&task);
    }
  }
  if (repeating.empty() && ids.empty()) return Status();
  std::vector<Bags> bags(repeating.size());
  std::vector<BackwardTask> sums(repeating.size());
  for (size_t r = 0; r < repeating.size(); ++r) {
    const ApplyTask& task = *repeating[r];
    const auto n = static_cast<int64_t>(task.n);
    DYNEMB_RETURN_IF_ERROR(bags[r].InitUniform(1, n, n));
    sums[r].key_type = task.table->options().key_type;
    sums[r].keys = task.keys;
    sums[r].bags = &bags[r];
    sums[r].upstream = task.gradients;
    sums[r].dim = task.table->options().dim;
  }
  const auto allocate = [&](size_t r, size_t n, BackwardOutput* out) {
    ApplyTask& task = *repeating[r];
    auto* const rows = work.template Take<RowId>(n);
    out->keys = work.template Take<char>(n * SizeOf(sums[r].key_type));
    out->sums = work.template Take<float>(n * static_cast<size_t>(sums[r].dim));
    task.n = n;
    task.keys = out->keys;
    task.rows = rows;
    task.gradients = out->sums;
    ids.push_back({task.table, task.keys, nullptr, rows, n, 0});
    return work.status();
  };
  DYNEMB_RETURN_IF_ERROR(device::SumGradients(work, sums, allocate));
  Gathered gathered;
  DYNEMB_RETURN_IF_ERROR(Gather(ids, &gathered));
  Joined batch = Join(work, ids, gathered, now_of(gathered));
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(DTable::FindRows(work, batch, true));
  Deliver(work, batch);
  return work.status();
}

template <class Device>
Status DeviceLookups<Device>::HoldFound(Work& work, const std::vector<Ids>& ids,
                                        const Gathered& gathered,
                                        const std::vector<Stamp>& now) const {
  const auto has_cold = [](const DTable* table) { return table->any_cold(); };
  if (std::none_of(gathered.tables.begin(), gathered.tables.end(), has_cold)) return Status();
  Joined batch = Join(work, ids, gathered, now);
  DYNEMB_RETURN_IF_ERROR(work.status());
  return DTable::HoldFound(work, batch, batch.found);
}

template <class Device>
Status DeviceLookups<Device>::Apply(Exec& exec, const std::vector<ApplyTask>& tasks,
                                    const OptimizerStep& step, Tick tick) {
  if (tasks.empty()) return Status();
  DYNEMB_RETURN_IF_ERROR(CheckStates(tasks, step));
  std::vector<Ids> ids;
  for (const ApplyTask& task : tasks) {
    ids.push_back({task.table, task.keys, task.rows, nullptr, task.n, 0});
  }
  Gathered all;
  DYNEMB_RETURN_IF_ERROR(Gather(ids, &all));
  std::vector<Stamp> now;
  DYNEMB_RETURN_IF_ERROR(BeginStep(exec, all, step, tick, &now));
  {
    Work work(all.locked(), &exec, Work::Reports::kYes);
    DYNEMB_RETURN_IF_ERROR(ApplyTo(work, tasks, step, all, now));
  }
  for (DTable* table : all.tables) table->EndStep(exec, step.hyper, step.iteration, tick);
  return Status();
}

template <class Device>
Status DeviceLookups<Device>::BeginStep(Exec& exec, const Gathered& all, const OptimizerStep& step,
                                        Tick tick, std::vector<Stamp>* now) {
  now->resize(all.tables.size());
  for (size_t t = 0; t < all.tables.size(); ++t) {
    DTable& table = *all.tables[t];
    DYNEMB_RETURN_IF_ERROR(
        table.Begin(exec, all.table_size(t), tick, &(*now)[t], DTable::Kind::kWrite));
    DYNEMB_RETURN_IF_ERROR(table.BeginStep(exec, step.flags, step.hyper, tick));
  }
  return Status();
}

template <class Device>
Status DeviceLookups<Device>::ApplyTo(Work& work, const std::vector<ApplyTask>& tasks,
                                      const OptimizerStep& step, const Gathered& all,
                                      const std::vector<Stamp>& now) {
  const auto now_of = [&](const Gathered& gathered) {
    std::vector<Stamp> of;
    for (DTable* table : gathered.tables) {
      of.push_back(
          now[std::find(all.tables.begin(), all.tables.end(), table) - all.tables.begin()]);
    }
    return of;
  };
  std::vector<ApplyTask> distinct = tasks;
  DYNEMB_RETURN_IF_ERROR(MakeDistinct(work, now_of, &distinct));
  std::vector<Ids> of_all;
  for (const ApplyTask& task : distinct) {
    of_all.push_back({task.table, task.keys, task.rows, nullptr, task.n, 0});
  }
  Gathered together;
  DYNEMB_RETURN_IF_ERROR(Gather(of_all, &together));
  DYNEMB_RETURN_IF_ERROR(HoldFound(work, of_all, together, now_of(together)));
  // Two tasks may name the same table, and then the same row, so the tasks of a table run one after
  // the other, in rounds. Everything that can fail comes before the first round.
  struct Round {
    Joined batch;
    uint32_t* nonfinite;
  };
  std::vector<Round> rounds;
  while (!distinct.empty()) {
    std::vector<ApplyTask> later;
    std::vector<Ids> round;
    std::vector<const float*> gradients;
    for (const ApplyTask& task : distinct) {
      const bool waits = std::any_of(round.begin(), round.end(),
                                     [&](const Ids& ids) { return ids.table == task.table; });
      if (waits) {
        later.push_back(task);
      } else {
        round.push_back({task.table, task.keys, task.rows, nullptr, task.n, 0});
        gradients.push_back(task.gradients);
      }
    }
    Gathered gathered;
    DYNEMB_RETURN_IF_ERROR(Gather(round, &gathered));
    Joined batch = Join(work, round, gathered, now_of(gathered));
    batch.gradients = std::move(gradients);  // one task per table, in the order of the tables
    // The k-th task of a table is in round k, here and on the host.
    batch.step = RoundingStep(Update::kOptimizer, step.iteration, rounds.size());
    (void)DTable::ViewsOf(work, batch);
    rounds.push_back({std::move(batch), work.template Take<uint32_t>(gathered.size())});
    DYNEMB_RETURN_IF_ERROR(work.status());
    distinct = std::move(later);
  }
  Phase phase("update rows");
  const RowOptimizer optimizer(step.kind, step.flags, step.hyper, tasks[0].table->options().dim);
  for (Round& round : rounds) {
    DTable::Apply(work, round.batch, round.batch.found, round.nonfinite, optimizer);
  }
  return work.status();
}

}  // namespace dynemb

#include "cc/device/device_apply_pooled.h"
#include "cc/device/device_pool.h"

#endif  // DYNEMB_DEVICE_DEVICE_LOOKUPS_H_
