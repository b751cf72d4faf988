// Division of work by ownership. Every unit (a segment, a row) belongs to one worker, which does
// all work on it, in order. Therefore no atomics are needed, and no order depends on timing.
#ifndef DYNEMB_TABLE_WORKERS_H_
#define DYNEMB_TABLE_WORKERS_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/exec.h"
#include "cc/table/hash.h"

namespace dynemb {

// The number of workers for n items of work: one if n is small.
inline size_t NumWorkers(const Exec& exec, size_t n) {
  constexpr size_t kWorthSharing = 2048;
  return n < kWorthSharing ? 1 : exec.parallelism();
}

// Calls fn(worker, workers) once for each worker.
template <class Fn>
void ForWorkers(Exec& exec, size_t n, const Fn& fn) {
  const size_t workers = NumWorkers(exec, n);
  exec.ParallelFor(workers, 1, [&](size_t first, size_t last) {
    for (size_t worker = first; worker < last; ++worker) fn(worker, workers);
  });
}

// Whether a unit (32 bits) belongs to this worker.
inline bool Owns(size_t worker, size_t workers, uint32_t unit) {
  return (((ScatterInteger(unit) >> 32) * workers) >> 32) == worker;
}

// Writes the j in [0, n) whose unit(j) belongs to this worker to `owned`, ascending, and returns
// their number. `owned` has room for n entries.
template <class Unit>
size_t OwnedBy(size_t worker, size_t workers, size_t n, const Unit& unit, uint32_t* owned) {
  size_t count = 0;
  for (size_t j = 0; j < n; ++j) {  // without a branch, which would be unpredictable
    owned[count] = static_cast<uint32_t>(j);
    count += Owns(worker, workers, unit(j));
  }
  return count;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_WORKERS_H_
