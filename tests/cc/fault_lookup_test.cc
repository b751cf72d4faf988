// Fault injection into the fused calls of cc/lookup (fault_suite.h).
#include "cc/lookup/exchange.h"
#include "tests/cc/fault_suite.h"

namespace dynemb {
namespace fault {
namespace {

class LookupFaultTest : public FaultTest {};

// Bags of two ids each, over the keys of the batch, for both tables.
struct BagsOfTwo {
  explicit BagsOfTwo(const World& w)
      : splits(w.keys.size() / 2 + 1),
        weights(w.keys.size(), 0.5f),
        pooled(2 * w.keys.size() * w.dim),
        upstream(2 * w.keys.size() * w.dim, 0.25f),
        argmax(w.keys.size() * w.dim, -1),
        gradient(w.keys.size()) {
    for (size_t b = 0; b < splits.size(); ++b) splits[b] = static_cast<int64_t>(2 * b);
  }
  Status Init(World& w, Bags* bags) const {
    const auto n = static_cast<int64_t>(splits.size());
    return bags->InitSplits(w.exec, splits.data(), n, 2 * (n - 1), n - 1);
  }
  size_t elements() const { return pooled.size() / 4; }

  std::vector<int64_t> splits;
  std::vector<float> weights, pooled, upstream;
  std::vector<int32_t> argmax;
  std::vector<float> gradient;
};

template <class Fn>
auto WithoutFaults(const Fn& fn) {
  const failing::Suspended suspended;
  return fn();
}

Status PoolBoth(World& w, bool insert) {
  BagsOfTwo two = WithoutFaults([&] { return BagsOfTwo(w); });
  Bags bags;
  DYNEMB_RETURN_IF_ERROR(two.Init(w, &bags));
  std::vector<PoolTask> tasks(2);
  for (size_t t = 0; t < 2; ++t) {
    tasks[t].bags = &bags;
    tasks[t].combiner = t == 0 ? Combiner::kMean : Combiner::kMax;
    tasks[t].weights = two.weights.data();
    tasks[t].pooled = two.pooled.data() + t * 2 * two.elements();
    if (t == 1) tasks[t].argmax = two.argmax.data();
    tasks[t].table = w.tables[t].get();
    tasks[t].keys = w.keys.data();
    tasks[t].rows = w.rows.data() + t * World::kBatch;
  }
  DYNEMB_RETURN_IF_ERROR(HostLookups().Pool(w.exec, tasks, w.tick, insert));
  w.Deliver(two.pooled.data(), two.pooled.size() * sizeof(float));
  return Status();
}

TEST_P(LookupFaultTest, Pool) {
  Faults([](World& w) { return PoolBoth(w, true); });
}

TEST_P(LookupFaultTest, PoolWithoutInserting) {
  Faults([](World& w) { return PoolBoth(w, false); });
}

TEST_P(LookupFaultTest, SumGradients) {
  Faults([](World& w) {
    BagsOfTwo two = WithoutFaults([&] { return BagsOfTwo(w); });
    Bags bags;
    DYNEMB_RETURN_IF_ERROR(two.Init(w, &bags));
    BackwardTask task;
    task.bags = &bags;
    task.combiner = Combiner::kSqrtn;
    task.upstream = two.upstream.data();
    task.dim = w.setup.dim;
    task.keys = w.keys.data();
    task.rows = w.rows.data();
    std::vector<uint64_t> unique(w.keys.size());
    std::vector<RowId> rows(w.keys.size());
    std::vector<float> sums(w.keys.size() * w.dim);
    size_t n = 0;
    DYNEMB_RETURN_IF_ERROR(HostLookups().SumGradients(
        w.exec, {task}, [&](size_t, size_t num_unique, BackwardOutput* output) {
          n = num_unique;
          *output = {unique.data(), rows.data(), sums.data()};
          return Status();
        }));
    w.Deliver(unique.data(), n * sizeof(uint64_t));
    w.Deliver(sums.data(), n * w.dim * sizeof(float));
    return Status();
  });
}

TEST_P(LookupFaultTest, WeightGradient) {
  Faults([](World& w) {
    BagsOfTwo two = WithoutFaults([&] { return BagsOfTwo(w); });
    WithoutFaults([&] {
      w.table->Find(w.exec, {w.keys.data(), w.keys.size()}, w.tick, w.rows.data());
      return 0;
    });
    Bags bags;
    DYNEMB_RETURN_IF_ERROR(two.Init(w, &bags));
    std::vector<WeightGradientTask> tasks(1);
    tasks[0].bags = &bags;
    tasks[0].weights = two.weights.data();
    tasks[0].combiner = Combiner::kMean;
    tasks[0].pooled = two.pooled.data();
    tasks[0].upstream = two.upstream.data();
    tasks[0].gradient = two.gradient.data();
    tasks[0].table = w.table;
    tasks[0].keys = w.keys.data();
    tasks[0].rows = w.rows.data();
    DYNEMB_RETURN_IF_ERROR(HostLookups().WeightGradient(w.exec, tasks));
    w.Deliver(two.gradient.data(), two.gradient.size() * sizeof(float));
    return Status();
  });
}

struct Optimizer {
  const char* name;
  std::vector<std::string> flags;
};

TEST_P(LookupFaultTest, Apply) {
  for (const Optimizer& o : std::vector<Optimizer>{{"sgd", {"momentum", "nesterov"}},
                                                   {"adagrad", {}},
                                                   {"adam", {"amsgrad"}},
                                                   {"adamax", {}},
                                                   {"rmsprop", {"momentum", "centered"}},
                                                   {"adadelta", {}},
                                                   {"ftrl", {}},
                                                   {"lion", {}},
                                                   {"rowwise_adagrad", {}}}) {
    OptimizerKind kind;
    OptimizerFlags flags;
    // The differences between optimizers do not depend on the kind of table. With long rows there
    // is also the one of Adam, which has as many slots as any.
    const std::string name = o.name;
    const bool differs =
        GetParam().kind == Kind::kGrows && (GetParam().dim < 300 || name == "adam");
    if (!differs && name != "adagrad") continue;
    ASSERT_TRUE(ParseOptimizer(o.name, o.flags, &kind, &flags).ok());
    StateSpec spec{o.name, StateWidths(kind, flags, GetParam().dim), {}};
    spec.inits.assign(spec.widths.size(), 0.125f);
    const OptimizerStep step{kind, flags, Hyper(), 1, spec.optimizer, spec.inits};
    for (bool known : {false, true}) {
      SCOPED_TRACE(std::string(o.name) + (known ? ", rows known" : ", rows looked up"));
      ASSERT_NO_FATAL_FAILURE(CheckFaults(
          [&] {
            auto w = std::make_unique<World>(GetParam(), &spec);
            w->other->Find(w->exec, {w->keys.data(), World::kDistinct}, w->tick, w->rows.data());
            w->tick = w->clock.Next();
            return w;
          },
          [&](World& w) {
            const RowId* const rows = known ? w.rows.data() : nullptr;
            std::vector<ApplyTask> tasks = {
                {w.table, w.keys.data(), nullptr, w.floats.data(), World::kBatch},
                {w.other, w.keys.data(), rows, w.floats.data(), World::kDistinct}};
            return HostLookups().Apply(w.exec, tasks, step, w.tick);
          }));
    }
  }
}

// The messages of one rank of three. The messages that it sends to all ranks also serve as the
// messages that it receives.
class Messages {
 public:
  static constexpr uint32_t kRanks = 3;

