// Each operation alone, on small tables and unusual keys.
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

TABLE_TEST(TableBasic, EmptyTable) {
  Subject t = f.Create();
  t.Check();
  EXPECT_EQ(t.size(), 0u);
  EXPECT_EQ(t.Find({0, 1, ~0ull}), RowIds(3, kNoRow));
  EXPECT_EQ(t.CountContained({0, 1, ~0ull}), 0u);
  EXPECT_EQ(t.Erase({0, 1, ~0ull}), 0u);
  EXPECT_TRUE(t.Export().empty());
  EXPECT_EQ(t.Read({7}), Floats(4, 0.0f));
  t.Check();
}

TABLE_TEST(TableBasic, EmptyBatch) {
  Subject t = f.Create();
  t.FindOrInsert({5});
  EXPECT_TRUE(t.FindOrInsert({}).empty());
  EXPECT_TRUE(t.Find({}).empty());
  EXPECT_TRUE(t.Lookup({}).empty());
  EXPECT_TRUE(t.LookupOrInsert({}).empty());
  t.Upsert({}, {});
  EXPECT_TRUE(t.TryAccumulate({}, {}).ok());
  EXPECT_TRUE(t.TryWriteRows({}, {}, {}, true).ok());
  EXPECT_EQ(t.Erase({}), 0u);
  EXPECT_EQ(t.size(), 1u);
  t.Check();
}

// No key is reserved: extremes, powers of two, their negatives, and the neighbors of these.
TABLE_TEST(TableBasic, EveryKeyIsLegal) {
  Keys keys = {0, ~0ull, 1ull << 63, ~(1ull << 63), 0xFFFFFFFFu, 0x7FFFFFFFu, 0x80000000u};
  for (int bit = 0; bit<64; bit += f.slowness()> 1 ? 9 : 1) {
    for (int off = -1; off <= 1; ++off) {
      keys.push_back((1ull << bit) + static_cast<uint64_t>(off));
      keys.push_back(0 - (1ull << bit) + static_cast<uint64_t>(off));
    }
  }
  // The key whose MixKey is 0, if the key type is wide enough to have it.
  keys.push_back(0 - 0x9E3779B97F4A7C15ull);
  Subject t = f.Create();
  for (uint64_t& key : keys) key = t.Narrow(key);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());

  EXPECT_EQ(t.CountContained(keys), 0u);
  const RowIds rows = t.FindOrInsert(keys);
  t.Check();
  EXPECT_EQ(std::unordered_set<RowId>(rows.begin(), rows.end()).size(), keys.size());
  EXPECT_EQ(t.size(), keys.size());
  EXPECT_EQ(t.Find(keys), rows);
  EXPECT_EQ(t.ExportedKeys(0), keys);
  EXPECT_EQ(t.Erase(keys), keys.size());
  t.Check();
  EXPECT_EQ(t.size(), 0u);
}

// Regular keys are spread, too: progressions of various steps, and keys that agree in their low or
// high bits.
TABLE_TEST(TableBasic, AdversarialKeys) {
  SKIP_UNDER_TSAN("chosen keys: threads divide the work as with others");
  const size_t n = f.Scaled(6000, 25);
  for (const uint64_t step : {1ull, 64ull, 1024ull, 1ull << 16, 1ull << 32, 1ull << 50, 0x10001ull,
                              0x9E3779B97F4A7C15ull, 0 - 1ull, 448ull}) {
    Subject t = f.Create(f.Options(1));
    Keys keys = Progression(3, n, step);
    std::unordered_set<uint64_t> distinct;
    for (uint64_t key : keys) distinct.insert(t.Narrow(key));
    const RowIds rows = t.FindOrInsert(keys);
    t.Check();
    EXPECT_EQ(t.size(), distinct.size()) << step;
    EXPECT_EQ(t.Find(keys), rows) << step;
    if (f.slowness() > 1) continue;
    if (distinct.size() == n) {
      EXPECT_GT(static_cast<double>(t.size()) / static_cast<double>(t.stats().slots), 0.4) << step;
    }
  }
}

