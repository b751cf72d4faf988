// Contract of a Table with admission: which keys have rows, what lookups return for the others, and
// the counters. The model of random calls is a table in host memory; admission_test.cc compares the
// host's counters with a model in plain C++.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cc/table/snapshot.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

namespace admission {

constexpr int64_t kDim = 2;
constexpr float kInitial = 5.0f;

TableOptions Options(const TableFixture& f, int64_t times,
                     Unadmitted unadmitted = Unadmitted::kZeros) {
  TableOptions options = f.Options(kDim);
  options.name = "admission";
  options.initializer = {{InitKind::kConstant, kInitial, 0.0f}};
  options.admission.rule = Admit::kFrequency;
  options.admission.unadmitted = unadmitted;
  options.admission.times = times;
  options.admission.lines = options.admission.num_lines = 1000;
  return options;
}

struct Found {
  Floats vectors;
  RowIds rows;
};

// LookupCounted, or LookupOrInsert if there are no times.
Found LookUp(Subject* t, const Keys& keys, const std::vector<uint32_t>& times = {}) {
  Found found;
  if (times.empty()) {
    found.vectors = t->LookupOrInsert(keys, &found.rows);
    return found;
  }
  found.rows.assign(keys.size(), 7);
  std::vector<char> encoded(keys.size() * t->vector_bytes(), 0x5A);
  t->set_tick(t->tick() + 1);
  const Status status = (*t)->LookupCounted(t->exec(), t->Pack(keys), times.data(), t->tick(),
                                            encoded.data(), found.rows.data());
  EXPECT_TRUE(status.ok()) << status.message();
  found.vectors = t->Decode(encoded);
  return found;
}

std::vector<uint32_t> CountsOf(const Subject& t, const Keys& keys) {
  std::vector<Table::KeyState> states(keys.size());
  t->Explain(t.exec(), t.Pack(keys), states.data());
  std::vector<uint32_t> counts;
  for (const auto& state : states) counts.push_back(state.admission_count);
  return counts;
}

size_t EraseAs(Subject* t, const Keys& keys, Removal how) {
  t->set_tick(t->tick() + 1);
  return (*t)->Erase(t->exec(), t->Pack(keys), t->tick(), how);
}

// The counters as a cut has them.
std::vector<uint64_t> SavedCounters(Subject* t) {
  SavedRows saved(size_t{1} << 30);
  t->set_tick(t->tick() + 1);
  const Status status = (*t)->BeginCut(t->exec(), t->tick(), 0, CutOf::kRows, &saved, 0);
  EXPECT_TRUE(status.ok()) << status.message();
  if (!status.ok()) return {};
  const std::vector<uint64_t> counters = (*t)->cut()->admission;
  EXPECT_EQ((*t)->cut()->first_admission_line, (*t)->options().admission.first_line);
  (*t)->EndCut();
  return counters;
}

using Presence = std::vector<char>;

}  // namespace admission

TABLE_TEST(TableAdmission, RepeatsCountAndAllOccurrencesOfABatchAreAdmitted) {
  using namespace admission;
  Subject t = f.Create(admission::Options(f, 3));
  Found found = LookUp(&t, {1, 2, 1, 3, 3, 3});
  EXPECT_EQ(found.vectors, (Floats{0, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5}));
  for (size_t i : {0, 1, 2}) EXPECT_EQ(found.rows[i], kUnadmittedRow);
  EXPECT_TRUE(IsRow(found.rows[3]));
  EXPECT_EQ(found.rows[3], found.rows[5]);
  EXPECT_EQ(t.Contains({1, 2, 3}), (Presence{0, 0, 1}));
  EXPECT_EQ(CountsOf(t, {1, 2, 3, 4}), (std::vector<uint32_t>{2, 1, 0, 0}));
  EXPECT_EQ(t.stats().unadmitted, 3u);
  EXPECT_EQ(t.stats().inserts, 1u);
  EXPECT_EQ(t.stats().refused, 0u);
  found = LookUp(&t, {1, 2});
  EXPECT_EQ(found.vectors, (Floats{5, 5, 0, 0}));
  EXPECT_EQ(t.stats().unadmitted, 4u);
  t.Check();
}

