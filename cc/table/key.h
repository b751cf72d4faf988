// From a key to where it may live: the hash, the directory prefix, the home bucket and the digest.
//
// Keys are bit patterns (uint64_t or uint32_t); every pattern is legal. MixKey is a bijection on 64
// bits, so distinct keys never share a whole hash. docs/design.md, "Which bucket", explains the
// spiral.
//
// Salt. Ids often come sharded by a hash of their own, so that all of them agree in some bits of a
// common mixer. So each table hashes with a salt (HashKey), and what has to be the same for all
// ranks and in files has salts that never change (owners.h, key_index.h).
#ifndef DYNEMB_TABLE_KEY_H_
#define DYNEMB_TABLE_KEY_H_

#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014), after a constant that keeps key 0 from
// hashing to 0.
DYNEMB_HD inline uint64_t MixKey(uint64_t key) {
  uint64_t z = key + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// The hash of a key in a table with this salt.
DYNEMB_HD inline uint64_t HashKey(uint64_t key, uint64_t salt) { return MixKey(key ^ salt); }

// y = x (a + (1 - a) x) with x and y fractions of 2^32: close to 2^x - 1, so that keys are twice as
// dense at one end of the directory as at the other. Monotone.
DYNEMB_HD inline uint32_t Spiral(uint32_t x) {
  constexpr uint64_t kA = 2819646030ull;  // 0.6565 * 2^32
  constexpr uint64_t kB = (1ull << 32) - kA;
  const uint64_t slope = kA + ((kB * x) >> 32);
  return static_cast<uint32_t>((x * slope) >> 32);
}

// The prefix of a hash at a level of the directory, whose top bits index it (index.h). At each
// level the hash is mixed anew: keys that agree in their prefix at one level differ at the next.
DYNEMB_HD inline uint32_t PrefixOf(uint64_t hash, uint32_t level = 0) {
  constexpr uint64_t kOdd = 0xD1B54A32D192ED03ull;
  if (level != 0) hash = MixKey(hash + level * kOdd);
  return Spiral(static_cast<uint32_t>(hash >> 32));
}

// Where a key is looked for inside its segment.
struct Probe {
  uint8_t home;    // first bucket
  uint8_t digest;  // 1..255
};

constexpr uint32_t kBucketsPerSegment = 64;

DYNEMB_HD inline Probe MakeProbe(uint64_t hash) {
  const auto low = static_cast<uint32_t>(hash);
  Probe p;
  p.home = static_cast<uint8_t>(low & (kBucketsPerSegment - 1));
  // Bits 6..29 scaled to 0..254 by a multiplication; 0 is kept for "empty".
  p.digest = static_cast<uint8_t>(1 + ((((low >> 6) & 0xFFFFFFu) * 255u) >> 24));
  return p;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_KEY_H_
