// Keys that are chosen by hashes of them: ids of one shard of an upstream system, and the keys
// whose hashes in this library are given.
#ifndef DYNEMB_TESTS_CC_CHOSEN_KEYS_H_
#define DYNEMB_TESTS_CC_CHOSEN_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/io/crc32c.h"
#include "cc/table/key.h"

namespace dynemb {

struct UpstreamHash {
  const char* name;
  int bits;
  uint64_t (*hash)(uint64_t);
};

inline uint64_t SplitMix64(uint64_t x) { return MixKey(x); }

// The 64-bit finalizer of MurmurHash3.
inline uint64_t Murmur3(uint64_t x) {
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDull;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53ull;
  return x ^ (x >> 33);
}

inline uint64_t Crc32(uint64_t x) { return Crc32c(0, &x, sizeof(x)); }
inline uint64_t Same(uint64_t x) { return x; }  // sharded by modulo, or by ranges

inline const std::vector<UpstreamHash>& UpstreamHashes() {
  static const auto* const all = new std::vector<UpstreamHash>{{"splitmix64", 64, SplitMix64},
                                                               {"murmur3", 64, Murmur3},
                                                               {"crc32", 32, Crc32},
                                                               {"modulo", 32, Same}};
  return *all;
}

// The first n ids whose hashes have the b top or low bits of those of id 1.
template <class K>
std::vector<K> ShardOf(const UpstreamHash& upstream, int b, bool top, size_t n) {
  const int shift = top ? upstream.bits - b : 0;
  const uint64_t mask = (uint64_t{1} << b) - 1, shard = (upstream.hash(1) >> shift) & mask;
  std::vector<K> keys;
  keys.reserve(n);
  for (uint64_t id = 1; keys.size() < n; ++id) {
    if (((upstream.hash(id) >> shift) & mask) == shard) keys.push_back(static_cast<K>(id));
  }
  return keys;
}

// x, of x ^ (x >> shift).
inline uint64_t Unshift(uint64_t y, int shift) {
  uint64_t x = y;
  for (int i = shift; i < 64; i += shift) x = y ^ (x >> shift);
  return x;
}

// a * Inverse(a) = 1, for odd a.
inline uint64_t Inverse(uint64_t a) {
  uint64_t x = a;  // right in the 3 lowest bits; each step doubles them
  for (int i = 0; i < 5; ++i) x *= 2 - a * x;
  return x;
}

// x, of DistinctHash::Mix(x).
inline uint64_t UnmixDistinct(uint64_t hash) {
  uint64_t x = Unshift(hash, 27) * Inverse(0x1C69B3F74AC4AE35ull);
  x = Unshift(x, 33) * Inverse(0x3C79AC492BA7B653ull);
  return Unshift(x, 27);
}

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_CHOSEN_KEYS_H_
