// Batches for tests of the pooling kernels: rows in two tiers, and tasks of every form.
#ifndef DYNEMB_TESTS_CC_DEVICE_POOL_BATCH_H_
#define DYNEMB_TESTS_CC_DEVICE_POOL_BATCH_H_

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

namespace dynemb::device {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
constexpr int64_t kDims[] = {1, 3, 4, 8, 33, 128};
constexpr Combiner kCombiners[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn,
                                   Combiner::kMax};
enum class Form { kUniform, kSplits, kDescending, kShuffled };
constexpr Form kForms[] = {Form::kUniform, Form::kSplits, Form::kDescending, Form::kShuffled};
constexpr unsigned char kGuard = 0xA5;
constexpr size_t kGuards = 32;

using Random = std::mt19937_64;

// Ordinary numbers. If `special`, a quarter of them are special values.
inline float Number(Random* random, bool special) {
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

// Rows in two arrays, which represent two tiers. Rows from kFirstSpecial on have special values.
class Rows {
 public:
  static constexpr RowId kCount = 40, kSplit = 27, kFirstSpecial = 20;

  Rows(DType dtype, int64_t dim, size_t key_size, uint64_t seed, Random* random)
      : layout_(key_size, dtype, dim, 2, 16),
        device_(kSplit * layout_.content_bytes() / sizeof(Quad<float>)),
        host_((kCount - kSplit) * layout_.content_bytes() / sizeof(Quad<float>)) {
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
      char* const at = View().VectorAt(row);
      memset(at, kGuard, layout_.content_bytes());
      std::vector<float> vector(static_cast<size_t>(dim));
      for (float& v : vector) v = Number(random, row >= kFirstSpecial);
      StoreVector(dtype, vector.data(), dim, at);
    }
  }

  TableView View() {
    TableView view;
    view.rows = {reinterpret_cast<char*>(device_.data()), reinterpret_cast<char*>(host_.data()),
                 kSplit, layout_.content_bytes()};
    view.layout = layout_;
    view.initial = {initializer_.seed(), initializer_.dim(), initializer_.runs().data(),
                    static_cast<uint32_t>(initializer_.runs().size())};
    return view;
  }
  const RowLayout& layout() const { return layout_; }

  // The vector that the host reads for an id.
  std::vector<char> Vector(RowId row, uint64_t key) {
    std::vector<char> vector(layout_.vector_bytes());
    if (row != kNoRow) {
      memcpy(vector.data(), View().VectorAt(row), vector.size());
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

// An array that kernels write to. It initially holds garbage, and is followed by guards.
template <class T>
struct Output {
  explicit Output(size_t n) : bytes(n * sizeof(T) + kGuards, kGuard) {}
  T* data() { return reinterpret_cast<T*>(bytes.data()); }
  std::vector<unsigned char> bytes;
};

// Replaces all NaNs by the same one, because the bits of a NaN are not compared.
inline std::vector<unsigned char> OneNan(DType dtype, std::vector<unsigned char> bytes) {
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

  // `special`: rows and weights may have special values. One id in six has no row.
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
      // In some bags all weights are 0, or the weights of an even number of ids add up to 0.
      float weight = Number(&random_, special);
      if (bag_of[i] % 4 == 1) weight = 0.0f;
      if (bag_of[i] % 4 == 2) weight = i % 2 == 0 ? 1.5f : -1.5f;
      task->weights.push_back(weight);
    }
    tasks_.push_back(std::move(task));
  }
  // A task of one bag with these rows. All ids have the same key.
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

  // The keys and rows of all tasks, separated by ids that belong to no task.
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

}  // namespace dynemb::device

#endif  // DYNEMB_TESTS_CC_DEVICE_POOL_BATCH_H_
