// DeviceLookups: Pool and WeightGradient, the calls that read the vectors of bags.
#ifndef DYNEMB_DEVICE_DEVICE_POOL_H_
#define DYNEMB_DEVICE_DEVICE_POOL_H_

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "cc/device/device_lookups.h"
#include "cc/device/device_table_members.h"
#include "cc/device/pool_bags.h"
#include "cc/device/vector_sources.h"
#include "cc/table/phase.h"

namespace dynemb {

template <class Device>
Status DeviceLookups<Device>::Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick,
                                   bool insert) {
  if (tasks.empty()) return Status();
  std::vector<Ids> ids;
  for (const PoolTask& task : tasks) {
    ids.push_back(
        {task.table, task.keys, nullptr, task.rows, task.bags->nnz(), task.bags->num_bags()});
  }
  Gathered gathered;
  DYNEMB_RETURN_IF_ERROR(Gather(ids, &gathered));
  std::vector<Stamp> now;
  // Usually no promotion is due here, because training steps end with PromoteIfDue.
  if (insert) DYNEMB_RETURN_IF_ERROR(PromoteIfDue(exec, gathered.tables, tick));
  for (size_t t = 0; t < gathered.tables.size(); ++t) {
    DTable& table = *gathered.tables[t];
    if (insert) {
      now.emplace_back();
      DYNEMB_RETURN_IF_ERROR(
          table.Begin(exec, gathered.table_size(t), tick, &now.back(), DTable::Kind::kLookup));
    } else {
      if (table.reading_changes_rows()) table.WaitForReader();
      now.push_back(table.stamps_.Encode(tick));
    }
  }
  bool found = false;
  if (insert) DYNEMB_RETURN_IF_ERROR(FindAndPromote(exec, ids, gathered, now, &found));
  if (found) {
    for (Ids& task : ids) task.found = task.rows;
  }
  Phase phase("find and pool");
  Work work(gathered.locked(), &exec, Work::Reports::kYes);
  Joined batch = Join(work, ids, gathered, std::move(now));
  batch.inserts = batch.admits = insert;
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(found ? DTable::HoldFound(work, batch, batch.found)
                               : DTable::FindRows(work, batch, true));
  DTable::Bring(work, batch);
  if (insert) {
    DYNEMB_RETURN_IF_ERROR(
        DTable::Insert(work, batch, DTable::Keys::kMayRepeat, device::FillInitial{}));
  } else if (DTable::AnyAdmission(batch)) {
    work.ForEach(batch.size(), device::MarkAbsent{DTable::ViewsOf(work, batch), batch.rows});
  }
  const device::TableVectors source{DTable::ViewsOf(work, batch), batch.keys, batch.rows};
  DYNEMB_RETURN_IF_ERROR(device::CombineBags(
      work, source, gathered.Vectors(), gathered.template Ordered<BagTask>(tasks), batch.quads()));
  Deliver(work, batch);
  return work.status();
}

template <class Device>
Status DeviceLookups<Device>::FindAndPromote(Exec& exec, const std::vector<Ids>& tasks,
                                             const Gathered& gathered,
                                             const std::vector<Stamp>& now, bool* found) {
  // A batch that brings rows from files waits for the device, and would do so twice. If one table
  // of the call has files, none promotes what the call reads.
  const auto promotes = [](const DTable* table) { return table->PromotesRead(); };
  const auto has_cold = [](const DTable* table) { return table->has_cold_rows(); };
  const std::vector<DTable*>& tables = gathered.tables;
  *found = std::any_of(tables.begin(), tables.end(), promotes) &&
           std::none_of(tables.begin(), tables.end(), has_cold);
  if (!*found) return Status();
  Phase phase("find");
  Work work(gathered.locked(), &exec, Work::Reports::kYes);
  Joined batch = Join(work, tasks, gathered, now);
  DYNEMB_RETURN_IF_ERROR(work.status());
  DYNEMB_RETURN_IF_ERROR(DTable::FindToPromote(work, batch));
  Deliver(work, batch);
  DYNEMB_RETURN_IF_ERROR(work.status());
  return DTable::PromoteRead(work, batch);
}

template <class Device>
Status DeviceLookups<Device>::WeightGradient(Exec& exec,
                                             const std::vector<WeightGradientTask>& tasks) {
  if (tasks.empty()) return Status();
  std::vector<Ids> ids;
  for (const WeightGradientTask& task : tasks) {
    ids.push_back(
        {task.table, task.keys, task.rows, nullptr, task.bags->nnz(), task.bags->num_bags()});
  }
  Gathered gathered;
  DYNEMB_RETURN_IF_ERROR(Gather(ids, &gathered));
  for (DTable* table : gathered.tables) {
    if (table->has_cold_rows()) table->WaitForReader();
  }
  Phase phase("weight gradients");
  Work work(gathered.locked(), &exec, Work::Reports::kYes);
  Joined batch = Join(work, ids, gathered, std::vector<Stamp>(gathered.tables.size()));
  DYNEMB_RETURN_IF_ERROR(work.status());
  // Rows may have moved since they were found.
  DYNEMB_RETURN_IF_ERROR(DTable::HoldFound(work, batch, batch.found));
  const device::TableVectors source{DTable::ViewsOf(work, batch), batch.keys, batch.rows};
  return device::DifferentiateWeights(work, source, gathered.Vectors(),
                                      gathered.template Ordered<BagWeightTask>(tasks));
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_POOL_H_
