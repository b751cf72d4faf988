#include "cc/table/codec.h"

#include <algorithm>

#include "cc/table/half.h"
#include "cc/table/key.h"
#include "cc/table/philox.h"
#include "cc/table/portability.h"

namespace dynemb {
namespace {

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

}  // namespace

namespace internal_codec {

void LoadHalf(DType type, const void* row, int64_t dim, float* vector) {
  if (type == DType::kFloat16) {
    Load<DType::kFloat16>(row, dim, vector);
  } else {
    Load<DType::kBfloat16>(row, dim, vector);
  }
}

void StoreHalf(DType type, const float* vector, int64_t dim, void* row) {
  if (type == DType::kFloat16) {
    Store<DType::kFloat16>(vector, dim, row);
  } else {
    Store<DType::kBfloat16>(vector, dim, row);
  }
}

void StoreHalfStochastic(DType type, const float* vector, int64_t dim, void* row, uint64_t seed,
                         uint64_t key, Tick tick) {
  // Philox's counter holds the key and the column; the tick goes into Philox's key. Both mixes are
  // bijections, so for one seed no two ticks share bits.
  const PhiloxSchedule schedule(MixKey(MixKey(seed) + tick));
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
