// Optimizers that update one row in place: its vector, and the state that follows it.
//
// Contract:
//
// - The float32 vector of a row that gets a gradient in every step is the one that the Keras 3.15
//   optimizer of the same name computes, including weight decay (tests/cc/optimizer_test.cc
//   compares 200 steps). kRowwiseAdagrad is FBGEMM's.
// - As in every sparse optimizer, a row without a gradient in a step is not changed: neither its
//   moments nor its weights decay. With the flag `catch_up`, catch_up.h makes up for these steps.
// - NaN and infinity in gradients go through the formulas as in Keras.
// - The caller loads and stores 16-bit vectors (codec.h).
// - If it is built without contraction (-ffp-contract=off), the result has the same bits on any
//   machine, except for kFtrl with a learning_rate_power other than -0.5, which calls powf.
#ifndef DYNEMB_TABLE_OPTIMIZER_H_
#define DYNEMB_TABLE_OPTIMIZER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/table/status.h"

namespace dynemb {

// AdamW is kAdam: with the same hyperparameters, Keras's two classes compute the same.
enum class OptimizerKind : uint8_t {
  kSgd,
  kAdagrad,
  kAdam,
  kAdamax,
  kRmsprop,
  kAdadelta,
  kFtrl,
  kLion,
  kRowwiseAdagrad
};

// The numbers that may change from step to step, in the order of the operator's `hyper` input
// (docs/operators.md).
struct Hyper {
  float learning_rate = 0.001f;
  float beta_1 = 0.9f;  // rho of kAdadelta and kRmsprop
  float beta_2 = 0.999f;
  float epsilon = 1e-7f;
  float momentum = 0.0f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float l2_shrinkage = 0.0f;
  float ftrl_beta = 0.0f;
  float learning_rate_power = -0.5f;
  float weight_decay = 0.0f;
  float iteration = 1.0f;  // the number of the step that is applied, from 1
};
constexpr int kHyperSize = 12;
static_assert(sizeof(Hyper) == kHyperSize * sizeof(float), "Hyper is the operator's float[12]");

// Options that select the formula and the state. They cannot change between steps.
struct OptimizerFlags {
  bool nesterov = false;  // kSgd; without `momentum` it has no effect, as in Keras
  bool amsgrad = false;   // kAdam
  bool centered = false;  // kRmsprop
  bool momentum = false;  // kSgd, kRmsprop: keep a momentum per element
  bool catch_up = false;  // all except kFtrl and kLion: rows make up for missed steps (catch_up.h)
};

// Names are sgd, adagrad, adam, adamw, adamax, rmsprop, adadelta, ftrl, lion, rowwise_adagrad.
// Flags are the fields of OptimizerFlags. An unknown name or flag, or a flag that the optimizer
// does not have, is an InvalidArgument that names it.
Status ParseOptimizer(const std::string& name, const std::vector<std::string>& flags,
                      OptimizerKind* kind, OptimizerFlags* parsed);

// The number of floats per row of each state, in their order in the row (names are Keras's):
//
// - kSgd: momentum (only with flag `momentum`)
// - kAdagrad: accumulator
// - kAdam: momentum, velocity, velocity_hat (only with flag `amsgrad`)
// - kAdamax: momentum, norm
// - kRmsprop: velocity, momentum (only with flag `momentum`), average_gradient (only with flag
//   `centered`)
// - kAdadelta: accumulated_grad, accumulated_delta_var
// - kFtrl: accumulator, linear
// - kLion: momentum
// - kRowwiseAdagrad: accumulator, one float
// - with the flag `catch_up`, then the row's mark (catch_up.h), one float
//
// Every other state is dim floats wide.
std::vector<int64_t> StateWidths(OptimizerKind kind, OptimizerFlags flags, int64_t dim);

// Whether none of g[0..dim) is NaN or infinite.
bool AllFinite(const float* g, int64_t dim);

// The numbers that a step's formula needs besides the row, computed once per step from Hyper.
struct OptimizerCoefficients {
  float learning_rate, decay, epsilon, momentum;
  float beta_1, one_minus_beta_1, beta_2, one_minus_beta_2;
  float alpha;      // kAdam: the bias-corrected learning rate; kAdamax: 1 - beta_1^iteration
  float l1;         // for kFtrl, like the next three
  float shrinkage;  // 2 l2_shrinkage
  float quadratic;  // 2 (l2 + ftrl_beta / (2 learning_rate))
  float power;      // -learning_rate_power
};

OptimizerCoefficients CoefficientsOf(OptimizerKind kind, const Hyper& hyper);

// One step of one optimizer. The constructor computes everything that is the same for all rows
// (bias corrections and so on). Immutable and cheap to copy; any number of threads may call Apply
// on different rows.
class RowOptimizer {
 public:
  RowOptimizer(OptimizerKind kind, OptimizerFlags flags, const Hyper& hyper, int64_t dim);

  // Updates vector[0..dim) and the state (all of StateWidths, back to back, except the mark) by
  // grad[0..dim). The three are aligned to 4 bytes and do not overlap.
  void Apply(float* vector, float* state, const float* grad) const {
    Apply(coefficients_, vector, state, grad);
  }
  // The same with the coefficients of another step.
  void Apply(const OptimizerCoefficients& c, float* vector, float* state, const float* grad) const {
    step_(c, dim_, vector, state, grad);
  }

  // The inputs of the formula of one element (optimizer_formulas.h), for code that applies it
  // itself.
  OptimizerKind kind() const { return kind_; }
  OptimizerFlags flags() const { return flags_; }
  const OptimizerCoefficients& coefficients() const { return coefficients_; }

 private:
  using Step = void (*)(const OptimizerCoefficients&, int64_t dim, float* vector, float* state,
                        const float* grad);

  OptimizerKind kind_;
  OptimizerFlags flags_;
  OptimizerCoefficients coefficients_;
  int64_t dim_;
  Step step_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_OPTIMIZER_H_
