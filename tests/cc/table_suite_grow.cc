// Growth: contents, row ids, threads, load, memory; and keys that agree in many bits of their
// hashes.
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

TABLE_TEST(TableGrow, RowIdsAndVectorsStay) {
  const size_t n = f.Scaled(60000, f.slowness() > 200 ? 100 : 400);
  Subject t = f.Create(f.Options(1));
  const Keys keys = Scattered(1, n);
  RowIds rows;
  size_t checked = 0;
  for (size_t size = 1; rows.size() < n; size = size * 3 / 2 + 1) {
    const size_t end = std::min(n, rows.size() + size);
    const Keys batch(keys.begin() + static_cast<int64_t>(rows.size()),
                     keys.begin() + static_cast<int64_t>(end));
    const RowIds added = t.FindOrInsert(batch);
    rows.insert(rows.end(), added.begin(), added.end());
    t.Check();
    ASSERT_EQ(t.size(), rows.size());
    const Keys so_far(keys.begin(), keys.begin() + static_cast<int64_t>(rows.size()));
    if (!f.cold()) {
      ASSERT_EQ(t.Find(so_far), rows);
    }
    ++checked;
  }
  EXPECT_GT(checked, 5u);
  if (!f.cold()) {
    EXPECT_EQ(std::unordered_set<RowId>(rows.begin(), rows.end()).size(), n);
  }
  EXPECT_LT(*std::max_element(rows.begin(), rows.end()), n);
  EXPECT_EQ(t.Read(keys), f.InitialVectors(t, keys));
}

TABLE_TEST(TableGrow, PresizingChangesOnlyTheCost) {
  SKIP_UNDER_TSAN("a test of speed: other tests run the same code");
  if (f.cold()) GTEST_SKIP() << "memory is presized for the rows that it holds";
  const size_t n = f.Scaled(100000, f.slowness() > 200 ? 100 : 450);
  Subject small = f.Create(f.Options(1));
  TableOptions options = f.Options(1);
  options.init_capacity = static_cast<int64_t>(n);
  Subject presized = f.Create(options);
  const uint64_t slots = presized.stats().slots;
  EXPECT_GE(static_cast<double>(slots) * options.max_load_factor, static_cast<double>(n));
  EXPECT_LE(slots, 3 * n + 2000);
  const Keys keys = Scattered(1, n);
  for (size_t i = 0; i < n; i += n / 8) {
    const Keys batch(keys.begin() + static_cast<int64_t>(i),
                     keys.begin() + static_cast<int64_t>(std::min(n, i + n / 8)));
    ASSERT_EQ(small.FindOrInsert(batch), presized.FindOrInsert(batch));
  }
  presized.Check();
  EXPECT_TRUE(small.Export() == presized.Export());
  EXPECT_LE(static_cast<double>(presized.stats().slots), 1.05 * static_cast<double>(slots));
  ASSERT_TRUE(presized.Clear().ok());
  EXPECT_EQ(presized.stats().slots, slots);
}

