// Calls on all rows of a table that satisfy conditions: SelectRows and EvictTo.
#include <cmath>
#include <limits>
#include <map>

#include "cc/table/row_predicate.h"
#include "tests/cc/score_model.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

// The keys of the rows that satisfy a predicate, ascending.
Keys Selected(const Subject& t, const RowPredicate& where, uint64_t limit = ~0ull) {
  Keys selected;
  int64_t cursor = 0;
  do {
    const ExportPlan plan = t->SelectRows(t.exec(), static_cast<uint64_t>(cursor), limit, where);
    EXPECT_LE(plan.rows.size(), limit);
    std::vector<char> keys(plan.rows.size() * t.key_size());
    t->Export(t.exec(), plan, TickColumns::Keys(keys.data()));
    for (size_t i = 0; i < plan.rows.size(); ++i) selected.push_back(t.KeyAt(keys, i));
    cursor = plan.next_cursor;
  } while (cursor >= 0);
  std::sort(selected.begin(), selected.end());
  return selected;
}

TABLE_TEST(TableSelect, SelectRowsMatchesTheModel) {
  TableOptions options = Evicting(f, EvictStrategy::kScore, 0);
  options.dim = 5;
  Subject t = f.Create(options);
  struct Row {
    uint64_t key;
    Tick updated;
    int64_t score;
    double norm;
  };
  std::vector<Row> rows;
  Random random(5);
  const size_t n = f.Scaled(900, 40);
  for (size_t batch = 0; batch < 6; ++batch) {
    Keys keys = Scattered(1 + batch * n, n / 6);
    if (batch == 0) keys.insert(keys.end(), {0, ~uint64_t{0}, 1, uint64_t{1} << 63, 0x80000000u});
    Floats vectors;
    std::vector<Score> scores;
    for (uint64_t key : keys) {
      Floats vector(5);
      for (float& x : vector) x = random.Value();
      scores.push_back(static_cast<Score>(random.Below(10) == 0 ? ~0u : random.Below(1000)));
      double square = 0;
      for (float x : vector) square += static_cast<double>(x) * x;
      rows.push_back({t.Narrow(key), t.tick() + 1, scores.back(), std::sqrt(square)});
      vectors.insert(vectors.end(), vector.begin(), vector.end());
    }
    t.Upsert(keys, vectors);
    ASSERT_TRUE(t.SetScores(keys, scores).ok());
  }
  // Keys that are equal in 32 bits have one row, the last one's.
  std::map<uint64_t, Row> last;
  for (const Row& row : rows) last[row.key] = row;
  t.Erase({rows[3].key, rows[4].key});
  last.erase(rows[3].key);
  last.erase(rows[4].key);

  const auto ordered = [&](uint64_t key) {
    const uint64_t bits = f.key_type() == KeyType::kInt32
                              ? static_cast<uint64_t>(static_cast<int64_t>(
                                    static_cast<int32_t>(static_cast<uint32_t>(key))))
                              : key;
    return f.key_type() == KeyType::kUint64 ? bits : bits ^ (uint64_t{1} << 63);
  };
  for (size_t round = 0; round < f.Scaled(kSanitized ? 30 : 150, 15); ++round) {
    RowPredicate where;
    const uint64_t kinds = random.Below(16);
    if ((kinds & 1) != 0) {
      where.updated_after = random.Below(7);
      where.updated_until = where.updated_after + random.Below(6);
    }
    if ((kinds & 2) != 0) {
      where.score_from = static_cast<int64_t>(random.Below(1000));
      where.score_to = random.Below(2) == 0 ? 0xFFFFFFFF : where.score_from + 300;
    }
    if ((kinds & 4) != 0) {
      where.has_keys = true;
      const auto any = std::next(last.begin(), static_cast<int64_t>(random.Below(last.size())));
      const auto other = std::next(last.begin(), static_cast<int64_t>(random.Below(last.size())));
      const auto bits = [&](uint64_t key) {
        const uint64_t o = ordered(key);
        return f.key_type() == KeyType::kUint64 ? o : o ^ (uint64_t{1} << 63);
      };
      where.key_from = bits(any->first);
      where.key_to = bits(other->first);
    }
    if ((kinds & 8) != 0) {
      where.has_norms = true;
      where.norm_from = random.Below(2) == 0 ? -1 : static_cast<double>(random.Below(12));
      where.norm_below = random.Below(2) == 0 ? std::numeric_limits<double>::infinity()
                                              : static_cast<double>(random.Below(20));
    }
    Keys wanted;
    for (const auto& [key, row] : last) {
      const auto flip = [](uint64_t bits) { return bits ^ (uint64_t{1} << 63); };
      const bool is_unsigned = f.key_type() == KeyType::kUint64;
      const uint64_t from = is_unsigned ? where.key_from : flip(where.key_from);
      const uint64_t to = is_unsigned ? where.key_to : flip(where.key_to);
      if (row.updated > where.updated_after && row.updated <= where.updated_until &&
          row.score >= where.score_from && row.score <= where.score_to &&
          (!where.has_keys || (ordered(key) >= from && ordered(key) <= to)) &&
          (!where.has_norms || (row.norm >= where.norm_from && row.norm < where.norm_below))) {
        wanted.push_back(key);
      }
    }
    ASSERT_EQ(Selected(t, where), wanted) << "conditions " << kinds;
    ASSERT_EQ(Selected(t, where, 1 + random.Below(50)), wanted);
  }
}

