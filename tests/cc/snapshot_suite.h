// Compares snapshots with an Export at the watermark: random walks, chains of deltas, and threads
// that overwrite everything in the meantime. A program that includes this header defines MakeTable
// and MissingTable.
#ifndef DYNEMB_TESTS_CC_SNAPSHOT_SUITE_H_
#define DYNEMB_TESTS_CC_SNAPSHOT_SUITE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

// Creates a table of the program's kind.
Status MakeTable(const TableOptions& options, std::unique_ptr<Table>* table);
// Why there can be no such tables here; empty if there can.
std::string MissingTable();

namespace {

constexpr int64_t kDim = 3;

// The factor by which random tests are shortened, because sanitizers are slow.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kFewer = 3;
#else
constexpr size_t kFewer = 1;
#endif

// Rows as bytes, by key.
struct Held {
  std::string vector, state;
  Tick update = 0;
  bool operator==(const Held& o) const {
    return vector == o.vector && state == o.state && update == o.update;
  }
};
using Image = std::unordered_map<uint64_t, Held>;

Image Rows(const Subject& t) {
  const ExportPlan plan = t->PlanExport(t.exec(), 0, ~uint64_t{0}, 0);
  const size_t n = plan.rows.size();
  const size_t state_bytes = t->layout().state_bytes();
  std::vector<char> keys(n * t.key_size()), vectors(n * t.vector_bytes());
  std::vector<char> state(n * state_bytes + 1);
  std::vector<int64_t> updates(n);
  t->Export(t.exec(), plan, keys.data(), vectors.data(), reinterpret_cast<float*>(state.data()),
            updates.data());
  Image image;
  for (size_t i = 0; i < n; ++i) {
    Held& row = image[t.KeyAt(keys, i)];
    row.vector.assign(vectors.data() + i * t.vector_bytes(), t.vector_bytes());
    row.state.assign(state.data() + i * state_bytes, state_bytes);
    row.update = static_cast<Tick>(updates[i]);
  }
  EXPECT_EQ(image.size(), n);
  return image;
}

struct Delivered {
  Held held;
  Tick access = 0;
};
using Delivery = std::unordered_map<uint64_t, Delivered>;

Snapshot::Piece Next(Snapshot* snapshot, size_t limit) {
  Snapshot::Piece piece;
  const Status status = snapshot->Next(limit, &piece);
  EXPECT_TRUE(status.ok()) << status.message();
  return piece;
}

// Reads one piece, and adds it to the rows delivered so far, per table. Times are converted back to
// ticks. Returns false at the end.
bool ReadPiece(Snapshot* snapshot, Exec& exec, size_t limit, std::vector<Delivery>* to) {
  Snapshot::Piece piece = Next(snapshot, limit);
  if (piece.n == 0) return false;
  const size_t n = piece.n, t = piece.table;
  const RowLayout& l = snapshot->layout(t);
  std::vector<char> keys(n * l.key_size), vectors(n * l.vector_bytes());
  std::vector<char> state(n * l.state_bytes() + 1);
  std::vector<CutTime> updates(n), accesses(n);
  const Status read =
      snapshot->Read(exec, &piece, keys.data(), vectors.data(),
                     reinterpret_cast<float*>(state.data()), updates.data(), accesses.data());
  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_FALSE(piece.lock.owns_lock());
  for (size_t i = 0; i < n; ++i) {
    uint64_t key = 0;
    std::memcpy(&key, keys.data() + i * l.key_size, l.key_size);
    Delivered row;
    row.held.vector.assign(vectors.data() + i * l.vector_bytes(), l.vector_bytes());
    row.held.state.assign(state.data() + i * l.state_bytes(), l.state_bytes());
    row.held.update = snapshot->base(t) + updates[i];
    row.access = snapshot->base(t) + accesses[i];
    EXPECT_TRUE((*to)[t].emplace(key, row).second) << "delivered twice: " << key;
  }
  return true;
}

std::vector<Delivery> ReadAll(Snapshot* snapshot, Exec& exec, size_t num_tables,
                              size_t limit = 1000) {
  std::vector<Delivery> all(num_tables);
  while (ReadPiece(snapshot, exec, limit, &all)) {
  }
  return all;
}

// An exec with a small grain, so that threads share even a small table.
class SmallPieces final : public Exec {
 public:
  explicit SmallPieces(size_t threads) : threads_(threads) {}
  size_t parallelism() const override { return threads_.parallelism(); }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override {
    threads_.ParallelFor(n, std::min<size_t>(grain, 16), fn);
  }

