// The kernels of a pooled lookup give the bits of BagCombiner and of WeightGradientOfBags: whatever
// the team's width, the dim, the element type and the form of the bags, for many tasks and tables
// in one launch.
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
#include "cc/device/simulated_tables.h"
#include "cc/lookup/bag_combiner.h"
#include "cc/lookup/weight_gradient.h"
#include "cc/table/codec.h"
#include "cc/table/initializer.h"
#include "tests/cc/simulated_devices.h"

namespace dynemb::device {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
constexpr int64_t kDims[] = {1, 3, 4, 8, 33, 128};
constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn,
                                   Combiner::kMax};
enum class Form { kUniform, kSplits, kDescending, kShuffled };
constexpr Form kForms[] = {Form::kUniform, Form::kSplits, Form::kDescending, Form::kShuffled};
constexpr unsigned char kGuard = 0xA5;
constexpr size_t kGuards = 32;

using Random = std::mt19937_64;

// Ordinary numbers; `special`: one in four is not.
float Number(Random* random, bool special) {
  using Limits = std::numeric_limits<float>;
  const float specials[] = {Limits::quiet_NaN(),
                            Limits::infinity(),
                            -Limits::infinity(),
                            Limits::max(),
                            0.0f,
                            -0.0f,
                            Limits::denorm_min(),
                            1.0f,
                            -1.0f};
  if (special && (*random)() % 4 == 0) return specials[(*random)() % std::size(specials)];
  return std::normal_distribution<float>()(*random);
}

// Rows in two arrays, as two tiers. Those from kFirstSpecial on hold numbers of any kind.
class Rows {
 public:
  static constexpr RowId kCount = 40, kSplit = 27, kFirstSpecial = 20;

  Rows(DType dtype, int64_t dim, size_t key_size, uint64_t seed, Random* random)
      : layout_(key_size, dtype, dim, 2, 16),
        device_(kSplit * layout_.stride / sizeof(Quad<float>)),
        host_((kCount - kSplit) * layout_.stride / sizeof(Quad<float>)) {
    std::vector<ColumnInit> columns = {{InitKind::kNormal, 0.5f, 2.0f}};
    if (seed % 2 == 0) {
      columns.resize(static_cast<size_t>(dim));
      for (size_t c = 0; c < columns.size(); ++c) {
        const auto kind = c % 5 < 2 ? InitKind::kConstant : InitKind::kUniform;
        columns[c] = {kind, static_cast<float>(c) * -0.1f, 100.0f};
      }
    }
    EXPECT_TRUE(Initializer::Create(columns, dim, seed, &initializer_).ok());
    for (RowId row = 0; row < kCount; ++row) {
      char* const at = View().RowAt(row);
      memset(at, kGuard, layout_.stride);
      std::vector<float> vector(static_cast<size_t>(dim));
      for (float& v : vector) v = Number(random, row >= kFirstSpecial);
      StoreVector(dtype, vector.data(), dim, layout_.vector(at));
    }
  }

  TableView View() {
    TableView view;
    view.rows = {reinterpret_cast<char*>(device_.data()), reinterpret_cast<char*>(host_.data()),
                 kSplit, layout_.stride};
    view.layout = layout_;
    view.initial = {initializer_.seed(), initializer_.dim(), initializer_.runs().data(),
                    static_cast<uint32_t>(initializer_.runs().size())};
    return view;
  }
  const RowLayout& layout() const { return layout_; }

  // The vector of an id, as the host has it.
  std::vector<char> Vector(RowId row, uint64_t key) {
    std::vector<char> vector(layout_.vector_bytes());
    if (row != kNoRow) {
      memcpy(vector.data(), layout_.vector(View().RowAt(row)), vector.size());
    } else {
      std::vector<float> floats(static_cast<size_t>(layout_.dim));
      initializer_.Fill(key, floats.data());
      StoreVector(layout_.dtype, floats.data(), layout_.dim, vector.data());
    }
    return vector;
  }

 private:
  RowLayout layout_;
  std::vector<Quad<float>> device_, host_;
  Initializer initializer_;
};

// An array that kernels write to, rubbish at first, with guards behind it.
template <class T>
struct Output {
  explicit Output(size_t n) : bytes(n * sizeof(T) + kGuards, kGuard) {}
  T* data() { return reinterpret_cast<T*>(bytes.data()); }
  std::vector<unsigned char> bytes;
};