// EvictTo evicts the rows with the lowest scores, exactly, in tables of any size.
TABLE_TEST(TableSelect, EvictToIsExact) {
  for (const EvictStrategy strategy : kAllStrategies) {
    SCOPED_TRACE(static_cast<int>(strategy));
    Subject t = f.Create(Evicting(f, strategy, 0));
    t->Track(t.tick());
    const size_t n = f.Scaled(kSanitized ? 500 : 3000, 40);
    const Keys keys = Scattered(1, n);
    Random random(9);
    for (size_t step = 0; step < 6; ++step) {
      Keys some;
      for (size_t i = 0; i < n; ++i) {
        if (step == 0 || random.Below(step + 1) == 0) some.push_back(keys[i]);
      }
      t.FindOrInsert(some);
      ASSERT_TRUE(t->AdvanceEpoch(t.exec()).ok());
    }
    if (strategy == EvictStrategy::kScore) {
      std::vector<Score> scores;
      for (size_t i = 0; i < n; ++i) {
        scores.push_back(random.Below(4) == 0 ? 7u : static_cast<Score>(random.Next()));
      }
      ASSERT_TRUE(t.SetScores(keys, scores).ok());
    }
    std::vector<int64_t> scores = t.Scores(keys);
    for (const size_t left : {n + 5, n, n - 1, n / 2, n / 3, size_t{1}, size_t{0}}) {
      const size_t held = t.size();
      const std::vector<char> before = t.Contains(keys);
      const uint64_t evictions = t.stats().evictions;
      uint64_t evicted = 77;
      t.set_tick(t.tick() + 1);
      ASSERT_TRUE(t->EvictTo(t.exec(), left, t.tick(), &evicted).ok());
      ASSERT_EQ(t.size(), std::min(held, left));
      EXPECT_EQ(evicted, held - t.size());
      EXPECT_EQ(t.stats().evictions, evictions + evicted);
      EXPECT_EQ(t.stats().erased, 0u);
      const std::vector<char> found = t.Contains(keys);
      int64_t highest_gone = -1, lowest_kept = int64_t{1} << 62;
      for (size_t i = 0; i < n; ++i) {
        if (found[i]) lowest_kept = std::min(lowest_kept, scores[i]);
        if (before[i] && !found[i]) highest_gone = std::max(highest_gone, scores[i]);
      }
      ASSERT_LE(highest_gone, lowest_kept);
      t.Check();
    }
    // The keys are deletions.
    SavedRows saved(size_t{1} << 20);
    ASSERT_TRUE(t->BeginCut(t.exec(), t.tick(), 0, CutOf::kDelta, &saved, 0).ok());
    EXPECT_EQ(t->cut()->deleted.size(), n);
    t->EndCut();
  }
}

TABLE_TEST(TableSelect, ExplainKnowsRowsAndLosses) {
  for (const EvictStrategy strategy : kAllStrategies) {
    Subject t = f.Create(Evicting(f, strategy, 4));
    t->Track(t.tick());
    t.FindOrInsert({1, 2, 3, 4});
    t.Erase({2});
    t.set_tick(t.tick() + 1);
    t->Erase(t.exec(), t.Pack({3}), t.tick(), Removal::kWipe);
    t.FindOrInsert({4, 4});
    uint64_t evicted = 0;
    t.set_tick(t.tick() + 1);
    ASSERT_TRUE(t->EvictTo(t.exec(), 0, t.tick(), &evicted).ok());
    t.Upsert({2}, {1, 1});
    const Keys keys = {1, 2, 3, 4, 99, 2};
    std::vector<Table::KeyState> states(keys.size());
    t->Explain(t.exec(), t.Pack(keys), states.data());
    const std::vector<bool> has_row = {false, true, false, false, false, true};
    const std::vector<Tick> lost = {5, 2, 3, 5, 0, 2};
    const Removal lost_by[] = {Removal::kEvict, Removal::kErase, Removal::kWipe,
                               Removal::kEvict, Removal::kErase, Removal::kErase};
    const std::vector<int64_t> scores = t.Scores(keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      SCOPED_TRACE(keys[i]);
      EXPECT_EQ(states[i].has_row, has_row[i]);
      EXPECT_EQ(states[i].updated, has_row[i] ? 6u : 0u);
      EXPECT_EQ(states[i].score, scores[i]);
      EXPECT_EQ(states[i].lost, lost[i]);
      EXPECT_EQ(states[i].lost_by, lost_by[i]);
    }
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