 private:
  ThreadsExec threads_;
};

struct Kind {
  const char* name;
  KeyType key_type;
  DType dtype;
  size_t state;  // 0: none, 1: Adagrad's, 2: Adam's
  int64_t max_capacity;
  EvictStrategy evict;
  uint64_t key_space;
  size_t batch;
  size_t threads;
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::string NameOf(const ::testing::TestParamInfo<Kind>& info) { return info.param.name; }

TableOptions OptionsOf(const Kind& kind) {
  TableOptions options;
  options.name = kind.name;
  options.key_type = kind.key_type;
  options.dtype = kind.dtype;
  options.dim = kDim;
  options.init_capacity = 1;
  options.max_capacity = kind.max_capacity;
  options.evict_strategy = kind.evict;
  options.seed = 7;
  options.initializer = {{InitKind::kUniform, -1.0f, 1.0f}};
  return options;
}

StateSpec SpecOf(size_t state) {
  if (state == 0) return StateSpec();
  if (state == 1) return {"adagrad", {kDim}, {0.5f}};
  return {"adam", {kDim, kDim}, {0.0f, 0.25f}};
}

RowOptimizer OptimizerOf(const Table& table) {
  Hyper hyper;
  hyper.learning_rate = 0.25f;
  const int64_t width = table.layout().state_width;
  const OptimizerKind kind = width == 0      ? OptimizerKind::kSgd
                             : width == kDim ? OptimizerKind::kAdagrad
                                             : OptimizerKind::kAdam;
  return RowOptimizer(kind, {}, hyper, kDim);
}

Subject MakeSubject(const Kind& kind, Exec* exec) {
  std::unique_ptr<Table> table;
  const Status status = MakeTable(OptionsOf(kind), &table);
  EXPECT_TRUE(status.ok()) << status.message();
  return Subject(std::move(table), exec);
}

// A table in random use, with a record of its times of access and its lost keys.
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
  bool TakeAdopted() { return std::exchange(adopted_, false); }

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
  bool BeginCut(Tick watermark, Tick since, bool with_deleted) {
    if (!tracked_) known_since_ = deletions_.empty() ? 0 : watermark;
    tracked_ = true;
    touched_.clear();
    return !with_deleted || since >= known_since_;
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

  // Makes a random call. Returns the tick of the keys that are lost by it; 0: they are not
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
        const Status status =
            t_->Upsert(t_.exec(), t_.Pack(keys).data(), keys.size(), vectors.data(), tick);
        t_.set_tick(tick);
        Accessed(keys, status.ok());
        return tick;
      }
      case 4:
      case 5: {
        const Keys keys = Distinct(RandomKeys());
        Tick_();
        Accessed(keys, t_.TryAccumulate(keys, RandomFloats(keys.size() * kDim)).ok());
        return t_.tick();
      }
      case 6:
      case 7: {
        const Keys keys = Distinct(RandomKeys());
        const auto width = static_cast<size_t>(t_.state_width());
        Floats state = RandomFloats(keys.size() * width);
        for (float& value : state) value *= value;
        Tick_();
        const Status status =
            t_.TryWriteRows(keys, RandomFloats(keys.size() * kDim), state, random_.Below(2) == 0);
        Accessed(keys, status.ok());
        return t_.tick();
      }
      case 8:
      case 9:
      case 10:
      case 11:
        Tick_();
        t_.Apply(OptimizerOf(t_.table()), found_keys_, found_rows_,
                 RandomFloats(found_keys_.size() * kDim));
        for (uint64_t key : found_keys_) touched_.insert(t_.Narrow(key));
        return t_.tick();
      case 12:
      case 13:
      case 14: {
        const Keys keys = RandomKeys();
        const Tick tick = Tick_();
        t_->Erase(t_.exec(), t_.Pack(keys).data(), keys.size(), tick, random_.Below(2) == 0);
        return tick;
      }
      case 15:
      case 16: {
        const Keys keys = RandomKeys();
        RowIds rows(keys.size());
        std::vector<char> vectors(keys.size() * t_.vector_bytes());
        const Tick tick = Tick_();
        const Status status = t_->LookupOrInsert(t_.exec(), t_.Pack(keys).data(), keys.size(), tick,
                                                 vectors.data(), rows.data());
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
        return Adopt();
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
    const std::vector<char> packed = to->Pack(keys);
    const std::vector<char> vectors = RandomBytes(keys.size() * to->vector_bytes());
    Floats state = RandomFloats(keys.size() * static_cast<size_t>(to->state_width()));
    for (float& value : state) value *= value;
    rows.keys = packed.data();
    rows.vectors = vectors.data();
    rows.state = random_.Below(2) == 0 ? nullptr : state.data();
    rows.updates = updates.data();
    rows.accesses = accessed.data();
    rows.n = keys.size();
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

  Tick Adopt() {
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
    t_->Adopt(&other.table(), tick);
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
    adopted_ = true;
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
  Floats RandomFloats(size_t n) {
    Floats floats(n);
    for (float& value : floats) value = random_.Value();
    return floats;
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
  bool tracked_ = false, adopted_ = false;
  Tick known_since_ = 0;
  std::unordered_set<uint64_t> touched_;
};

// A running snapshot of some tables, with its expected contents.
class Expected {
 public:
  Expected(std::vector<Trained*> tables, std::vector<Tick> since, bool with_deleted, Clock* clock,
           Exec* exec)
      : tables_(std::move(tables)), since_(std::move(since)), exec_(exec) {
    std::vector<Table*> raw;
    for (Trained* t : tables_) raw.push_back(t->table());
    for (Trained* t : tables_) {
      images_.push_back(t->Now());
      accesses_.push_back(t->accesses());
      specs_.push_back(t->table()->state_spec());
    }
    const Tick last = clock->last();
    const Status status = Snapshot::Begin(*exec, raw, since_, with_deleted, clock, &snapshot_);
    EXPECT_EQ(clock->last(), last + 1);
    bool possible = true;
    for (size_t t = 0; t < tables_.size() && possible; ++t) {
      possible = tables_[t]->BeginCut(clock->last(), since_[t], with_deleted);
    }
    EXPECT_EQ(status.ok(), possible) << status.message();
    if (!status.ok()) {
      EXPECT_EQ(status.code(), Code::kFailedPrecondition);
      EXPECT_EQ(snapshot_, nullptr);
      for (Table* table : raw) EXPECT_EQ(table->cut(), nullptr);
      return;
    }
    EXPECT_EQ(snapshot_->watermark(), clock->last());
    for (size_t t = 0; t < tables_.size(); ++t) {
      EXPECT_TRUE(snapshot_->state_spec(t) == specs_[t]);
      uint64_t rows = 0;
      for (const auto& row : images_[t]) rows += row.second.update > since_[t];
      EXPECT_GE(snapshot_->most_rows(t), rows);
      if (since_[t] == 0) {
        EXPECT_EQ(snapshot_->most_rows(t), rows);
      }
      const std::vector<uint64_t>& deleted = snapshot_->deleted(t);
      const std::set<uint64_t> distinct(deleted.begin(), deleted.end());
      EXPECT_EQ(distinct.size(), deleted.size());
      EXPECT_EQ(distinct, with_deleted ? tables_[t]->DeletedSince(since_[t], images_[t])
                                       : std::set<uint64_t>());
    }
    delivered_.resize(tables_.size());
  }

  Snapshot* snapshot() const { return snapshot_.get(); }
  // Reads one piece. Returns false at the end.
  bool Read(size_t limit) { return ReadPiece(snapshot_.get(), *exec_, limit, &delivered_); }
  const Delivery& delivered(size_t t) const { return delivered_[t]; }
  const Image& image(size_t t) const { return images_[t]; }

  void Check() {
    for (size_t t = 0; t < tables_.size(); ++t) {
      size_t expected = 0;
      for (const auto& row : images_[t]) {
        if (row.second.update <= since_[t]) continue;
        ++expected;
        const auto at = delivered_[t].find(row.first);
        ASSERT_NE(at, delivered_[t].end()) << "not delivered: " << row.first << ", updated at "
                                           << row.second.update << " since " << since_[t];
        const Delivered& got = at->second;
        ASSERT_EQ(got.held.vector, row.second.vector) << row.first;
        ASSERT_EQ(got.held.state, row.second.state) << row.first;
        ASSERT_EQ(got.held.update, row.second.update) << row.first;
        const auto access = accesses_[t].at(row.first);
        ASSERT_GE(got.access, access.first) << row.first;
        ASSERT_LE(got.access, snapshot_->watermark()) << row.first;
        if (tables_[t]->Untouched(row.first)) {
          ASSERT_LE(got.access, access.second) << row.first;
        }
      }
      ASSERT_EQ(delivered_[t].size(), expected) << "since " << since_[t];
    }
  }

 private:
  std::vector<Trained*> tables_;
  std::vector<Tick> since_;
  Exec* exec_;
  std::vector<Image> images_;
  std::vector<Trained::Accesses> accesses_;
  std::vector<StateSpec> specs_;
  std::unique_ptr<Snapshot> snapshot_;
  std::vector<Delivery> delivered_;
};

class SnapshotWalk : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
  SnapshotWalk() : exec_(GetParam().threads) {}
  // A tick since which to cut: at, near or between the last watermarks.
  static Tick Since(const std::vector<Tick>& watermarks, Clock& clock, Random& random) {
    if (watermarks.empty() || random.Below(4) == 0) {
      return random.Below(3) == 0 ? random.Below(clock.last() + 3) : 0;
    }
    const size_t back = std::min(watermarks.size(), 1 + static_cast<size_t>(random.Below(4)));
    const Tick since = watermarks[watermarks.size() - back];
    return random.Below(3) == 0 ? since - 1 + random.Below(3) : since;
  }
  SmallPieces exec_;
  Clock clock_;
};

TEST_P(SnapshotWalk, DeliversTheRowsOfTheWatermark) {
  const bool large = GetParam().batch > 1000;
  for (uint64_t seed = 1; seed <= (large ? 1 : 3 / kFewer) && !HasFailure(); ++seed) {
    Random random(seed);
    Clock clock;
    Trained a(GetParam(), Trained::Uses::kAll, &clock, &exec_, 10 * seed);
    Trained b(GetParam(), Trained::Uses::kAll, &clock, &exec_, 10 * seed + 1);
    std::vector<Tick> watermarks;
    for (size_t round = 0; round < (large ? 15 / kFewer : 60) && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
      for (uint64_t n = random.Below(8); n > 0; --n) (random.Below(2) == 0 ? a : b).Step();
      std::vector<Trained*> tables{&a};
      if (random.Below(2) == 0) tables.insert(tables.begin() + random.Below(2), &b);
      std::vector<Tick> since;
      for (size_t t = 0; t < tables.size(); ++t) since.push_back(Since(watermarks, clock, random));
      bool with_deleted = random.Below(2) == 0;
      // Mostly since a tick after which all deletions are known.
      if (with_deleted && random.Below(4) != 0) {
        for (size_t t = 0; t < tables.size(); ++t) {
          since[t] = std::max(since[t], tables[t]->known_since());
        }
      }
      Expected running(tables, since, with_deleted, &clock, &exec_);
      if (running.snapshot() == nullptr) continue;
      watermarks.push_back(running.snapshot()->watermark());
      const size_t limit = 1 + random.Below(GetParam().key_space / 2);
      const uint64_t steps = random.Below(3) * random.Below(4);
      const uint64_t stop = random.Below(4) == 0 ? random.Below(10) : ~uint64_t{0};
      uint64_t pieces = 0;
      for (bool more = true; more && pieces < stop && !HasFailure(); ++pieces) {
        for (uint64_t n = random.Below(steps + 1); n > 0; --n) {
          Trained& t = random.Below(2) == 0 ? a : b;
          random.Below(5) == 0 ? t.Look() : t.Step();
        }
        more = running.Read(limit);
      }
      if (pieces < stop) {
        running.Check();
        EXPECT_FALSE(running.Read(limit));  // still the end
      }
      a.subject().Check();
      b.subject().Check();
    }
  }
}

// A copy to which each delta is applied equals the table at the watermark.
TEST_P(SnapshotWalk, DeltasReproduceTheTable) {
  const bool large = GetParam().batch > 1000;
  for (uint64_t seed = 1; seed <= (kFewer > 1 || large ? 1 : 2) && !HasFailure(); ++seed) {
    Random random(seed);
    Clock clock;
    Trained t(GetParam(), Trained::Uses::kChain, &clock, &exec_, seed);
    Image follower;
    bool whole = false;  // whether there is a base
    Tick last = 0;
    for (size_t round = 0; round < (large ? 15 / kFewer : 80) && !HasFailure(); ++round) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
      for (uint64_t n = random.Below(6); n > 0; --n) t.Step();
      if (t.TakeAdopted()) whole = false;
      Expected running({&t}, {whole ? last : 0}, whole, &clock, &exec_);
      ASSERT_NE(running.snapshot(), nullptr);
      const uint64_t steps = random.Below(4);
      const uint64_t stop = random.Below(3) == 0 ? random.Below(6) : ~uint64_t{0};
      uint64_t pieces = 0;
      for (bool more = true; more && pieces < stop; ++pieces) {
        for (uint64_t n = random.Below(steps + 1); n > 0; --n) t.Step();
        more = running.Read(1 + random.Below(GetParam().key_space));
      }
      if (pieces >= stop) continue;  // abandoned: the next delta continues the last complete one
      running.Check();
      if (!whole) follower.clear();
      for (uint64_t key : running.snapshot()->deleted(0)) follower.erase(key);
      for (const auto& row : running.delivered(0)) follower[row.first] = row.second.held;
      ASSERT_TRUE(follower == running.image(0));
      last = running.snapshot()->watermark();
      whole = true;
      if (t.TakeAdopted()) whole = false;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, SnapshotWalk,
    ::testing::Values(
        Kind{"Int64Float32", KeyType::kInt64, DType::kFloat32, 0, 0, EvictStrategy::kLru, 400, 60,
             1},
        Kind{"Int32Bfloat16State", KeyType::kInt32, DType::kBfloat16, 1, 0, EvictStrategy::kLru,
             400, 60, 3},
        Kind{"Uint64Float16State", KeyType::kUint64, DType::kFloat16, 2, 0, EvictStrategy::kLru,
             3000, 20, 1},
        Kind{"Evicting", KeyType::kInt64, DType::kFloat32, 2, 100, EvictStrategy::kLru, 300, 60, 3},
        Kind{"EvictingInt32", KeyType::kInt32, DType::kBfloat16, 0, 60, EvictStrategy::kLru, 300,
             60, 1},
        Kind{"EvictNone", KeyType::kInt64, DType::kFloat32, 1, 100, EvictStrategy::kNone, 200, 30,
             1},
        Kind{"Tiny", KeyType::kInt64, DType::kFloat32, 1, 3, EvictStrategy::kLru, 9, 3, 1},
        Kind{"LargeBatches", KeyType::kInt64, DType::kFloat32, 1, 0, EvictStrategy::kLru, 8000,
             5000, 3},
        Kind{"LargeEvicting", KeyType::kInt32, DType::kFloat32, 0, 5000, EvictStrategy::kLru, 12000,
             5000, 3}),
    NameOf);

// ---- single cases ----

const Kind kPlain{"plain", KeyType::kInt64, DType::kFloat32, 1, 0, EvictStrategy::kLru, 0, 0, 1};

class SnapshotTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
  Subject Make(Kind kind = kPlain) {
    Subject t = MakeSubject(kind, &exec_);
    EXPECT_TRUE(t->AttachState(exec_, SpecOf(kind.state)).ok());
    return t;
  }
  // A batch with the clock's next tick.
  Tick Fill(Subject* t, const Keys& keys, float value) {
    t->set_tick(clock_.Next() - 1);
    t->Upsert(keys, Floats(keys.size() * kDim, value));
    return t->tick();
  }
  size_t Erase(Subject* t, const Keys& keys) {
    t->set_tick(clock_.Next() - 1);
    return t->Erase(keys);
  }
  Status Begin(const std::vector<Table*>& tables, const std::vector<Tick>& since, bool with_deleted,
               std::unique_ptr<Snapshot>* snapshot) {
    return Snapshot::Begin(exec_, tables, since, with_deleted, &clock_, snapshot);
  }
  // Begins and ends a snapshot without reading it; returns its watermark.
  Tick Cut(Subject* t) {
    std::unique_ptr<Snapshot> snapshot;
    EXPECT_TRUE(Begin({&t->table()}, {0}, false, &snapshot).ok());
    return snapshot == nullptr ? 0 : snapshot->watermark();
  }
  SerialExec exec_;
  Clock clock_;
};

TEST_F(SnapshotTest, EmptyTableAndNoTable) {
  Subject t = Make();
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, true, &snapshot).ok());
  EXPECT_EQ(snapshot->most_rows(0), 0u);
  EXPECT_TRUE(snapshot->deleted(0).empty());
  EXPECT_EQ(Next(snapshot.get(), 10).n, 0u);
  EXPECT_EQ(Next(snapshot.get(), 10).n, 0u);
  snapshot.reset();
  ASSERT_TRUE(Begin({}, {}, true, &snapshot).ok());
  EXPECT_EQ(Next(snapshot.get(), 10).n, 0u);
}

TEST_F(SnapshotTest, LaterRowsAreNotInIt) {
  Subject t = Make();
  Fill(&t, Progression(0, 10), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
  Erase(&t, Progression(0, 5));
  Fill(&t, Progression(100, 500), 2);  // some get the erased rows
  Erase(&t, Progression(100, 500));
  const Delivery got = ReadAll(snapshot.get(), exec_, 1)[0];
  EXPECT_EQ(got.size(), 10u);
  for (uint64_t key = 0; key < 10; ++key) {
    ASSERT_EQ(got.count(key), 1u);
    EXPECT_EQ(got.at(key).held.vector.substr(0, 4), std::string("\0\0\x80\x3f", 4));
  }
}

// Pieces of saved rows are no larger than other pieces.
TEST_F(SnapshotTest, PiecesAreAtMostTheLimit) {
  Subject t = Make();
  Fill(&t, Progression(0, 1000), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
  size_t rows = 0, largest = 0;
  for (size_t i = 0;; ++i) {
    if (i == 3) Fill(&t, Progression(0, 1000), 2);
    Snapshot::Piece piece = Next(snapshot.get(), 7);
    if (piece.n == 0) break;
    largest = std::max(largest, piece.n);
    rows += piece.n;
    ASSERT_TRUE(snapshot->Read(exec_, &piece, nullptr, nullptr, nullptr, nullptr, nullptr).ok());
  }
  EXPECT_EQ(rows, 1000u);
  EXPECT_LE(largest, 7u);
}

TEST_F(SnapshotTest, NullSkipsAColumn) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  for (int which = 0; which < 5; ++which) {
    for (bool saved : {false, true}) {
      std::unique_ptr<Snapshot> snapshot;
      ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
      if (saved) Fill(&t, Progression(0, 100), 1);
      size_t rows = 0;
      for (;;) {
        Snapshot::Piece piece = Next(snapshot.get(), 1000);
        if (piece.n == 0) break;
        Keys keys(piece.n);
        Floats vectors(piece.n * kDim), state(piece.n * kDim);
        std::vector<CutTime> updates(piece.n), accesses(piece.n);
        ASSERT_TRUE(snapshot
                        ->Read(exec_, &piece, which == 0 ? keys.data() : nullptr,
                               which == 1 ? vectors.data() : nullptr,
                               which == 2 ? state.data() : nullptr,
                               which == 3 ? updates.data() : nullptr,
                               which == 4 ? accesses.data() : nullptr)
                        .ok());
        for (size_t i = 0; i < piece.n; ++i) {
          if (which == 0) {
            EXPECT_LT(keys[i], 100u);
          }
          EXPECT_EQ(vectors[i * kDim], which == 1 ? 1.0f : 0.0f);
          EXPECT_EQ(state[i * kDim], which == 2 ? 0.5f : 0.0f);
          EXPECT_EQ(updates[i] != 0, which == 3);
          EXPECT_EQ(accesses[i] != 0, which == 4);
        }
        rows += piece.n;
      }
      EXPECT_EQ(rows, 100u);
    }
  }
}

// A piece that is destroyed unread unlocks the table, and its rows are returned again.
TEST_F(SnapshotTest, PieceDroppedUnread) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {0}, false, &snapshot).ok());
  {
    const Snapshot::Piece piece = Next(snapshot.get(), 30);
    EXPECT_EQ(piece.n, 30u);
    EXPECT_FALSE(t->mutex().try_lock());
  }
  ASSERT_TRUE(t->mutex().try_lock());
  t->mutex().unlock();
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 1)[0].size(), 100u);
}

