// Scores: what each strategy counts, which rows it evicts, and what keeps the rows of the running
// batch.
#include <map>

#include "cc/table/score.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/score_model.h"
#include "tests/cc/table_suites.h"
#include "tests/cc/test_length.h"

namespace dynemb {
namespace testing_table {
namespace {

TABLE_TEST(TableScores, RandomCallsMatchTheModel) {
  if (f.slowness() > 100) SKIP_UNDER_TSAN("too slow for an emulated warp");
  for (const EvictStrategy strategy : kAllStrategies) {
    for (const size_t capacity : {size_t{3}, size_t{10}, size_t{28}}) {
      SCOPED_TRACE(testing::Message()
                   << "strategy " << static_cast<int>(strategy) << ", capacity " << capacity);
      const int64_t epoch_steps = strategy == EvictStrategy::kEpochLfu && capacity == 10 ? 5 : 0;
      Subject t = f.Create(Evicting(f, strategy, capacity, epoch_steps));
      ScoreModel model(&t, strategy, epoch_steps);
      Random random(capacity);
      const Keys universe = Scattered(7, 3 * capacity);
      const auto some = [&](size_t most, bool distinct) {
        Keys keys;
        for (size_t n = 1 + random.Below(most); keys.size() < n;) {
          const uint64_t key = t.Narrow(universe[random.Below(universe.size())]);
          if (!distinct || std::find(keys.begin(), keys.end(), key) == keys.end()) {
            keys.push_back(key);
          }
        }
        return keys;
      };
      for (size_t step = 0; step < Longer(f.Scaled(kSanitized ? 60 : 250, 12)); ++step) {
        const Keys keys = some(capacity, false), distinct = some(capacity, true);
        const Floats values(2 * keys.size(), 1.0f), apart(2 * distinct.size(), 1.0f);
        switch (random.Below(11)) {
          case 0:
          case 1:
            t.LookupOrInsert(keys);
            model.Looked(keys);
            break;
          case 2:
          case 3:
            t.FindOrInsert(keys);
            model.Looked(keys);
            break;
          case 4:
            t.Find(keys);
            model.Read(keys);
            break;
          case 5:
            t.Lookup(keys);
            model.Read(keys);
            break;
          case 6:
            t.Upsert(keys, values);
            model.Wrote(keys, true);
            break;
          case 7: {
            const bool insert = random.Below(2) == 0;
            ASSERT_TRUE(t.TryWriteRows(distinct, apart, {}, insert).ok());
            model.Wrote(distinct, insert);
            break;
          }
          case 8:
            t.Erase(distinct);
            model.Erase(distinct);
            break;
          case 9: {
            std::vector<Score> scores;
            for (size_t i = 0; i < keys.size(); ++i) {
              scores.push_back(static_cast<Score>(random.Below(20)));
            }
            const bool may = strategy == EvictStrategy::kScore || model.counts();
            ASSERT_EQ(t.SetScores(keys, scores).ok(), may);
            if (may) model.SetScores(keys, scores);
            ASSERT_TRUE(t.AddCounts(distinct, std::vector<uint32_t>(distinct.size(), 3)).ok());
            model.AddCounts(distinct, std::vector<uint32_t>(distinct.size(), 3));
            break;
          }
          case 10:
            ASSERT_TRUE(t->AdvanceEpoch(t.exec()).ok());
            model.Advance();
            break;
        }
        if (testing::Test::HasFatalFailure()) return;
        Keys all;
        std::vector<int64_t> wanted;
        for (uint64_t key : universe) {
          const auto at = model.scores().find(t.Narrow(key));
          all.push_back(key);
          wanted.push_back(at == model.scores().end() ? -1 : at->second);
        }
        ASSERT_EQ(t.Scores(all), wanted) << "step " << step;
        ASSERT_EQ(t.size(), model.scores().size());
        t.Check();
      }
      EXPECT_GT(t.stats().evictions, 0u);
    }
  }
}

// In a batch with many repeats, by all threads, every occurrence of a key counts.
TABLE_TEST(TableScores, CountsAreExact) {
  for (const EvictStrategy strategy : {EvictStrategy::kLfu, EvictStrategy::kEpochLfu}) {
    Subject t = f.Create(Evicting(f, strategy, 0));
    Random random(3);
    const Keys universe = Scattered(1, f.Scaled(300, 20));
    std::map<uint64_t, int64_t> counts;
    for (size_t step = 0; step < 4; ++step) {
      Keys keys;
      for (size_t i = 0; i < f.Scaled(kSanitized ? 5000 : 30000, 100); ++i) {
        // Key k is about proportional to 1 / k.
        const size_t below = 1 + random.Below(universe.size());
        keys.push_back(universe[random.Below(below)]);
        ++counts[keys.back()];
      }
      step % 2 == 0 ? (void)t.LookupOrInsert(keys) : (void)t.FindOrInsert(keys);
      t.Lookup(keys);  // does not count
    }
    Keys keys;
    std::vector<int64_t> wanted;
    for (const auto& [key, count] : counts) {
      keys.push_back(key);
      wanted.push_back(count);
    }
    EXPECT_EQ(t.Scores(keys), wanted);
    t.Check();
  }
}

TABLE_TEST(TableScores, CountsSaturate) {
  Subject lfu = f.Create(Evicting(f, EvictStrategy::kLfu, 4));
  lfu.FindOrInsert({1, 2});
  ASSERT_TRUE(lfu.AddCounts({1, 2}, {0xFFFFFFFF, 0xFFFFFFF0}).ok());
  lfu.FindOrInsert({1, 1, 2});
  EXPECT_EQ(lfu.Scores({1, 2}), (std::vector<int64_t>{0xFFFFFFFF, 0xFFFFFFF2}));
  Subject epochs = f.Create(Evicting(f, EvictStrategy::kEpochLfu, 4));
  epochs.FindOrInsert({1, 2});
  ASSERT_TRUE(epochs.AddCounts({1}, {0xFFFFFFFF}).ok());
  ASSERT_TRUE(epochs->AdvanceEpoch(epochs.exec()).ok());
  epochs.FindOrInsert({1, 1});
  EXPECT_EQ(epochs.Scores({1, 2}), (std::vector<int64_t>{1 << 20 | 0xFFFFF, 1}));
}

// After 4,096 epochs, the numbers of the epochs move down, and the order of the rows stays.
TABLE_TEST(TableScores, EpochsContinue) {
  Subject t = f.Create(Evicting(f, EvictStrategy::kEpochLfu, 0));
  std::vector<int64_t> epoch_of;  // of key i, without a limit
  for (int64_t epoch = 0; epoch < 7000; ++epoch) {
    if (epoch % 700 == 0) {
      t.FindOrInsert({epoch_of.size()});
      epoch_of.push_back(epoch);
    }
    ASSERT_TRUE(t->AdvanceEpoch(t.exec()).ok());
  }
  // The table has moved down twice: in epoch 4096, and in epoch 6144.
  std::vector<int64_t> wanted;
  for (const int64_t epoch : epoch_of) {
    int64_t moved = epoch < 4096 ? std::max<int64_t>(0, epoch - 2048) : epoch - 2048;
    if (epoch < 6144)
      moved = std::max<int64_t>(0, moved - 2048);
    else
      moved -= 2048;
    wanted.push_back(moved << 20 | 1);
  }
  EXPECT_EQ(t.Scores(Progression(0, epoch_of.size())), wanted);
  t.Check();
}

// A batch that fills the table evicts everything else, whatever the scores; one more key is
// refused.
TABLE_TEST(TableScores, TheBatchKeepsItsRows) {
  for (const EvictStrategy strategy : kAllStrategies) {
    const size_t capacity = f.Scaled(1000, 30);
    Subject t = f.Create(Evicting(f, strategy, capacity));
    const Keys first = Scattered(1, capacity);
    t.FindOrInsert(first);
    if (strategy == EvictStrategy::kScore || strategy == EvictStrategy::kLfu) {
      std::vector<Score> scores;
      for (size_t i = 0; i < capacity; ++i) scores.push_back(static_cast<Score>(i));
      ASSERT_TRUE(t.SetScores(first, scores).ok());
    }
    // The rows with the lowest scores are in the batch.
    Keys keys(first.begin(), first.begin() + static_cast<int64_t>(capacity / 2));
    const Keys fresh = Scattered(5000000, capacity - keys.size());
    keys.insert(keys.end(), fresh.begin(), fresh.end());
    t.LookupOrInsert(keys);
    t.Check();
    EXPECT_EQ(t.CountContained(keys), capacity);
    EXPECT_EQ(t.size(), capacity);
    keys.push_back(Scattered(9000000, 1)[0]);
    RowIds rows;
    const std::vector<int64_t> before = t.Scores(keys);
    const Status status = t.TryFindOrInsert(keys, &rows);
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(t.CountContained(keys), capacity);
    EXPECT_EQ(t.stats().refused, 1u);
    // The next batch may evict these rows.
    t.LookupOrInsert(Scattered(7000000, capacity));
    EXPECT_EQ(t.CountContained(keys), 0u);
  }
}

// In a large table, rows with high scores stay.
TABLE_TEST(TableScores, HighScoresStay) {
  if (f.slowness() > 200) GTEST_SKIP() << "too slow for a whole emulated warp";
  for (const EvictStrategy strategy : {EvictStrategy::kLfu, EvictStrategy::kScore}) {
    const size_t capacity = f.Scaled(10000, 250);
    Subject t = f.Create(Evicting(f, strategy, capacity));
    const Keys keys = Scattered(1, capacity);
    t.FindOrInsert(keys);
    std::vector<Score> scores;
    Random random(1);
    for (size_t i = 0; i < capacity; ++i) scores.push_back(static_cast<Score>(random.Below(100)));
    ASSERT_TRUE(t.SetScores(keys, scores).ok());
    t.FindOrInsert(Scattered(10000000, capacity / 10));
    t.Check();
    const std::vector<char> found = t.Contains(keys);
    double sum = 0;
    size_t gone = 0;
    for (size_t i = 0; i < capacity; ++i) {
      if (found[i]) continue;
      ++gone;
      sum += scores[i];
    }
    EXPECT_EQ(gone, capacity / 10);
    EXPECT_LT(sum / static_cast<double>(gone), 12);  // 4.5 if exact; 49.5 if random
  }
}

TABLE_TEST(TableScores, EvictedRowsHaveTheirScores) {
  for (const EvictStrategy strategy : kAllStrategies) {
    Subject t = f.Create(Evicting(f, strategy, 4));
    const StateSpec spec{"momentum", {2}, {0.5f}};
    ASSERT_TRUE(t->AttachState(t.exec(), spec).ok());
    t.FindOrInsert({1});
    t.FindOrInsert({2});
    t.FindOrInsert({3, 4});
    t.FindOrInsert({2, 3, 4});
    const int64_t score = t.Scores({1})[0];
    EvictedRows evicted(t->layout());
    RowIds rows(1);
    ASSERT_TRUE(t->InsertAndEvict(t.exec(), t.Pack({5}), t.tick() + 1, rows.data(), &evicted).ok());
    t.set_tick(t.tick() + 1);
    ASSERT_EQ(evicted.size(), 1u);
    const TickColumns& columns = evicted.Finish();
    uint64_t wide = 0;
    std::memcpy(&wide, columns.keys, t.key_size());
    const auto* const first = static_cast<const char*>(columns.vectors);
    const std::vector<char> vector(first, first + t.vector_bytes());
    const Floats state(columns.state, columns.state + 2);
    if (strategy != EvictStrategy::kScore) {  // where all scores are 0
      EXPECT_EQ(wide, 1u);
    }
    EXPECT_EQ(columns.scores[0], score);
    EXPECT_EQ(state, (Floats{0.5f, 0.5f}));
    EXPECT_EQ(t.Decode(vector), f.InitialVectors(t, {wide}));
  }
}

TABLE_TEST(TableScores, BadScores) {
  Subject lru = f.Create(Evicting(f, EvictStrategy::kLru, 4));
  EXPECT_EQ(lru.SetScores({1}, {1}).code(), Code::kInvalidArgument);
  Subject epochs = f.Create(Evicting(f, EvictStrategy::kEpochLfu, 4));
  epochs.FindOrInsert({1, 2});
  EXPECT_EQ(epochs.SetScores({1, 2}, {5, 1u << 20}).code(), Code::kInvalidArgument);
  EXPECT_EQ(epochs.Scores({1, 2, 3}), (std::vector<int64_t>{1, 1, -1}));
  ASSERT_TRUE(epochs->AdvanceEpoch(epochs.exec()).ok());
  EXPECT_TRUE(epochs.SetScores({1, 2}, {5, 1u << 20}).ok());
  EXPECT_EQ(epochs.Scores({1, 2}), (std::vector<int64_t>{5, 1 << 20}));
  TableOptions options = f.Options();
  options.epoch_steps = -1;
  std::unique_ptr<Table> table;
  EXPECT_EQ(f.Make(options, &table).code(), Code::kInvalidArgument);
}

// Rows that a cut delivers, read or saved, have their scores, and take them to another table.
TABLE_TEST(TableScores, CutsHaveScores) {
  for (const EvictStrategy strategy : kAllStrategies) {
    SCOPED_TRACE(static_cast<int>(strategy));
    const size_t n = f.Scaled(400, 20);
    Subject t = f.Create(Evicting(f, strategy, n));
    const Keys keys = Scattered(1, n);
    for (size_t i = 0; i < 3; ++i) t.FindOrInsert(Keys(keys.begin(), keys.end() - 5 * i));
    const bool timed = strategy == EvictStrategy::kLru || strategy == EvictStrategy::kEpochLru;
    if (strategy == EvictStrategy::kScore) {
      std::vector<Score> scores;
      for (size_t i = 0; i < n; ++i) scores.push_back(static_cast<Score>(3 * i));
      ASSERT_TRUE(t.SetScores(keys, scores).ok());
    }
    const std::vector<int64_t> before = t.Scores(keys);
    SavedRows saved(size_t{1} << 20);
    const Tick watermark = t.tick();
    ASSERT_TRUE(t->BeginCut(t.exec(), watermark, 0, CutOf::kRows, &saved, 0).ok());
    const Tick base = t->cut()->base;
    // Rows that are overwritten, erased or evicted meanwhile are saved.
    t.Upsert(Keys(keys.begin(), keys.begin() + 5), Floats(10, 3.0f));
    t.Erase({keys[5]});
    t.FindOrInsert(Scattered(600000, 3));
    std::map<uint64_t, CutTime> delivered;
    SavedRows::Chunk chunk;
    size_t num_saved = 0;
    while (saved.Pop(&chunk)) {
      for (size_t i = 0; i < chunk.n; ++i, ++num_saved) {
        const char* row = chunk.rows.data() + i * chunk.stride;
        std::vector<char> key(row, row + t.key_size());
        std::memcpy(&delivered[t.KeyAt(key, 0)], row + t->layout().stride, sizeof(CutTime));
      }
    }
    EXPECT_GE(num_saved, 6u);  // and up to two evicted ones
    while (!t->CutIsRead()) {
      const std::vector<RowId> plan = t->PlanCut(64);
      std::vector<char> packed(plan.size() * t.key_size());
      std::vector<CutTime> scores(plan.size());
      t->ReadCut(t.exec(), plan, {packed.data(), nullptr, nullptr, nullptr, scores.data()});
      for (size_t i = 0; i < plan.size(); ++i) delivered[t.KeyAt(packed, i)] = scores[i];
    }
    t->EndCut();
    ASSERT_EQ(delivered.size(), n);

    Keys order;
    std::vector<CutTime> scores, updates;
    for (size_t i = 0; i < n; ++i) {
      const CutTime score = delivered.at(t.Narrow(keys[i]));
      order.push_back(keys[i]);
      scores.push_back(score);
      updates.push_back(1);
      const int64_t now = timed ? static_cast<int64_t>(base + score) : int64_t{score};
      const bool was_saved = i <= 5;
      if (timed && was_saved) {
        EXPECT_EQ(now, static_cast<int64_t>(watermark));
      } else if (!timed || i > 5) {
        EXPECT_LE(before[i], now) << i;
        if (!timed) {
          EXPECT_EQ(before[i], now) << i;
        }
      }
    }
    Subject other = f.Create(Evicting(f, strategy, n));
    other.set_tick(t.tick());
    const Floats vectors(2 * n, 1.0f);
    const std::vector<char> encoded = other.Encode(vectors);
    const PackedKeys packed = other.Pack(order);
    Table::LoadedRows rows;
    rows.keys = packed;
    rows.vectors = encoded.data();
    rows.updates = updates.data();
    rows.scores = scores.data();
    rows.base = base;
    ASSERT_TRUE(other->LoadRows(other.exec(), rows, other.tick() + 1).ok());
    std::vector<int64_t> wanted;
    for (const CutTime score : scores) {
      wanted.push_back(timed ? static_cast<int64_t>(base + score) : int64_t{score});
    }
    EXPECT_EQ(other.Scores(order), wanted);
    // Without scores, rows have the scores of new rows, or the time of their last update.
    rows.scores = nullptr;
    ASSERT_TRUE(other->LoadRows(other.exec(), rows, other.tick() + 2).ok());
    const int64_t fresh = timed                               ? static_cast<int64_t>(base + 1)
                          : strategy == EvictStrategy::kScore ? 0
                                                              : 1;
    EXPECT_EQ(other.Scores(order), std::vector<int64_t>(n, fresh));
    // SwapRows may follow, and then a batch with the same tick.
    other.set_tick(other.tick() + 1);
    other.FindOrInsert(Scattered(700000, n));
    EXPECT_EQ(other.CountContained(order), 0u);
    other.Check();
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
