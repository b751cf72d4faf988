// The formulas of the optimizers, for one element of a row, and the selection of a formula; for
// host and device code.
//
// <Optimizer>::Update(c, v, g, s, stride) takes the weight v (after weight decay), its gradient g
// and its state. The state has kStates numbers, in the order of StateWidths (optimizer.h); the k-th
// is s[k * stride]. Update changes the state and returns the new weight. RowwiseAdagrad has other
// functions.
//
// Each formula is transcribed from update_step in keras/src/optimizers/<name>.py of Keras 3.15,
// with the same order of float32 operations.
#ifndef DYNEMB_TABLE_OPTIMIZER_FORMULAS_H_
#define DYNEMB_TABLE_OPTIMIZER_FORMULAS_H_

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cc/table/float_bits.h"
#include "cc/table/optimizer.h"
#include "cc/table/portability.h"

namespace dynemb::formulas {

DYNEMB_HD DYNEMB_INLINE float Sqrt(float x) { return __builtin_sqrtf(x); }
DYNEMB_HD DYNEMB_INLINE float Square(float x) { return x * x; }
DYNEMB_HD DYNEMB_INLINE bool IsFinite(float x) {
  return (FloatBits(x) & 0x7F800000u) != 0x7F800000u;
}
// tf.maximum: NaN if x or y is.
DYNEMB_HD DYNEMB_INLINE float Max(float x, float y) { return x > y || x != x ? x : y; }
// tf.sign: NaN stays NaN, and zero stays zero.
DYNEMB_HD DYNEMB_INLINE float Sign(float x) {
  const uint32_t one = FloatBits(1.0f) | (FloatBits(x) & 0x80000000u);
  return BitsToFloat(Select(__builtin_fabsf(x) > 0.0f, one, FloatBits(x)));
}
// tf.clip_by_value(x, -bound, bound): NaN stays NaN.
DYNEMB_HD DYNEMB_INLINE float Clip(float x, float bound) {
  const float below = x > bound ? bound : x;
  return below < -bound ? -bound : below;
}

// BaseOptimizer._apply_weight_decay: applied before the update, in every optimizer, at the full
// learning rate. Must not be called if the decay is zero, which means no decay; an infinite weight
// would become NaN, as in Keras.
DYNEMB_HD DYNEMB_INLINE float DecayedWeight(const OptimizerCoefficients& c, float v) {
  return v - v * c.decay * c.learning_rate;
}

// 1 - beta^step from float32 numbers, rounded where Keras rounds: the error of the first steps is
// part of Keras's result.
DYNEMB_HD DYNEMB_INLINE float BiasCorrection(float beta, float step) {
  return 1.0f - static_cast<float>(pow(static_cast<double>(beta), static_cast<double>(step)));
}

// OptimizerCoefficients::alpha.
DYNEMB_HD DYNEMB_INLINE float Alpha(OptimizerKind kind, const Hyper& h) {
  const float first = BiasCorrection(h.beta_1, h.iteration);
  if (kind != OptimizerKind::kAdam) return first;
  return h.learning_rate * Sqrt(BiasCorrection(h.beta_2, h.iteration)) / first;
}

// sgd.py without momentum
struct Sgd {
  static constexpr int kStates = 0;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float*, int64_t) {
    return v - g * c.learning_rate;
  }
};

// sgd.py with momentum
template <bool kNesterov>
struct SgdMomentum {
  static constexpr int kStates = 1;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t) {
    const float step = g * c.learning_rate;
    const float momentum = s[0] * c.momentum - step;
    s[0] = momentum;
    return v + (kNesterov ? momentum * c.momentum - step : momentum);
  }
};

// adagrad.py
struct Adagrad {
  static constexpr int kStates = 1;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t) {
    const float accumulator = s[0] + Square(g);
    s[0] = accumulator;
    return v - c.learning_rate * g / Sqrt(accumulator + c.epsilon);
  }
};

// adam.py; adamw.py differs only in its default weight decay.
template <bool kAmsgrad>
struct Adam {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t stride) {
    const float momentum = s[0] + (g - s[0]) * c.one_minus_beta_1;
    float velocity = s[stride] + (Square(g) - s[stride]) * c.one_minus_beta_2;
    s[0] = momentum;
    s[stride] = velocity;
    if (kAmsgrad) {
      velocity = Max(s[2 * stride], velocity);
      s[2 * stride] = velocity;
    }
    return v - momentum * c.alpha / (Sqrt(velocity) + c.epsilon);
  }
};

// adamax.py
struct Adamax {
  static constexpr int kStates = 2;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t stride) {
    const float momentum = s[0] + (g - s[0]) * c.one_minus_beta_1;
    const float norm = Max(c.beta_2 * s[stride], __builtin_fabsf(g));
    s[0] = momentum;
    s[stride] = norm;
    return v - c.learning_rate * momentum / (c.alpha * (norm + c.epsilon));
  }
};

// rmsprop.py
template <bool kMomentum, bool kCentered>
struct Rmsprop {
  static constexpr int kStates = 1 + (kMomentum ? 1 : 0) + (kCentered ? 1 : 0);
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t stride) {
    const float velocity = c.beta_1 * s[0] + c.one_minus_beta_1 * Square(g);
    s[0] = velocity;
    float denominator = velocity;
    if (kCentered) {
      float* average_gradient = s + (kMomentum ? 2 : 1) * stride;
      const float average = c.beta_1 * *average_gradient + c.one_minus_beta_1 * g;
      *average_gradient = average;
      denominator -= Square(average);
    }
    float increment = c.learning_rate * g / Sqrt(denominator + c.epsilon);
    if (kMomentum) {
      increment += c.momentum * s[stride];
      s[stride] = increment;
    }
    return v - increment;
  }
};

