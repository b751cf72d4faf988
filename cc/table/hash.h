// Every hash of the library: its function, its salt, and its use.
//
//   use                                   function   salt                          must agree on
//   ------------------------------------  ---------  ----------------------------  -------------
//   a key's slot in a table (key.h)       SplitMix   of the table: name and seed   nothing
//   the owner of a key (owners.h)         SplitMix   kOwnerSalt                    all ranks
//   the key index of a dump               SplitMix   KeyIndexSalt(number), in the  readers of the
//     (cc/io/key_index.h)                              dump                          file
//   distinct keys of a batch on the host  Moremur    kDistinctSalt                 nothing
//     (cc/lookup/distinct.h)
//   distinct keys of a batch on a device  SplitMix   kElectionSalt                 nothing
//     (cc/device/kernels.h)
//   repeated keys in pass 2               the slot's hash, or Remix of it          nothing
//     (insert_plan.h)
//   the line of a key's counter           SplitMix   kOwnerSalt                    all ranks, dumps
//     (admission.h)
//   its fingerprint in the line; chance   SplitMix   kAdmissionSalt                all ranks, dumps
//     of its admission
//   small integers over workers, filters  ScatterInteger                           nothing
//
// Why salts. Upstream systems often shard ids by a common hash, so that all ids of a shard agree in
// some bits of it. A salt makes each hash here independent of theirs. Uses that see each other's
// results need different salts, too: all keys of one rank agree in the owner's hash, and all keys
// of one partition of a batch in the hash that divides it.
//
// Why Remix. Keys can still collide, by chance or by design. All functions are bijections of 64
// bits, so keys that collide in some bits of one mix differ in bits of the next. A data structure
// that finds too many collisions continues with the next mix.
#ifndef DYNEMB_TABLE_HASH_H_
#define DYNEMB_TABLE_HASH_H_

#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014), after a constant that keeps 0 from hashing
// to 0. A bijection.
DYNEMB_HD inline uint64_t MixKey(uint64_t key) {
  uint64_t z = key + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Moremur (Evensen 2019; public domain). A bijection, independent of MixKey and of the finalizers
// that upstream systems use.
DYNEMB_HD inline uint64_t MixMoremur(uint64_t x) {
  x ^= x >> 27;
  x *= 0x3C79AC492BA7B653ull;
  x ^= x >> 33;
  x *= 0x1C69B3F74AC4AE35ull;
  return x ^ (x >> 27);
}

// The hash of a key in a use with this salt.
DYNEMB_HD inline uint64_t HashKey(uint64_t key, uint64_t salt) { return MixKey(key ^ salt); }

// The number that is added to a hash before its n-th mix, n > 0.
DYNEMB_HD inline uint64_t RemixStep(uint64_t n) { return n * 0xD1B54A32D192ED03ull; }
// The n-th mix of a hash.
DYNEMB_HD inline uint64_t Remix(uint64_t hash, uint64_t n) { return MixKey(hash + RemixStep(n)); }

constexpr uint64_t kOwnerSalt = 0x5851F42D4C957F2Dull;
constexpr uint64_t kDistinctSalt = 0xDB4F0B9175AE2165ull;
// Part of the dump format, like kOwnerSalt.
constexpr uint64_t kAdmissionSalt = 0xA24BAED4963EE407ull;
constexpr uint64_t kElectionSalt = 0x9FB21C651E98DF25ull;
// The hash by which an election numbers the distinct keys of several tables.
DYNEMB_HD inline uint64_t ElectionHash(uint64_t key, uint64_t table) {
  return HashKey(key, MixKey(table + kElectionSalt));
}
// The salts that a key index tries, in this order; part of the dump format.
inline uint64_t KeyIndexSalt(uint64_t number) { return MixKey(number); }

// Spreads small integers over the high bits of 64 (Fibonacci hashing).
inline uint64_t ScatterInteger(uint32_t n) { return n * 0x9E3779B97F4A7C15ull; }

}  // namespace dynemb

#endif  // DYNEMB_TABLE_HASH_H_
