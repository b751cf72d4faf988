// ParallelForTasks: one parallel loop over several tasks of different sizes, so that a hundred
// small tables and one large one are spread over the threads alike.
#ifndef DYNEMB_LOOKUP_TASKS_H_
#define DYNEMB_LOOKUP_TASKS_H_

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cc/table/exec.h"

namespace dynemb {

// Calls fn(task, begin, end) on disjoint ranges that cover [0, sizes[task]) of every task. A range
// has `grains[task]` items (the last fewer).
template <class Fn>
void ParallelForTasks(Exec& exec, const std::vector<size_t>& sizes,
                      const std::vector<size_t>& grains, const Fn& fn) {
  struct Piece {
    size_t task, begin, end;
  };
  std::vector<Piece> pieces;
  for (size_t t = 0; t < sizes.size(); ++t) {
    for (size_t begin = 0; begin < sizes[t]; begin += grains[t]) {
      pieces.push_back({t, begin, std::min(begin + grains[t], sizes[t])});
    }
  }
  exec.ParallelFor(pieces.size(), 1, [&](size_t first, size_t last) {
    for (size_t p = first; p < last; ++p) fn(pieces[p].task, pieces[p].begin, pieces[p].end);
  });
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_TASKS_H_
