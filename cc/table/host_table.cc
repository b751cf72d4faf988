#include "cc/table/host_table.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "cc/table/codec.h"

namespace dynemb {

Status HostTable::Init(const TableOptions& options, Exec* exec, HotLimit limit) {
  DYNEMB_RETURN_IF_ERROR(CheckOptions(options));
  options_ = options;
  scoring_ = Scoring(options.evict_strategy, static_cast<uint64_t>(options.epoch_steps));
  expiry_.Configure(options);
  DYNEMB_RETURN_IF_ERROR(
      Initializer::Create(options.initializer, options.dim, options.seed, &initializer_));
  DYNEMB_RETURN_IF_ERROR(admission_.Init(options.admission, options.seed));
  const uint64_t most =
      options.max_capacity != 0 ? static_cast<uint64_t>(options.max_capacity) : kMostRows;
  const RowLayout layout(SizeOf(options.key_type), options.dtype, options.dim, 0);
  SetContentLayout(layout);
  uint64_t hot = most;
  max_hot_bytes_ = limit.max_bytes;
  if (limit.cold != nullptr) {
    DYNEMB_RETURN_IF_ERROR(HotRows(layout, &hot));
    StartCold(std::move(limit.cold));
  }
  rows_.Init(layout, hot);
  const auto expected = std::min(hot, static_cast<uint64_t>(options.init_capacity));
  DYNEMB_RETURN_IF_ERROR(index_.Init(expected, options.max_load_factor, SaltOf(options)));
  SerialExec serial;
  rows_.Presize(exec != nullptr ? *exec : serial, expected);
  return Status();
}

TableStats HostTable::stats() const {
  TableStats s;
  s.size = rows_.live();
  s.slots = index_.slots();
  s.index_bytes = index_.bytes();
  s.row_bytes = rows_.bytes();
  const RowLayout& l = layout();
  s.metadata_bytes = s.index_bytes + s.row_bytes -
                     rows_.high_water() * (l.vector_bytes() + l.state_bytes()) +
                     admission_.counters().bytes();
  s.hits = counters_.hits;
  s.misses = counters_.misses;
  s.inserts = counters_.inserts;
  s.evictions = counters_.evictions;
  s.erased = counters_.erased;
  s.expired = counters_.expired;
  s.refused = counters_.refused;
  s.unadmitted = counters_.unadmitted;
  s.dropped_gradients = counters_.dropped_gradients;
  s.nonfinite_gradients = counters_.nonfinite_gradients;
  AddColdStats(&s);
  return s;
}

Status HostTable::ResetState(Exec& exec, const StateSpec& spec) {
  std::vector<float> initial;
  DYNEMB_RETURN_IF_ERROR(InitialState(spec, &initial));
  const RowLayout changed(layout().key_size, options_.dtype, options_.dim, spec.width());
  StateSpec copy = spec;
  CatchUp catch_up(spec, options_.dim);
  DYNEMB_RETURN_IF_ERROR(BringAll(exec));
  if (cold_ != nullptr) DYNEMB_RETURN_IF_ERROR(ChangeColdLayout(changed, initial));
  BeforeWriteAll();
  DYNEMB_RETURN_IF_ERROR(rows_.ChangeLayout(exec, changed, initial.data()));
  SetContentLayout(changed);
  state_spec_ = std::move(copy);
  LoseSteps();
  catch_up_ = std::move(catch_up);
  initial_state_ = std::move(initial);
  return Status();
}

Status HostTable::Clear(Exec&, Tick tick) {
  // BeforeWriteAll needs the scores in the index.
  DYNEMB_RETURN_IF_ERROR(index_.Clear([this] { BeforeWriteAll(); }));
  // Nothing fails after this point.
  if (cold_ != nullptr) ClearCold(tick);
  if (changes_.tracking()) {
    for (uint64_t r = 0; r < rows_.high_water(); ++r) {
      const auto row = static_cast<RowId>(r);
      if (*layout().update(rows_.At(row)) != 0)
        changes_.Deleted(tick, KeyBits(row), Removal::kErase);
    }
    changes_.TrimDeletions(0);
  }
  counters_.erased += rows_.live();
  rows_.Clear();
  admission_.counters().Clear();
  return Status();
}

void HostTable::Changed(Exec& exec, const RowId* rows, const RowId* rows_before, size_t n,
                        Tick since, Tick now, bool* changed) const {
  constexpr size_t kGrain = 4096;
  exec.ParallelFor(n, kGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (rows[i] == kNoRow || IsRefused(rows[i])) {
        changed[i] = rows[i] == kNoRow || rows[i] != rows_before[i];
        continue;
      }
      const Tick updated = stamps_.Decode(*layout().update(rows_.At(rows[i])));
      const bool is_new = rows_before[i] == kNoRow && updated == now;
      changed[i] = (updated > since && !is_new) || catch_up_.last_tick() > since;
    }
  });
}