  explicit Messages(World& w) : two(w), index(w.keys.size()), words(8 * w.keys.size()) {
    route.owners.rule = Owners::Rule::kHash;
    route.owners.ranks = kRanks;
    route.features = {{w.keys.data(), w.keys.size(), index.data()}};
    EXPECT_TRUE(RequestKeys(w).ok());
    EXPECT_TRUE(two.Init(w, &bags).ok());
    const WireTable table{w.setup.dtype, w.setup.dim, WireType::kInt8};
    const WireTable gradients{DType::kFloat32, w.setup.dim, WireType::kFloat16};
    EXPECT_TRUE(layout.Init({table}, sizes.counts.data(), kRanks).ok());
    EXPECT_TRUE(gradient_layout.Init({gradients}, sizes.counts.data(), kRanks).ok());
    packed.resize(layout.num_words());
    sums.resize(gradient_layout.num_words());
  }
  Status RequestKeys(World& w) {
    return HostExchange().RequestKeys(w.exec, {route}, kRanks, kNoRank,
                                      [&](const RouteSizes& s, int32_t** to, int32_t**) {
                                        sizes = s;
                                        *to = words.data();
                                        return Status();
                                      });
  }
  Exchange::Received AsReceived() const { return {&layout, packed.data(), {nullptr}}; }

