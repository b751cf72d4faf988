// HostTable's part of cold rows (cold_rows.h).
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>

#include "cc/table/bucket_ops.h"
#include "cc/table/codec.h"
#include "cc/table/expired.h"
#include "cc/table/host_table.h"
#include "cc/table/row_columns.h"

namespace dynemb {
// The background thread that gives space back. It holds the table's lock while it plans (shared)
// and while it moves rows (exclusive), but not while it reads them.
class HostTable::Compactor {
 public:
  explicit Compactor(HostTable* table) : table_(table), thread_([this] { Run(); }) {}
  ~Compactor() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void Wake() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = true;
    }
    changed_.notify_one();
  }

 private:
  void Run() {
    // Batches of many tables must not wake the threads of all of them all the time.
    constexpr std::chrono::milliseconds kPause{10};
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return wanted_ || stops_; });
      changed_.wait_for(lock, kPause, [this] { return stops_; });
      if (stops_) return;
      wanted_ = false;
      lock.unlock();
      try {
        Compact();
      } catch (const std::bad_alloc&) {
        // The space stays as it is until the next time.
      }
      lock.lock();
    }
  }

  bool Stops() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stops_;
  }

  void Compact() {
    std::unique_ptr<ColdRows::Compaction> step;
    while (!Stops()) {
      const auto begin = std::chrono::steady_clock::now();
      {
        std::shared_lock<SharedMutex> shared(table_->mutex());
        if (table_->cold_ == nullptr) return;  // it has the rows of another table (SwapRows)
        if (!table_->cold_->PlanCompaction(&step).ok() || step == nullptr) return;
      }
      if (!step->Read().ok()) return;
      {
        std::unique_lock<SharedMutex> exclusive(table_->mutex());
        if (table_->cold_ == nullptr) return;
        if (!table_->MoveCold(step.get()).ok()) return;
      }
      if (step->urgent) continue;
      // At most half of a core, and half of the disk's time.
      const auto took = std::chrono::steady_clock::now() - begin;
      std::unique_lock<std::mutex> lock(mutex_);
      if (changed_.wait_for(lock, took, [this] { return stops_; })) return;
    }
  }

  HostTable* const table_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool wanted_ = false, stops_ = false;
  std::thread thread_;  // the last member
};

HostTable::HostTable() = default;
HostTable::~HostTable() = default;

void HostTable::StartCold(std::unique_ptr<ColdRows> cold) {
  cold_ = std::move(cold);
  if (cold_->compacts_in_background()) compactor_ = std::make_unique<Compactor>(this);
}

void HostTable::CompactSoon() {
  if (compactor_ != nullptr) compactor_->Wake();
}

Status HostTable::CompactFiles() {
  std::unique_ptr<ColdRows::Compaction> step;
  for (;;) {
    DYNEMB_RETURN_IF_ERROR(cold_->PlanCompaction(&step));
    if (step == nullptr) return Status();
    DYNEMB_RETURN_IF_ERROR(step->Read());
    DYNEMB_RETURN_IF_ERROR(MoveCold(step.get()));
  }
}

void HostTable::KeepError(const Status& status) const {
  if (status.ok()) return;
  std::lock_guard<std::mutex> lock(error_mutex_);
  errors_[std::this_thread::get_id()] = status;
}

Status HostTable::Error() const {
  if (cold_ == nullptr) return Status();
  std::lock_guard<std::mutex> lock(error_mutex_);
  const auto found = errors_.find(std::this_thread::get_id());
  if (found == errors_.end()) return Status();
  Status status = std::move(found->second);
  errors_.erase(found);
  return status;
}

Status HostTable::HotRows(const RowLayout& layout, uint64_t* rows) const {
  const uint64_t most =
      options_.max_capacity != 0 ? static_cast<uint64_t>(options_.max_capacity) : kMostRows;
  *rows = std::min(most, max_hot_bytes_ / layout.stride);
  if (*rows >= std::min(most, kLeastHotRows)) return Status();
  return InvalidArgument("max_dram_for_vectors of table '" + options_.name + "' is " +
                         std::to_string(max_hot_bytes_) + " bytes, which hold " +
                         std::to_string(*rows) + " rows of " + std::to_string(layout.stride) +
                         " bytes; at least " + std::to_string(kLeastHotRows) + " rows are needed");
}

