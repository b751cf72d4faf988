// From a key's hash to its place: the prefix that indexes the directory, the home bucket, and the
// digest.
//
// Keys are bit patterns (uint64_t or uint32_t), and every pattern is legal. The hash (hash.h) is a
// bijection of 64 bits, so distinct keys never have equal hashes. docs/design.md, "Which bucket",
// explains the spiral.
#ifndef DYNEMB_TABLE_KEY_H_
#define DYNEMB_TABLE_KEY_H_

#include <cstdint>

#include "cc/table/hash.h"
#include "cc/table/portability.h"

namespace dynemb {

// y = x (a + (1 - a) x), for x and y as fractions of 2^32. This is close to 2^x - 1, so that keys
// are twice as dense at one end of the directory as at the other. Monotone.
DYNEMB_HD inline uint32_t Spiral(uint32_t x) {
  constexpr uint64_t kA = 2819646030ull;  // 0.6565 * 2^32
  constexpr uint64_t kB = (1ull << 32) - kA;
  const uint64_t slope = kA + ((kB * x) >> 32);
  return static_cast<uint32_t>((x * slope) >> 32);
}

// The prefix of a hash at a level of the directory; its top bits index the directory (index.h).
// Each level uses another mix of the hash, so keys that agree in their prefix at one level differ
// at the next.
DYNEMB_HD inline uint32_t PrefixOf(uint64_t hash, uint32_t level = 0) {
  if (level != 0) hash = Remix(hash, level);
  return Spiral(static_cast<uint32_t>(hash >> 32));
}

// The bucket at which the probe for a key begins in its segment, and the digest that it looks for.
struct Probe {
  uint8_t home;    // first bucket
  uint8_t digest;  // 1..255
};

constexpr uint32_t kBucketsPerSegment = 64;

DYNEMB_HD inline Probe MakeProbe(uint64_t hash) {
  const auto low = static_cast<uint32_t>(hash);
  Probe p;
  p.home = static_cast<uint8_t>(low & (kBucketsPerSegment - 1));
  // Bits 6..29, scaled to 0..254 by a multiplication. 0 marks an empty slot.
  p.digest = static_cast<uint8_t>(1 + ((((low >> 6) & 0xFFFFFFu) * 255u) >> 24));
  return p;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_KEY_H_
