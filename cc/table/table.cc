// The calls that are the same for every kind of table: checks of options, state and scores,
// eviction down to a number of rows (EvictTo), and removal of expired rows (Expire, Reclaim). They
// list rows with ScanRows, copy them with Export, and remove them with RemoveKeys. Each kind of
// table implements ScanRows, CopyRows (for Export) and Erase (for RemoveKeys). Table::Create, which
// creates host tables, and TableLock are here, too. table_catch_up.cc has the calls of a step, and
// Export.
#include "cc/table/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

#include "cc/table/function_ref.h"
#include "cc/table/hash_table.h"
#include "cc/table/number_text.h"
#include "cc/table/phase.h"
#include "cc/table/warning.h"

namespace dynemb {
namespace {

constexpr int64_t kMostDim = int64_t{1} << 20;
constexpr int64_t kMostTtl = int64_t{1} << 62;

// "'adam' (16 floats from 0, 16 floats from 0)"
std::string Text(const StateSpec& spec) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << "'" << spec.optimizer << "' (";
  for (size_t i = 0; i < std::max(spec.widths.size(), spec.inits.size()); ++i) {
    text << (i == 0 ? "" : ", ");
    if (i < spec.widths.size()) text << spec.widths[i] << " floats";
    if (i < spec.inits.size()) text << " from " << spec.inits[i];
  }
  text << (spec.widths.empty() && spec.inits.empty() ? "no floats)" : ")");
  return text.str();
}

}  // namespace

int64_t StateSpec::width() const {
  return std::accumulate(widths.begin(), widths.end(), int64_t{0});
}

Status Table::PromoteIfDue(Exec& exec, Tick tick) {
  if (!PromotionIsDue()) return Status();
  Status status = Promote(exec, tick);
  return status.code() == Code::kResourceExhausted ? Status() : status;
}

Status Table::CheckOptions(const TableOptions& o) {
  const auto bad = [](const char* name, const auto& value, const char* why) {
    return InvalidArgument(std::string(name) + "=" + NumberText(value) + ": " + why);
  };
  if (o.dim <= 0 || o.dim > kMostDim) return bad("dim", o.dim, "must be in [1, 2^20]");
  if (o.init_capacity <= 0 || static_cast<uint64_t>(o.init_capacity) > kMostRows) {
    return bad("init_capacity", o.init_capacity, "must be positive and below 2^32 - 2");
  }
  if (o.max_capacity < 0) return bad("max_capacity", o.max_capacity, "must not be negative");
  if (static_cast<uint64_t>(o.max_capacity) > kMostRows) {
    return bad("max_capacity", o.max_capacity, "must be below 2^32 - 2");
  }
  if (o.max_capacity != 0 && o.init_capacity > o.max_capacity) {
    return bad("init_capacity", o.init_capacity, "must not be more than max_capacity");
  }
  if (!(o.max_load_factor >= Index::kMinLoad && o.max_load_factor <= Index::kMaxLoad)) {
    return bad("max_load_factor", o.max_load_factor, "must be in [0.05, 0.95]");
  }
  if (o.epoch_steps < 0) return bad("epoch_steps", o.epoch_steps, "must not be negative");
  if (o.ttl < 0 || o.ttl > kMostTtl) return bad("ttl", o.ttl, "must be in [0, 2^62]");
  if (o.ttl_min_rows < 0) return bad("ttl_min_rows", o.ttl_min_rows, "must not be negative");
  if (o.ttl_since_access && !Scoring(o.evict_strategy, 0).by_time()) {
    return bad("ttl_since_access", 1, "the table records scores, not the times of last accesses");
  }
  return Admission::Check(o.admission);
}

uint64_t Table::SaltOf(const TableOptions& options) {
  uint64_t salt = MixKey(options.seed);
  for (const char c : options.name) salt = MixKey(salt + static_cast<unsigned char>(c));
  return salt;
}

