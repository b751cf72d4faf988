#include "cc/table/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "cc/table/hash_table.h"
#include "cc/table/phase.h"

namespace dynemb {
namespace {

// Row ids are 32 bits and the last one is kNoRow.
constexpr uint64_t kMostRows = 0xFFFFFFFEull;
constexpr int64_t kMostDim = int64_t{1} << 20;

Status CheckOptions(const TableOptions& o) {
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

}  // namespace

int64_t StateSpec::width() const {
  return std::accumulate(widths.begin(), widths.end(), int64_t{0});
}

Status Table::Create(const TableOptions& options, std::unique_ptr<Table>* table) {
  if (options.key_type == KeyType::kInt32)
    return HashTable<uint32_t, OneLane>::Make(options, table);
  return HashTable<uint64_t, OneLane>::Make(options, table);
}

Status Table::Init(const TableOptions& options) {
  DYNEMB_RETURN_IF_ERROR(CheckOptions(options));
  options_ = options;
  DYNEMB_RETURN_IF_ERROR(
      Initializer::Create(options.initializer, options.dim, options.seed, &initializer_));
  const uint64_t most =
      options.max_capacity != 0 ? static_cast<uint64_t>(options.max_capacity) : kMostRows;
  const RowLayout layout(SizeOf(options.key_type), options.dtype, options.dim, 0);
  DYNEMB_RETURN_IF_ERROR(rows_.Init(layout, most));
  const auto expected = static_cast<uint64_t>(options.init_capacity);
  DYNEMB_RETURN_IF_ERROR(index_.Init(expected, rows_.max_rows(), options.max_load_factor));
  SerialExec exec;
  rows_.Presize(exec, expected);
  return Status();
}

uint64_t Table::capacity() const {
  return options_.max_capacity != 0 ? static_cast<uint64_t>(options_.max_capacity)
                                    : rows_.max_rows();
}

TableStats Table::stats() const {
  TableStats s;
  s.size = rows_.live();
  s.slots = index_.slots();
  s.index_bytes = index_.bytes();
  s.row_bytes = rows_.bytes();
  const RowLayout& l = layout();
  s.metadata_bytes =
      s.index_bytes + s.row_bytes - rows_.high_water() * (l.vector_bytes() + l.state_bytes());
  s.hits = counters_.hits;
  s.misses = counters_.misses;
  s.inserts = counters_.inserts;
  s.evictions = counters_.evictions;
  s.erased = counters_.erased;
  s.refused = counters_.refused;
  s.dropped_gradients = counters_.dropped_gradients;
  s.nonfinite_gradients = counters_.nonfinite_gradients;
  return s;
}

Status Table::AttachState(Exec& exec, const StateSpec& spec) {
  if (spec == state_spec_) return Status();
  if (spec.widths.size() != spec.inits.size()) {
    return InvalidArgument("state of " + spec.optimizer + ": " +
                           std::to_string(spec.widths.size()) + " widths but " +
                           std::to_string(spec.inits.size()) + " initial values");
  }
  std::vector<float> initial;
  for (size_t i = 0; i < spec.widths.size(); ++i) {
    if (spec.widths[i] <= 0 || spec.widths[i] > kMostDim) {
      return InvalidArgument("state of " + spec.optimizer + ": width " +
                             std::to_string(spec.widths[i]) + " must be in [1, 2^20]");
    }
    initial.insert(initial.end(), static_cast<size_t>(spec.widths[i]), spec.inits[i]);
  }
  const RowLayout changed(layout().key_size, options_.dtype, options_.dim, spec.width());
  DYNEMB_RETURN_IF_ERROR(rows_.ChangeLayout(exec, changed, initial.data()));
  state_spec_ = spec;
  initial_state_ = std::move(initial);
  return Status();
}

Status Table::Clear() {
  counters_.erased += rows_.live();
  rows_.Clear();
  return index_.Clear();
}

Stamp Table::BeginBatch(Tick tick, size_t n) {
  if (tick > base_ + kRebaseAt) {
    // A jump past the whole range (a table not used for four billion batches) makes every stamp
    // equally old.
    const Tick move = std::max<Tick>(kRebase, tick - base_ - kRebase);
    const auto saturate = [move](Stamp s) -> Stamp {
      return s > move ? static_cast<Stamp>(s - move) : (s != 0 ? 1 : 0);
    };
    Bucket* buckets = index_.buckets();
    for (uint64_t b = 0; b < uint64_t{index_.segments()} * kBucketsPerSegment; ++b) {
      for (Stamp& access : buckets[b].access) access = saturate(access);
    }
    for (uint64_t r = 0; r < rows_.high_water(); ++r) {
      Stamp* update = layout().update(rows_.At(static_cast<RowId>(r)));
      *update = saturate(*update);
    }
    base_ += move;
  }
  const Stamp now = ToStamp(tick);
  if (now != batch_stamp_) batch_keys_ = 0;
  batch_stamp_ = now;
  batch_keys_ += n;
  return now;
}

ExportPlan Table::PlanExport(uint64_t cursor, uint64_t limit, Tick since) const {
  // Stamps of 1 may have been saturated when the base moved, so they stand for any tick up to then.
  const bool exact = since > base_ + 1 || (since == 1 && base_ == 0);
  const Stamp after = exact ? ToStamp(since) : 0;
  ExportPlan plan;
  uint64_t r = cursor;
  for (; r < rows_.high_water() && plan.rows.size() < limit; ++r) {
    if (*layout().update(rows_.At(static_cast<RowId>(r))) > after) {
      plan.rows.push_back(static_cast<RowId>(r));
    }
  }
  plan.next_cursor = r < rows_.high_water() ? static_cast<int64_t>(r) : -1;
  return plan;
}

void Table::Export(Exec& exec, const ExportPlan& plan, void* keys, void* vectors, float* state,
                   int64_t* updates) const {
  const RowLayout& l = layout();
  exec.ParallelFor(plan.rows.size(), 4096, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const char* row = rows_.At(plan.rows[i]);
      if (keys != nullptr) memcpy(static_cast<char*>(keys) + i * l.key_size, row, l.key_size);
      if (vectors != nullptr) {
        memcpy(static_cast<char*>(vectors) + i * l.vector_bytes(), l.vector(row), l.vector_bytes());
      }
      if (state != nullptr && l.state_bytes() != 0) {
        memcpy(state + i * static_cast<size_t>(l.state_width), l.state(row), l.state_bytes());
      }
      if (updates != nullptr) updates[i] = static_cast<int64_t>(base_ + *l.update(row));
    }
  });
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