TEST_F(SnapshotTest, ATableIsInOneSnapshotAtATime) {
  Subject a = Make(), b = Make(), c = Make();
  for (Subject* t : {&a, &b, &c}) Fill(t, Progression(0, 10), 1);
  std::unique_ptr<Snapshot> first, second;
  ASSERT_TRUE(Begin({&a.table(), &b.table()}, {0, 0}, false, &first).ok());
  const Status status = Begin({&c.table(), &b.table()}, {0, 0}, false, &second);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_NE(status.message().find("plain"), std::string::npos) << status.message();
  EXPECT_EQ(second, nullptr);
  EXPECT_EQ(c->cut(), nullptr);
  EXPECT_NE(b->cut(), nullptr);
  for (Subject* t : {&a, &b, &c}) {
    ASSERT_TRUE(t->table().mutex().try_lock());
    t->table().mutex().unlock();
  }
  // The first snapshot is not affected.
  Fill(&b, Progression(0, 20), 2);
  const std::vector<Delivery> got = ReadAll(first.get(), exec_, 2);
  EXPECT_EQ(got[0].size(), 10u);
  EXPECT_EQ(got[1].size(), 10u);
  first.reset();
  EXPECT_EQ(a->cut(), nullptr);
  EXPECT_EQ(b->cut(), nullptr);
  ASSERT_TRUE(Begin({&c.table(), &b.table()}, {0, 0}, false, &second).ok());
  EXPECT_EQ(ReadAll(second.get(), exec_, 2)[1].size(), 20u);
  second.reset();
  // The same table twice.
  EXPECT_EQ(Begin({&a.table(), &a.table()}, {0, 0}, false, &second).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(a->cut(), nullptr);
}

TEST_F(SnapshotTest, ForgottenDeletions) {
  Subject a = Make(), b = Make();
  Fill(&a, Progression(0, 10), 1);
  Fill(&b, Progression(0, 10), 1);
  EXPECT_EQ(Erase(&b, {3}), 1u);  // before changes were tracked
  const Tick erased = clock_.last();
  std::unique_ptr<Snapshot> snapshot;
  const Status status = Begin({&a.table(), &b.table()}, {0, erased - 1}, true, &snapshot);
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(snapshot, nullptr);
  EXPECT_EQ(a->cut(), nullptr);
  EXPECT_EQ(b->cut(), nullptr);
  // It succeeds without the deleted keys, and with those since a tick after which they are known.
  ASSERT_TRUE(Begin({&a.table(), &b.table()}, {0, 0}, false, &snapshot).ok());
  EXPECT_EQ(ReadAll(snapshot.get(), exec_, 2)[1].size(), 9u);
  const Tick watermark = snapshot->watermark();
  snapshot.reset();
  Erase(&b, {4, 4, 77});
  Erase(&a, {5});
  Fill(&a, {5}, 3);
  ASSERT_TRUE(Begin({&b.table(), &a.table()}, {watermark, 0}, true, &snapshot).ok());
  EXPECT_EQ(snapshot->deleted(0), (std::vector<uint64_t>{4}));
  EXPECT_TRUE(snapshot->deleted(1).empty());
}

// A million deletions are remembered. If there are more, the oldest are forgotten, and a cut that
// needs them is refused.
TEST_F(SnapshotTest, MoreDeletionsThanAreRemembered) {
  Kind kind = kPlain;
  kind.key_type = KeyType::kInt32;
  kind.dtype = DType::kFloat16;
  kind.state = 0;
  Subject t = Make(kind);
  const Tick base = Cut(&t);
  constexpr size_t kBatch = 100000;
  std::vector<Tick> ticks;
  for (size_t i = 0; i < 12; ++i) {
    t.set_tick(clock_.Next() - 1);
    t.FindOrInsert(Progression(i * kBatch, kBatch));
    t.set_tick(clock_.Next() - 1);
    EXPECT_EQ(t.Erase(Progression(i * kBatch, kBatch)), kBatch);
    ticks.push_back(t.tick());
  }
  std::unique_ptr<Snapshot> snapshot;
  EXPECT_EQ(Begin({&t.table()}, {base}, true, &snapshot).code(), Code::kFailedPrecondition);
  EXPECT_EQ(t->cut(), nullptr);
  ASSERT_TRUE(Begin({&t.table()}, {ticks[2]}, true, &snapshot).ok());
  EXPECT_EQ(snapshot->deleted(0).size(), 9 * kBatch);
  EXPECT_EQ(snapshot->deleted(0).front(), 3 * kBatch);
  EXPECT_EQ(Next(snapshot.get(), 1).n, 0u);
}

// A table that has lost its rows, and then their memory, has no rows to read.
TEST_F(SnapshotTest, ClearedThenOtherState) {
  Subject t = Make();
  Fill(&t, Progression(0, 100000), 1);
  const Tick watermark = Cut(&t);
  t.set_tick(clock_.Next() - 1);
  ASSERT_TRUE(t.Clear().ok());
  ASSERT_TRUE(t->AttachState(exec_, SpecOf(2)).ok());
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {watermark}, true, &snapshot).ok());
  EXPECT_EQ(snapshot->deleted(0).size(), 100000u);
  EXPECT_EQ(Next(snapshot.get(), 1000).n, 0u);
}

