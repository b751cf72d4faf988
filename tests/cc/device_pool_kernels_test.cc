// The kernels of a pooled lookup give the same bits as BagCombiner and WeightGradientOfBags, for
// every width of teams, dim, element type and form of bags, and for many tasks and tables in one
// launch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cc/device/kernels_pool.h"
#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/weight_gradient.h"
#include "cc/table/codec.h"
#include "cc/table/initializer.h"
#include "tests/cc/device_pool_batch.h"
#include "tests/cc/simulated_devices.h"
#include "tests/simulated/simulated_tables.h"

namespace dynemb::device {
namespace {

template <class Part, class Session>
void SetIds(Session& session, const Task& task, Part* part) {
  part->bags = ToDevice(session, task.bags);
  part->first_id = task.first_id;
  part->table = task.table;
  part->weights = task.weights_or_null();
  part->combiner = task.combiner;
}

struct Pooled {
  Pooled(const RowLayout& layout, const Task& task)
      : vectors(task.bags.num_bags() * layout.vector_bytes()),
        argmax(task.combiner == Combiner::kMax
                   ? task.bags.num_bags() * static_cast<size_t>(layout.dim)
                   : 0) {}
  int32_t* argmax_or_null() { return argmax.bytes.size() == kGuards ? nullptr : argmax.data(); }