Status Table::InitialState(const StateSpec& spec, std::vector<float>* initial) {
  if (spec.widths.size() != spec.inits.size()) {
    return InvalidArgument("state of " + spec.optimizer + ": " +
                           std::to_string(spec.widths.size()) + " widths but " +
                           std::to_string(spec.inits.size()) + " initial values");
  }
  for (size_t i = 0; i < spec.widths.size(); ++i) {
    if (spec.widths[i] <= 0 || spec.widths[i] > kMostDim) {
      return InvalidArgument("state of " + spec.optimizer + ": width " +
                             std::to_string(spec.widths[i]) + " must be in [1, 2^20]");
    }
    initial->insert(initial->end(), static_cast<size_t>(spec.widths[i]), spec.inits[i]);
  }
  return Status();
}

Status Table::TakeState(Exec& exec, const StateSpec& spec, const std::string& owner,
                        bool* was_reset) {
  const bool of_another = !owner.empty() && !state_owner_.empty() && owner != state_owner_;
  *was_reset = of_another || !(spec == state_spec_);
  std::string next = owner;  // nothing is allocated after the change
  if (*was_reset) DYNEMB_RETURN_IF_ERROR(ResetState(exec, spec));
  state_owner_ = std::move(next);
  return Status();
}

Status Table::CheckState(const StateSpec& spec, const std::string& owner) const {
  if (spec.widths.empty()) return Status();
  if (!owner.empty() && !state_owner_.empty() && owner != state_owner_) {
    return FailedPrecondition(
        "table '" + options_.name + "' is trained by " + state_owner_ + " now, and " + owner +
        " cannot step it. A table has the state of one OptimizerWrapper. If several losses train "
        "the table in turn, step it with one wrapper for all of them, "
        "apply_gradients([(gradient, table)]), and step the dense variables of each loss with a "
        "separate optimizer. A new OptimizerWrapper, or attach(), takes the table over, with fresh "
        "state");
  }
  if (spec == state_spec_) return Status();
  return FailedPrecondition(
      "the rows of table '" + options_.name + "' have " +
      (state_spec_.widths.empty() ? "no state" : "the state of " + Text(state_spec_)) + ", which " +
      Text(spec) + (owner.empty() ? "" : " of " + owner) +
      " cannot step: an optimizer's state has to be attached first");
}

void Table::SwapBase(Table* other) {
  const uint64_t seed = options_.seed;
  TakeSeed(other->options_.seed);
  other->TakeSeed(seed);
  expiry_.Swap(&other->expiry_);
  reclaimed_ = other->reclaimed_ = Reclaimed();
  if (!(state_spec_ == other->state_spec_)) {
    state_owner_.clear();
    other->state_owner_.clear();
  }
  std::swap(state_spec_, other->state_spec_);
  std::swap(catch_up_, other->catch_up_);
  std::swap(steps_lost_, other->steps_lost_);
  brought_ = other->brought_ = Brought();
  std::swap(marks_are_wrong_, other->marks_are_wrong_);
}

Status Table::Create(const TableOptions& options, std::unique_ptr<Table>* table, Exec* exec) {
  if (options.key_type == KeyType::kInt32) return HashTable<uint32_t>::Make(options, table, exec);
  return HashTable<uint64_t>::Make(options, table, exec);
}

Status Table::Create(const TableOptions& options, std::unique_ptr<ColdRows> cold,
                     uint64_t max_memory_bytes, std::unique_ptr<Table>* table, Exec* exec) {
  HotLimit limit{std::move(cold), max_memory_bytes};
  if (options.key_type == KeyType::kInt32) {
    return HashTable<uint32_t>::Make(options, table, exec, std::move(limit));
  }
  return HashTable<uint64_t>::Make(options, table, exec, std::move(limit));
}

Status Table::Full(uint64_t keys, uint64_t size, uint64_t capacity, const std::string& why) const {
  return ResourceExhausted("table '" + options_.name + "' cannot take " + std::to_string(keys) +
                           " new keys: it holds " + std::to_string(size) + " rows of at most " +
                           std::to_string(capacity) + "; " + why);
}

Status Table::CheckHasFiles() const {
  if (has_cold_rows()) return Status();
  return FailedPrecondition("table '" + options_.name + "' has no files");
}

