// Owners: which rank holds a key.
//
//   kHash     a hash of the key decides: dynamic tables, spread over all ranks
//   kModulo   the key is a row number, and row r is on rank r mod ranks: static tables
//   kOne      one rank holds everything
//
// The hash is neither the one that places keys in a table (or each rank's table would see one part
// of the hash space only) nor the one by which Dedup divides them. It is not part of any file: a
// dump loads on any number of ranks.
#ifndef DYNEMB_LOOKUP_OWNERS_H_
#define DYNEMB_LOOKUP_OWNERS_H_

#include <cstdint>

#include "cc/table/key.h"
#include "cc/table/portability.h"

namespace dynemb {

// Stands for a rank where there is none.
constexpr uint32_t kNoRank = ~uint32_t{0};

struct Owners {
  enum class Rule : uint8_t { kHash, kModulo, kOne };
  // Positions in buffers that ranks exchange are cut into as many parts.
  static constexpr uint32_t kMaxRanks = 4096;

  Rule rule = Rule::kOne;
  uint32_t ranks = 1;
  uint32_t one = 0;  // for kOne

  // `key` is the key's bit pattern, a 32-bit one widened with zeros.
  DYNEMB_HD uint32_t Of(uint64_t key) const {
    switch (rule) {
      case Rule::kHash:
        // The top 32 bits as a fraction of 1, times ranks.
        return static_cast<uint32_t>(((MixKey(key ^ kSalt) >> 32) * ranks) >> 32);
      case Rule::kModulo:
        return static_cast<uint32_t>(key % ranks);
      case Rule::kOne:
        break;
    }
    return one;
  }

  // Whether keys of several ranks may occur.
  bool Spread() const { return rule != Rule::kOne && ranks > 1; }

 private:
  static constexpr uint64_t kSalt = 0x5851F42D4C957F2Dull;
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_OWNERS_H_