// The same while the cut runs, with rows from another table.
TEST_F(SnapshotTest, ClearedThenAdopting) {
  Subject t = Make(), other = Make();
  Fill(&t, Progression(0, 1000), 1);
  const Tick watermark = Cut(&t);
  t.set_tick(clock_.Next() - 1);
  ASSERT_TRUE(t.Clear().ok());
  Fill(&other, Progression(5000, 1000), 2);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Begin({&t.table()}, {watermark}, true, &snapshot).ok());
  t->Adopt(&other.table(), clock_.Next());
  EXPECT_EQ(Next(snapshot.get(), 1000).n, 0u);
}

TEST_F(SnapshotTest, LoadedWithoutStateStartsWithTheInitialState) {
  Subject t = Make();
  t.set_tick(clock_.Next() - 1);
  ASSERT_TRUE(t.TryWriteRows({1}, Floats(kDim, 2.0f), Floats(kDim, 9.0f), true).ok());
  const Keys keys{1, 2};
  const Floats vectors(2 * kDim, 4.0f);
  const std::vector<CutTime> times{1, 1};
  Table::LoadedRows rows;
  rows.keys = keys.data();
  rows.vectors = vectors.data();
  rows.updates = rows.accesses = times.data();
  rows.n = 2;
  ASSERT_TRUE(t->LoadRows(exec_, rows, clock_.Next()).ok());
  Floats state;
  EXPECT_EQ(t.Read(keys, &state), vectors);
  EXPECT_EQ(state, Floats(2 * kDim, 0.5f));
}

