// Model: the contract of Table, implemented with an unordered_map.
#ifndef DYNEMB_TESTS_CC_TABLE_MODEL_H_
#define DYNEMB_TESTS_CC_TABLE_MODEL_H_

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

// Makes the same changes as a Subject, call by call. Its vectors are the values that the table
// stores, rounded to nearest, so the subject's table must not round stochastically.
class Model {
 public:
  struct Row {
    Floats vector;
    Floats state;
    Tick update = 0;
    Tick access = 0;
    RowId row = kNoRow;  // as the table last returned it; kNoRow: not known
  };

  explicit Model(const Subject* subject) : subject_(subject) {}

  void Access(const Keys& keys) {
    for (uint64_t key : keys) {
      const auto at = rows_.find(subject_->Narrow(key));
      if (at != rows_.end()) at->second.access = subject_->tick();
    }
  }
  // Sets the last access and, for a key without a row, which gets one, the last update.
  void Insert(const Keys& keys) {
    for (uint64_t wide : keys) {
      const uint64_t key = subject_->Narrow(wide);
      Row& row = rows_[key];
      row.access = subject_->tick();
      if (row.update != 0) continue;
      row.update = subject_->tick();
      row.vector = TableFixture::InitialVectors(*subject_, {key});
      row.state = initial_state_;
    }
  }
  void Set(const Keys& keys, const Floats& vectors) {
    Insert(keys);
    for (size_t i = 0; i < keys.size(); ++i) SetRow(At(keys[i]), Slice(vectors, i));
  }
  void Add(const Keys& keys, const Floats& deltas) {
    Insert(keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      Floats sum = At(keys[i]).vector;
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += deltas[i * sum.size() + c];
      SetRow(At(keys[i]), sum);
    }
  }
  void Write(const Keys& keys, const Floats& vectors, const Floats& state, bool insert) {
    if (insert) Insert(keys);
    Access(keys);
    const auto width = initial_state_.size();
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!Has(keys[i])) continue;
      SetRow(At(keys[i]), Slice(vectors, i));
      At(keys[i]).state.assign(state.begin() + static_cast<int64_t>(i * width),
                               state.begin() + static_cast<int64_t>((i + 1) * width));
    }
  }
  size_t Erase(const Keys& keys) {
    size_t n = 0;
    for (uint64_t key : keys) n += rows_.erase(subject_->Narrow(key));
    return n;
  }
  // Returns the number of gradients that are dropped because rows[i] is not the row of keys[i].
  size_t Apply(const RowOptimizer& optimizer, const Keys& keys, const RowIds& rows,
               const Floats& gradients) {
    size_t dropped = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!Has(keys[i]) || At(keys[i]).row != rows[i]) {
        ++dropped;
        continue;
      }
      Row& row = At(keys[i]);
      Floats vector = row.vector;
      optimizer.Apply(vector.data(), row.state.data(), &gradients[i * vector.size()]);
      SetRow(row, vector);
    }
    return dropped;
  }
  void Attach(const Floats& initial_state) {
    initial_state_ = initial_state;
    for (auto& entry : rows_) entry.second.state = initial_state;
  }
  void Clear() { rows_.clear(); }

  // Removes the keys that the table evicted in a batch that named `keys`. Fails the test if the
  // table must not evict one of them, or evicted the wrong number.
  void DropEvicted(const Keys& keys, uint64_t max_capacity) {
    std::unordered_set<uint64_t> named;
    for (uint64_t key : keys) named.insert(subject_->Narrow(key));
    const Keys all = AllKeys();
    const std::vector<char> found = subject_->Contains(all);
    const size_t expected = all.size() > max_capacity ? all.size() - max_capacity : 0;
    size_t dropped = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (found[i]) continue;
      EXPECT_EQ(named.count(all[i]), 0u) << "a key of the running batch was evicted: " << all[i];
      EXPECT_LT(At(all[i]).access, subject_->tick());
      rows_.erase(all[i]);
      ++dropped;
    }
    EXPECT_EQ(dropped, expected);
    evicted_ += dropped;
  }
  uint64_t evicted() const { return evicted_; }

  // Records the row ids that the table returned. Keys without a row have kNoRow. A known row id
  // does not change, unless rows move between two tiers.
  void Rows(const Keys& keys, const RowIds& rows) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!Has(keys[i])) {
        EXPECT_EQ(rows[i], kNoRow) << keys[i];
        continue;
      }
      Row& row = At(keys[i]);
      EXPECT_NE(rows[i], kNoRow) << keys[i];
      if (row.row != kNoRow && !rows_move()) {
        EXPECT_EQ(rows[i], row.row) << "the row id of key " << keys[i];
      }
      row.row = rows[i];
    }
  }

  bool Has(uint64_t key) const { return rows_.count(subject_->Narrow(key)) != 0; }
  Row& At(uint64_t key) { return rows_.at(subject_->Narrow(key)); }
  size_t size() const { return rows_.size(); }
  Keys AllKeys() const {
    Keys keys;
    for (const auto& entry : rows_) keys.push_back(entry.first);
    std::sort(keys.begin(), keys.end());
    return keys;
  }

  // Compares the result of Export(since), in any order, with the rows of the model.
  void Compare(const std::vector<Exported>& got, Tick since) {
    size_t expected = 0;
    for (const auto& entry : rows_) expected += entry.second.update > since;
    ASSERT_EQ(got.size(), expected) << "rows updated after " << since;
    std::unordered_set<RowId> ids;
    for (const Exported& row : got) {
      ASSERT_TRUE(Has(row.key)) << row.key;
      const Row& want = At(row.key);
      ASSERT_EQ(row.vector, want.vector) << row.key;
      ASSERT_EQ(row.state, want.state) << row.key;
      ASSERT_EQ(static_cast<Tick>(row.update), want.update) << row.key;
      ASSERT_GT(want.update, since);
      if (want.row != kNoRow && !rows_move()) {
        ASSERT_EQ(row.row, want.row) << row.key;
      }
      ASSERT_TRUE(ids.insert(row.row).second) << "a row was exported twice: " << row.row;
    }
  }

 private:
  bool rows_move() const { return subject_->table().options().tier == Tier::kHybrid; }
  Floats Slice(const Floats& vectors, size_t i) const {
    const auto dim = subject_->dim();
    const auto from = vectors.begin() + static_cast<int64_t>(i) * dim;
    return Floats(from, from + dim);
  }
  void SetRow(Row& row, const Floats& vector) {
    row.vector = subject_->Rounded(vector);
    row.update = subject_->tick();
  }

  const Subject* subject_;
  Floats initial_state_;
  std::unordered_map<uint64_t, Row> rows_;
  uint64_t evicted_ = 0;
};

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_TABLE_MODEL_H_
