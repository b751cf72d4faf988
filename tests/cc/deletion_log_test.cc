#include "cc/table/deletion_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/cc/failing_allocations.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/table_suite.h"

namespace dynemb {
namespace {

using failing::WithAllocations;
using testing_table::Random;

class LogModel {
 public:
  void Restart(Tick known_since) {
    log_.Restart(known_since);
    keys_.clear();
    ASSERT_EQ(log_.known_since(), known_since);
    ASSERT_EQ(log_.size(), 0u);
  }
  void Add(Tick tick, uint64_t key, Removal how = Removal::kErase) {
    log_.Add(tick, key, how);
    keys_.emplace_back(tick, key);
    last_[key] = {tick, how};
  }
  // Slightly more than `most` keys may be left, all after known_since.
  void Trim(size_t most) {
    const Tick before = log_.known_since();
    const size_t had = log_.size();
    log_.Trim(most);
    ASSERT_GE(log_.known_since(), before);
    ASSERT_LE(log_.size(), most + 10000);
    ASSERT_GE(log_.size(), std::min(had, most));
    if (had <= most && most > 0) {
      ASSERT_EQ(log_.known_since(), before);
      ASSERT_EQ(log_.size(), had);
    }
  }
  void Check(Tick since) const {
    ASSERT_GE(since, log_.known_since());
    std::set<uint64_t> keys;
    for (const auto& k : keys_) {
      if (k.first > since) keys.insert(k.second);
    }
    ASSERT_EQ(log_.Since(since), std::vector<uint64_t>(keys.begin(), keys.end())) << since;
    std::vector<uint64_t> deleted(keys.begin(), keys.end());
    deleted.resize(std::min<size_t>(deleted.size(), 200));
    std::vector<DeletionLog::Deletion> last(deleted.size());
    log_.FindLast(deleted, last.data());
    for (size_t i = 0; i < deleted.size(); ++i) {
      ASSERT_EQ(last[i].tick, last_.at(deleted[i]).tick);
      ASSERT_EQ(last[i].how, last_.at(deleted[i]).how);
    }
  }
  const DeletionLog& log() const { return log_; }

 private:
  DeletionLog log_;
  std::vector<std::pair<Tick, uint64_t>> keys_;
  std::unordered_map<uint64_t, DeletionLog::Deletion> last_;
};

TEST(DeletionLog, RandomOperations) {
  SKIP_UNDER_TSAN("a long test in one thread");
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    LogModel model;
    EXPECT_EQ(model.log().known_since(), 0u);
    Tick tick = 0;
    for (int step = 0; step < 40 && !testing::Test::HasFatalFailure(); ++step) {
      tick += random.Below(3);
      for (uint64_t n = random.Below(4) == 0 ? random.Below(20000) : random.Below(20); n > 0; --n) {
        if (random.Below(1000) == 0) ++tick;
        model.Add(tick, random.Below(8) == 0 ? ~random.Below(9) : random.Below(30000),
                  static_cast<Removal>(random.Below(3)));
      }
      if (random.Below(4) == 0) model.Trim(random.Below(40000));
      if (random.Below(25) == 0) model.Restart(++tick);
      const Tick known = model.log().known_since();
      model.Check(known);
      model.Check(known + random.Below(tick - known + 2));
      model.Check(tick);
    }
  }
}

TEST(DeletionLog, TrimAll) {
  LogModel model;
  model.Restart(5);
  model.Add(7, 1);
  model.Add(7, 1);
  model.Add(9, 0);
  model.Check(5);
  model.Check(6);
  model.Check(7);
  model.Check(8);
  model.Trim(3);
  EXPECT_EQ(model.log().size(), 3u);
  model.Trim(0);
  model.Check(model.log().known_since());
  model.Add(10, 4);
  model.Check(9);
  model.Check(10);
}

TEST(DeletionLog, ConcurrentAdds) {
  DeletionLog log;
  std::vector<std::thread> threads;
  for (uint64_t id = 0; id < 4; ++id) {
    threads.emplace_back([&log, id] {
      for (uint64_t i = 0; i < 5000; ++i) log.Add(3, 4 * i + id, Removal::kEvict);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.size(), 20000u);
  const std::vector<uint64_t> keys = log.Since(2);
  ASSERT_EQ(keys.size(), 20000u);
  for (uint64_t i = 0; i < keys.size(); ++i) ASSERT_EQ(keys[i], i);
  EXPECT_TRUE(log.Since(3).empty());
}

// If allocation fails, the log forgets all keys instead of losing one.
TEST(DeletionLog, ForgetsAllKeysIfAllocationFails) {
  for (size_t allocations : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(allocations);
    DeletionLog log;
    log.Add(3, 100, Removal::kErase);
    for (uint64_t i = 0; i < 20000; ++i) log.Add(4, i, Removal::kErase);
    WithAllocations(allocations, [&] {
      for (uint64_t i = 0; i < 50000; ++i) log.Add(5, i, Removal::kErase);
    });
    EXPECT_EQ(log.known_since(), 5u);
    for (uint64_t i = 0; i < 10; ++i) log.Add(6, i, Removal::kErase);
    EXPECT_EQ(log.Since(5).size(), 10u);
    log.Trim(5);
    EXPECT_LE(log.known_since(), 6u);
  }
}

}  // namespace
}  // namespace dynemb