// A batch with many keys of one segment evicts rows of the whole table.
TEST_F(SnapshotTest, EvictedFromOtherSegments) {
  Kind kind = kPlain;
  kind.max_capacity = 4000;
  Subject t = Make(kind);
  const Keys old = Scattered(1, 4000);
  Fill(&t, old, 1);
  std::unique_ptr<Snapshot> first, second;
  ASSERT_TRUE(Begin({&t.table()}, {0}, true, &first).ok());
  Fill(&t, SamePrefix(Table::SaltOf(t->options()), 0x12345678, 370, false), 2);
  t.Check();
  std::set<uint64_t> gone;
  const std::vector<char> found = t.Contains(old);
  for (size_t i = 0; i < old.size(); ++i) {
    if (!found[i]) gone.insert(old[i]);
  }
  EXPECT_EQ(gone.size(), 370u);
  const Delivery got = ReadAll(first.get(), exec_, 1)[0];
  EXPECT_EQ(got.size(), 4000u);
  for (uint64_t key : old) {
    ASSERT_EQ(got.count(key), 1u);
    EXPECT_EQ(got.at(key).held.vector.substr(0, 4), std::string("\0\0\x80\x3f", 4));
  }
  const Tick watermark = first->watermark();
  first.reset();
  ASSERT_TRUE(Begin({&t.table()}, {watermark}, true, &second).ok());
  const std::vector<uint64_t>& deleted = second->deleted(0);
  EXPECT_EQ(std::set<uint64_t>(deleted.begin(), deleted.end()), gone);
  EXPECT_EQ(ReadAll(second.get(), exec_, 1)[0].size(), 370u);
}