  Output<char> vectors;
  Output<int32_t> argmax;
};

// The results of PoolBags, for each task.
template <class Device>
std::vector<Pooled> PoolOnDevice(Batch* batch) {
  Device device;
  ThreadsExec exec(2);
  typename Device::Session session(device, &exec);
  const Batch::Ids ids = batch->AllIds();
  std::vector<Pooled> results;
  std::vector<PoolPart<TableVectors>> parts;
  std::vector<uint32_t> begins{0}, scaled{0};
  for (const auto& task : batch->tasks()) {
    results.emplace_back(batch->RowsOf(*task).layout(), *task);
    PoolPart<TableVectors> part;
    SetIds(session, *task, &part);
    part.pooled = results.back().vectors.data();
    part.argmax = results.back().argmax_or_null();
    scaled.push_back(scaled.back());
    if (HasScale(task->combiner)) {
      part.scales = session.template Take<float>(part.bags.num_bags);
      scaled.back() += part.bags.num_bags;
    }
    parts.push_back(part);
    begins.push_back(begins.back() + part.bags.num_bags);
  }
  const TableVectors source{batch->Views(session), batch->Keys(ids), ids.rows.data()};
  const uint32_t num_bags = begins.back(), length = 1 + num_bags % 8;  // runs of any length
  const Parts<PoolPart<TableVectors>> of_bags = ToDevice(session, parts, begins);
  Parts<PoolPart<TableVectors>> of_scaled = of_bags;
  of_scaled.begins = ToDevice(session, scaled.data(), scaled.size());
  session.ForEach(scaled.back(), ScalePooled<TableVectors>{source, of_scaled});
  const PoolBags<TableVectors> body{source, of_bags, num_bags, length};
  session.ForRows(NumRuns(num_bags, length), /*quads=*/1, body);
  EXPECT_TRUE(session.Synchronize().ok());
  return results;
}

Pooled PoolOnHost(Batch* batch, const Task& task) {
  const RowLayout& layout = batch->RowsOf(task).layout();
  Pooled result(layout, task);
  const BagTask host_task = batch->HostTask(task, result.vectors.data(), result.argmax_or_null());
  DispatchDim(layout.dim, [&](auto dim) {
    BagCombiner<decltype(dim)::value> combine(host_task, layout.dtype, layout.dim, 0);
    for (size_t i = 0; i < task.bags.nnz(); ++i) {
      combine.Add(i, batch->Vector(task, task.bags.position(i)).data());
    }
    combine.Finish(task.bags.num_bags());
  });
  return result;
}

testing::Message Text(Batch* batch, size_t t) {
  const Task& task = *batch->tasks()[t];
  const RowLayout& layout = batch->RowsOf(task).layout();
  return testing::Message() << "task " << t << " dtype " << static_cast<int>(layout.dtype)
                            << " dim " << layout.dim << " combiner "
                            << static_cast<int>(task.combiner) << " form "
                            << static_cast<int>(task.form) << " bags " << task.bags.num_bags()
                            << " ids " << task.bags.nnz()
                            << (task.weights.empty() ? "" : " weighted");
}

template <class Device>
void ExpectPooledAsOnHost(Batch* batch) {
  std::vector<Pooled> got = PoolOnDevice<Device>(batch);
  for (size_t t = 0; t < got.size(); ++t) {
    SCOPED_TRACE(Text(batch, t));
    const Task& task = *batch->tasks()[t];
    const Pooled expected = PoolOnHost(batch, task);
    const DType dtype = batch->RowsOf(task).layout().dtype;
    ASSERT_EQ(OneNan(dtype, got[t].vectors.bytes), OneNan(dtype, expected.vectors.bytes));
    ASSERT_EQ(got[t].argmax.bytes, expected.argmax.bytes);
  }
}

// Compares BagWeightGradients with WeightGradientOfBags, both given the pooled vectors of the host.
template <class Device>
void ExpectWeightGradientsAsOnHost(Batch* batch, bool special) {
  Device device;
  ThreadsExec exec(2);
  typename Device::Session session(device, &exec);
  const Batch::Ids ids = batch->AllIds();
  Random random(5);
  std::vector<Pooled> pooled;
  std::vector<std::vector<char>> upstream;
  std::vector<std::vector<int32_t>> argmaxes;
  std::vector<Output<float>> gradients;
  std::vector<WeightGradientPart<TableVectors>> parts;
  std::vector<uint32_t> bag_begins{0}, id_begins{0};
  for (const auto& task : batch->tasks()) {
    const RowLayout& layout = batch->RowsOf(*task).layout();
    pooled.push_back(PoolOnHost(batch, *task));
    upstream.emplace_back(task->bags.num_bags() * layout.vector_bytes());
    std::vector<float> numbers(upstream.back().size() / SizeOf(layout.dtype));
    for (float& x : numbers) x = Number(&random, special);
    StoreVector(layout.dtype, numbers.data(), static_cast<int64_t>(numbers.size()),
                upstream.back().data());
    gradients.emplace_back(task->bags.nnz());
    WeightGradientPart<TableVectors> part;
    SetIds(session, *task, &part);
    // A copy without guards, so that the address sanitizer detects reads beyond its end.
    int32_t* const argmax = pooled.back().argmax_or_null();
    if (argmax != nullptr) argmaxes.emplace_back(argmax, argmax + numbers.size());
    part.argmax = argmax == nullptr ? nullptr : argmaxes.back().data();
    part.pooled = pooled.back().vectors.data();
    part.upstream = upstream.back().data();
    if (HasScale(task->combiner)) {
      part.terms = session.template Take<BagTerms>(task->bags.num_bags());
    }
    part.gradient = gradients.back().data();
    parts.push_back(part);
    bag_begins.push_back(bag_begins.back() + part.bags.num_bags);
    id_begins.push_back(id_begins.back() + static_cast<uint32_t>(task->bags.nnz()));
  }
  const TableVectors source{batch->Views(session), batch->Keys(ids), ids.rows.data()};
  session.ForEach(bag_begins.back(), PrepareWeightGradients<TableVectors>{
                                         source, ToDevice(session, parts, bag_begins)});
  session.ForEach(id_begins.back(),
                  BagWeightGradients<TableVectors>{source, ToDevice(session, parts, id_begins)});
  ASSERT_TRUE(session.Synchronize().ok());

  for (size_t t = 0; t < parts.size(); ++t) {
    SCOPED_TRACE(Text(batch, t));
    const Task& task = *batch->tasks()[t];
    const RowLayout& layout = batch->RowsOf(task).layout();
    Output<float> expected(task.bags.nnz());
    BagWeightTask host_task;
    host_task.bags = &task.bags;
    host_task.weights = task.weights.data();
    host_task.combiner = task.combiner;
    host_task.argmax = pooled[t].argmax_or_null();
    host_task.pooled = pooled[t].vectors.data();
    host_task.upstream = upstream[t].data();
    host_task.gradient = expected.data();
    std::vector<char> vector;
    WeightGradientOfBags(host_task, layout.dtype, layout.dim, 0, task.bags.num_bags(),
                         [&](size_t position) {
                           vector = batch->Vector(task, position);
                           return vector.data();
                         });
    ASSERT_EQ(OneNan(DType::kFloat32, gradients[t].bytes), OneNan(DType::kFloat32, expected.bytes));
  }
}

// A table for each element type and dim, and a task for each table, combiner and form of bags.
std::unique_ptr<Batch> AllTasks(size_t key_size, bool special, bool only_weighted) {
  std::vector<std::pair<DType, int64_t>> tables;
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : kDims) tables.emplace_back(dtype, dim);
  }
  auto batch = std::make_unique<Batch>(key_size, tables, key_size * 2 + (special ? 1 : 0));
  for (uint32_t table = 0; table < tables.size(); ++table) {
    for (const Combiner combiner : kCombiners) {
      for (const Form form : kForms) {
        batch->AddTask(table, combiner, true, form, special);
        if (!only_weighted) batch->AddTask(table, combiner, false, form, special);
      }
    }
  }
  return batch;
}

template <class Device>
class DevicePoolKernels : public testing::Test {};
TYPED_TEST_SUITE(DevicePoolKernels, SimulatedDevices);

TYPED_TEST(DevicePoolKernels, PooledVectorsMatchTheHost) {
  for (const size_t key_size : {size_t{4}, size_t{8}}) {
    for (const bool special : {false, true}) {
      ExpectPooledAsOnHost<TypeParam>(AllTasks(key_size, special, false).get());
    }
  }
}