Status HostTable::ChangeColdLayout(const RowLayout& changed,
                                   const std::vector<float>& initial_state) {
  uint64_t hot = 0;
  DYNEMB_RETURN_IF_ERROR(HotRows(changed, &hot));
  // After this, a change of the layout of memory needs no memory, and cannot fail.
  if (rows_.high_water() != 0) DYNEMB_RETURN_IF_ERROR(MoveAllOut());
  DYNEMB_RETURN_IF_ERROR(cold_->ChangeLayout(changed, initial_state));
  rows_.SetMaxRows(hot);
  return Status();
}

void HostTable::ClearCold(Tick tick) noexcept {
  const uint64_t rows = cold_->size();
  if (changes_.tracking() && rows != 0) {
    Status status = ResourceExhausted("");
    try {
      // More keys than the log keeps need not be read.
      uint64_t cursor = 0;
      if (rows <= kDeletionsAtLeast) status = Status();
      while (status.ok() && cursor != ColdRows::kEnd) {
        const auto any = [](const RowTimes&) { return true; };
        const ColdRows::Scanned scanned = cold_->Scan(cursor, 65536, rows, any);
        std::vector<uint64_t> keys(scanned.places.size());
        status =
            cold_->Read(scanned.places, [&](size_t i, const ColdRow& row) { keys[i] = row.key; });
        for (size_t i = 0; i < keys.size() && status.ok(); ++i) {
          changes_.Deleted(tick, keys[i], Removal::kErase);
        }
        cursor = scanned.next;
      }
    } catch (const std::bad_alloc&) {
      status = ResourceExhausted("");
    }
    if (!status.ok()) changes_.ForgetDeletions(tick);
  }
  cold_->Clear();
  counters_.erased += rows;
}

void HostTable::ForCold(KeySpan keys, ColdRows::RowFn fn) const {
  if (cold_ == nullptr || cold_->size() == 0) return;
  const Expired expired = ExpiredAt(0);
  std::vector<uint64_t> bits(keys.size());
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = keys.BitsAt(i);
  KeepError(cold_->Find(bits.data(), bits.size(), [&](size_t i, const ColdRow& row) {
    if (!HasExpired(expired, row.times)) fn(i, row);
  }));
}

void HostTable::ExplainCold(KeySpan keys, KeyState* states) const {
  ForCold(keys, [&](size_t i, const ColdRow& row) {
    states[i].has_row = states[i].is_cold = true;
    states[i].updated = stamps_.Decode(row.times.updated);
    states[i].score = PublicScore(row.times.score);
  });
}

ExportPlan HostTable::ScanCold(uint64_t cursor, uint64_t limit, uint64_t most,
                               const RowPredicate& where) const {
  ExportPlan plan;
  plan.cold = true;
  const UpdatedAfter after = stamps_.After(where.updated_after);
  ColdRows::Scanned scanned = cold_->Scan(
      cursor - kColdCursor, limit, std::max<uint64_t>(1, most), [&](const RowTimes& times) {
        return after(times.updated) && stamps_.Decode(times.updated) <= where.updated_until &&
               where.AllowsScore(PublicScore(times.score));
      });
  plan.next_cursor =
      scanned.next == ColdRows::kEnd ? -1 : static_cast<int64_t>(kColdCursor + scanned.next);
  plan.rows = std::move(scanned.places);
  plan.times = std::move(scanned.times);
  if (!where.has_keys && !where.has_norms) return plan;

  std::vector<bool> chosen(plan.rows.size());
  std::vector<float> vector(static_cast<size_t>(layout().dim));
  std::vector<float> state(static_cast<size_t>(layout().state_width));
  const size_t state_at = layout().state_offset - layout().vector_offset;
  KeepError(cold_->Read(plan.rows, [&](size_t i, const ColdRow& row) {
    if (where.has_keys && !where.AllowsKey(options_.key_type, row.key)) return;
    LoadVector(layout().dtype, row.content, layout().dim, vector.data());
    if (catch_up_.active()) {
      memcpy(state.data(), row.content + state_at, layout().state_bytes());
      catch_up_.Bring(vector.data(), state.data());
    }
    chosen[i] = where.AllowsNorm(vector.data(), vector.size());
  }));
  size_t kept = 0;
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (!chosen[i]) continue;
    plan.rows[kept] = plan.rows[i];
    plan.times[kept++] = plan.times[i];
  }
  plan.rows.resize(kept);
  plan.times.resize(kept);
  return plan;
}

