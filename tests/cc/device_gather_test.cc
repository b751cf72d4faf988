// GatherPool and GatherWeightGradient on simulated devices: the same bits as on the host, for
// vectors at any address, and zeros for an index out of range.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cc/device/gather.h"
#include "tests/cc/gather_features.h"
#include "tests/cc/gather_model.h"
#include "tests/cc/sanitizers.h"
#include "tests/cc/simulated_devices.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb {
namespace {

using Random = std::mt19937_64;

// The results of the host.
std::vector<Outputs> OnHost(const std::vector<Feature>& features, size_t before) {
  SerialExec exec;
  std::vector<Outputs> outputs;
  for (const Feature& f : features) {
    outputs.emplace_back(f, before);
    GatherTask pool = PoolTaskOf(f, f.host_index, &outputs.back());
    pool.vectors = f.vectors.raw.data();
    GatherPool(exec, {pool});
    GatherWeightTask weights = WeightTaskOf(f, f.host_index, outputs.back(), &outputs.back());
    weights.vectors = f.vectors.raw.data();
    GatherWeightGradient(exec, {weights});
  }
  return outputs;
}

template <class Device>
class DeviceGatherTest : public testing::Test {
 protected:
  // All features in one call. The results must be the host's.
  void Check(const std::vector<Feature>& features) {
    for (const Placement placement : kPlacements) {
      SCOPED_TRACE(testing::Message() << "placement " << static_cast<int>(placement));
      const size_t before = placement == Placement::kArray ? 0 : 1;
      const std::vector<Outputs> expected = OnHost(features, before);
      std::vector<PlacedVectors> placed;
      std::vector<Outputs> got;
      std::vector<GatherTask> pool;
      std::vector<GatherWeightTask> weights;
      for (const Feature& f : features) {
        placed.emplace_back(f, placement);
        got.emplace_back(f, before);
        pool.push_back(PoolTaskOf(f, f.c.index, &got.back()));
        placed.back().Set(&pool.back());
        weights.push_back(WeightTaskOf(f, f.c.index, got.back(), &got.back()));
        placed.back().Set(&weights.back());
      }
      {
        typename Device::Session session(device_, &exec_);
        ASSERT_TRUE(device::GatherPool(session, pool).ok());
        ASSERT_TRUE(device::GatherWeightGradient(session, weights).ok());
      }
      EXPECT_EQ(device_.waits(), 0u);
      for (size_t t = 0; t < features.size(); ++t) {
        const Feature& f = features[t];
        const Outputs &a = got[t], &b = expected[t];
        SCOPED_TRACE(Text(f, t));
        ASSERT_EQ(OneNan(f.vectors.dtype, a.odd, a.pooled.Bytes()),
                  OneNan(f.vectors.dtype, b.odd, b.pooled.Bytes()));
        ASSERT_EQ(a.argmax.Bytes(), b.argmax.Bytes());
        ASSERT_EQ(OneNan(DType::kFloat32, before * 4, a.gradient.Bytes()),
                  OneNan(DType::kFloat32, before * 4, b.gradient.Bytes()));
      }
    }
  }

  static testing::Message Text(const Feature& f, size_t t) {
    return testing::Message() << "task " << t << " dtype " << static_cast<int>(f.vectors.dtype)
                              << " dim " << f.ids().task.dim << " combiner "
                              << static_cast<int>(f.ids().task.combiner) << " bags "
                              << f.ids().bags.num_bags() << " ids " << f.c.index.size() << " rows "
                              << f.n << (f.ids().task.weights != nullptr ? " weighted" : "");
  }

