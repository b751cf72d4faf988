#include "cc/table/expiry.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

namespace dynemb {

void Expiry::Configure(const TableOptions& options, SystemTime* system_time) {
  ttl_ = options.ttl;
  clock_ = options.ttl_clock;
  since_access_ = options.ttl_since_access;
  min_rows_ = static_cast<uint64_t>(options.ttl_min_rows);
  system_time_ = system_time;
  has_time_ = clock_ != TtlClock::kData;
}

void Expiry::Swap(Expiry* other) {
  std::scoped_lock lock(mutex_, other->mutex_);
  std::swap(has_time_, other->has_time_);
  std::swap(time_, other->time_);
  std::swap(waiting_, other->waiting_);
  std::swap(last_step_, other->last_step_);
  std::swap(horizon_, other->horizon_);
  std::swap(marks_, other->marks_);
  last_tick_ = other->last_tick_ = 0;
}

void Expiry::Step(Tick tick) {
  if (!active() || clock_ != TtlClock::kSteps) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (tick == last_step_) return;
  last_step_ = tick;
  ++time_;
}

// The time from one to a later one. Users, and files, may have any times.
static int64_t Since(int64_t earlier, int64_t later) {
  const uint64_t passed = static_cast<uint64_t>(later) - static_cast<uint64_t>(earlier);
  return static_cast<int64_t>(std::min<uint64_t>(passed, std::numeric_limits<int64_t>::max()));
}

std::optional<int64_t> Expiry::SetTime(int64_t time, Tick tick) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::optional<int64_t> ignored;
  const auto leaps = [this](int64_t from, int64_t to) {
    return to > from && Since(from, to) / kLeap >= ttl_;
  };
  if (!has_time_) time_ = time;
  has_time_ = true;
  if (waiting_.has_value()) {
    if (leaps(time, *waiting_)) {
      ignored = waiting_;
    } else {
      time_ = std::max(time_, std::min(time, *waiting_));
    }
    waiting_.reset();
  }
  if (leaps(time_, time)) {
    waiting_ = time;
  } else {
    time_ = std::max(time_, time);
  }
  last_tick_ = 0;
  Note(tick);
  return ignored;
}

void Expiry::Note(Tick tick) {
  if (clock_ == TtlClock::kWall) time_ = std::max(time_, system_time_->Now().boot_ns);
  if (!has_time_) return;
  const int64_t resolution = std::max<int64_t>(1, ttl_ / kMarks);
  if (tick == 0) {
    // Not a use of the table.
  } else if ((marks_.empty() || Since(marks_.back().first, time_) >= resolution) && AddMark(tick)) {
    // A new mark.
  } else if (!marks_.empty()) {
    marks_.back().until = std::max(marks_.back().until, tick);
    marks_.back().time = time_;
  }
  while (!marks_.empty() && Since(marks_.front().time, time_) >= ttl_) {
    horizon_ = std::max(horizon_, marks_.front().until);
    marks_.pop_front();
  }
}

bool Expiry::AddMark(Tick tick) {
  try {
    // A reader with a later tick may have been here before.
    const Tick least = marks_.empty() ? horizon_ : marks_.back().until;
    marks_.push_back({std::max(tick, least), time_, time_});
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

std::vector<int64_t> Expiry::Save(Tick tick) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> saved;
  if (!active() || !has_time_) return saved;
  Note(tick);
  saved.push_back(static_cast<int64_t>(horizon_));
  const bool by_day = clock_ == TtlClock::kWall;
  const SystemTime::Moment now = by_day ? system_time_->Now() : SystemTime::Moment{};
  for (const Mark& mark : marks_) {
    saved.push_back(static_cast<int64_t>(mark.until));
    // No time before 1970: the clock may show it, and marks be older.
    saved.push_back(by_day ? std::max<int64_t>(0, mark.time - now.boot_ns + now.utc_ns)
                           : mark.time);
  }
  return saved;
}

bool Expiry::Restore(const std::vector<int64_t>& saved) {
  if (saved.size() % 2 == 0 || saved[0] < 0) return false;
  const bool by_day = clock_ == TtlClock::kWall;
  const SystemTime::Moment now = by_day ? system_time_->Now() : SystemTime::Moment{};
  std::deque<Mark> marks;
  int64_t last = INT64_MIN;  // the time of the mark before, in the file
  for (size_t i = 1; i < saved.size(); i += 2) {
    const auto before = static_cast<int64_t>(marks.empty() ? 0 : marks.back().until);
    if (saved[i] < before || saved[i] < saved[0] || saved[i + 1] < last) return false;
    last = saved[i + 1];
    int64_t time = last;
    if (by_day) time = std::min(std::max<int64_t>(0, last), now.utc_ns) - now.utc_ns + now.boot_ns;
    marks.push_back({static_cast<Tick>(saved[i]), time, time});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  marks_ = std::move(marks);
  horizon_ = static_cast<Tick>(saved[0]);
  has_time_ = clock_ != TtlClock::kData || !marks_.empty();
  time_ = marks_.empty() ? 0 : marks_.back().time;
  waiting_.reset();
  last_tick_ = 0;
  return true;
}

}  // namespace dynemb