// Ticks of four billion batches: the base of stamps moves, between cuts and during a cut.
TEST_F(SnapshotTest, TicksThatDoNotFitAStamp) {
  Subject t = Make();
  Fill(&t, Progression(0, 100), 1);
  Tick since = Cut(&t);
  for (int i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    clock_.Advance(clock_.last() + 0xB0000000u + static_cast<Tick>(i) * 0x10000000u, 0);
    const Tick changed = Fill(&t, Progression(0, 10), 2);
    Erase(&t, {static_cast<uint64_t>(50 + i)});
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(Begin({&t.table()}, {since}, true, &snapshot).ok());
    EXPECT_EQ(snapshot->deleted(0), (std::vector<uint64_t>{static_cast<uint64_t>(50 + i)}));
    const Image image = Rows(t);
    // In every second round, the base moves while the cut is read; times may then be later.
    if (i % 2 != 0) {
      clock_.Advance(clock_.last() + 0xC0000000u, 0);
      Fill(&t, Progression(5, 10), 7);
    }
    const Tick watermark = snapshot->watermark();
    const Delivery got = ReadAll(snapshot.get(), exec_, 1)[0];
    for (uint64_t key = 0; key < 10; ++key) ASSERT_EQ(got.count(key), 1u) << key;
    for (const auto& row : got) {
      const Held& want = image.at(row.first);
      EXPECT_EQ(row.second.held.vector, want.vector);
      EXPECT_EQ(row.second.held.state, want.state);
      EXPECT_GE(row.second.held.update, want.update);
      EXPECT_LE(row.second.held.update, watermark);
      EXPECT_LE(row.second.access, watermark);
      if (row.first < 5 && i % 2 == 0) {
        EXPECT_EQ(row.second.held.update, changed);
      }
    }
    since = watermark;
  }
}

