#include "cc/table/philox.h"

#if DYNEMB_HAS_CLONES
#include <immintrin.h>
#endif

namespace dynemb {
namespace {

constexpr int64_t kGroup = 16;  // words computed at once: four blocks

// Written with intrinsics, because gcc 12 vectorizes the portable loop to code that is slower than
// no SIMD.
#if DYNEMB_HAS_CLONES
#define DYNEMB_TARGET(name) __attribute__((target(name)))

// Each 64-bit lane holds one word of one block in its low half. vpmuludq reads only low halves, so
// the high halves may have any value, and the product is the next round's word without a shuffle.
DYNEMB_TARGET("avx2")
DYNEMB_INLINE void SimdGroups(const PhiloxSchedule& schedule, uint64_t id, uint32_t stream,
                              uint32_t block, int64_t groups, uint32_t* out) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxM0), m1 = _mm256_set1_epi64x(kPhiloxM1);
  for (int64_t g = 0; g < groups; ++g, block += 4, out += kGroup) {
    __m256i c0 = _mm256_set1_epi64x(static_cast<int64_t>(id));
    __m256i c1 = _mm256_set1_epi64x(static_cast<int64_t>(id >> 32));
    __m256i c2 = _mm256_add_epi32(_mm256_set1_epi64x(block), _mm256_setr_epi64x(0, 1, 2, 3));
    __m256i c3 = _mm256_set1_epi64x(stream);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i k0 = _mm256_set1_epi64x(static_cast<int64_t>(schedule.key[2 * round]));
      const __m256i k1 = _mm256_set1_epi64x(static_cast<int64_t>(schedule.key[2 * round + 1]));
      const __m256i p0 = _mm256_mul_epu32(c0, m0);
      const __m256i p1 = _mm256_mul_epu32(c2, m1);
      c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1, k0));
      c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3, k1));
      c1 = p1;
      c3 = p0;
    }
    // Transposes from one word of four blocks per register to four words of one block.
    const __m256i first = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
    const __m256i second = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
    const __m256i even = _mm256_unpacklo_epi64(first, second);
    const __m256i odd = _mm256_unpackhi_epi64(first, second);
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
}

DYNEMB_TARGET("avx2")
void Avx2Groups(const PhiloxSchedule& schedule, uint64_t id, uint32_t stream, uint32_t block,
                int64_t groups, uint32_t* out) {
  SimdGroups(schedule, id, stream, block, groups, out);
}

// The same source: AVX-512 has a three-operand exclusive or, which gcc uses.
DYNEMB_TARGET("avx512vl")
void Avx512Groups(const PhiloxSchedule& schedule, uint64_t id, uint32_t stream, uint32_t block,
                  int64_t groups, uint32_t* out) {
  SimdGroups(schedule, id, stream, block, groups, out);
}
#endif

void PortableGroups(const PhiloxSchedule& schedule, uint64_t id, uint32_t stream, uint32_t block,
                    int64_t groups, uint32_t* out) {
  for (int64_t b = 0; b < groups * 4; ++b) {
    const Philox4 words = PhiloxBlock(schedule.seed, id, static_cast<PhiloxStream>(stream),
                                      block + static_cast<uint32_t>(b));
    for (int w = 0; w < 4; ++w) out[4 * b + w] = words.word[w];
  }
}

using Groups = void (*)(const PhiloxSchedule&, uint64_t id, uint32_t stream, uint32_t block,
                        int64_t groups, uint32_t* out);

Groups PickGroups() {
#if DYNEMB_HAS_CLONES
  if (__builtin_cpu_supports("avx512vl")) return &Avx512Groups;
  if (__builtin_cpu_supports("avx2")) return &Avx2Groups;
#endif
  return &PortableGroups;
}

}  // namespace

void PhiloxWords(const PhiloxSchedule& schedule, uint64_t id, PhiloxStream stream, int64_t first,
                 int64_t columns, uint32_t* words) {
  static const Groups groups = PickGroups();
  groups(schedule, id, static_cast<uint32_t>(stream), static_cast<uint32_t>(first / 4),
         PhiloxPadded(columns) / kGroup, words);
}

}  // namespace dynemb