TABLE_TEST(TableAdmission, OccurrencesOnOtherRanksCount) {
  using namespace admission;
  Subject t = f.Create(admission::Options(f, 10));
  LookUp(&t, {1, 2, 1}, {4, 9, 5});
  EXPECT_EQ(CountsOf(t, {1, 2}), (std::vector<uint32_t>{9, 9}));
  LookUp(&t, {1, 2}, {1, 1});
  EXPECT_EQ(t.Contains({1, 2}), (Presence{1, 1}));
  EXPECT_EQ(t.stats().unadmitted, 18u);
  // A sum that 32 bits do not hold.
  LookUp(&t, {3, 4, 4}, {1, 0xFFFFFFFF, 2});
  EXPECT_EQ(t.Contains({3, 4}), (Presence{0, 1}));
  Subject plain = f.Create(f.Options(kDim));
  LookUp(&plain, {1, 2}, {3, 3});  // without admission, times mean nothing
  EXPECT_EQ(plain.size(), 2u);
}

TABLE_TEST(TableAdmission, OnlyLookupsThatInsertCountAndRefuse) {
  using namespace admission;
  for (const auto unadmitted : {Unadmitted::kZeros, Unadmitted::kInitial, Unadmitted::kSkip}) {
    Subject t = f.Create(admission::Options(f, 2, unadmitted));
    const RowId absent = unadmitted == Unadmitted::kSkip ? kSkippedRow : kUnadmittedRow;
    const Floats absent_vector(2, unadmitted == Unadmitted::kInitial ? kInitial : 0.0f);
    Found found;
    found.vectors = t.Lookup({1}, {}, &found.rows);
    EXPECT_EQ(found.rows[0], absent);
    EXPECT_EQ(found.vectors, absent_vector);
    found.vectors = t.Lookup({1}, {3, 4}, &found.rows);
    EXPECT_EQ(found.vectors, (Floats{3, 4}));
    EXPECT_EQ(found.rows[0], kNoRow);
    EXPECT_EQ(t.Find({1})[0], kNoRow);
    EXPECT_EQ(CountsOf(t, {1}), std::vector<uint32_t>{0});
    EXPECT_EQ(t.stats().unadmitted, 0u);
    EXPECT_EQ(t.FindOrInsert({9, 1, 9}), (RowIds{0, absent, 0}));
    EXPECT_EQ(LookUp(&t, {5}).vectors, absent_vector);
    // Other calls that create rows.
    t.Upsert({1}, {3, 4});
    EXPECT_TRUE(t.TryAccumulate({2}, {3, 4}).ok());
    EXPECT_TRUE(t.TryWriteRows({3}, {3, 4}, {}, true).ok());
    EvictedRows evicted(t->layout());
    RowIds rows(1);
    t.set_tick(t.tick() + 1);
    EXPECT_TRUE(t->InsertAndEvict(t.exec(), t.Pack({4}), t.tick(), rows.data(), &evicted).ok());
    EXPECT_EQ(t.Contains({1, 2, 3, 4}), (Presence{1, 1, 1, 1}));
    t.Check();
  }
}

TABLE_TEST(TableAdmission, AKeyThatLostItsRowIsCountedAgain) {
  using namespace admission;
  Subject t = f.Create(admission::Options(f, 2));
  LookUp(&t, {1, 1});
  EXPECT_EQ(EraseAs(&t, {1}, Removal::kErase), 1u);
  LookUp(&t, {1});
  EXPECT_EQ(t.Contains({1}), Presence{0});
  EXPECT_EQ(CountsOf(t, {1}), std::vector<uint32_t>{1});
  // Erasing keys without rows leaves their counts; wiping them does not.
  EraseAs(&t, {1}, Removal::kErase);
  EXPECT_EQ(CountsOf(t, {1}), std::vector<uint32_t>{1});
  EraseAs(&t, {1}, Removal::kWipe);
  EXPECT_EQ(CountsOf(t, {1}), std::vector<uint32_t>{0});
  LookUp(&t, {1});
  EXPECT_TRUE(t.Clear().ok());
  EXPECT_EQ(CountsOf(t, {1}), std::vector<uint32_t>{0});
}

