// ParallelForTasks: one parallel loop over several tasks of different sizes, so that a hundred
// small tables and one large one are spread over the threads alike.
//
// The work is laid out as one list, task after task, and each thread starts at a part of its own;
// who is done takes pieces of others' parts. So two threads seldom work on one table at the same
// time, and the rows that a table's ids share are in one core's cache.
#ifndef DYNEMB_LOOKUP_TASKS_H_
#define DYNEMB_LOOKUP_TASKS_H_

#include <algorithm>
#include <atomic>
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
  size_t count = 0;
  for (size_t t = 0; t < sizes.size(); ++t) count += (sizes[t] + grains[t] - 1) / grains[t];
  std::vector<Piece> pieces;
  pieces.reserve(count);
  for (size_t t = 0; t < sizes.size(); ++t) {
    for (size_t begin = 0; begin < sizes[t]; begin += grains[t]) {
      pieces.push_back({t, begin, std::min(begin + grains[t], sizes[t])});
    }
  }
  struct alignas(64) Part {
    std::atomic<size_t> next;
    size_t end;
  };
  const size_t threads = std::min(exec.parallelism(), pieces.size());
  std::vector<Part> parts(threads);
  for (size_t part = 0; part < threads; ++part) {
    parts[part].next.store(pieces.size() * part / threads, std::memory_order_relaxed);
    parts[part].end = pieces.size() * (part + 1) / threads;
  }
  exec.ParallelFor(threads, 1, [&](size_t first, size_t last) {
    for (size_t own = first; own < last; ++own) {
      for (size_t offset = 0; offset < threads; ++offset) {
        Part& part = parts[(own + offset) % threads];
        // Relaxed: it only hands out each piece once.
        size_t p;
        while ((p = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end) {
          fn(pieces[p].task, pieces[p].begin, pieces[p].end);
        }
      }
    }
  });
}

// Calls fn(exec, task) once for every task. A task that is a small part of the whole is done by one
// thread, while it is in that thread's cache; others by all threads, one after the other.
template <class Fn>
void ForEachTask(Exec& exec, const std::vector<size_t>& sizes, const Fn& fn) {
  size_t total = 0;
  for (size_t size : sizes) total += size;
  const size_t small_size = total / (2 * exec.parallelism());
  std::vector<size_t> small;
  for (size_t t = 0; t < sizes.size(); ++t) {
    if (sizes[t] <= small_size) {
      small.push_back(t);
    } else {
      fn(exec, t);
    }
  }
  exec.ParallelFor(small.size(), 1, [&](size_t begin, size_t end) {
    SerialExec serial;
    for (size_t i = begin; i < end; ++i) fn(serial, small[i]);
  });
}

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_TASKS_H_
