#include "cc/lookup/exchange.h"

#include <utility>

#include "cc/table/scratch.h"

namespace dynemb {
namespace {

constexpr size_t kOwnerGrain = 65536;

template <class K>
void OwnersOf(Exec& exec, const Owners& owners, const K* keys, size_t n, int32_t* to) {
  exec.ParallelFor(n, kOwnerGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) to[i] = static_cast<int32_t>(owners.Of(keys[i]));
  });
}

class HostExchangeImpl final : public Exchange {
 public:
  Status RequestKeys(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks, uint32_t self,
                     const PlaceRequest& place) override {
    const SharedScratch<Route> route;
    DYNEMB_RETURN_IF_ERROR(route->Prepare(exec, tasks, ranks, self));
    int32_t* words = nullptr;
    int32_t* own = nullptr;
    DYNEMB_RETURN_IF_ERROR(place(route->sizes(), &words, &own));
    route->Write(exec, words, own);
    return Status();
  }

  Status ReceiveKeys(Exec&, const Requests::Received& received,
                     const std::vector<KeyType>& key_types, const PlaceKeys& place) override {
    Requests requests;
    DYNEMB_RETURN_IF_ERROR(requests.Init(received, key_types));
    for (size_t t = 0; t < key_types.size(); ++t) {
      void* keys = nullptr;
      DYNEMB_RETURN_IF_ERROR(place(t, requests.counts(t), &keys));
      requests.CopyKeys(t, keys);
    }
    return Status();
  }

  Status FindOwners(Exec& exec, const Owners& owners, KeyType type, const void* keys, size_t n,
                    int32_t* to) override {
    if (SizeOf(type) == 8) {
      OwnersOf(exec, owners, static_cast<const uint64_t*>(keys), n, to);
    } else {
      OwnersOf(exec, owners, static_cast<const uint32_t*>(keys), n, to);
    }
    return Status();
  }

  Status PackRows(Exec& exec, const WireLayout& layout, const std::vector<const void*>& rows,
                  int32_t* words) override {
    Pack(exec, layout, rows, words);
    return Status();
  }

  Status UnpackRows(Exec& exec, const WireLayout& layout, const int32_t* words,
                    const std::vector<const void*>& own, const std::vector<void*>& rows) override {
    Unpack(exec, layout, words, own, rows);
    return Status();
  }

  Status PoolReceived(Exec& exec, const Received& received,
                      std::vector<PoolFeature> features) override {
    return WithRows(exec, received, &features, [&] {
      GatherPool(exec, {features.begin(), features.end()});
    });
  }

  Status WeightGradient(Exec& exec, const Received& received,
                        std::vector<WeightFeature> features) override {
    return WithRows(exec, received, &features, [&] {
      GatherWeightGradient(exec, {features.begin(), features.end()});
    });
  }

  Status SumRequested(Exec& exec, const WireLayout& layout, std::vector<GatherGradient::Task> tasks,
                      int32_t* words, const std::vector<float*>& own) override {
    const SharedScratch<Sums> scratch;
    scratch->sums.resize(tasks.size());
    std::vector<const void*> to_pack(tasks.size());
    for (size_t t = 0; t < tasks.size(); ++t) {
      const WireTable& table = layout.tables()[t];
      const size_t floats = layout.num_rows(t) * static_cast<size_t>(table.dim);
      const bool in_place = WireLayout::AsTheyAre(table);
      float* const sums = in_place ? nullptr : scratch->sums[t].Resize(floats);
      PlaceRows(layout, t, words, own[t], sums, &tasks[t]);
      to_pack[t] = sums;
    }
    DYNEMB_RETURN_IF_ERROR(scratch->gradient.Run(exec, tasks));
    Pack(exec, layout, to_pack, words);
    return Status();
  }

  Status SumReceived(Exec& exec, const Received& received, std::vector<BackwardTask> tasks,
                     const Lookups::Allocate& allocate) override {
    const SharedScratch<WireRows> rows;
    rows->Init(exec, *received.layout, received.words, received.own);
    for (size_t t = 0; t < tasks.size(); ++t) tasks[t].upstream_rows = rows->of(t);
    return HostLookups().SumGradients(exec, tasks, allocate);
  }

 private:
  struct Sums {
    GatherGradient gradient;
    std::vector<Buffer<float>> sums;  // of tables whose rows are converted

    void Shrink() {
      gradient.Shrink();
      for (Buffer<float>& of_table : sums) of_table.Shrink();
    }
  };

  // Sets the rows of the features, checks the indices and calls fn(). The rows are valid during
  // that call.
  template <class Feature, class Fn>
  static Status WithRows(Exec& exec, const Received& received, std::vector<Feature>* features,
                         const Fn& fn) {
    const SharedScratch<WireRows> rows;
    rows->Init(exec, *received.layout, received.words, received.own);
    for (Feature& feature : *features) {
      SetTable(received, rows->of(feature.table), &feature);
      DYNEMB_RETURN_IF_ERROR(CheckIndex(exec, feature.index, feature.bags->nnz(), feature.n));
    }
    fn();
    return Status();
  }
};

}  // namespace

void Exchange::PlaceRows(const WireLayout& layout, size_t table, int32_t* words, float* own,
                         float* sums, GatherGradient::Task* task) {
  const int64_t dim = layout.tables()[table].dim;
  task->n = layout.num_rows(table);
  task->dim = dim;
  for (uint32_t rank = 0; rank < layout.ranks(); ++rank) {
    const WireLayout::Section& s = layout.section(table, rank);
    float* const to = rank == layout.self() ? own
                      : sums == nullptr     ? reinterpret_cast<float*>(words + s.word)
                                            : sums + s.first_row * static_cast<size_t>(dim);
    task->outputs.push_back({s.rows, to});
  }
}

Exchange& HostExchange() {
  static Exchange* const exchange = new HostExchangeImpl;
  return *exchange;
}

}  // namespace dynemb
