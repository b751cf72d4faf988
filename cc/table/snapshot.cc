#include "cc/table/snapshot.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cc/table/row_columns.h"

namespace dynemb {

Status Snapshot::Begin(Exec& exec, std::vector<Table*> tables, const std::vector<Tick>& since,
                       bool with_deleted, Clock* clock, std::unique_ptr<Snapshot>* snapshot,
                       size_t most_saved) {
  std::unique_ptr<Snapshot> made(new Snapshot(std::move(tables), most_saved));
  made->info_.reserve(made->tables_.size());
  // If anything fails or throws, the destructor of `made` ends the cuts that were begun. It runs
  // after this lock is released.
  TableLock lock(made->tables_, TableLock::Mode::kExclusive);
  made->watermark_ = clock->Next(&made->watermark_utc_ns_);
  for (size_t t = 0; t < made->tables_.size(); ++t) {
    Table& table = *made->tables_[t];
    DYNEMB_RETURN_IF_ERROR(
        table.BeginCut(exec, made->watermark_, since[t], with_deleted, &made->saved_, t));
    ++made->begun_;
    const Cut& cut = *table.cut();
    made->info_.push_back({cut.layout, table.state_spec(), cut.base, cut.most_rows, cut.deleted});
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

Status Snapshot::Next(size_t limit, Piece* piece) {
  // The longest time to wait for a table's lock before checking for saved rows again.
  constexpr std::chrono::milliseconds kWait{1};
  *piece = Piece();
  for (;;) {
    const bool all_read = current_ == tables_.size();
    if (chunk_read_ == chunk_.n) {
      chunk_.n = chunk_read_ = 0;
      saved_.Pop(&chunk_);
    }
    // After Pop: once all tables are read, no batch can fail to save a row anymore.
    DYNEMB_RETURN_IF_ERROR(saved_.Error());
    if (chunk_read_ < chunk_.n) {
      piece->table = chunk_.table;
      piece->n = std::min(limit, chunk_.n - chunk_read_);
      piece->saved = chunk_.rows.data() + chunk_read_ * chunk_.stride;
      return Status();
    }
    if (all_read) return Status();
    Table& table = *tables_[current_];
    if (!table.mutex().try_lock_shared_for(kWait)) continue;
    std::shared_lock<SharedMutex> lock(table.mutex(), std::adopt_lock);
    piece->plan = table.PlanCut(limit);
    if (!piece->plan.empty()) {
      piece->table = current_;
      piece->n = piece->plan.size();
      piece->lock = std::move(lock);
      return Status();
    }
    if (table.CutIsRead()) ++current_;
  }
}

Status Snapshot::Read(Exec& exec, Piece* piece, void* keys, void* vectors, float* state,
                      CutTime* updates, CutTime* accesses) {
  DYNEMB_RETURN_IF_ERROR(saved_.Error());
  if (piece->lock.owns_lock()) {
    Table& table = *tables_[piece->table];
    table.ReadCut(exec, piece->plan, keys, vectors, state, updates, accesses);
    piece->lock.unlock();
    return table.Error();
  }
  const RowColumns columns{keys, vectors, state};
  const RowLayout& l = info_[piece->table].layout;
  const auto accessed =
      static_cast<CutTime>(std::min<Tick>(watermark_ - info_[piece->table].base, 0xFFFFFFFFu));
  for (size_t i = 0; i < piece->n; ++i) {
    const char* row = piece->saved + i * l.stride;
    columns.Set(i, l, row);
    if (updates != nullptr) updates[i] = *l.update(row);
    if (accesses != nullptr) accesses[i] = accessed;
  }
  if (piece->saved != nullptr) chunk_read_ += piece->n;
  return Status();
}

}  // namespace dynemb
