#include "cc/table/cold_table.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>

#include "cc/table/background.h"
#include "cc/table/bucket_ops.h"
#include "cc/table/codec.h"

namespace dynemb {
namespace {

void SortDistinct(std::vector<uint64_t>* keys) {
  std::sort(keys->begin(), keys->end());
  keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
}

// Whether a compaction has rows to move after its Read.
bool HasRead(const Status& status) { return status.ok() || status.code() == Code::kDataLoss; }

// The order of keys. ColdRows delivers rows in any order, on which no result may depend.
std::vector<uint32_t> OrderOf(const std::vector<uint64_t>& keys) {
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(),
            [&keys](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  return order;
}

template <class T>
void Reorder(const std::vector<uint32_t>& order, std::vector<T>* values) {
  std::vector<T> ordered(order.size());
  for (size_t i = 0; i < order.size(); ++i) ordered[i] = (*values)[order[i]];
  values->swap(ordered);
}

}  // namespace

// The background task that gives space back. It holds the table's lock while it plans (shared) and
// while it moves rows (exclusive), but not while it reads them. It uses no member of a derived
// class: that is destroyed before the work ends.
class ColdTable::Compactor final : public Background::Task {
 public:
  explicit Compactor(ColdTable* table) : table_(table) {}
  ~Compactor() override { Background::Remove(this); }
  void Wake() { Background::Wake(this, kPause); }

 private:
  // Batches of many tables must not wake threads for all of them all the time.
  static constexpr std::chrono::milliseconds kPause{10};
  static constexpr Background::Clock::duration kNone{-1};

  Background::Clock::duration Work() noexcept override {
    const auto begin = Background::Clock::now();
    Status status;
    try {
      {
        std::shared_lock<SharedMutex> shared(table_->mutex());
        if (table_->cold_ == nullptr) return kNone;  // it has the rows of another table (SwapRows)
        status = table_->cold_->PlanCompaction(&step_);
      }
      if (status.ok() && step_ != nullptr) {
        status = step_->Read();
        if (HasRead(status)) {
          std::unique_lock<SharedMutex> exclusive(table_->mutex());
          if (table_->cold_ == nullptr) return kNone;
          const Status moved = table_->MoveCold(step_.get());
          if (!status.ok()) table_->background_errors_.Add(status);  // the other rows have moved
          status = moved;
        }
      }
    } catch (const std::bad_alloc&) {
      step_.reset();
      return kNone;  // the space stays as it is until the next time
    }
    if (!status.ok()) {
      // Without space, the next batch that gives rows up fails with the same error.
      table_->background_errors_.Add(status);
      step_.reset();
      return kNone;
    }
    if (step_ == nullptr) return kNone;
    // At most half of a core, and half of the disk's time.
    return step_->urgent ? Background::Clock::duration(0) : Background::Clock::now() - begin;
  }