// Which NaN a NaN is, is not compared.
std::vector<unsigned char> OneNan(DType dtype, std::vector<unsigned char> bytes) {
  std::vector<float> values((bytes.size() - kGuards) / SizeOf(dtype));
  LoadVector(dtype, bytes.data(), static_cast<int64_t>(values.size()), values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      memset(&bytes[i * SizeOf(dtype)], 0xFF, SizeOf(dtype));
    }
  }
  return bytes;
}

struct Task {
  uint32_t table = 0;
  Combiner combiner = Combiner::kSum;
  Form form = Form::kUniform;
  std::vector<int64_t> splits_or_indices;
  Bags bags;
  std::vector<float> weights;  // empty: none
  std::vector<uint64_t> keys;
  std::vector<RowId> rows;
  uint32_t first_id = 0;  // in the batch

  const float* weights_or_null() const { return weights.empty() ? nullptr : weights.data(); }
};

// Tables, and tasks on them.
class Batch {
 public:
  Batch(size_t key_size, std::vector<std::pair<DType, int64_t>> tables, uint64_t seed)
      : key_size_(key_size), random_(seed) {
    for (const auto& [dtype, dim] : tables) {
      tables_.push_back(std::make_unique<Rows>(dtype, dim, key_size, tables_.size(), &random_));
    }
  }

  // `special`: rows and weights of any kind. One id in six has no row.
  void AddTask(uint32_t table, Combiner combiner, bool weighted, Form form, bool special) {
    auto task = std::make_unique<Task>();
    task->table = table;
    task->combiner = combiner;
    task->form = form;
    const size_t num_bags = random_() % 8;
    const size_t hotness = random_() % 10;
    std::vector<int64_t>& of = task->splits_or_indices;
    std::vector<size_t> sizes(num_bags, hotness);
    if (form != Form::kUniform) {
      for (size_t& size : sizes) size = random_() % 3 == 0 ? 0 : random_() % 13;
      if (num_bags != 0 && random_() % 4 == 0) sizes[random_() % num_bags] = 40;
    }
    std::vector<int64_t> bag_of;
    for (size_t b = 0; b < num_bags; ++b) bag_of.insert(bag_of.end(), sizes[b], int64_t(b));
    const auto nnz = static_cast<int64_t>(bag_of.size());
    const auto bags = static_cast<int64_t>(num_bags);
    Status status;
    if (form == Form::kUniform) {
      status = task->bags.InitUniform(static_cast<int64_t>(hotness), nnz, bags);
    } else if (form == Form::kSplits) {
      of = {0};
      for (const size_t size : sizes) of.push_back(of.back() + static_cast<int64_t>(size));
      status = task->bags.InitSplits(exec_, of.data(), bags + 1, nnz, bags);
    } else {
      if (form == Form::kDescending) std::reverse(bag_of.begin(), bag_of.end());
      if (form == Form::kShuffled) std::shuffle(bag_of.begin(), bag_of.end(), random_);
      of = bag_of;
      status = task->bags.InitIndices(exec_, of.data(), 1, nnz, bags);
    }
    ASSERT_TRUE(status.ok()) << status.message();
    for (size_t i = 0; i < bag_of.size(); ++i) {
      task->keys.push_back(key_size_ == 8 ? random_() : random_() >> 32);
      const bool missing = random_() % 6 == 0;
      const auto row =
          static_cast<RowId>(random_() % (special ? Rows::kCount : Rows::kFirstSpecial));
      task->rows.push_back(missing ? kNoRow : row);
      if (!weighted) continue;
      // In some bags nothing counts, or weights of an even number of ids add up to 0.
      float weight = Number(&random_, special);
      if (bag_of[i] % 4 == 1) weight = 0.0f;
      if (bag_of[i] % 4 == 2) weight = i % 2 == 0 ? 1.5f : -1.5f;
      task->weights.push_back(weight);
    }
    tasks_.push_back(std::move(task));
  }
  // A task whose every id has this row.
  Task& AddBag(uint32_t table, Combiner combiner, std::vector<RowId> rows,
               std::vector<float> weights = {}) {
    auto task = std::make_unique<Task>();
    task->table = table;
    task->combiner = combiner;
    const auto nnz = static_cast<int64_t>(rows.size());
    EXPECT_TRUE(task->bags.InitUniform(nnz, nnz, 1).ok());
    task->keys.assign(rows.size(), 7);
    task->rows = std::move(rows);
    task->weights = std::move(weights);
    tasks_.push_back(std::move(task));
    return *tasks_.back();
  }

  Rows& RowsOf(const Task& task) { return *tables_[task.table]; }
  const std::vector<std::unique_ptr<Task>>& tasks() const { return tasks_; }

