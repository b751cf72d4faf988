// The number that selects the random bits for rounding an update of 16-bit vectors (codec.h).
//
// It depends on the update: on the step of an optimizer, or on the number of additions that the
// table has had. It does not depend on ticks, nor on the number of batches in the process, so reads
// between two updates do not change any bit of the result of training.
#ifndef DYNEMB_TABLE_ROUNDING_H_
#define DYNEMB_TABLE_ROUNDING_H_

#include <cstdint>

#include "cc/table/key.h"

namespace dynemb {

// The kinds of update, each with its own count of steps.
enum class Update : uint8_t { kOptimizer, kConstraint, kAddition, kCatchUp };

// The `step` argument of StoreVectorStochastic. It differs between updates of a row that must not
// share random bits: between steps, between the kinds of update in a step, and between the tasks of
// a step for the same table. The mixes are bijections, so two updates can only collide if both
// their steps and their kinds or tasks differ.
inline uint64_t RoundingStep(Update update, uint64_t step, uint64_t task = 0) {
  return MixKey(MixKey(step) + 4 * task + static_cast<uint64_t>(update));
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROUNDING_H_