  BagsOfTwo two;
  Bags bags;
  std::vector<uint32_t> index;
  std::vector<int32_t> words, packed, sums;
  RouteTask route;
  RouteSizes sizes;
  WireLayout layout, gradient_layout;
};

using Step = std::function<Status(World& w, Messages& m)>;

class ExchangeFaultTest : public FaultTest {
 protected:
  void FaultsOf(const Step& step) const {
    Faults([&](World& w) {
      Messages m = WithoutFaults([&] { return Messages(w); });
      return step(w, m);
    });
  }
};

TEST_P(ExchangeFaultTest, RequestKeys) {
  FaultsOf([](World& w, Messages& m) {
    DYNEMB_RETURN_IF_ERROR(m.RequestKeys(w));
    w.Deliver(m.index.data(), m.index.size() * sizeof(uint32_t));
    return Status();
  });
}

TEST_P(ExchangeFaultTest, ReceiveKeys) {
  FaultsOf([](World& w, Messages& m) {
    std::vector<int32_t> splits(m.sizes.words.begin(), m.sizes.words.end());
    Requests::Received received;
    received.words = m.words.data();
    for (int32_t n : splits) received.num_words += n;
    received.splits = splits.data();
    received.ranks = Messages::kRanks;
    std::vector<uint64_t> keys(w.keys.size());
    DYNEMB_RETURN_IF_ERROR(HostExchange().ReceiveKeys(w.exec, received, {KeyType::kInt64},
                                                      [&](size_t, const int64_t*, void** to) {
                                                        *to = keys.data();
                                                        return Status();
                                                      }));
    w.Deliver(keys.data(), World::kDistinct * sizeof(uint64_t));
    return Status();
  });
}

TEST_P(ExchangeFaultTest, FindOwners) {
  FaultsOf([](World& w, Messages& m) {
    return HostExchange().FindOwners(w.exec, m.route.owners, KeyType::kInt64, w.keys.data(),
                                     w.keys.size(), m.words.data());
  });
}

TEST_P(ExchangeFaultTest, PackAndUnpackRows) {
  FaultsOf([](World& w, Messages& m) {
    DYNEMB_RETURN_IF_ERROR(
        HostExchange().PackRows(w.exec, m.layout, {w.floats.data()}, m.packed.data()));
    DYNEMB_RETURN_IF_ERROR(HostExchange().UnpackRows(w.exec, m.layout, m.packed.data(), {nullptr},
                                                     {w.vectors.data()}));
    w.Deliver(w.vectors.data(), w.vectors.size());
    return Status();
  });
}

TEST_P(ExchangeFaultTest, PoolReceived) {
  FaultsOf([](World& w, Messages& m) {
    std::vector<Exchange::PoolFeature> features(1);
    features[0].bags = &m.bags;
    features[0].index = m.index.data();
    features[0].pooled = m.two.pooled.data();
    DYNEMB_RETURN_IF_ERROR(HostExchange().PoolReceived(w.exec, m.AsReceived(), features));
    w.Deliver(m.two.pooled.data(), m.two.pooled.size() * sizeof(float));
    return Status();
  });
}

TEST_P(ExchangeFaultTest, WeightGradient) {
  FaultsOf([](World& w, Messages& m) {
    std::vector<Exchange::WeightFeature> features(1);
    static_cast<BagWeightTask&>(features[0]) = {&m.bags,
                                                m.two.weights.data(),
                                                Combiner::kMean,
                                                nullptr,
                                                m.two.pooled.data(),
                                                m.two.upstream.data(),
                                                m.two.gradient.data()};
    features[0].index = m.index.data();
    DYNEMB_RETURN_IF_ERROR(HostExchange().WeightGradient(w.exec, m.AsReceived(), features));
    w.Deliver(m.two.gradient.data(), m.two.gradient.size() * sizeof(float));
    return Status();
  });
}

TEST_P(ExchangeFaultTest, SumRequestedAndReceived) {
  FaultsOf([](World& w, Messages& m) {
    std::vector<GatherGradient::Task> tasks(1);
    tasks[0].features.resize(1);
    tasks[0].features[0].bags = &m.bags;
    tasks[0].features[0].upstream = m.two.upstream.data();
    tasks[0].features[0].dim = w.setup.dim;
    tasks[0].features[0].index = m.index.data();
    DYNEMB_RETURN_IF_ERROR(
        HostExchange().SumRequested(w.exec, m.gradient_layout, tasks, m.sums.data(), {nullptr}));
    w.Deliver(m.sums.data(), m.sums.size() * sizeof(int32_t));
    Bags each;
    const auto n = static_cast<int64_t>(World::kDistinct);
    DYNEMB_RETURN_IF_ERROR(each.InitUniform(1, n, n));
    std::vector<BackwardTask> received(1);
    received[0].keys = w.keys.data();
    received[0].bags = &each;
    received[0].dim = w.setup.dim;
    std::vector<uint64_t> unique(World::kDistinct);
    std::vector<float> sums(World::kDistinct * w.dim);
    DYNEMB_RETURN_IF_ERROR(
        HostExchange().SumReceived(w.exec, {&m.gradient_layout, m.sums.data(), {nullptr}}, received,
                                   [&](size_t, size_t, BackwardOutput* output) {
                                     *output = {unique.data(), nullptr, sums.data()};
                                     return Status();
                                   }));
    w.Deliver(sums.data(), sums.size() * sizeof(float));
    return Status();
  });
}

INSTANTIATE_TEST_SUITE_P(Setups, LookupFaultTest, ::testing::ValuesIn(Setups()),
                         ::testing::PrintToStringParamName());
// These calls use only the dim and dtype of the table.
INSTANTIATE_TEST_SUITE_P(Setups, ExchangeFaultTest,
                         ::testing::Values(Setup{Kind::kGrows, 4, DType::kFloat32, 1},
                                           Setup{Kind::kGrows, 300, DType::kBfloat16, 1},
                                           Setup{Kind::kGrows, 300, DType::kFloat32, 4}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace fault
}  // namespace dynemb
