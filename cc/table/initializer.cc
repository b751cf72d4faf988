#include "cc/table/initializer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cc/table/float_bits.h"
#include "cc/table/philox.h"
#include "cc/table/portability.h"

DYNEMB_NO_CONTRACTION

namespace dynemb {
namespace {

// Words drawn at a time, on the stack.
constexpr int64_t kChunk = 64;

// Natural logarithm for x in (0, 1], to about 1e-7 of max(1, |log x|): the polynomial of Cephes'
// logf (S. L. Moshier). Not libm's: that differs between machines in the last bit, and does not
// vectorize.
DYNEMB_INLINE float Log(float x) {
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
// erfinv function", GPU Computing Gems (2010), single precision. `kTail` false leaves out |x| >
// 0.9966, which a truncated normal never draws.
template <bool kTail>
DYNEMB_INLINE float NormalQuantile(float x) {
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

// P(|Z| < 2): scales a uniform in (-1, 1) to the part of it that a normal cut at 2 standard
// deviations keeps.
constexpr float kWithinTwo = 0.954499736f;

DYNEMB_CLONES void Uniform(float offset, float scale, float low, float high, const uint32_t* words,
                           int64_t n, float* DYNEMB_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = offset + scale * UnitClosedOpen(words[i]);
    const float raised = value < low ? low : value;
    to[i] = raised > high ? high : raised;
  }
}

DYNEMB_CLONES void Normal(float mean, float stddev, const uint32_t* words, int64_t n,
                          float* DYNEMB_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = mean + stddev * NormalQuantile<true>(2.0f * UnitOpen(words[i]) - 1.0f);
  }
}

DYNEMB_CLONES void TruncatedNormal(float mean, float stddev, float low, float high,
                                   const uint32_t* words, int64_t n, float* DYNEMB_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = kWithinTwo * (2.0f * UnitOpen(words[i]) - 1.0f);
    const float value = mean + stddev * NormalQuantile<false>(x);
    const float raised = value < low ? low : value;
    to[i] = raised > high ? high : raised;
  }
}

std::string Column(size_t c) { return "initializer of column " + std::to_string(c); }

Status Validate(const ColumnInit& init, size_t c) {
  if (!std::isfinite(init.a) || (init.kind != InitKind::kConstant && !std::isfinite(init.b))) {
    return InvalidArgument(Column(c) + " must have finite numbers, got " + std::to_string(init.a) +
                           ", " + std::to_string(init.b));
  }
  switch (init.kind) {
    case InitKind::kConstant:
      return {};
    case InitKind::kUniform:
      if (init.a > init.b || !std::isfinite(init.b - init.a)) {
        return InvalidArgument(Column(c) + ": uniform needs low <= high and a finite range, got " +
                               std::to_string(init.a) + ", " + std::to_string(init.b));
      }
      return {};
    case InitKind::kNormal:
    case InitKind::kTruncatedNormal:
      // No draw is farther than 6 standard deviations from the mean.
      if (init.b < 0.0f || !std::isfinite(std::fabs(init.a) + 6.0f * init.b)) {
        return InvalidArgument(Column(c) +
                               ": normal needs stddev >= 0 and values within float32, got mean " +
                               std::to_string(init.a) + ", stddev " + std::to_string(init.b));
      }
      return {};
  }
  return InvalidArgument(Column(c) + " has unknown kind " +
                         std::to_string(static_cast<int>(init.kind)));
}

}  // namespace

Status Initializer::Create(std::vector<ColumnInit> columns, int64_t dim, uint64_t seed,
                           Initializer* out) {
  if (dim < 1) return InvalidArgument("dim must be at least 1, got " + std::to_string(dim));
  if (columns.size() != 1 && columns.size() != static_cast<uint64_t>(dim)) {
    return InvalidArgument("initializers must have 1 or dim = " + std::to_string(dim) +
                           " entries, got " + std::to_string(columns.size()));
  }
  Initializer made;
  made.dim_ = dim;
  made.schedule_ = PhiloxSchedule(seed);
  for (size_t c = 0; c < columns.size(); ++c) {
    const ColumnInit& init = columns[c];
    DYNEMB_RETURN_IF_ERROR(Validate(init, c));
    made.random_ |= init.kind != InitKind::kConstant;
    const bool same = c > 0 && columns[c - 1].kind == init.kind && columns[c - 1].a == init.a &&
                      columns[c - 1].b == init.b;
    if (same) {
      ++made.runs_.back().end;
      continue;
    }
    const auto begin = static_cast<int64_t>(c);
    Run run{init.kind, begin, begin + 1, init.a, init.b, init.a, init.a};
    if (init.kind == InitKind::kUniform) {
      run.scale = init.b - init.a;
      // low + scale * u may round to high, which does not belong to the interval.
      run.high = init.b > init.a ? std::nextafter(init.b, init.a) : init.a;
    } else if (init.kind == InitKind::kTruncatedNormal) {
      run.low = init.a - 2.0f * init.b;
      run.high = init.a + 2.0f * init.b;
    }
    made.runs_.push_back(run);
  }
  if (columns.size() == 1) made.runs_[0].end = dim;
  *out = std::move(made);
  return {};
}

void Initializer::Fill(uint64_t key, float* vector) const {
  uint32_t words[kChunk];
  size_t r = 0;
  for (int64_t begin = 0; begin < dim_; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, dim_);
    if (random_)
      PhiloxWords(schedule_, key, PhiloxStream::kInitialVector, begin, end - begin, words);
    for (int64_t c = begin; c < end;) {
      const Run& run = runs_[r];
      const int64_t stop = std::min(run.end, end);
      const int64_t n = stop - c;
      const uint32_t* w = words + (c - begin);
      float* to = vector + c;
      switch (run.kind) {
        case InitKind::kConstant:
          std::fill_n(to, n, run.offset);
          break;
        case InitKind::kUniform:
          Uniform(run.offset, run.scale, run.low, run.high, w, n, to);
          break;
        case InitKind::kNormal:
          Normal(run.offset, run.scale, w, n, to);
          break;
        case InitKind::kTruncatedNormal:
          TruncatedNormal(run.offset, run.scale, run.low, run.high, w, n, to);
          break;
      }
      c = stop;
      if (c == run.end) ++r;
    }
  }
}

}  // namespace dynemb
