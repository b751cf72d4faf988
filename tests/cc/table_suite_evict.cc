// Tables at max_capacity: which rows are evicted, which stay, and which batches are refused.
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

TableOptions Bounded(const TableFixture& f, size_t max_capacity, int64_t dim = 2) {
  TableOptions options = f.Options(dim);
  options.max_capacity = static_cast<int64_t>(max_capacity);
  return options;
}

Keys Part(const Keys& keys, size_t begin, size_t n) {
  return Keys(keys.begin() + static_cast<int64_t>(begin),
              keys.begin() + static_cast<int64_t>(std::min(keys.size(), begin + n)));
}

// Batches of random sizes up to the capacity, in tables of several capacities.
TABLE_TEST(TableEvict, BatchAlwaysFits) {
  for (const size_t capacity : {size_t{1}, size_t{2}, size_t{7}, size_t{8}, f.Scaled(100, 12),
                                f.Scaled(449, 9), f.Scaled(2000, 10)}) {
    Subject t = f.Create(Bounded(f, capacity));
    Random random(capacity);
    for (size_t step = 0; step < f.Scaled(60, 3); ++step) {
      const size_t n = step % 4 == 0 ? capacity : 1 + random.Below(capacity);
      const Keys keys = Scattered(random.Below(3 * capacity), n);
      RowIds rows;
      const Floats vectors = t.LookupOrInsert(keys, &rows);
      t.Check();
      ASSERT_LE(t.size(), capacity);
      ASSERT_EQ(t.CountContained(keys), n) << "capacity " << capacity;
      ASSERT_EQ(std::unordered_set<RowId>(rows.begin(), rows.end()).size(), n);
      ASSERT_LT(*std::max_element(rows.begin(), rows.end()), capacity);
      ASSERT_EQ(vectors, f.InitialVectors(t, keys));
    }
    EXPECT_EQ(t.size(), capacity);
    const TableStats s = t.stats();
    EXPECT_EQ(s.inserts - s.evictions, capacity);
    EXPECT_EQ(s.refused, 0u);
  }
}

TABLE_TEST(TableEvict, VictimsAreOld) {
  SKIP_UNDER_TSAN("a test of which rows are chosen, not of threads");
  if (f.slowness() > 200) GTEST_SKIP() << "too slow for a whole emulated warp";
  if (f.cold()) GTEST_SKIP() << "a segment has too few rows at this size";
  const size_t generations = 50;
  const size_t capacity = f.Scaled(10000, 250) / generations * generations;
  Subject t = f.Create(Bounded(f, capacity, 1));
  const Keys keys = Scattered(1, capacity);
  const size_t part = capacity / generations;
  for (size_t g = 0; g < generations; ++g) t.FindOrInsert(Part(keys, g * part, part));
  const size_t n = capacity / 10;
  t.FindOrInsert(Scattered(10000000, n));
  t.Check();
  const std::vector<char> found = t.Contains(keys);
  double sum = 0;
  double newest = 0;
  size_t gone = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i]) continue;
    ++gone;
    sum += static_cast<double>(i) / static_cast<double>(capacity);
    newest = std::max(newest, static_cast<double>(i) / static_cast<double>(capacity));
  }
  ASSERT_EQ(gone, n);
  // Exact LRU has a mean of 0.05 and a maximum of 0.1; random victims have 0.5 and 1.
  EXPECT_LT(sum / static_cast<double>(gone), 0.12);
  EXPECT_LT(newest, 0.8);
}

// Rows that are read or written, by any call, stay while a stream of other keys is inserted.
TABLE_TEST(TableEvict, HotKeysSurvive) {
  const size_t capacity = f.Scaled(5000, 40);
  Subject t = f.Create(Bounded(f, capacity, 1));
  const Keys hot = Scattered(1, capacity / 4);
  t.FindOrInsert(hot);
  const RowIds rows = t.Find(hot);
  const Floats values(hot.size(), 1.0f);
  const size_t batch = capacity / 10;
  for (size_t step = 0; step < f.Scaled(40, 12); ++step) {
    switch (step % 6) {
      case 0:
        t.Find(hot);
        break;
      case 1:
        t.Lookup(hot);
        break;
      case 2:
        t.FindOrInsert(hot);
        break;
      case 3:
        t.Upsert(hot, values);
        break;
      case 4:
        EXPECT_TRUE(t.TryAccumulate(hot, values).ok());
        break;
      case 5:
        EXPECT_TRUE(t.TryWriteRows(hot, values, {}, false).ok());
        break;
    }
    t.FindOrInsert(Scattered(1000000 + step * batch, batch));
  }
  EXPECT_GT(t.stats().evictions, f.slowness() > 1 ? 0 : 3 * capacity);
  const RowIds now = t.Find(hot);
  size_t stayed = 0;
  for (size_t i = 0; i < hot.size(); ++i) stayed += now[i] == rows[i];
  EXPECT_GE(stayed * 1000, hot.size() * 995) << stayed << " of " << hot.size();
  t.Check();
}