TABLE_TEST(TableAdmission, GradientsOfRefusedKeysAreNotDroppedGradients) {
  using namespace admission;
  Subject t = f.Create(admission::Options(f, 2));
  const Found found = LookUp(&t, {1, 2, 2, 3});
  // 3 gets a row after the lookup. Its gradient is still dropped.
  t.Upsert({3}, {7, 7});
  const RowOptimizer sgd(OptimizerKind::kSgd, OptimizerFlags{}, Hyper{}, kDim);
  t.Apply(sgd, {1, 2, 3}, {found.rows[0], found.rows[1], found.rows[3]}, Floats(6, 1000.0f));
  EXPECT_EQ(t.stats().dropped_gradients, 0u);
  EXPECT_EQ(t.Contains({1, 2, 3}), (Presence{0, 1, 1}));
  const Floats vectors = t.Read({2, 3});
  EXPECT_LT(vectors[0], kInitial);
  EXPECT_EQ(vectors[2], 7.0f);
}

TABLE_TEST(TableAdmission, ReadsAgainKnowRefusedKeys) {
  using namespace admission;
  Subject t = f.Create(admission::Options(f, 2));
  const RowIds before = LookUp(&t, {1, 2, 2, 3}).rows;
  const Tick since = t.tick();
  const RowIds after = LookUp(&t, {1, 2, 2, 4}).rows;
  const RowIds rows_before{before[0], before[1], before[3], kNoRow};
  const RowIds rows{after[0], after[1], kUnadmittedRow, kUnadmittedRow};
  const std::unique_ptr<bool[]> changed(new bool[4]);
  t->Changed(t.exec(), rows.data(), rows_before.data(), 4, since, t.tick(), changed.get());
  EXPECT_TRUE(changed[0]);   // it has its row now
  EXPECT_FALSE(changed[1]);  // it had a row
  EXPECT_FALSE(changed[2]);  // it was refused both times
  EXPECT_TRUE(changed[3]);
}

TABLE_TEST(TableAdmission, AFullTableEvictsForAdmittedKeysOnly) {
  using namespace admission;
  for (const EvictStrategy strategy : {EvictStrategy::kLru, EvictStrategy::kLfu}) {
    TableOptions options = admission::Options(f, 2);
    options.evict_strategy = strategy;
    options.init_capacity = options.max_capacity = 20;
    Subject t = f.Create(options);
    Keys twice, once = Progression(100, 100);
    for (uint64_t k = 0; k < 20; ++k) twice.insert(twice.end(), {k, k});
    LookUp(&t, twice);
    LookUp(&t, once);
    EXPECT_EQ(t.stats().evictions, 0u);
    once.resize(15);
    // Half of the batch has rows already, which it must not evict.
    Keys batch = once;
    for (uint64_t k = 0; k < 5; ++k) batch.push_back(k);
    batch.push_back(500);
    const Found found = LookUp(&t, batch);
    EXPECT_EQ(t.stats().evictions, 15u);
    Presence expected(21, 1);
    expected.back() = 0;
    EXPECT_EQ(t.Contains(batch), expected);
    EXPECT_EQ(found.rows.back(), kUnadmittedRow);
    t.Check();
    // Refused keys need no room; admitted keys that find none are an error.
    std::vector<uint64_t> many = Progression(1000, 40);
    EXPECT_EQ(LookUp(&t, many).rows, RowIds(40, kUnadmittedRow));
    RowIds rows;
    const Status full = t.TryFindOrInsert(many, &rows);
    EXPECT_EQ(full.code(), Code::kResourceExhausted) << full.message();
    EXPECT_EQ(t.size(), 20u);
    t.Check();
  }
}

TABLE_TEST(TableAdmission, ProbabilityIsThatOfTheHost) {
  using namespace admission;
  Keys keys(f.Scaled(20000, 600));
  Random random(5);
  for (uint64_t& key : keys) key = random.Below(keys.size() * 2 / 3);
  TableOptions options = admission::Options(f, 1);
  options.admission.rule = Admit::kProbability;
  options.admission.probability = 0.25;
  Subject t = f.Create(options);
  SerialExec serial;
  std::unique_ptr<Table> made;
  ASSERT_TRUE(Table::Create(options, &made).ok());
  Subject host(std::move(made), &serial);
  for (int batch = 0; batch < 3; ++batch) {
    // A read that does not insert takes a tick, and changes no draw.
    t.Find(keys);
    t.FindOrInsert(keys);
    host.FindOrInsert(keys);
    t.Check();
  }
  EXPECT_EQ(t.Contains(keys), host.Contains(keys));
  EXPECT_EQ(t.stats().unadmitted, host.stats().unadmitted);
  // A key that occurs m times has a row after three lookups with probability 1 - 0.75^(3 m).
  std::map<uint64_t, int> occurrences;
  for (uint64_t key : keys) ++occurrences[key];
  double mean = 0, variance = 0;
  for (const auto& [key, m] : occurrences) {
    const double p = 1 - std::pow(0.75, 3 * m);
    mean += p;
    variance += p * (1 - p);
  }
  EXPECT_NEAR(static_cast<double>(t.size()), mean, 5 * std::sqrt(variance));
}

