// Random sequences of all operations, compared with Model.
#include "tests/cc/table_model.h"
#include "tests/cc/table_suites.h"

namespace dynemb {
namespace testing_table {
namespace {

struct Walk {
  uint64_t seed;
  size_t steps;
  size_t batch;  // the maximal number of keys
  uint64_t key_space;
  int64_t max_capacity;  // 0: none; otherwise at least `batch`, so that nothing is refused
};

class RandomWalk {
 public:
  RandomWalk(TableFixture& f, const Walk& walk)
      : walk_(walk), random_(walk.seed), t_(f.Create(MakeOptions(f, walk))), model_(&t_) {}

  void Run() {
    for (size_t step = 0; step < walk_.steps && !::testing::Test::HasFatalFailure(); ++step) {
      Step();
      t_.Check();
      ASSERT_EQ(t_.size(), model_.size()) << "seed " << walk_.seed << " step " << step;
      if (step % 16 == 15) CompareAll();
      if (::testing::Test::HasFailure()) {
        FAIL() << "seed " << walk_.seed << " step " << step;
      }
    }
    CompareAll();
    const TableStats s = t_.stats();
    EXPECT_EQ(s.dropped_gradients, dropped_);
    EXPECT_EQ(s.evictions, model_.evicted());
    EXPECT_EQ(s.refused, 0u);
    EXPECT_EQ(s.erased, erased_);
    EXPECT_EQ(s.size, s.inserts - s.evictions - s.erased);
  }

 private:
  static TableOptions MakeOptions(TableFixture& f, const Walk& walk) {
    TableOptions options = f.Options(3);
    options.stochastic_rounding = false;
    options.max_capacity = walk.max_capacity;
    return options;
  }

  void Step() {
    switch (random_.Below(20)) {
      case 0:
      case 1: {
        const Keys keys = RandomKeys();
        const RowIds rows = t_.Find(keys);
        model_.Access(keys);
        model_.Rows(keys, rows);
        Remember(keys, rows);
        break;
      }
      case 2: {
        const Keys keys = RandomKeys();
        const std::vector<char> found = t_.Contains(keys);
        for (size_t i = 0; i < keys.size(); ++i) EXPECT_EQ(found[i] != 0, model_.Has(keys[i]));
        break;
      }
      case 3:
      case 4:
        Lookup();
        break;
      case 5:
      case 6:
      case 7: {
        const Keys keys = RandomKeys();
        const RowIds rows = t_.FindOrInsert(keys);
        model_.Insert(keys);
        AfterInsert(keys);
        model_.Rows(keys, rows);
        Remember(keys, rows);
        break;
      }
      case 8:
      case 9: {
        const Keys keys = RandomKeys();
        RowIds rows;
        const Floats vectors = t_.LookupOrInsert(keys, &rows);
        model_.Insert(keys);
        AfterInsert(keys);
        model_.Rows(keys, rows);
        for (size_t i = 0; i < keys.size(); ++i)
          ExpectVector(vectors, i, model_.At(keys[i]).vector);
        Remember(keys, rows);
        break;
      }
      case 10:
      case 11: {
        const Keys keys = RandomKeys();
        const Floats vectors = random_.Values(keys.size() * 3);
        t_.Upsert(keys, vectors);
        model_.Set(keys, vectors);
        AfterInsert(keys);
        break;
      }
      case 12: {
        const Keys keys = DistinctKeys();
        const Floats deltas = random_.Values(keys.size() * 3);
        EXPECT_TRUE(t_.TryAccumulate(keys, deltas).ok());
        model_.Add(keys, deltas);
        AfterInsert(keys);
        break;
      }
      case 13: {
        const Keys keys = DistinctKeys();
        const bool insert = random_.Below(2) == 0;
        const Floats vectors = random_.Values(keys.size() * 3);
        Floats state = random_.Values(keys.size() * static_cast<size_t>(t_.state_width()));
        for (float& value : state) value *= value;  // Adagrad's accumulator is not negative
        EXPECT_TRUE(t_.TryWriteRows(keys, vectors, state, insert).ok());
        model_.Write(keys, vectors, state, insert);
        AfterInsert(keys);
        break;
      }
      case 14:
      case 15: {
        const Keys keys = RandomKeys();
        const size_t n = t_.Erase(keys);
        EXPECT_EQ(n, model_.Erase(keys));
        erased_ += n;
        break;
      }
      case 16:
      case 17:
      case 18:
        Apply();
        break;
      case 19:
        Rare();
        break;
    }
  }

  void Lookup() {
    const Keys keys = RandomKeys();
    const Floats fallback = random_.Below(2) == 0 ? Floats{} : Floats{1, -2, 3};
    RowIds rows;
    const Floats vectors = t_.Lookup(keys, fallback, &rows);
    model_.Access(keys);
    model_.Rows(keys, rows);
    for (size_t i = 0; i < keys.size(); ++i) {
      const Floats want = model_.Has(keys[i]) ? model_.At(keys[i]).vector
                          : !fallback.empty() ? fallback
                                              : TableFixture::InitialVectors(t_, {keys[i]});
      ExpectVector(vectors, i, want);
    }
    Remember(keys, rows);
  }