TABLE_TEST(TableBasic, RepeatsShareARow) {
  Subject t = f.Create();
  const RowIds rows = t.FindOrInsert({9, 8, 9, 9, 8, 7});
  EXPECT_EQ(t.size(), 3u);
  EXPECT_EQ(rows[0], rows[2]);
  EXPECT_EQ(rows[0], rows[3]);
  EXPECT_EQ(rows[1], rows[4]);
  EXPECT_EQ(std::unordered_set<RowId>(rows.begin(), rows.end()).size(), 3u);
  t.Check();
  EXPECT_EQ(t.stats().inserts, 3u);
  // Many repeats of few keys, all of them new.
  Keys keys;
  for (size_t i = 0; i < f.Scaled(20000, 200); ++i) keys.push_back(1000 + i % 97);
  const RowIds many = t.FindOrInsert(keys);
  t.Check();
  EXPECT_EQ(t.size(), 100u);
  EXPECT_EQ(t.Find(keys), many);
}

TABLE_TEST(TableBasic, FindDoesNotInsert) {
  Subject t = f.Create();
  const RowIds rows = t.FindOrInsert({1, 2});
  EXPECT_EQ(t.Find({2, 3, 1, 3}), (RowIds{rows[1], kNoRow, rows[0], kNoRow}));
  EXPECT_EQ(t.Contains({2, 3, 1}), (std::vector<char>{1, 0, 1}));
  EXPECT_EQ(t.size(), 2u);
}

TABLE_TEST(TableBasic, LookupOfUnknownKeys) {
  Subject t = f.Create();
  t.Upsert({1}, {5, 6, 7, 8});
  RowIds rows;
  Floats got = t.Lookup({2, 1, 3}, {-1, -2, -3, -4}, &rows);
  EXPECT_EQ(got, (Floats{-1, -2, -3, -4, 5, 6, 7, 8, -1, -2, -3, -4}));
  EXPECT_EQ(rows[0], kNoRow);
  EXPECT_NE(rows[1], kNoRow);
  EXPECT_EQ(rows[2], kNoRow);
  got = t.Lookup({2, 3});
  EXPECT_EQ(got, f.InitialVectors(t, {2, 3}));
  EXPECT_EQ(t.size(), 1u);
  // A row that is inserted later starts with the vector that the lookup returned.
  EXPECT_EQ(t.LookupOrInsert({2, 3}, &rows), got);
  EXPECT_EQ(t.Find({2, 3}), rows);
  EXPECT_EQ(t.size(), 3u);
}

TABLE_TEST(TableBasic, InitialVectorsDependOnSeedKeyAndColumnOnly) {
  const Keys keys = Scattered(1, f.Scaled(3000, 20));
  Subject t = f.Create();
  const Floats first = t.LookupOrInsert(keys);
  EXPECT_EQ(first, f.InitialVectors(t, keys));
  // The keys in reverse order and in several batches, in another table.
  Subject u = f.Create();
  Keys backwards(keys.rbegin(), keys.rend());
  for (size_t i = 0; i < backwards.size(); i += 1 + i / 2) {
    u.FindOrInsert(Keys(backwards.begin() + static_cast<int64_t>(i / 2),
                        backwards.begin() + static_cast<int64_t>(i)));
  }
  u.FindOrInsert(backwards);
  EXPECT_EQ(u.Read(keys), first);
  // After an update and an erasure, a key gets its initial vector again.
  t.Upsert(keys, Floats(first.size(), 3.0f));
  EXPECT_EQ(t.Erase(keys), keys.size());
  EXPECT_EQ(t.LookupOrInsert(keys), first);
  // Another seed.
  TableOptions options = f.Options();
  options.seed = 43;
  Subject v = f.Create(options);
  EXPECT_NE(v.LookupOrInsert(keys), first);
  // The values of columns and keys differ.
  EXPECT_GT(std::unordered_set<float>(first.begin(), first.end()).size(),
            std::min<size_t>(first.size() * 6 / 10, 150));
}

TABLE_TEST(TableBasic, UpsertLastOfRepeatsWins) {
  Subject t = f.Create(f.Options(1));
  t.Upsert({1, 2, 1, 3, 2, 1}, {10, 20, 11, 30, 21, 12});  // all new
  EXPECT_EQ(t.Read({1, 2, 3}), (Floats{12, 21, 30}));
  t.Upsert({1, 2, 1, 4, 4}, {13, 22, 14, 40, 41});  // some exist
  EXPECT_EQ(t.Read({1, 2, 3, 4}), (Floats{14, 22, 30, 41}));
  t.Check();
  // Long enough for several ranges of work and workers; repeats of a key are far apart.
  const size_t n = f.Scaled(30000, 100);
  Keys keys;
  Floats values;
  Random random(5);
  std::unordered_map<uint64_t, float> want;
  for (size_t i = 0; i < n; ++i) {
    keys.push_back(100 + random.Below(n / 10));
    values.push_back(random.Value());
  }
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < n; ++i) want[keys[i]] = values[i];
    t.Upsert(keys, values);
    const Floats got = t.Read(keys);
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(got[i], want[keys[i]]) << i;
    for (float& value : values) value = -value;
  }
  t.Check();
}