// Random calls on the table and on one in host memory. The lines are few, so that keys are pushed
// out of them, and share counters. Everything is the same, including the bits of the counters,
// which each of the tables loads from the other.
TABLE_TEST(TableAdmission, RandomCallsDoWhatTheyDoOnTheHost) {
  if (f.slowness() > 100) SKIP_UNDER_TSAN("too slow for an emulated warp");
  using namespace admission;
  for (const bool expires : {false, true}) {
    for (const auto unadmitted : {Unadmitted::kZeros, Unadmitted::kSkip}) {
      SCOPED_TRACE(testing::Message() << expires << " " << static_cast<int>(unadmitted));
      TableOptions options = admission::Options(f, 5, unadmitted);
      options.admission.lines = 7;
      options.admission.first_line = 2;
      options.admission.num_lines = 4;
      options.ttl = expires ? 6 : 0;
      Subject t = f.Create(options);
      SerialExec serial;
      std::unique_ptr<Table> made;
      ASSERT_TRUE(Table::Create(options, &made).ok());
      Subject host(std::move(made), &serial);
      Random random(31 + static_cast<uint64_t>(unadmitted));
      const Keys all = Scattered(0, 300);
      const auto draw = [&](uint64_t most) {
        Keys keys(random.Below(most));
        const uint64_t range = random.Below(all.size()) + 1;
        for (uint64_t& key : keys) key = all[random.Below(range)];
        return keys;
      };
      for (size_t step = 0; step < Longer(f.Scaled(120, 24)); ++step) {
        SCOPED_TRACE(step);
        const uint64_t call = random.Below(20);
        Keys keys = draw(call == 0 ? 3000 : 200);
        if (call < 12) {
          std::vector<uint32_t> times;
          for (size_t i = 0; call % 2 == 0 && i < keys.size(); ++i) {
            times.push_back(static_cast<uint32_t>(1 + random.Below(3)));
          }
          const Found got = LookUp(&t, keys, times), want = LookUp(&host, keys, times);
          ASSERT_EQ(got.vectors, want.vectors);
          for (size_t i = 0; i < keys.size(); ++i) {
            ASSERT_EQ(IsRow(got.rows[i]), IsRow(want.rows[i]));
            if (!IsRow(got.rows[i])) {
              ASSERT_EQ(got.rows[i], want.rows[i]);
            }
          }
        } else if (call < 14) {
          RowIds got, want;
          ASSERT_EQ(t.Lookup(keys, {}, &got), host.Lookup(keys, {}, &want));
          for (size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(IsRow(got[i]), IsRow(want[i]));
        } else if (call < 17) {
          const Removal how = call == 14 ? Removal::kWipe : Removal::kErase;
          const size_t erased = EraseAs(&t, keys, how), want = EraseAs(&host, keys, how);
          if (!expires) {  // otherwise expired rows count where they have not been removed yet
            ASSERT_EQ(erased, want);
          }
        } else if (call == 17) {
          t.Upsert(keys, Floats(2 * keys.size(), kInitial));
          host.Upsert(keys, Floats(2 * keys.size(), kInitial));
        } else if (call == 18 && step % 3 == 0) {
          ASSERT_TRUE(t.Clear().ok() && host.Clear().ok());
        } else {
          // One loads what the other has saved, some of it merged with its own.
          Subject* const from = step % 2 == 0 ? &t : &host;
          Subject* const to = step % 2 == 0 ? &host : &t;
          if (!expires) LookUp(to, keys);  // it is a step
          host.set_tick(std::max(t.tick(), host.tick()));
          t.set_tick(host.tick());
          const std::vector<uint64_t> saved = SavedCounters(from);
          const std::vector<uint64_t> lines(saved.begin() + 8, saved.end());
          ASSERT_TRUE((*to)->LoadAdmission(saved.data(), 2, 4, false).ok());
          ASSERT_TRUE((*from)->LoadAdmission(lines.data(), 4, 3, true).ok());
          ASSERT_TRUE((*to)->LoadAdmission(lines.data(), 4, 3, true).ok());
          // Both get the rows of both.
          for (Subject* other : {from, to}) {
            for (Subject* u : {from, to}) {
              Keys held;
              const Presence has = other->Contains(all);
              for (size_t i = 0; i < all.size(); ++i) {
                if (has[i] != 0) held.push_back(all[i]);
              }
              u->Upsert(held, Floats(2 * held.size(), kInitial));
            }
          }
        }
        host.set_tick(std::max(t.tick(), host.tick()));
        t.set_tick(host.tick());
        ASSERT_EQ(t.Contains(all), host.Contains(all));
        ASSERT_EQ(SavedCounters(&t), SavedCounters(&host));
        ASSERT_EQ(CountsOf(t, all), CountsOf(host, all));
        t.Check();
        if (::testing::Test::HasFatalFailure()) return;
      }
      EXPECT_GT(t.stats().unadmitted, 100u);
    }
  }
}

// A snapshot has the counters of its watermark, which load into a table with part of the lines.
TABLE_TEST(TableAdmission, SnapshotsHaveTheCounters) {
  using namespace admission;
  SerialExec exec;
  Subject t = f.Create(admission::Options(f, 9));
  LookUp(&t, {1, 2, 2, 3, 3, 3});
  Clock clock;
  clock.Advance(10, 0);
  std::unique_ptr<Snapshot> snapshot;
  ASSERT_TRUE(Snapshot::Begin(t.exec(), {&t.table()}, {0}, CutOf::kRows, &clock, &snapshot).ok());
  t.set_tick(20);
  LookUp(&t, {1, 1, 4});
  const std::vector<uint64_t>& saved = snapshot->admission(0);
  ASSERT_EQ(saved.size(), 8000u);
  EXPECT_EQ(snapshot->first_admission_line(0), 0);
  Subject loaded = f.Create(admission::Options(f, 9));
  LookUp(&loaded, {4});
  ASSERT_TRUE(loaded->LoadAdmission(saved.data(), 0, 1000, false).ok());
  EXPECT_EQ(CountsOf(loaded, {1, 2, 3, 4}), (std::vector<uint32_t>{1, 2, 3, 0}));
  EXPECT_EQ(CountsOf(t, {1, 2, 3, 4}), (std::vector<uint32_t>{3, 2, 3, 1}));
  // Damaged lines are refused before anything changes.
  std::vector<uint64_t> damaged = saved;
  damaged[7999] = ~uint64_t{0};
  const Status refused = loaded->LoadAdmission(damaged.data(), 0, 1000, false);
  EXPECT_NE(refused.message().find("line 999"), std::string::npos) << refused.message();
  EXPECT_EQ(CountsOf(loaded, {1, 2, 3, 4}), (std::vector<uint32_t>{1, 2, 3, 0}));
  // SwapRows also swaps the counters.
  t->SwapRows(&loaded.table(), 30);
  EXPECT_EQ(CountsOf(t, {1, 2, 3, 4}), (std::vector<uint32_t>{1, 2, 3, 0}));
  EXPECT_EQ(CountsOf(loaded, {1, 2, 3, 4}), (std::vector<uint32_t>{3, 2, 3, 1}));
  // But not with a table whose counters are others.
  TableOptions fewer = admission::Options(f, 9);
  fewer.admission.lines = fewer.admission.num_lines = 10;
  Subject other = f.Create(fewer);
  loaded->SwapRows(&other.table(), 40);
  EXPECT_EQ(CountsOf(loaded, {1, 2, 3, 4}), (std::vector<uint32_t>{3, 2, 3, 1}));
  // A table that counts no keys refuses counters.
  Subject plain = f.Create(f.Options(kDim));
  EXPECT_FALSE(plain->LoadAdmission(saved.data(), 0, 1000, false).ok());
}

TABLE_TEST(TableAdmission, TheCountersAreMetadata) {
  const auto bytes = [&f](const TableOptions& options) {
    Subject t = f.Create(options);
    return t.stats().metadata_bytes;
  };
  TableOptions plain = admission::Options(f, 2);
  plain.admission = AdmissionOptions();
  EXPECT_EQ(bytes(admission::Options(f, 2)), bytes(plain) + 64000);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