uint64_t HostTable::KeyBits(RowId row) const {
  const char* key = rows_.At(row);
  return layout().key_size == 8 ? LoadUnaligned<uint64_t>(key) : LoadUnaligned<uint32_t>(key);
}

void HostTable::BeforeWriteAll() {
  if (!changes_.tracking()) return;
  for (uint64_t r = 0; r < rows_.high_water(); ++r) {
    const auto row = static_cast<RowId>(r);
    BeforeWrite(row, *layout().update(rows_.At(row)));
  }
}

Status HostTable::HaveHot(Exec& exec, const std::vector<uint64_t>& keys,
                          std::vector<char>* has) const {
  std::vector<RowId> rows(keys.size());
  if (layout().key_size == 8) {
    FindQuietly(exec, {keys.data(), keys.size()}, Expired(), rows.data());
  } else {
    const std::vector<uint32_t> narrow(keys.begin(), keys.end());
    FindQuietly(exec, {narrow.data(), narrow.size()}, Expired(), rows.data());
  }
  for (size_t i = 0; i < rows.size(); ++i) (*has)[i] = rows[i] != kNoRow;
  return Status();
}

Status HostTable::StartCut(Exec&, std::unique_ptr<Cut> cut) {
  changes_.BeginCut(std::move(cut), rows_.high_water());
  Cut* const begun = changes_.cut();
  begun->most_rows = begun->since == 0 ? rows_.live() : begun->todo.Count();
  return Status();
}

std::vector<RowId> HostTable::PlanHotCut(size_t limit) {
  constexpr size_t kLooks = 4;
  Cut& cut = *changes_.cut();
  const UpdatedAfter after = stamps_.After(cut.since);
  std::vector<RowId> plan;
  uint64_t r = cut.todo.Next(cut.cursor);
  for (size_t looks = 0; r < cut.todo.rows() && plan.size() < limit && looks / kLooks < limit;
       ++looks, r = cut.todo.Next(r + 1)) {
    const auto row = static_cast<RowId>(r);
    const Stamp updated = *layout().update(rows_.At(row));
    if (after(updated) || (cut.used && updated != 0)) plan.push_back(row);
  }
  if (cut.used) {
    SerialExec serial;
    std::vector<Score> scores(plan.size());
    ReadScores(serial, plan.data(), plan.size(), scores.data());
    size_t kept = 0;
    for (size_t i = 0; i < plan.size(); ++i) {
      const RowId row = plan[i];
      if (after(*layout().update(rows_.At(row))) || after(scores[i])) plan[kept++] = row;
    }
    plan.resize(kept);
  }
  if (plan.empty()) cut.cursor = r;
  return plan;
}

Status HostTable::ReadStored(Exec& exec, const std::vector<RowId>& rows,
                             const RowColumns<Stamp>& to) const {
  const RowLayout& l = layout();
  exec.ParallelFor(rows.size(), 4096, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const char* row = rows_.At(rows[i]);
      to.Set(i, l, row);
      if (to.updates != nullptr) to.updates[i] = *l.update(row);
    }
  });
  if (to.scores != nullptr) ReadScores(exec, rows.data(), rows.size(), to.scores);
  return Status();
}

void HostTable::Explain(Exec& exec, KeySpan keys, KeyState* states) const {
  const size_t n = keys.size();
  std::vector<RowId> rows(n);
  std::vector<int64_t> scores(n);
  FindQuietly(exec, keys, ExpiredAt(0), rows.data());
  Scores(exec, keys, scores.data());
  std::vector<uint32_t> counts(n);
  AdmissionCounts(keys, counts.data());
  for (size_t i = 0; i < n; ++i) {
    states[i] = KeyState();
    states[i].admission_count = counts[i];
    states[i].has_row = rows[i] != kNoRow;
    if (!states[i].has_row) continue;  // or ExplainCold
    states[i].updated = stamps_.Decode(*layout().update(rows_.At(rows[i])));
    states[i].score = scores[i];
  }
  if (cold_ != nullptr) ExplainCold(keys, states);
  SetLosses(changes_.deletions(), keys, states);
}