// The same calls give the same table, including row ids, on any Exec.
TABLE_TEST(TableGrow, ExecDoesNotMatter) {
  SKIP_UNDER_ASAN("large batches of calls that other tests make");
  if (f.slowness() > 1)
    GTEST_SKIP() << "teams of emulated warps race, so the contents of the table vary";
  SerialExec serial;
  TableOptions options = f.Options(2);
  options.max_capacity = static_cast<int64_t>(f.Scaled(20000, 300));
  Subject t = f.Create(options);
  Subject u = f.Create(options, &serial);
  Random random(77);
  const Hyper hyper;
  const RowOptimizer sgd(OptimizerKind::kSgd, {}, hyper, 2);
  for (int step = 0; step < 8; ++step) {
    Keys keys(f.Scaled(9000, 100));
    for (uint64_t& key : keys) key = random.Below(f.Scaled(30000, 450));
    const RowIds rows = t.FindOrInsert(keys);
    ASSERT_EQ(rows, u.FindOrInsert(keys));
    Floats values(keys.size() * 2);
    for (float& value : values) value = random.Value();
    std::unordered_set<uint64_t> seen;
    Keys distinct;
    RowIds distinct_rows;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!seen.insert(keys[i]).second) continue;
      distinct.push_back(keys[i]);
      distinct_rows.push_back(rows[i]);
    }
    t.Apply(sgd, distinct, distinct_rows, values);
    u.Apply(sgd, distinct, distinct_rows, values);
    for (uint64_t& key : keys) key = random.Below(f.Scaled(30000, 450));
    t.Upsert(keys, values);
    u.Upsert(keys, values);
    ASSERT_TRUE(t.Export() == u.Export()) << step;
    const Keys gone(keys.begin(), keys.begin() + static_cast<int64_t>(keys.size() / 3));
    ASSERT_EQ(t.Erase(gone), u.Erase(gone));
    t.Check();
  }
  EXPECT_GT(t.stats().evictions, 0u);
  EXPECT_EQ(t.stats().evictions, u.stats().evictions);
}

// Every key gets a slot, even if all hashes agree in 32 bits, or in almost all bits.
TABLE_TEST(TableGrow, KeysOfOnePrefixAreInserted) {
  SKIP_UNDER_TSAN("chosen keys: threads divide the work as with others");
  if (f.key_type() == KeyType::kInt32) GTEST_SKIP() << "needs keys of 64 bits";
  for (const bool crowded : {false, true}) {
    Subject t = f.Create(f.Options(1));
    const Keys good = Scattered(1, f.Scaled(3000, 60));
    const RowIds good_rows = t.FindOrInsert(good);
    const Keys flood = SamePrefix(t.salt(), 0x2468ACEu,
                                  f.Scaled(crowded      ? 1500
                                           : kSanitized ? 5000
                                                        : 20000,
                                           40),
                                  crowded);
    const size_t half = flood.size() / 2;
    t.FindOrInsert(Keys(flood.begin(), flood.begin() + static_cast<int64_t>(half)));
    t.Check();
    const RowIds rows = t.FindOrInsert(flood);
    t.Check();
    EXPECT_EQ(t.size(), good.size() + flood.size());
    EXPECT_EQ(t.stats().refused, 0u);
    if (!f.cold()) {
      EXPECT_EQ(t.Find(flood), rows);
      EXPECT_EQ(t.Find(good), good_rows);
    }
    EXPECT_EQ(t.Read(flood), f.InitialVectors(t, flood));
    // Such keys do not make the index large: the load is above 1/4.
    if (t.size() > 1000 && !f.cold()) {
      EXPECT_GT(4 * t.size(), t.stats().slots);
    }
    EXPECT_EQ(t.Erase(flood), flood.size());
    EXPECT_EQ(t.CountContained(flood), 0u);
    t.Check();
    EXPECT_EQ(t.Find(good), good_rows);
    t.FindOrInsert(flood);
    EXPECT_EQ(t.size(), good.size() + flood.size());
    t.Check();
    ASSERT_TRUE(t.Clear().ok());
    t.FindOrInsert(flood);
    t.Check();
  }
}

// A full table also evicts if all new keys belong to one segment.
TABLE_TEST(TableGrow, KeysOfOnePrefixEvict) {
  SKIP_UNDER_TSAN("chosen keys: threads divide the work as with others");
  if (f.key_type() == KeyType::kInt32) GTEST_SKIP() << "needs keys of 64 bits";
  TableOptions options = f.Options(1);
  options.max_capacity = static_cast<int64_t>(f.Scaled(3000, 60));
  options.init_capacity = 1;
  Subject t = f.Create(options);
  const auto most = static_cast<size_t>(options.max_capacity);
  t.FindOrInsert(Scattered(1, most));
  EXPECT_EQ(t.size(), most);
  // max_capacity keys, so that almost all rows must come from other segments.
  const Keys flood = SamePrefix(t.salt(), 0x2468ACEu, most, false);
  const RowIds rows = t.FindOrInsert(flood);
  t.Check();
  EXPECT_EQ(t.size(), most);
  EXPECT_EQ(t.Find(flood), rows);
  EXPECT_EQ(t.stats().evictions, most);
  const Keys others = Scattered(100000, most);
  t.FindOrInsert(others);
  t.Check();
  EXPECT_EQ(t.CountContained(others), most);
}

