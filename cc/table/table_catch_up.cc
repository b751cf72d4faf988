#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "cc/table/number_text.h"
#include "cc/table/table.h"

namespace dynemb {

Status Table::BeginStep(Exec& exec, OptimizerFlags flags, const Hyper& hyper, Tick tick) {
  counts_step_ = catch_up_.enabled() && flags.catch_up;
  if (!counts_step_) return Status();
  if (hyper.weight_decay * hyper.learning_rate >= 1.0f) {
    return InvalidArgument("catch_up: weight_decay " + NumberText(hyper.weight_decay) +
                           " times the learning rate " + NumberText(hyper.learning_rate) +
                           " must be below 1");
  }
  if (catch_up_.step() == 0) {
    DYNEMB_RETURN_IF_ERROR(MarkAll(exec, CatchUpView::MarkOf(tick)));
    catch_up_.Start(tick);
    MarkNewRows(exec, catch_up_.mark());
  }
  DYNEMB_RETURN_IF_ERROR(MendMarks(exec));
  if (!catch_up_.active() || !catch_up_.Continues(hyper, flags.nesterov)) {
    DYNEMB_RETURN_IF_ERROR(BringAll(exec));
    catch_up_.Restart(hyper, flags.nesterov);
  }
  catch_up_.Reserve();
  DYNEMB_RETURN_IF_ERROR(CopySteps(exec, catch_up_));
  if (brought_.next_row == 0 && !catch_up_.NeedsSweep()) return Status();
  if (brought_.next_row == 0) brought_.step = catch_up_.step();
  constexpr uint64_t kLeast = 64;
  brought_.next_row =
      BringRows(exec, brought_.next_row, RowsHeld() / CatchUp::kSweepSteps + kLeast);
  DYNEMB_RETURN_IF_ERROR(Error());
  if (brought_.next_row == 0) catch_up_.Forget(brought_.step);
  return Status();
}

Status Table::MarkAll(Exec& exec, float mark) {
  marks_are_wrong_ = true;
  MarkRows(exec, mark);
  DYNEMB_RETURN_IF_ERROR(Error());
  marks_are_wrong_ = false;
  return Status();
}

void Table::EndStep(Exec& exec, const Hyper& hyper, uint64_t iteration, Tick tick) {
  if (!counts_step_) return;
  counts_step_ = false;
  catch_up_.Record(hyper, iteration, tick);
  (void)CopySteps(exec, catch_up_);  // Error reports a failure
  MarkNewRows(exec, catch_up_.mark());
}

Status Table::BringAll(Exec& exec) {
  brought_ = Brought();
  if (!catch_up_.active()) return Status();
  BringRows(exec, 0, std::numeric_limits<uint64_t>::max());
  return Error();
}

Status Table::LoadSteps(Exec& exec, const std::vector<double>& saved, Tick tick) {
  CatchUp loaded;
  DYNEMB_RETURN_IF_ERROR(CatchUp::Parse(saved, state_spec_, options_.dim, tick, &loaded));
  const uint64_t had = catch_up_.loaded();
  if (had != 0 && loaded.step() <= had) return Status();  // another part of the same snapshot
  loaded.LeaveOut(had);
  DYNEMB_RETURN_IF_ERROR(MendMarks(exec));
  if (catch_up_.NeedsSweep()) {
    DYNEMB_RETURN_IF_ERROR(BringAll(exec));
    catch_up_.ForgetAll();
  }
  // The loaded record can extend the table's record if the table has taken no step since its last
  // load. Otherwise the rows first get all steps of the table's record, and then lack the steps of
  // the loaded record.
  if (catch_up_.step() == had && catch_up_.IsExtendedBy(loaded)) {
    CatchUp extended = catch_up_;
    extended.Extend(loaded);
    DYNEMB_RETURN_IF_ERROR(CopySteps(exec, extended));
    catch_up_ = std::move(extended);
  } else {
    DYNEMB_RETURN_IF_ERROR(BringAll(exec));
    // If this fails, the rows have all steps of the present record, and their marks say nothing.
    LoseSteps();
    catch_up_.ForgetAll();
    DYNEMB_RETURN_IF_ERROR(CopySteps(exec, loaded));
    DYNEMB_RETURN_IF_ERROR(MarkAll(exec, loaded.first_mark()));
    catch_up_ = std::move(loaded);
  }
  MarkNewRows(exec, catch_up_.mark());
  return Status();
}

void Table::Export(Exec& exec, const ExportPlan& plan, TickColumns to) const {
  const size_t n = plan.rows.size();
  const bool brings = catch_up_.active() && (to.vectors != nullptr || to.state != nullptr);
  std::vector<float> own;
  if (brings && to.state == nullptr) {
    own.resize(n * static_cast<size_t>(layout().state_width));
    to.state = own.data();
  }
  if (plan.cold) {
    CopyColdRows(plan, to);
  } else {
    CopyRows(exec, plan.rows, to);
  }
  if (brings) catch_up_.BringColumns(exec, layout(), n, to.vectors, to.state);
}

}  // namespace dynemb
