// Work shared out by ownership: every unit (a segment, a row) has one owner among the workers, who
// does all that concerns it, in order; so nothing needs an atomic and no order depends on timing.
#ifndef DYNEMB_TABLE_OWNERS_H_
#define DYNEMB_TABLE_OWNERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/table/exec.h"

namespace dynemb {

// Calls fn(worker, workers) once for each worker: one alone if n, the amount of work, is small.
template <class Fn>
void ForWorkers(Exec& exec, size_t n, const Fn& fn) {
  constexpr size_t kWorthSharing = 2048;
  const size_t workers = n < kWorthSharing ? 1 : exec.parallelism();
  exec.ParallelFor(workers, 1, [&](size_t first, size_t last) {
    for (size_t worker = first; worker < last; ++worker) fn(worker, workers);
  });
}

// The j of [first, last), below 2^32, whose unit(j) (32 bits) belongs to this worker, ascending.
template <class Unit>
std::vector<uint32_t> OwnedBy(size_t worker, size_t workers, size_t first, size_t last,
                              const Unit& unit) {
  std::vector<uint32_t> owned(last - first);
  size_t count = 0;
  for (size_t j = first; j < last; ++j) {  // no branch: it could not be predicted
    owned[count] = static_cast<uint32_t>(j);
    const uint32_t scattered = unit(j) * 0x9E3779B1u;
    count += ((uint64_t{scattered} * workers) >> 32) == worker;
  }
  owned.resize(count);
  return owned;
}

}  // namespace dynemb

#endif  // DYNEMB_TABLE_OWNERS_H_
