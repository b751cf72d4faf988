// RecentSteps: the steps (requests) that have used a state of a model lately.
//
// A step that has read one table as of a state must read the others as of that state, too, even if
// the model has a newer one by then. TensorFlow does not say when a step ends, so this is a set of
// fixed size that forgets: kWays numbers for each of kSets hashes, the oldest of which a new one
// replaces. About kSets * kWays / 2 later steps have to begin before a step is likely forgotten;
// then it reads the newest state.
//
// Not thread-safe; the model's mutex protects it.
#ifndef DYNEMB_SERVING_RECENT_STEPS_H_
#define DYNEMB_SERVING_RECENT_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/hash.h"

namespace dynemb {

class RecentSteps {
 public:
  static constexpr size_t kSets = 2048, kWays = 8;

  // `step` is not 0.
  bool Has(uint64_t step) const {
    if (steps_.empty()) return false;
    const uint64_t* const set = SetOf(step);
    for (size_t way = 0; way < kWays; ++way) {
      if (set[way] == step) return true;
    }
    return false;
  }
  void Add(uint64_t step) {
    if (Has(step)) return;
    if (steps_.empty()) steps_.resize(kSets * kWays);
    uint64_t* const set = SetOf(step);
    for (size_t way = kWays - 1; way > 0; --way) set[way] = set[way - 1];
    set[0] = step;
  }

 private:
  uint64_t* SetOf(uint64_t step) { return &steps_[MixKey(step) % kSets * kWays]; }
  const uint64_t* SetOf(uint64_t step) const { return &steps_[MixKey(step) % kSets * kWays]; }

  std::vector<uint64_t> steps_;  // [kSets, kWays], the newest of a set first; 0: none
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_RECENT_STEPS_H_
