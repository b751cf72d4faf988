// CatchUp: what the steps without a gradient do to a row, for optimizers with the flag `catch_up`.
//
// A dense optimizer updates every row in every step: without a gradient, moments decay, momentum
// moves the vector on, and weights decay. A table updates the rows that have a gradient. With
// `catch_up`, a row gets the effect of the steps that it has missed when it is next read, written
// or saved, and is then the row that the dense optimizer has.
//
// Steps of a table are numbered. The first number of a state is the tick at which the first step
// began (Start), so that steps of a state that the table has later, in this process or in one that
// has loaded its rows, have greater numbers. The last float of a row's state, its *mark*, is the
// number of the last step that the row has, modulo 2^24, which float32 represents exactly. A row is
// *behind* if the table has had later steps. A new row is not behind: the steps before it existed
// do not change it.
//
// A row that is k steps behind gets the first min(k, J) of them one by one, with the formula of
// the optimizer and a gradient of zero, so that they have the bits of the dense optimizer. J is
// the number of steps after which the rest of the drift is below 2^-26 of all of it: the terms of
// the drift decrease as the powers of
//
//   momentum          SGD and RMSprop with momentum
//   β1 / sqrt(β2)     Adam (β1 with amsgrad)
//   β1 / β2           Adamax
//
// If the quotient is not below 1, all steps are computed one by one. Other optimizers have no drift
// (J = 0). The other k - J steps are one multiplication of each
// state and of the vector, by their decay. The decay of the vector is exact for learning rates that
// change in each step.
//
// Steps are recorded as runs with one learning rate and consecutive iterations. A schedule makes a
// run of every step. The table therefore brings some rows up to date in each step (NeedsSweep), so
// that runs before the oldest mark can be dropped: at most kMostRuns are kept.
//
// Deltas. Every row changes in every step, and a delta has only some of them. A row is *settled* at
// a tick if it has had J steps since its last update: later steps only multiply its vector and its
// state by factors that are the same for all settled rows. A delta has the rows that were updated,
// and those that were not settled at the watermark before (Settled). A reader of the chain computes
// the factors of all other rows from the record of the steps (Save).
//
// Not thread-safe; the table's lock protects it. Bring may run concurrently on different rows.
#ifndef DYNEMB_TABLE_CATCH_UP_H_
#define DYNEMB_TABLE_CATCH_UP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/catch_up_view.h"
#include "cc/table/exec.h"
#include "cc/table/optimizer.h"
#include "cc/table/row.h"
#include "cc/table/status.h"
#include "cc/table/table_options.h"
#include "cc/table/types.h"

namespace dynemb {

class CatchUp {
 public:
  static constexpr size_t kMostRuns = size_t{1} << 16;

  // Disabled: no row is ever behind.
  CatchUp() = default;
  // For the rows of a table with this state; disabled unless the state belongs to an optimizer with
  // the flag `catch_up`.
  CatchUp(const StateSpec& spec, int64_t dim);

  bool enabled() const { return enabled_; }
  // Whether a row may be behind.
  bool active() const { return step_ != first_; }
  // The number of the last step, and its tick (0: there was none).
  uint64_t step() const { return step_; }
  Tick last_tick() const { return last_tick_; }
  // The marks of a row that has all steps, and of one that has the next step, too.
  float mark() const { return CatchUpView::MarkOf(step_); }
  float next_mark() const { return CatchUpView::MarkOf(step_ + 1); }

  // Whether the row with this state is behind.
  bool IsBehind(const float* state) const { return Missed(state) != 0; }
  // Gives the steps that it has missed to a row, or to a copy of it.
  void Bring(float* vector, float* state) const;
  // Bring, for n copies of rows of the layout: vectors [n, dim], of its dtype, and state.
  void BringColumns(Exec& exec, const RowLayout& layout, size_t n, void* vectors,
                    float* state) const;

  // Whether steps with these hyperparameters may follow the recorded ones: only the learning rate
  // and the iteration may differ. Otherwise all rows have to be brought up to date before Restart.
  // `nesterov` is a flag that the state does not depend on.
  bool Continues(const Hyper& hyper, bool nesterov) const;
  // Begins the numbers of steps, if there was none. The caller marks all rows: none is behind.
  void Start(Tick tick) { step_ = first_ = tick; }
  // Forgets all steps, except their number. No row is behind.
  void Restart(const Hyper& hyper, bool nesterov);
  // Makes room, so that the next Record does not fail.
  void Reserve();
  // Records the table's next step.
  void Record(const Hyper& hyper, uint64_t iteration, Tick tick);

  // Whether rows have to be brought up to date so that runs can be dropped, and the share of all
  // rows that each step has to bring.
  bool NeedsSweep() const {
    return runs_.size() > kMostRuns / 2 || step_ - first_ > CatchUpView::kMostSpan / 2;
  }
  static constexpr uint64_t kSweepSteps = kMostRuns / 8;
  // Drops the runs that end at `step` or before: no row lacks a step of theirs.
  void Forget(uint64_t step);
  // Drops all runs: no row lacks a step.
  void ForgetAll();
  // The tick of the last step that was dropped, or a later one.
  Tick forgotten() const { return forgotten_; }

