// TaskLoop, ParallelForTasks: one parallel loop over several tasks of different sizes. It spreads a
// hundred small tables over the threads as evenly as a large one.
//
// The work is one list of ranges, task after task, and each thread starts in a different part of
// the list. A thread that has finished its part takes ranges from the others. Two threads therefore
// seldom work on one table at the same time, and the rows that a table's ids share stay in one
// core's cache.
#ifndef DYNEMB_LOOKUP_TASKS_H_
#define DYNEMB_LOOKUP_TASKS_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

#include "cc/table/exec.h"

namespace dynemb {

// A loop that is prepared before it runs, so that Run allocates nothing. It can run only once.
class TaskLoop {
 public:
  // A task of sizes[task] items is divided into ranges of grains[task] items; the last range may be
  // shorter.
  TaskLoop(const Exec& exec, const std::vector<size_t>& sizes, const std::vector<size_t>& grains) {
    size_t count = 0;
    for (size_t t = 0; t < sizes.size(); ++t) count += (sizes[t] + grains[t] - 1) / grains[t];
    ranges_.reserve(count);
    for (size_t t = 0; t < sizes.size(); ++t) {
      for (size_t begin = 0; begin < sizes[t]; begin += grains[t]) {
        ranges_.push_back({t, begin, std::min(begin + grains[t], sizes[t])});
      }
    }
    parts_ = std::vector<Part>(std::min(exec.parallelism(), count));
    for (size_t part = 0; part < parts_.size(); ++part) {
      parts_[part].next.store(count * part / parts_.size(), std::memory_order_relaxed);
      parts_[part].end = count * (part + 1) / parts_.size();
    }
  }

  // Calls fn(task, begin, end) on disjoint ranges that cover [0, sizes[task]) of every task.
  template <class Fn>
  void Run(Exec& exec, const Fn& fn) {
    exec.ParallelFor(parts_.size(), 1, [&](size_t first, size_t last) {
      for (size_t own = first; own < last; ++own) {
        for (size_t offset = 0; offset < parts_.size(); ++offset) {
          Part& part = parts_[(own + offset) % parts_.size()];
          // Relaxed: the counter only has to hand out each range once.
          size_t p;
          while ((p = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end) {
            fn(ranges_[p].task, ranges_[p].begin, ranges_[p].end);
          }
        }
      }
    });
  }

 private:
  struct Range {
    size_t task, begin, end;
  };
  struct alignas(64) Part {
    std::atomic<size_t> next;
    size_t end;
  };
  std::vector<Range> ranges_;
  std::vector<Part> parts_;
};

// Creates a TaskLoop and runs it.
template <class Fn>
void ParallelForTasks(Exec& exec, const std::vector<size_t>& sizes,
                      const std::vector<size_t>& grains, const Fn& fn) {
  TaskLoop(exec, sizes, grains).Run(exec, fn);
}

// Calls fn(exec, task) once for every task. A task that is a small part of the whole runs on one
// thread, so that it stays in that thread's cache. The other tasks run one after another, each on
// all threads.
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
