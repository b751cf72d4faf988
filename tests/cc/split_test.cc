#include "cc/lookup/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "tests/cc/execs.h"

// Counts allocations of arrays, because a repeated Run must not make any. (Closures, and the
// blocks of a deque of closures, are small and allowed.) Not inlined, since the compiler would see
// malloc's pointer freed by delete and warn.
static std::atomic<size_t> arrays_allocated{0};
__attribute__((noinline)) void* operator new(size_t size) {
  if (size > 512) ++arrays_allocated;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace dynemb {
namespace {

template <typename K>
class SplitTest : public testing::Test {
 protected:
  std::mt19937_64 random_{20240608};

  std::vector<K> Keys(size_t n) {
    std::vector<K> keys(n);
    for (K& k : keys) k = static_cast<K>(random_());
    return keys;
  }
};

using KeyTypes = testing::Types<uint64_t, uint32_t>;
TYPED_TEST_SUITE(SplitTest, KeyTypes);

// The positions of each partition, one after the other: a stable sort by its definition.
template <typename K, class PartitionOf>
std::vector<std::vector<uint32_t>> Model(const std::vector<K>& keys, size_t partitions,
                                         const PartitionOf& partition_of) {
  std::vector<std::vector<uint32_t>> model(partitions);
  for (size_t i = 0; i < keys.size(); ++i) {
    model[partition_of(keys[i], i)].push_back(static_cast<uint32_t>(i));
  }
  return model;
}

template <typename K, class PartitionOf>
void Check(const std::vector<K>& keys, size_t partitions, const PartitionOf& partition_of,
           Split<K>* split) {
  const auto model = Model(keys, partitions, partition_of);
  // A copy of the exact size, so that the address sanitizer reports a read past the end.
  std::unique_ptr<K[]> exact(new K[keys.size()]);
  std::copy(keys.begin(), keys.end(), exact.get());
  ForEachExec([&](Exec& exec) {
    split->Run(exec, exact.get(), keys.size(), partitions, partition_of);
    ASSERT_EQ(split->num_partitions(), partitions);
    ASSERT_EQ(split->begin(0), 0u);
    ASSERT_EQ(split->end(partitions - 1), keys.size());
    for (size_t p = 0; p < partitions; ++p) {
      if (p > 0) {
        ASSERT_EQ(split->begin(p), split->end(p - 1));
      }
      const std::vector<uint32_t> positions(split->positions() + split->begin(p),
                                            split->positions() + split->end(p));
      ASSERT_EQ(positions, model[p]) << "partition " << p;
      for (size_t i = split->begin(p); i < split->end(p); ++i) {
        ASSERT_EQ(split->keys()[i], keys[split->positions()[i]]);
      }
    }
  });
}

TYPED_TEST(SplitTest, IsAStableSortForAnyNumberOfThreads) {
  Split<TypeParam> split;  // reused, so that sizes grow and shrink
  // A thread takes at least 8192 keys. With more keys, the results of several threads adjoin.
  for (size_t n : {1, 2, 100, 8191, 8192, 16384, 16385, 50001, 7, 140000, 300}) {
    const std::vector<TypeParam> keys = this->Keys(n);
    for (size_t partitions : {1, 2, 3, 64, 1000, 4096}) {
      SCOPED_TRACE(testing::Message() << n << " keys, " << partitions << " partitions");
      ASSERT_NO_FATAL_FAILURE(Check(
          keys, partitions, [partitions](TypeParam key, size_t) { return key % partitions; },
          &split));
    }
  }
}

TYPED_TEST(SplitTest, NoKeys) {
  Split<TypeParam> split;
  for (int round = 0; round < 2; ++round) {
    for (size_t partitions : {1, 2, 5, 4096}) {
      SCOPED_TRACE(testing::Message() << partitions << " partitions, round " << round);
      const auto partition_of = [partitions](TypeParam key, size_t) { return key % partitions; };
      ASSERT_NO_FATAL_FAILURE(Check(std::vector<TypeParam>(), partitions, partition_of, &split));
      ForEachExec([&](Exec& exec) {
        split.Run(exec, nullptr, 0, partitions, partition_of);
        for (size_t p = 0; p < partitions; ++p) ASSERT_EQ(split.begin(p), split.end(p));
      });
    }
    // The second round's scratch holds the counts of these.
    const auto low_bits = [](TypeParam key, size_t) { return key & 4095; };
    ASSERT_NO_FATAL_FAILURE(Check(this->Keys(40000), 4096, low_bits, &split));
  }
}

TYPED_TEST(SplitTest, SkewedPartitions) {
  Split<TypeParam> split;
  const std::vector<TypeParam> keys = this->Keys(60000);
  for (size_t only : {0, 17, 4095}) {
    ASSERT_NO_FATAL_FAILURE(Check(
        keys, 4096, [only](TypeParam, size_t) { return only; }, &split));
  }
  // Most keys in one partition, few in the others, none in some.
  const auto mostly_one = [](TypeParam key, size_t) { return key % 16 != 0 ? 5 : key / 16 % 100; };
  ASSERT_NO_FATAL_FAILURE(Check(keys, 128, mostly_one, &split));
}

TYPED_TEST(SplitTest, ByPosition) {
  Split<TypeParam> split;
  const std::vector<TypeParam> keys = this->Keys(50001);
  ASSERT_NO_FATAL_FAILURE(Check(
      keys, 64, [](TypeParam key, size_t i) { return (key + i) % 64; }, &split));
}

TYPED_TEST(SplitTest, MorePartitionsThanKeys) {
  Split<TypeParam> split;
  const std::vector<TypeParam> keys = {9, 4095, 0, 9, 1};
  ASSERT_NO_FATAL_FAILURE(Check(
      keys, 4096, [](TypeParam key, size_t) { return static_cast<size_t>(key); }, &split));
}

TYPED_TEST(SplitTest, KeysMayBeOverwritten) {
  Split<TypeParam> split;
  const std::vector<TypeParam> keys = this->Keys(20000);
  const auto partition_of = [](TypeParam key, size_t) { return key % 7; };
  ThreadsExec exec(4);
  split.Run(exec, keys.data(), keys.size(), 7, partition_of);
  std::fill(split.keys(), split.keys() + keys.size(), TypeParam{0});
  ASSERT_NO_FATAL_FAILURE(Check(keys, 7, partition_of, &split));
}

TYPED_TEST(SplitTest, RepeatedRunAllocatesNoArrays) {
  ThreadsExec exec(4);
  Split<TypeParam> split;
  const std::vector<TypeParam> large = this->Keys(100000), small = this->Keys(99);
  const auto run = [&](const std::vector<TypeParam>& keys, size_t partitions) {
    split.Run(exec, keys.data(), keys.size(), partitions,
              [partitions](TypeParam key, size_t) { return key % partitions; });
  };
  run(large, 500);
  const size_t before = arrays_allocated;
  run(small, 500);
  run(large, 3);
  run(large, 1);
  run(large, 500);
  EXPECT_EQ(arrays_allocated, before);
}

}  // namespace
}  // namespace dynemb