  ColdTable* const table_;
  std::unique_ptr<ColdRows::Compaction> step_;
};

ColdTable::ColdTable() = default;
ColdTable::~ColdTable() = default;

void ColdTable::StartCold(std::unique_ptr<ColdRows> cold) {
  cold_ = std::move(cold);
  if (cold_->compacts_in_background()) compactor_ = std::make_unique<Compactor>(this);
}

void ColdTable::CompactSoon() {
  if (compactor_ != nullptr) compactor_->Wake();
}

Status ColdTable::CompactFiles() {
  std::unique_ptr<ColdRows::Compaction> step;
  for (;;) {
    DYNEMB_RETURN_IF_ERROR(cold_->PlanCompaction(&step));
    if (step == nullptr) return Status();
    const Status read = step->Read();
    if (!HasRead(read)) return read;
    DYNEMB_RETURN_IF_ERROR(MoveCold(step.get()));
    if (!read.ok()) background_errors_.Add(read);
  }
}

Status ColdTable::RewriteCondemned() {
  bool any = false;
  DYNEMB_RETURN_IF_ERROR(cold_->PrepareRewrite(&any));
  if (!any) return Status();
  Status unread;
  std::unique_ptr<ColdRows::Compaction> step;
  for (;;) {
    DYNEMB_RETURN_IF_ERROR(cold_->PlanCompaction(&step));
    if (step == nullptr || !step->rewrites) break;
    const Status read = step->Read();
    if (!HasRead(read)) return read;
    if (unread.ok()) unread = read;
    DYNEMB_RETURN_IF_ERROR(MoveCold(step.get()));
  }
  // The units that could not be read may have had no row in use.
  DYNEMB_RETURN_IF_ERROR(cold_->PrepareRewrite(&any));
  if (!any) return Status();
  DYNEMB_RETURN_IF_ERROR(unread);
  return DataLoss("table '" + options_.name + "': a file has rows that no key finds");
}

void ColdTable::KeepError(const Status& status) const {
  if (status.ok()) return;
  std::lock_guard<std::mutex> lock(error_mutex_);
  errors_[std::this_thread::get_id()] = status;
}

Status ColdTable::KeptError() const {
  if (cold_ == nullptr) return Status();
  std::lock_guard<std::mutex> lock(error_mutex_);
  const auto found = errors_.find(std::this_thread::get_id());
  if (found == errors_.end()) return Status();
  Status status = std::move(found->second);
  errors_.erase(found);
  return status;
}

void ColdTable::ClearCold(Tick tick) noexcept {
  const uint64_t rows = cold_->size();
  if (tracking() && rows != 0) {
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
          deletions().Add(tick, keys[i], Removal::kErase);
        }
        cursor = scanned.next;
      }
    } catch (const std::bad_alloc&) {
      status = ResourceExhausted("");
    }
    if (!status.ok()) deletions().Restart(tick);
  }
  cold_->Clear();
  lost_.erased += rows;
}

void ColdTable::ForCold(KeySpan keys, ColdRows::RowFn fn) const {
  if (cold_ == nullptr || cold_->size() == 0) return;
  const Expired expired = ExpiredAt(0);
  std::vector<uint64_t> bits(keys.size());
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = keys.BitsAt(i);
  KeepError(cold_->Find(bits.data(), bits.size(), [&](size_t i, const ColdRow& row) {
    if (!HasExpired(expired, row.times)) fn(i, row);
  }));
}

void ColdTable::ExplainCold(KeySpan keys, KeyState* states) const {
  ForCold(keys, [&](size_t i, const ColdRow& row) {
    states[i].has_row = states[i].is_cold = true;
    states[i].updated = stamps_.Decode(row.times.updated);
    states[i].score = PublicScore(row.times.score);
  });
}

