// Cases for tests of SumGradients: their tasks, the sums that the rule of sum_gradients.h expects,
// and memory for outputs.
#ifndef DYNEMB_TESTS_CC_DEVICE_GRADIENT_CASES_H_
#define DYNEMB_TESTS_CC_DEVICE_GRADIENT_CASES_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cc/device/sum_gradients.h"
#include "tests/cc/backward_model.h"
#include "tests/cc/device_gradient_model.h"

namespace dynemb {

using Cases = std::vector<std::unique_ptr<Case>>;

inline std::vector<BackwardTask> TasksOf(const Cases& cases) {
  std::vector<BackwardTask> tasks;
  for (const auto& c : cases) tasks.push_back(c->task);
  return tasks;
}

inline uint64_t KeyOf(const Case& c, size_t i) {
  return c.task.key_type == KeyType::kInt32 ? c.keys32[i] : c.keys[i];
}

inline void SetKey(Case* c, size_t i, uint64_t key) {
  c->keys[i] = key;
  c->keys32[i] = static_cast<uint32_t>(key);
}

// The unique keys are in the order of their first ids.
inline Result Expected(const Case& c) {
  const BackwardTask& t = c.task;
  const auto dim = static_cast<size_t>(t.dim);
  Result result;
  std::map<uint64_t, std::vector<size_t>> positions;
  for (size_t i = 0; i < c.bags.nnz(); ++i) {
    std::vector<size_t>& of = positions[KeyOf(c, i)];
    if (of.empty()) {
      result.keys.push_back(KeyOf(c, i));
      if (t.rows != nullptr) result.rows.push_back(t.rows[i]);
    }
    of.push_back(i);
  }
  for (const uint64_t key : result.keys) {
    for (size_t column = 0; column < dim; ++column) {
      std::vector<float> terms;
      for (const size_t i : positions[key]) terms.push_back(TermOf(c, i, column));
      result.sums.push_back(SumInChunks(terms));
    }
  }
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

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_DEVICE_GRADIENT_CASES_H_
