// DeviceExchange: an Exchange (cc/lookup/exchange.h) on a device. The number of launches of a call
// does not depend on the number of tables, features or ranks.
//
// Only the calls that deliver numbers wait for the device: RequestKeys, ReceiveKeys and
// SumReceived.
#ifndef DYNEMB_DEVICE_DEVICE_EXCHANGE_H_
#define DYNEMB_DEVICE_DEVICE_EXCHANGE_H_

#include <vector>

#include "cc/device/gather.h"
#include "cc/device/gather_gradient.h"
#include "cc/device/route.h"
#include "cc/device/sum_gradients.h"
#include "cc/device/wire.h"
#include "cc/lookup/exchange.h"

namespace dynemb {

template <class Device>
class DeviceExchange final : public Exchange {
 public:
  explicit DeviceExchange(Device* device) : device_(device) {}

  Status RequestKeys(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks, uint32_t self,
                     const PlaceRequest& place) override {
    Session session(*device_, Device::StreamOf(exec));
    return device::Route(session, tasks, ranks, self, place);
  }

  Status ReceiveKeys(Exec& exec, const Requests::Received& received,
                     const std::vector<KeyType>& key_types, const PlaceKeys& place) override {
    Session session(*device_, Device::StreamOf(exec));
    return device::ReceiveKeys(session, received, key_types, place);
  }

  Status FindOwners(Exec& exec, const Owners& owners, KeyType type, const void* keys, size_t n,
                    int32_t* to) override {
    Session session(*device_, Device::StreamOf(exec));
    return device::OwnersOf(session, owners, type, keys, n, to);
  }

  Status PackRows(Exec& exec, const WireLayout& layout, const std::vector<const void*>& rows,
                  int32_t* words) override {
    Session session(*device_, Device::StreamOf(exec));
    return device::Pack(session, layout, rows, words);
  }

  Status UnpackRows(Exec& exec, const WireLayout& layout, const int32_t* words,
                    const std::vector<const void*>& own, const std::vector<void*>& rows) override {
    Session session(*device_, Device::StreamOf(exec));
    return device::Unpack(session, layout, words, own, rows);
  }

  Status PoolReceived(Exec& exec, const Received& received,
                      std::vector<PoolFeature> features) override {
    Session session(*device_, Device::StreamOf(exec));
    DYNEMB_RETURN_IF_ERROR(FindRows(session, received, &features));
    return device::GatherPool(session, {features.begin(), features.end()});
  }

  Status WeightGradient(Exec& exec, const Received& received,
                        std::vector<WeightFeature> features) override {
    Session session(*device_, Device::StreamOf(exec));
    DYNEMB_RETURN_IF_ERROR(FindRows(session, received, &features));
    return device::GatherWeightGradient(session, {features.begin(), features.end()});
  }

  Status SumRequested(Exec& exec, const WireLayout& layout, std::vector<GatherGradient::Task> tasks,
                      int32_t* words, const std::vector<float*>& own) override {
    Session session(*device_, Device::StreamOf(exec));
    std::vector<const void*> to_pack(tasks.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      const WireTable& table = layout.tables()[t];
      float* sums = nullptr;
      if (!WireLayout::AsTheyAre(table)) {
        const size_t floats = layout.num_rows(t) * static_cast<size_t>(table.dim);
        sums = session.template Take<float>(floats);
        DYNEMB_RETURN_IF_ERROR(session.status());
      }
      PlaceRows(layout, t, words, own[t], sums, &tasks[t]);
      to_pack[t] = sums;
    }
    DYNEMB_RETURN_IF_ERROR(device::GatherGradient(session, tasks));
    return device::Pack(session, layout, to_pack, words);
  }

  Status SumReceived(Exec& exec, const Received& received, std::vector<BackwardTask> tasks,
                     const Lookups::Allocate& allocate) override {
    Session session(*device_, Device::StreamOf(exec));
    std::vector<const void* const*> rows;
    DYNEMB_RETURN_IF_ERROR(
        device::ReceivedRows(session, *received.layout, received.words, received.own, &rows));
    for (size_t t = 0; t < tasks.size(); ++t) tasks[t].upstream_rows = rows[t];
    return device::SumGradients(session, tasks, allocate);
  }

 private:
  using Session = typename Device::Session;

  template <class Feature>
  static Status FindRows(Session& session, const Received& received,
                         std::vector<Feature>* features) {
    std::vector<const void* const*> rows;
    DYNEMB_RETURN_IF_ERROR(
        device::ReceivedRows(session, *received.layout, received.words, received.own, &rows));
    for (Feature& feature : *features) SetTable(received, rows[feature.table], &feature);
    return Status();
  }

  Device* const device_;
};

}  // namespace dynemb

#endif  // DYNEMB_DEVICE_DEVICE_EXCHANGE_H_