  // Notes a watermark, at which there is a cut that a delta may follow.
  void NoteCut(Tick watermark);
  // A tick such that all rows that were not updated after it were settled at `since`, or 0. It is
  // `since` if rows do not drift, and 0 if no watermark up to `since` is known.
  Tick Settled(Tick since) const;

  // The record, for files (docs/file_format.md):
  //
  //   step(); the number of the step before the first one saved; 1 if the flag `nesterov` is set,
  //   otherwise 0; the hyperparameters, as in Hyper; the factors by which a step multiplies each of
  //   three states of a settled row; then for each run its number of steps, its learning rate, and
  //   its first iteration
  //
  // It has the steps after `since`, which is not before forgotten(); perhaps also some before, if
  // `since` is not the watermark of a cut or of a loaded snapshot. It has none if `since` is 0: the
  // rows that a cut of all rows saves are not behind. Empty if disabled.
  std::vector<double> Save(Tick since) const;
  // The record of all steps that a row may lack.
  std::vector<double> SaveAll() const;
  // A record of Save, for rows with this state. InvalidArgument if it is none.
  static Status Parse(const std::vector<double>& saved, const StateSpec& spec, int64_t dim,
                      Tick tick, CatchUp* parsed);
  // The last step of the record that was loaded last; 0 if there was none.
  uint64_t loaded() const { return loaded_; }
  void set_loaded(uint64_t step) { loaded_ = step; }
  // Leaves the steps up to this one out of a record that Parse has returned.
  void LeaveOut(uint64_t step) { first_ = std::max(first_, std::min(step, step_)); }
  // Whether `later` has all steps after step(), and at least one, and continues this record.
  bool IsExtendedBy(const CatchUp& later) const;
  void Extend(const CatchUp& later);
  // The mark of a row that has no recorded step.
  float first_mark() const { return CatchUpView::MarkOf(first_); }

  // For code that gives rows their steps itself; valid until the record changes. The optimizer
  // kind() with flags() steps the rows.
  CatchUpView View() const;
  OptimizerKind kind() const { return kind_; }
  OptimizerFlags flags() const { return flags_; }
  // The runs of one record are numbered from 0 on. They do not change, but runs are added at the
  // end, and dropped at the beginning: View().runs[0] has the number dropped(). The number of a
  // record is unique in the process.
  uint64_t record() const { return record_; }
  uint64_t dropped() const { return dropped_; }

 private:
  static constexpr size_t kAlphas = CatchUpView::kAlphas;
  static constexpr size_t kMostDrift = size_t{1} << 14;  // a larger J: rows never settle
  static constexpr size_t kMostCuts = 1024;

  uint64_t first_of_runs() const { return runs_.empty() ? step_ + 1 : runs_.front().first; }
  uint64_t Missed(const float* state) const {
    return CatchUpView::MissedOf(state[state_width_ - 1], step_, first_of_runs());
  }
  void Add(float learning_rate, uint64_t iteration, uint64_t steps, Tick tick);
  // The record of the steps after `before`, of the runs from `run` on.
  std::vector<double> SaveRuns(uint64_t before, size_t run) const;

  bool enabled_ = false;
  OptimizerKind kind_ = OptimizerKind::kSgd;
  OptimizerFlags flags_{};
  int64_t dim_ = 0;
  int64_t state_width_ = 0;
  Hyper hyper_{};              // without learning_rate and iteration
  uint64_t bound_ = 0;         // J
  std::vector<double> rates_;  // by which each state is multiplied in a step
  std::vector<float> zeros_;   // a gradient
  RowOptimizer optimizer_{OptimizerKind::kSgd, {}, {}, 0};
  uint64_t step_ = 0;
  uint64_t first_ = 0;  // no row lacks this step
  uint64_t loaded_ = 0;
  Tick last_tick_ = 0;
  Tick forgotten_ = 0;
  uint64_t record_ = 0;
  uint64_t dropped_ = 0;
  std::vector<StepRun> runs_;  // of the steps in (first_, step_]; the first may begin before
  // OptimizerCoefficients::alpha of step s at s % kAlphas, for the last steps.
  std::vector<float> alphas_;
  uint64_t alphas_from_ = 1;  // the first step whose alpha is known
  // The ticks of the last J steps: the tick of step s at s % J. Only steps that this table has
  // taken since the last Restart count (num_ticks_), not loaded ones, which have one tick in
  // common.
  std::vector<Tick> ticks_;
  uint64_t num_ticks_ = 0;
  // The last watermarks, oldest first; Settled of each, and the last step before it.
  struct CutTick {
    Tick watermark;
    Tick settled;
    uint64_t step;
  };
  std::vector<CutTick> cuts_;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_CATCH_UP_H_