void HostTable::SwapRows(Table* with, Tick tick) {
  auto* other = static_cast<HostTable*>(with);
  BeforeWriteAll();
  other->BeforeWriteAll();
  std::swap(index_, other->index_);
  std::swap(rows_, other->rows_);
  if (options_.admission == other->options_.admission) {
    std::swap(admission_.counters(), other->admission_.counters());
  }
  std::swap(swept_, other->swept_);
  std::swap(max_hot_bytes_, other->max_hot_bytes_);
  SwapColdBase(other);
  std::swap(initial_state_, other->initial_state_);
  stamps_.ForgetBatch();
  other->stamps_.ForgetBatch();
  RestartChanges(tick);
  if (other->tracking()) other->RestartChanges(tick);
}

Stamp HostTable::BeginBatch(Exec& exec, Tick tick, size_t n) {
  (void)HorizonAt(tick);  // records the time of this use
  if (options_.dtype != DType::kFloat32) buffers_.Prepare(exec.parallelism(), options_.dim);
  bool begins = false;
  const double share = stamps_.Follow(tick, &begins);
  if (begins) {
    swept_ = Swept();
    if (cold_ != nullptr) cold_->RestartShares();
    changes_.AddAllRows(rows_.high_water());
  }
  if (share != 0) Sweep(exec, share);
  return stamps_.BeginBatch(tick, n);
}

Stamp HostTable::BeginLookup(Exec& exec, Tick tick, size_t n) {
  if (scoring_.Step(tick)) (void)AdvanceEpoch(exec);  // does not fail
  admission_.BeginLookup(tick);
  return BeginInsert(exec, tick, n);
}

Stamp HostTable::BeginInsert(Exec& exec, Tick tick, size_t n) {
  expiry_.Step(tick);
  // Four examined rows for each inserted one: if every row expires, the expired rows that wait for
  // Reclaim are at most about a third of the others. Where many rows expire at once, their removal
  // is spread over many batches.
  const uint64_t inserts = counters_.inserts;
  const uint64_t inserted = inserts - inserts_reclaimed_;
  inserts_reclaimed_ = inserts;
  Reclaim(exec, tick, {n / 4 + 4 * inserted, n / 32 + 2 * inserted});
  return BeginBatch(exec, tick, n);
}

Status HostTable::AdvanceEpoch(Exec& exec) {
  if (!scoring_.has_epochs() || !scoring_.Advance()) return Status();
  RebaseCold();
  Bucket* const buckets = index_.buckets();
  exec.ParallelFor(uint64_t{index_.segments()} * kBucketsPerSegment, 4096,
                   [buckets](size_t begin, size_t end) {
                     for (size_t b = begin; b < end; ++b) {
                       for (Score& score : buckets[b].score) score = Scoring::Rebased(score);
                     }
                   });
  return Status();
}

void HostTable::Sweep(Exec& exec, double share) {
  constexpr size_t kGrain = 4096;
  // Rows and segments that are added while a sweep runs need no special care. They are added at the
  // end. New rows have new stamps. The slots that a split copies, from before or after the sweep's
  // position, are copied to where the sweep has not been yet. A split also moves slots within its
  // segment, so the position is between segments.
  const auto due = [share](uint64_t n) {
    return share >= 1 ? n : static_cast<uint64_t>(share * static_cast<double>(n));
  };
  const auto advance = [&](uint64_t* swept, uint64_t to, const auto& clamp) {
    if (to <= *swept) return;
    const uint64_t from = *swept;
    exec.ParallelFor(to - from, kGrain, [&](size_t begin, size_t end) {
      for (uint64_t i = from + begin; i < from + end; ++i) clamp(i);
    });
    *swept = to;
  };
  Bucket* const buckets = index_.buckets();
  const uint64_t segments = scoring_.by_time() ? index_.segments() : 0;
  advance(&swept_.buckets, due(segments) * kBucketsPerSegment, [&](uint64_t b) {
    for (Score& score : buckets[b].score) score = stamps_.Clamp(score);
  });
  advance(&swept_.rows, due(rows_.high_water()), [&](uint64_t r) {
    Stamp* update = layout().update(rows_.At(static_cast<RowId>(r)));
    *update = stamps_.Clamp(*update);
  });
  if (cold_ != nullptr) {
    cold_->ChangeShare(share, [this](const RowTimes& times) { return Clamped(times); });
  }
  if (share >= 1) stamps_.EndSweep();
}

