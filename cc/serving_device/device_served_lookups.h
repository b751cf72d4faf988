// DeviceServedLookups: the calls over several served tables of one device (cc/lookup/lookups.h),
// and DeviceServedPlace, which creates these tables. A Pool of any number of tables is one launch
// that finds the ids, and one that combines bags; one more if bags have different scales.
#ifndef DYNEMB_SERVING_DEVICE_DEVICE_SERVED_LOOKUPS_H_
#define DYNEMB_SERVING_DEVICE_DEVICE_SERVED_LOOKUPS_H_

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cc/device/pool_bags.h"
#include "cc/lookup/lookups.h"
#include "cc/serving/served_place.h"
#include "cc/serving_device/device_served_table.h"
#include "cc/table/phase.h"

namespace dynemb {

// The tables of all tasks are DeviceServedTables of this device. Pool inserts nothing, whatever
// `insert` says. SumGradients, which has no tables, is a call of the device's DeviceLookups; here
// it is a FailedPrecondition, as are the calls that step rows.
template <class Device>
class DeviceServedLookups final : public Lookups {
 public:
  explicit DeviceServedLookups(Device* device) : device_(*device) {}

  Status Pool(Exec& exec, const std::vector<PoolTask>& tasks, Tick, bool) override {
    Phase phase("find and pool");
    Session session(device_, Device::StreamOf(exec));
    Found found;
    DYNEMB_RETURN_IF_ERROR(FindIds(session, tasks, true, &found));
    std::vector<const BagTask*> bags;
    for (const PoolTask& task : tasks) bags.push_back(&task);
    const device::ServedVectors source{found.codes, found.vectors, false};
    return device::CombineBags(session, source, found.parts, bags, found.quads);
  }

  Status WeightGradient(Exec& exec, const std::vector<WeightGradientTask>& tasks) override {
    Phase phase("weight gradients");
    Session session(device_, Device::StreamOf(exec));
    Found found;
    DYNEMB_RETURN_IF_ERROR(FindIds(session, tasks, false, &found));
    std::vector<const BagWeightTask*> bags;
    for (const WeightGradientTask& task : tasks) bags.push_back(&task);
    const device::ServedVectors source{found.codes, found.vectors, true};
    return device::DifferentiateWeights(session, source, found.parts, bags);
  }

  Status SumGradients(Exec&, const std::vector<BackwardTask>&, const Allocate&) override {
    return FailedPrecondition("gradients are summed by the calls for tables that are trained");
  }

  Status Apply(Exec&, const std::vector<ApplyTask>& tasks, const OptimizerStep&, Tick) override {
    return ReadOnly(*tasks.front().table);
  }
  Status ApplyPooled(Exec&, const std::vector<ApplyPooledTask>& tasks, const OptimizerStep&,
                     Tick) override {
    return ReadOnly(*tasks.front().table);
  }

 private:
  using Session = typename Device::Session;
  using ServedTable = DeviceServedTable<Device>;

  struct Found : ServedTable::Found {
    std::vector<device::ServedVectors::Part> parts;
    size_t quads = 0;  // of the widest vectors
  };

  static RowId* RowsOf(const PoolTask& task) { return task.rows; }
  static RowId* RowsOf(const WeightGradientTask&) { return nullptr; }

  template <class Task>
  static Status FindIds(Session& session, const std::vector<Task>& tasks, bool counts,
                        Found* found) {
    std::vector<device::ServedIds> ids;
    std::vector<uint32_t> begins{0};
    size_t total = 0;
    for (const Task& task : tasks) {
      const auto& table = *static_cast<const ServedTable*>(task.table);
      found->parts.push_back(table.VectorsOf(task.keys, begins.back()));
      found->quads = std::max(found->quads, QuadsOf(table.layout().dim));
      ids.push_back({table.view(), table.KeysAt(task.keys), RowsOf(task), nullptr});
      DYNEMB_RETURN_IF_ERROR(ServedTable::CheckBatch(total += task.bags->nnz()));
      begins.push_back(static_cast<uint32_t>(total));
    }
    return ServedTable::FindIds(session, ids, begins, counts, found);
  }

  static Status ReadOnly(const Table& table) {
    return FailedPrecondition("table '" + table.options().name +
                              "' of an exported model is read-only");
  }

  Device& device_;
};

template <class Device>
class DeviceServedPlace final : public ServedPlace {
 public:
  explicit DeviceServedPlace(Device* device) : device_(*device), lookups_(device) {}

  Status Place(const ServedTable& table, const Table* before,
               std::shared_ptr<Table>* placed) override {
    const auto* const earlier = static_cast<const DeviceServedTable<Device>*>(before);
    return DeviceServedTable<Device>::Make(device_, table, earlier, placed);
  }
  Lookups& lookups() override { return lookups_; }

 private:
  Device& device_;
  DeviceServedLookups<Device> lookups_;
};

}  // namespace dynemb

#endif  // DYNEMB_SERVING_DEVICE_DEVICE_SERVED_LOOKUPS_H_
