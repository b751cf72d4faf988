// Keys chosen by their hashes: the ids of one shard of an upstream system, and keys with given
// hashes in this library.
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

// The CRC-32 (as in zlib) of the eight bytes, in both halves of the result.
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
  bool top;  // the shard is the top bits of the hash; otherwise the low bits
};
constexpr Sharding kShardings[] = {
    {"SplitMix64_top", SplitMix64, true}, {"SplitMix64_low", SplitMix64, false},
    {"Murmur3_top", Murmur3, true},       {"Murmur3_low", Murmur3, false},
    {"Crc32_top", Crc32, true},           {"Crc32_low", Crc32, false},
    {"modulo", Identity, false},
};

// The first n ids, from 1 on, in the same one of 2^bits shards as id 1.
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

// The x for which x ^ (x >> shift) is y.
inline uint64_t Unshift(uint64_t y, int shift) {
  for (int done = shift; done < 64; done *= 2) y ^= y >> done;
  return y;
}

// The x with odd * x == 1.
inline uint64_t Inverse(uint64_t odd) {
  // The 3 lowest bits are correct. Each step of Newton's method doubles their number.
  uint64_t x = odd;
  for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
  return x;
}

// The key for which MixKey is `hash`.
inline uint64_t UnmixKey(uint64_t hash) {
  uint64_t z = Unshift(hash, 31) * Inverse(0x94D049BB133111EBull);
  z = Unshift(z, 27) * Inverse(0xBF58476D1CE4E5B9ull);
  return Unshift(z, 30) - 0x9E3779B97F4A7C15ull;
}

// The x for which MixMoremur is `hash`.
inline uint64_t UnmixDistinct(uint64_t hash) {
  uint64_t x = Unshift(hash, 27) * Inverse(0x1C69B3F74AC4AE35ull);
  x = Unshift(x, 33) * Inverse(0x3C79AC492BA7B653ull);
  return Unshift(x, 27);
}

// 64-bit keys whose hashes with this salt have these upper 32 bits. If `crowded`, they also have
// the same home bucket and the same digest.
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
