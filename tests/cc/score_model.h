// Tables of every strategy. ScoreModel: the scores of a small table, and the rows that it evicts.
#ifndef DYNEMB_TESTS_CC_SCORE_MODEL_H_
#define DYNEMB_TESTS_CC_SCORE_MODEL_H_

#include <map>

#include "tests/cc/table_suite.h"

namespace dynemb {
namespace testing_table {

inline TableOptions Evicting(const TableFixture& f, EvictStrategy strategy, size_t max_capacity,
                             int64_t epoch_steps = 0) {
  TableOptions options = f.Options(2);
  options.evict_strategy = strategy;
  options.max_capacity = static_cast<int64_t>(max_capacity);
  options.epoch_steps = epoch_steps;
  return options;
}

constexpr EvictStrategy kAllStrategies[] = {EvictStrategy::kLru, EvictStrategy::kLfu,
                                            EvictStrategy::kEpochLru, EvictStrategy::kEpochLfu,
                                            EvictStrategy::kScore};

// The contract of a table of at most kEvictRows rows, by a map from keys to scores. The rows that a
// batch evicts are taken from the table, and checked.
class ScoreModel {
 public:
  ScoreModel(Subject* t, EvictStrategy strategy, int64_t epoch_steps)
      : t_(t), strategy_(strategy), epoch_steps_(epoch_steps) {}

  const std::map<uint64_t, int64_t>& scores() const { return scores_; }
  bool by_time() const {
    return strategy_ == EvictStrategy::kLru || strategy_ == EvictStrategy::kEpochLru;
  }
  bool counts() const {
    return strategy_ == EvictStrategy::kLfu || strategy_ == EvictStrategy::kEpochLfu;
  }

  // After an inserting lookup of the keys.
  void Looked(const Keys& keys) {
    if (epoch_steps_ != 0 && steps_++ == epoch_steps_) {
      steps_ = 1;
      Advance();
    }
    Touch(keys, counts());
  }
  // After a call that writes the keys and gives them rows, or only writes those that have rows.
  void Wrote(const Keys& keys, bool inserts) {
    Keys known;
    for (uint64_t key : keys) {
      if (inserts || scores_.count(key) != 0) known.push_back(key);
    }
    Touch(known, false);
  }
  // After a lookup that does not insert.
  void Read(const Keys& keys) { Wrote(keys, false); }
  void SetScores(const Keys& keys, const std::vector<Score>& scores) {
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto at = scores_.find(keys[i]);
      if (at != scores_.end()) at->second = scores[i];
    }
  }
  void AddCounts(const Keys& keys, const std::vector<uint32_t>& counts_added) {
    for (size_t i = 0; counts() && i < keys.size(); ++i) {
      const auto at = scores_.find(keys[i]);
      if (at != scores_.end()) at->second = Counted(at->second, counts_added[i]);
    }
  }
  void Erase(const Keys& keys) {
    for (uint64_t key : keys) scores_.erase(key);
  }
  void Advance() {
    if (strategy_ != EvictStrategy::kEpochLfu) return;
    if (epoch_ < 4095) {
      ++epoch_;
      return;
    }
    epoch_ = 2048;
    for (auto& [key, score] : scores_) {
      const int64_t epoch = std::max<int64_t>(0, (score >> 20) - 2048);
      score = epoch << 20 | (score & 0xFFFFF);
    }
  }
  int64_t epoch() const { return epoch_; }

 private:
  int64_t Counted(int64_t score, int64_t n) const {
    if (strategy_ == EvictStrategy::kLfu) return std::min<int64_t>(score + n, 0xFFFFFFFF);
    return epoch_ << 20 | std::min<int64_t>((score & 0xFFFFF) + n, 0xFFFFF);
  }
  void Touch(const Keys& keys, bool count) {
    std::map<uint64_t, int64_t> batch;  // how often each key occurs
    for (uint64_t key : keys) ++batch[key];
    RemoveEvicted(batch);
    for (const auto& [key, n] : batch) {
      const auto [at, is_new] = scores_.try_emplace(key, 0);
      if (by_time()) {
        at->second = static_cast<int64_t>(t_->tick());
      } else if (count) {
        at->second = Counted(is_new ? 0 : at->second, n);
      } else if (is_new && counts()) {
        at->second = Counted(0, 1);
      }
    }
  }
  // The rows that are gone were not used by the batch, and none of those that stayed, and were not
  // used either, had a lower score.
  void RemoveEvicted(const std::map<uint64_t, int64_t>& batch) {
    Keys known;
    for (const auto& [key, score] : scores_) known.push_back(key);
    const std::vector<char> found = t_->Contains(known);
    int64_t highest_gone = -1, lowest_kept = int64_t{1} << 62;
    for (size_t i = 0; i < known.size(); ++i) {
      const int64_t score = scores_[known[i]];
      if (!found[i]) {
        ASSERT_EQ(batch.count(known[i]), 0u) << "the batch's own row was evicted";
        highest_gone = std::max(highest_gone, score);
      } else if (batch.count(known[i]) == 0) {
        lowest_kept = std::min(lowest_kept, score);
      }
    }
    ASSERT_LE(highest_gone, lowest_kept);
    size_t fresh = 0;
    for (const auto& [key, n] : batch) fresh += scores_.count(key) == 0;
    const size_t gone = static_cast<size_t>(std::count(found.begin(), found.end(), 0));
    const auto capacity = static_cast<size_t>(t_->table().options().max_capacity);
    const size_t wanted = scores_.size() + fresh;
    ASSERT_EQ(gone, wanted > capacity ? wanted - capacity : 0);
    for (size_t i = 0; i < known.size(); ++i) {
      if (!found[i]) scores_.erase(known[i]);
    }
  }

  Subject* const t_;
  const EvictStrategy strategy_;
  const int64_t epoch_steps_;
  int64_t steps_ = 0;
  int64_t epoch_ = 0;
  std::map<uint64_t, int64_t> scores_;
};

}  // namespace testing_table
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_SCORE_MODEL_H_
