// CatchUpView: what the code that gives rows their missed steps needs to know of a CatchUp; for
// host and device code. catch_up.h has the definitions.
#ifndef DYNEMB_TABLE_CATCH_UP_VIEW_H_
#define DYNEMB_TABLE_CATCH_UP_VIEW_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cc/table/optimizer.h"
#include "cc/table/optimizer_formulas.h"
#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb {

// Consecutive steps with one learning rate and consecutive iterations.
struct StepRun {
  uint64_t first;
  uint64_t iteration;  // of step `first`
  float learning_rate;
  Tick tick;         // of step `first`
  double log_decay;  // of the vector, by all steps before `first`
};

struct CatchUpView {
  static constexpr uint64_t kModulus = uint64_t{1} << 24;
  static constexpr uint64_t kMostSpan = kModulus / 2;  // steps that marks can tell apart
  static constexpr size_t kAlphas = size_t{1} << 14;
  static constexpr int kMostRates = 3;

  // The factors by which steps in which a row only decays multiply its vector and each of its
  // states.
  struct Tail {
    float decay = 1.0f;
    float factors[kMostRates] = {1.0f, 1.0f, 1.0f};
  };

  OptimizerKind kind;
  OptimizerFlags flags;
  Hyper hyper;  // without learning_rate and iteration
  OptimizerCoefficients coefficients;
  uint64_t step;   // the last one
  uint64_t first;  // the first one of the runs; step + 1 if there is none
  uint64_t bound;  // J
  int num_rates;
  double rates[kMostRates];  // by which each state is multiplied in a step
  const StepRun* runs;       // [num_runs]
  size_t num_runs;
  const float* alphas;   // [kAlphas] alpha of step s at s % kAlphas; null: the formula has none
  uint64_t alphas_from;  // the first step whose alpha is known

  DYNEMB_HD static float MarkOf(uint64_t step) { return static_cast<float>(step % kModulus); }
  DYNEMB_HD float mark() const { return MarkOf(step); }

  // The number of steps up to `step` that a row with this mark lacks, if no step before `first` is
  // known.
  DYNEMB_HD static uint64_t MissedOf(float mark, uint64_t step, uint64_t first) {
    if (!(mark >= 0 && mark < static_cast<float>(kModulus))) return 0;
    const uint64_t missed = (step - static_cast<uint64_t>(mark)) % kModulus;
    if (missed > kMostSpan) return 0;  // the row has the running step already
    return missed < step + 1 - first ? missed : step + 1 - first;
  }
  DYNEMB_HD uint64_t Missed(float mark) const { return MissedOf(mark, step, first); }

  // A number that is different for different formulas of a step (WithFormula).
  static uint32_t FormulaOf(OptimizerKind kind, OptimizerFlags flags) {
    return static_cast<uint32_t>(kind) << 4 | (flags.nesterov ? 1u : 0u) |
           (flags.amsgrad ? 2u : 0u) | (flags.centered ? 4u : 0u) | (flags.momentum ? 8u : 0u);
  }

  // Calls fn(coefficients) for each step that a row that lacks `missed` > 0 steps gets one by one.
  template <class Fn>
  DYNEMB_HD void ForSingleSteps(uint64_t missed, const Fn& fn) const {
    uint64_t s = step - missed;  // the last one that the row has
    const uint64_t end = s + (missed < bound ? missed : bound);
    if (s == end) return;
    size_t run = RunOf(s + 1);
    OptimizerCoefficients c = coefficients;
    while (s < end) {
      ++s;
      while (run + 1 < num_runs && runs[run + 1].first <= s) ++run;
      c.learning_rate = runs[run].learning_rate;
      c.alpha = AlphaOf(runs[run], s);
      fn(c);
    }
  }

  // The other steps of that row.
  DYNEMB_HD Tail TailOf(uint64_t missed) const {
    Tail tail;
    if (missed <= bound) return tail;
    const uint64_t steps = missed - bound;
    tail.decay = static_cast<float>(exp(LogDecay(step) - LogDecay(step - steps)));
    for (int k = 0; k < num_rates; ++k) {
      tail.factors[k] = static_cast<float>(pow(rates[k], static_cast<double>(steps)));
    }
    return tail;
  }

  // log of the decay of the vector by all steps up to this one, from the first run on.
  DYNEMB_HD double LogDecay(uint64_t until) const {
    if (hyper.weight_decay == 0.0f || num_runs == 0) return 0.0;
    if (until < first) return runs[0].log_decay;
    const StepRun& run = runs[RunOf(until)];
    const double shrinks = static_cast<double>(hyper.weight_decay) * run.learning_rate;
    return run.log_decay + static_cast<double>(until + 1 - run.first) * log1p(-shrinks);
  }

  DYNEMB_HD static Hyper HyperOf(Hyper hyper, const StepRun& run, uint64_t step) {
    hyper.learning_rate = run.learning_rate;
    hyper.iteration = static_cast<float>(run.iteration + (step - run.first));
    return hyper;
  }

 private:
  // The run of a step, which is in a run.
  DYNEMB_HD size_t RunOf(uint64_t of) const {
    size_t low = 0, high = num_runs;  // runs[low].first <= of; runs[high], if any, is later
    while (low + 1 < high) {
      const size_t middle = low + (high - low) / 2;
      (runs[middle].first <= of ? low : high) = middle;
    }
    return low;
  }
  // Computing an alpha takes as long as a step of a row.
  DYNEMB_HD float AlphaOf(const StepRun& run, uint64_t of) const {
    if (alphas == nullptr) return 0.0f;
    if (of >= alphas_from && of + kAlphas > step) return alphas[of % kAlphas];
    return formulas::Alpha(kind, HyperOf(hyper, run, of));
  }
};
static_assert(std::is_trivially_copyable_v<CatchUpView>, "views are copied to the device");
static_assert(std::is_trivially_copyable_v<StepRun>, "runs are copied to the device");

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CATCH_UP_VIEW_H_