TABLE_TEST(TableBasic, AccumulateAddsToTheInitialVector) {
  TableOptions options = f.Options(2);
  options.initializer = {{InitKind::kConstant, 3.0f, 0.0f}, {InitKind::kConstant, -1.0f, 0.0f}};
  Subject t = f.Create(options);
  ASSERT_TRUE(t.TryAccumulate({1, 2}, {1, 2, 3, 4}).ok());
  EXPECT_EQ(t.Read({1, 2}), (Floats{4, 1, 6, 3}));
  ASSERT_TRUE(t.TryAccumulate({2, 3}, {1, 1, 1, 1}).ok());
  EXPECT_EQ(t.Read({1, 2, 3}), (Floats{4, 1, 7, 4, 4, 0}));
  t.Check();
}

TABLE_TEST(TableBasic, WriteRowsSetsVectorAndState) {
  Subject t = f.Create(f.Options(1));
  ASSERT_TRUE(t->AttachState(t.exec(), {"momentum", {1, 2}, {0.5f, -2.0f}}).ok());
  t.FindOrInsert({1});
  ASSERT_TRUE(t.TryWriteRows({1, 2}, {10, 20}, {1, 2, 3, 4, 5, 6}, false).ok());
  EXPECT_EQ(t.size(), 1u);
  Floats state;
  EXPECT_EQ(t.Read({1, 2}, &state), (Floats{10, 0}));
  EXPECT_EQ(state, (Floats{1, 2, 3, 0, 0, 0}));
  ASSERT_TRUE(t.TryWriteRows({1, 2}, {11, 20}, {7, 8, 9, 4, 5, 6}, true).ok());
  EXPECT_EQ(t.Read({1, 2}, &state), (Floats{11, 20}));
  EXPECT_EQ(state, (Floats{7, 8, 9, 4, 5, 6}));
  // An upsert keeps the state of an existing row. A new row gets the initial state.
  t.Upsert({1, 3}, {12, 30});
  EXPECT_EQ(t.Read({1, 3}, &state), (Floats{12, 30}));
  EXPECT_EQ(state, (Floats{7, 8, 9, 0.5f, -2.0f, -2.0f}));
  t.Check();
}

TABLE_TEST(TableBasic, AttachStateKeepsVectorsAndRows) {
  const Keys keys = Scattered(7, f.Scaled(5000, 30));
  Subject t = f.Create(f.Options(3));
  const RowIds rows = t.FindOrInsert(keys);
  t.Erase({keys[1], keys[5]});
  const Floats vectors = t.Read(keys);
  const auto sorted = [&t] {
    std::vector<Exported> rows = t.Export();
    std::sort(rows.begin(), rows.end(),
              [](const Exported& a, const Exported& b) { return a.key < b.key; });
    return rows;
  };
  const std::vector<Exported> before = sorted();
  for (const StateSpec& spec : {StateSpec{"a", {3}, {0.25f}}, StateSpec{"b", {3, 1}, {1.0f, 2.0f}},
                                StateSpec{"c", {}, {}}, StateSpec{"d", {3}, {-1.0f}}}) {
    ASSERT_TRUE(t->AttachState(t.exec(), spec).ok());
    t.Check();
    EXPECT_TRUE(t->state_spec() == spec);
    Floats state;
    EXPECT_EQ(t.Read(keys, &state), vectors);
    Floats initial;
    for (size_t i = 0; i < spec.widths.size(); ++i) {
      initial.insert(initial.end(), static_cast<size_t>(spec.widths[i]), spec.inits[i]);
    }
    const std::vector<Exported> after = sorted();
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_EQ(after[i].state, initial);
      EXPECT_EQ(after[i].key, before[i].key);
      if (!f.cold()) {
        EXPECT_EQ(after[i].row, before[i].row);
      }
      EXPECT_EQ(after[i].update, before[i].update);
    }
  }
  if (!f.cold()) {
    EXPECT_EQ(t.Find({keys[0], keys[1], keys[2]}), (RowIds{rows[0], kNoRow, rows[2]}));
  }
  // The same state again drops nothing.
  ASSERT_TRUE(t.TryWriteRows({keys[0]}, {1, 2, 3}, {4, 5, 6}, false).ok());
  ASSERT_TRUE(t->AttachState(t.exec(), {"d", {3}, {-1.0f}}).ok());
  Floats state;
  t.Read({keys[0]}, &state);
  EXPECT_EQ(state, (Floats{4, 5, 6}));
  // State of another name is dropped, even if its width is the same.
  ASSERT_TRUE(t->AttachState(t.exec(), {"e", {3}, {-1.0f}}).ok());
  t.Read({keys[0]}, &state);
  EXPECT_EQ(state, (Floats{-1, -1, -1}));
}

