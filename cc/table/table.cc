#include "cc/table/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <sstream>
#include <utility>

#include "cc/table/hash_table.h"
#include "cc/table/phase.h"

namespace dynemb {
namespace {

constexpr int64_t kMostDim = int64_t{1} << 20;

// "'adam' (16 floats from 0, 16 floats from 0)"
std::string Text(const StateSpec& spec) {
  std::ostringstream text;
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
    return InvalidArgument(std::string(name) + "=" + std::to_string(value) + ": " + why);
  };
  if (o.dim <= 0 || o.dim > kMostDim) return bad("dim", o.dim, "must be in [1, 2^20]");
  if (o.init_capacity <= 0 || static_cast<uint64_t>(o.init_capacity) > kMostRows) {
    return bad("init_capacity", o.init_capacity, "must be positive and below 2^32 - 1");
  }
  if (o.max_capacity < 0) return bad("max_capacity", o.max_capacity, "must not be negative");
  if (static_cast<uint64_t>(o.max_capacity) > kMostRows) {
    return bad("max_capacity", o.max_capacity, "must be below 2^32 - 1");
  }
  if (o.max_capacity != 0 && o.init_capacity > o.max_capacity) {
    return bad("init_capacity", o.init_capacity, "must not be more than max_capacity");
  }
  if (!(o.max_load_factor > 0 && o.max_load_factor <= Index::kMaxLoad)) {
    return bad("max_load_factor", o.max_load_factor, "must be in (0, 0.95]");
  }
  return Status();
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
        "table '" + options_.name + "' is trained by " + state_owner_ + " now, so that " + owner +
        " cannot step it: use one optimizer for each table. A new "
        "OptimizerWrapper, or attach(), takes a table over, with fresh state");
  }
  if (spec == state_spec_) return Status();
  return FailedPrecondition(
      "the rows of table '" + options_.name + "' have " +
      (state_spec_.widths.empty() ? "no state" : "the state of " + Text(state_spec_)) + ", which " +
      Text(spec) + (owner.empty() ? "" : " of " + owner) +
      " cannot step: an optimizer's state has to be attached first");
}

void Table::SwapStateSpecs(Table* other) {
  if (!(state_spec_ == other->state_spec_)) {
    state_owner_.clear();
    other->state_owner_.clear();
  }
  std::swap(state_spec_, other->state_spec_);
}

Status Table::Create(const TableOptions& options, std::unique_ptr<Table>* table, Exec* exec) {
  if (options.key_type == KeyType::kInt32) return HashTable<uint32_t>::Make(options, table, exec);
  return HashTable<uint64_t>::Make(options, table, exec);
}

Status Table::Full(uint64_t keys, uint64_t size, uint64_t capacity, const std::string& why) const {
  return ResourceExhausted("table '" + options_.name + "' cannot take " + std::to_string(keys) +
                           " new keys: it holds " + std::to_string(size) + " rows of at most " +
                           std::to_string(capacity) + "; " + why);
}

Status Table::CheckNoCut(const Cut* running) const {
  if (running == nullptr) return Status();
  return FailedPrecondition("table '" + options_.name + "' is being dumped already");
}

Status Table::CheckDeletions(const DeletionLog& log, Tick since) const {
  const Tick known = log.known_since();
  if (since >= known) return Status();
  return FailedPrecondition("the keys that table '" + options_.name + "' has lost since tick " +
                            std::to_string(since) +
                            " are not known any more, only those since tick " +
                            std::to_string(known) + ": publish a new dump, and deltas since it");
}

TableLock::TableLock(std::vector<Table*> tables, Mode mode)
    : tables_(std::move(tables)), mode_(mode) {
  std::sort(tables_.begin(), tables_.end(), std::less<Table*>());
  tables_.erase(std::unique(tables_.begin(), tables_.end()), tables_.end());
  Phase phase("wait for locks");
  for (Table* t : tables_) {
    mode_ == Mode::kShared ? t->mutex().lock_shared() : t->mutex().lock();
  }
}

TableLock::~TableLock() {
  for (Table* t : tables_) {
    mode_ == Mode::kShared ? t->mutex().unlock_shared() : t->mutex().unlock();
  }
}

}  // namespace dynemb
