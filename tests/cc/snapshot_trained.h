// Trained: a table of any kind that random calls train, for snapshot tests.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_TRAINED_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_TRAINED_H_

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/snapshot_model.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {
namespace {

// A table in random use, with a record of its last accesses and deleted keys.
class Trained {
 public:
  // The calls that may happen to it.
  enum class Uses {
    kAll,
    kChain,  // no changes that deltas do not contain: another state, rows with old times
  };

  Trained(const Kind& kind, Uses uses, Clock* clock, Exec* exec, uint64_t seed)
      : kind_(kind), uses_(uses), clock_(clock), random_(seed), t_(MakeSubject(kind, exec)) {
    EXPECT_TRUE(t_->AttachState(t_.exec(), SpecOf(kind.state)).ok());
  }

  const Subject& subject() const { return t_; }
  Table* table() const { return &t_.table(); }
  Image Now() const { return Rows(t_); }
  // Whether the last steps have swapped the rows of the table, after which no delta is possible.
  bool TakeSwapped() { return std::exchange(swapped_, false); }

  void Step() {
    const Image before = Now();
    const Tick tick = Do();
    const Image after = Now();
    for (const auto& row : before) {
      if (after.count(row.first) != 0) continue;
      if (tick != 0) deletions_.emplace_back(tick, row.first);
      touched_.insert(row.first);
    }
  }
  // A lookup. It saves no rows.
  void Look() {
    const Keys keys = RandomKeys();
    Tick_();
    t_.Find(keys);
    Accessed(keys, true);
  }

  // Records that a cut begins, with this watermark and since this tick. Returns whether it can.
  bool BeginCut(Tick watermark, Tick since, CutOf of) {
    if (!tracked_) known_since_ = deletions_.empty() ? 0 : watermark;
    tracked_ = true;
    touched_.clear();
    return of == CutOf::kRows || since >= known_since_;
  }
  Tick known_since() const { return tracked_ ? known_since_ : 0; }
  std::set<uint64_t> DeletedSince(Tick since, const Image& held) const {
    std::set<uint64_t> keys;
    for (const auto& d : deletions_) {
      if (d.first > since && held.count(d.second) == 0) keys.insert(d.second);
    }
    return keys;
  }

  // The first and last tick at which the last access of each key may have been.
  using Accesses = std::unordered_map<uint64_t, std::pair<Tick, Tick>>;
  const Accesses& accesses() const { return accesses_; }
  // Whether no batch since the cut had this key or changed all rows.
  bool Untouched(uint64_t key) const { return touched_.count(key) == 0; }

 private:
  Tick Tick_() {
    t_.set_tick(clock_->Next() - 1);
    return t_.tick() + 1;
  }
  void Accessed(const Keys& keys, bool surely) {
    for (uint64_t wide : keys) {
      const uint64_t key = t_.Narrow(wide);
      auto& access = accesses_[key];
      access.second = t_.tick();
      if (surely) access.first = t_.tick();
      touched_.insert(key);
    }
  }

  // Makes a random call. Returns the tick at which the call deletes keys; 0: deletions are not
  // recorded.
  Tick Do() {
    if (random_.Below(3) == 0) {
      EXPECT_TRUE(t_->Promote(t_.exec(), t_.tick()).ok());
    }
    switch (random_.Below(uses_ == Uses::kAll ? 26 : 24)) {
      default: {
        const Keys keys = RandomKeys();
        RowIds rows(keys.size());
        Tick_();
        const Status status = t_.TryFindOrInsert(keys, &rows);
        Accessed(keys, status.ok());
        if (status.ok()) Remember(keys, rows);
        return t_.tick();
      }
      case 0:
      case 1:
      case 2:
      case 3: {
        const Keys keys = RandomKeys();
        const std::vector<char> vectors = RandomBytes(keys.size() * t_.vector_bytes());
        const Tick tick = Tick_();
        const Status status = t_->Upsert(t_.exec(), t_.Pack(keys), vectors.data(), tick);
        t_.set_tick(tick);
        Accessed(keys, status.ok());
        return tick;
      }
      case 4:
      case 5: {
        const Keys keys = Distinct(RandomKeys());
        Tick_();
        Accessed(keys, t_.TryAccumulate(keys, random_.Values(keys.size() * kDim)).ok());
        return t_.tick();
      }
      case 6:
      case 7: {
        const Keys keys = Distinct(RandomKeys());
        const auto width = static_cast<size_t>(t_.state_width());
        Floats state = random_.Values(keys.size() * width);
        for (float& value : state) value *= value;
        Tick_();
        const Status status =
            t_.TryWriteRows(keys, random_.Values(keys.size() * kDim), state, random_.Below(2) == 0);
        Accessed(keys, status.ok());
        return t_.tick();
      }
      case 8:
      case 9:
      case 10:
      case 11:
        Tick_();
        t_.Apply(OptimizerOf(t_.table()), found_keys_, found_rows_,
                 random_.Values(found_keys_.size() * kDim));
        for (uint64_t key : found_keys_) touched_.insert(t_.Narrow(key));
        return t_.tick();
      case 12:
      case 13:
      case 14: {
        const Keys keys = RandomKeys();
        const Tick tick = Tick_();
        t_->Erase(t_.exec(), t_.Pack(keys), tick,
                  random_.Below(2) == 0 ? Removal::kWipe : Removal::kErase);
        return tick;
      }
      case 15:
      case 16: {
        const Keys keys = RandomKeys();
        RowIds rows(keys.size());
        std::vector<char> vectors(keys.size() * t_.vector_bytes());
        const Tick tick = Tick_();
        const Status status =
            t_->LookupOrInsert(t_.exec(), t_.Pack(keys), tick, vectors.data(), rows.data());
        t_.set_tick(tick);
        Accessed(keys, status.ok());
        if (status.ok()) Remember(keys, rows);
        return tick;
      }
      case 17:
      case 18:
      case 19: {
        const Keys keys = Distinct(RandomKeys());
        return Load(&t_, keys, &accesses_);
      }
      case 20:
        if (random_.Below(4) != 0) return clock_->Next();
        Tick_();
        EXPECT_TRUE(t_.Clear().ok());
        return t_.tick();
      case 21:
        if (random_.Below(6) != 0) return clock_->Next();
        return SwapRows();
      case 22:
        Look();
        return t_.tick();
      case 24:
      case 25: {
        if (random_.Below(3) != 0) return clock_->Next();
        const Image before = Now();
        EXPECT_TRUE(t_->AttachState(t_.exec(), SpecOf(random_.Below(3))).ok());
        for (const auto& row : before) touched_.insert(row.first);
        return clock_->Next();
      }
    }
  }

  Tick Load(Subject* to, const Keys& keys, Accesses* accesses) {
    // The rows have times up to `recent`; in a chain, `recent` itself.
    const Tick recent = clock_->Next();
    const Tick tick = clock_->Next();
    Table::LoadedRows rows;
    rows.base = uses_ == Uses::kChain ? recent - 1 : random_.Below(recent);
    std::vector<CutTime> updates(keys.size()), accessed(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      updates[i] = static_cast<CutTime>(1 + random_.Below(recent - rows.base));
      accessed[i] = static_cast<CutTime>(1 + random_.Below(recent - rows.base));
    }
    const PackedKeys packed = to->Pack(keys);
    const std::vector<char> vectors = RandomBytes(keys.size() * to->vector_bytes());
    Floats state = random_.Values(keys.size() * static_cast<size_t>(to->state_width()));
    for (float& value : state) value *= value;
    rows.keys = packed;
    rows.vectors = vectors.data();
    rows.state = random_.Below(2) == 0 ? nullptr : state.data();
    rows.updates = updates.data();
    rows.scores = accessed.data();
    const bool done = (*to)->LoadRows(to->exec(), rows, tick).ok();
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint64_t key = to->Narrow(keys[i]);
      auto& access = (*accesses)[key];
      const Tick at = rows.base + accessed[i];
      if (done) {
        access = {at, at};
      } else {
        access.second = tick;
      }
      touched_.insert(key);
    }
    if (!done) return tick;
    const Image now = Rows(*to);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto at = now.find(to->Narrow(keys[i]));
      if (at == now.end()) {
        ADD_FAILURE() << "not loaded: " << keys[i];
        continue;
      }
      EXPECT_EQ(at->second.update, rows.base + updates[i]);
      EXPECT_EQ(at->second.vector,
                std::string(vectors.data() + i * to->vector_bytes(), to->vector_bytes()));
      if (rows.state != nullptr) {
        EXPECT_EQ(at->second.state,
                  std::string(reinterpret_cast<const char*>(
                                  &state[i * kDim * (state.size() / (keys.size() * kDim))]),
                              at->second.state.size()));
      }
    }
    return tick;
  }

  Tick SwapRows() {
    Subject other = MakeSubject(kind_, &t_.exec());
    EXPECT_TRUE(other
                    ->AttachState(other.exec(), uses_ == Uses::kChain ? t_->state_spec()
                                                                      : SpecOf(random_.Below(3)))
                    .ok());
    const Image before = Now();
    for (const auto& row : before) touched_.insert(row.first);
    Accesses accesses;
    for (uint64_t n = random_.Below(4); n > 0; --n) {
      Load(&other, Distinct(RandomKeys()), &accesses);
    }
    const Image loaded = Rows(other);
    const StateSpec spec = other->state_spec();
    const Tick tick = clock_->Next();
    t_->SwapRows(&other.table(), tick);
    EXPECT_EQ(Now(), loaded);
    EXPECT_EQ(Rows(other), before);
    EXPECT_TRUE(t_->state_spec() == spec);
    EXPECT_TRUE(t_->tracking());
    t_.Check();
    other.Check();
    accesses_ = std::move(accesses);
    deletions_.clear();
    tracked_ = true;
    known_since_ = tick;
    swapped_ = true;
    return 0;
  }

  void Remember(const Keys& keys, const RowIds& rows) {
    found_keys_.clear();
    found_rows_.clear();
    std::unordered_set<uint64_t> seen;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!seen.insert(t_.Narrow(keys[i])).second) continue;
      found_keys_.push_back(keys[i]);
      found_rows_.push_back(rows[i]);
    }
  }
  Keys RandomKeys() {
    Keys keys(random_.Below(kind_.batch + 1));
    for (uint64_t& key : keys) {
      key = random_.Below(1 + random_.Below(kind_.key_space));
      if (random_.Below(16) == 0) key = 0 - key;
    }
    return keys;
  }
  Keys Distinct(Keys keys) const {
    std::unordered_set<uint64_t> seen;
    keys.erase(std::remove_if(keys.begin(), keys.end(),
                              [&](uint64_t key) { return !seen.insert(t_.Narrow(key)).second; }),
               keys.end());
    return keys;
  }
  std::vector<char> RandomBytes(size_t n) {
    std::vector<char> bytes(n);
    for (char& byte : bytes) byte = static_cast<char>(random_.Below(256));
    return bytes;
  }

  const Kind kind_;
  const Uses uses_;
  Clock* const clock_;
  Random random_;
  Subject t_;
  Keys found_keys_;  // distinct; with their rows when they were found
  RowIds found_rows_;
  Accesses accesses_;
  std::vector<std::pair<Tick, uint64_t>> deletions_;
  bool tracked_ = false, swapped_ = false;
  Tick known_since_ = 0;
  std::unordered_set<uint64_t> touched_;
};

}  // namespace
}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_TRAINED_H_
