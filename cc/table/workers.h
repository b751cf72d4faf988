// Work shared out by ownership: every unit (a segment, a row) has one owner among the workers, who
// does all that concerns it, in order; so nothing needs an atomic and no order depends on timing.
#ifndef DYNEMB_TABLE_WORKERS_H_
#define DYNEMB_TABLE_WORKERS_H_

#include <cstddef>
#include <cstdint>

#include "cc/table/exec.h"
#include "cc/table/hash.h"

namespace dynemb {

// How many workers share an amount of work n: one alone if it is small.
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

// Puts the j of [0, n) whose unit(j) belongs to this worker into `owned`, which has room
// for n, ascending; returns how many there are.
template <class Unit>
size_t OwnedBy(size_t worker, size_t workers, size_t n, const Unit& unit, uint32_t* owned) {
  size_t count = 0;
  for (size_t j = 0; j < n; ++j) {  // no branch: it could not be predicted
    owned[count] = static_cast<uint32_t>(j);
    count += Owns(worker, workers, unit(j));
  }
  return count;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_WORKERS_H_
