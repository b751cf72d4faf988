// ColdTable: cuts (changes.h), and the copies of rows that they and exports return.
#include <memory>
#include <utility>
#include <vector>

#include "cc/table/cold_table.h"

namespace dynemb {

void ColdTable::Track(Tick tick) {
  if (tracking()) return;
  bool lost = false;
  if (!HasLostHot(&lost).ok()) return;  // a later call reports the failure
  StartChanges(tick, lost || HasLostCold() ? tick : 0);
}

Status ColdTable::BeginCut(Exec& exec, Tick watermark, Tick since, CutOf of, SavedRows* saved,
                           size_t number) {
  DYNEMB_RETURN_IF_ERROR(CheckNoCut(cut()));
  Track(watermark);
  uint64_t expired;
  DYNEMB_RETURN_IF_ERROR(Expire(exec, watermark, &expired));
  DYNEMB_RETURN_IF_ERROR(Error());
  auto cut = std::make_unique<Cut>();
  cut->saved = saved;
  cut->table = number;
  cut->layout = layout();
  cut->watermark = watermark;
  cut->since = of == CutOf::kRows ? since : RowsOfDeltaSince(since);
  // Scores that are not stamps do not say when a row was used.
  if (of == CutOf::kDeltaAndUsed && !scoring_.by_time()) cut->since = 0;
  cut->used = of == CutOf::kDeltaAndUsed && cut->since != 0;
  cut->base = stamps_.base();
  if (of != CutOf::kRows) {
    DYNEMB_RETURN_IF_ERROR(CheckDeletions(deletions(), since));
    DYNEMB_RETURN_IF_ERROR(ListGone(exec, deletions().Since(since), &cut->deleted));
  }
  if (of != CutOf::kRows || since == 0) catch_up_.NoteCut(watermark);
  DYNEMB_RETURN_IF_ERROR(CopyAdmission(exec, &cut->admission, &cut->first_admission_line));
  struct ColdCut {
    ColdRows* rows = nullptr;
    ~ColdCut() {
      if (rows != nullptr) rows->EndCut();
    }
  } begun;
  if (cold_ != nullptr) {
    BeginColdCut(*cut);
    begun.rows = cold_.get();
  }
  DYNEMB_RETURN_IF_ERROR(StartCut(exec, std::move(cut)));
  begun.rows = nullptr;
  if (cold_ != nullptr) changes_.cut()->most_rows += cold_->CutRows();
  return Status();
}

void ColdTable::EndCut() {
  changes_.EndCut();
  if (cold_ != nullptr) cold_->EndCut();
}

Status ColdTable::ListGone(Exec& exec, const std::vector<uint64_t>& keys,
                           std::vector<uint64_t>* gone) const {
  std::vector<char> has(keys.size());
  DYNEMB_RETURN_IF_ERROR(HaveHot(exec, keys, &has));
  if (cold_ != nullptr) {
    const auto note = [&](size_t i, const ColdRow&) { has[i] = true; };
    DYNEMB_RETURN_IF_ERROR(cold_->Find(keys.data(), keys.size(), note));
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!has[i]) gone->push_back(keys[i]);
  }
  return Status();
}

std::vector<RowId> ColdTable::PlanCut(size_t limit) {
  Cut& cut = *changes_.cut();
  std::vector<RowId> plan = PlanHotCut(limit);
  cut.cold_planned = cold_ != nullptr && plan.empty() && cut.cursor >= cut.todo.rows();
  return cut.cold_planned ? cold_->PlanCut(limit) : plan;
}

bool ColdTable::CutIsRead() const {
  const Cut& cut = *changes_.cut();
  return cut.todo.Next(cut.cursor) >= cut.todo.rows() &&
         (cold_ == nullptr || cold_->CutRows() == 0);
}

void ColdTable::ReadCut(Exec& exec, const std::vector<RowId>& plan, const CutColumns& to) {
  Cut& cut = *changes_.cut();
  if (cut.cold_planned) {
    ReadColdCut(plan, to);
    return;
  }
  // A CutTime has the width of a stamp and of a score, so the conversion is in place.
  if (!ReadStored(exec, plan, to).ok()) return;  // Error returns it
  for (CutTime* times : {to.updates, scoring_.by_time() ? to.scores : nullptr}) {
    if (times == nullptr) continue;
    for (size_t i = 0; i < plan.size(); ++i) times[i] = cut.Time(stamps_.Decode(times[i]));
  }
  for (RowId row : plan) cut.todo.Take(row);
  if (!plan.empty()) cut.cursor = plan.back() + uint64_t{1};
}

void ColdTable::CopyRows(Exec& exec, const std::vector<RowId>& rows, const TickColumns& to) const {
  const size_t n = rows.size();
  std::vector<Stamp> updates(to.updates == nullptr ? 0 : n);
  std::vector<Score> scores(to.scores == nullptr ? 0 : n);
  (void)ReadStored(exec, rows,  // Error returns its failure
                   {to.keys, to.vectors, to.state, to.updates == nullptr ? nullptr : updates.data(),
                    to.scores == nullptr ? nullptr : scores.data()});
  for (size_t i = 0; i < updates.size(); ++i) {
    to.updates[i] = static_cast<int64_t>(stamps_.Decode(updates[i]));
  }
  for (size_t i = 0; i < scores.size(); ++i) to.scores[i] = PublicScore(scores[i]);
}

void ColdTable::BeginColdCut(const Cut& cut) {
  const UpdatedAfter after = stamps_.After(cut.since);
  cold_->BeginCut([&](const RowTimes& times) {
    return after(times.updated) || (cut.used && after(times.score));
  });
}

void ColdTable::ReadColdCut(const std::vector<RowId>& plan, const CutColumns& to) {
  const Cut& of = *cut();
  // At the watermark, as the cut's, but in host memory.
  const RowLayout layout(of.layout.key_size, of.layout.dtype, of.layout.dim, of.layout.state_width);
  KeepError(cold_->ReadCut(plan, [&](size_t i, const ColdRow& row) {
    to.Set(i, layout, &row.key, row.content);
    if (to.updates != nullptr) to.updates[i] = of.Time(row.updated);
    if (to.scores == nullptr) return;
    to.scores[i] = scoring_.by_time() ? of.Time(stamps_.Decode(row.times.score)) : row.times.score;
  }));
}

}  // namespace dynemb
