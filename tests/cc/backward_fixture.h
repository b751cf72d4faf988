// Cases for tests of Backward, on a device SumGradients: their tasks, expected sums, memory for
// outputs, and the fixture that is typed by Places.
#ifndef DYNEMB_TESTS_CC_BACKWARD_FIXTURE_H_
#define DYNEMB_TESTS_CC_BACKWARD_FIXTURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "cc/device/sum_gradients.h"
#include "cc/lookup/backward.h"
#include "tests/cc/backward_model.h"
#include "tests/cc/gather_model.h"
#include "tests/cc/places.h"

namespace dynemb {

using Cases = std::vector<std::unique_ptr<Case>>;

inline std::vector<BackwardTask> TasksOf(const Cases& cases) {
  std::vector<BackwardTask> tasks;
  for (const auto& c : cases) tasks.push_back(c->task);
  return tasks;
}

// The unique keys, in the order of their first ids, and their sums.
inline Result Expected(const Case& c, bool in_chunks) {
  Result result;
  std::map<uint64_t, uint32_t> numbers;
  std::vector<uint32_t> index;  // the number of each id's key
  for (size_t i = 0; i < c.bags.nnz(); ++i) {
    const auto number = static_cast<uint32_t>(numbers.size());
    const auto [it, is_new] = numbers.try_emplace(KeyOf(c, i), number);
    index.push_back(it->second);
    if (!is_new) continue;
    result.keys.push_back(KeyOf(c, i));
    if (c.task.rows != nullptr) result.rows.push_back(c.task.rows[i]);
  }
  result.sums = ExactSums(numbers.size(), c.task.dim, {{&c, &index}}, in_chunks);
  return result;
}

// Uninitialized memory for the outputs, with a guard after each array.
struct Outputs {
  std::vector<Result> results;
  std::vector<std::vector<uint32_t>> keys32;
  std::vector<size_t> num_unique;  // as passed for each task, in order

  explicit Outputs(const std::vector<BackwardTask>& tasks)
      : results(tasks.size()), keys32(tasks.size()), tasks_(tasks) {}

  Status operator()(size_t t, size_t n, BackwardOutput* output) {
    EXPECT_EQ(t, num_unique.size());
    num_unique.push_back(n);
    results[t].keys.assign(n + 1, kGuard);
    keys32[t].assign(n + 1, static_cast<uint32_t>(kGuard));
    results[t].rows.assign(tasks_[t].rows == nullptr ? 0 : n + 1, static_cast<RowId>(kGuard));
    results[t].sums.assign(n * static_cast<size_t>(tasks_[t].dim) + 1,
                           std::numeric_limits<float>::quiet_NaN());
    output->keys = tasks_[t].key_type == KeyType::kInt32
                       ? static_cast<void*>(keys32[t].data())
                       : static_cast<void*>(results[t].keys.data());
    output->rows = tasks_[t].rows == nullptr ? nullptr : results[t].rows.data();
    output->sums = results[t].sums.data();
    return Status();
  }

  // Whether nothing was written, for tasks with 64-bit keys.
  bool Untouched() const {
    return std::all_of(results.begin(), results.end(), [](const Result& r) {
      return std::all_of(r.keys.begin(), r.keys.end(), [](uint64_t k) { return k == kGuard; }) &&
             std::all_of(r.sums.begin(), r.sums.end(), [](float x) { return std::isnan(x); });
    });
  }

  std::vector<Result> Take() {
    EXPECT_EQ(num_unique.size(), results.size());
    for (size_t t = 0; t < results.size(); ++t) {
      Result& r = results[t];
      if (tasks_[t].key_type == KeyType::kInt32) r.keys.assign(keys32[t].begin(), keys32[t].end());
      EXPECT_EQ(static_cast<uint32_t>(r.keys.back()), static_cast<uint32_t>(kGuard));
      r.keys.pop_back();
      if (!r.rows.empty()) {
        EXPECT_EQ(r.rows.back(), static_cast<RowId>(kGuard));
        r.rows.pop_back();
      }
      EXPECT_TRUE(std::isnan(r.sums.back()));
      r.sums.pop_back();
    }
    return std::move(results);
  }