  // Gradients for rows that an earlier call found, and that may have been evicted or erased since.
  void Apply() {
    Keys keys;
    RowIds rows;
    std::unordered_set<uint64_t> distinct;
    for (size_t i = 0; i < remembered_keys_.size() && keys.size() < walk_.batch; ++i) {
      if (!distinct.insert(t_.Narrow(remembered_keys_[i])).second) continue;
      keys.push_back(remembered_keys_[i]);
      rows.push_back(remembered_rows_[i]);
    }
    if (t_.state_width() != 3) return;
    const Floats gradients = random_.Values(keys.size() * 3);
    Hyper hyper;
    hyper.learning_rate = 0.5f;
    const RowOptimizer adagrad(OptimizerKind::kAdagrad, {}, hyper, 3);
    t_.Apply(adagrad, keys, rows, gradients);
    // The model knows a row id only if a call has returned it, so look up the others first.
    const Keys all = model_.AllKeys();
    ModelRows(all);
    dropped_ += model_.Apply(adagrad, keys, rows, gradients);
  }

  void Rare() {
    switch (random_.Below(4)) {
      case 0: {
        const StateSpec spec = random_.Below(2) == 0 ? StateSpec{"adagrad", {3}, {0.5f}}
                                                     : StateSpec{"adam", {3, 3}, {0.0f, 0.25f}};
        const bool same = spec == t_->state_spec();
        ASSERT_TRUE(t_->AttachState(t_.exec(), spec).ok());
        if (same) break;
        Floats initial;
        for (size_t i = 0; i < spec.widths.size(); ++i)
          initial.insert(initial.end(), 3, spec.inits[i]);
        model_.Attach(initial);
        break;
      }
      case 1:
        if (random_.Below(4) == 0) {
          erased_ += t_.size();
          ASSERT_TRUE(t_.Clear().ok());
          model_.Clear();
        }
        break;
      default: {
        const Tick since = random_.Below(t_.tick() + 2);
        model_.Compare(t_.Export(since, 1 + random_.Below(2 * walk_.batch)), since);
      }
    }
  }

  void AfterInsert(const Keys& keys) {
    if (walk_.max_capacity != 0) {
      model_.DropEvicted(keys, static_cast<uint64_t>(walk_.max_capacity));
    }
  }
  void Remember(const Keys& keys, const RowIds& rows) {
    if (random_.Below(3) != 0) return;
    remembered_keys_ = keys;
    remembered_rows_ = rows;
  }
  void ModelRows(const Keys& keys) {
    std::unordered_map<uint64_t, RowId> row_of;
    for (const Exported& row : t_.Export()) row_of[row.key] = row.row;
    RowIds rows;
    for (uint64_t key : keys) rows.push_back(row_of.count(key) != 0 ? row_of[key] : kNoRow);
    model_.Rows(keys, rows);
  }
  void CompareAll() { model_.Compare(t_.Export(0, 1 + walk_.batch), 0); }
  void ExpectVector(const Floats& vectors, size_t i, const Floats& want) {
    const auto from = vectors.begin() + static_cast<int64_t>(3 * i);
    EXPECT_EQ(Floats(from, from + 3), want);
  }

  Keys RandomKeys() {
    Keys keys(random_.Below(walk_.batch + 1));
    // Skewed, like real ids; some are extreme.
    for (uint64_t& key : keys) {
      key = random_.Below(1 + random_.Below(walk_.key_space));
      if (random_.Below(64) == 0) key = 0 - key;
    }
    return keys;
  }
  Keys DistinctKeys() {
    Keys keys = RandomKeys();
    std::unordered_set<uint64_t> seen;
    keys.erase(std::remove_if(keys.begin(), keys.end(),
                              [&](uint64_t key) { return !seen.insert(t_.Narrow(key)).second; }),
               keys.end());
    return keys;
  }

  Walk walk_;
  Random random_;
  Subject t_;
  Model model_;
  Keys remembered_keys_;
  RowIds remembered_rows_;
  uint64_t dropped_ = 0;
  uint64_t erased_ = 0;
};

TABLE_TEST(TableRandom, Unbounded) {
  for (uint64_t seed = 1; seed <= f.Scaled(3); ++seed) {
    RandomWalk(f, {seed, f.Scaled(150, 15), f.Scaled(300, 12), f.Scaled(3000, 90), 0}).Run();
  }
}
TABLE_TEST(TableRandom, AtMaxCapacity) {
  const auto batch = static_cast<int64_t>(f.Scaled(200, 12));
  for (uint64_t seed = 1; seed <= f.Scaled(3); ++seed) {
    RandomWalk(f, {seed, f.Scaled(150, 15), f.Scaled(200, 12), f.Scaled(3000, 90),
                   batch * static_cast<int64_t>(1 + seed)})
        .Run();
  }
}
// Batches of at most three keys in a table of three rows.
TABLE_TEST(TableRandom, Tiny) {
  for (uint64_t seed = 1; seed <= f.Scaled(3); ++seed) {
    RandomWalk(f, {seed, f.Scaled(400, 20), 3, 9, 3}).Run();
  }
}

}  // namespace
}  // namespace testing_table
}  // namespace dynemb
