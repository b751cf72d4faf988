#include "cc/table/optimizer.h"

#include <cmath>

#include "cc/table/float_bits.h"
#include "cc/table/optimizer_formulas.h"
#include "cc/table/portability.h"

DYNEMB_NO_CONTRACTION

namespace dynemb {
namespace {

using C = OptimizerCoefficients;

// One step of one row. The arrays of a row never overlap, and column i meets only column i: hence
// ivdep, without which gcc tests every pair of arrays before the loop and gives up beyond ten. SIMD
// needs -O3 -fno-math-errno: else sqrtf is a call for the sake of errno.
template <class Formula>
DYNEMB_CLONES void Step(const C& c, int64_t dim, float* DYNEMB_RESTRICT vector,
                        float* DYNEMB_RESTRICT state, const float* DYNEMB_RESTRICT grad) {
  if (c.decay != 0.0f) {
    DYNEMB_IVDEP
    for (int64_t i = 0; i < dim; ++i) vector[i] = formulas::DecayedWeight(c, vector[i]);
  }
  DYNEMB_IVDEP
  for (int64_t i = 0; i < dim; ++i) {
    vector[i] = Formula::Update(c, vector[i], grad[i], state + i, dim);
  }
}

// The mean of the squares in partial sums whose order depends on dim alone: SIMD, and the same bits
// with any vector length.
DYNEMB_INLINE float MeanSquare(const float* g, int64_t dim) {
  constexpr int64_t kLanes = 16;
  float sum = 0.0f;
  int64_t i = 0;
  if (dim >= kLanes) {
    float partial[kLanes] = {};
    for (; i + kLanes <= dim; i += kLanes) {
      for (int64_t k = 0; k < kLanes; ++k) partial[k] += formulas::Square(g[i + k]);
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t k = 0; k < width; ++k) partial[k] += partial[k + width];
    }
    sum = partial[0];
  }
  for (; i < dim; ++i) sum += formulas::Square(g[i]);
  return sum / static_cast<float>(dim);
}

DYNEMB_CLONES void RowwiseStep(const C& c, int64_t dim, float* DYNEMB_RESTRICT vector,
                               float* DYNEMB_RESTRICT state, const float* DYNEMB_RESTRICT grad) {
  const float multiplier = formulas::RowwiseAdagradMultiplier(c, MeanSquare(grad, dim), state);
  for (int64_t i = 0; i < dim; ++i) {
    const float weight = c.decay != 0.0f ? formulas::DecayedWeight(c, vector[i]) : vector[i];
    vector[i] = weight - multiplier * grad[i];
  }
}

// The decimal number that was rounded to the float32 x. Keras computes 1 - beta in double from the
// number the user wrote; 1 - 0.999 from float32 is off by 1.3e-5, which would show in every step.
double Decimal(float x) {
  for (double scale = 1e3; scale < 1e10; scale *= 10.0) {
    const double decimal = std::round(static_cast<double>(x) * scale) / scale;
    if (static_cast<float>(decimal) == x) return decimal;
  }
  return x;
}

float OneMinus(float beta) { return static_cast<float>(1.0 - Decimal(beta)); }

// 1 - beta^step, of float32 numbers and rounded where Keras rounds: there the first steps' error is
// part of the result.
float BiasCorrection(float beta, float step) {
  return 1.0f - static_cast<float>(std::pow(static_cast<double>(beta), static_cast<double>(step)));
}

C Prepare(OptimizerKind kind, const Hyper& h) {
  C c{};
  c.learning_rate = h.learning_rate;
  c.decay = h.weight_decay;
  c.epsilon = h.epsilon;
  c.momentum = h.momentum;
  c.beta_1 = h.beta_1;
  c.beta_2 = h.beta_2;
  // lion.py, alone, casts to float32 before it subtracts.
  const bool lion = kind == OptimizerKind::kLion;
  c.one_minus_beta_1 = lion ? 1.0f - h.beta_1 : OneMinus(h.beta_1);
  c.one_minus_beta_2 = lion ? 1.0f - h.beta_2 : OneMinus(h.beta_2);
  c.alpha = BiasCorrection(h.beta_1, h.iteration);
  if (kind == OptimizerKind::kAdam) {
    c.alpha = h.learning_rate * formulas::Sqrt(BiasCorrection(h.beta_2, h.iteration)) / c.alpha;
  }
  c.l1 = h.l1;
  c.shrinkage = 2.0f * h.l2_shrinkage;
  c.quadratic = 2.0f * (h.l2 + h.ftrl_beta / (2.0f * h.learning_rate));
  c.power = -h.learning_rate_power;
  return c;
}

auto PickStep(OptimizerKind kind, OptimizerFlags flags, const C& c) {
  switch (kind) {
    case OptimizerKind::kSgd:
      if (!flags.momentum) return &Step<formulas::Sgd>;
      return flags.nesterov ? &Step<formulas::SgdMomentum<true>>
                            : &Step<formulas::SgdMomentum<false>>;
    case OptimizerKind::kAdagrad:
      return &Step<formulas::Adagrad>;
    case OptimizerKind::kAdam:
      return flags.amsgrad ? &Step<formulas::Adam<true>> : &Step<formulas::Adam<false>>;
    case OptimizerKind::kAdamax:
      return &Step<formulas::Adamax>;
    case OptimizerKind::kRmsprop:
      if (flags.momentum)
        return flags.centered ? &Step<formulas::Rmsprop<true, true>>
                              : &Step<formulas::Rmsprop<true, false>>;
      return flags.centered ? &Step<formulas::Rmsprop<false, true>>
                            : &Step<formulas::Rmsprop<false, false>>;
    case OptimizerKind::kAdadelta:
      return &Step<formulas::Adadelta>;
    case OptimizerKind::kFtrl:
      return c.power == 0.5f ? &Step<formulas::Ftrl<true>> : &Step<formulas::Ftrl<false>>;
    case OptimizerKind::kLion:
      return &Step<formulas::Lion>;
    case OptimizerKind::kRowwiseAdagrad:
      break;
  }
  return &RowwiseStep;
}

struct Name {
  const char* name;
  OptimizerKind kind;
};

constexpr Name kNames[] = {
    {"sgd", OptimizerKind::kSgd},           {"adagrad", OptimizerKind::kAdagrad},
    {"adam", OptimizerKind::kAdam},         {"adamw", OptimizerKind::kAdam},
    {"adamax", OptimizerKind::kAdamax},     {"rmsprop", OptimizerKind::kRmsprop},
    {"adadelta", OptimizerKind::kAdadelta}, {"ftrl", OptimizerKind::kFtrl},
    {"lion", OptimizerKind::kLion},         {"rowwise_adagrad", OptimizerKind::kRowwiseAdagrad},
};

struct Flag {
  const char* name;
  bool OptimizerFlags::*field;
  bool (*allowed)(OptimizerKind);
};

constexpr Flag kFlags[] = {
    {"nesterov", &OptimizerFlags::nesterov,
     [](OptimizerKind k) { return k == OptimizerKind::kSgd; }},
    {"amsgrad", &OptimizerFlags::amsgrad,
     [](OptimizerKind k) { return k == OptimizerKind::kAdam; }},
    {"centered", &OptimizerFlags::centered,
     [](OptimizerKind k) { return k == OptimizerKind::kRmsprop; }},
    {"momentum", &OptimizerFlags::momentum,
     [](OptimizerKind k) { return k == OptimizerKind::kSgd || k == OptimizerKind::kRmsprop; }},
};

DYNEMB_CLONES bool AllFiniteBits(const float* g, int64_t dim) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < dim; ++i) bad |= (FloatBits(g[i]) & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
  return bad == 0;
}

}  // namespace