Status Table::CheckNoCut(const Cut* running) const {
  if (running == nullptr) return Status();
  return FailedPrecondition("table '" + options_.name + "' is being dumped already");
}

Status Table::CheckDeletions(const DeletionLog& log, Tick since) const {
  const Tick known = log.known_since();
  if (since >= known) return Status();
  return FailedPrecondition("table '" + options_.name + "' knows its deleted keys since tick " +
                            std::to_string(known) + ", but the delta needs them since tick " +
                            std::to_string(since) + ": publish a new dump, and then deltas");
}

namespace {

// Rows per step of EvictTo and Expire.
constexpr uint64_t kEvictStep = uint64_t{1} << 18;
// For RemoveExpired: nothing expires in a table of so few rows.
constexpr int64_t kSpared = -2;
constexpr uint64_t kAllRows = std::numeric_limits<uint64_t>::max();
constexpr size_t kBins = size_t{1} << 16;

// Lists the rows from a cursor on, some at a time.
using ListFrom = FunctionRef<ExportPlan(uint64_t cursor)>;

// Calls fn(plan, scores) for all rows, some at a time, until it fails.
template <class Fn>
Status ForScores(Exec& exec, const Table& table, const ListFrom& list, const Fn& fn) {
  int64_t cursor = 0;
  while (cursor >= 0) {
    const ExportPlan plan = list(static_cast<uint64_t>(cursor));
    DYNEMB_RETURN_IF_ERROR(table.Error());
    std::vector<int64_t> scores(plan.rows.size());
    table.Export(exec, plan, TickColumns::Scores(scores.data()));
    DYNEMB_RETURN_IF_ERROR(table.Error());
    DYNEMB_RETURN_IF_ERROR(fn(plan, scores));
    cursor = plan.next_cursor;
  }
  return Status();
}

// The lowest scores of a table: all below `below`, and `ties` rows that have this score.
struct LowestScores {
  int64_t below = 0;
  uint64_t ties = 0;
};

// The n lowest scores, 0 < n <= the number of rows. Each pass over the rows divides the range that
// the n-th score is in by kBins.
Status FindLowest(Exec& exec, const Table& table, const ListFrom& list, uint64_t n,
                  LowestScores* lowest) {
  int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
  DYNEMB_RETURN_IF_ERROR(
      ForScores(exec, table, list, [&](const ExportPlan&, const std::vector<int64_t>& scores) {
        for (const int64_t score : scores) {
          low = std::min(low, score);
          high = std::max(high, score);
        }
        return Status();
      }));
  // n counts the rows whose scores are `low` or more.
  while (low < high) {
    const int64_t width = (high - low) / static_cast<int64_t>(kBins) + 1;
    std::vector<uint64_t> bins(kBins);
    DYNEMB_RETURN_IF_ERROR(
        ForScores(exec, table, list, [&](const ExportPlan&, const std::vector<int64_t>& scores) {
          for (const int64_t score : scores) {
            if (low <= score && score <= high) ++bins[static_cast<size_t>((score - low) / width)];
          }
          return Status();
        }));
    size_t bin = 0;
    while (bin + 1 < kBins && bins[bin] < n) n -= bins[bin++];
    low += static_cast<int64_t>(bin) * width;
    high = std::min(high, low + width - 1);
  }
  *lowest = {low, n};
  return Status();
}

}  // namespace