 private:
  static constexpr uint64_t kGuard = 0xDEADBEEFDEADBEEFull;
  const std::vector<BackwardTask>& tasks_;
};

inline Status SumAt(HostPlace& at, const std::vector<BackwardTask>& tasks, Outputs* outputs,
                    Backward* scratch) {
  DYNEMB_RETURN_IF_ERROR(scratch->Prepare(at.exec(), tasks.data(), tasks.size()));
  std::vector<BackwardOutput> to(tasks.size());
  for (size_t t = 0; t < tasks.size(); ++t) {
    DYNEMB_RETURN_IF_ERROR((*outputs)(t, scratch->num_unique(t), &to[t]));
  }
  scratch->Write(at.exec(), to.data());
  return Status();
}
template <class Device>
Status SumAt(DevicePlace<Device>& at, const std::vector<BackwardTask>& tasks, Outputs* outputs,
             Backward*) {
  const bool some = std::any_of(tasks.begin(), tasks.end(), [](const BackwardTask& t) {
    return t.bags != nullptr && t.bags->nnz() != 0;
  });
  return at.Call(
      [&](auto& session) { return device::SumGradients(session, tasks, std::ref(*outputs)); },
      some ? 1 : 0);
}

// The result in the order of its keys.
inline Result Sorted(const Result& result, size_t dim) {
  std::vector<size_t> order(result.keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return result.keys[a] < result.keys[b]; });
  Result sorted;
  for (const size_t u : order) {
    sorted.keys.push_back(result.keys[u]);
    if (!result.rows.empty()) sorted.rows.push_back(result.rows[u]);
    sorted.sums.insert(sorted.sums.end(), &result.sums[u * dim], &result.sums[u * dim] + dim);
  }
  return sorted;
}

template <class Place>
class BackwardFixture : public testing::Test {
 protected:
  static constexpr bool kIsHost = Place::kIsHost;
  static constexpr bool kSlow = Place::kSlow;

  Status TrySum(const std::vector<BackwardTask>& tasks, Outputs* outputs) {
    return SumAt(place_, tasks, outputs, &scratch_);
  }

  std::vector<Result> Sum(const std::vector<BackwardTask>& tasks) {
    Outputs outputs(tasks);
    const Status status = TrySum(tasks, &outputs);
    EXPECT_TRUE(status.ok()) << status.message();
    return outputs.Take();
  }

  // Every feature of the tables is a task.
  void CheckAll(const GradientCases& tables) {
    std::vector<const Case*> cases;
    for (const GradientCase& table : tables) {
      for (const GatherCase& feature : table.features) cases.push_back(feature.ids.get());
    }
    CheckAll(cases);
  }
  void CheckAll(const Cases& cases) {
    std::vector<const Case*> pointers;
    for (const auto& c : cases) pointers.push_back(c.get());
    CheckAll(pointers);
  }
  // Checks the sums, bit by bit.
  void CheckAll(const std::vector<const Case*>& cases) {
    std::vector<Result> expected;
    for (const Case* c : cases) expected.push_back(Expected(*c, !kIsHost));
    std::vector<BackwardTask> tasks;
    for (const Case* c : cases) tasks.push_back(c->task);
    std::vector<Result> first;
    place_.ForEach([&] {
      const std::vector<Result> results = Sum(tasks);
      if (first.empty()) first = results;
      for (size_t t = 0; t < tasks.size(); ++t) {
        SCOPED_TRACE(testing::Message() << "task " << t);
        ASSERT_NO_FATAL_FAILURE(ExpectResult(tasks[t], results[t], expected[t]));
        ASSERT_TRUE(results[t] == first[t]) << "the order depends on the Exec";
      }
    });
    if (kSlow || HasFatalFailure()) return;
    std::vector<ScatteredRows> rows;
    for (BackwardTask& task : tasks) {
      if (task.upstream != nullptr) rows.emplace_back(&task);
    }
    const std::vector<Result> results = Sum(tasks);
    for (size_t t = 0; t < tasks.size(); ++t) {
      ASSERT_TRUE(results[t] == first[t]) << "task " << t << ", scattered rows";
    }
  }

  Place place_;

 private:
  // The order of keys is defined on devices only.
  static void ExpectResult(const BackwardTask& task, const Result& result, const Result& expected) {
    const auto dim = static_cast<size_t>(task.dim);
    const Result got = kIsHost ? Sorted(result, dim) : result;
    const Result want = kIsHost ? Sorted(expected, dim) : expected;
    ASSERT_EQ(got.keys, want.keys);
    ASSERT_EQ(got.rows, want.rows);
    ASSERT_EQ(got.sums.size(), want.sums.size());
    for (size_t u = 0; u < want.keys.size(); ++u) {
      ASSERT_TRUE(SameBits(&got.sums[u * dim], &want.sums[u * dim], dim))
          << "key " << u << " of " << want.keys.size();
    }
  }

  Backward scratch_;  // reused
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_BACKWARD_FIXTURE_H_
