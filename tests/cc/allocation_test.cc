// In steady state no call allocates memory in proportion to its batch, because it keeps its scratch
// memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cc/lookup/apply.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/gather.h"
#include "cc/lookup/pool.h"
#include "cc/lookup/route.h"
#include "cc/lookup/wire.h"
#include "cc/table/scratch.h"
#include "cc/table/table.h"
#include "tests/cc/replaced_new.h"
#include "tests/cc/sanitizers.h"

namespace {

std::atomic<size_t> largest{0};

}  // namespace

static void* AllocateForTest(size_t bytes, size_t alignment) {
  size_t seen = largest.load();
  while (bytes > seen && !largest.compare_exchange_weak(seen, bytes)) {
  }
  alignment = std::max(alignment, alignof(std::max_align_t));
  void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

namespace dynemb {
namespace {

constexpr size_t kBatch = 65536;  // the smallest array, one byte per key, is 64 KiB
constexpr size_t kSmall = 16384;
constexpr int64_t kDim = 8;

// The largest allocation of the third of three calls.
template <class Call>
size_t LargestOf(const Call& call) {
  call();
  call();
  largest.store(0);
  call();
  return largest.load();
}

class AllocationTest : public ::testing::TestWithParam<size_t> {
 protected:
  AllocationTest() : exec_(GetParam()), keys_(kBatch), rows_(kBatch), vectors_(kBatch * kDim) {
    TableOptions options;
    options.name = "t";
    options.dim = kDim;
    options.init_capacity = 2 * kBatch;
    EXPECT_TRUE(Table::Create(options, &table_).ok());
    StateSpec state{"adagrad", {kDim}, {0.1f}};
    EXPECT_TRUE(table_->AttachState(exec_, state).ok());
    for (size_t i = 0; i < kBatch; ++i) keys_[i] = (i / 3) * 0x9E3779B97F4A7C15ull;  // repeats
    EXPECT_TRUE(table_->FindOrInsert(exec_, {keys_.data(), kBatch}, ++tick_, rows_.data()).ok());
  }

  ThreadsExec exec_;
  std::unique_ptr<Table> table_;
  Tick tick_ = 0;
  std::vector<uint64_t> keys_;
  std::vector<RowId> rows_;
  std::vector<float> vectors_;
};

TEST_P(AllocationTest, SeesLargeAllocations) {
  EXPECT_GE(LargestOf([] { std::vector<char> v(kBatch); }), kBatch);
}

TEST_P(AllocationTest, BatchesOfPresentKeys) {
  EXPECT_LT(LargestOf([&] {
              table_->Lookup(exec_, {keys_.data(), kBatch}, ++tick_, nullptr, vectors_.data(),
                             rows_.data());
            }),
            kSmall);
  EXPECT_LT(LargestOf([&] {
              ASSERT_TRUE(table_
                              ->LookupOrInsert(exec_, {keys_.data(), kBatch}, ++tick_,
                                               vectors_.data(), rows_.data())
                              .ok());
            }),
            kSmall);
  EXPECT_LT(
      LargestOf([&] {
        ASSERT_TRUE(table_->Upsert(exec_, {keys_.data(), kBatch}, vectors_.data(), ++tick_).ok());
      }),
      kSmall);
}

// All keys are new, in a table that has room for them because each batch is erased after it.
TEST_P(AllocationTest, BatchesOfNewKeys) {
  std::vector<uint64_t> fresh(kBatch);
  uint64_t next = 1;
  const auto call = [&] {
    for (uint64_t& key : fresh) key = next++ / 2;
    ASSERT_TRUE(table_->Upsert(exec_, {fresh.data(), kBatch}, vectors_.data(), ++tick_).ok());
  };
  size_t most = 0;
  for (int i = 0; i < 4; ++i) {
    largest.store(0);
    call();
    if (i >= 2) most = std::max(most, largest.load());
    table_->Erase(exec_, {fresh.data(), kBatch}, ++tick_);
  }
  EXPECT_LT(most, kSmall);
}

TEST_P(AllocationTest, TrainingSteps) {
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(2, kBatch, kBatch / 2).ok());
  std::vector<float> pooled(kBatch / 2 * kDim), sums(kBatch * kDim);
  std::vector<uint64_t> unique(kBatch);
  std::vector<RowId> unique_rows(kBatch);
  Backward backward;
  std::vector<PoolTask> pool(1);
  pool[0].table = table_.get();
  pool[0].keys = keys_.data();
  pool[0].bags = &bags;
  pool[0].pooled = pooled.data();
  pool[0].rows = rows_.data();
  BackwardTask sum;
  sum.keys = keys_.data();
  sum.rows = rows_.data();
  sum.bags = &bags;
  sum.upstream = pooled.data();
  sum.dim = kDim;
  const BackwardOutput out{unique.data(), unique_rows.data(), sums.data()};
  for (const bool known_rows : {true, false}) {
    EXPECT_LT(LargestOf([&] {
                ASSERT_TRUE(Pool(exec_, pool, ++tick_, true).ok());
                ASSERT_TRUE(backward.Prepare(exec_, &sum, 1).ok());
                backward.Write(exec_, &out);
                std::vector<ApplyTask> apply(1);
                apply[0] = {table_.get(), unique.data(), unique_rows.data(), sums.data(),
                            backward.num_unique(0)};
                if (!known_rows)
                  apply[0] = {table_.get(), keys_.data(), nullptr, vectors_.data(), kBatch};
                ASSERT_TRUE(Apply(exec_, apply,
                                  {OptimizerKind::kAdagrad, {}, {}, 1, "adagrad", {0.1f}}, ++tick_)
                                .ok());
              }),
              kSmall)
        << (known_rows ? "rows known" : "rows looked up");
  }
}

// The exchange of a step: a rank requests the rows of two features, pools them, and sums their
// gradients.
TEST_P(AllocationTest, ExchangeSteps) {
  constexpr uint32_t kRanks = 3;
  constexpr size_t kIds = kBatch / 2;
  std::vector<uint32_t> index(kBatch);
  std::vector<uint64_t> received(kBatch);
  std::vector<int32_t> words(2 * kBatch + kRanks), packed(kBatch * kDim);
  std::vector<float> pooled(kIds * kDim), sums(kBatch * kDim);
  std::vector<Bags> bags(2);
  for (Bags& b : bags) ASSERT_TRUE(b.InitUniform(2, kIds, kIds / 2).ok());
  Route route;
  GatherGradient gradient;
  Requests requests;
  RouteTask task;
  task.owners.rule = Owners::Rule::kHash;
  task.owners.ranks = kRanks;
  std::vector<GatherTask> pool(2);
  std::vector<GatherGradient::Task> sum(1);
  sum[0].features.resize(2);
  sum[0].dim = kDim;
  sum[0].sums = sums.data();
  for (size_t f = 0; f < 2; ++f) {
    task.features.push_back({keys_.data() + f * kIds, kIds, index.data() + f * kIds});
    pool[f].bags = sum[0].features[f].bags = &bags[f];
    pool[f].index = sum[0].features[f].index = index.data() + f * kIds;
    pool[f].pooled = pooled.data() + f * kIds / 2 * kDim;
    pool[f].vectors = vectors_.data();
    pool[f].dim = sum[0].features[f].dim = kDim;
    sum[0].features[f].upstream = pool[f].pooled;
  }
  EXPECT_LT(
      LargestOf([&] {
        ASSERT_TRUE(route.Prepare(exec_, {task}, kRanks).ok());
        route.Write(exec_, words.data());
        std::vector<int32_t> splits;
        std::vector<int64_t> counts;
        for (uint32_t rank = 0; rank < kRanks; ++rank) {
          splits.push_back(static_cast<int32_t>(route.num_words(rank)));
          counts.push_back(static_cast<int64_t>(route.count(0, rank)));
        }
        Requests::Received received_words;
        received_words.words = words.data();
        received_words.num_words = static_cast<int64_t>(route.num_words());
        received_words.splits = splits.data();
        received_words.ranks = kRanks;
        ASSERT_TRUE(requests.Init(received_words, {KeyType::kInt64}).ok());
        const auto n = static_cast<size_t>(requests.num_keys(0));
        requests.CopyKeys(0, received.data());
        WireLayout layout;
        ASSERT_TRUE(
            layout.Init({{DType::kFloat32, kDim, WireType::kInt8}}, counts.data(), kRanks).ok());
        Pack(exec_, layout, {vectors_.data()}, packed.data());
        Unpack(exec_, layout, packed.data(), {}, {vectors_.data()});
        pool[0].n = pool[1].n = sum[0].n = n;
        GatherPool(exec_, pool);
        ASSERT_TRUE(gradient.Run(exec_, sum).ok());
      }),
      kSmall);
}

// The scratch memory of a huge batch, too, is kept until Shrink.
template <class Call, class Scratch>
void ExpectShrinkFrees(const Call& call, Scratch* scratch) {
  EXPECT_LT(LargestOf(call), kSmall);
  scratch->Shrink();
  largest.store(0);
  call();
  EXPECT_GT(largest.load(), kKeptBytes / 2);
}

TEST_P(AllocationTest, ShrinkFreesHugeBatches) {
  SKIP_UNDER_TSAN("a test of memory: other tests run the same code");
  constexpr size_t kHuge = kKeptBytes / sizeof(uint64_t) + 1;
  std::vector<uint64_t> keys(kHuge);
  std::vector<uint32_t> index(kHuge);
  std::vector<float> upstream(kHuge, 1.0f), sums(kHuge);
  for (size_t i = 0; i < kHuge; ++i) keys[i] = i % 1000;
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(1, kHuge, kHuge).ok());
  RouteTask ask;
  ask.features = {{keys.data(), kHuge, index.data()}};
  const std::vector<RouteTask> asks = {ask};
  Route route;
  ExpectShrinkFrees([&] { ASSERT_TRUE(route.Prepare(exec_, asks, 1).ok()); }, &route);

  BackwardTask task;
  task.bags = &bags;
  task.keys = keys.data();
  task.upstream = upstream.data();
  task.dim = 1;
  Backward backward;
  ExpectShrinkFrees([&] { ASSERT_TRUE(backward.Prepare(exec_, &task, 1).ok()); }, &backward);

  GatherGradient::Feature feature;
  static_cast<UpstreamTask&>(feature) = task;
  feature.index = index.data();
  const std::vector<GatherGradient::Task> gathered = {{{feature}, kHuge, 1, sums.data()}};
  GatherGradient gradient;
  ExpectShrinkFrees([&] { ASSERT_TRUE(gradient.Run(exec_, gathered).ok()); }, &gradient);
}

INSTANTIATE_TEST_SUITE_P(Threads, AllocationTest, ::testing::Values(1, 3),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace dynemb
