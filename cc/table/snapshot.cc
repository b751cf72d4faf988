#include "cc/table/snapshot.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace dynemb {

Status Snapshot::Begin(Exec& exec, std::vector<Table*> tables, const std::vector<Tick>& since,
                       CutOf of, Clock* clock, std::unique_ptr<Snapshot>* snapshot,
                       size_t most_saved) {
  std::unique_ptr<Snapshot> made(new Snapshot(std::move(tables), most_saved));
  made->info_.reserve(made->tables_.size());
  // If anything fails or throws, the destructor of `made` ends the cuts that were begun. It runs
  // after this lock is released.
  TableLock lock(made->tables_, TableLock::Mode::kExclusive);
  made->watermark_ = clock->Next(&made->watermark_utc_ns_);
  for (size_t t = 0; t < made->tables_.size(); ++t) {
    Table& table = *made->tables_[t];
    DYNEMB_RETURN_IF_ERROR(table.BeginCut(exec, made->watermark_, since[t], of, &made->saved_, t));
    ++made->begun_;
    const Cut& cut = *table.cut();
    made->info_.push_back({cut.layout, table.state_spec(), cut.base, cut.most_rows, cut.deleted,
                           table.ExpiryMarks(made->watermark_), cut.admission,
                           cut.first_admission_line, cut.since == 0 ? 0 : since[t],
                           table.catch_up()});
  }
  *snapshot = std::move(made);
  return Status();
}

Snapshot::~Snapshot() {
  saved_.Close();  // before locking: a batch that waits for the reader holds locks
  if (begun_ == 0) return;
  TableLock lock(std::move(to_lock_), TableLock::Mode::kExclusive);
  for (size_t t = 0; t < begun_; ++t) tables_[t]->EndCut();
}

Status Snapshot::Next(size_t limit, Block* block) {
  // The longest time to wait for a table's lock before checking for saved rows again.
  constexpr std::chrono::milliseconds kWait{1};
  *block = Block();
  for (;;) {
    const bool all_read = current_ == tables_.size();
    if (chunk_read_ == chunk_.n) {
      chunk_.n = chunk_read_ = 0;
      saved_.Pop(&chunk_);
    }
    // After Pop: once all tables are read, no batch can fail to save a row anymore.
    DYNEMB_RETURN_IF_ERROR(saved_.Error());
    if (chunk_read_ < chunk_.n) {
      block->table = chunk_.table;
      block->n = std::min(limit, chunk_.n - chunk_read_);
      block->saved = chunk_.rows.data() + chunk_read_ * chunk_.stride;
      return Status();
    }
    if (all_read) return Status();
    Table& table = *tables_[current_];
    if (!table.mutex().try_lock_shared_for(kWait)) continue;
    std::shared_lock<SharedMutex> lock(table.mutex(), std::adopt_lock);
    block->plan = table.PlanCut(limit);
    if (!block->plan.empty()) {
      block->table = current_;
      block->n = block->plan.size();
      block->lock = std::move(lock);
      return Status();
    }
    if (table.CutIsRead()) ++current_;
  }
}

Status Snapshot::Read(Exec& exec, Block* block, CutColumns to) {
  const Info& info = info_[block->table];
  const bool brings = info.catch_up.active() && (to.vectors != nullptr || to.state != nullptr);
  std::vector<float> own;
  if (brings && to.state == nullptr) {
    own.resize(block->n * static_cast<size_t>(info.layout.state_width));
    to.state = own.data();
  }
  DYNEMB_RETURN_IF_ERROR(ReadWithoutSteps(exec, block, to));
  if (brings) info.catch_up.BringColumns(exec, info.layout, block->n, to.vectors, to.state);
  return Status();
}

Status Snapshot::ReadWithoutSteps(Exec& exec, Block* block, const CutColumns& to) {
  DYNEMB_RETURN_IF_ERROR(saved_.Error());
  if (block->lock.owns_lock()) {
    Table& table = *tables_[block->table];
    table.ReadCut(exec, block->plan, to);
    block->lock.unlock();
    return table.Error();
  }
  const RowLayout& l = info_[block->table].layout;
  for (size_t i = 0; i < block->n; ++i) {
    const char* row = block->saved + i * SavedRows::Stride(l);
    to.Set(i, l, row);
    if (to.updates != nullptr) to.updates[i] = *l.update(row);
    if (to.scores != nullptr) memcpy(&to.scores[i], row + l.stride, sizeof(CutTime));
  }
  if (block->saved != nullptr) chunk_read_ += block->n;
  return Status();
}

}  // namespace dynemb