// Contains, ReadRows and Export are not accesses: rows that only these read are evicted first.
TABLE_TEST(TableEvict, InspectionIsNoAccess) {
  Subject t = f.Create(Bounded(f, 20, 1));
  const Keys watched = Scattered(1, 10), used = Scattered(100, 10);
  t.FindOrInsert(watched);
  t.FindOrInsert(used);
  t.CountContained(watched);
  t.Read(watched);
  t.Export();
  t.Find(used);
  t.FindOrInsert(Scattered(200, 10));
  EXPECT_EQ(t.CountContained(watched), 0u);
  EXPECT_EQ(t.CountContained(used), 10u);
}

// A key that gets the row of an evicted key gets initial values, not the old ones.
TABLE_TEST(TableEvict, ReusedRowsAreInitialized) {
  const size_t capacity = f.Scaled(600, 12);
  Subject t = f.Create(Bounded(f, capacity, 2));
  ASSERT_TRUE(t->AttachState(t.exec(), {"s", {2, 1}, {0.25f, 4.0f}}).ok());
  const Keys a = Scattered(1, capacity), b = Scattered(1000000, capacity);
  for (int round = 0; round < 4; ++round) {
    const Keys& keys = round % 2 == 0 ? a : b;
    EXPECT_EQ(t.LookupOrInsert(keys), f.InitialVectors(t, keys)) << round;
    Floats state;
    EXPECT_EQ(t.Read(keys, &state), f.InitialVectors(t, keys));
    for (size_t i = 0; i < capacity; ++i) {
      ASSERT_EQ(Floats(state.begin() + static_cast<int64_t>(3 * i),
                       state.begin() + static_cast<int64_t>(3 * i + 3)),
                (Floats{0.25f, 0.25f, 4.0f}))
          << round;
    }
    for (const Exported& row : t.Export()) {
      ASSERT_EQ(static_cast<Tick>(row.update), t.tick());  // the insertion is the first update
    }
    ASSERT_TRUE(
        t.TryWriteRows(keys, Floats(2 * capacity, 7.0f), Floats(3 * capacity, 8.0f), false).ok());
    t.Check();
  }
  // An upsert that reuses the rows of evicted keys.
  t.Upsert(a, Floats(2 * capacity, 3.0f));
  Floats state;
  t.Read({a[0]}, &state);
  EXPECT_EQ(state, (Floats{0.25f, 0.25f, 4.0f}));
  EXPECT_EQ(t.stats().evictions, 4 * capacity);
}

TABLE_TEST(TableEvict, OversizedBatchChangesNothing) {
  const size_t capacity = f.Scaled(1000, 20);
  for (const bool full : {true, false}) {
    Subject t = f.Create(Bounded(f, capacity, 1));
    const size_t held = full ? capacity : capacity / 2;
    const Keys there = Scattered(1, held);
    t.FindOrInsert(there);
    const std::vector<Exported> before = t.Export();
    Keys a_bit_too_many = Scattered(1000000, capacity - held + 1);  // and all existing keys
    a_bit_too_many.insert(a_bit_too_many.end(), there.begin(), there.end());
    const Keys far_too_many = Scattered(1000000, capacity + 1);
    for (const Keys& keys : {a_bit_too_many, far_too_many}) {
      const Floats values(keys.size(), 2.0f);
      const auto unchanged = [&](const Status& status, const char* call) {
        EXPECT_EQ(status.code(), Code::kResourceExhausted) << call;
        for (const std::string& part :
             {std::string("subject"), std::to_string(held), std::to_string(capacity)}) {
          EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
        }
        t.Check();
        EXPECT_TRUE(t.Export() == before) << call << " failed and changed the table";
      };
      RowIds rows;
      unchanged(t.TryFindOrInsert(keys, &rows), "FindOrInsert");
      unchanged(t.TryUpsert(keys, values), "Upsert");
      unchanged(t.TryAccumulate(keys, values), "Accumulate");
      unchanged(t.TryWriteRows(keys, values, {}, true), "WriteRows");
    }
    EXPECT_EQ(t.stats().evictions, 0u);
    EXPECT_GT(t.stats().refused, 0u);
    // A batch of `capacity` distinct keys still fits, even with repeats.
    Keys all = Scattered(1000000, capacity);
    all.insert(all.end(), all.begin(), all.end());
    t.FindOrInsert(all);
    EXPECT_EQ(t.CountContained(all), 2 * capacity);
    EXPECT_EQ(t.size(), capacity);
    t.Check();
  }
}