// ---- threads ----

// Ends a test that hangs.
class Watchdog {
 public:
  Watchdog()
      : thread_([this] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (!ended_.wait_for(lock, std::chrono::seconds(120), [this] { return done_; })) {
            fprintf(stderr, "hangs\n");
            std::abort();
          }
        }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;
};

// Two tables whose rows all have the same version, in the vector and in the state.
class Versions {
 public:
  static constexpr size_t kRows = 2500;
  explicit Versions(Clock* clock) : clock_(clock), keys_(Scattered(1, kRows)) {
    for (int i = 0; i < 2; ++i) {
      Kind kind = kPlain;
      kind.key_type = i == 0 ? KeyType::kInt64 : KeyType::kInt32;
      tables_.push_back(MakeSubject(kind, &serial_));
      EXPECT_TRUE(tables_[i]->AttachState(serial_, SpecOf(1)).ok());
    }
    Write(serial_, 2);
  }
  std::vector<Table*> tables() const { return {&tables_[0].table(), &tables_[1].table()}; }

  // Batches that give every row the next version, in one of four ways.
  void Write(Exec& exec, uint64_t how) {
    TableLock lock(tables(), TableLock::Mode::kExclusive);
    const uint64_t version = ++version_;
    const Tick first = clock_->Next(), tick = clock_->Next();
    history_[tick] = {version, first};
    const Floats vectors(kRows * kDim, static_cast<float>(version));
    const Floats ones(kRows * kDim, 1.0f);
    for (Subject& t : tables_) {
      const std::vector<char> keys = t.Pack(keys_);
      switch (how % 4) {
        case 0: {
          RowIds rows(kRows);
          t->Find(exec, keys.data(), kRows, first, rows.data());
          Hyper hyper;
          hyper.learning_rate = -1.0f;  // vectors grow by 1
          const RowOptimizer sgd(OptimizerKind::kSgd, {}, hyper, kDim);
          t->BeginBatch(exec, tick, kRows);
          exec.ParallelFor(kRows, 100, [&](size_t begin, size_t end) {
            t->ApplyRange(exec, sgd, keys.data(), rows.data(), ones.data(), begin, end, tick, tick);
          });
          break;
        }
        case 1:
          EXPECT_TRUE(t->Accumulate(exec, keys.data(), kRows, ones.data(), tick).ok());
          break;
        case 2:
          EXPECT_TRUE(t->Upsert(exec, keys.data(), kRows, vectors.data(), tick).ok());
          break;
        case 3:
          EXPECT_EQ(t->Erase(exec, keys.data(), kRows, first, version % 2 == 0), kRows);
          EXPECT_TRUE(t->WriteRows(exec, keys.data(), kRows, vectors.data(), vectors.data(), true,
                                   tick, tick)
                          .ok());
          break;
      }
    }
  }
  // The number of batches that have begun.
  uint64_t begun() const { return version_; }
  void Look(Exec& exec) {
    TableLock lock(tables(), TableLock::Mode::kShared);
    const Tick tick = clock_->Next();
    for (Subject& t : tables_) {
      RowIds rows(kRows);
      Floats vectors(kRows * kDim);
      t->Lookup(exec, t.Pack(keys_).data(), kRows, tick, nullptr, vectors.data(), rows.data());
      for (float value : vectors) ASSERT_EQ(value, vectors[0]);
    }
  }
  // Checks the delivered rows. Call while no batch runs.
  void Check(const Snapshot& snapshot, const std::vector<Delivery>& delivered) const {
    const auto at = std::prev(history_.lower_bound(snapshot.watermark()));
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_EQ(delivered[i].size(), kRows);
      for (const auto& row : delivered[i]) {
        const auto* vector = reinterpret_cast<const float*>(row.second.held.vector.data());
        for (int64_t c = 0; c < kDim; ++c) {
          ASSERT_EQ(vector[c], static_cast<float>(at->second.version));
        }
        ASSERT_EQ(row.second.held.update, at->first);
        ASSERT_LE(row.second.access, snapshot.watermark());
        ASSERT_GE(row.second.access, at->second.first);
      }
    }
  }

 private:
  struct Batch {
    uint64_t version;
    Tick first;
  };
  Clock* const clock_;
  SerialExec serial_;
  const Keys keys_;
  std::vector<Subject> tables_;
  std::atomic<uint64_t> version_{0};
  std::map<Tick, Batch> history_;  // protected by the tables' locks
};

