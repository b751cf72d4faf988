// Owners: the rule that says which rank holds a key.
//
//   kHash     a hash of the key decides: dynamic tables, spread over all ranks
//   kModulo   the key is a row number, and row r is on rank r mod ranks: static tables
//   kOne      one rank holds everything
//
// The hash differs from the one that places keys in a table, because otherwise each rank's table
// would see only one part of the hash space, and from the one by which Dedup partitions keys. No
// file depends on it: a dump loads on any number of ranks.
#ifndef DYNEMB_LOOKUP_OWNERS_H_
#define DYNEMB_LOOKUP_OWNERS_H_

#include <cstdint>

#include "cc/table/hash.h"
#include "cc/table/portability.h"

namespace dynemb {

// No rank.
constexpr uint32_t kNoRank = ~uint32_t{0};

struct Owners {
  enum class Rule : uint8_t { kHash, kModulo, kOne };
  // Dedup has at least one partition per rank, and Split has at most this many partitions.
  static constexpr uint32_t kMaxRanks = 4096;

  Rule rule = Rule::kOne;
  uint32_t ranks = 1;
  uint32_t one = 0;  // for kOne

  // `key` is the key's bit pattern; a 32-bit key is zero-extended.
  DYNEMB_HD uint32_t Of(uint64_t key) const {
    switch (rule) {
      case Rule::kHash:
        // The top 32 bits as a fraction of 1, times ranks.
        return static_cast<uint32_t>(((HashKey(key, kOwnerSalt) >> 32) * ranks) >> 32);
      case Rule::kModulo:
        return static_cast<uint32_t>(key % ranks);
      case Rule::kOne:
        break;
    }
    return one;
  }

  // Whether keys may belong to several ranks.
  bool Spread() const { return rule != Rule::kOne && ranks > 1; }
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_OWNERS_H_