TYPED_TEST(DevicePoolKernels, WeightGradientsMatchTheHost) {
  for (const size_t key_size : {size_t{4}, size_t{8}}) {
    for (const bool special : {false, true}) {
      ExpectWeightGradientsAsOnHost<TypeParam>(AllTasks(key_size, special, true).get(), special);
    }
  }
}

TYPED_TEST(DevicePoolKernels, BatchOfOneTable) {
  Batch batch(8, {{DType::kFloat16, 33}}, 9);
  for (const Combiner combiner : kCombiners) {
    for (const Form form : kForms) batch.AddTask(0, combiner, true, form, false);
  }
  ExpectPooledAsOnHost<TypeParam>(&batch);
  ExpectWeightGradientsAsOnHost<TypeParam>(&batch, false);
}

// Vectors are read several at a time: any number of ids may be left over, and any of them may have
// no row.
TYPED_TEST(DevicePoolKernels, BagsOfAnySizeWithMissingRows) {
  Batch batch(8, {{DType::kFloat32, 5}, {DType::kBfloat16, 8}}, 10);
  for (uint32_t size = 0; size <= 9; ++size) {
    for (uint32_t missing = 0; missing < 1u << std::min(size, 6u); ++missing) {
      std::vector<RowId> rows;
      for (uint32_t k = 0; k < size; ++k) rows.push_back((missing >> k & 1) != 0 ? kNoRow : k * 3);
      const auto combiner = kCombiners[(size + missing) % std::size(kCombiners)];
      Task& task = batch.AddBag(missing % 2, combiner, rows);
      for (uint32_t k = 0; k < size; ++k) task.keys[k] = 1000 * size + k;
    }
  }
  ExpectPooledAsOnHost<TypeParam>(&batch);
}

TYPED_TEST(DevicePoolKernels, SpecialNumbersByHand) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const float values[] = {-0.0f, 2.0f, nan, 3.0f, inf, -1.0f, 0.0f};
  Batch batch(8, {{DType::kFloat32, 1}}, 11);
  enum : RowId { kMinusZero, kTwo, kNan, kThree, kInf, kMinusOne, kZero };
  struct Case {
    Combiner combiner;
    std::vector<RowId> rows;
    std::vector<float> weights;
    float expected;
    int32_t argmax;
  };
  const Case cases[] = {
      {Combiner::kSum, {}, {}, 0.0f, 0},
      {Combiner::kSum, {kMinusZero}, {}, -0.0f, 0},
      {Combiner::kSum, {kMinusZero, kMinusZero}, {}, -0.0f, 0},
      {Combiner::kSum, {kZero}, {-1.0f}, -0.0f, 0},
      {Combiner::kSum, {kMinusZero, kZero}, {}, 0.0f, 0},
      {Combiner::kSum, {kInf, kTwo}, {0.0f, 1.0f}, nan, 0},
      {Combiner::kMean, {}, {}, 0.0f, 0},
      {Combiner::kMean, {kInf, kNan, kTwo}, {0.0f, 0.0f, 0.0f}, 0.0f, 0},
      {Combiner::kMean, {kNan, kTwo}, {2.0f, -2.0f}, 0.0f, 0},
      {Combiner::kMean, {kTwo, kThree}, {1.0f, 3.0f}, 2.75f, 0},
      {Combiner::kSqrtn, {kInf}, {0.0f}, 0.0f, 0},
      {Combiner::kSqrtn, {kTwo, kTwo, kThree, kThree}, {}, 5.0f, 0},
      {Combiner::kMax, {}, {}, 0.0f, -1},
      {Combiner::kMax, {kMinusOne}, {}, -1.0f, 0},
      {Combiner::kMax, {kTwo, kThree, kTwo, kThree, kMinusOne, kThree}, {}, 3.0f, 1},
      {Combiner::kMax, {kNan, kThree}, {}, nan, 0},
      {Combiner::kMax, {kTwo, kNan, kThree}, {}, 3.0f, 2},
      {Combiner::kMax, {kMinusZero, kZero}, {}, -0.0f, 0},
      {Combiner::kMax, {kTwo, kThree}, {1.0f, -1.0f}, 2.0f, 0},
      {Combiner::kMax, {kThree, kInf}, {1.0f, 0.0f}, 3.0f, 0},
  };
  for (const Case& c : cases) batch.AddBag(0, c.combiner, c.rows, c.weights);
  Rows& rows = batch.RowsOf(*batch.tasks()[0]);
  for (RowId row = 0; row < std::size(values); ++row) {
    memcpy(rows.View().VectorAt(row), &values[row], sizeof(float));
  }
  std::vector<Pooled> got = PoolOnDevice<TypeParam>(&batch);
  for (size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(i);
    const float value = *reinterpret_cast<float*>(got[i].vectors.data());
    if (std::isnan(cases[i].expected)) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(FloatBits(value), FloatBits(cases[i].expected)) << value;
    }
    if (cases[i].combiner == Combiner::kMax) {
      EXPECT_EQ(*got[i].argmax.data(), cases[i].argmax);
    }
  }
  ExpectPooledAsOnHost<TypeParam>(&batch);
}

}  // namespace
}  // namespace dynemb::device
