#include "cc/lookup/owners.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/lookup/dedup.h"
#include "cc/table/key.h"
#include "tests/cc/sanitizers.h"

namespace dynemb {
namespace {

// The deviation of counts from equal counts, in standard deviations of the chi-square of
// independent uniform draws.
double Unevenness(const std::vector<size_t>& counts) {
  double total = 0, chi_square = 0;
  for (size_t count : counts) total += static_cast<double>(count);
  const double expected = total / static_cast<double>(counts.size());
  for (size_t count : counts) {
    const double d = static_cast<double>(count) - expected;
    chi_square += d * d / expected;
  }
  const double freedom = static_cast<double>(counts.size() - 1);
  return (chi_square - freedom) / std::sqrt(2 * freedom);
}
// There are about 1000 comparisons, with fixed seeds. With one degree of freedom, a larger value
// has a probability of 1e-5.
constexpr double kMaxUnevenness = 13;

Owners ByHash(uint32_t ranks) {
  Owners owners;
  owners.rule = Owners::Rule::kHash;
  owners.ranks = ranks;
  return owners;
}

// Kinds of ids: row numbers, ids of a few bits, ids that are hashes.
std::vector<std::pair<std::string, std::function<uint64_t(uint64_t)>>> KeyKinds(
    std::mt19937_64* random) {
  return {
      {"sequential", [](uint64_t i) { return i; }},
      {"negative", [](uint64_t i) { return ~i; }},
      {"from 2^40", [](uint64_t i) { return (uint64_t{1} << 40) + i; }},
      {"every 3rd", [](uint64_t i) { return 3 * i; }},
      {"every 64th", [](uint64_t i) { return 64 * i; }},
      {"every 10,000th", [](uint64_t i) { return 10000 * i; }},
      {"top bits", [](uint64_t i) { return i << 44; }},
      {"both halves", [](uint64_t i) { return i << 32 | i; }},
      {"golden ratio", [](uint64_t i) { return i * 0x9E3779B97F4A7C15ull; }},
      {"random", [random](uint64_t) { return (*random)(); }},
      {"random of 32 bits", [random](uint64_t) { return (*random)() >> 32; }},
  };
}

TEST(OwnersTest, HashSpreadsKeysEvenly) {
  SKIP_UNDER_SANITIZERS("statistics of code that other tests run");
  std::mt19937_64 random(1);
  for (const auto& [name, key] : KeyKinds(&random)) {
    for (uint32_t ranks = 2; ranks <= 64; ++ranks) {
      const Owners owners = ByHash(ranks);
      std::vector<size_t> counts(ranks);
      for (uint64_t i = 0; i < 20000; ++i) {
        const uint32_t owner = owners.Of(key(i));
        ASSERT_LT(owner, ranks);
        ++counts[owner];
      }
      EXPECT_LT(Unevenness(counts), kMaxUnevenness) << name << " keys, " << ranks << " ranks";
    }
  }
}

TEST(OwnersTest, HashSpreadsKeysOverManyRanks) {
  std::mt19937_64 random(2);
  for (const auto& [name, key] : KeyKinds(&random)) {
    for (uint32_t ranks : {1000u, Owners::kMaxRanks}) {
      const Owners owners = ByHash(ranks);
      std::vector<size_t> counts(ranks);
      for (uint64_t i = 0; i < 200000; ++i) ++counts[owners.Of(key(i))];
      EXPECT_LT(Unevenness(counts), kMaxUnevenness) << name << " keys, " << ranks << " ranks";
    }
  }
}

// Otherwise a rank's table would use only some of its directory entries, buckets or digests.
TEST(OwnersTest, OwnerIsIndependentOfTheHashOfTables) {
  std::mt19937_64 random(3);
  constexpr uint64_t kKeys = 100000;
  for (const auto& [name, key] : KeyKinds(&random)) {
    for (uint32_t ranks : {2u, 3u, 7u, 8u, 64u}) {
      const Owners owners = ByHash(ranks);
      // [rank, cell]: the top and the low 5 bits of the table's hash (of salt 0), and bits of the
      // digest.
      std::vector<size_t> top(ranks * 32), low(ranks * 32), digest(ranks * 32);
      for (uint64_t i = 0; i < kKeys; ++i) {
        const uint64_t k = key(i), hash = MixKey(k), row = owners.Of(k) * 32;
        ++top[row + (hash >> 59)];
        ++low[row + (hash & 31)];
        ++digest[row + (hash >> 25 & 31)];
      }
      // Over all ranks: a rank that has all keys of a cell, or none, would stand out.
      EXPECT_LT(Unevenness(top), kMaxUnevenness) << name << " keys, " << ranks << " ranks";
      EXPECT_LT(Unevenness(low), kMaxUnevenness) << name << " keys, " << ranks << " ranks";
      EXPECT_LT(Unevenness(digest), kMaxUnevenness) << name << " keys, " << ranks << " ranks";
    }
  }
}

// Dedup partitions the keys that a rank has received and, before keys are sent, the keys of each
// owner.
TEST(OwnersTest, OwnerIsIndependentOfDedupsPartitions) {
  std::mt19937_64 random(4);
  SerialExec exec;
  Dedup<uint64_t> dedup;
  for (const auto& [name, key] : KeyKinds(&random)) {
    std::vector<uint64_t> all(150000), received;
    for (uint64_t i = 0; i < all.size(); ++i) all[i] = key(i);
    for (uint32_t ranks : {2u, 3u, 8u}) {
      const Owners owners = ByHash(ranks);
      received.clear();
      for (uint64_t k : all) {
        if (owners.Of(k) == 1) received.push_back(k);
      }
      ASSERT_TRUE(dedup.Run(exec, received.data(), received.size()).ok());
      std::vector<size_t> sizes;
      ASSERT_GT(dedup.num_partitions(), 8u);
      for (size_t p = 0; p < dedup.num_partitions(); ++p) {
        sizes.push_back(dedup.partition(p).num_entries);
      }
      EXPECT_LT(Unevenness(sizes), kMaxUnevenness) << name << " keys, one of " << ranks << " ranks";

      ASSERT_TRUE(dedup.Run(exec, all.data(), all.size(), owners).ok());
      ASSERT_GT(dedup.num_partitions(), 8 * ranks);
      sizes.clear();
      for (size_t p = 0; p < dedup.num_partitions(); ++p) {
        sizes.push_back(dedup.partition(p).num_entries);
      }
      EXPECT_LT(Unevenness(sizes), kMaxUnevenness) << name << " keys for " << ranks << " ranks";
    }
  }
}

TEST(OwnersTest, ModuloTakesKeysAsRowNumbers) {
  Owners owners;
  owners.rule = Owners::Rule::kModulo;
  for (uint32_t ranks : {1u, 2u, 3u, 5u, 64u, Owners::kMaxRanks}) {
    owners.ranks = ranks;
    // Consecutive rows are on consecutive ranks, cyclically.
    uint32_t expected = 0;
    for (uint64_t row = 0; row < 3 * ranks; ++row) {
      ASSERT_EQ(owners.Of(row), expected) << row << ", " << ranks << " ranks";
      expected = expected + 1 == ranks ? 0 : expected + 1;
    }
    ASSERT_EQ(owners.Of(uint64_t{ranks} << 50 | 0), 0u);
  }
  owners.ranks = 10;
  EXPECT_EQ(owners.Of(18446744073709551615ull), 5u);
  EXPECT_EQ(owners.Of(4294967295u), 5u);
}

TEST(OwnersTest, OneRankHoldsEverything) {
  std::mt19937_64 random(5);
  Owners owners;
  EXPECT_EQ(owners.Of(random()), 0u) << "by default, there is one rank";
  owners.ranks = 8;
  owners.one = 3;
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(owners.Of(random()), 3u);
}

TEST(OwnersTest, SpreadNeedsSeveralRanks) {
  for (Owners::Rule rule : {Owners::Rule::kHash, Owners::Rule::kModulo, Owners::Rule::kOne}) {
    Owners owners;
    owners.rule = rule;
    EXPECT_FALSE(owners.Spread());
    for (uint64_t key : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) EXPECT_EQ(owners.Of(key), 0u);
    owners.ranks = 2;
    EXPECT_EQ(owners.Spread(), rule != Owners::Rule::kOne);
  }
}

}  // namespace
}  // namespace dynemb