// Load and bytes of metadata per row, at many sizes.
TABLE_TEST(TableGrow, LoadAndMetadata) {
  if (f.slowness() > 2) GTEST_SKIP() << "too slow for the emulated warp";
  Subject t = f.Create(f.Options(8));
  uint64_t next = 0;
  const size_t from = 30000;
  for (size_t size = from; size < 150000; size += size / 12) {
    t.FindOrInsert(Scattered(next, size - next));
    next = size;
    const TableStats s = t.stats();
    const double load = static_cast<double>(s.size) / static_cast<double>(s.slots);
    EXPECT_GT(load, f.flat() ? 0.58 : 0.5) << size;
    EXPECT_LT(load, f.flat() ? 0.88 : 0.75) << size;
    EXPECT_LT(static_cast<double>(s.metadata_bytes) / static_cast<double>(s.size), 32.0) << size;
  }
}

// A batch that repeats one key, as padding ids do, needs space for one key.
TABLE_TEST(TableGrow, RepeatsDoNotGrowTheIndex) {
  Subject t = f.Create(f.Options(1));
  const RowIds rows = t.FindOrInsert(Keys(f.Scaled(100000, 400), 7));
  EXPECT_EQ(t.size(), 1u);
  EXPECT_LE(t.stats().slots, 448u);
  EXPECT_EQ(t.stats().refused, 0u);
  EXPECT_EQ(rows, RowIds(rows.size(), rows[0]));
  t.Check();
  Keys keys;
  for (size_t i = 0; i < f.Scaled(50000, 500); ++i) keys.push_back(i % 50);
  t.FindOrInsert(keys);
  EXPECT_EQ(t.size(), 50u);
  EXPECT_LE(t.stats().slots, 448u);
  EXPECT_LT(t.stats().row_bytes, 2000u * t->layout().stride);
  t.Check();
}

TABLE_TEST(TableGrow, CrowdedBucketOverflowsAndRecovers) {
  SKIP_UNDER_TSAN("chosen keys: threads divide the work as with others");
  Subject t = f.Create(f.Options(1));
  if (t.key_size() != 8) GTEST_SKIP() << "needs keys of 64 bits";
  const size_t n = f.Scaled(370, 30);
  const Keys keys = SamePrefix(t.salt(), 0x12345678u, n, /*crowded=*/true);
  for (size_t i = 0; i < n; i += n / 5) {
    t.FindOrInsert(Keys(keys.begin() + static_cast<int64_t>(i),
                        keys.begin() + static_cast<int64_t>(std::min(n, i + n / 5))));
    t.Check();
  }
  EXPECT_EQ(t.CountContained(keys), n);
  Keys odd, even;
  for (size_t i = 0; i < n; ++i) (i % 2 == 0 ? even : odd).push_back(keys[i]);
  EXPECT_EQ(t.Erase(odd), odd.size());
  t.Check();
  EXPECT_EQ(t.CountContained(even), even.size());
  EXPECT_EQ(t.CountContained(odd), 0u);
  t.FindOrInsert(odd);
  t.Check();
  EXPECT_EQ(t.CountContained(keys), n);
  t.FindOrInsert(Scattered(1, f.Scaled(5000, 100)));  // splits repair sticky overflow counts
  t.Check();
  EXPECT_EQ(t.CountContained(keys), n);
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
