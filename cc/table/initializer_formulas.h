// The initial value of one column, for host and device code.
//
// Contract. The value is a function of the column's run and its Philox word. It has the same bits
// wherever it is computed without contraction. Uniform, Normal and TruncatedNormal are for runs of
// that kind; InitialValue is for all kinds.
#ifndef DYNEMB_TABLE_INITIALIZER_FORMULAS_H_
#define DYNEMB_TABLE_INITIALIZER_FORMULAS_H_

#include <cstdint>

#include "cc/table/float_bits.h"
#include "cc/table/initializer.h"
#include "cc/table/philox.h"
#include "cc/table/portability.h"

namespace dynemb::formulas {

// The natural logarithm of x in (0, 1], with an error of about 1e-7 of max(1, |log x|): the
// polynomial of Cephes' logf (S. L. Moshier). libm's logf differs between machines in the last bit,
// and is not vectorized.
DYNEMB_HD DYNEMB_INLINE float Log(float x) {
  constexpr uint32_t kSqrtHalf = 0x3F3504F3u;
  const uint32_t u = FloatBits(x) - kSqrtHalf;
  const auto e = static_cast<float>(static_cast<int32_t>(u) >> 23);
  const float m = BitsToFloat((u & 0x007FFFFFu) + kSqrtHalf) - 1.0f;  // x = (1 + m) 2^e
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const float square = m * m;
  return ((p * m * square - 2.12194440e-4f * e) - 0.5f * square) + m + 0.693359375f * e;
}

// sqrt(2) erfinv(x), the inverse of P(|Z| < x) with the sign of x: M. Giles, "Approximating the
// erfinv function", GPU Computing Gems (2010), single precision. With kTail = false, |x| must be at
// most 0.9966; a truncated normal never draws more.
template <bool kTail>
DYNEMB_HD DYNEMB_INLINE float NormalQuantile(float x) {
  const float w = -Log((1.0f - x) * (1.0f + x));
  const float c = w - 2.5f;
  float p = 2.81022636e-08f;
  p = 3.43273939e-07f + p * c;
  p = -3.5233877e-06f + p * c;
  p = -4.39150654e-06f + p * c;
  p = 0.00021858087f + p * c;
  p = -0.00125372503f + p * c;
  p = -0.00417768164f + p * c;
  p = 0.246640727f + p * c;
  p = 1.50140941f + p * c;
  if (kTail) {
    const float t = __builtin_sqrtf(__builtin_fabsf(w)) - 3.0f;
    float q = -0.000200214257f;
    q = 0.000100950558f + q * t;
    q = 0.00134934322f + q * t;
    q = -0.00367342844f + q * t;
    q = 0.00573950773f + q * t;
    q = -0.0076224613f + q * t;
    q = 0.00943887047f + q * t;
    q = 1.00167406f + q * t;
    q = 2.83297682f + q * t;
    p = BitsToFloat(Select(w < 5.0f, FloatBits(p), FloatBits(q)));
  }
  return 1.41421356f * (p * x);
}

// P(|Z| < 2). A uniform number in (-1, 1), multiplied by it, has the quantiles of a normal
// distribution that is truncated at 2 standard deviations.
inline constexpr float kWithinTwo = 0.954499736f;

DYNEMB_HD DYNEMB_INLINE float Between(const InitRun& run, float value) {
  const float raised = value < run.low ? run.low : value;
  return raised > run.high ? run.high : raised;
}

DYNEMB_HD DYNEMB_INLINE float Uniform(const InitRun& run, uint32_t word) {
  return Between(run, run.offset + run.scale * UnitClosedOpen(word));
}

DYNEMB_HD DYNEMB_INLINE float Normal(const InitRun& run, uint32_t word) {
  return run.offset + run.scale * NormalQuantile<true>(2.0f * UnitOpen(word) - 1.0f);
}

DYNEMB_HD DYNEMB_INLINE float TruncatedNormal(const InitRun& run, uint32_t word) {
  const float x = kWithinTwo * (2.0f * UnitOpen(word) - 1.0f);
  return Between(run, run.offset + run.scale * NormalQuantile<false>(x));
}

DYNEMB_HD DYNEMB_INLINE float InitialValue(const InitRun& run, uint32_t word) {
  switch (run.kind) {
    case InitKind::kUniform:
      return Uniform(run, word);
    case InitKind::kNormal:
      return Normal(run, word);
    case InitKind::kTruncatedNormal:
      return TruncatedNormal(run, word);
    case InitKind::kConstant:
      break;
  }
  return run.offset;
}

}  // namespace dynemb::formulas

#endif  // DYNEMB_TABLE_INITIALIZER_FORMULAS_H_