  Device device_;
  ThreadsExec exec_{2};
};

TYPED_TEST_SUITE(DeviceGatherTest, SimulatedDevices);

// Every combiner and form of bags, with weights and without.
void AddAllKinds(Shape shape, size_t n, Random* random, Numbers numbers,
                 std::vector<Feature>* features) {
  for (const Combiner combiner : kCombiners) {
    for (const Form form : kForms) {
      for (const bool weighted : {false, true}) {
        shape.combiner = combiner;
        shape.form = form;
        shape.weighted = weighted;
        features->push_back(MakeFeature(shape, n, random, numbers));
      }
    }
  }
}

TYPED_TEST(DeviceGatherTest, SameBitsAsOnTheHost) {
  Random random(1);
  for (const bool special : {false, true}) {
    for (const size_t beyond : {0, 5, 1}) {
      SCOPED_TRACE(testing::Message() << "special " << special << ", beyond " << beyond);
      std::vector<Feature> features;
      for (const DType dtype : kDTypes) {
        Shape s{12, 70, 5, 30};
        s.dtype = dtype;
        AddAllKinds(s, 31, &random, {beyond, special}, &features);
        s.dim = 16;
        s.nnz = 24;  // some bags are empty
        AddAllKinds(s, 30, &random, {beyond, special}, &features);
      }
      ASSERT_NO_FATAL_FAILURE(this->Check(features));
    }
  }
}

TYPED_TEST(DeviceGatherTest, EveryDim) {
  SKIP_UNDER_TSAN("threads divide the work in the same way for all dims");
  Random random(2);
  for (const DType dtype : kDTypes) {
    std::vector<Feature> features;
    for (const int64_t dim : {1, 2, 3, 4, 7, 8, 15, 17, 64, 127, 128, 129, 300}) {
      for (const Combiner combiner : {Combiner::kMean, Combiner::kMax}) {
        Shape s{6, 40, dim, 20};
        s.dtype = dtype;
        s.combiner = combiner;
        s.weighted = true;
        s.form = Form::kSplits;
        features.push_back(MakeFeature(s, 20, &random, {9, false}));
      }
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(features));
  }
}

// Vectors are read several at a time: any number of ids may be left over, and any of them may have
// no row.
TYPED_TEST(DeviceGatherTest, BagsOfAnySizeWithMissingRows) {
  Random random(3);
  std::vector<Feature> features;
  for (size_t size = 0; size <= 9; ++size) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      Shape s{3, 3 * size, 4, 20};
      s.combiner = kCombiners[repeat % 4];
      s.weighted = true;
      features.push_back(MakeFeature(s, 20, &random, {3, false}));
    }
  }
  ASSERT_NO_FATAL_FAILURE(this->Check(features));
}

TYPED_TEST(DeviceGatherTest, ManyTasksOfAllKinds) {
  Random random(4);
  for (const size_t tasks : {0, 1, 2, 50}) {
    SCOPED_TRACE(testing::Message() << tasks << " tasks");
    std::vector<Feature> features;
    for (size_t t = 0; t < tasks; ++t) {
      Shape s{random() % 20, 0, int64_t(1 + random() % 40), 1 + random() % 50};
      // Some tasks have bags without ids, no bags, or ids without rows.
      if (s.num_bags > 0 && t % 5 != 4) s.nnz = random() % 80;
      s.combiner = kCombiners[random() % 4];
      s.form = kForms[random() % 4];
      s.weighted = random() % 2;
      s.dtype = kDTypes[random() % 3];
      const size_t n = t % 7 == 3 ? 0 : s.vocabulary;
      features.push_back(MakeFeature(s, n, &random, {random() % 9, false}));
    }
    ASSERT_NO_FATAL_FAILURE(this->Check(features));
  }
}

TYPED_TEST(DeviceGatherTest, OneBagOfFewIds) {
  Random random(9);
  for (const size_t nnz : {0, 1, 2}) {
    for (const Combiner combiner : kCombiners) {
      Shape s{1, nnz, 3, 4};
      s.combiner = combiner;
      std::vector<Feature> features;
      features.push_back(MakeFeature(s, 4, &random));
      ASSERT_NO_FATAL_FAILURE(this->Check(features));
    }
  }
}

TYPED_TEST(DeviceGatherTest, WithoutRows) {
  Random random(5);
  std::vector<Feature> features;
  Shape s{10, 60, 6, 1};
  AddAllKinds(s, 0, &random, {}, &features);
  s.nnz = 0;
  AddAllKinds(s, 0, &random, {}, &features);
  s.num_bags = 0;
  AddAllKinds(s, 0, &random, {}, &features);
  ASSERT_NO_FATAL_FAILURE(this->Check(features));
}

