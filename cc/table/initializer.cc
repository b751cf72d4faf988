#include "cc/table/initializer.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cc/table/codec.h"
#include "cc/table/initializer_formulas.h"
#include "cc/table/number_text.h"
#include "cc/table/philox.h"
#include "cc/table/portability.h"

DYNEMB_NO_CONTRACTION

namespace dynemb {
namespace {

// The number of words that are drawn at a time, on the stack.
constexpr int64_t kChunk = 64;

DYNEMB_CLONES void Uniform(const InitRun& run, const uint32_t* words, int64_t n,
                           float* DYNEMB_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = formulas::Uniform(run, words[i]);
}

DYNEMB_CLONES void Normal(const InitRun& run, const uint32_t* words, int64_t n,
                          float* DYNEMB_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = formulas::Normal(run, words[i]);
}

DYNEMB_CLONES void TruncatedNormal(const InitRun& run, const uint32_t* words, int64_t n,
                                   float* DYNEMB_RESTRICT to) {
  for (int64_t i = 0; i < n; ++i) to[i] = formulas::TruncatedNormal(run, words[i]);
}

std::string Column(size_t c) { return "initializer of column " + std::to_string(c); }

Status Validate(const ColumnInit& init, size_t c) {
  if (!std::isfinite(init.a) || (init.kind != InitKind::kConstant && !std::isfinite(init.b))) {
    return InvalidArgument(Column(c) + " must have finite numbers, got " + NumberText(init.a) +
                           ", " + NumberText(init.b));
  }
  switch (init.kind) {
    case InitKind::kConstant:
      return {};
    case InitKind::kUniform:
      if (init.a > init.b || !std::isfinite(init.b - init.a)) {
        return InvalidArgument(Column(c) + ": uniform needs low <= high and a finite range, got " +
                               NumberText(init.a) + ", " + NumberText(init.b));
      }
      return {};
    case InitKind::kNormal:
    case InitKind::kTruncatedNormal:
      // No draw is farther than 6 standard deviations from the mean.
      if (init.b < 0.0f || !std::isfinite(std::fabs(init.a) + 6.0f * init.b)) {
        return InvalidArgument(Column(c) +
                               ": normal needs stddev >= 0 and values within float32, got mean " +
                               NumberText(init.a) + ", stddev " + NumberText(init.b));
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
    InitRun run{init.kind, begin, begin + 1, init.a, init.b, init.a, init.a};
    if (init.kind == InitKind::kUniform) {
      run.scale = init.b - init.a;
      // a + scale * x may round to b, which is not in the interval.
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

void Initializer::FillChunk(uint64_t key, int64_t begin, int64_t end, size_t* run_number,
                            float* values) const {
  uint32_t words[kChunk];
  if (random_) PhiloxWords(schedule_, key, PhiloxStream::kInitialVector, begin, end - begin, words);
  for (int64_t c = begin; c < end;) {
    const InitRun& run = runs_[*run_number];
    const int64_t stop = std::min(run.end, end);
    const int64_t n = stop - c;
    const uint32_t* w = words + (c - begin);
    float* to = values + (c - begin);
    switch (run.kind) {
      case InitKind::kConstant:
        std::fill_n(to, n, run.offset);
        break;
      case InitKind::kUniform:
        Uniform(run, w, n, to);
        break;
      case InitKind::kNormal:
        Normal(run, w, n, to);
        break;
      case InitKind::kTruncatedNormal:
        TruncatedNormal(run, w, n, to);
        break;
    }
    c = stop;
    if (c == run.end) ++*run_number;
  }
}

void Initializer::Fill(uint64_t key, float* vector) const {
  size_t run = 0;
  for (int64_t begin = 0; begin < dim_; begin += kChunk) {
    FillChunk(key, begin, std::min(begin + kChunk, dim_), &run, vector + begin);
  }
}

void Initializer::FillAs(DType dtype, uint64_t key, void* vector) const {
  if (dtype == DType::kFloat32) return Fill(key, static_cast<float*>(vector));
  float values[kChunk];
  size_t run = 0;
  for (int64_t begin = 0; begin < dim_; begin += kChunk) {
    const int64_t n = std::min(kChunk, dim_ - begin);
    FillChunk(key, begin, begin + n, &run, values);
    StoreVector(dtype, values, n, static_cast<char*>(vector) + begin * SizeOf(dtype));
  }
}

}  // namespace dynemb