TABLE_TEST(TableBasic, EraseAndReuse) {
  const size_t n = f.Scaled(8000, 40);
  Subject t = f.Create(f.Options(1));
  const Keys keys = Scattered(1, n);
  t.FindOrInsert(keys);
  Keys odd, even;
  for (size_t i = 0; i < n; ++i) (i % 2 == 0 ? even : odd).push_back(keys[i]);
  Keys twice = odd;
  twice.insert(twice.end(), odd.begin(), odd.end());
  EXPECT_EQ(t.Erase(twice), odd.size());  // a repeated key counts once
  t.Check();
  EXPECT_EQ(t.Erase(odd), 0u);
  EXPECT_EQ(t.CountContained(odd), 0u);
  EXPECT_EQ(t.CountContained(even), even.size());
  EXPECT_EQ(t.size(), even.size());
  EXPECT_EQ(t.stats().erased, odd.size());
  // Freed rows are reused before new ones.
  const uint64_t bytes = t.stats().row_bytes;
  const RowIds rows = t.FindOrInsert(Scattered(1000000, odd.size()));
  EXPECT_LT(*std::max_element(rows.begin(), rows.end()), n);
  EXPECT_LE(t.stats().row_bytes, bytes);
  t.Check();
}

TABLE_TEST(TableBasic, Clear) {
  Subject t = f.Create(f.Options(2));
  ASSERT_TRUE(t->AttachState(t.exec(), {"s", {1}, {9.0f}}).ok());
  const Keys keys = Scattered(1, f.Scaled(5000, 30));
  t.FindOrInsert(keys);
  ASSERT_TRUE(t.Clear().ok());
  t.Check();
  EXPECT_EQ(t.size(), 0u);
  EXPECT_EQ(t.CountContained(keys), 0u);
  EXPECT_TRUE(t.Export().empty());
  const Floats vectors = t.LookupOrInsert(keys);
  EXPECT_EQ(vectors, f.InitialVectors(t, keys));
  for (const Exported& row : t.Export()) ASSERT_EQ(row.state, Floats{9.0f});
  t.Check();
}

TABLE_TEST(TableBasic, StatsAreExact) {
  Subject t = f.Create();
  EXPECT_EQ(t.stats().size, 0u);
  t.FindOrInsert({1, 2, 3});
  TableStats s = t.stats();
  EXPECT_EQ(s.size, 3u);
  EXPECT_EQ(s.inserts, 3u);
  EXPECT_EQ(s.misses, 3u);
  EXPECT_EQ(s.hits, 0u);
  t.FindOrInsert({1, 2, 4, 4});
  s = t.stats();
  EXPECT_EQ(s.size, 4u);
  EXPECT_EQ(s.inserts, 4u);
  EXPECT_EQ(s.hits + s.misses, 7u);
  EXPECT_EQ(s.hits, 2u);
  t.Find({1, 9, 9});
  t.Lookup({1, 2, 9});
  s = t.stats();
  EXPECT_EQ(s.hits, 5u);
  EXPECT_EQ(s.misses, 5u + 3u);
  t.Erase({1, 9});
  s = t.stats();
  EXPECT_EQ(s.erased, 1u);
  EXPECT_EQ(s.size, 3u);
  EXPECT_EQ(s.evictions, 0u);
  EXPECT_EQ(s.refused, 0u);
  EXPECT_EQ(s.slots % (f.flat() ? 7 : 448), 0u);
  EXPECT_GE(s.index_bytes, s.slots / 7 * 64);
  EXPECT_GE(s.metadata_bytes, s.index_bytes);
  EXPECT_GE(s.row_bytes, s.size * t->layout().stride);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