Status ParseOptimizer(const std::string& name, const std::vector<std::string>& flags,
                      OptimizerKind* kind, OptimizerFlags* parsed) {
  const Name* found = nullptr;
  for (const Name& n : kNames) {
    if (name == n.name) found = &n;
  }
  if (found == nullptr) {
    std::string known;
    for (const Name& n : kNames) known += std::string(known.empty() ? "" : ", ") + n.name;
    return InvalidArgument("optimizer must be one of " + known + ", got '" + name + "'");
  }
  OptimizerFlags result;
  for (const std::string& flag : flags) {
    bool legal = false;
    for (const Flag& f : kFlags) {
      if (flag != f.name || !f.allowed(found->kind)) continue;
      result.*f.field = true;
      legal = true;
    }
    if (!legal) return InvalidArgument("optimizer '" + name + "' has no flag '" + flag + "'");
  }
  *kind = found->kind;
  *parsed = result;
  return {};
}

std::vector<int64_t> StateWidths(OptimizerKind kind, OptimizerFlags flags, int64_t dim) {
  size_t states = 0;
  switch (kind) {
    case OptimizerKind::kSgd:
      states = flags.momentum ? 1 : 0;
      break;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kLion:
      states = 1;
      break;
    case OptimizerKind::kAdam:
      states = flags.amsgrad ? 3 : 2;
      break;
    case OptimizerKind::kRmsprop:
      states = 1 + (flags.momentum ? 1 : 0) + (flags.centered ? 1 : 0);
      break;
    case OptimizerKind::kAdamax:
    case OptimizerKind::kAdadelta:
    case OptimizerKind::kFtrl:
      states = 2;
      break;
    case OptimizerKind::kRowwiseAdagrad:
      return {1};
  }
  return std::vector<int64_t>(states, dim);
}

bool AllFinite(const float* g, int64_t dim) { return AllFiniteBits(g, dim); }

RowOptimizer::RowOptimizer(OptimizerKind kind, OptimizerFlags flags, const Hyper& hyper,
                           int64_t dim)
    : coefficients_(Prepare(kind, hyper)), dim_(dim), step_(PickStep(kind, flags, coefficients_)) {}

}  // namespace dynemb
