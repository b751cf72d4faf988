#include "cc/lookup/dedup.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>
#include <random>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cc/lookup/distinct.h"
#include "tests/cc/chosen_keys.h"
#include "tests/cc/execs.h"
#include "tests/cc/sanitizers.h"

// Counts allocations of arrays, because a repeated Run must make none. (Closures are small, and
// allowed.) Not inlined: otherwise the compiler would warn that delete frees a pointer of malloc.
static std::atomic<size_t> arrays_allocated{0};
__attribute__((noinline)) void* operator new(size_t size) {
  if (size >= 512) ++arrays_allocated;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace dynemb {
namespace {

template <typename K>
class DedupTest : public testing::Test {
 protected:
  std::mt19937_64 random_{20240607};

  std::vector<K> Uniform(size_t n, uint64_t values) {
    std::vector<K> keys(n);
    for (K& k : keys) k = static_cast<K>((random_() % values) * 0x9E3779B97F4A7C15ull);
    return keys;
  }

  // Distinct keys that are all in one partition of the maximal number of partitions for fewer than
  // 2^20 keys.
  std::vector<K> OnePartition(size_t n) {
    std::unordered_set<K> found;
    SerialExec exec;
    Dedup<K> dedup;
    while (found.size() < n) {
      const std::vector<K> keys = Uniform(1 << 19, ~uint64_t{0});
      EXPECT_TRUE(dedup.Run(exec, keys.data(), keys.size()).ok());
      const auto p = dedup.partition(3);
      found.insert(p.unique, p.unique + p.num_unique);
    }
    std::vector<K> keys(found.begin(), found.end());
    keys.resize(n);
    return keys;
  }
};

// Threads divide the work in the same way for both key types.
using KeyTypes =
    std::conditional_t<kUnderTsan, testing::Types<uint64_t>, testing::Types<uint64_t, uint32_t>>;
TYPED_TEST_SUITE(DedupTest, KeyTypes);

// Checks all guarantees of the header about one Run.
template <typename K>
void Check(const Dedup<K>& dedup, Exec& exec, const std::vector<K>& keys) {
  const size_t n = keys.size();
  ASSERT_EQ(dedup.num_keys(), n);
  const std::unordered_set<K> model(keys.begin(), keys.end());
  ASSERT_EQ(dedup.num_unique(), model.size());

  std::vector<K> unique(dedup.num_unique());
  std::vector<uint32_t> inverse(n, ~0u);
  dedup.WriteUnique(exec, unique.data());
  dedup.WriteInverse(exec, inverse.data());
  ASSERT_EQ(std::unordered_set<K>(unique.begin(), unique.end()), model);
  for (size_t i = 0; i < n; ++i) {
    ASSERT_LT(inverse[i], unique.size());
    ASSERT_EQ(unique[inverse[i]], keys[i]);
  }

  std::vector<int> seen(n);
  size_t unique_begin = 0;
  for (size_t i = 0; i < dedup.num_partitions(); ++i) {
    const auto p = dedup.partition(i);
    ASSERT_EQ(p.unique_begin, unique_begin);
    unique_begin += p.num_unique;
    uint32_t started = 0;
    for (size_t e = 0; e < p.num_entries; ++e) {
      if (e > 0) {
        ASSERT_LT(p.positions[e - 1], p.positions[e]);
      }
      ++seen[p.positions[e]];
      ASSERT_EQ(p.unique[p.local[e]], keys[p.positions[e]]);
      ASSERT_LE(p.local[e], started) << "not in order of first occurrence";
      started += p.local[e] == started;
    }
    ASSERT_EQ(started, p.num_unique);
  }
  ASSERT_EQ(seen, std::vector<int>(n, 1));
}

// Checks all guarantees of the header about the order of the unique keys.
template <typename K>
void CheckOwners(const Dedup<K>& dedup, Exec& exec, const Owners& owners) {
  std::vector<K> unique(dedup.num_unique());
  dedup.WriteUnique(exec, unique.data());
  ASSERT_EQ(dedup.owner_begin(0), 0u);
  for (uint32_t rank = 0; rank < owners.ranks; ++rank) {
    ASSERT_LE(dedup.owner_begin(rank), dedup.owner_begin(rank + 1));
    for (size_t u = dedup.owner_begin(rank); u < dedup.owner_begin(rank + 1); ++u) {
      ASSERT_EQ(owners.Of(unique[u]), rank) << "unique key " << u;
    }
  }
  ASSERT_EQ(dedup.owner_begin(owners.ranks), unique.size());
  for (size_t i = 0; i < dedup.num_partitions(); ++i) {
    const auto p = dedup.partition(i);
    ASSERT_LT(dedup.owner(i), owners.ranks);
    for (size_t u = 0; u < p.num_unique; ++u) ASSERT_EQ(owners.Of(p.unique[u]), dedup.owner(i));
  }
}

// The number of keys in the largest partition.
template <typename K>
size_t LargestPartition(const Dedup<K>& dedup) {
  size_t largest = 0;
  for (size_t p = 0; p < dedup.num_partitions(); ++p) {
    largest = std::max(largest, dedup.partition(p).num_entries);
  }
  return largest;
}

// Runs and checks by every Exec. All results must be the same.
template <typename K>
void CheckAll(const std::vector<K>& keys, Dedup<K>* dedup, const Owners& owners = Owners()) {
  std::vector<uint32_t> expected, inverse(keys.size());
  size_t partitions = 0;
  ForEachExec([&](Exec& exec) {
    ASSERT_TRUE(dedup->Run(exec, keys.data(), keys.size(), owners).ok());
    ASSERT_NO_FATAL_FAILURE(Check(*dedup, exec, keys));
    ASSERT_NO_FATAL_FAILURE(CheckOwners(*dedup, exec, owners));
    dedup->WriteInverse(exec, inverse.data());
    if (exec.parallelism() == 1) {
      expected = inverse;
      partitions = dedup->num_partitions();
    }
    ASSERT_EQ(inverse, expected);
    ASSERT_EQ(dedup->num_partitions(), partitions);
  });
}

TYPED_TEST(DedupTest, RandomSizesAndRepeats) {
  Dedup<TypeParam> dedup;  // reused, so that its size grows and shrinks
  for (size_t n : {0, 1, 2, 128, 2048, 2049, 50000, 3000, 140000, 5, 0, 4096}) {
    for (uint64_t values : {1, 2, 100, 10000, 1000000000}) {
      SCOPED_TRACE(testing::Message() << n << " keys of " << values << " values");
      ASSERT_NO_FATAL_FAILURE(CheckAll(this->Uniform(n, values), &dedup));
    }
  }
}

TYPED_TEST(DedupTest, NoKeyIsReserved) {
  using Limits = std::numeric_limits<TypeParam>;
  const TypeParam top = TypeParam{1} << (Limits::digits - 1);
  const std::vector<TypeParam> special = {0, 1, Limits::max(), Limits::max() - 1, top, top - 1};
  Dedup<TypeParam> dedup;
  for (size_t n : {6, 12, 5000, 40000}) {
    std::vector<TypeParam> keys = this->Uniform(n, n);
    for (size_t i = 0; i < n; i += std::max<size_t>(1, n / 12)) keys[i] = special[i % 6];
    for (size_t i = 0; i < 6; ++i) keys[n - 1 - i] = special[i];
    ASSERT_NO_FATAL_FAILURE(CheckAll(keys, &dedup));
  }
}

TYPED_TEST(DedupTest, SkewedInputIsCorrectAndLinear) {
  Dedup<TypeParam> dedup;
  std::vector<TypeParam> keys = this->OnePartition(12000);
  // The second half repeats all of them: the hash set must have kept each of them while it grew.
  keys.resize(24000);
  std::copy(keys.begin(), keys.begin() + 12000, keys.begin() + 12000);
  std::shuffle(keys.begin() + 12000, keys.end(), this->random_);
  ASSERT_NO_FATAL_FAILURE(CheckAll(keys, &dedup));
  EXPECT_EQ(dedup.num_unique(), 12000u);
  EXPECT_EQ(LargestPartition(dedup), keys.size()) << "the keys are not all in one partition";
  const std::vector<TypeParam> equal(300000, 42), uniform = this->Uniform(24000, 12000);
  ASSERT_NO_FATAL_FAILURE(CheckAll(equal, &dedup));

  // A search through 12,000 keys would take thousands of steps per key.
  const auto steps_per_key = [&](const std::vector<TypeParam>& k) {
    SerialExec exec;
    EXPECT_TRUE(dedup.Run(exec, k.data(), k.size()).ok());
    return static_cast<double>(dedup.probe_steps()) / static_cast<double>(k.size());
  };
  EXPECT_LT(steps_per_key(keys), 2);
  EXPECT_LT(steps_per_key(equal), 1);
}

TYPED_TEST(DedupTest, PartitionsFitInCache) {
  SerialExec exec;
  Dedup<TypeParam> dedup;
  for (size_t n : {2048, 2049, 65536, 212992, 1000000}) {
    const std::vector<TypeParam> keys = this->Uniform(n, n);
    ASSERT_TRUE(dedup.Run(exec, keys.data(), n).ok());
    EXPECT_LE(n, dedup.num_partitions() * 2048);
    EXPECT_GT(n, dedup.num_partitions() * 1024);
  }
}

TYPED_TEST(DedupTest, RepeatedRunAllocatesNoArrays) {
  SerialExec exec;
  Dedup<TypeParam> dedup;
  const std::vector<TypeParam> large = this->Uniform(100000, 50000),
                               small(large.begin(), large.begin() + 99);
  ASSERT_TRUE(dedup.Run(exec, large.data(), large.size()).ok());
  const size_t before = arrays_allocated;
  ASSERT_TRUE(dedup.Run(exec, small.data(), small.size()).ok());
  ASSERT_TRUE(dedup.Run(exec, large.data(), large.size()).ok());
  EXPECT_EQ(arrays_allocated, before);
}

// Runs RunByRow by every Exec, and checks it. All results must be the same.
template <typename K>
void CheckByRow(const std::vector<K>& keys, const std::vector<RowId>& rows, Dedup<K>* dedup) {
  std::vector<uint32_t> expected, inverse(keys.size());
  ForEachExec([&](Exec& exec) {
    ASSERT_TRUE(dedup->RunByRow(exec, keys.data(), rows.data(), keys.size(), 0).ok());
    ASSERT_NO_FATAL_FAILURE(Check(*dedup, exec, keys));
    dedup->WriteInverse(exec, inverse.data());
    if (exec.parallelism() == 1) expected = inverse;
    ASSERT_EQ(inverse, expected);
  });
}

// Checks that each partition has the rows after those of the partitions before it.
template <typename K>
void CheckOrder(const std::vector<RowId>& rows, const Dedup<K>& dedup) {
  RowId before = 0;
  for (size_t i = 0; i < dedup.num_partitions(); ++i) {
    const auto p = dedup.partition(i);
    RowId last = before;
    for (size_t e = 0; e < p.num_entries; ++e) {
      const RowId row = rows[p.positions[e]];
      if (!IsRow(row)) continue;
      ASSERT_GE(row, before) << "partition " << i;
      last = std::max(last, row + 1);
    }
    before = last;
  }
}

// The number of keys in the largest partition, as a multiple of the average.
double Imbalance(const Dedup<uint64_t>& dedup) {
  return static_cast<double>(LargestPartition(dedup)) *
         static_cast<double>(dedup.num_partitions()) / static_cast<double>(dedup.num_keys());
}

// Uniform rows, and keys without rows.
TYPED_TEST(DedupTest, ByRow) {
  Dedup<TypeParam> dedup;
  const RowId absent[] = {kNoRow, kUnadmittedRow, kSkippedRow};
  for (size_t n : {1, 2048, 2049, 50000, 140000, 5, 0, 4096}) {
    for (RowId distance : {1u, 100u, 32000u}) {
      for (unsigned rowless : {0u, 3u, 8u}) {  // of eight keys
        SCOPED_TRACE(testing::Message() << n << " keys, " << distance << ", " << rowless);
        std::vector<TypeParam> keys(n);
        std::vector<RowId> rows(n);
        for (size_t i = 0; i < n; ++i) {
          const auto number = static_cast<uint32_t>(this->random_() >> 47);
          keys[i] = static_cast<TypeParam>(number * 0x9E3779B97F4A7C15ull);
          rows[i] = number % 8 < rowless ? absent[number % 3] : number * distance;
        }
        ASSERT_NO_FATAL_FAILURE(CheckByRow(keys, rows, &dedup));
        ASSERT_NO_FATAL_FAILURE(CheckOrder(rows, dedup));
      }
    }
  }
}

TYPED_TEST(DedupTest, ByRowIfRowsSpanEnough) {
  SerialExec exec;
  Dedup<TypeParam> dedup, by_key;
  const std::vector<TypeParam> keys = this->Uniform(50000, ~uint64_t{0});
  std::vector<RowId> rows(keys.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<RowId>(1000 + i);
  std::vector<uint32_t> inverse(keys.size()), of_keys(keys.size());
  ASSERT_TRUE(by_key.Run(exec, keys.data(), keys.size()).ok());
  by_key.WriteInverse(exec, of_keys.data());
  for (uint64_t least : {40000, 50001}) {
    ASSERT_TRUE(dedup.RunByRow(exec, keys.data(), rows.data(), keys.size(), least).ok());
    dedup.WriteInverse(exec, inverse.data());
    EXPECT_EQ(inverse == of_keys, least > 50000);
  }
}

// Five rows in 50,000, which the sample does not have, are far before or behind all others.
TYPED_TEST(DedupTest, ByRowWithFarRows) {
  for (const bool before : {false, true}) {
    Dedup<TypeParam> dedup;
    std::vector<TypeParam> keys(50000);
    std::vector<RowId> rows(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = static_cast<TypeParam>(i + 1);
      rows[i] = static_cast<RowId>(2'000'000'000 + i);
    }
    for (RowId i = 1; i <= 5; ++i) {
      rows[i] = before ? 99'999'999 * i : static_cast<RowId>(kMostRows) - 99'999'999 * i;
    }
    ASSERT_NO_FATAL_FAILURE(CheckByRow(keys, rows, &dedup));
    ASSERT_NO_FATAL_FAILURE(CheckOrder(rows, dedup));
  }
}

// Whether rows are spread, new (consecutive, behind many), or mostly popular ones.
TEST(DedupByRow, PartitionsAreBalanced) {
  std::mt19937_64 random(5);
  Dedup<uint64_t> dedup;
  const auto imbalance = [&](const auto& row_of) {
    std::vector<uint64_t> keys(200000);
    std::vector<RowId> rows(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = rows[i] = static_cast<RowId>(row_of(i));
    EXPECT_NO_FATAL_FAILURE(CheckByRow(keys, rows, &dedup));
    return Imbalance(dedup);
  };
  EXPECT_LT(imbalance([&](size_t) { return random() % 1'000'000; }), 2.5);
  EXPECT_LT(imbalance([&](size_t) { return random() % kMostRows; }), 2.5);
  EXPECT_LT(imbalance([](size_t i) { return 4'000'000'000 + i; }), 2.5);
  EXPECT_LT(imbalance([&](size_t i) { return random() % (i % 2 == 0 ? 1'000'000 : 20'000); }), 2.5);
  EXPECT_LT(imbalance([&](size_t i) { return i % 10 == 0 ? random() % kMostRows : 999 + i; }), 2.5);
  std::vector<uint64_t> keys(200000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  ASSERT_NO_FATAL_FAILURE(CheckByRow(keys, std::vector<RowId>(keys.size(), kNoRow), &dedup));
  EXPECT_LT(Imbalance(dedup), 2.5);
}

TYPED_TEST(DedupTest, KeysAreOrderedByOwner) {
  Dedup<TypeParam> dedup;  // reused, so that the number of ranks grows and shrinks
  Owners owners;
  for (uint32_t ranks : {1u, 2u, 3u, 64u, Owners::kMaxRanks, 7u}) {
    owners.ranks = ranks;
    for (Owners::Rule rule : {Owners::Rule::kHash, Owners::Rule::kModulo, Owners::Rule::kOne}) {
      owners.rule = rule;
      for (size_t n : {0, 5, 30000, 0}) {
        SCOPED_TRACE(testing::Message() << n << " keys, rule " << int(rule) << ", " << ranks);
        ASSERT_NO_FATAL_FAILURE(CheckAll(this->Uniform(n, 20000), &dedup, owners));
      }
    }
  }
}

TYPED_TEST(DedupTest, OneRankMayOwnAllKeys) {
  Dedup<TypeParam> dedup;
  Owners owners;
  owners.rule = Owners::Rule::kModulo;
  owners.ranks = 16;
  std::vector<TypeParam> keys = this->Uniform(50000, 20000);
  for (TypeParam& key : keys) key = key / 16 * 16 + 5;
  ASSERT_NO_FATAL_FAILURE(CheckAll(keys, &dedup, owners));
  EXPECT_EQ(dedup.owner_begin(5), 0u);
  EXPECT_EQ(dedup.owner_begin(6), dedup.num_unique());
}

TYPED_TEST(DedupTest, TheOnlyOwnerMayBeAnyRank) {
  Dedup<TypeParam> dedup;
  Owners owners;
  owners.ranks = 8;
  owners.one = 3;
  for (size_t n : {0, 100, 40000}) {
    ASSERT_NO_FATAL_FAILURE(CheckAll(this->Uniform(n, n + 1), &dedup, owners));
    for (uint32_t rank = 0; rank <= 8; ++rank) {
      EXPECT_EQ(dedup.owner_begin(rank), rank <= 3 ? 0 : dedup.num_unique()) << rank;
    }
    EXPECT_EQ(dedup.owner(0), 3u);
  }
}

TYPED_TEST(DedupTest, PartitionsPerOwnerFitInCache) {
  SerialExec exec;
  Dedup<TypeParam> dedup;
  Owners owners;
  owners.rule = Owners::Rule::kHash;
  for (uint32_t ranks : {2u, 5u, 64u}) {
    owners.ranks = ranks;
    for (size_t n : {200000, 1000000}) {
      const std::vector<TypeParam> keys = this->Uniform(n, n);
      ASSERT_TRUE(dedup.Run(exec, keys.data(), n, owners).ok());
      EXPECT_EQ(dedup.num_partitions() % ranks, 0u);
      EXPECT_LE(n, dedup.num_partitions() * 2048);
      EXPECT_GT(n, dedup.num_partitions() * 1024);
    }
  }
  // The number of partitions never exceeds the number of counters.
  owners.ranks = 2049;
  const std::vector<TypeParam> keys(4300000, 1);
  ASSERT_TRUE(dedup.Run(exec, keys.data(), keys.size(), owners).ok());
  EXPECT_EQ(dedup.num_partitions(), 2049u);
}

TYPED_TEST(DedupTest, TooManyRanksIsAnError) {
  SerialExec exec;
  Dedup<TypeParam> dedup;
  const TypeParam key = 1;
  Owners owners;
  owners.rule = Owners::Rule::kHash;
  owners.ranks = Owners::kMaxRanks + 1;
  const Status status = dedup.Run(exec, &key, 1, owners);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("4097"), std::string::npos) << status.message();
}

TYPED_TEST(DedupTest, TooManyKeysIsAnError) {
  SerialExec exec;
  Dedup<TypeParam> dedup;
  const TypeParam key = 1;
  const Status status = dedup.Run(exec, &key, Dedup<TypeParam>::kMaxKeys + 1);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("4294967295"), std::string::npos) << status.message();
}

// The number of probe steps, and the largest partition.
struct Work {
  double steps_per_key;
  size_t largest;
};

template <typename K>
Work WorkOf(const std::vector<K>& keys, const Owners& owners = Owners()) {
  SerialExec exec;
  Dedup<K> dedup;
  EXPECT_TRUE(dedup.Run(exec, keys.data(), keys.size(), owners).ok());
  Work work{static_cast<double>(dedup.probe_steps()) / static_cast<double>(keys.size()), 0};
  for (size_t p = 0; p < dedup.num_partitions(); ++p) {
    work.largest = std::max(work.largest, dedup.partition(p).num_entries);
  }
  return work;
}

// Ids of one of the 2^b shards of an upstream system, given by the top or the low bits of a hash.
TYPED_TEST(DedupTest, UpstreamShardsCostNoMoreThanOtherKeys) {
  SKIP_UNDER_SANITIZERS("a test of speed: other tests run the same code");
  for (const testing_keys::Sharding& sharding : testing_keys::kShardings) {
    for (int b : {1, 4, 8, 10, 12, 16}) {
      if (sizeof(TypeParam) == 4 && b > 8) continue;  // there are too few ids
      SCOPED_TRACE(testing::Message() << sharding.name << ", " << b << " bits");
      const auto keys =
          testing_keys::IdsOfShard<TypeParam>(sharding, b, size_t{1} << std::min(15, 24 - b));
      const Work work = WorkOf(keys);
      EXPECT_LT(work.steps_per_key, 1);
      EXPECT_LT(work.largest, 2048 * 5 / 4);
      Owners owners;
      owners.rule = Owners::Rule::kHash;
      owners.ranks = 8;
      EXPECT_LT(WorkOf(keys, owners).steps_per_key, 1);
    }
  }
}

// Keys whose hashes have equal low bits, equal top bits, or both.
std::vector<uint64_t> KeysWithSimilarHashes(size_t n, int low_bits, int top_bits) {
  std::vector<uint64_t> keys(n);
  const int free_bits = 64 - low_bits - top_bits;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t varied = (i * 0x9E3779B97F4A7C15ull) & ((~uint64_t{0}) >> (64 - free_bits));
    const uint64_t hash = (varied << low_bits) | (low_bits > 0 ? 5 : 0);
    keys[i] = testing_keys::UnmixDistinct(hash) ^ kDistinctSalt;
    EXPECT_EQ(DistinctHash()(keys[i]), hash);
  }
  return keys;
}

TEST(DedupOfChosenKeys, IsLinear) {
  SKIP_UNDER_SANITIZERS("a test of speed: other tests run the same code");
  Dedup<uint64_t> dedup;
  for (const auto& bits :
       std::vector<std::pair<int, int>>{{20, 0}, {32, 0}, {0, 20}, {0, 32}, {20, 20}, {32, 12}}) {
    SCOPED_TRACE(testing::Message() << bits.first << " low, " << bits.second << " top bits");
    constexpr size_t n = 200000;
    std::vector<uint64_t> keys = KeysWithSimilarHashes(n, bits.first, bits.second);
    keys.resize(n + n / 4);
    std::copy(keys.begin(), keys.begin() + n / 4, keys.begin() + n);
    EXPECT_LT(WorkOf(keys).steps_per_key, Distinct<uint64_t>::kMaxSteps + 3);
    if (bits.first + bits.second >= 40) {
      ASSERT_NO_FATAL_FAILURE(CheckAll(keys, &dedup));
    }
  }
}

// The hash and its first kUseless - 1 mixes are constant.
template <int kUseless>
struct UselessHash {
  uint64_t operator()(uint64_t) const { return 7; }
  uint64_t Again(uint64_t key, int attempt) const {
    return attempt < kUseless ? 7 : DistinctHash().Again(key, attempt);
  }
};

template <class Hash>
void CheckDistinct(bool sorts, const std::vector<uint64_t>& keys) {
  std::vector<uint64_t> unique = keys, expected_unique;
  std::vector<uint32_t> local(keys.size()), expected;
  Buffer<uint32_t> slots;
  std::unordered_map<uint64_t, uint32_t> numbers;
  for (uint64_t key : keys) {
    const auto at = numbers.emplace(key, static_cast<uint32_t>(numbers.size()));
    if (at.second) expected_unique.push_back(key);
    expected.push_back(at.first->second);
  }
  const Distinct<uint64_t, Hash> distinct(unique.data(), keys.size(), 2048, local.data(), &slots);
  ASSERT_EQ(distinct.num_unique(), expected_unique.size());
  unique.resize(distinct.num_unique());
  EXPECT_EQ(unique, expected_unique);
  EXPECT_EQ(local, expected);
  EXPECT_EQ(distinct.sorted(), sorts);
  constexpr size_t kSteps = Distinct<uint64_t>::kMaxSteps + Distinct<uint64_t>::kRange;
  EXPECT_LE(distinct.probe_steps(), kSteps * keys.size() * (Distinct<uint64_t>::kMixes + 1));
}

TEST(Distinct, SortsIfAllHashesCollide) {
  SKIP_UNDER_TSAN("a test of chosen keys, in one thread");
  std::mt19937_64 random(7);
  for (size_t n : {1, 10, 500, 5000, 60000}) {
    for (uint64_t values : {1, 30, 3000, 1 << 30}) {
      SCOPED_TRACE(testing::Message() << n << " keys of " << values << " values");
      std::vector<uint64_t> keys(n);
      for (uint64_t& key : keys) key = random() % values;
      const bool many = n >= 500 && values >= 3000;
      ASSERT_NO_FATAL_FAILURE(CheckDistinct<UselessHash<100>>(many, keys));
      ASSERT_NO_FATAL_FAILURE(CheckDistinct<UselessHash<1>>(false, keys));
      ASSERT_NO_FATAL_FAILURE(CheckDistinct<UselessHash<Distinct<uint64_t>::kMixes>>(false, keys));
      ASSERT_NO_FATAL_FAILURE(CheckDistinct<DistinctHash>(false, keys));
    }
  }
}

}  // namespace
}  // namespace dynemb