void HostTable::CopyColdRows(const ExportPlan& plan, void* keys, void* vectors, float* state,
                             int64_t* updates, int64_t* scores) const {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    if (updates != nullptr) {
      updates[i] = static_cast<int64_t>(stamps_.Decode(plan.times[i].updated));
    }
    if (scores != nullptr) scores[i] = PublicScore(plan.times[i].score);
  }
  if (keys == nullptr && vectors == nullptr && state == nullptr) return;
  const RowColumns columns{keys, vectors, state};
  KeepError(cold_->Read(plan.rows, [&](size_t i, const ColdRow& row) {
    columns.Set(i, layout(), &row.key, row.content);  // the low bytes of the key come first
  }));
}

void HostTable::ReadColdCut(const std::vector<RowId>& plan, void* keys, void* vectors, float* state,
                            CutTime* updates, CutTime* scores) {
  const Cut& cut = *changes_.cut();
  const RowColumns columns{keys, vectors, state};
  KeepError(cold_->ReadCut(plan, [&](size_t i, const ColdRow& row) {
    columns.Set(i, cut.layout, &row.key, row.content);
    if (updates != nullptr) updates[i] = cut.Time(row.updated);
    if (scores == nullptr) return;
    scores[i] = scoring_.by_time() ? cut.Time(stamps_.Decode(row.times.score)) : row.times.score;
  }));
}

Status HostTable::TrimCold(Tick tick) {
  if (options_.max_capacity == 0) return Status();
  const auto most = static_cast<uint64_t>(options_.max_capacity);
  if (size() <= most) return Status();
  const uint64_t excess = size() - most;
  // Of kEvictRows rows for each one that leaves, those with the lowest scores, as in memory.
  const uint64_t candidates = excess * kEvictRows;
  const auto any = [](const RowTimes&) { return true; };
  ColdRows::Scanned scanned = cold_->Scan(trim_cursor_, candidates, candidates, any);
  trim_cursor_ = scanned.next == ColdRows::kEnd ? 0 : scanned.next;
  if (scanned.places.size() < candidates) {
    const uint64_t left = candidates - scanned.places.size();
    const ColdRows::Scanned rest = cold_->Scan(0, left, left, any);
    for (size_t i = 0; i < rest.places.size(); ++i) {
      // The rows from the old cursor on were listed before.
      if (scanned.places.size() == cold_->size()) break;
      scanned.places.push_back(rest.places[i]);
      scanned.times.push_back(rest.times[i]);
    }
    if (trim_cursor_ == 0 && rest.next != ColdRows::kEnd) trim_cursor_ = rest.next;
  }
  const StampOrder order = scoring_.Order(stamps_);
  std::vector<size_t> chosen(scanned.places.size());
  for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = i;
  const size_t leaving = std::min<size_t>(excess, chosen.size());
  std::nth_element(chosen.begin(), chosen.begin() + static_cast<ptrdiff_t>(leaving) - 1,
                   chosen.end(), [&](size_t a, size_t b) {
                     return order.Rank(scanned.times[a].score) < order.Rank(scanned.times[b].score);
                   });
  std::vector<ColdPlace> places;
  for (size_t c = 0; c < leaving; ++c) places.push_back(scanned.places[chosen[c]]);
  // First everything that may fail.
  const RowLayout& l = layout();
  std::vector<uint64_t> keys(leaving);
  std::vector<char> rows(evicted_ == nullptr ? 0 : leaving * l.stride);
  std::vector<int64_t> scores(leaving);
  DYNEMB_RETURN_IF_ERROR(cold_->Read(places, [&](size_t i, const ColdRow& cold) {
    keys[i] = cold.key;
    scores[i] = PublicScore(scanned.times[chosen[i]].score);
    if (evicted_ == nullptr) return;
    memcpy(rows.data() + i * l.stride + l.vector_offset, cold.content, l.content_bytes());
  }));
  if (evicted_ != nullptr) {
    VectorBuffer unpacked(l.dim);
    for (size_t i = 0; i < leaving && catch_up_.active(); ++i) {
      BringContent(keys[i], rows.data() + i * l.stride + l.vector_offset, unpacked.get());
    }
    evicted_->AddAll(leaving, keys.data(), rows.data(), scores.data());
  }
  for (const uint64_t key : keys) {
    if (changes_.tracking()) changes_.Deleted(tick, key, Removal::kEvict);
  }
  cold_->Remove(keys.data(), places.data(), leaving);
  counters_.evictions += leaving;
  changes_.TrimDeletions(size());
  return Status();
}

}  // namespace dynemb
