#include "cc/table/codec.h"

#include <algorithm>

#include "cc/table/half.h"
#include "cc/table/key.h"
#include "cc/table/philox.h"
#include "cc/table/portability.h"

#if DYNEMB_HAS_CLONES
#include <immintrin.h>
#endif

namespace dynemb {
namespace {

using LoadFn = void (*)(const void* row, int64_t dim, float* vector);
using StoreFn = void (*)(const float* vector, int64_t dim, void* row);

template <DType kType>
DYNEMB_CLONES void Load(const void* row, int64_t dim, float* vector) {
  HalfToFloat<kType>(row, dim, vector);
}

template <DType kType>
DYNEMB_CLONES void Store(const float* vector, int64_t dim, void* row) {
  FloatToHalf<kType>(vector, dim, row);
}

template <DType kType>
DYNEMB_CLONES void StoreStochastic(const float* vector, const uint32_t* bits, int64_t dim,
                                   void* row) {
  FloatToHalfStochastic<kType>(vector, bits, dim, row);
}

#if DYNEMB_HAS_CLONES
// One instruction per eight elements instead of about twenty, in every lookup of float16 rows.
__attribute__((target("avx,f16c"))) void LoadF16c(const void* row, int64_t dim, float* vector) {
  const auto* from = static_cast<const unsigned char*>(row);
  int64_t c = 0;
  for (; c + 8 <= dim; c += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * c));
    _mm256_storeu_ps(vector + c, _mm256_cvtph_ps(half));
  }
  HalfToFloat<DType::kFloat16>(from + 2 * c, dim - c, vector + c);
}

__attribute__((target("avx,f16c"))) void StoreF16c(const float* vector, int64_t dim, void* row) {
  auto* to = static_cast<unsigned char*>(row);
  int64_t c = 0;
  for (; c + 8 <= dim; c += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(vector + c), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * c), half);
  }
  FloatToHalf<DType::kFloat16>(vector + c, dim - c, to + 2 * c);
}
#endif

LoadFn PickLoadFloat16() {
#if DYNEMB_HAS_CLONES
  if (__builtin_cpu_supports("f16c")) return &LoadF16c;
#endif
  return &Load<DType::kFloat16>;
}

StoreFn PickStoreFloat16() {
#if DYNEMB_HAS_CLONES
  if (__builtin_cpu_supports("f16c")) return &StoreF16c;
#endif
  return &Store<DType::kFloat16>;
}

}  // namespace

namespace internal_codec {

void LoadHalf(DType type, const void* row, int64_t dim, float* vector) {
  if (type == DType::kFloat16) {
    static const LoadFn load = PickLoadFloat16();
    load(row, dim, vector);
  } else {
    Load<DType::kBfloat16>(row, dim, vector);
  }
}

void StoreHalf(DType type, const float* vector, int64_t dim, void* row) {
  if (type == DType::kFloat16) {
    static const StoreFn store = PickStoreFloat16();
    store(vector, dim, row);
  } else {
    Store<DType::kBfloat16>(vector, dim, row);
  }
}

void StoreHalfStochastic(DType type, const float* vector, int64_t dim, void* row, uint64_t seed,
                         uint64_t key, uint64_t step) {
  // The key and the column are in Philox's counter, and the step is in Philox's key. Both mixes are
  // bijections, so for one seed no two steps share bits.
  const PhiloxSchedule schedule(MixKey(MixKey(seed) + step));
  constexpr int64_t kChunk = 64;
  uint32_t bits[kChunk];
  for (int64_t c = 0; c < dim; c += kChunk) {
    const int64_t n = std::min(kChunk, dim - c);
    PhiloxWords(schedule, key, PhiloxStream::kRounding, c, n, bits);
    void* to = static_cast<unsigned char*>(row) + 2 * c;
    if (type == DType::kFloat16) {
      StoreStochastic<DType::kFloat16>(vector + c, bits, n, to);
    } else {
      StoreStochastic<DType::kBfloat16>(vector + c, bits, n, to);
    }
  }
}

}  // namespace internal_codec
}  // namespace dynemb
