// Ids as systems upstream hand them out: consecutive numbers, those of one shard, where the shard
// is some bits of a common hash of the id.
#ifndef DYNEMB_TESTS_CC_SHARDED_KEYS_H_
#define DYNEMB_TESTS_CC_SHARDED_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynemb {
namespace testing_keys {

inline uint64_t SplitMix64(uint64_t id) {
  uint64_t z = id + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline uint64_t Murmur3(uint64_t id) {  // fmix64
  id ^= id >> 33;
  id *= 0xFF51AFD7ED558CCDull;
  id ^= id >> 33;
  id *= 0xC4CEB9FE1A85EC53ull;
  return id ^ (id >> 33);
}

// CRC-32 (of zlib) of the eight bytes, in the upper half and again in the lower one.
inline uint64_t Crc32(uint64_t id) {
  static const std::vector<uint32_t> table = [] {
    std::vector<uint32_t> t(256);
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

struct Sharding {
  const char* name;
  uint64_t (*hash)(uint64_t id);
  bool top;  // the shard is the hash's top bits, not its low ones
};
constexpr Sharding kShardings[] = {
    {"SplitMix64_top", SplitMix64, true}, {"SplitMix64_low", SplitMix64, false},
    {"Murmur3_top", Murmur3, true},       {"Murmur3_low", Murmur3, false},
    {"Crc32_top", Crc32, true},           {"Crc32_low", Crc32, false},
};

// The first n ids of one of 2^bits shards.
inline std::vector<uint64_t> IdsOfShard(const Sharding& sharding, int bits, size_t n) {
  std::vector<uint64_t> ids;
  const uint64_t wanted = 1;
  for (uint64_t id = 0; ids.size() < n; ++id) {
    const uint64_t h = sharding.hash(id);
    if ((sharding.top ? h >> (64 - bits) : h & ((uint64_t{1} << bits) - 1)) == wanted) {
      ids.push_back(id);
    }
  }
  return ids;
}

// The key whose MixKey is `hash`.
inline uint64_t UnmixKey(uint64_t hash) {
  const auto unshift = [](uint64_t z, int by) {
    for (int done = by; done < 64; done *= 2) z ^= z >> done;
    return z;
  };
  const auto inverse = [](uint64_t odd) {  // Newton: each step doubles the bits that are right
    uint64_t x = odd;
    for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
    return x;
  };
  uint64_t z = unshift(hash, 31) * inverse(0x94D049BB133111EBull);
  z = unshift(z, 27) * inverse(0xBF58476D1CE4E5B9ull);
  return unshift(z, 30) - 0x9E3779B97F4A7C15ull;
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

#endif  // DYNEMB_TESTS_CC_SHARDED_KEYS_H_