// Compares with the definition in combiner.h.
TYPED_TEST(DeviceGatherTest, AgreesWithTheModel) {
  Random random(6);
  for (const Combiner combiner : kCombiners) {
    for (const DType dtype : kDTypes) {
      Shape s{40, 300, 7, 50};
      s.combiner = combiner;
      s.form = Form::kUnsorted;
      s.weighted = true;
      const GatherCase c = MakeGatherCase(s, 50, &random);
      const Vectors vectors(50, 7, dtype, &random);
      Pooled pooled(40, 7, dtype, combiner);
      typename TypeParam::Session session(this->device_, &this->exec_);
      ASSERT_TRUE(device::GatherPool(session, {TaskOf(c, vectors, &pooled)}).ok());
      ASSERT_NO_FATAL_FAILURE(CheckPooled(c, vectors, pooled));
    }
  }
}

TYPED_TEST(DeviceGatherTest, IndexOutOfRangeByHand) {
  const std::vector<float> vectors = {-1, -2, -3, -4}, weights = {2, 3, 1, 1};
  const std::vector<uint32_t> index = {1, 2, 0xFFFFFFFF, 0};
  const std::vector<float> upstream = {1, 10, 100, 1000};
  Bags bags;
  ASSERT_TRUE(bags.InitUniform(2, 4, 2).ok());
  std::vector<float> pooled(4, 77), gradient(4, 77);
  std::vector<int32_t> argmax(4, 77);
  GatherTask pool;
  pool.bags = &bags;
  pool.weights = weights.data();
  pool.combiner = Combiner::kMax;
  pool.pooled = pooled.data();
  pool.argmax = argmax.data();
  pool.vectors = vectors.data();
  pool.n = 2;
  pool.index = index.data();
  pool.dim = 2;
  typename TypeParam::Session session(this->device_, &this->exec_);
  ASSERT_TRUE(device::GatherPool(session, {pool}).ok());
  EXPECT_EQ(pooled, (std::vector<float>{0, 0, 0, 0}));
  EXPECT_EQ(argmax, (std::vector<int32_t>{1, 1, 2, 2}));
  pool.combiner = Combiner::kSum;
  ASSERT_TRUE(device::GatherPool(session, {pool}).ok());
  EXPECT_EQ(pooled, (std::vector<float>{-6, -8, -1, -2}));
  GatherWeightTask task;
  task.bags = &bags;
  task.weights = weights.data();
  task.pooled = pooled.data();
  task.upstream = upstream.data();
  task.gradient = gradient.data();
  task.vectors = vectors.data();
  task.n = 2;
  task.index = index.data();
  task.dim = 2;
  ASSERT_TRUE(device::GatherWeightGradient(session, {task}).ok());
  EXPECT_EQ(gradient, (std::vector<float>{-43, 0, 0, -2100}));
}

TYPED_TEST(DeviceGatherTest, TooManyBagsOrIds) {
  const auto expect = [&](int64_t hotness, int64_t num_bags, const char* pool_message,
                          const char* weights_message) {
    Bags large, small;
    ASSERT_TRUE(large.InitUniform(hotness, hotness * num_bags, num_bags).ok());
    ASSERT_TRUE(small.InitUniform(1, 1, 1).ok());
    std::vector<GatherTask> pool(2);
    pool[0].bags = &large;
    pool[1].bags = &small;
    std::vector<GatherWeightTask> weights(2);
    weights[0].bags = &large;
    weights[1].bags = &small;
    typename TypeParam::Session session(this->device_, &this->exec_);
    this->device_.FailTake(0);  // the call fails before it takes memory
    if (pool_message != nullptr) {
      const Status status = device::GatherPool(session, pool);
      EXPECT_EQ(status.code(), Code::kInvalidArgument);
      EXPECT_EQ(status.message(), pool_message);
    }
    const Status status = device::GatherWeightGradient(session, weights);
    EXPECT_TRUE(this->device_.FailTake(TypeParam::kNever));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.message(), weights_message);
  };
  const char* const bags =
      "all tables together may have at most 2^32 - 2 bags in a batch, got 4294967295";
  expect(1, Bags::kMaxSize, bags, bags);
  expect(2, Bags::kMaxSize / 2, nullptr,
         "all tables together may have at most 2^32 - 2 ids in a batch, got 4294967295");
}