  std::vector<char> Vector(const Task& task, size_t position) {
    return RowsOf(task).Vector(task.rows[position], task.keys[position]);
  }
  BagTask HostTask(const Task& task, void* pooled, int32_t* argmax) const {
    return {&task.bags, task.weights_or_null(), task.combiner, pooled, argmax};
  }

  // Keys and rows of all tasks; between them are ids that are nobody's.
  struct Ids {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> small_keys;
    std::vector<RowId> rows;
  };
  Ids AllIds() {
    Ids ids;
    for (const auto& task : tasks_) {
      ids.keys.insert(ids.keys.end(), 3, 11);
      ids.rows.insert(ids.rows.end(), 3, 1);
      task->first_id = static_cast<uint32_t>(ids.keys.size());
      ids.keys.insert(ids.keys.end(), task->keys.begin(), task->keys.end());
      ids.rows.insert(ids.rows.end(), task->rows.begin(), task->rows.end());
    }
    for (const uint64_t key : ids.keys) ids.small_keys.push_back(static_cast<uint32_t>(key));
    return ids;
  }
  KeyArray Keys(const Ids& ids) const {
    if (key_size_ == 8) return {ids.keys.data(), 8};
    return {ids.small_keys.data(), 4};
  }

  template <class Session>
  TableViews Views(Session& session) {
    TableViews views;
    views.count = static_cast<uint32_t>(tables_.size());
    if (views.count == 1) {
      views.one = tables_[0]->View();
    } else {
      std::vector<TableView> many;
      for (const auto& table : tables_) many.push_back(table->View());
      views.many = ToDevice(session, many.data(), many.size());
    }
    return views;
  }

 private:
  const size_t key_size_;
  Random random_;
  SerialExec exec_;
  std::vector<std::unique_ptr<Rows>> tables_;
  std::vector<std::unique_ptr<Task>> tasks_;
};

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

// What PoolBags gives, for each task.
template <class Device>
std::vector<Pooled> PoolOnDevice(Batch* batch) {
  Device device;
  ThreadsExec exec(2);
  typename Device::Session session(device, &exec);
  const Batch::Ids ids = batch->AllIds();
  std::vector<Pooled> results;
  std::vector<PoolPart<TableVectors>> parts;
  std::vector<uint32_t> begins{0};
  for (const auto& task : batch->tasks()) {
    results.emplace_back(batch->RowsOf(*task).layout(), *task);
    PoolPart<TableVectors> part;
    SetIds(session, *task, &part);
    part.pooled = results.back().vectors.data();
    part.argmax = results.back().argmax_or_null();
    parts.push_back(part);
    begins.push_back(begins.back() + part.bags.num_bags);
  }
  const TableVectors source{batch->Views(session), batch->Keys(ids), ids.rows.data()};
  const PoolBags<TableVectors> body{source, ToDevice(session, parts, begins)};
  session.ForRows(begins.back(), /*quads=*/1, body);
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

// What BagWeightGradients gives against WeightGradientOfBags, both from what the host has pooled.
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
    // Without guards: address sanitizer sees what is read behind an end.
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

// Every element type and dim, a table for each, with every combiner and form of bags.
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

TYPED_TEST(DevicePoolKernels, BagsAreCombinedAsOnTheHost) {
  for (const size_t key_size : {size_t{4}, size_t{8}}) {
    for (const bool special : {false, true}) {
      ExpectPooledAsOnHost<TypeParam>(AllTasks(key_size, special, false).get());
    }
  }
}

TYPED_TEST(DevicePoolKernels, WeightGradientsAreThoseOfTheHost) {
  for (const size_t key_size : {size_t{4}, size_t{8}}) {
    for (const bool special : {false, true}) {
      ExpectWeightGradientsAsOnHost<TypeParam>(AllTasks(key_size, special, true).get(), special);
    }
  }
}

TYPED_TEST(DevicePoolKernels, ABatchMayHaveOneTable) {
  Batch batch(8, {{DType::kFloat16, 33}}, 9);
  for (const Combiner combiner : kCombiners) {
    for (const Form form : kForms) batch.AddTask(0, combiner, true, form, false);
  }
  ExpectPooledAsOnHost<TypeParam>(&batch);
  ExpectWeightGradientsAsOnHost<TypeParam>(&batch, false);
}

// However many ids a bag has behind the last that are read at once, and wherever rows are missing.
TYPED_TEST(DevicePoolKernels, BagsOfAnySizeMayMissAnyRow) {
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
    memcpy(rows.layout().vector(rows.View().RowAt(row)), &values[row], sizeof(float));
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