TABLE_TEST(TableEvict, RepeatsAtCapacity) {
  const size_t capacity = f.Scaled(300, 20);
  Subject t = f.Create(Bounded(f, capacity, 1));
  t.FindOrInsert(Scattered(1, capacity));
  Random random(3);
  for (size_t step = 0; step < f.Scaled(8, 2); ++step) {
    Keys keys;
    Floats values;
    std::unordered_map<uint64_t, float> want;
    const Keys distinct = Scattered(1000 * step, capacity);
    for (size_t i = 0; i < 3 * capacity; ++i) {
      keys.push_back(distinct[random.Below(capacity)]);
      values.push_back(random.Value());
      want[keys.back()] = values.back();
    }
    t.Upsert(keys, values);
    t.Check();
    const Floats got = t.Read(keys);
    for (size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(got[i], want[keys[i]]) << i;
    const RowIds rows = t.FindOrInsert(keys);
    EXPECT_EQ(t.Find(keys), rows);
    EXPECT_EQ(t.size(), capacity);
  }
}

TABLE_TEST(TableEvict, StrategyNone) {
  TableOptions options = Bounded(f, 50, 1);
  options.evict_strategy = EvictStrategy::kNone;
  Subject t = f.Create(options);
  const Keys keys = Scattered(1, 50);
  t.FindOrInsert(Part(keys, 0, 30));
  RowIds rows;
  EXPECT_EQ(t.TryFindOrInsert(Scattered(100, 21), &rows).code(), Code::kResourceExhausted);
  EXPECT_EQ(t.size(), 30u);
  t.FindOrInsert(keys);
  t.FindOrInsert(keys);  // all exist: not refused
  const std::vector<Exported> before = t.Export();
  EXPECT_EQ(t.TryFindOrInsert({keys[0], 12345}, &rows).code(), Code::kResourceExhausted);
  EXPECT_EQ(t.TryUpsert({keys[0], 12345}, {1, 2}).code(), Code::kResourceExhausted);
  EXPECT_TRUE(t.Export() == before);
  t.Check();
  EXPECT_EQ(t.Erase({keys[7]}), 1u);
  t.FindOrInsert({12345});
  EXPECT_EQ(t.size(), 50u);
  EXPECT_EQ(t.stats().evictions, 0u);
  t.Check();
}

// Keys of one segment need more victims than that segment has.
TABLE_TEST(TableEvict, OneSegmentEvictsFromOthers) {
  SKIP_UNDER_TSAN("a test of which rows are chosen, not of threads");
  if (f.key_type() == KeyType::kInt32) GTEST_SKIP() << "needs keys of 64 bits";
  if (f.slowness() > 200) GTEST_SKIP() << "too slow for a whole emulated warp";
  for (const bool crowded : {false, true}) {
    const size_t capacity = f.Scaled(2000, 700);
    Subject t = f.Create(Bounded(f, capacity, 1));
    t.FindOrInsert(Scattered(1, capacity));
    for (uint32_t round = 0; round < f.Scaled(4, 1); ++round) {
      const Keys keys =
          SamePrefix(t.salt(), 0x70000000u + (round << 16), f.Scaled(370, 330), crowded);
      t.FindOrInsert(keys);
      t.Check();
      ASSERT_EQ(t.CountContained(keys), keys.size());
      ASSERT_EQ(t.size(), capacity);
    }
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