ExportPlan ColdTable::ScanCold(uint64_t cursor, uint64_t limit, uint64_t most,
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
  const RowLayout& l = content_layout_;
  std::vector<float> vector(static_cast<size_t>(l.dim));
  std::vector<float> state(static_cast<size_t>(l.state_width));
  KeepError(cold_->Read(plan.rows, [&](size_t i, const ColdRow& row) {
    if (where.has_keys && !where.AllowsKey(options_.key_type, row.key)) return;
    LoadVector(l.dtype, row.content, l.dim, vector.data());
    if (catch_up_.active()) {
      memcpy(state.data(), StateIn(row.content), l.state_bytes());
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

void ColdTable::CopyColdRows(const ExportPlan& plan, const TickColumns& to) const {
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    if (to.updates != nullptr) {
      to.updates[i] = static_cast<int64_t>(stamps_.Decode(plan.times[i].updated));
    }
    if (to.scores != nullptr) to.scores[i] = PublicScore(plan.times[i].score);
  }
  if (!to.has_content()) return;
  KeepError(cold_->Read(plan.rows, [&](size_t i, const ColdRow& row) {
    to.Set(i, content_layout_, &row.key, row.content);  // the low bytes of the key come first
  }));
}

Status ColdTable::TrimCold(Tick tick, uint64_t hot) {
  if (options_.max_capacity == 0) return Status();
  const auto most = static_cast<uint64_t>(options_.max_capacity);
  const uint64_t rows = hot + cold_->size();
  if (rows <= most) return Status();
  const uint64_t excess = rows - most;
  // As in memory, kEvictRows rows are compared for each row that leaves, and the lowest scores
  // leave.
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
  std::vector<uint64_t> keys(leaving);
  std::vector<char> copies(evicted_ == nullptr ? 0 : leaving * layout().stride);
  std::vector<int64_t> scores(leaving);
  std::vector<float> unpacked(static_cast<size_t>(options_.dim));
  std::vector<char> content(evicted_ == nullptr ? 0 : content_layout_.content_bytes());
  DYNEMB_RETURN_IF_ERROR(cold_->Read(places, [&](size_t i, const ColdRow& cold) {
    keys[i] = cold.key;
    scores[i] = PublicScore(scanned.times[chosen[i]].score);
    if (evicted_ == nullptr) return;
    memcpy(content.data(), cold.content, content.size());
    if (catch_up_.active()) BringContent(cold.key, content.data(), unpacked.data());
    const RowLayout& l = layout();
    char* const row = copies.data() + i * l.stride;
    memcpy(l.vector(row), content.data(), l.vector_bytes());
    if (l.state_width != 0) memcpy(l.state(row), StateIn(content.data()), l.state_bytes());
  }));
  if (evicted_ != nullptr) evicted_->AddAll(leaving, keys.data(), copies.data(), scores.data());
  for (const uint64_t key : keys) {
    if (tracking()) deletions().Add(tick, key, Removal::kEvict);
  }
  cold_->Remove(keys.data(), places.data(), leaving);
  lost_.evicted += leaving;
  TrimLosses(hot + cold_->size());
  return Status();
}

void ColdTable::TrimLosses(uint64_t rows) {
  if (tracking()) deletions().Trim(std::max<uint64_t>(rows, kDeletionsAtLeast));
}

void ColdTable::AddColdStats(TableStats* stats) const {
  if (cold_ == nullptr) return;
  stats->cold = cold_->stats();
  stats->cold.hits = moved_in_;
  stats->cold.errors += background_errors_.count();
  stats->size += stats->cold.rows;
  stats->index_bytes += stats->cold.index_bytes;
  stats->metadata_bytes += stats->cold.index_bytes;
  stats->evictions += lost_.evicted;
  stats->erased += lost_.erased;
  stats->expired += lost_.expired;
}

void ColdTable::RebaseCold() {
  if (cold_ == nullptr) return;
  cold_->ChangeTimes([](const RowTimes& times) {
    return RowTimes{times.updated, Scoring::Rebased(times.score)};
  });
}

void ColdTable::SwapColdBase(ColdTable* other) {
  std::swap(stamps_, other->stamps_);
  std::swap(scoring_, other->scoring_);
  std::swap(cold_, other->cold_);
  if (cold_ != nullptr && other->cold_ != nullptr) cold_->SwapCuts(other->cold_.get());
  std::swap(content_layout_, other->content_layout_);
  std::swap(trim_cursor_, other->trim_cursor_);
  end_of_bringing_ = other->end_of_bringing_ = 0;  // as in SwapBase
  SwapBase(other);
}

// --- To memory, and away

void ColdTable::ReadAhead(Exec& exec, KeySpan keys) try {
  std::shared_ptr<ColdRows> cold;  // stays while it is read, even if SwapRows takes it away
  std::unique_ptr<ColdRows::Ahead> ahead;
  {
    std::shared_lock<SharedMutex> shared(mutex());
    cold = cold_;
    if (cold == nullptr) return;
    std::vector<uint64_t> missing;
    if (!ListMissing(exec, keys, &missing).ok()) missing.clear();  // the later call reads
    SortDistinct(&missing);
    ahead = cold->PlanAhead(missing.data(), missing.size());
  }
  if (ahead != nullptr && !ahead->Read().ok()) ahead = nullptr;
  cold->KeepAhead(std::move(ahead));
} catch (const std::bad_alloc&) {
  // The later call reads.
}

Status ColdTable::TakeCold(const std::vector<uint64_t>& keys, Tick tick, Moved* moved) {
  // Without a tick, rows come whether they have expired or not; the caller's next pass leaves out
  // those that have at its tick.
  const Expired expired = tick == 0 ? Expired() : ExpiredAt(tick);
  const size_t content_bytes = content_layout_.content_bytes();
  std::vector<uint64_t> gone;
  std::vector<ColdPlace> gone_places;
  const size_t most = std::min<uint64_t>(keys.size(), cold_->size());
  moved->keys.reserve(most);
  moved->places.reserve(most);
  moved->times.reserve(most);
  moved->contents.reserve(most * content_bytes);
  DYNEMB_RETURN_IF_ERROR(cold_->Find(keys.data(), keys.size(), [&](size_t, const ColdRow& row) {
    if (HasExpired(expired, row.times)) {
      gone.push_back(row.key);
      gone_places.push_back(row.place);
      return;
    }
    moved->keys.push_back(row.key);
    moved->places.push_back(row.place);
    moved->times.push_back(row.times);
    moved->contents.insert(moved->contents.end(), row.content, row.content + content_bytes);
  }));
  moved->content_of = OrderOf(moved->keys);
  Reorder(moved->content_of, &moved->keys);
  Reorder(moved->content_of, &moved->places);
  Reorder(moved->content_of, &moved->times);
  if (gone.empty()) return Status();
  const std::vector<uint32_t> order = OrderOf(gone);
  Reorder(order, &gone);
  Reorder(order, &gone_places);
  for (const uint64_t key : gone) {
    if (tracking()) deletions().Add(tick, key, Removal::kExpire);
  }
  cold_->Remove(gone.data(), gone_places.data(), gone.size());
  lost_.expired += gone.size();
  return Status();
}

void ColdTable::RemoveMoved(const Moved& moved) {
  cold_->Remove(moved.keys.data(), moved.places.data(), moved.keys.size());
  moved_in_ += moved.keys.size();
  CompactSoon();
}

Status ColdTable::EraseCold(KeySpan keys, Tick tick, Removal how, size_t* erased) {
  const bool wipe = how == Removal::kWipe;
  if (cold_ == nullptr || (!any_cold() && !(wipe && has_flushes()))) return Status();
  std::vector<uint64_t> bits(keys.size());
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = keys.BitsAt(i);
  SortDistinct(&bits);
  std::vector<uint64_t> found;
  std::vector<ColdPlace> places;
  DYNEMB_RETURN_IF_ERROR(cold_->Find(bits.data(), bits.size(), [&](size_t, const ColdRow& row) {
    found.push_back(row.key);
    places.push_back(row.place);
  }));
  const std::vector<uint32_t> order = OrderOf(found);
  Reorder(order, &found);
  Reorder(order, &places);
  if (wipe) {
    DYNEMB_RETURN_IF_ERROR(flushes_.Forget(
        bits, [this](const std::string& folder, const std::vector<uint64_t>& forgotten) {
          return cold_->NoteForgotten(folder, forgotten);
        }));
  }
  for (const uint64_t key : found) {
    if (tracking()) deletions().Add(tick, key, how);
  }
  cold_->Remove(found.data(), places.data(), found.size());
  CompactSoon();
  auto& counter = how == Removal::kEvict    ? lost_.evicted
                  : how == Removal::kExpire ? lost_.expired
                                            : lost_.erased;
  counter += found.size();
  *erased += found.size();
  if (wipe && !found.empty()) {
    cold_->Condemn(places.data(), places.size());
    Status rewritten;
    try {
      rewritten = RewriteCondemned();
    } catch (const std::bad_alloc&) {
      rewritten =
          ResourceExhausted("no memory");  // the rows are gone, and the rows in memory are next
    }
    KeepError(rewritten);
  }
  return Status();
}

}  // namespace dynemb
