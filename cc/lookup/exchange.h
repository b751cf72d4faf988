// Exchange: the work of a rank on keys and rows, before they are sent to other ranks and after they
// are received, wherever its arrays are. There is one implementation for the host (Route, Wire,
// Gather, ... of this folder) and one for a device (cc/device).
//
// Keys, rows, words, weights and indices are in the memory of the exchange: the host's or a
// device's. Bags, splits and counts are always in host memory. `exec` is the host's threads, or
// represents the device's stream.
//
// On the host, an index that is not below its number of rows is an InvalidArgument. A device does
// not report it, because the host would have to wait for the device: the id's vector counts as
// zeros, and its gradient is left out.
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

  // Provides memory for the words, once their number is known. It runs on the calling thread. If
  // this or another function that provides memory for outputs fails, the call returns its error.
  using PlaceRequest =
      std::function<Status(const RouteSizes& sizes, int32_t** words, int32_t** own)>;
  // Finds the keys that this rank requests from each rank. See Route.
  virtual Status RequestKeys(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks,
                             uint32_t self, const PlaceRequest& place) = 0;

  // Provides memory for the keys of a table. It is called for each table, in order. Rank r
  // requests counts[r] of the keys.
  using PlaceKeys = std::function<Status(size_t table, const int64_t* counts, void** keys)>;
  // Reads the keys that are requested from this rank, rank after rank. See Requests.
  virtual Status ReceiveKeys(Exec& exec, const Requests::Received& received,
                             const std::vector<KeyType>& key_types, const PlaceKeys& place) = 0;

  // Writes the owner of each of n keys to `to`.
  virtual Status FindOwners(Exec& exec, const Owners& owners, KeyType type, const void* keys,
                            size_t n, int32_t* to) = 0;

  // See Pack and Unpack.
  virtual Status PackRows(Exec& exec, const WireLayout& layout,
                          const std::vector<const void*>& rows, int32_t* words) = 0;
  virtual Status UnpackRows(Exec& exec, const WireLayout& layout, const int32_t* words,
                            const std::vector<const void*>& own,
                            const std::vector<void*>& rows) = 0;

  // Received rows, not copied: the rows that UnpackRows would write to arrays.
  struct Received {
    const WireLayout* layout = nullptr;
    const int32_t* words = nullptr;
    std::vector<const void*> own;  // [tables]
  };

  // A feature that reads received rows of a table. The call sets the members that describe these
  // rows.
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

  // Sums the gradients of a request's rows, in float32, and writes them to the messages to the
  // rows' owners; the gradients of rows that this rank owns go to own[t]. tasks[t].features are the
  // features that read table t; the call sets the other members.
  virtual Status SumRequested(Exec& exec, const WireLayout& layout,
                              std::vector<GatherGradient::Task> tasks, int32_t* words,
                              const std::vector<float*>& own) = 0;

  // Sums received gradients per key, like Lookups::SumGradients. The call sets
  // tasks[t].upstream_rows to the received rows of table t.
  virtual Status SumReceived(Exec& exec, const Received& received, std::vector<BackwardTask> tasks,
                             const Lookups::Allocate& allocate) = 0;

 protected:
  // Sets the members of a feature that describe the rows of its table; `rows` are their addresses.
  template <class Feature>
  static void SetTable(const Received& received, const void* const* rows, Feature* feature) {
    const WireTable& table = received.layout->tables()[feature->table];
    feature->rows = rows;
    feature->n = received.layout->num_rows(feature->table);
    feature->dtype = table.dtype;
    feature->dim = table.dim;
  }
  // Sets where the sums of a table go. The sums of `self` go to `own`. The others go to the
  // messages if `sums` is null; otherwise they go to `sums`, and still have to be packed.
  static void PlaceRows(const WireLayout& layout, size_t table, int32_t* words, float* own,
                        float* sums, GatherGradient::Task* task);
};

// The exchange of the host. It lives as long as the process.
Exchange& HostExchange();

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_EXCHANGE_H_