struct Load {
  size_t threads;  // of each exec
  size_t trainers;
  size_t most_saved;  // bytes
  size_t limit;
  int rounds;  // every fourth is abandoned
};

class SnapshotThreads : public ::testing::TestWithParam<Load> {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
};

TEST_P(SnapshotThreads, EveryRowHasTheVersionOfTheWatermark) {
  const Watchdog watchdog;
  Clock clock;
  Versions versions(&clock);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < GetParam().trainers; ++id) {
    threads.emplace_back([&, id] {
      SmallPieces exec(GetParam().threads);
      for (uint64_t i = id; !stop; ++i) {
        versions.Write(exec, i);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  threads.emplace_back([&] {
    SmallPieces exec(GetParam().threads);
    while (!stop) {
      versions.Look(exec);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  SmallPieces exec(GetParam().threads);
  for (int round = 0; round < std::max(1, GetParam().rounds / static_cast<int>(kFewer)); ++round) {
    std::unique_ptr<Snapshot> snapshot;
    const Status status = Snapshot::Begin(exec, versions.tables(), {0, 0}, false, &clock, &snapshot,
                                          GetParam().most_saved);
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<Delivery> got(2);
    const uint64_t begun = versions.begun();
    bool more = true;
    for (int pieces = 0; more; ++pieces) {
      more = ReadPiece(snapshot.get(), exec, GetParam().limit, &got);
      if (round % 4 == 3 && pieces == 2) break;  // abandoned
      if (pieces != round % 4) continue;
      // From here on rows are saved and read in turns. The wait is limited, because the batch may
      // already have begun, and may be waiting for the reader.
      for (int i = 0; i < 50 && versions.begun() == begun; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
    if (more) continue;
    TableLock lock(versions.tables(), TableLock::Mode::kShared);
    versions.Check(*snapshot, got);
    if (HasFatalFailure()) break;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  for (Table* table : versions.tables()) table->CheckInvariants();
}

// With a bound of a few rows, these are delivered at one poll of the reader after the other.
INSTANTIATE_TEST_SUITE_P(Loads, SnapshotThreads,
                         ::testing::Values(Load{1, 1, size_t{64} << 20, 500, 40},
                                           Load{3, 1, size_t{64} << 20, 50, 40},
                                           Load{1, 1, 100, 100, 2}, Load{3, 1, 300, 100, 12},
                                           Load{3, 2, 20000, 100, 24}, Load{1, 2, 1, 500, 1}));

class SnapshotWaits : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MissingTable().empty()) GTEST_SKIP() << MissingTable();
  }
};

// A batch that runs while the reader waits for the lock saves the rows that it overwrites.
TEST_F(SnapshotWaits, AllIsSavedWhileTheReaderWaits) {
  const Watchdog watchdog;
  Clock clock;
  SerialExec serial;
  Subject t = MakeSubject(kPlain, &serial);
  const Keys keys = Progression(0, 50);
  const Floats vectors(keys.size() * kDim, 1.0f);
  t.Upsert(keys, vectors);
  clock.Advance(t.tick(), 0);
  for (int round = 0; round < 30; ++round) {
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(Snapshot::Begin(serial, {&t.table()}, {0}, false, &clock, &snapshot).ok());
    std::vector<Delivery> got;
    std::thread reader;
    {
      TableLock lock({&t.table()}, TableLock::Mode::kExclusive);
      std::atomic<bool> started{false};
      reader = std::thread([&] {
        started = true;
        SerialExec own;
        got = ReadAll(snapshot.get(), own, 1);
      });
      while (!started) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::microseconds(100 + 50 * round));
      t.set_tick(clock.Next() - 1);
      t.Upsert(keys, vectors);
    }
    reader.join();
    ASSERT_EQ(got[0].size(), keys.size());
  }
}

TEST_F(SnapshotWaits, DestroyedWhileABatchWaits) {
  const Watchdog watchdog;
  for (size_t num_threads : {1, 3}) {
    Clock clock;
    Versions versions(&clock);
    SerialExec serial;
    std::unique_ptr<Snapshot> snapshot;
    ASSERT_TRUE(
        Snapshot::Begin(serial, versions.tables(), {0, 0}, false, &clock, &snapshot, 200).ok());
    std::atomic<bool> done{false};
    std::thread trainer([&] {
      SmallPieces exec(num_threads);
      versions.Write(exec, 2);
      versions.Write(exec, 3);
      done = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(done);  // 200 bytes are a few rows
    snapshot.reset();
    trainer.join();
    for (Table* table : versions.tables()) EXPECT_EQ(table->cut(), nullptr);
    ASSERT_TRUE(Snapshot::Begin(serial, versions.tables(), {0, 0}, false, &clock, &snapshot).ok());
    versions.Check(*snapshot, ReadAll(snapshot.get(), serial, 2));
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SNAPSHOT_SUITE_H_