TYPED_TEST(DeviceGatherTest, WorkspaceAllocationFails) {
  Random random(7);
  std::vector<Feature> features;
  Shape s{10, 60, 6, 20};
  AddAllKinds(s, 20, &random, {}, &features);
  const auto run = [&](uint64_t failing, bool pools) {
    std::vector<PlacedVectors> placed;
    std::vector<Outputs> outputs = OnHost(features, 0), written;
    std::vector<GatherTask> pool;
    std::vector<GatherWeightTask> weights;
    for (size_t t = 0; t < features.size(); ++t) {
      const Feature& f = features[t];
      placed.emplace_back(f, Placement::kRows);
      written.emplace_back(f, 0);
      pool.push_back(PoolTaskOf(f, f.c.index, &written.back()));
      placed.back().Set(&pool.back());
      weights.push_back(WeightTaskOf(f, f.c.index, outputs[t], &written.back()));
      placed.back().Set(&weights.back());
    }
    typename TypeParam::Session session(this->device_, &this->exec_);
    this->device_.FailTake(failing);
    const Status status =
        pools ? device::GatherPool(session, pool) : device::GatherWeightGradient(session, weights);
    const bool finished = this->device_.FailTake(TypeParam::kNever);
    EXPECT_EQ(status.code(), finished ? Code::kOk : Code::kResourceExhausted) << failing;
    return finished;
  };
  for (const bool pools : {true, false}) {
    uint64_t n = 0;
    while (!run(n, pools)) ++n;
    EXPECT_GT(n, features.size() / 2);
  }
  ASSERT_NO_FATAL_FAILURE(this->Check(features));
}

// Counts the work that is given to the device.
class CountingSession : public ThreadsDevice::Session {
 public:
  using Base = ThreadsDevice::Session;
  using Base::Base;
  int launches = 0;
  size_t quads = 0;

  template <class Body>
  void ForEach(size_t n, const Body& body) {
    launches += n != 0;
    Base::ForEach(n, body);
  }
  template <class Body>
  void ForRows(size_t n, size_t of, const Body& body) {
    launches += n != 0;
    quads = of;
    Base::ForRows(n, of, body);
  }
};

TEST(DeviceGatherWorkTest, LaunchesDoNotDependOnTheNumberOfTasks) {
  ThreadsDevice device;
  for (const size_t count : {0, 1, 30}) {
    Random random(8);
    std::vector<Feature> features;
    for (size_t t = 0; t < count; ++t) {
      // Many tasks, the widest of which is neither the first nor the last.
      Shape s{10, 60, t % 20 == 0 ? 37 : 9, 20};
      if (t == 7) s.dim = 70;
      s.combiner = kCombiners[t % 4];
      s.weighted = true;
      features.push_back(MakeFeature(s, 20, &random));
    }
    std::vector<PlacedVectors> placed;
    std::vector<Outputs> outputs;
    std::vector<GatherTask> pool;
    std::vector<GatherWeightTask> weights;
    for (const Feature& f : features) {
      placed.emplace_back(f, Placement::kArray);
      outputs.emplace_back(f, 0);
      pool.push_back(PoolTaskOf(f, f.c.index, &outputs.back()));
      placed.back().Set(&pool.back());
      weights.push_back(WeightTaskOf(f, f.c.index, outputs.back(), &outputs.back()));
      placed.back().Set(&weights.back());
    }
    CountingSession session(device, nullptr);
    ASSERT_TRUE(device::GatherPool(session, pool).ok());
    // One more if a combiner divides: for the factors of bags.
    const int launches = count == 0 ? 0 : count == 1 && !HasScale(kCombiners[0]) ? 1 : 2;
    EXPECT_EQ(session.launches, launches);
    EXPECT_EQ(session.quads, count == 0 ? 0u : count == 1 ? 10u : 18u);
    ASSERT_TRUE(device::GatherWeightGradient(session, weights).ok());
    EXPECT_EQ(session.launches, launches + (count == 0 ? 0 : 2));
  }
}

}  // namespace
}  // namespace dynemb
