// Distinct: numbers the distinct keys of one partition of a Dedup in the order of their first
// occurrence, in linear work for any keys.
//
// The keys are in a hash set with open addressing and linear probing, whose work is quadratic for
// keys that collide in few slots. By chance, the probability of this is negligible. However, an
// upstream system may have chosen the keys by a hash of them, and an adversary may know our hash.
// The slots that probes pass are therefore counted. A set whose probes have passed more than
// kMaxSteps slots per key continues with another bijective mix of the hash, at most kMixes times;
// the keys that are left after that are sorted. The numbers do not depend on which mix was used
// last.
#ifndef DYNEMB_LOOKUP_DISTINCT_H_
#define DYNEMB_LOOKUP_DISTINCT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/table/hash.h"
#include "cc/table/scratch.h"

namespace dynemb {

// The hash of keys in a Distinct, and its n-th mix (hash.h).
struct DistinctHash {
  uint64_t operator()(uint64_t key) const { return MixMoremur(key ^ kDistinctSalt); }
  uint64_t Again(uint64_t key, int n) const {
    return MixMoremur((*this)(key) + RemixStep(static_cast<uint64_t>(n)));
  }
};

// K is uint64_t or uint32_t. Hash is DistinctHash, or a test's.
template <class K, class Hash = DistinctHash>
class Distinct {
 public:
  // The number of slots per key that probes may pass before another hash is tried. At the largest
  // load, one half, a good hash passes 1.5 slots for a new key and 0.5 for a known one.
  static constexpr size_t kMaxSteps = 8;
  // The number of other hashes that are tried.
  static constexpr int kMixes = 8;
  // The initial number of slots per key. With 2 slots, probes collide often enough that the
  // mispredicted branches cost 2 ns per key.
  static constexpr size_t kSlotsPerKey = 4;
  static constexpr size_t kMinTable = 64;
  // The number of keys between two checks of the probe steps. Checks after every 16 keys, or after
  // every key, cost 5%.
  static constexpr size_t kRange = 64;

  // The number of slots of a set for n keys.
  static size_t TableSize(size_t n) {
    size_t size = kMinTable;
    while (size < kSlotsPerKey * n) size *= 2;
    return size;
  }

  // Writes the numbers of keys[n] to local[n], and overwrites the front of `keys` with the distinct
  // keys. The set begins with room for at most `usual` keys: a larger n may consist of a few keys,
  // each repeated many times. `slots` is scratch, which grows as needed.
  Distinct(K* keys, size_t n, size_t usual, uint32_t* local, Buffer<uint32_t>* slots)
      : keys_(keys), n_(n), size_(TableSize(std::min(n, usual))), local_(local), slots_(slots) {
    const Hash hash;
    if (Continue([hash](K key) { return hash(key); })) return;
    for (int attempt = 1; attempt <= kMixes; ++attempt) {
      if (Continue([hash, attempt](K key) { return hash.Again(key, attempt); })) return;
    }
    Sort();
  }

  uint32_t num_unique() const { return num_unique_; }
  // The number of slots that probes have passed: at most (kMaxSteps + kRange) * n * (kMixes + 1).
  uint64_t probe_steps() const { return steps_; }
  bool sorted() const { return sorted_; }

 private:
  uint32_t* ClearSlots() {
    uint32_t* const slots = slots_->Resize(size_);
    std::memset(slots, 0, size_ * sizeof(uint32_t));
    return slots;
  }

  // Continues after the keys that already have numbers. Returns false if probes passed too many
  // slots. A slot holds a key's number plus one; 0 marks an empty slot, so no key is reserved.
  template <class HashOf>
  bool Continue(const HashOf& hash_of) {
    K* const keys = keys_;
    uint32_t* const local = local_;
    const size_t most = kMaxSteps * n_;
    size_t steps = 0, i = next_;
    uint32_t num_unique = num_unique_;
    for (bool grow = false;; grow = true) {
      if (grow) size_ *= kSlotsPerKey;
      uint32_t* const slots = ClearSlots();
      const size_t mask = size_ - 1;
      for (uint32_t u = 0; u < num_unique && steps <= most; ++u) {
        size_t at = hash_of(keys[u]) & mask;
        for (; slots[at] != 0; at = (at + 1) & mask) ++steps;
        slots[at] = u + 1;
      }
      while (i < n_ && steps <= most && num_unique < size_ / 2) {
        // Each key of this range adds at most one distinct key, so the table has room for them.
        const size_t end = i + std::min({n_ - i, size_ / 2 - num_unique, kRange});
        for (; i < end; ++i) {
          const K key = keys[i];
          // The key is written before it is known to be new; no unread key is lost, because
          // num_unique <= i. An empty slot then represents this key, so "found" and "new" are one
          // path, without a branch that repeated keys would make unpredictable.
          keys[num_unique] = key;
          size_t at = hash_of(key) & mask;
          uint32_t u;
          for (;; at = (at + 1) & mask, ++steps) {
            const uint32_t slot = slots[at];
            u = slot == 0 ? num_unique : slot - 1;
            if (keys[u] == key) break;
          }
          slots[at] = u + 1;
          local[i] = u;
          num_unique += u == num_unique;
        }
      }
      if (i == n_ || steps > most) break;
    }
    next_ = i;
    num_unique_ = num_unique;
    steps_ += steps;
    return i == n_;
  }

  // Numbers the keys from next_ on by sorting them, together with the distinct keys before them.
  void Sort() {
    sorted_ = true;
    const uint32_t known = num_unique_;
    const size_t m = known + (n_ - next_);
    uint32_t* const order = slots_->Resize(2 * m);
    uint32_t* const number = order + m;  // at first: the first entry with the same key
    const auto key_of = [&](uint32_t entry) {
      return entry < known ? keys_[entry] : keys_[next_ + (entry - known)];
    };
    for (size_t entry = 0; entry < m; ++entry) order[entry] = static_cast<uint32_t>(entry);
    std::sort(order, order + m, [&](uint32_t a, uint32_t b) {
      const K x = key_of(a), y = key_of(b);
      return x != y ? x < y : a < b;
    });
    for (size_t i = 0, first = 0; i < m; ++i) {
      if (key_of(order[i]) != key_of(order[first])) first = i;
      number[order[i]] = order[first];
    }
    for (size_t entry = known; entry < m; ++entry) {
      const size_t i = next_ + (entry - known);
      if (number[entry] == entry) {
        keys_[num_unique_] = keys_[i];
        number[entry] = num_unique_++;
      } else {
        number[entry] = number[number[entry]];
      }
      local_[i] = number[entry];
    }
  }

  K* const keys_;
  const size_t n_;
  size_t size_;
  uint32_t* const local_;
  Buffer<uint32_t>* const slots_;
  size_t next_ = 0;  // keys before it have numbers
  uint32_t num_unique_ = 0;
  uint64_t steps_ = 0;
  bool sorted_ = false;
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_DISTINCT_H_
