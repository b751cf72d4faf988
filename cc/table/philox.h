// Philox 4x32-10: random bits as a function of a counter (Salmon, Moraes, Dror, Shaw: "Parallel
// Random Numbers: As Easy as 1, 2, 3", SC 2011). It has no state, so any thread, rank or device can
// draw any column of any row, in any order.
//
// Contract. A sequence is identified by (seed, id, stream). Its word c is word c % 4 of the block
// with key = seed and counter = (id, c / 4, stream), low halves first. PhiloxWords computes many
// words at once, and returns exactly these.
#ifndef DYNEMB_TABLE_PHILOX_H_
#define DYNEMB_TABLE_PHILOX_H_

#include <cstdint>

#include "cc/table/portability.h"

namespace dynemb {

struct Philox4 {
  uint32_t word[4];
};

// The purpose of the bits, so that two uses never share bits by accident.
enum class PhiloxStream : uint32_t { kInitialVector = 0, kRounding = 1 };

// The constants of the paper: multipliers and the Weyl increments of the key.
constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

DYNEMB_HD DYNEMB_INLINE Philox4 Philox(Philox4 c, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c.word[0];
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c.word[2];
    c = Philox4{{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
                 static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return c;
}

// Words 4 * block to 4 * block + 3 of a sequence.
DYNEMB_HD DYNEMB_INLINE Philox4 PhiloxBlock(uint64_t seed, uint64_t id, PhiloxStream stream,
                                            uint32_t block) {
  return Philox({{static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), block,
                  static_cast<uint32_t>(stream)}},
                static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// The keys of the ten rounds for one seed, in the form that PhiloxWords reads. Keep it for many
// calls.
struct PhiloxSchedule {
  explicit PhiloxSchedule(uint64_t seed = 0) : seed(seed) {
    auto k0 = static_cast<uint32_t>(seed);
    auto k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
      key[2 * round] = k0;
      key[2 * round + 1] = k1;
    }
  }
  uint64_t seed;
  uint64_t key[2 * kPhiloxRounds];
};

// The number of words in a buffer for `columns` words: PhiloxWords writes whole groups of 16.
constexpr int64_t PhiloxPadded(int64_t columns) { return (columns + 15) / 16 * 16; }

// Writes the words [first, first + PhiloxPadded(columns)) of a sequence. `first` is a multiple of
// 4. Host only; uses AVX2 or AVX-512 if the CPU has it.
void PhiloxWords(const PhiloxSchedule& schedule, uint64_t id, PhiloxStream stream, int64_t first,
                 int64_t columns, uint32_t* words);

// 24 bits as a float32 in [0, 1): all multiples of 2^-24 are equally likely. (The cast through
// int32_t is one SIMD instruction.)
DYNEMB_HD DYNEMB_INLINE float UnitClosedOpen(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
}

// 23 bits as a float32 in (0, 1): the odd multiples of 2^-24. They are symmetric about 1/2, and
// never rounded to 0 or 1.
DYNEMB_HD DYNEMB_INLINE float UnitOpen(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>((bits >> 8) | 1u)) * 0x1p-24f;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_PHILOX_H_
