// The optimizers' formulas, for one element of a row; for host and device code.
//
// <Optimizer>::Update(c, v, g, s, stride) takes the weight v (after weight decay), its gradient g
// and its state, whose k-th number is s[k * stride], in the order of StateWidths (optimizer.h). It
// updates the state and returns the new weight.
//
// Each is transcribed from update_step of keras/src/optimizers/<name>.py, Keras 3.15, in its order
// of float32 operations.
#ifndef DYNEMB_TABLE_OPTIMIZER_FORMULAS_H_
#define DYNEMB_TABLE_OPTIMIZER_FORMULAS_H_

#include <cmath>
#include <cstdint>

#include "cc/table/float_bits.h"
#include "cc/table/optimizer.h"
#include "cc/table/portability.h"

namespace dynemb::formulas {

DYNEMB_HD DYNEMB_INLINE float Sqrt(float x) { return __builtin_sqrtf(x); }
DYNEMB_HD DYNEMB_INLINE float Square(float x) { return x * x; }
// tf.maximum: NaN if either is.
DYNEMB_HD DYNEMB_INLINE float Max(float x, float y) { return x > y || x != x ? x : y; }
// tf.sign: NaN stays NaN and zero zero.
DYNEMB_HD DYNEMB_INLINE float Sign(float x) {
  const uint32_t one = FloatBits(1.0f) | (FloatBits(x) & 0x80000000u);
  return BitsToFloat(Select(__builtin_fabsf(x) > 0.0f, one, FloatBits(x)));
}
// tf.clip_by_value(x, -bound, bound): NaN stays.
DYNEMB_HD DYNEMB_INLINE float Clip(float x, float bound) {
  const float below = x > bound ? bound : x;
  return below < -bound ? -bound : below;
}

// BaseOptimizer._apply_weight_decay: before the update, for every optimizer, at the full learning
// rate. Not for a decay of zero, which is none (Keras would turn an infinite weight into NaN).
DYNEMB_HD DYNEMB_INLINE float DecayedWeight(const OptimizerCoefficients& c, float v) {
  return v - v * c.decay * c.learning_rate;
}

// sgd.py without momentum
struct Sgd {
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float*, int64_t) {
    return v - g * c.learning_rate;
  }
};

// sgd.py with momentum
template <bool kNesterov>
struct SgdMomentum {
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
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t stride) {
    const float accumulated = c.beta_1 * s[0] + c.one_minus_beta_1 * Square(g);
    const float delta = -(Sqrt(s[stride] + c.epsilon) * g / Sqrt(accumulated + c.epsilon));
    s[0] = accumulated;
    s[stride] = c.beta_1 * s[stride] + c.one_minus_beta_1 * Square(delta);
    return v + c.learning_rate * delta;
  }
};

// ftrl.py. kSqrt is for learning_rate_power == -0.5, the usual: powf is many times slower and no
// SIMD instruction.
template <bool kSqrt>
struct Ftrl {
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
  DYNEMB_HD static DYNEMB_INLINE float Update(const OptimizerCoefficients& c, float v, float g,
                                              float* s, int64_t) {
    const float momentum = s[0];
    s[0] = momentum * c.beta_2 + g * c.one_minus_beta_2;
    return v - c.learning_rate * Sign(momentum * c.beta_1 + g * c.one_minus_beta_1);
  }
};

// EXACT_ROWWISE_ADAGRAD of FBGEMM (fbgemm_gpu, rowwise_adagrad in codegen/genscript/optimizers.py):
// the row's one accumulator adds the mean of the squared gradients, epsilon stands outside the
// square root, and the new weight is v - multiplier * g. Weight decay is Keras's instead. Returns
// the multiplier.
DYNEMB_HD DYNEMB_INLINE float RowwiseAdagradMultiplier(const OptimizerCoefficients& c,
                                                       float mean_square, float* accumulator) {
  const float sum = *accumulator + mean_square;
  *accumulator = sum;
  return c.learning_rate / (Sqrt(sum) + c.epsilon);
}

}  // namespace dynemb::formulas

#endif  // DYNEMB_TABLE_OPTIMIZER_FORMULAS_H_
