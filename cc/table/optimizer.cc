#include "cc/table/optimizer.h"

#include <cmath>

#include "cc/table/optimizer_formulas.h"
#include "cc/table/portability.h"

DYNEMB_NO_CONTRACTION

namespace dynemb {
namespace {

using C = OptimizerCoefficients;

// One step of one row. The arrays of a row never overlap, and column i depends only on column i, so
// ivdep is correct. Without ivdep, gcc tests every pair of arrays for overlap before the loop, and
// gives up beyond ten pairs. SIMD needs -O3 -fno-math-errno; otherwise sqrtf is a call that may set
// errno.
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

DYNEMB_CLONES void RowwiseStep(const C& c, int64_t dim, float* DYNEMB_RESTRICT vector,
                               float* DYNEMB_RESTRICT state, const float* DYNEMB_RESTRICT grad) {
  const float multiplier = formulas::RowwiseAdagrad::Multiplier(c, grad, dim, state);
  for (int64_t i = 0; i < dim; ++i) {
    const float weight = c.decay != 0.0f ? formulas::DecayedWeight(c, vector[i]) : vector[i];
    vector[i] = formulas::RowwiseAdagrad::Update(multiplier, weight, grad[i]);
  }
}

// The decimal number that was rounded to the float32 x. Keras computes 1 - beta in double from the
// number that the user wrote. Computed from float32, 1 - 0.999 would have a relative error of
// 1.3e-5, which would be visible in every step.
double Decimal(float x) {
  for (double scale = 1e3; scale < 1e10; scale *= 10.0) {
    const double decimal = std::round(static_cast<double>(x) * scale) / scale;
    if (static_cast<float>(decimal) == x) return decimal;
  }
  return x;
}

float OneMinus(float beta) { return static_cast<float>(1.0 - Decimal(beta)); }

auto PickStep(OptimizerKind kind, OptimizerFlags flags, const C& c) {
  return WithFormula(kind, flags, c.power, [](auto tag) {
    using Formula = typename decltype(tag)::Formula;
    if constexpr (formulas::kIsRowwise<Formula>) {
      return &RowwiseStep;
    } else {
      return &Step<Formula>;
    }
  });
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
    {"catch_up", &OptimizerFlags::catch_up,
     [](OptimizerKind k) { return k != OptimizerKind::kFtrl && k != OptimizerKind::kLion; }},
};

DYNEMB_CLONES bool AllFiniteBits(const float* g, int64_t dim) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < dim; ++i) bad |= formulas::IsFinite(g[i]) ? 0u : 1u;
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
  // The power is arbitrary: it does not change Ftrl's states.
  std::vector<int64_t> widths =
      WithFormula(kind, flags, /*power=*/0.5f, [dim](auto tag) -> std::vector<int64_t> {
        using Formula = typename decltype(tag)::Formula;
        if constexpr (formulas::kIsRowwise<Formula>) {
          return {1};
        } else {
          return std::vector<int64_t>(Formula::kStates, dim);
        }
      });
  if (flags.catch_up) widths.push_back(1);
  return widths;
}

OptimizerCoefficients CoefficientsOf(OptimizerKind kind, const Hyper& h) {
  C c{};
  c.learning_rate = h.learning_rate;
  c.decay = h.weight_decay;
  c.epsilon = h.epsilon;
  c.momentum = h.momentum;
  c.beta_1 = h.beta_1;
  c.beta_2 = h.beta_2;
  // Only lion.py casts to float32 before it subtracts.
  const bool lion = kind == OptimizerKind::kLion;
  c.one_minus_beta_1 = lion ? 1.0f - h.beta_1 : OneMinus(h.beta_1);
  c.one_minus_beta_2 = lion ? 1.0f - h.beta_2 : OneMinus(h.beta_2);
  c.alpha = formulas::Alpha(kind, h);
  c.l1 = h.l1;
  c.shrinkage = 2.0f * h.l2_shrinkage;
  c.quadratic = 2.0f * (h.l2 + h.ftrl_beta / (2.0f * h.learning_rate));
  c.power = -h.learning_rate_power;
  return c;
}

bool AllFinite(const float* g, int64_t dim) { return AllFiniteBits(g, dim); }

RowOptimizer::RowOptimizer(OptimizerKind kind, OptimizerFlags flags, const Hyper& hyper,
                           int64_t dim)
    : kind_(kind),
      flags_(flags),
      coefficients_(CoefficientsOf(kind, hyper)),
      dim_(dim),
      step_(PickStep(kind, flags, coefficients_)) {}

}  // namespace dynemb