Status Table::EvictTo(Exec& exec, uint64_t rows, Tick tick, uint64_t* evicted) {
  *evicted = 0;
  uint64_t expired;
  DYNEMB_RETURN_IF_ERROR(Expire(exec, tick, &expired));
  DYNEMB_RETURN_IF_ERROR(Error());
  const uint64_t held = size();
  DYNEMB_RETURN_IF_ERROR(Error());
  if (held <= rows) return Status();
  // All rows that are left, also those that expire from now on.
  const auto list = [&](uint64_t cursor) {
    return ScanRows(exec, cursor, kEvictStep, kAllRows, RowPredicate());
  };
  LowestScores lowest{std::numeric_limits<int64_t>::max(), 0};
  if (rows != 0) DYNEMB_RETURN_IF_ERROR(FindLowest(exec, *this, list, held - rows, &lowest));
  const size_t key_size = layout().key_size;
  return ForScores(
      exec, *this, list, [&](const ExportPlan& plan, const std::vector<int64_t>& scores) {
        ExportPlan leaving;
        leaving.cold = plan.cold;
        for (size_t i = 0; i < scores.size(); ++i) {
          if (scores[i] < lowest.below || (scores[i] == lowest.below && lowest.ties != 0)) {
            lowest.ties -= scores[i] == lowest.below;
            leaving.rows.push_back(plan.rows[i]);
            if (plan.cold) leaving.times.push_back(plan.times[i]);
          }
        }
        if (leaving.rows.empty()) return Status();
        std::vector<char> keys(leaving.rows.size() * key_size);
        Export(exec, leaving, TickColumns::Keys(keys.data()));
        DYNEMB_RETURN_IF_ERROR(Error());
        return RemoveKeys(exec, {options_.key_type, keys.data(), leaving.rows.size()}, tick,
                          Removal::kEvict, evicted);
      });
}

void Table::SetLosses(const DeletionLog& log, KeySpan keys, KeyState* states) {
  const size_t n = keys.size();
  std::vector<uint64_t> bits(n);
  for (size_t i = 0; i < n; ++i) {
    bits[i] = keys.BitsAt(i);
  }
  std::vector<DeletionLog::Deletion> last(n);
  log.FindLast(bits, last.data());
  for (size_t i = 0; i < n; ++i) {
    states[i].lost = last[i].tick;
    states[i].lost_by = last[i].how;
  }
}

Status Table::RemoveKeys(Exec& exec, KeySpan keys, Tick tick, Removal how, uint64_t* removed) {
  *removed += Erase(exec, keys, tick, how);
  return Status();
}

ExportPlan Table::SelectRows(Exec& exec, uint64_t cursor, uint64_t limit,
                             const RowPredicate& where) const {
  RowPredicate unexpired = where;
  unexpired.LeaveOutExpired(HorizonAt(0), expiry_.since_access());
  return ScanRows(exec, cursor, limit, kAllRows, unexpired);
}

Status Table::RemoveExpired(Exec& exec, Tick tick, Tick horizon, uint64_t rows, uint64_t most,
                            int64_t* cursor, uint64_t* expired) {
  RowPredicate where;
  where.TakeExpired(horizon, expiry_.since_access());
  most = std::min(most, kEvictStep);
  if (expiry_.min_rows() != 0) {
    const uint64_t held = size();
    DYNEMB_RETURN_IF_ERROR(Error());
    if (expiry_.Spares(held)) {
      *cursor = kSpared;
      return Status();
    }
    most = std::min(most, held - expiry_.min_rows());
  }
  const ExportPlan plan = ScanRows(exec, static_cast<uint64_t>(*cursor), most, rows, where);
  DYNEMB_RETURN_IF_ERROR(Error());
  *cursor = plan.next_cursor;
  if (plan.rows.empty()) return Status();
  std::vector<char> keys(plan.rows.size() * layout().key_size);
  Export(exec, plan, TickColumns::Keys(keys.data()));
  DYNEMB_RETURN_IF_ERROR(Error());
  return RemoveKeys(exec, {options_.key_type, keys.data(), plan.rows.size()}, tick,
                    Removal::kExpire, expired);
}

Status Table::Expire(Exec& exec, Tick tick, uint64_t* expired) {
  *expired = 0;
  const Tick horizon = HorizonAt(tick);
  DYNEMB_RETURN_IF_ERROR(Error());
  if (horizon == 0) return Status();
  int64_t cursor = 0;
  while (cursor >= 0) {
    DYNEMB_RETURN_IF_ERROR(
        RemoveExpired(exec, tick, horizon, kAllRows, kAllRows, &cursor, expired));
  }
  reclaimed_ = {0, 0, 0, horizon, cursor != kSpared};
  return Status();
}