// adadelta.py
struct Adadelta {
  static constexpr int kStates = 2;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t stride) {
    const float accumulated = c.beta_1 * s[0] + c.one_minus_beta_1 * Square(g);
    const float delta = -(Sqrt(s[stride] + c.epsilon) * g / Sqrt(accumulated + c.epsilon));
    s[0] = accumulated;
    s[stride] = c.beta_1 * s[stride] + c.one_minus_beta_1 * Square(delta);
    return v + c.learning_rate * delta;
  }
};

// ftrl.py. kSqrt is for learning_rate_power == -0.5, the usual value: powf is many times slower,
// and is not a SIMD instruction.
template <bool kSqrt>
struct Ftrl {
  static constexpr int kStates = 2;
  DYNEMB_HD static DYNEMB_INLINE float Power(const OptimizerCoefficients& c, float x) {
    return kSqrt ? Sqrt(x) : powf(x, c.power);
  }
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t stride) {
    const float accumulator = s[0] + Square(g);
    const float after = Power(c, accumulator);
    const float sigma = (after - Power(c, s[0])) / c.learning_rate;
    const float linear = s[stride] + (g + c.shrinkage * v - sigma * v);
    s[0] = accumulator;
    s[stride] = linear;
    return (Clip(linear, c.l1) - linear) / (after / c.learning_rate + c.quadratic);
  }
};

// lion.py
struct Lion {
  static constexpr int kStates = 1;
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t) {
    const float momentum = s[0];
    s[0] = momentum * c.beta_2 + g * c.one_minus_beta_2;
    return v - c.learning_rate * Sign(momentum * c.beta_1 + g * c.one_minus_beta_1);
  }
};

// The mean of the squares. Partial sums are added in an order that depends on dim only, so the bits
// are the same for any SIMD width.
DYNEMB_HD DYNEMB_INLINE float MeanSquare(const float* g, int64_t dim) {
  constexpr int64_t kLanes = 16;
  float sum = 0.0f;
  int64_t i = 0;
  if (dim >= kLanes) {
    float partial[kLanes] = {};
    for (; i + kLanes <= dim; i += kLanes) {
      for (int64_t k = 0; k < kLanes; ++k) partial[k] += Square(g[i + k]);
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t k = 0; k < width; ++k) partial[k] += partial[k + width];
    }
    sum = partial[0];
  }
  for (; i < dim; ++i) sum += Square(g[i]);
  return sum / static_cast<float>(dim);
}

// EXACT_ROWWISE_ADAGRAD of FBGEMM (fbgemm_gpu, rowwise_adagrad in codegen/genscript/optimizers.py):
// the mean of the squared gradients is added to the row's one accumulator, and epsilon is added
// outside the square root. Weight decay is Keras's. It is the only formula that combines columns:
// Multiplier is called once per row, and updates the accumulator.
struct RowwiseAdagrad {
  DYNEMB_HD static DYNEMB_INLINE float Multiplier(const OptimizerCoefficients& c, const float* g,
                                                  int64_t dim, float* accumulator) {
    const float sum = *accumulator + MeanSquare(g, dim);
    *accumulator = sum;
    return c.learning_rate / (Sqrt(sum) + c.epsilon);
  }
  DYNEMB_HD static DYNEMB_INLINE float Update(float multiplier, float v, float g) {
    return v - multiplier * g;
  }
};

template <class Formula>
inline constexpr bool kIsRowwise = std::is_same_v<Formula, RowwiseAdagrad>;

}  // namespace dynemb::formulas

namespace dynemb {

template <class T>
struct FormulaTag {
  using Formula = T;
};

// Calls fn(FormulaTag<Formula>{}) with the formula of an optimizer, so that code is compiled for
// each formula, and selected when a step begins. `power` is OptimizerCoefficients::power.
template <class Fn>
auto WithFormula(OptimizerKind kind, OptimizerFlags flags, float power, const Fn& fn) {
  switch (kind) {
    case OptimizerKind::kSgd:
      if (!flags.momentum) return fn(FormulaTag<formulas::Sgd>{});
      return flags.nesterov ? fn(FormulaTag<formulas::SgdMomentum<true>>{})
                            : fn(FormulaTag<formulas::SgdMomentum<false>>{});
    case OptimizerKind::kAdagrad:
      return fn(FormulaTag<formulas::Adagrad>{});
    case OptimizerKind::kAdam:
      return flags.amsgrad ? fn(FormulaTag<formulas::Adam<true>>{})
                           : fn(FormulaTag<formulas::Adam<false>>{});
    case OptimizerKind::kAdamax:
      return fn(FormulaTag<formulas::Adamax>{});
    case OptimizerKind::kRmsprop:
      if (flags.momentum) {
        return flags.centered ? fn(FormulaTag<formulas::Rmsprop<true, true>>{})
                              : fn(FormulaTag<formulas::Rmsprop<true, false>>{});
      }
      return flags.centered ? fn(FormulaTag<formulas::Rmsprop<false, true>>{})
                            : fn(FormulaTag<formulas::Rmsprop<false, false>>{});
    case OptimizerKind::kAdadelta:
      return fn(FormulaTag<formulas::Adadelta>{});
    case OptimizerKind::kFtrl:
      return power == 0.5f ? fn(FormulaTag<formulas::Ftrl<true>>{})
                           : fn(FormulaTag<formulas::Ftrl<false>>{});
    case OptimizerKind::kLion:
      return fn(FormulaTag<formulas::Lion>{});
    case OptimizerKind::kRowwiseAdagrad:
      break;
  }
  return fn(FormulaTag<formulas::RowwiseAdagrad>{});
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_OPTIMIZER_FORMULAS_H_