Status HostTable::InsertAndEvict(Exec& exec, KeySpan keys, Tick tick, RowId* rows,
                                 EvictedRows* evicted) {
  struct Wanted {
    EvictedRows** slot;
    ~Wanted() { *slot = nullptr; }
  } wanted{&evicted_};
  evicted_ = evicted;
  return FindOrInsert(exec, keys, tick, rows);
}

bool HostTable::Satisfies(RowId row, const RowPredicate& where, const UpdatedAfter& after,
                          std::vector<float>* vector) const {
  const RowLayout& l = layout();
  const char* at = rows_.At(row);
  const Stamp updated = *l.update(at);
  if (!after(updated) || stamps_.Decode(updated) > where.updated_until) return false;
  if (where.has_keys && !where.AllowsKey(options_.key_type, KeyBits(row))) return false;
  if (!where.has_norms) return true;
  vector->resize(static_cast<size_t>(l.dim));
  LoadVector(l.dtype, l.vector(at), l.dim, vector->data());
  if (catch_up_.active()) {
    std::vector<float> state(l.state(at), l.state(at) + l.state_width);
    catch_up_.Bring(vector->data(), state.data());
  }
  return where.AllowsNorm(vector->data(), vector->size());
}

ExportPlan HostTable::ScanRows(Exec& exec, uint64_t cursor, uint64_t limit, uint64_t most,
                               const RowPredicate& where) const {
  if (cold_ != nullptr && cursor >= kColdCursor) return ScanCold(cursor, limit, most, where);
  constexpr uint64_t kMost = 65536, kLeast = 4096, kGrain = 1024;
  const UpdatedAfter after = stamps_.After(where.updated_after);
  const uint64_t all = rows_.high_water();
  const uint64_t end = cursor < all ? cursor + std::min(all - cursor, most) : all;
  ExportPlan plan;
  uint64_t next = cursor;
  while (next < end && plan.rows.size() < limit) {
    const uint64_t from = next;
    const uint64_t want = limit - plan.rows.size();
    const uint64_t n = std::min(end - from, std::clamp(want, kLeast, kMost));
    std::unique_ptr<bool[]> chosen(new bool[n]);
    exec.ParallelFor(n, kGrain, [&](size_t begin, size_t last) {
      std::vector<float> vector;
      for (size_t i = begin; i < last; ++i) {
        chosen[i] = Satisfies(static_cast<RowId>(from + i), where, after, &vector);
      }
    });
    std::vector<RowId> rows;
    for (uint64_t i = 0; i < n; ++i) {
      if (chosen[i]) rows.push_back(static_cast<RowId>(from + i));
    }
    if (where.has_scores()) {
      std::vector<Score> scores(rows.size());
      ReadScores(exec, rows.data(), rows.size(), scores.data());
      size_t kept = 0;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (where.AllowsScore(PublicScore(scores[i]))) rows[kept++] = rows[i];
      }
      rows.resize(kept);
    }
    next = from + n;
    if (rows.size() > want) {
      next = rows[want];
      rows.resize(want);
    }
    plan.rows.insert(plan.rows.end(), rows.begin(), rows.end());
  }
  plan.next_cursor = next < all ? static_cast<int64_t>(next) : -1;
  if (next >= all && cold_ != nullptr) {
    if (!plan.rows.empty()) {
      plan.next_cursor = static_cast<int64_t>(kColdCursor);
    } else {
      return ScanCold(kColdCursor, limit, most - std::min(most, all - std::min(all, cursor)),
                      where);
    }
  }
  return plan;
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

Status HostTable::AddHotRows(Exec&, const ColdRows::AddHotFn& add) {
  for (uint64_t r = 0; r < rows_.high_water(); ++r) {
    const auto row = static_cast<RowId>(r);
    const Stamp updated = *layout().update(rows_.At(row));
    if (updated == 0) continue;
    const RowTimes times = Clamped({updated, ScoreOf(row)});
    DYNEMB_RETURN_IF_ERROR(add(KeyBits(row), rows_.At(row), times, TickOf(updated)));
  }
  return Status();
}

Status HostTable::CopyAdmission(Exec&, std::vector<uint64_t>* words, int64_t* first_line) {
  const AdmissionCounters& counters = admission_.counters();
  words->assign(counters.data(), counters.data() + counters.bytes() / sizeof(uint64_t));
  *first_line = counters.first_line();
  return Status();
}

}  // namespace dynemb
