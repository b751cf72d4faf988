// Exchange: what a rank does with keys and rows before they travel to other ranks and when they
// have come, wherever its arrays are. One implementation for the host (Route, Wire, Gather, ... of
// this folder), one for a device (cc/device).
//
// Keys, rows, words, weights and indices are where the exchange is; bags, splits and counts are
// always the host's. `exec` is the host's threads, or stands for the device's stream.
//
// An index that is not below its number of rows: the host fails with InvalidArgument; a device,
// which would have to be waited for, takes the vector for zeros and leaves its gradient out.
#ifndef DYNEMB_LOOKUP_EXCHANGE_H_
#define DYNEMB_LOOKUP_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cc/lookup/backward.h"
#include "cc/lookup/gather.h"
#include "cc/lookup/lookups.h"
#include "cc/lookup/owners.h"
#include "cc/lookup/route.h"
#include "cc/lookup/wire.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

class Exchange {
 public:
  virtual ~Exchange() = default;

  // Says where the words go, once it is known how many there are. What it, or another that places
  // outputs, fails with is the call's error. The calling thread calls it.
  using PlaceRequest =
      std::function<Status(const RouteSizes& sizes, int32_t** words, int32_t** own)>;
  // Which keys this rank asks which rank for: see Route.
  virtual Status RequestKeys(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks,
                             uint32_t self, const PlaceRequest& place) = 0;

  // Called for each table, in order; counts[r] of the keys are those that rank r asks for.
  using PlaceKeys = std::function<Status(size_t table, const int64_t* counts, void** keys)>;
  // The keys that this rank is asked for, rank after rank: see Requests.
  virtual Status ReceiveKeys(Exec& exec, const Requests::Received& received,
                             const std::vector<KeyType>& key_types, const PlaceKeys& place) = 0;

  // Which rank holds each of n keys.
  virtual Status FindOwners(Exec& exec, const Owners& owners, KeyType type, const void* keys,
                            size_t n, int32_t* to) = 0;

  // See Pack and Unpack.
  virtual Status PackRows(Exec& exec, const WireLayout& layout,
                          const std::vector<const void*>& rows, int32_t* words) = 0;
  virtual Status UnpackRows(Exec& exec, const WireLayout& layout, const int32_t* words,
                            const std::vector<const void*>& own,
                            const std::vector<void*>& rows) = 0;

  // Rows where they came to lie: what UnpackRows would make arrays of.
  struct Received {
    const WireLayout* layout = nullptr;
    const int32_t* words = nullptr;
    std::vector<const void*> own;  // [tables]
  };

  // A feature that reads received rows of a table. The call sets what the layout says of these.
  struct PoolFeature : GatherTask {
    size_t table = 0;
  };
  struct WeightFeature : GatherWeightTask {
    size_t table = 0;
  };
  // See GatherPool and GatherWeightGradient.
  virtual Status PoolReceived(Exec& exec, const Received& received,
                              std::vector<PoolFeature> features) = 0;
  virtual Status WeightGradient(Exec& exec, const Received& received,
                                std::vector<WeightFeature> features) = 0;

  // The gradients of a request's rows, float32, in the messages to their owners; those of this rank
  // for itself in own[t]. tasks[t].features are those that read table t; the call sets the rest.
  virtual Status SumRequested(Exec& exec, const WireLayout& layout,
                              std::vector<GatherGradient::Task> tasks, int32_t* words,
                              const std::vector<float*>& own) = 0;

  // Sums received gradients per key, as Lookups::SumGradients: tasks[t].upstream_rows are the rows
  // of table t.
  virtual Status SumReceived(Exec& exec, const Received& received, std::vector<BackwardTask> tasks,
                             const Lookups::Allocate& allocate) = 0;

 protected:
  // `rows` are those of the feature's table.
  template <class Feature>
  static void SetTable(const Received& received, const void* const* rows, Feature* feature) {
    const WireTable& table = received.layout->tables()[feature->table];
    feature->rows = rows;
    feature->n = received.layout->num_rows(feature->table);
    feature->dtype = table.dtype;
    feature->dim = table.dim;
  }
  // Where the sums of a table go: to the messages, or to `sums` for a table whose rows are then to
  // be packed, if it is not null; those of `self` to `own`.
  static void PlaceRows(const WireLayout& layout, size_t table, int32_t* words, float* own,
                        float* sums, GatherGradient::Task* task);
};

// That of the host. Lives as long as the process.
Exchange& HostExchange();

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_EXCHANGE_H_
