// Lookups: the interface of the calls over several tables. All tables of a call are in host memory,
// or all are on one device. HostLookups() is the implementation for host memory, with the functions
// Pool, WeightGradient, Apply and ApplyPooled and the class Backward of this folder. DeviceLookups
// (cc/device/device_lookups.h) is the implementation for a device, and ServedLookups
// (cc/serving/served_lookups.h) for tables of exported models.
//
// All arrays that tasks name are where the tables are, like the arrays of Table's calls, except
// that Bags are always on the host. `exec` is the host's threads, or represents the device's
// stream.
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

  // Provides memory for the sums of a task, which has num_unique keys. If it fails, SumGradients
  // returns its error.
  using Allocate = std::function<Status(size_t task, size_t num_unique, BackwardOutput* output)>;
  // See backward.h. `allocate` is called once for every task, in order, on the calling thread. The
  // host has to know the numbers of keys, so the call waits for the device if the tables are on
  // one.
  virtual Status SumGradients(Exec& exec, const std::vector<BackwardTask>& tasks,
                              const Allocate& allocate) = 0;

  // See apply.h.
  virtual Status Apply(Exec& exec, const std::vector<ApplyTask>& tasks, const OptimizerStep& step,
                       Tick tick) = 0;

  // See apply.h. SumGradients and Apply have the same results, bit for bit. On a device, the call
  // waits only for tasks that need two passes (cc/device/device_apply_pooled.h).
  virtual Status ApplyPooled(Exec& exec, const std::vector<ApplyPooledTask>& tasks,
                             const OptimizerStep& step, Tick tick) = 0;

  // (exclusive) Table::PromoteIfDue of all tables. A table may be named several times.
  virtual Status PromoteIfDue(Exec& exec, const std::vector<Table*>& tables, Tick tick);
};

// The calls over tables on the host. The object lives as long as the process.
Lookups& HostLookups();

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_LOOKUPS_H_
