// DeviceLookups: ApplyPooled.
#ifndef DYNEMB_DEVICE_DEVICE_APPLY_POOLED_H_
#define DYNEMB_DEVICE_DEVICE_APPLY_POOLED_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/device/device_lookups.h"
#include "cc/device/kernels_apply_pooled.h"
#include "cc/device/sum_gradients.h"
#include "cc/table/phase.h"
#include "cc/table/rounding.h"

namespace dynemb {

template <class Device>
Status DeviceLookups<Device>::ApplyPooled(Exec& exec, const std::vector<ApplyPooledTask>& tasks,
                                          const OptimizerStep& step, Tick tick) {
  if (tasks.empty()) return Status();
  DYNEMB_RETURN_IF_ERROR(CheckApplyPooled(tasks));
  std::vector<ApplyTask> applies(tasks.size());
  std::vector<Ids> ids;
  for (size_t t = 0; t < tasks.size(); ++t) {
    const ApplyPooledTask& task = tasks[t];
    applies[t].table = task.table;
    ids.push_back({task.table, task.keys, task.rows, nullptr, task.bags->nnz(), 0});
  }
  Gathered all;  // in the order of the tasks: they have different tables
  DYNEMB_RETURN_IF_ERROR(Gather(ids, &all));
  DYNEMB_RETURN_IF_ERROR(CheckStates(applies, step));
  std::vector<Stamp> now;
  DYNEMB_RETURN_IF_ERROR(BeginStep(exec, all, step, tick, &now));
  {
    Work work(all.locked(), &exec, Work::Reports::kYes);
    DYNEMB_RETURN_IF_ERROR(HoldFound(work, ids, all, now));
    std::vector<uint32_t> row_begins;
    DYNEMB_RETURN_IF_ERROR(StepsAtOnce(tasks, step, all, &row_begins)
                               ? StepAtOnce(work, tasks, step, all, now, row_begins)
                               : SumAndApplyTo(work, tasks, step, all, now));
  }
  for (DTable* table : all.tables) table->EndStep(exec, step.hyper, step.iteration, tick);
  return Status();
}

template <class Device>
Status DeviceLookups<Device>::SumAndApplyTo(Work& work, const std::vector<ApplyPooledTask>& tasks,
                                            const OptimizerStep& step, const Gathered& all,
                                            const std::vector<Stamp>& now) {
  std::vector<ApplyTask> applies(tasks.size());
  const auto allocate = [&](size_t t, size_t n, BackwardOutput* out) {
    out->keys = work.template Take<char>(n * SizeOf(tasks[t].key_type));
    out->rows = work.template Take<RowId>(n);
    out->sums = work.template Take<float>(n * static_cast<size_t>(tasks[t].dim));
    ApplyTask& apply = applies[t];
    apply.table = tasks[t].table;
    apply.keys = out->keys;
    apply.rows = out->rows;
    apply.gradients = out->sums;
    apply.n = n;
    apply.distinct = true;
    return work.status();
  };
  DYNEMB_RETURN_IF_ERROR(
      device::SumGradients(work, std::vector<BackwardTask>(tasks.begin(), tasks.end()), allocate));
  return ApplyTo(work, applies, step, all, now);
}

template <class Device>
bool DeviceLookups<Device>::StepsAtOnce(const std::vector<ApplyPooledTask>& tasks,
                                        const OptimizerStep& step, const Gathered& all,
                                        std::vector<uint32_t>* row_begins) {
  if (step.kind == OptimizerKind::kRowwiseAdagrad) return false;
  uint64_t total = 0;
  row_begins->assign(1, 0);
  for (size_t t = 0; t < tasks.size(); ++t) {
    const DTable& table = *all.tables[t];
    if (!device::IsWhole(tasks[t]) || !IsWhole(table.layout())) return false;
    total += device::FoundNumbers::NumbersOf(table.bounds_.high_water, table.rows_move());
    if (total > Bags::kMaxSize) return false;
    row_begins->push_back(static_cast<uint32_t>(total));
  }
  return true;
}

template <class Device>
Status DeviceLookups<Device>::StepAtOnce(Work& work, const std::vector<ApplyPooledTask>& tasks,
                                         const OptimizerStep& step, const Gathered& all,
                                         const std::vector<Stamp>& now,
                                         const std::vector<uint32_t>& row_begins) {
  namespace internal = device::internal_sum_gradients;
  const size_t n = all.size(), num_tables = all.tables.size();
  if (n == 0) return work.status();
  Phase phase("sum gradients and update rows");
  Batch batch;
  batch.tables = all.tables;
  batch.begins = all.table_begins;
  batch.now = now;
  batch.step = RoundingStep(Update::kOptimizer, step.iteration, 0);
  batch.rows = work.template Take<RowId>(n);
  const device::TableViews& tables = DTable::ViewsOf(work, batch);
  internal::SumOptions options;
  for (const ApplyPooledTask& task : tasks) {
    // In the worst case all ids belong to one row.
    options.Add(task.bags->nnz(), 1, task.dim);
  }
  internal::Ids ids;
  DYNEMB_RETURN_IF_ERROR(internal::BringIds(
      work, std::vector<BackwardTask>(tasks.begin(), tasks.end()), all.table_begins, &ids));
  const uint32_t* const numbers_of = device::ToDevice(work, row_begins.data(), row_begins.size());
  auto* const found = work.template Take<RowId>(n);
  auto* const numbers = work.template Take<uint32_t>(n + 1);
  auto* const begins = work.template Take<uint32_t>(num_tables + 1);
  auto* const firsts = work.template Take<RowId>(n);
  auto* const stepped = work.template Take<device::SteppedRow>(n);
  auto* const nonfinite = work.template Take<uint32_t>(n);
  auto* const ranges = work.template Take<device::TermRange>(n);
  auto* const terms = work.template Take<device::Term>(n);
  const device::ChunkSums chunks = internal::TakeChunks(work, n, options);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.ForEach(n, device::ListIds<device::FoundNumbers>{ids.parts,
                                                        {ids.parts, tables, numbers_of, found},
                                                        ids.uniques,
                                                        ids.positions,
                                                        ids.bag_of});
  const uint32_t* places = nullptr;
  uint32_t* of = nullptr;
  device::Elect</*kLast=*/false>(work, device::TaskKeys{ids.parts}, found, n, &places, &of);
  work.SortPairs(ids.uniques, ids.positions, n, device::BitsBelow(row_begins.back()));
  work.ForEach(n + 1, device::FlagLast{ids.uniques, n, numbers});
  work.ExclusiveSum(numbers, n + 1);
  DYNEMB_RETURN_IF_ERROR(work.status());
  work.ForEach(num_tables + 1, device::ReadBegins{ids.parts.begins, numbers, begins});
  const device::ListTerms<device::NothingOfFirst> list{
      ids.parts, numbers, ids.positions, ids.bag_of, static_cast<uint32_t>(n), {}, ranges, terms};
  work.ForKeys(n,
               device::ListStepped{tables, list, found, places, of, batch.rows, firsts, stepped});
  DTable::Bring(work, batch);
  work.Changes();
  DTable::BeforeWrite(work, batch, [](size_t) { return true; });
  work.Fill(nonfinite, 0, n * sizeof(uint32_t));
  const device::SortedTerms sorted{ids.parts, ids.positions, ids.bag_of,
                                   ranges,    terms,         static_cast<uint32_t>(n)};
  const RowOptimizer optimizer(step.kind, step.flags, step.hyper, tasks[0].dim);
  WithFormula(
      optimizer.kind(), optimizer.flags(), optimizer.coefficients().power, [&](auto formula) {
        using Formula = typename decltype(formula)::Formula;
        if constexpr (!formulas::kIsRowwise<Formula>) {
          const device::SteppedSums<Formula> sums{
              sorted,      tables, begins, firsts, stepped, nonfinite, optimizer.coefficients(),
              ~uint32_t{0}};
          (void)internal::SumTermsAs</*kWhole=*/true>(work, sums, chunks, options);
        }
      });
  work.ForEach(device::TallyItems(n), device::CountApplied{tables, batch.rows, nonfinite});
  return work.status();
}

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_APPLY_POOLED_H_
