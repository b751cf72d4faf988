// Lookups: the calls over several tables, wherever the tables are. One implementation for tables of
// the host (Pool, Backward, Apply, ... of this folder), one for tables of a device (cc/device).
//
// All arrays that tasks name are where the tables are, as those of Table are; but Bags are always
// of the host. `exec` is the host's threads, or stands for the device's stream.
#ifndef DYNEMB_LOOKUP_LOOKUPS_H_
#define DYNEMB_LOOKUP_LOOKUPS_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "cc/lookup/apply.h"
#include "cc/lookup/backward.h"
#include "cc/lookup/pool.h"
#include "cc/table/exec.h"
#include "cc/table/optimizer.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

class Lookups {
 public:
  virtual ~Lookups() = default;

  // See pool.h.
  virtual Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick tick, bool insert) = 0;
  // See pool.h.
  virtual Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks) = 0;

  // Where the sums of a task go: gives room for so many keys. What it fails with is SumGradients'
  // error.
  using Allocate = std::function<Status(size_t task, size_t num_unique, BackwardOutput* output)>;
  // See backward.h. `allocate` is called once for every task, in order, by the calling thread. A
  // host has to know how many keys there are, so with tables of a device it waits for the device.
  virtual Status SumGradients(Exec& exec, const std::vector<BackwardTask>& tasks,
                              const Allocate& allocate) = 0;

  // See apply.h.
  virtual Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step,
                       Tick tick) = 0;
};

// Those of the host. Lives as long as the process.
Lookups& HostLookups();

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_LOOKUPS_H_
