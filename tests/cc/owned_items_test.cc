#include "cc/table/owned_items.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <vector>

#include "tests/cc/execs.h"

namespace dynemb {
namespace {

// Says that it has many threads, and runs on one.
class ManyThreads final : public Exec {
 public:
  explicit ManyThreads(size_t threads) : threads_(threads) {}
  size_t parallelism() const override { return threads_; }
  void ParallelFor(size_t n, size_t grain, const RangeFn& fn) override {
    SerialExec().ParallelFor(n, grain, fn);
  }

 private:
  const size_t threads_;
};

std::vector<std::vector<uint32_t>> Lists(const OwnedItems& owned) {
  std::vector<std::vector<uint32_t>> lists;
  for (size_t w = 0; w < owned.num_workers(); ++w) lists.push_back({owned.begin(w), owned.end(w)});
  return lists;
}

std::vector<std::vector<uint32_t>> Model(const std::vector<uint32_t>& units, size_t workers) {
  std::vector<std::vector<uint32_t>> lists(workers);
  for (size_t j = 0; j < units.size(); ++j) {
    if (units[j] != OwnedItems::kNone) {
      lists[OwnerOf(workers, units[j])].push_back(static_cast<uint32_t>(j));
    }
  }
  return lists;
}

std::vector<uint32_t> Units(size_t n, uint32_t distinct, bool some_have_none, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> units(n);
  for (uint32_t& unit : units) {
    unit = static_cast<uint32_t>(random() % distinct);
    if (some_have_none && random() % 4 == 0) unit = OwnedItems::kNone;
  }
  return units;
}

TEST(OwnedItemsTest, ListsAscendForAnyNumberOfWorkers) {
  OwnedItems owned;  // reused, so that sizes grow and shrink
  for (const size_t n : {0, 1, 2047, 2048, 50001, 4097}) {
    for (const size_t workers : {1, 2, 3, 64, 1000, 5000}) {
      for (const uint32_t distinct : {1u, 5u, 100000u}) {
        const std::vector<uint32_t> units = Units(n, distinct, workers % 2 == 0, n + workers);
        ManyThreads exec(workers);
        owned.Build(exec, n, [&](size_t j) { return units[j]; });
        ASSERT_EQ(owned.num_workers(), NumWorkers(exec, n));
        ASSERT_EQ(Lists(owned), Model(units, owned.num_workers())) << n << ", " << workers;
      }
    }
  }
}

TEST(OwnedItemsTest, Threads) {
  const std::vector<uint32_t> units = Units(200000, 1000, true, 1);
  ForEachExec([&](Exec& exec) {
    OwnedItems owned;
    owned.Build(exec, units.size(), [&](size_t j) { return units[j]; });
    ASSERT_EQ(Lists(owned), Model(units, exec.parallelism()));
  });
}

// The work of all workers together is two calls for each item, not one for each item and worker.
TEST(OwnedItemsTest, WorkDoesNotGrowWithWorkers) {
  for (const size_t workers : {1, 64}) {
    ManyThreads exec(workers);
    std::atomic<size_t> calls{0};
    OwnedItems owned;
    owned.Build(exec, 65536, [&](size_t j) {
      calls.fetch_add(1, std::memory_order_relaxed);
      return static_cast<uint32_t>(j);
    });
    EXPECT_EQ(calls.load(), 2u * 65536);
    // Of 64 workers, none has much more than its share.
    for (const auto& list : Lists(owned)) EXPECT_LT(list.size(), 1.2 * 65536 / workers);
  }
}

TEST(OwnedItemsTest, ForWorkersGivesItemsBelowABound) {
  const std::vector<uint32_t> units = Units(10000, 300, false, 2);
  ManyThreads exec(5);
  OwnedItems owned;
  owned.Build(exec, units.size(), [&](size_t j) { return units[j]; });
  for (const size_t bound : {0, 1, 4567, 10000, 20000}) {
    std::vector<std::vector<uint32_t>> lists(5);
    owned.ForWorkers(exec, bound, [&](size_t w, const uint32_t* begin, const uint32_t* end) {
      lists[w].assign(begin, end);
    });
    const std::vector<uint32_t> below(units.begin(),
                                      units.begin() + std::min<size_t>(bound, units.size()));
    EXPECT_EQ(lists, Model(below, 5));
  }
}

TEST(OwnedItemsTest, Renumber) {
  const std::vector<uint32_t> units = Units(10000, 300, false, 3);
  ManyThreads exec(5);
  OwnedItems owned;
  owned.Build(exec, units.size(), [&](size_t j) { return units[j]; });
  std::vector<uint32_t> number(units.size()), kept;
  for (size_t j = 0; j < units.size(); ++j) {
    number[j] = j % 3 == 0 ? OwnedItems::kNone : static_cast<uint32_t>(kept.size());
    if (j % 3 != 0) kept.push_back(units[j]);
  }
  owned.Renumber(number.data());
  EXPECT_EQ(Lists(owned), Model(kept, 5));
}

}  // namespace
}  // namespace dynemb
