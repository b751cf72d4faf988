// Division of work by ownership. Every unit (a segment, a row) belongs to one worker, which does
// all work on it, in order. Therefore no atomics are needed, and no order depends on timing.
// OwnedItems lists the work of each worker (owned_items.h).
#ifndef DYNEMB_TABLE_WORKERS_H_
#define DYNEMB_TABLE_WORKERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/table/exec.h"
#include "cc/table/hash.h"

namespace dynemb {

constexpr size_t kMostWorkers = 1024;

// The number of workers for n items of work: one if n is small.
inline size_t NumWorkers(const Exec& exec, size_t n) {
  constexpr size_t kWorthSharing = 2048;
  return n < kWorthSharing ? 1 : std::min(exec.parallelism(), kMostWorkers);
}

// The worker that owns a unit (32 bits).
inline size_t OwnerOf(size_t workers, uint32_t unit) {
  return ((ScatterInteger(unit) >> 32) * workers) >> 32;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_WORKERS_H_