void Table::Reclaim(Exec& exec, Tick tick, const ReclaimWork& work) {
  if (!expiry_.active()) return;
  const Tick horizon = HorizonAt(tick);
  const bool is_clean = reclaimed_.cursor == 0 && reclaimed_.complete;
  if (horizon == 0 || (is_clean && reclaimed_.horizon == horizon)) return;
  reclaimed_.due += work.rows;
  reclaimed_.most += work.most;
  if (reclaimed_.due < work.least) return;
  if (reclaimed_.cursor == 0) reclaimed_.horizon = horizon;
  auto cursor = static_cast<int64_t>(reclaimed_.cursor);
  uint64_t expired = 0;
  try {
    const uint64_t limit = std::max<uint64_t>(1, reclaimed_.most);
    const Status status =
        RemoveExpired(exec, tick, horizon, reclaimed_.due, limit, &cursor, &expired);
    if (!status.ok()) cursor = 0;
  } catch (const std::bad_alloc&) {
    cursor = 0;  // the rows remain, and a later batch tries again
  }
  reclaimed_.complete = cursor < 0 && cursor != kSpared;
  reclaimed_.cursor = static_cast<uint64_t>(std::max<int64_t>(cursor, 0));
  reclaimed_.due = reclaimed_.most = 0;
}

Status Table::SetDataTime(int64_t time, Tick tick) {
  if (!expiry_.active() || options_.ttl_clock != TtlClock::kData) {
    return InvalidArgument("table '" + options_.name + "' does not expire rows by the data's time");
  }
  if (const std::optional<int64_t> ignored = expiry_.SetTime(time, tick)) {
    const uint64_t count = ++ignored_times_;
    if ((count & (count - 1)) == 0) {  // the first, and whenever their number has doubled
      Warn(("table '" + options_.name + "': the data's time " + std::to_string(*ignored) +
            " is ignored: it is more than " + std::to_string(Expiry::kLeap) +
            " ttl after the time before it, but the next time, " + std::to_string(time) +
            ", is not. Times ignored so far: " + std::to_string(count))
               .c_str());
    }
  }
  return Status();
}

Status Table::SetExpiryMarks(const std::vector<int64_t>& marks) {
  if (expiry_.Restore(marks)) return Status();
  return InvalidArgument("the marks of times for table '" + options_.name + "' are not in order");
}

Status Table::CheckScores(const Scoring& scoring, const Score* scores, size_t n) const {
  if (scoring.by_time()) {
    return InvalidArgument("table '" + options_.name +
                           "' has no scores to set: its strategy evicts by the time of the last "
                           "access");
  }
  for (size_t i = 0; i < n; ++i) {
    if (scores[i] <= scoring.Last()) continue;
    return InvalidArgument("score " + std::to_string(scores[i]) + " has epoch " +
                           std::to_string(scores[i] >> Scoring::kCountBits) + ", but table '" +
                           options_.name + "' is in epoch " + std::to_string(scoring.epoch()));
  }
  return Status();
}

TableLock::TableLock(std::vector<Table*> tables, Mode mode)
    : tables_(std::move(tables)), mode_(mode) {
  tables_.erase(std::remove_if(tables_.begin(), tables_.end(),
                               [](const Table* table) { return table->read_only(); }),
                tables_.end());
  std::sort(tables_.begin(), tables_.end(), std::less<Table*>());
  tables_.erase(std::unique(tables_.begin(), tables_.end()), tables_.end());
  Phase phase("wait for locks");
  if (mode_ == Mode::kRead) {
    mode_ = Mode::kShared;
    Lock();
    // This cannot change meanwhile: only a step leaves rows behind, and it needs exclusive access.
    if (std::none_of(tables_.begin(), tables_.end(),
                     [](const Table* t) { return t->reading_changes_rows(); })) {
      return;
    }
    Unlock();
    mode_ = Mode::kExclusive;
  }
  Lock();
}

TableLock::~TableLock() { Unlock(); }

void TableLock::Lock() {
  for (Table* t : tables_) {
    mode_ == Mode::kShared ? t->mutex().lock_shared() : t->mutex().lock();
  }
}

void TableLock::Unlock() {
  for (Table* t : tables_) {
    mode_ == Mode::kShared ? t->mutex().unlock_shared() : t->mutex().unlock();
  }
}

}  // namespace dynemb
