// Keys that are chosen by a hash of them: the ids of one shard of an upstream system, and keys
// whose hashes in this library are given.
#ifndef DYNEMB_TESTS_CC_CHOSEN_KEYS_H_
#define DYNEMB_TESTS_CC_CHOSEN_KEYS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/key.h"

namespace dynemb {
namespace testing_keys {

inline uint64_t SplitMix64(uint64_t id) { return MixKey(id); }

// The 64-bit finalizer of MurmurHash3.
inline uint64_t Murmur3(uint64_t id) {
  id ^= id >> 33;
  id *= 0xFF51AFD7ED558CCDull;
  id ^= id >> 33;
  id *= 0xC4CEB9FE1A85EC53ull;
  return id ^ (id >> 33);
}

// CRC-32 (of zlib) of the eight bytes, in the upper half and again in the lower one.
inline uint64_t Crc32(uint64_t id) {
  static const auto table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      t[i] = i;
      for (int bit = 0; bit < 8; ++bit) t[i] = (t[i] >> 1) ^ (t[i] & 1 ? 0xEDB88320u : 0u);
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (int byte = 0; byte < 8; ++byte) crc = table[(crc ^ (id >> 8 * byte)) & 0xFF] ^ (crc >> 8);
  return uint64_t{~crc} << 32 | uint32_t{~crc};
}

inline uint64_t Identity(uint64_t id) { return id; }

struct Sharding {
  const char* name;
  uint64_t (*hash)(uint64_t id);
  bool top;  // the shard is the top bits of the hash, not the low ones
};
constexpr Sharding kShardings[] = {
    {"SplitMix64_top", SplitMix64, true}, {"SplitMix64_low", SplitMix64, false},
    {"Murmur3_top", Murmur3, true},       {"Murmur3_low", Murmur3, false},
    {"Crc32_top", Crc32, true},           {"Crc32_low", Crc32, false},
    {"modulo", Identity, false},
};

// The first n consecutive ids from 1 of one of 2^bits shards, that of id 1.
template <class K = uint64_t>
std::vector<K> IdsOfShard(const Sharding& sharding, int bits, size_t n) {
  const auto shard = [&](uint64_t id) {
    const uint64_t h = sharding.hash(id);
    return sharding.top ? h >> (64 - bits) : h & ((uint64_t{1} << bits) - 1);
  };
  std::vector<K> ids;
  ids.reserve(n);
  for (uint64_t id = 1; ids.size() < n; ++id) {
    if (shard(id) == shard(1)) ids.push_back(static_cast<K>(id));
  }
  return ids;
}

// x, of x ^ (x >> shift).
inline uint64_t Unshift(uint64_t y, int shift) {
  for (int done = shift; done < 64; done *= 2) y ^= y >> done;
  return y;
}

// The x with odd * x == 1.
inline uint64_t Inverse(uint64_t odd) {
  uint64_t x = odd;  // right in the 3 lowest bits; each step of Newton's method doubles them
  for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
  return x;
}

// The key whose MixKey is `hash`.
inline uint64_t UnmixKey(uint64_t hash) {
  uint64_t z = Unshift(hash, 31) * Inverse(0x94D049BB133111EBull);
  z = Unshift(z, 27) * Inverse(0xBF58476D1CE4E5B9ull);
  return Unshift(z, 30) - 0x9E3779B97F4A7C15ull;
}

// The x whose MixMoremur is `hash`.
inline uint64_t UnmixDistinct(uint64_t hash) {
  uint64_t x = Unshift(hash, 27) * Inverse(0x1C69B3F74AC4AE35ull);
  x = Unshift(x, 33) * Inverse(0x3C79AC492BA7B653ull);
  return Unshift(x, 27);
}

// Keys of 64 bits whose hashes with this salt have these upper 32 bits; with `crowded`, also one
// home bucket and one digest.
inline std::vector<uint64_t> SamePrefix(uint64_t salt, uint32_t upper, size_t n, bool crowded) {
  std::vector<uint64_t> keys(n);
  for (size_t i = 0; i < n; ++i) {
    const auto low = static_cast<uint32_t>(crowded ? 17 | i << 6 : i * 2654435761u);
    keys[i] = UnmixKey(uint64_t{upper} << 32 | low) ^ salt;
  }
  return keys;
}

}  // namespace testing_keys
}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_CHOSEN_KEYS_H_
