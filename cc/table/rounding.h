// Which random bits an update of 16-bit vectors is rounded by (codec.h).
//
// They go by what the update is: an optimizer's step, or how many additions the table has had. They
// do not go by time, nor by the number of batches that the process has had, so that reads between
// two updates change no bit of what is trained.
#ifndef DYNEMB_TABLE_ROUNDING_H_
#define DYNEMB_TABLE_ROUNDING_H_

#include <cstdint>

#include "cc/table/key.h"

namespace dynemb {

// The kinds of update that count their steps apart.
enum class Update : uint8_t { kOptimizer, kConstraint, kAddition };

// The `step` that StoreVectorStochastic gets. Updates of a row that must not share random bits have
// different ones: two steps, two kinds of update in a step, and two tasks that one step has for the
// same table. The mixes are bijections: a collision takes other steps and other kinds or tasks.
inline uint64_t RoundingStep(Update update, uint64_t step, uint64_t task = 0) {
  return MixKey(MixKey(step) + 4 * task + static_cast<uint64_t>(update));
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_ROUNDING_H_
