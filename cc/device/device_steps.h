// DeviceSteps: a copy of a table's CatchUp in a device's memory.
//
//   CatchUpView, which points to what follows
//   alphas        [CatchUpView::kAlphas], if the optimizer has them
//   runs          [capacity]: the runs with numbers from base_ on (CatchUp::dropped)
//
// A step adds an alpha, and perhaps a run. When there is no room for another run, the copy is
// replaced by one without the runs that have been dropped. It is larger if the others fill half of
// the memory.
#ifndef DYNEMB_DEVICE_DEVICE_STEPS_H_
#define DYNEMB_DEVICE_DEVICE_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cc/table/catch_up.h"
#include "cc/table/status.h"

namespace dynemb {

template <class Device>
class DeviceSteps {
 public:
  // The copy, in device memory.
  const CatchUpView* view() const { return reinterpret_cast<const CatchUpView*>(memory_.data()); }

  // Makes the copy equal to `steps`, with room for another run. Then the next call, after one
  // CatchUp::Record, needs no memory. `work` is a session, and a DeviceTable::Work. If memory runs
  // out, nothing has changed.
  template <class Work>
  Status Copy(Device& device, Work& work, const CatchUp& steps) {
    const CatchUpView from = steps.View();
    const uint64_t end = steps.dropped() + from.num_runs;
    const bool has_alphas = from.alphas != nullptr;
    const bool is_new = record_ != steps.record();
    // A step needs room for its run. It is made before the step, when there is nothing to copy.
    const bool has_all = !is_new && step_ == from.step;
    const bool whole = is_new || end + (has_all ? 1 : 0) > base_ + capacity_;
    if (has_all && !whole) return work.status();
    if (whole && (2 * (from.num_runs + 1) > capacity_ || has_alphas != has_alphas_)) {
      const size_t capacity = std::max(kLeastRuns, 4 * from.num_runs);
      const size_t bytes = RunsAt(has_alphas) + capacity * sizeof(StepRun);
      Range larger;
      DYNEMB_RETURN_IF_ERROR(larger.Reserve(device, bytes));
      DYNEMB_RETURN_IF_ERROR(larger.Commit(bytes));
      DYNEMB_RETURN_IF_ERROR(work.status());
      work.Changes();
      memory_ = std::move(larger);
      capacity_ = capacity;
      has_alphas_ = has_alphas;
    }
    DYNEMB_RETURN_IF_ERROR(work.status());
    work.Changes();
    if (whole) {
      record_ = steps.record();
      base_ = copied_ = steps.dropped();
      step_ = 0;
    }
    const uint64_t first = std::max(copied_, steps.dropped());
    auto* const runs = reinterpret_cast<StepRun*>(memory_.data() + RunsAt(has_alphas_));
    Put(work, runs + (first - base_), from.runs + (first - steps.dropped()),
        (end - first) * sizeof(StepRun));
    if (has_alphas_) PutAlphas(work, from);
    CatchUpView view = from;
    view.runs = runs + (steps.dropped() - base_);
    view.alphas = has_alphas_ ? alphas() : nullptr;
    Put(work, memory_.data(), &view, sizeof(view));
    copied_ = end;
    step_ = from.step;
    work.Settled();
    return work.status();
  }

 private:
  using Range = typename Device::Range;

  static constexpr size_t kLeastRuns = 1024;
  static constexpr size_t kAlphasAt = (sizeof(CatchUpView) + 15) / 16 * 16;
  static constexpr size_t RunsAt(bool has_alphas) {
    return kAlphasAt + (has_alphas ? CatchUpView::kAlphas * sizeof(float) : 0);
  }

  float* alphas() const { return reinterpret_cast<float*>(memory_.data() + kAlphasAt); }

  // Small copies do not wait.
  template <class Work>
  static void Put(Work& work, void* to, const void* from, size_t bytes) {
    constexpr size_t kSmall = size_t{1} << 12;
    if (bytes == 0) return;
    if (bytes > kSmall) {
      work.Copy(to, from, bytes);
      return;
    }
    char* const pinned = work.template Pinned<char>(bytes);
    if (pinned == nullptr) return;
    memcpy(pinned, from, bytes);
    work.Copy(to, pinned, bytes);
  }

  // The alphas of the steps after step_ that are known.
  template <class Work>
  void PutAlphas(Work& work, const CatchUpView& from) {
    constexpr uint64_t kAlphas = CatchUpView::kAlphas;
    const uint64_t kept = from.step + 1 - std::min(from.step + 1, kAlphas);
    for (uint64_t s = std::max({step_ + 1, from.alphas_from, kept}); s <= from.step;) {
      const uint64_t at = s % kAlphas;
      const uint64_t n = std::min(from.step + 1 - s, kAlphas - at);
      Put(work, alphas() + at, from.alphas + at, n * sizeof(float));
      s += n;
    }
  }

  Range memory_;
  size_t capacity_ = 0;
  bool has_alphas_ = false;
  uint64_t record_ = 0;
  uint64_t base_ = 0;
  uint64_t copied_ = 0;  // the number of the first run that has not been copied
  uint64_t step_ = 0;    // the last one that the copy has
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_STEPS_H_
